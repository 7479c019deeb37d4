"""The event bus of one node: its queues, the producer that counts in them, and their consumers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import structlog
import trio

from upr_protocol.bucket_event import BucketEvent, EventFilter
from upr_protocol.concurrency import Notifier, background_nursery
from upr_server.events.feeds import EventFeeds
from upr_server.events.local_consumer import LocalConsumer
from upr_server.events.producer import Producer
from upr_server.events.queues import EventQueues, is_own_consumer
from upr_server.runtime import essential
from upr_server.storage.api import Store
from upr_server.storage.calls import SaveEventQueues, TakeEventQueues
from upr_server.storage.errors import CorruptionError, StorageError

HEALTH_CHECK_S: Final = 1.0
"""The longest pause between two checks of consumers' health: the shortest timeout."""

HEALTH_CHECK_S_MIN: Final = 0.05
"""The shortest pause between two checks: the deadline of a consumer that waits may have passed."""

log = structlog.get_logger(__name__)


class EventBus:
    """Counts what becomes of buckets, and tells consumers while it is `running`.

    Args:
        store: Where the queues outlive a clean stop.
        time: Seconds, by a clock that nobody sets.
        new_id: Draws a fresh non-zero random number.

    Attributes:
        producer: Takes the engine's reports, from `restore` on.
    """

    def __init__(
        self, store: Store, *, time: Callable[[], float], new_id: Callable[[], int]
    ) -> None:
        self._store = store
        self._time = time
        self._changed = Notifier()
        self._queues = EventQueues()
        self._feeds = EventFeeds(self._queues, self._changed, time, new_id)
        self._local_consumers: dict[str, LocalConsumer] = {}
        self._nursery: trio.Nursery | None = None
        self._cleared = 0
        self.producer = Producer(self._queues, self._changed.notify)

    # A clean restart.

    async def restore(self) -> None:
        """Takes over the queues that a clean stop has saved, and removes them from the disk: they
        lack what is counted from now on, so no later start may find them.

        Raises:
            DataDirectoryError: The saved queues cannot be read, or not be removed.
        """
        try:
            data = await self._store.ask(TakeEventQueues())
            if data:
                self._queues.restore(data, self._time())
        except (CorruptionError, msgspec.DecodeError) as error:
            log.warning("event queues cannot be read; consumers start over", error=str(error))

    async def save(self) -> None:
        """Saves the queues. Call it when everything else is on disk: until then a crash loses
        changes that consumers were told of, and they must learn that."""
        try:
            await self._store.ask(SaveEventQueues(self._queues.to_bytes()))
        except StorageError as error:
            log.warning("event queues not saved; consumers start over", error=str(error))

    # While it runs.

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tells consumers, and clears the dead ones, for as long as the context."""
        async with background_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(essential(self._check_health))
            yield

    async def next_events(
        self,
        consumer: str,
        event_filter: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
        rights: Hashable = None,
    ) -> tuple[int, bool, tuple[BucketEvent, ...]]:
        """Answers a consumer's question; see `EventFeeds.next_batch`.

        Returns:
            The batch's ID, or 0; whether to look at everything; what became of buckets.
        """
        batch = await self._feeds.next_batch(
            consumer,
            event_filter,
            timeout_s=timeout_s,
            acknowledged=acknowledged,
            wait_s=wait_s,
            rights=rights,
        )
        return batch.id, batch.everything, batch.events

    def local_consumer(self, name: str, timeout_s: float) -> LocalConsumer:
        """A consumer of this node's own; callers that give the same name share it.

        Args:
            name: Its name. It begins with a dot, which no name that comes over a connection does.
            timeout_s: How long its queue is kept when nobody subscribes to it.
        """
        assert is_own_consumer(name)
        assert self._nursery is not None
        consumer = self._local_consumers.get(name)
        if consumer is None:
            consumer = LocalConsumer(name, timeout_s, self._queues, self._changed, self._time)
            self._local_consumers[name] = consumer
            self._nursery.start_soon(essential(consumer.run))
        return consumer

    async def _check_health(self) -> None:
        while True:
            now = self._time()
            dead, deadline = self._queues.remove_dead(now)
            for consumer in dead:
                self._cleared += 1
                log.info("event consumer timed out; queue dropped", consumer=consumer)
            await trio.sleep(max(HEALTH_CHECK_S_MIN, min(HEALTH_CHECK_S, deadline - now)))

    def statistics(self) -> dict[str, object]:
        """Figures of queues and consumers."""
        return {
            "consumers": self._queues.consumer_count,
            "counters": sum(len(queue.counters) for queue in self._queues),
            **self._feeds.statistics(),
            "consumers_cleared": self._cleared,
        }
