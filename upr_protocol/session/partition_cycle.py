"""The cycle over partitions: which one is streamed next.

The server streams one snapshot of each registered partition that has something, in partition
order, again and again. Partitions with something to send are the bits of one integer, so that a
turn costs some hundred nanoseconds, however many partitions are registered and idle.
"""

from __future__ import annotations

import msgspec

from upr_protocol.ids import PARTITIONS_END, PartitionId


class EndOfCycle(msgspec.Struct, frozen=True):
    """A cycle is complete.

    Attributes:
        cycle: How many cycles are complete now.
    """

    cycle: int


CyclePosition = tuple[int, int]
"""(cycles completed, partition): how far the cycle has come. Positions compare as tuples."""


class PartitionCycle:
    """Whose turn it is.

    `next_turn` gives the next partition to stream a snapshot of, `begin_snapshot` notes that the
    snapshot has begun, and `finish_turn` that it was streamed, or that there was none after all.
    Between `next_turn` and `finish_turn` the partition is `current`.

    Attributes:
        completed: Cycles completed.
        current: The partition being streamed; None between turns.
        next_partition: The partition being streamed, or the next to be looked at: everything below
            was streamed or skipped in this cycle.
    """

    __slots__ = ("_announced", "_ready", "completed", "current", "next_partition")

    def __init__(self) -> None:
        self._ready = 0
        """Bit n: partition n has something to send."""
        self._announced = True
        """Whether the end of this cycle is announced: it sent anything, or it is the first."""
        self.completed = 0
        self.current: PartitionId | None = None
        self.next_partition = 0

    @property
    def barrier_position(self) -> CyclePosition:
        """Where a barrier that arrives now is noted: at the partition being streamed, or at the
        next if none is."""
        return self.completed, self.next_partition

    @property
    def passed_position(self) -> CyclePosition:
        """The last partition that was streamed or skipped."""
        return self.completed, self.next_partition - 1

    def mark_ready(self, partition: PartitionId) -> None:
        """`partition` has something to send. O(the highest partition / 64), as are the next two."""
        self._ready |= 1 << partition

    def remove(self, partition: PartitionId) -> None:
        """`partition` is not streamed any more; its turn, if it has it, is over."""
        self._ready &= ~(1 << partition)
        if self.current == partition:
            self.finish_turn()

    def next_turn(self) -> PartitionId | EndOfCycle | None:
        """The next turn: a partition, the end of a cycle that sent anything or was the first, or
        None when nothing is ready."""
        assert self.current is None, "the previous partition's turn has not ended"
        ready_ahead = self._ready >> self.next_partition
        if not ready_ahead:
            if self._announced:
                self._complete_cycle()
                return EndOfCycle(self.completed)
            if not self._ready:
                return None
            # Every ready partition is lower than the next one, and this cycle sent nothing: it
            # completes without an announcement.
            self._complete_cycle()
            ready_ahead = self._ready
        # The lowest bit that is set: its number is that of the bits below it.
        partition = PartitionId(self.next_partition + (ready_ahead & -ready_ahead).bit_length() - 1)
        self._ready ^= 1 << partition
        self.current = partition
        self.next_partition = partition
        return partition

    def begin_snapshot(self) -> None:
        """A snapshot of the current partition begins."""
        assert self.current is not None, "the cycle is at no partition"
        self._announced = True

    def _complete_cycle(self) -> None:
        self._announced = False
        self.completed += 1
        self.next_partition = 0

    def finish_turn(self) -> None:
        """The current partition's snapshot is complete, or it has none."""
        assert self.current is not None, "the cycle is at no partition"
        self.next_partition = self.current + 1
        self.current = None

    def check_invariants(self) -> None:
        """Asserts what always holds. O(1)."""
        assert 0 <= self.next_partition <= PARTITIONS_END
        assert self.current is None or self.current == self.next_partition
