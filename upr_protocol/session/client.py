"""The client's end of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from upr_protocol.chunk import Buffer
from upr_protocol.errors import LocalProtocolError, Status
from upr_protocol.limits import IDLE_INTERVAL_S_DEFAULT, WINDOW_BYTES_DEFAULT
from upr_protocol.session.session import Session
from upr_protocol.wire import (
    HEADER_BYTES,
    VERSION,
    Ack,
    Hello,
    Message,
    PartitionChunk,
    Role,
    SessionState,
)

_ACK_FRACTION = 4
"""Acknowledge once a quarter of the window was handled: the server then never runs dry, and one
acknowledgement serves for many chunks."""


class ClientSession(Session):
    """The side that connects.

    Args:
        identity: `what:who`, at most 200 bytes.
        window_bytes: How many bytes of stream frames may be on their way unacknowledged.
        idle_interval_s: The silence after which a side says `Noop`.
        now: The time.
        allocate: Gives so many writable bytes for a frame's body, of any content.
    """

    role: ClassVar[Role] = Role.CLIENT
    peer: ClassVar[Role] = Role.SERVER

    def __init__(
        self,
        identity: str,
        *,
        window_bytes: int = WINDOW_BYTES_DEFAULT,
        idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
        now: float,
        allocate: Callable[[int], Buffer] = bytearray,
    ) -> None:
        super().__init__(now, allocate)
        self._window_bytes = window_bytes
        self._unacknowledged = 0
        self._next_opaque = 1
        self.send(Hello(identity, (VERSION,), 0, window_bytes, idle_interval_s))

    def new_opaque(self) -> int:
        """An opaque that no open request or stream uses."""
        while self._next_opaque in self._requests:
            self._next_opaque = self._next_opaque % 0xFFFF_FFFF + 1
        opaque = self._next_opaque
        self._next_opaque = self._next_opaque % 0xFFFF_FFFF + 1
        return opaque

    def acknowledge(self, count: int) -> None:
        """`count` bytes of chunk frames, headers counted, were handled; tells the server when it is
        worth a frame. Does nothing when the session is over.

        Raises:
            LocalProtocolError: More than was received.
        """
        if self.state is SessionState.CLOSED:
            return
        total = self._unacknowledged + count
        if not 0 <= count <= total <= self.window.used_bytes:
            raise LocalProtocolError(
                f"cannot acknowledge {count} bytes of the "
                f"{self.window.used_bytes - self._unacknowledged} received",
                Status.FLOW_CONTROL,
            )
        self._unacknowledged = total
        if total * _ACK_FRACTION >= self._window_bytes:
            self._unacknowledged = 0
            self.send(Ack(total))

    def _discard(self, message: Message) -> None:
        if isinstance(message, PartitionChunk):
            self.acknowledge(HEADER_BYTES + message.chunk.nbytes)
