"""The turns of work that takes more than one step of the loop."""

from __future__ import annotations

import trio


class Turns:
    """The turns of one kind of long work. Of all connections and partitions one has its turn in a
    step of the loop, so that together they hold up others no longer than one does."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = trio.StrictFIFOLock()

    async def next_turn(self) -> None:
        """Waits for a turn, behind those that wait already. It lasts until the next checkpoint."""
        async with self._lock:
            await trio.lowlevel.checkpoint()
