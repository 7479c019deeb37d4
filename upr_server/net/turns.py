"""The turns of work that takes more than one step of the loop."""

from __future__ import annotations

from typing import Final, Protocol

import trio

TURN_READ_BYTES: Final = 2 * 1024 * 1024
"""Bytes after which no large read begins in the same turn of the loop. A MiB takes about a
millisecond."""


class TurnCounter(Protocol):
    """Counts the loop's turns."""

    turn_count: int


class Turns:
    """The turns of one kind of long work. Of all connections and partitions one has its turn in a
    step of the loop, so that together they hold up others no longer than one does."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = trio.StrictFIFOLock()

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits for a turn."""
        return self._lock.locked()

    async def next_turn(self) -> None:
        """Waits for a turn, behind those that wait already. It lasts until the next checkpoint."""
        async with self._lock:
            await trio.lowlevel.checkpoint()


class ReadTurns:
    """The turns of large reads: any number in a turn of the loop, until they come to
    `TURN_READ_BYTES`; then one in each turn, until nobody waits. A few publishers of large batches
    never wait, and hundreds of them hold up others no longer than one does.

    Args:
        turn_counter: Counts the loop's turns. If it stands still, each read waits after the first
            `TURN_READ_BYTES`.
    """

    __slots__ = ("_nbytes", "_turn", "_turn_counter", "_turns")

    def __init__(self, turn_counter: TurnCounter) -> None:
        self._turn_counter = turn_counter
        self._turns = Turns()
        self._turn = -1
        self._nbytes = 0
        """What was read in that turn."""

    @property
    def may_read(self) -> bool:
        """Whether a large read may begin now."""
        is_new_turn = self._turn != self._turn_counter.turn_count
        return not self._turns.has_waiting and (is_new_turn or self._nbytes < TURN_READ_BYTES)

    async def next_turn(self) -> None:
        """Waits until a large read may begin, behind those that wait already."""
        await self._turns.next_turn()

    def note_read(self, nbytes: int) -> None:
        """Counts what was read."""
        if self._turn != self._turn_counter.turn_count:
            self._turn, self._nbytes = self._turn_counter.turn_count, 0
        self._nbytes += nbytes
