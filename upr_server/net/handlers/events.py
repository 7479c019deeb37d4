"""Events: what became of buckets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import trio

from upr_protocol.bucket_event import BucketEvent, EventFilter
from upr_protocol.errors import ServerError, Status
from upr_protocol.limits import (
    CONSUMER_NAME_BYTES_MAX,
    EVENT_PATTERN_BYTES_MAX,
    HEALTH_TIMEOUT_S_MAX,
    HEALTH_TIMEOUT_S_MIN,
)
from upr_protocol.wire import EventsReply, NextEvents
from upr_server.net.access import SLICE_BUCKETS
from upr_server.net.request_context import RequestContext

CONSUMER_NAME: Final = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{CONSUMER_NAME_BYTES_MAX}}}")
"""The name of an event consumer. The names of the server's own begin with a dot."""


def next_events(context: RequestContext, request: NextEvents) -> None:
    """Waits for something to tell an event consumer."""
    context.access.check_uses_any(request)
    _check(request)
    events = context.events
    if events is None:
        raise ServerError(Status.UNSUPPORTED, "this server has no event bus: events is false")
    if context.is_asking_for_events:
        raise ServerError(
            Status.LIMIT_REACHED,
            "this connection asks for events already; wait for the answer first",
        )
    context.is_asking_for_events = True

    async def wait() -> None:
        try:
            batch, is_everything, bucket_events = await events.next_events(
                _own_name(context, request.consumer),
                EventFilter(request.kinds, request.pattern),
                timeout_s=request.timeout_s,
                acknowledged=request.acknowledged,
                # A consumer that waits is alive: it must ask again before it is taken for dead.
                wait_s=min(request.wait_ms / 1000, request.timeout_s / 2),
                rights=context.access.grants,
            )
            # An answer without events is acknowledged as any other, by the next question.
            visible_events = await _visible(context, bucket_events)
        finally:
            context.is_asking_for_events = False
        context.send(EventsReply(batch, is_everything, visible_events, opaque=request.opaque))

    context.reply_later(request, wait)


async def _visible(
    context: RequestContext, bucket_events: Sequence[BucketEvent]
) -> tuple[BucketEvent, ...]:
    visible_events = []
    for count, event in enumerate(bucket_events, 1):
        if count % SLICE_BUCKETS == 0:
            await trio.lowlevel.checkpoint()
        if (visible := context.access.visible_part(event)) is not None:
            visible_events.append(visible)
    return tuple(visible_events)


def _own_name(context: RequestContext, consumer: str) -> str:
    """The consumer's name in the queues: consumers of two users are two, whatever their names.
    Otherwise one user could take what another one waits for."""
    user_name = context.access.user_name
    return consumer if user_name is None else f"{consumer}@{user_name}"


def _check(request: NextEvents) -> None:
    if not CONSUMER_NAME.fullmatch(request.consumer):
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"invalid consumer name {request.consumer!r}; use 1 to {CONSUMER_NAME_BYTES_MAX} "
            "letters, digits, dots, underscores or hyphens, not beginning with a dot",
        )
    if not HEALTH_TIMEOUT_S_MIN <= request.timeout_s <= HEALTH_TIMEOUT_S_MAX:
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"the timeout is {HEALTH_TIMEOUT_S_MIN} to {HEALTH_TIMEOUT_S_MAX} seconds, "
            f"not {request.timeout_s}",
        )
    if len(request.pattern.encode()) > EVENT_PATTERN_BYTES_MAX:
        raise ServerError(
            Status.BAD_ARGUMENT, f"a pattern is at most {EVENT_PATTERN_BYTES_MAX} bytes"
        )
