"""What a message must keep to beyond the tables, and what it does to the session.

The rules run on both sides: on the sender's before the message leaves, on the receiver's when it
comes. So both count the window, the credit and the open barriers alike. `CHECKS` only look: a
message that any rule refuses has changed nothing. `EFFECTS` cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from upr_protocol.errors import ProtocolError, Status
from upr_protocol.limits import (
    COOKIE_BYTES_MAX,
    HANDSHAKE_BODY_BYTES_MAX,
    IDENTITY_BYTES_MAX,
    IDLE_INTERVAL_S_MAX,
    IDLE_INTERVAL_S_MIN,
    WINDOW_BYTES_MIN,
)
from upr_protocol.session.context import SessionContext
from upr_protocol.session.keepalive import KeepAlive
from upr_protocol.session.states import STREAM_INPUTS
from upr_protocol.wire import (
    MESSAGES,
    VERSION,
    Ack,
    Barrier,
    BarrierReply,
    Credit,
    Hello,
    HelloReply,
    Message,
    Mutate,
    PartitionChunk,
    PartitionLog,
    PartitionSnapshot,
    Refusal,
    StartLogIn,
    Stream,
    StreamEnd,
    StreamReply,
)

# Checks.


def _check_identity(identity: str) -> None:
    if not 1 <= len(identity.encode()) <= IDENTITY_BYTES_MAX:
        raise ProtocolError(f"the identity must be 1 to {IDENTITY_BYTES_MAX} bytes")
    if not identity.isprintable():
        raise ProtocolError("the identity must have no control, format or separator characters")


def _check_interval(interval_s: int) -> None:
    if not IDLE_INTERVAL_S_MIN <= interval_s <= IDLE_INTERVAL_S_MAX:
        raise ProtocolError(
            f"the idle interval must be {IDLE_INTERVAL_S_MIN} to {IDLE_INTERVAL_S_MAX} seconds"
        )


def _check_hello(_context: SessionContext, message: Hello) -> None:
    if VERSION not in message.versions:
        versions = ", ".join(map(str, message.versions)) or "none"
        raise ProtocolError(
            f"Hello: the client speaks versions {versions}; this server speaks {VERSION}",
            Status.BAD_VERSION,
        )
    _check_identity(message.identity)
    _check_interval(message.idle_interval_s)
    if message.window_bytes < WINDOW_BYTES_MIN:
        raise ProtocolError(f"Hello: window_bytes must be at least {WINDOW_BYTES_MIN}")


def _check_hello_reply(context: SessionContext, message: HelloReply) -> None:
    hello = context.hello
    assert hello is not None, "the table lets HelloReply come only after Hello"
    if message.version not in hello.versions:
        raise ProtocolError(
            f"HelloReply: version {message.version} is not one that the client offered",
            Status.BAD_VERSION,
        )
    if message.features & ~hello.features:
        raise ProtocolError("HelloReply: features must be among those that Hello asked for")
    _check_identity(message.identity)
    _check_interval(message.idle_interval_s)
    if message.idle_interval_s > hello.idle_interval_s:
        # Otherwise a server that hangs could make its client wait for two hours.
        raise ProtocolError(
            f"HelloReply: idle interval {message.idle_interval_s} s is longer than the "
            f"{hello.idle_interval_s} s that Hello asked for"
        )
    if message.frame_body_bytes_max < HANDSHAKE_BODY_BYTES_MAX:
        raise ProtocolError(
            f"HelloReply: frame_body_bytes_max must be at least {HANDSHAKE_BODY_BYTES_MAX}"
        )
    if not (message.open_barriers_max and message.requests_open_max):
        raise ProtocolError(
            "HelloReply: open_barriers_max and requests_open_max must be at least 1"
        )


def _check_log_in(context: SessionContext, message: StartLogIn) -> None:
    if message.mechanism not in context.agreed.mechanisms:
        raise ProtocolError(
            f"StartLogIn: the mechanism {message.mechanism!r} is not among "
            f"{', '.join(context.agreed.mechanisms)}",
            Status.LOG_IN_FAILED,
        )


def _check_stream(_context: SessionContext, message: Stream) -> None:
    position, partial = message.position, message.position.partial
    if partial is None:
        is_consistent = position.highest_received == position.last_complete
    else:
        is_consistent = (
            position.last_complete <= position.highest_received
            and partial.start <= position.highest_received <= partial.end
        )
    if not is_consistent:
        raise ProtocolError(
            f"Stream: highest_received is {position.highest_received}, which does not fit "
            f"last_complete, {position.last_complete}, and the partial snapshot"
        )


def _check_mutate(context: SessionContext, _message: Mutate) -> None:
    if context.credit.remaining_bytes <= 0:
        raise ProtocolError(
            "Mutate: the client has used up its credit; wait for Credit", Status.FLOW_CONTROL
        )


def _check_chunk(context: SessionContext, _message: PartitionChunk) -> None:
    if context.window.remaining_bytes <= 0:
        raise ProtocolError(
            "the server has used up the client's window; wait for Ack", Status.FLOW_CONTROL
        )


def _check_ack(context: SessionContext, message: Ack) -> None:
    if message.bytes > context.window.used_bytes:
        raise ProtocolError(
            f"Ack of {message.bytes} bytes; only {context.window.used_bytes} are unacknowledged",
            Status.FLOW_CONTROL,
        )


def _check_barrier(context: SessionContext, message: Barrier) -> None:
    cookie = message.cookie
    if not 1 <= len(cookie) <= COOKIE_BYTES_MAX:
        raise ProtocolError(f"Barrier: a cookie must be 1 to {COOKIE_BYTES_MAX} bytes")
    if cookie in context.barriers:
        raise ProtocolError(f"Barrier: cookie {cookie.hex()} is still in use", Status.COOKIE_IN_USE)
    if len(context.barriers) >= context.agreed.open_barriers_max:
        raise ProtocolError(
            f"Barrier: {len(context.barriers)} barriers are open already", Status.TOO_MANY
        )


def _check_barrier_reply(context: SessionContext, message: BarrierReply) -> None:
    oldest = next(iter(context.barriers), None)
    if message.cookie != oldest:
        raise ProtocolError(
            f"BarrierReply with cookie {message.cookie.hex()}; the oldest open barrier has "
            f"{'none' if oldest is None else oldest.hex()}"
        )


_STATUSES: Final = frozenset(Status)
_REASONS: Final = frozenset(
    status for status in Status if Status.END_REACHED <= status <= Status.RIGHT_REVOKED
)


def _check_status(_context: SessionContext, message: Message) -> None:
    if message.status not in _STATUSES:
        raise ProtocolError(
            f"{type(message).__name__} has status {message.status}, which is not defined"
        )


def _check_refusal(context: SessionContext, message: Refusal) -> None:
    _check_status(context, message)
    if message.status == Status.OK:
        raise ProtocolError("Refusal: the status must say why, not OK")


def _check_stream_end(_context: SessionContext, message: StreamEnd) -> None:
    if message.status not in _REASONS:
        raise ProtocolError(
            f"StreamEnd: status {message.status} is not a reason for a stream to end"
        )


CHECKS: Final[Mapping[type[Message], Callable[[SessionContext, Any], None]]] = {
    Hello: _check_hello,
    HelloReply: _check_hello_reply,
    StartLogIn: _check_log_in,
    Stream: _check_stream,
    Mutate: _check_mutate,
    PartitionChunk: _check_chunk,
    PartitionSnapshot: _check_chunk,
    Ack: _check_ack,
    Barrier: _check_barrier,
    BarrierReply: _check_barrier_reply,
    PartitionLog: _check_status,
    StreamReply: _check_status,
    Refusal: _check_refusal,
    StreamEnd: _check_stream_end,
}
"""What raises `ProtocolError` for a message that must not be said; it changes nothing."""


# Effects: of a message, and the length of its frame.


def _greet(context: SessionContext, message: Hello, _frame_bytes: int) -> None:
    context.hello = message
    context.window.grant(message.window_bytes)


def _agree(context: SessionContext, message: HelloReply, _frame_bytes: int) -> None:
    context.agreed = message
    context.keep_alive = KeepAlive(message.idle_interval_s, context.now)


def _use_credit(context: SessionContext, _message: Mutate, frame_bytes: int) -> None:
    context.credit.note_sent(frame_bytes)


def _use_window(context: SessionContext, _message: PartitionChunk, frame_bytes: int) -> None:
    context.window.note_sent(frame_bytes)


def _acknowledge(context: SessionContext, message: Ack, _frame_bytes: int) -> None:
    context.window.give_back(message.bytes)


def _grant_credit(context: SessionContext, message: Credit, _frame_bytes: int) -> None:
    context.credit.grant(message.bytes)


def _open_barrier(context: SessionContext, message: Barrier, _frame_bytes: int) -> None:
    context.barriers[message.cookie] = None


def _close_barrier(context: SessionContext, message: BarrierReply, _frame_bytes: int) -> None:
    del context.barriers[message.cookie]


EFFECTS: Final[Mapping[type[Message], Callable[[SessionContext, Any, int], None]]] = {
    Hello: _greet,
    HelloReply: _agree,
    Mutate: _use_credit,
    PartitionChunk: _use_window,
    PartitionSnapshot: _use_window,
    Ack: _acknowledge,
    Credit: _grant_credit,
    Barrier: _open_barrier,
    BarrierReply: _close_barrier,
}
"""What a message that may be said does to the session, on either side."""

WINDOW_MESSAGES: Final = tuple(kind for kind, effect in EFFECTS.items() if effect is _use_window)
"""The messages whose frames count for the window, whole. The protocol document names these."""

CREDIT_MESSAGES: Final = tuple(kind for kind, effect in EFFECTS.items() if effect is _use_credit)
"""The messages whose frames count for the credit, whole."""


@attrs.frozen
class Rule:
    """What `Session` needs to know of one kind of message.

    Attributes:
        check: Its entry in `CHECKS`.
        effect: Its entry in `EFFECTS`.
        is_request: Whether it is answered.
        is_answer: Whether it answers a request.
        ends_request: Whether it may end one.
        is_of_stream: Whether it concerns one partition's stream.
    """

    check: Callable[[SessionContext, Any], None] | None
    effect: Callable[[SessionContext, Any, int], None] | None
    is_request: bool
    is_answer: bool
    ends_request: bool
    is_of_stream: bool


_ANSWERS: Final = frozenset(
    {answer for kind in MESSAGES.values() for answer in kind.answers} | {Refusal}
)

RULES: Final[Mapping[type[Message], Rule]] = {
    kind: Rule(
        CHECKS.get(kind),
        EFFECTS.get(kind),
        is_request=bool(kind.answers),
        is_answer=kind in _ANSWERS,
        # A stream's opaque is in use for as long as the stream.
        ends_request=kind is StreamEnd or (kind in _ANSWERS and kind is not PartitionLog),
        is_of_stream=kind is StreamReply or kind in STREAM_INPUTS,
    )
    for kind in MESSAGES.values()
}
