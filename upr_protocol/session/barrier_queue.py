"""Barriers on their way back, which the partition cycle measures."""

from __future__ import annotations

from collections import deque
from typing import Final

from upr_protocol.session.partition_cycle import CyclePosition


class BarrierQueue:
    """Open barriers, oldest first.

    A barrier that arrives in cycle c while partition p is being streamed is due at (c + 1, p): only
    then was every partition streamed or skipped since it arrived.
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: Final[deque[tuple[CyclePosition, bytes]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add_barrier(self, cookie: bytes, here: CyclePosition) -> None:
        """A barrier arrived while the cycle stood `here`."""
        cycle, partition = here
        self._queue.append(((cycle + 1, partition), cookie))

    def take_due(self, reached: CyclePosition) -> list[bytes]:
        """Takes out the barriers that are due once `reached` was streamed or skipped."""
        cookies = []
        while self._queue and self._queue[0][0] <= reached:
            cookies.append(self._queue.popleft()[1])
        return cookies

    def take_all(self) -> list[bytes]:
        """Takes out every barrier: nothing is left to stream."""
        cookies = [cookie for _, cookie in self._queue]
        self._queue.clear()
        return cookies
