"""Bugs in what consumers of events are told."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import trio

from tests.simulation.bugs.patch import replaced
from tests.simulation.bugs.planted_bug import planted
from tests.simulation.profiles import EVENTS, LOST_EVENT_QUEUES
from upr_protocol.bucket_event import EventFilter
from upr_protocol.client import EventFeed, LookAtEverything
from upr_protocol.wire import EventsReply
from upr_server.engine.update_notifier import UpdateNotifier
from upr_server.events.feeds import EventFeeds
from upr_server.events.queues import EventQueue


@planted(EVENTS)
def follow_first_node_only() -> Iterator[None]:
    """A consumer of events follows one node, and hears nothing of what only others hold."""
    with replaced(EventFeed, "_follow_named_nodes", lambda _self: None):
        yield


@planted(EVENTS)
def acknowledge_unprocessed_events() -> Iterator[None]:
    """A feed acknowledges a batch before the application has processed it."""

    async def hand_out(self: Any, reply: EventsReply) -> None:
        self._put(*([LookAtEverything()] if reply.everything else []), *reply.events)
        await trio.lowlevel.checkpoint()

    with replaced(EventFeed, "_hand_out", hand_out):
        yield


@planted(LOST_EVENT_QUEUES)
def conceal_lost_queue() -> Iterator[None]:
    """A node that has lost a consumer's queue begins another one, and does not have the consumer
    look at everything."""
    queue_of: Any = EventFeeds._queue_of
    names: set[str] = set()

    def begin_silently(
        self: EventFeeds,
        consumer: str,
        event_filter: EventFilter,
        timeout_s: float,
        rights: Hashable,
    ) -> EventQueue:
        is_new = self._queues.get(consumer) is None
        queue: EventQueue = queue_of(self, consumer, event_filter, timeout_s, rights)
        if is_new and consumer in names:
            queue.unacknowledged = None
        names.add(consumer)
        return queue

    with replaced(EventFeeds, "_queue_of", begin_silently):
        yield


@planted(EVENTS)
def conceal_lost_changes() -> Iterator[None]:
    """Nobody is told that changes were undone. The simulation found this fault of failovers."""
    with replaced(UpdateNotifier, "notify_undone", lambda _self: None):
        yield


BUGS = (
    follow_first_node_only,
    acknowledge_unprocessed_events,
    conceal_lost_queue,
    conceal_lost_changes,
)
