"""What both sides of a session keep count of alike, and the rules see."""

from __future__ import annotations

from typing import Final

from upr_protocol.limits import (
    FRAME_BODY_BYTES_MAX,
    IDLE_INTERVAL_S_DEFAULT,
    OPEN_BARRIERS_MAX,
    REQUESTS_OPEN_MAX,
)
from upr_protocol.session.flow_control import Allowance
from upr_protocol.session.keepalive import KeepAlive
from upr_protocol.wire import VERSION, Hello, HelloReply

_BEFORE_AGREEMENT: Final = HelloReply(
    VERSION,
    0,
    IDLE_INTERVAL_S_DEFAULT,
    FRAME_BODY_BYTES_MAX,
    OPEN_BARRIERS_MAX,
    REQUESTS_OPEN_MAX,
    "",
)
"""The version's own limits, which hold until the server has answered `Hello`."""


class SessionContext:
    """What was agreed in the handshake, and what flow control and barriers have come to.

    Attributes:
        hello: What the client introduced itself with, or None before that.
        agreed: What the server answered to it; before that, the version's own limits.
        window: Bytes of stream frames that the server may still send.
        credit: Bytes of `Mutate` frames that the client may still send.
        barriers: The cookies of open barriers, oldest first.
        keep_alive: When to say something, and when to give up.
        now: The time of the last `receive`.
    """

    def __init__(self, now: float) -> None:
        self.hello: Hello | None = None
        self.agreed = _BEFORE_AGREEMENT
        self.window = Allowance()
        self.credit = Allowance()
        self.barriers: dict[bytes, None] = {}
        self.keep_alive = KeepAlive(IDLE_INTERVAL_S_DEFAULT, now)
        self.now = now
