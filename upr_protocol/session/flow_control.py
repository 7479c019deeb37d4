"""Flow control: bytes that one side allows and the other uses up.

Both kinds work alike. A consumer allows a window of stream frames and widens it again with `Ack`; a
server allows credit for `Mutate` frames and adds to it with `Credit`. The sender goes on while
anything is left, so it may overshoot by one frame: else a frame longer than the window could never
be sent.
"""

from __future__ import annotations


class Allowance:
    """Bytes that may still be sent.

    Attributes:
        left: Bytes left; below 0 by at most the last frame.
        used: Bytes used that the peer has not given back.
    """

    __slots__ = ("left", "used")

    def __init__(self) -> None:
        self.left = 0
        self.used = 0

    @property
    def is_open(self) -> bool:
        """Whether another frame may be sent."""
        return self.left > 0

    def note_sent(self, count: int) -> None:
        """A frame of `count` bytes was sent, while the allowance was open."""
        assert self.left > 0
        self.left -= count
        self.used += count

    def grant(self, count: int) -> None:
        """The peer allows `count` bytes more."""
        self.left += count

    def give_back(self, count: int) -> None:
        """The peer has handled `count` of the bytes that were used."""
        assert 0 <= count <= self.used
        self.used -= count
        self.left += count
