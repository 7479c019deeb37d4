"""Memory for frames that have begun and not ended: one budget for all connections."""

from __future__ import annotations

from typing import Final

import trio

from upr_protocol.concurrency import Notifier

LARGE_FRAME_BYTES: Final = 1024 * 1024
"""Frames up to this length are not counted: 10,000 connections in the middle of one are what the
limit on connections is for."""

BUDGET_BYTES: Final = 256 * 1024 * 1024
"""Eight frames of the largest size. The next one waits, unread, for one of them to end."""

FRAME_TIMEOUT_S: Final = 60.0
FRAME_BYTES_PER_S_MIN: Final = 64 * 1024
"""A large frame that comes more slowly than this, and takes longer than the timeout, is given up:
it keeps others from their turn."""


def frame_timeout_s(length: int) -> float:
    """How long a large frame of `length` bytes may take to arrive."""
    return FRAME_TIMEOUT_S + length / FRAME_BYTES_PER_S_MIN


class FrameBudget:
    """Bytes that large frames under way may hold together; first come, first served.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        self._limit = limit
        self._acquire_lock = trio.StrictFIFOLock()
        self._freed = Notifier()
        self.used = 0
        """Bytes acquired and not released."""

    async def acquire(self, count: int) -> None:
        """Takes `count` bytes, when it is this task's turn and there are as many.

        On cancellation nothing was taken.
        """
        async with self._acquire_lock:
            while self.used and self.used + count > self._limit:
                await self._freed.wait()
            self.used += count

    def release(self, count: int) -> None:
        """Releases `count` bytes."""
        self.used -= count
        assert self.used >= 0, "more was released than acquired"
        self._freed.notify()
