"""The server as a whole: listens, serves, keeps up, stops."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Final

import structlog
import trio

from upr_protocol.bucket_event import EventFilter, EventKind
from upr_server.config import BucketConfig, Config
from upr_server.engine import Bucket
from upr_server.events import EventBatch, EventBus
from upr_server.net import Service
from upr_server.replication import MapExchange, Membership
from upr_server.runtime import BoundListeners, System, run_until_signal
from upr_server.storage.api import Store
from upr_server.storage.calls import TakeEventQueues
from upr_server.storage.errors import CorruptionError, StoreFailedError
from upr_server.storage.online.maintenance import IDLE_S, REST_S
from upr_server.storage.processes import open_store

UPKEEP_CONSUMER: Final = ".upkeep"
UPKEEP_TIMEOUT_S: Final = 60.0

log = structlog.get_logger(__name__)


class Server:
    """A running server.

    Attributes:
        host: The address it listens on.
        port: The port it listens on, never 0.
        service: Its buckets and connections.
    """

    def __init__(self, host: str, port: int, service: Service) -> None:
        self.host = host
        self.port = port
        self.service = service

    def url(self, bucket: str = "") -> str:
        """`upr://HOST:PORT/bucket`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"upr://{host}:{self.port}/{bucket}"


@asynccontextmanager
async def running_server(
    config: Config, store: Store | None = None, system: System | None = None
) -> AsyncIterator[Server]:
    """A server that runs for as long as the context.

    On leaving it, the server stops listening, ends every stream with a reason, gives its peers
    `shutdown_deadline_s` to take what is queued, and brings everything to disk. Cancelled, it drops
    them at once, and what is in memory only.

    Args:
        config: What it is told.
        store: Its disk; by default that of the data directory.
        system: Its clock, chance and network; by default the real ones.

    Raises:
        ListenError: The address cannot be listened on.
        StorageError: The data directory cannot be used, or the disk failed.
    """
    system = system or System()
    async with AsyncExitStack() as stack:
        if store is None:
            store = await stack.enter_async_context(
                open_store(config.data_path(), bytes_max=config.disk_bytes_max)
            )
        bus = None
        if config.events:
            bus = EventBus(store, time=system.time, new_id=system.new_history_id)
        yield await stack.enter_async_context(_serving(config, store, bus, system))


@asynccontextmanager
async def _serving(
    config: Config, store: Store, bus: EventBus | None, system: System
) -> AsyncIterator[Server]:
    service = Service(
        store,
        identity=config.identity or socket.gethostname(),
        quota_bytes_default=config.quota_bytes,
        time=system.time,
        new_history_id=system.new_history_id,
        connections_max=config.connections_max,
        send_timeout_s=config.send_timeout_s,
        purge_age_s=config.purge_age_s,
        replication_timeout_s=config.replication_timeout_s,
        listener=None if bus is None else bus.producer,
        rest_s=IDLE_S if bus is None else REST_S,
    )
    if bus is not None:
        service.events = bus
    node = config.node or config.identity or socket.gethostname()
    membership = Membership(service, node, system, config.undo_mutations)
    service.cluster = membership
    # An address that is not to be had is noticed before anything of a bucket is touched; who
    # connects before it is read waits for that.
    async with system.bind(config.listen) as bound, trio.open_nursery() as nursery:
        nursery.start_soon(_watch, store)
        async with service.recovered():
            # Not before the disk was found to be in order: a start that fails changes nothing. And
            # before any bucket changes, as that has to be counted in the restored queues.
            if bus is not None:
                await bus.restore()
            else:
                # A later start with a bus must not find queues that miss what happens now.
                await _discard_event_queues(store)
            for wanted in config.buckets:
                found = service.buckets.get(wanted.name)
                if found is None:
                    quota_bytes = wanted.quota_bytes or config.quota_bytes
                    await service.create_bucket(wanted.name, wanted.partitions, quota_bytes)
                else:
                    _adapt(found, wanted)
            async with (
                _told(service, bus),
                _accepting(config, service, membership, bound) as server,
            ):
                yield server
        # Everything is on disk.
        if bus is not None:
            await bus.save()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _told(service: Service, bus: EventBus | None) -> AsyncIterator[None]:
    """Has the bus tell, the server's own upkeep among others: it indexes and compacts the buckets
    that were updated, which rest otherwise."""
    if bus is None:
        yield
        return

    def wake_maintenance(batch: EventBatch) -> None:
        updated = {event.bucket for event in batch.events}
        for bucket, disk in service.disks.items():
            if batch.everything or bucket.name in updated:
                disk.maintenance.wake()

    updates = EventFilter(EventKind.UPDATED)
    async with bus.running():
        consumer = bus.local_consumer(UPKEEP_CONSUMER, UPKEEP_TIMEOUT_S)
        with consumer.subscribed(wake_maintenance, updates):
            yield


async def _discard_event_queues(store: Store) -> None:
    with suppress(CorruptionError):
        await store.ask(TakeEventQueues())


def _adapt(found: Bucket, wanted: BucketConfig) -> None:
    """Gives a bucket that is there already the quota of the configuration."""
    if wanted.quota_bytes:
        found.quota.limit_bytes = wanted.quota_bytes
    if wanted.partitions != len(found.partitions):
        log.warning(
            "the bucket keeps the partitions that it was made with",
            bucket=found.name,
            partitions=len(found.partitions),
            configured=wanted.partitions,
        )


async def _watch(store: Store) -> None:
    """Ends the server when its disk has failed: nothing may be acknowledged any more."""
    await store.failed.wait()
    raise StoreFailedError(store.failure)


@asynccontextmanager
async def _accepting(
    config: Config, service: Service, membership: Membership, bound: BoundListeners
) -> AsyncIterator[Server]:
    host, _ = config.address()
    # Two nurseries: the inner one stops taking connections, the outer one lets those there are end.
    async with trio.open_nursery() as handlers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.collapse)
            nursery.start_soon(service.free_memory)
            nursery.start_soon(service.expire)
            nursery.start_soon(membership.run)
            nursery.start_soon(MapExchange(membership).run)
            # trio's loop goes on when descriptors run out: it logs the error and waits a moment.
            accept = partial(trio.serve_listeners, handler_nursery=handlers)
            await nursery.start(accept, service.serve, bound.listeners)
            yield Server(host, bound.port, service)
            nursery.cancel_scope.cancel()
        service.shut_down()
        handlers.cancel_scope.deadline = trio.current_time() + config.shutdown_deadline_s


async def serve(config: Config, on_listening: Callable[[Server], None]) -> None:
    """Runs a server until SIGINT or SIGTERM. A second one, while peers still take what is queued,
    drops them at once.

    Args:
        config: What it is told.
        on_listening: Called once it listens.
    """

    def on_running(server: Server) -> None:
        on_listening(server)
        log.info("listening", host=server.host, port=server.port)

    await run_until_signal(running_server(config), on_running)
