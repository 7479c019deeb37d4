"""Flow control: bytes that one side allows and the other uses up.

Both kinds work alike. A consumer allows a window of stream frames and widens it again with `Ack`; a
server allows credit for `Mutate` frames and adds to it with `Credit`. The sender goes on while
anything is left, so it may overshoot by one frame: otherwise a frame longer than the window could
never be sent.
"""

from __future__ import annotations


class Allowance:
    """Bytes that may still be sent.

    Attributes:
        remaining_bytes: Bytes left; below 0 by at most the last frame.
        used_bytes: Bytes used that the peer has not given back.
    """

    __slots__ = ("remaining_bytes", "used_bytes")

    def __init__(self) -> None:
        self.remaining_bytes = 0
        self.used_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether another frame may be sent."""
        return self.remaining_bytes > 0

    def note_sent(self, count: int) -> None:
        """A frame of `count` bytes was sent, while the allowance was open."""
        assert self.remaining_bytes > 0
        self.remaining_bytes -= count
        self.used_bytes += count

    def grant(self, count: int) -> None:
        """The peer allows `count` bytes more."""
        self.remaining_bytes += count

    def give_back(self, count: int) -> None:
        """The peer has handled `count` of the bytes that were used."""
        assert 0 <= count <= self.used_bytes
        self.used_bytes -= count
        self.remaining_bytes += count
