"""What a message must keep to beyond the tables, and what it does to the session.

The rules run on both sides: on the sender's before the message leaves, on the receiver's when it
comes. So both count the window, the credit and the open barriers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from upr_protocol.errors import ProtocolError, Status
from upr_protocol.limits import (
    COOKIE_BYTES_MAX,
    GET_KEYS_MAX,
    IDENTITY_BYTES_MAX,
    IDLE_INTERVAL_S_MAX,
    IDLE_INTERVAL_S_MIN,
    KEY_BYTES_MAX,
    OPEN_BARRIERS_MAX,
    WINDOW_BYTES_MIN,
)
from upr_protocol.session.keepalive import KeepAlive
from upr_protocol.wire import Ack, Barrier, BarrierReply, Credit, Get, Hello, HelloReply, Message

if TYPE_CHECKING:
    from upr_protocol.session.session import Session


def _hello(session: Session, message: Hello) -> None:
    if not 1 <= len(message.identity.encode()) <= IDENTITY_BYTES_MAX:
        raise ProtocolError(f"an identity is 1 to {IDENTITY_BYTES_MAX} bytes")
    if message.window_bytes < WINDOW_BYTES_MIN:
        raise ProtocolError(f"a window has at least {WINDOW_BYTES_MIN} bytes")
    if not IDLE_INTERVAL_S_MIN <= message.idle_interval_s <= IDLE_INTERVAL_S_MAX:
        raise ProtocolError(
            f"an idle interval is {IDLE_INTERVAL_S_MIN} to {IDLE_INTERVAL_S_MAX} seconds"
        )
    session.window.grant(message.window_bytes)


def _hello_reply(session: Session, message: HelloReply) -> None:
    session.keep_alive = KeepAlive(message.idle_interval_s, session.now)


def _get(session: Session, message: Get) -> None:
    if not 1 <= len(message.keys) <= GET_KEYS_MAX:
        raise ProtocolError(f"a Get asks for 1 to {GET_KEYS_MAX} keys", Status.TOO_MANY)
    if not all(1 <= len(key) <= KEY_BYTES_MAX for key in message.keys):
        raise ProtocolError(f"a key is 1 to {KEY_BYTES_MAX} bytes")


def _barrier(session: Session, message: Barrier) -> None:
    cookie = message.cookie
    if not 1 <= len(cookie) <= COOKIE_BYTES_MAX:
        raise ProtocolError(f"a cookie is 1 to {COOKIE_BYTES_MAX} bytes")
    if cookie in session.barriers:
        raise ProtocolError(f"the barrier {cookie!r} is still open", Status.OPAQUE_IN_USE)
    if len(session.barriers) >= OPEN_BARRIERS_MAX:
        raise ProtocolError(f"{OPEN_BARRIERS_MAX} barriers are open", Status.TOO_MANY)
    session.barriers.add(cookie)


def _barrier_reply(session: Session, message: BarrierReply) -> None:
    if message.cookie not in session.barriers:
        raise ProtocolError(f"the barrier {message.cookie!r} is not open")
    session.barriers.remove(message.cookie)


def _ack(session: Session, message: Ack) -> None:
    session.window.give_back(message.bytes)


def _credit(session: Session, message: Credit) -> None:
    session.credit.grant(message.bytes)


RULES: Final[Mapping[type[Message], Callable[[Session, Any], None]]] = {
    Hello: _hello,
    HelloReply: _hello_reply,
    Get: _get,
    Barrier: _barrier,
    BarrierReply: _barrier_reply,
    Ack: _ack,
    Credit: _credit,
}
