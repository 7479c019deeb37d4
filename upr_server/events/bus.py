"""The event bus of one node: producer, consumers, and who looks after the dead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from upr_protocol.bucket_event import BucketEvent, EventFilter
from upr_protocol.concurrency import background
from upr_server.events import keys, queues
from upr_server.events.bell import Bell
from upr_server.events.consumer import Consumer
from upr_server.events.feeds import Feeds
from upr_server.events.producer import Producer
from upr_server.events.store import EventStore
from upr_server.events.worker import Worker
from upr_server.storage.errors import StorageError

LOOK_S: Final = 1.0
"""How often the consumers' health is looked at, at the least: the shortest timeout there is."""

LOOK_S_MIN: Final = 0.05
"""How long to wait at the least: the clock that consumers are held to may stand still."""

log = structlog.get_logger(__name__)


class EventBus:
    """See the module. Whom the engine tells is there from the beginning, and gathers; all else is
    while it is `running`.

    Args:
        store: Where the queues are.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number.

    Attributes:
        producer: Whom the engine tells.
    """

    def __init__(
        self, store: EventStore, *, time: Callable[[], float], new_id: Callable[[], int]
    ) -> None:
        self._store = store
        self._time = time
        self._bell = Bell()
        self._feeds = Feeds(store, self._bell, time, new_id)
        self._workers: dict[str, Worker] = {}
        self._nursery: trio.Nursery | None = None
        self._cleared = 0
        self.producer = Producer(store, self._bell.ring)

    async def next_events(
        self,
        consumer: str,
        wanted: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
    ) -> tuple[int, bool, tuple[BucketEvent, ...]]:
        """See `Feeds.next`; the number of a batch, whether to look at everything, and events."""
        batch = await self._feeds.next(
            consumer, wanted, timeout_s=timeout_s, acknowledged=acknowledged, wait_s=wait_s
        )
        return batch.number, batch.everything, batch.events

    def worker(self, name: str, timeout_s: float) -> Worker:
        """The worker of this node for a consumer of its own; all who ask for the name share it.

        Args:
            name: The consumer's name. It begins with a dot, which none of those that come over a
                connection does.
            timeout_s: For how long its queue is kept when this node is away.
        """
        assert keys.is_own(name)
        assert self._nursery is not None
        worker = self._workers.get(name)
        if worker is None:
            consumer = Consumer(self._store, name, timeout_s, self._time)
            worker = self._workers[name] = Worker(consumer, self._bell)
            self._nursery.start_soon(worker.run)
        return worker

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Consumers are told for as long as the context. Left without an exception, everything that
        was told is in the store.

        Raises:
            StorageError: The store cannot be opened.
        """
        async with self._store.opened():
            await self._revive()
            async with background() as nursery:
                self._nursery = nursery
                nursery.start_soon(self.producer.run)
                nursery.start_soon(self._bury)
                yield
            await self._close()

    async def _revive(self) -> None:
        """Nobody could report while this node was not there."""
        try:
            await queues.revive(self._store, self._time())
        except StorageError as error:
            # On a full disk, for instance: the server starts nevertheless.
            log.warning("consumers of events may be cleared early", error=str(error))

    async def _bury(self) -> None:
        while True:
            pause_s = LOOK_S
            try:
                now = self._time()
                dead, deadline = await queues.forget_dead(self._store, now)
                pause_s = max(LOOK_S_MIN, min(LOOK_S, deadline - now))
                for consumer in dead:
                    self._cleared += 1
                    self._feeds.forget(consumer)
                    log.info("a consumer of events says nothing: cleared", consumer=consumer)
            except StorageError as error:
                log.warning("the health of consumers cannot be read", error=str(error))
            await trio.sleep(pause_s)

    async def _close(self) -> None:
        try:
            await self.producer.flush()
            await self._feeds.put_back()
        except StorageError as error:
            # Something would be missing: better that consumers look at everything.
            self._store.is_whole = False
            log.warning("the events are lost: consumers will begin anew", error=str(error))

    def statistics(self) -> dict[str, object]:
        """Figures."""
        return {
            **self.producer.statistics(),
            **self._feeds.statistics(),
            "consumers_cleared": self._cleared,
        }
