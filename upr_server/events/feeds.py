"""Feeds: what consumers beyond a connection are told, batch by batch.

A consumer asks for a batch, and with its next question says that it has dealt with that one. So
there is one batch of a consumer in memory, and all else is in its queue, where a slow one costs no
more than a quick one. A batch that was not acknowledged, as the connection broke, is told again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.bucket_event import BucketEvent, EventFilter
from upr_protocol.errors import ServerError, Status
from upr_server.events import queues
from upr_server.events.bell import Bell
from upr_server.events.consumer import Consumer
from upr_server.events.errors import TooManyConsumersError, UnknownConsumerError
from upr_server.events.store import EventStore

INTERVAL_S: Final = 0.1
"""How soon after a poll there is another, for the same consumer: what is told ten times a second is
told soon enough, and a load that never ends costs no more than that."""

log = structlog.get_logger(__name__)


@attrs.frozen
class Batch:
    """What a consumer is told at once.

    Attributes:
        number: What to acknowledge it by; 0 when there is nothing to tell.
        everything: Whether it must look at everything.
        events: What became of buckets.
    """

    number: int
    everything: bool
    events: tuple[BucketEvent, ...]


NOTHING: Final = Batch(0, everything=False, events=())


@attrs.define(eq=False)
class _Feed:
    """One consumer's.

    Attributes:
        consumer: The consumer.
        told: The batch that was told and not acknowledged.
        polled_at: When its queue was looked at last, by the loop's clock.
        is_known: Whether it is registered, as far as is known.
        turn: Its queue is looked at by one question after the other.
        overtaken: Set when the question that waits is overtaken by another.
        asking: Questions under way.
    """

    consumer: Consumer
    told: Batch | None = None
    polled_at: float = float("-inf")
    is_known: bool = False
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    overtaken: trio.Event = attrs.field(factory=trio.Event)
    asking: int = 0


class Feeds:
    """See the module.

    Args:
        store: Where the queues are.
        bell: Rings when something was put into queues.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number. A batch is not counted: after a restart a
            number from before must not acknowledge another batch.
        interval_s: How soon after a poll there may be another, for the same consumer.
    """

    def __init__(
        self,
        store: EventStore,
        bell: Bell,
        time: Callable[[], float],
        new_id: Callable[[], int],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._store = store
        self._bell = bell
        self._interval_s = interval_s
        self._time = time
        self._new_id = new_id
        self._feeds: dict[str, _Feed] = {}

    async def next(
        self,
        name: str,
        wanted: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
    ) -> Batch:
        """What there is to tell a consumer, as soon as there is anything.

        Args:
            name: The consumer.
            wanted: What it wants to be told.
            timeout_s: When it has not asked for so long its queue goes.
            acknowledged: The number of the batch that it has dealt with; 0 for none.
            wait_s: How long to wait for something to tell.

        Returns:
            A batch; after `wait_s` an empty one.

        Raises:
            ServerError: `FENCED` when somebody else asks under the same name; `LIMIT_REACHED` when
                there are too many consumers.
            StorageError: The store failed, or was full.
        """
        feed = self._feeds.get(name)
        if feed is None:
            feed = self._feeds[name] = _Feed(Consumer(self._store, name, timeout_s, self._time))
        feed.consumer.timeout_s = timeout_s
        feed.overtaken.set()
        overtaken = feed.overtaken = trio.Event()
        feed.asking += 1
        try:
            return await self._next(feed, overtaken, wanted, acknowledged, wait_s)
        except TooManyConsumersError as error:
            raise ServerError(Status.LIMIT_REACHED, str(error)) from error
        finally:
            feed.asking -= 1
            self._drop_unknown(name, feed)

    async def _next(
        self,
        feed: _Feed,
        overtaken: trio.Event,
        wanted: EventFilter,
        acknowledged: int,
        wait_s: float,
    ) -> Batch:
        deadline = trio.current_time() + wait_s
        async with feed.turn:
            if feed.told is not None:
                known = await feed.consumer.is_known()
                if not known or feed.told.number == acknowledged:
                    feed.told = None
        while True:
            # Whoever asks all the time, and a load that never ends, cost no more than that.
            polled_at = min(feed.polled_at, trio.current_time())
            await trio.sleep_until(polled_at + self._interval_s)
            rung = self._bell.next()
            async with feed.turn:
                _check_not_overtaken(feed, overtaken)
                if feed.told is None:
                    is_all = await self._poll(feed, wanted)
                else:
                    is_all = True
                if feed.told is not None:
                    return feed.told
            if is_all and not await _rings(rung, overtaken, deadline):
                return NOTHING

    async def _poll(self, feed: _Feed, wanted: EventFilter) -> bool:
        # Who asked may go meanwhile: what was taken out of the queue must be here then.
        with trio.CancelScope(shield=True):
            news = await feed.consumer.poll()
            feed.polled_at = trio.current_time()
            feed.is_known = True
            events = tuple(filter(None, map(wanted.apply, news.events)))
            if events or news.everything:
                feed.told = Batch(self._new_id(), news.everything, events)
        return news.is_all

    def forget(self, name: str) -> None:
        """A consumer was cleared."""
        feed = self._feeds.get(name)
        if feed is None:
            return
        feed.told = None
        feed.is_known = False
        self._drop_unknown(name, feed)

    def _drop_unknown(self, name: str, feed: _Feed) -> None:
        """Names that could not be registered leave nothing behind."""
        if not feed.asking and not feed.is_known and self._feeds.get(name) is feed:
            del self._feeds[name]

    async def put_back(self) -> None:
        """Puts what was not acknowledged into the queues again: the server stops.

        Raises:
            StorageError: The store failed, or was full.
        """
        for name, feed in self._feeds.items():
            if feed.told is None:
                continue
            if feed.told.everything:
                # On return it is unknown, and is told again to look at everything.
                await queues.forget(self._store, name)
                continue
            try:
                await queues.put_back(self._store, name, feed.told.events)
            except UnknownConsumerError:
                log.info("a consumer of events was cleared", consumer=name)

    def statistics(self) -> dict[str, object]:
        """Figures."""
        return {
            "feeds": len(self._feeds),
            "asking": sum(feed.asking for feed in self._feeds.values()),
            "unacknowledged": sum(feed.told is not None for feed in self._feeds.values()),
        }


def _check_not_overtaken(feed: _Feed, overtaken: trio.Event) -> None:
    if overtaken.is_set():
        raise ServerError(
            Status.FENCED,
            f"another asks for the events of the consumer {feed.consumer.name!r}",
        )


async def _rings(rung: trio.Event, overtaken: trio.Event, deadline: float) -> bool:
    """Waits until there is reason to look again; whether there was before the deadline."""

    async def wait(event: trio.Event) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()

    with trio.move_on_at(deadline) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, rung)
            nursery.start_soon(wait, overtaken)
    return not scope.cancelled_caught
