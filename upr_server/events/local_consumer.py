"""A consumer of the node's own, whose queue any number of callbacks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from upr_protocol.bucket_event import EventFilter
from upr_protocol.concurrency import Notifier
from upr_server.events.queues import EventBatch, EventQueues

REPORTS_A_TIMEOUT: Final = 3
"""How many times in its timeout it reports that it is alive, however few events there are."""

LOCAL_POLL_INTERVAL_S: Final = 1.0
"""The shortest time between two polls: nothing in the node is in more of a hurry."""

Callback = Callable[[EventBatch], None]
"""Called in the loop with the events that pass its filter. It must not wait, nor raise."""


@attrs.frozen(eq=False)
class _Subscription:
    callback: Callback
    event_filter: EventFilter


class LocalConsumer:
    """Polls a queue while it has callbacks. Without callbacks it stops reporting, and its queue is
    cleared like that of every dead consumer.

    Args:
        name: Its name.
        timeout_s: How long its queue is kept when it does not report.
        queues: The queues.
        changed: Notified when something was counted.
        time: Seconds, by a clock that nobody sets.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        queues: EventQueues,
        changed: Notifier,
        time: Callable[[], float],
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._queues = queues
        self._changed = changed
        self._time = time
        self._subscriptions: list[_Subscription] = []
        self._subscribed = Notifier()

    @contextmanager
    def subscribed(self, callback: Callback, event_filter: EventFilter) -> Iterator[None]:
        """Calls `callback` with events for as long as the context. The first call says to look at
        everything, as earlier events may have gone to other callbacks."""
        subscription = _Subscription(callback, event_filter)
        callback(EventBatch(everything=True))
        self._subscriptions.append(subscription)
        self._update_filters()
        self._subscribed.notify()
        try:
            yield
        finally:
            self._subscriptions.remove(subscription)
            self._update_filters()

    @property
    def _filters(self) -> tuple[EventFilter, ...]:
        """What is counted: whatever one of the callbacks wants."""
        return tuple({subscription.event_filter: None for subscription in self._subscriptions})

    def _update_filters(self) -> None:
        queue = self._queues.get(self._name)
        if queue is not None:
            queue.set_filters(self._filters)

    async def run(self) -> None:
        """Polls and calls the callbacks, for ever."""
        while True:
            await self._subscribed.wait_until(lambda: bool(self._subscriptions))
            # Before the poll: a change right after it would be missed otherwise.
            next_change = self._changed.next_event()
            if self._poll():
                await trio.sleep(LOCAL_POLL_INTERVAL_S)
                with trio.move_on_after(self._timeout_s / REPORTS_A_TIMEOUT):
                    await next_change.wait()
            else:
                await trio.lowlevel.checkpoint()

    def _poll(self) -> bool:
        """Polls once. Returns whether the poll reached the queue's end."""
        now = self._time()
        queue = self._queues.report_health(self._name, self._timeout_s, now)
        if queue is None:
            self._queues.register(self._name, self._timeout_s, now, self._filters)
            self._tell(EventBatch(everything=True))
            return True
        events, is_all = queue.poll()
        self._tell(EventBatch(events))
        return is_all

    def _tell(self, batch: EventBatch) -> None:
        for subscription in list(self._subscriptions):
            events = tuple(filter(None, map(subscription.event_filter.apply, batch.events)))
            if events or batch.everything:
                subscription.callback(EventBatch(events, batch.everything))
