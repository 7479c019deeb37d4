"""Both ends of a conversation as state machines: bytes in, messages out, and no I/O.

A session is fed with `receive` and asked for `messages`; what it is told to `send` comes out of
`take_outgoing` as bytes. Every message, in either direction and on either side, is checked by the
same code against the same tables (`states`), so that what one side refuses to send the other
refuses to take.
"""

from __future__ import annotations

from upr_protocol.session.client import ClientSession
from upr_protocol.session.partition_cycle import EndOfCycle, PartitionCycle
from upr_protocol.session.server import ServerSession
from upr_protocol.session.session import Session
from upr_protocol.session.states import StreamState
from upr_protocol.wire import SessionState

__all__ = [
    "ClientSession",
    "EndOfCycle",
    "PartitionCycle",
    "ServerSession",
    "Session",
    "SessionState",
    "StreamState",
]
