"""What a consumer was told, counted."""

from __future__ import annotations

from collections.abc import Callable

from upr_protocol.cli.progress import rate_text
from upr_protocol.cli.sizes import size_text
from upr_protocol.client import ChunkReceived, Event, RolledBack, SnapshotEnd, Undone
from upr_protocol.ids import Operation

_SET = bytes((Operation.SET,))


class Summary:
    """Counts events.

    Args:
        clock: Gives the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self._lined_at = clock()
        self._lined_mutations = 0
        self.mutations = 0
        self.removals = 0
        self.nbytes = 0
        self.snapshots = 0
        self.rollbacks = 0
        self._partitions: set[int] = set()

    def add(self, event: Event | Undone) -> None:
        """Counts `event`. O(1) a chunk, but for a scan at memory speed."""
        if isinstance(event, ChunkReceived):
            chunk = event.chunk
            self.mutations += chunk.count
            self.removals += chunk.count - chunk.operations.tobytes().count(_SET)
            self.nbytes += chunk.nbytes
            self._partitions.add(event.partition)
        elif isinstance(event, SnapshotEnd):
            self.snapshots += 1
        elif isinstance(event, RolledBack | Undone):
            self.rollbacks += 1

    def line(self) -> str:
        """The totals, and the rate since the line before."""
        now = self._clock()
        rate = rate_text(self.mutations - self._lined_mutations, now - self._lined_at)
        self._lined_at, self._lined_mutations = now, self.mutations
        return f"{self._counts()}, now {rate}"

    def total(self) -> str:
        """The totals, and the rate from beginning to end."""
        seconds = self._clock() - self._began_at
        return f"{self._counts()}, in {seconds:.1f} s ({rate_text(self.mutations, seconds)})"

    def _counts(self) -> str:
        removed = f" ({self.removals:,} of them removals)" if self.removals else ""
        restarted = f", {self.rollbacks:,} restarts" if self.rollbacks else ""
        return (
            f"{self.mutations:,} changes{removed} in {self.snapshots:,} snapshots of "
            f"{len(self._partitions):,} partitions, {size_text(self.nbytes)}{restarted}"
        )
