"""The server as a whole: listens, serves, keeps up, stops."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.bucket_event import EventFilter, EventKind
from upr_protocol.errors import Status
from upr_protocol.ids import PartitionId
from upr_server.buckets import BucketCatalog, Upkeep
from upr_server.config import ServerConfig
from upr_server.engine import Bucket
from upr_server.events import EventBatch, EventBus
from upr_server.net import HANDLERS, ConnectionServer
from upr_server.replication import CopyCompletion, MapExchange, PartitionMaps, UserExchange
from upr_server.runtime import (
    AuditLog,
    BoundListeners,
    Certificates,
    System,
    certificate_files,
    essential,
)
from upr_server.storage.api import Store
from upr_server.storage.calls import TakeEventQueues
from upr_server.storage.errors import CorruptionError, StoreFailedError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.maintenance import IDLE_S, REST_S
from upr_server.user_store import UserStore

UPKEEP_CONSUMER: Final = ".upkeep"
UPKEEP_TIMEOUT_S: Final = 60.0

log = structlog.get_logger(__name__)


class Server:
    """A server: its parts, put together. Nothing runs yet.

    Args:
        config: What it is told.
        store: Its disk.
        system: Its clock, random numbers and network.
        bus: The event bus; None for none.
        port: The port it listens on.
        certificates: Encrypts its connections; None for connections in the clear.
        audit_log: Where it is noted who asked for what; None for nowhere.

    Attributes:
        host: The address it listens on.
        port: The port it listens on; 0 for a server that does not listen.
        certificates: See above.
        upkeep: Works on the buckets.
        catalog: The buckets.
        users: The users of the cluster, and what they may do.
        partition_maps: Their partition maps.
        events: The event bus; None for none.
        connections: Serves connections.
    """

    def __init__(
        self,
        config: ServerConfig,
        store: Store,
        system: System,
        bus: EventBus | None = None,
        port: int = 0,
        certificates: Certificates | None = None,
        audit_log: AuditLog | None = None,
    ) -> None:
        self.host, _ = config.address()
        self.port = port
        self.certificates = certificates
        identity = config.identity or socket.gethostname()
        self.upkeep = Upkeep(system.time)
        self.catalog = BucketCatalog(
            store,
            self.upkeep,
            quota_bytes_default=config.quota_bytes,
            quotas={
                bucket.name: bucket.quota_bytes for bucket in config.buckets if bucket.quota_bytes
            },
            partitions_max=config.partitions_max,
            time=system.time,
            new_id=system.new_id,
            purge_age_s=config.purge_age_s,
            observer=None if bus is None else bus.producer,
            rest_s=IDLE_S if bus is None else REST_S,
        )
        self.users = UserStore(store)
        self.partition_maps = PartitionMaps(
            self,
            config.node or identity,
            system,
            config.undo_mutations,
            [bucket.name for bucket in config.buckets],
        )
        self.events = bus
        self.connections = ConnectionServer(
            self.catalog,
            self.users,
            self.upkeep,
            self.partition_maps,
            bus,
            HANDLERS,
            identity=identity,
            time=system.time,
            connections_max=config.connections_max,
            send_timeout_s=config.send_timeout_s,
            replication_timeout_s=config.replication_timeout_s,
            certificates=certificates,
            audit_log=audit_log,
        )

    def url(self, bucket: str = "") -> str:
        """`upr://HOST:PORT/bucket`, or `uprs://…` with a certificate."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "upr" if self.certificates is None else "uprs"
        return f"{scheme}://{host}:{self.port}/{bucket}"

    def recovered_buckets(self) -> AbstractAsyncContextManager[None]:
        """The buckets that are on disk, for as long as the context; see `BucketCatalog`."""
        return self.catalog.recovered_buckets(self.partition_maps)

    # What replication needs: `LocalServer` documents these.

    def disk_of(self, bucket: str) -> BucketDisk | None:
        return self.catalog.disk_of(bucket)

    async def create_dead_bucket(self, name: str, partition_count: int) -> BucketDisk:
        return await self.catalog.create_dead_bucket(name, partition_count)

    def end_streams(
        self,
        bucket: Bucket,
        partitions: Container[PartitionId],
        status: Status,
        *,
        of_replicas: bool = True,
    ) -> Iterator[None]:
        return self.connections.end_streams(bucket, partitions, status, of_replicas=of_replicas)

    def streams_may_begin(self) -> None:
        self.connections.resources.streams_may_begin.notify()


