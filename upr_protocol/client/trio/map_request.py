"""A question for a node's partition map, on a connection that is there."""

from __future__ import annotations

import math

import attrs
import trio

from upr_protocol.client.trio.connection import Connection
from upr_protocol.errors import UprError
from upr_protocol.wire import GetMap


@attrs.define
class MapRequest:
    """One question at a time: who has not answered is not asked again.

    Attributes:
        asked_at: When it was asked last; `-inf` for never.
        waits: Whether the answer is still to come.
    """

    asked_at: float = -math.inf
    waits: bool = False

    def ask(self, connection: Connection, bucket: str, patience_s: float) -> bool:
        """Asks, unless an answer is waited for; whether one may yet come."""
        now = trio.current_time()
        if self.waits:
            return now < self.asked_at + patience_s
        try:
            connection.send(GetMap(bucket, opaque=connection.session.new_opaque()))
        except UprError:
            return False
        self.asked_at, self.waits = now, True
        return True
