"""A consumer of the node's own, whose queue any number of callbacks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from upr_protocol.bucket_event import EventFilter
from upr_server.events.bell import Bell
from upr_server.events.queues import EventBatch, EventQueues

REPORTS_A_TIMEOUT: Final = 3
"""So often it says in its timeout that it is alive, however little there is to tell."""

INTERVAL_S: Final = 1.0
"""How soon after a poll there is another: nothing in the node is in more of a hurry."""

Callback = Callable[[EventBatch], None]
"""Called with what its filter lets through, in the loop: it must not wait, nor raise."""


@attrs.frozen(eq=False)
class _Subscription:
    callback: Callback
    event_filter: EventFilter


class LocalConsumer:
    """Polls a queue while it has callbacks. Without any it falls silent, and its queue is cleared
    like that of every consumer that says nothing.

    Args:
        name: Its name.
        timeout_s: How long its queue is kept when it does not report.
        queues: The queues.
        bell: Rings when something was counted.
        time: Seconds since 1970.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        queues: EventQueues,
        bell: Bell,
        time: Callable[[], float],
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._queues = queues
        self._bell = bell
        self._time = time
        self._subscriptions: list[_Subscription] = []
        self._has_subscriptions = trio.Event()

    @contextmanager
    def subscribed(self, callback: Callback, event_filter: EventFilter) -> Iterator[None]:
        """Has `callback` told for as long as the context. The callback begins by looking at
        everything: what was in the queue before may have been told to others."""
        subscription = _Subscription(callback, event_filter)
        callback(EventBatch(everything=True))
        self._subscriptions.append(subscription)
        self._has_subscriptions.set()
        try:
            yield
        finally:
            self._subscriptions.remove(subscription)

    async def run(self) -> None:
        """Polls and tells, for ever."""
        while True:
            if not self._subscriptions:
                self._has_subscriptions = trio.Event()
                await self._has_subscriptions.wait()
            # Asked for before the poll, so that what is told after it is not missed.
            rung = self._bell.next()
            if self._poll():
                await trio.sleep(INTERVAL_S)
                with trio.move_on_after(self._timeout_s / REPORTS_A_TIMEOUT):
                    await rung.wait()
            else:
                await trio.lowlevel.checkpoint()

    def _poll(self) -> bool:
        """Tells the callbacks what there is; whether the queue was looked at to its end."""
        now = self._time()
        queue = self._queues.report_health(self._name, self._timeout_s, now)
        if queue is None:
            self._queues.register(self._name, self._timeout_s, now)
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
