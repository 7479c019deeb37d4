"""Event feeds: answers consumers that ask over connections, batch by batch.

A consumer asks for a batch, and its next question acknowledges it. So each consumer has one batch
in memory. Everything else is counted in its queue, where a slow consumer costs no more than a quick
one. A batch that was not acknowledged, because the connection broke for instance, is told again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import trio

from upr_protocol.bucket_event import EventFilter
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import ServerError, Status
from upr_server.events.queues import EventBatch, EventQueue, EventQueues, TooManyConsumersError

POLL_INTERVAL_S: Final = 0.1
"""The shortest time between two polls for one consumer: ten answers a second are soon enough, and a
load that never ends costs no more."""

NOTHING: Final = EventBatch()


class EventFeeds:
    """Answers consumers' questions.

    Args:
        queues: The queues.
        changed: Notified when something was counted.
        time: Seconds, by a clock that nobody sets.
        new_id: Draws a fresh non-zero random number. Batches are not counted: after a crash a
            number from before must not acknowledge another batch.
        interval_s: How soon after a poll there may be another, for the same consumer.
    """

    def __init__(
        self,
        queues: EventQueues,
        changed: Notifier,
        time: Callable[[], float],
        new_id: Callable[[], int],
        interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._queues = queues
        self._changed = changed
        self._time = time
        self._new_id = new_id
        self._interval_s = interval_s

    async def next_batch(
        self,
        consumer: str,
        event_filter: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
        rights: Hashable = None,
    ) -> EventBatch:
        """Waits for events. The question reports that the consumer is alive. A consumer that is
        unknown, was cleared, or asks with another filter or other rights, is told to look at
        everything.

        On cancellation nothing is lost: the next question gets what was taken out of the queue.

        Args:
            consumer: Its name.
            event_filter: Which events it wants; the others are not counted.
            timeout_s: When it has not asked for so long, its queue is removed.
            acknowledged: The ID of the batch that it has dealt with; 0 for none.
            wait_s: How long to wait for events.
            rights: What decides which events the consumer may know of; None if it may know of all.

        Returns:
            A batch; an empty one when `wait_s` is over.

        Raises:
            ServerError: `SUPERSEDED` when another question came under the same name;
                `LIMIT_REACHED` when there are too many consumers.
        """
        deadline = trio.current_time() + wait_s
        queue = self._queue_of(consumer, event_filter, timeout_s, rights)
        if queue.unacknowledged is not None and queue.unacknowledged.id == acknowledged:
            queue.unacknowledged = None
        asker = queue.asker = object()
        # An earlier question that waits under this name wakes up and is refused.
        self._changed.notify()
        try:
            while True:
                # Before the pause, too: a later question that has just polled makes it longer.
                _check_asker(queue, asker, consumer)
                await self._pause(queue)
                _check_asker(queue, asker, consumer)
                # Before the poll: a change right after it would be missed otherwise.
                next_change = self._changed.next_event()
                is_all = self._poll(queue, event_filter)
                if queue.unacknowledged is not None:
                    return queue.unacknowledged
                if is_all:
                    with trio.move_on_at(deadline) as scope:
                        await next_change.wait()
                    if scope.cancelled_caught:
                        return NOTHING
        finally:
            if queue.asker is asker:
                queue.asker = None

    def _queue_of(
        self, consumer: str, event_filter: EventFilter, timeout_s: float, rights: Hashable
    ) -> EventQueue:
        now = self._time()
        filters = (event_filter,)
        queue = self._queues.report_health(consumer, timeout_s, now)
        if queue is not None and queue.filters == filters and queue.rights in (None, rights):
            # After a clean restart it is not known which they were: users cannot have changed here.
            queue.rights = rights
            return queue
        if queue is not None:
            # What the earlier filter left out was not counted.
            queue.set_filters(filters)
        else:
            try:
                queue = self._queues.register(consumer, timeout_s, now, filters)
            except TooManyConsumersError as error:
                raise ServerError(Status.LIMIT_REACHED, str(error)) from error
        # What the consumer had no right to know of was counted, and taken out.
        queue.rights = rights
        queue.unacknowledged = EventBatch(everything=True, id=self._new_id())
        return queue

    async def _pause(self, queue: EventQueue) -> None:
        """Waits until the queue may be polled again."""
        await trio.sleep_until(queue.polled_at + self._interval_s)

    def _poll(self, queue: EventQueue, event_filter: EventFilter) -> bool:
        """Polls the queue, unless a batch waits for its acknowledgement. Returns whether the poll
        reached the queue's end."""
        if queue.unacknowledged is not None:
            return True
        polled, is_all = queue.poll()
        queue.polled_at = trio.current_time()
        events = tuple(filter(None, map(event_filter.apply, polled)))
        if events:
            queue.unacknowledged = EventBatch(events, id=self._new_id())
        return is_all

    def statistics(self) -> dict[str, object]:
        """Figures of the questions."""
        return {
            "asking": sum(queue.asker is not None for queue in self._queues),
            "unacknowledged": sum(queue.unacknowledged is not None for queue in self._queues),
        }


def _check_asker(queue: EventQueue, asker: object, consumer: str) -> None:
    """Raises `ServerError` with `SUPERSEDED` when another question came under the same name."""
    if queue.asker is not asker:
        raise ServerError(
            Status.SUPERSEDED,
            f"another follower took over the event consumer {consumer!r}; give each follower its "
            "own consumer name",
        )
