"""Flow control: bytes that one side allows and the other uses up.

Both kinds work alike. A consumer allows a window of stream frames and widens it again with `Ack`; a
server allows credit for `Mutate` frames and adds to it with `Credit`. The sender goes on while
anything is left, so it may overshoot by one frame: else a frame longer than the window could never
be sent.
"""

from __future__ import annotations

from upr_protocol.errors import ProtocolError, Status


class Allowance:
    """Bytes that may still be sent.

    Attributes:
        left: Bytes left; below 0 by at most the last frame.
    """

    __slots__ = ("_used", "left")

    def __init__(self, left: int = 0) -> None:
        self.left = left
        self._used = 0

    @property
    def open(self) -> bool:
        """Whether another frame may be sent."""
        return self.left > 0

    @property
    def used(self) -> int:
        """Bytes used and not given back."""
        return self._used

    def use(self, count: int) -> None:
        """A frame of `count` bytes was sent.

        Raises:
            ProtocolError: Nothing was left.
        """
        if self.left <= 0:
            raise ProtocolError("more was sent than the peer allowed", Status.FLOW_CONTROL)
        self.left -= count
        self._used += count

    def grant(self, count: int) -> None:
        """The peer allows `count` bytes more."""
        self.left += count

    def give_back(self, count: int) -> None:
        """The peer dealt with `count` of the bytes that were used.

        Raises:
            ProtocolError: Fewer were used.
        """
        if count > self._used:
            raise ProtocolError(
                f"{count} bytes acknowledged, {self._used} are on their way", Status.FLOW_CONTROL
            )
        self._used -= count
        self.left += count