@asynccontextmanager
async def running_server(
    config: ServerConfig,
    store: Store,
    system: System | None = None,
    audit_log: AuditLog | None = None,
) -> AsyncIterator[Server]:
    """A server that runs for as long as the context.

    On leaving it, the server stops listening, ends every stream with a reason, gives its peers
    `shutdown_deadline_s` to take what is queued, and brings everything to disk. Cancelled, it drops
    them at once, and what is in memory only.

    Args:
        config: What it is told.
        store: Its disk.
        system: Its clock, chance and network; by default the real ones.
        audit_log: Where it is noted who asked for what, if there are users; None for nowhere. It is
            started and stopped here.

    Raises:
        ConfigError: Strangers could do what they like; see `ServerConfig.check_exposure`.
        AuditLogError: The audit log cannot be written.
        TlsError: A certificate cannot be used.
        ListenError: The address cannot be listened on.
        StorageError: The disk failed.
    """
    files = certificate_files(config)
    certificates = None if files is None else Certificates(files)
    # What this server shows other nodes, and expects of them.
    system = system or System()
    system = attrs.evolve(system, security=config.node_security())
    bus = None
    if config.events:
        # The system's clock may be set: consumers would then count as dead, or as alive for hours.
        bus = EventBus(store, time=trio.current_time, new_id=system.new_id)
    # The server listens first: if the address is in use, the start fails before it touches a
    # bucket. A client that connects early waits until it is served.
    async with system.bind(config.listen) as bound, trio.open_nursery() as nursery:
        server = Server(config, store, system, bus, bound.port, certificates, audit_log)
        nursery.start_soon(essential(_end_when_failed), store)
        await server.users.load()
        has_users = not server.users.users.is_open
        config.check_exposure(has_users=has_users)
        async with _noting(audit_log if has_users else None), server.recovered_buckets():
            # The queues are restored after the disk was checked, as a start that fails must change
            # nothing. They are restored before any bucket changes, as they must count that change.
            if bus is not None:
                await bus.restore()
            else:
                # A later start with a bus must not find queues that miss what happens now.
                await _discard_event_queues(store)
            await _create_configured(server.catalog, config)
            async with _maintaining(server), _accepting(config, server, bound):
                yield server
        # Everything is on disk.
        if bus is not None:
            await bus.save()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _noting(audit_log: AuditLog | None) -> AsyncIterator[None]:
    """Writes the audit log, if there is one."""
    if audit_log is None:
        yield
        return
    audit_log.start()
    try:
        yield
    finally:
        audit_log.stop()


@asynccontextmanager
async def _maintaining(server: Server) -> AsyncIterator[None]:
    """Runs the event bus. It wakes the maintenance of updated buckets, which rests otherwise."""
    bus = server.events
    if bus is None:
        yield
        return

    def wake_maintenance(batch: EventBatch) -> None:
        updated = {event.bucket for event in batch.events}
        for bucket, disk in server.catalog.disks.items():
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


async def _create_configured(catalog: BucketCatalog, config: ServerConfig) -> None:
    """Creates the buckets of the configuration that do not exist."""
    for bucket_config in config.buckets:
        if bucket_config.name in catalog.damaged:
            continue
        bucket = catalog.buckets.get(bucket_config.name)
        if bucket is None:
            quota_bytes = bucket_config.quota_bytes or config.quota_bytes
            await catalog.create_bucket(bucket_config.name, bucket_config.partitions, quota_bytes)
            continue
        if bucket_config.partitions != len(bucket.partitions):
            log.warning(
                "bucket keeps its partitions; their number cannot be changed",
                bucket=bucket.name,
                partitions=len(bucket.partitions),
                configured=bucket_config.partitions,
            )


async def _end_when_failed(store: Store) -> None:
    """Ends the server when its disk has failed: nothing may be acknowledged any more."""
    await store.failed.wait()
    raise StoreFailedError(store.failure)


@asynccontextmanager
async def _accepting(
    config: ServerConfig, server: Server, bound: BoundListeners
) -> AsyncIterator[None]:
    # Two nurseries: the inner one stops taking connections, the outer one lets those there are end.
    async with trio.open_nursery() as handlers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(essential(server.upkeep.run_collapsing))
            nursery.start_soon(essential(server.upkeep.run_freeing))
            nursery.start_soon(essential(server.upkeep.run_expiring))
            nursery.start_soon(essential(server.upkeep.run_returning_memory))
            nursery.start_soon(essential(server.connections.resources.frame_budget.run))
            nursery.start_soon(essential(server.connections.resources.step_writes.run))
            nursery.start_soon(essential(server.connections.resources.connection_ends.run))
            nursery.start_soon(essential(server.connections.resources.reply_steps.run))
            nursery.start_soon(essential(server.partition_maps.run))
            nursery.start_soon(essential(MapExchange(server.partition_maps).run))
            nursery.start_soon(essential(CopyCompletion(server.partition_maps).run))
            nursery.start_soon(essential(UserExchange(server.users, server.partition_maps).run))
            if server.certificates is not None:
                nursery.start_soon(essential(server.certificates.watch))
            # trio's loop goes on when descriptors run out: it logs the error and waits a moment.
            accept = partial(trio.serve_listeners, handler_nursery=handlers)
            await nursery.start(accept, server.connections.serve, bound.listeners)
            yield
            nursery.cancel_scope.cancel()
        handlers.cancel_scope.deadline = trio.current_time() + config.shutdown_deadline_s
        for _ in server.connections.shut_down():
            await trio.lowlevel.checkpoint()
