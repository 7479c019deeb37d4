"""What a message must keep to beyond the tables, and what it does to the session.

The rules run on both sides: on the sender's before the message leaves, on the receiver's when it
comes. So both count the window, the credit and the open barriers alike. `CHECKS` only look: a
message that is refused, by whatever rule, has changed nothing. `EFFECTS` cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from upr_protocol.errors import ProtocolError, Status
from upr_protocol.limits import (
    COOKIE_BYTES_MAX,
    GET_KEYS_MAX,
    HANDSHAKE_BODY_BYTES_MAX,
    IDENTITY_BYTES_MAX,
    IDLE_INTERVAL_S_MAX,
    IDLE_INTERVAL_S_MIN,
    KEY_BYTES_MAX,
    WINDOW_BYTES_MIN,
)
from upr_protocol.session.keepalive import KeepAlive
from upr_protocol.session.states import STREAM_INPUTS
from upr_protocol.wire import (
    MESSAGES,
    VERSION,
    Ack,
    Barrier,
    BarrierReply,
    Credit,
    Get,
    Hello,
    HelloReply,
    Message,
    Mutate,
    PartitionChunk,
    PartitionLog,
    PartitionSnapshot,
    Refusal,
    Stream,
    StreamEnd,
    StreamReply,
)

if TYPE_CHECKING:
    from upr_protocol.session.session import Session


# What is looked at.


def _check_identity(identity: str) -> None:
    if not 1 <= len(identity.encode()) <= IDENTITY_BYTES_MAX:
        raise ProtocolError(f"an identity is 1 to {IDENTITY_BYTES_MAX} bytes")


def _check_interval(interval_s: int) -> None:
    if not IDLE_INTERVAL_S_MIN <= interval_s <= IDLE_INTERVAL_S_MAX:
        raise ProtocolError(
            f"an idle interval is {IDLE_INTERVAL_S_MIN} to {IDLE_INTERVAL_S_MAX} seconds"
        )


def _check_hello(_session: Session, message: Hello) -> None:
    if VERSION not in message.versions:
        said = ", ".join(map(str, message.versions)) or "none"
        raise ProtocolError(
            f"the client speaks version {said}; this server {VERSION}", Status.BAD_VERSION
        )
    _check_identity(message.identity)
    _check_interval(message.idle_interval_s)
    if message.window_bytes < WINDOW_BYTES_MIN:
        raise ProtocolError(f"a window has at least {WINDOW_BYTES_MIN} bytes")


def _check_hello_reply(session: Session, message: HelloReply) -> None:
    hello = session.hello
    assert hello is not None, "the table lets no answer come before the question"
    if message.version not in hello.versions:
        raise ProtocolError(
            f"the server chose version {message.version}, which was not offered", Status.BAD_VERSION
        )
    if message.features & ~hello.features:
        raise ProtocolError("the server chose features that were not asked for")
    _check_identity(message.identity)
    _check_interval(message.idle_interval_s)
    if message.frame_body_bytes_max < HANDSHAKE_BODY_BYTES_MAX:
        raise ProtocolError(f"a server takes bodies of {HANDSHAKE_BODY_BYTES_MAX} bytes at least")
    if not (message.open_barriers_max and message.requests_open_max):
        raise ProtocolError("a server that takes no requests or no barriers is none")


def _check_stream(_session: Session, message: Stream) -> None:
    position, partial = message.position, message.position.partial
    if partial is None:
        whole = position.highest_received == position.last_complete
    else:
        whole = (
            position.last_complete <= position.highest_received
            and partial.start <= position.highest_received <= partial.end
        )
    if not whole:
        raise ProtocolError(f"no client can stand at {position}")


def _check_get(_session: Session, message: Get) -> None:
    if not 1 <= len(message.keys) <= GET_KEYS_MAX:
        raise ProtocolError(f"a Get asks for 1 to {GET_KEYS_MAX} keys", Status.TOO_MANY)
    if not all(1 <= len(key) <= KEY_BYTES_MAX for key in message.keys):
        raise ProtocolError(f"a key is 1 to {KEY_BYTES_MAX} bytes")


def _check_mutate(session: Session, _message: Mutate) -> None:
    if not session.credit.open:
        raise ProtocolError("more was published than credit was granted", Status.FLOW_CONTROL)


def _check_chunk(session: Session, _message: PartitionChunk) -> None:
    if not session.window.open:
        raise ProtocolError("more was streamed than the window allows", Status.FLOW_CONTROL)


def _check_ack(session: Session, message: Ack) -> None:
    if message.bytes > session.window.used:
        raise ProtocolError(
            f"{message.bytes} bytes acknowledged; {session.window.used} are on their way",
            Status.FLOW_CONTROL,
        )


def _check_barrier(session: Session, message: Barrier) -> None:
    cookie = message.cookie
    if not 1 <= len(cookie) <= COOKIE_BYTES_MAX:
        raise ProtocolError(f"a cookie is 1 to {COOKIE_BYTES_MAX} bytes")
    if cookie in session.barriers:
        raise ProtocolError(f"the barrier {cookie!r} is still open", Status.OPAQUE_IN_USE)
    if len(session.barriers) >= session.agreed.open_barriers_max:
        raise ProtocolError(f"{len(session.barriers)} barriers are open already", Status.TOO_MANY)


def _check_barrier_reply(session: Session, message: BarrierReply) -> None:
    oldest = next(iter(session.barriers), None)
    if message.cookie != oldest:
        raise ProtocolError(
            f"the barrier {message.cookie!r} came back; the oldest open one is {oldest!r}"
        )


_STATUSES: Final = frozenset(Status)
_REASONS: Final = frozenset(
    status for status in Status if Status.END_REACHED <= status <= Status.SHUTTING_DOWN
)


def _check_status(_session: Session, message: Message) -> None:
    if message.status not in _STATUSES:
        raise ProtocolError(f"{type(message).__name__} has status {message.status}, which is none")


def _check_refusal(session: Session, message: Refusal) -> None:
    _check_status(session, message)
    if message.status == Status.OK:
        raise ProtocolError("a refusal says why")


def _check_stream_end(_session: Session, message: StreamEnd) -> None:
    if message.status not in _REASONS:
        raise ProtocolError(f"a stream does not end for reason {message.status}")


CHECKS: Final[Mapping[type[Message], Callable[[Session, Any], None]]] = {
    Hello: _check_hello,
    HelloReply: _check_hello_reply,
    Stream: _check_stream,
    Get: _check_get,
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


# What is done, with the message and the length of its frame.


def _greet(session: Session, message: Hello, _frame_bytes: int) -> None:
    session.hello = message
    session.window.grant(message.window_bytes)


def _agree(session: Session, message: HelloReply, _frame_bytes: int) -> None:
    session.agreed = message
    session.keep_alive = KeepAlive(message.idle_interval_s, session.now)


def _spend(session: Session, _message: Mutate, frame_bytes: int) -> None:
    session.credit.use(frame_bytes)


def _use_window(session: Session, _message: PartitionChunk, frame_bytes: int) -> None:
    session.window.use(frame_bytes)


def _acknowledge(session: Session, message: Ack, _frame_bytes: int) -> None:
    session.window.give_back(message.bytes)


def _grant(session: Session, message: Credit, _frame_bytes: int) -> None:
    session.credit.grant(message.bytes)


def _open_barrier(session: Session, message: Barrier, _frame_bytes: int) -> None:
    session.barriers[message.cookie] = None


def _close_barrier(session: Session, message: BarrierReply, _frame_bytes: int) -> None:
    del session.barriers[message.cookie]


EFFECTS: Final[Mapping[type[Message], Callable[[Session, Any, int], None]]] = {
    Hello: _greet,
    HelloReply: _agree,
    Mutate: _spend,
    PartitionChunk: _use_window,
    PartitionSnapshot: _use_window,
    Ack: _acknowledge,
    Credit: _grant,
    Barrier: _open_barrier,
    BarrierReply: _close_barrier,
}
"""What a message that may be said does to the session, on either side."""


@attrs.frozen
class Rule:
    """All that the funnel needs to know of one kind of message, found in one look.

    Attributes:
        check: See `CHECKS`.
        effect: See `EFFECTS`.
        is_request: Whether it is answered.
        is_answer: Whether it answers a request.
        ends_request: Whether it may end one.
        is_of_stream: Whether it concerns one partition's stream.
    """

    check: Callable[[Session, Any], None] | None
    effect: Callable[[Session, Any, int], None] | None
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
