"""Feeds: what consumers beyond a connection are told, batch by batch.

A consumer asks for a batch, and its next question acknowledges it. So each consumer has one batch
in memory, and all else is counted in its queue, where a slow consumer costs no more than a quick
one. A batch that was not acknowledged, because the connection broke for instance, is told again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from upr_protocol.bucket_event import EventFilter
from upr_protocol.errors import ServerError, Status
from upr_server.events.bell import Bell
from upr_server.events.queues import EventBatch, EventQueue, EventQueues, TooManyConsumersError

INTERVAL_S: Final = 0.1
"""How soon after a poll there is another, for the same consumer: what is told ten times a second is
told soon enough, and a load that never ends costs no more than that."""

NOTHING: Final = EventBatch()


class EventFeeds:
    """Answers consumers' questions.

    Args:
        queues: The queues.
        bell: Rings when something was counted.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number. Batches are not counted: after a crash a
            number from before must not acknowledge another batch.
        interval_s: How soon after a poll there may be another, for the same consumer.
    """

    def __init__(
        self,
        queues: EventQueues,
        bell: Bell,
        time: Callable[[], float],
        new_id: Callable[[], int],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._queues = queues
        self._bell = bell
        self._time = time
        self._new_id = new_id
        self._interval_s = interval_s

    async def next(
        self,
        consumer: str,
        event_filter: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
    ) -> EventBatch:
        """What there is to tell a consumer, as soon as there is anything. The question says that
        the consumer is alive; one that is unknown, or was cleared, is registered, and told so.

        Cancelled, nothing is lost: what was taken out of the queue is told with the next question.

        Args:
            consumer: Its name.
            event_filter: What it wants to be told.
            timeout_s: When it has not asked for so long, its queue is removed.
            acknowledged: The ID of the batch that it has dealt with; 0 for none.
            wait_s: How long to wait for something to tell.

        Returns:
            A batch; after `wait_s` an empty one.

        Raises:
            ServerError: `FENCED` when another question came under the same name; `LIMIT_REACHED`
                when there are too many consumers.
        """
        deadline = trio.current_time() + wait_s
        queue = self._queue_of(consumer, timeout_s)
        if queue.unacknowledged is not None and queue.unacknowledged.id == acknowledged:
            queue.unacknowledged = None
        asker = queue.asker = object()
        # A question that waits under this name looks again, and finds that it was overtaken.
        self._bell.ring()
        try:
            while True:
                await self._pause(queue)
                if queue.asker is not asker:
                    raise ServerError(
                        Status.FENCED,
                        f"another follower took over the event consumer {consumer!r}; give each "
                        "follower its own consumer name",
                    )
                # Asked for before the poll, so that what is told after it is not missed.
                rung = self._bell.next()
                is_all = self._poll(queue, event_filter)
                if queue.unacknowledged is not None:
                    return queue.unacknowledged
                if is_all:
                    with trio.move_on_at(deadline) as scope:
                        await rung.wait()
                    if scope.cancelled_caught:
                        return NOTHING
        finally:
            if queue.asker is asker:
                queue.asker = None

    def _queue_of(self, consumer: str, timeout_s: float) -> EventQueue:
        now = self._time()
        queue = self._queues.report_health(consumer, timeout_s, now)
        if queue is None:
            try:
                queue = self._queues.register(consumer, timeout_s, now)
            except TooManyConsumersError as error:
                raise ServerError(Status.LIMIT_REACHED, str(error)) from error
            queue.unacknowledged = EventBatch(everything=True, id=self._new_id())
        return queue

    async def _pause(self, queue: EventQueue) -> None:
        """Waits until the queue may be polled again."""
        await trio.sleep_until(queue.polled_at + self._interval_s)

    def _poll(self, queue: EventQueue, event_filter: EventFilter) -> bool:
        """Takes out of the queue what is to be told, unless a batch waits for its acknowledgement;
        whether the queue was looked at to its end."""
        if queue.unacknowledged is not None:
            return True
        polled, is_all = queue.poll()
        queue.polled_at = trio.current_time()
        events = tuple(filter(None, map(event_filter.apply, polled)))
        if events:
            queue.unacknowledged = EventBatch(events, id=self._new_id())
        return is_all

    def statistics(self) -> dict[str, object]:
        """Figures."""
        return {
            "asking": sum(queue.asker is not None for queue in self._queues),
            "unacknowledged": sum(queue.unacknowledged is not None for queue in self._queues),
        }
