"""Ranges of sequence numbers that leases protect from compaction."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from upr_server.storage.records import SEQS_END, LeaseRecord

SeqRange = tuple[int, int]
"""(start, end], start exclusive."""

SeqRanges = Sequence[SeqRange]
"""Leased ranges of one partition."""


class LeasedRanges:
    """The numbers of one partition that lie in leased ranges.

    Args:
        ranges: The ranges, in any order. Those that touch each other count as one.
    """

    __slots__ = ("_ranges",)

    def __init__(self, ranges: SeqRanges) -> None:
        self._ranges: list[SeqRange] = []
        for start, end in sorted(ranges):
            if self._ranges and start <= self._ranges[-1][1]:
                self._ranges[-1] = self._ranges[-1][0], max(end, self._ranges[-1][1])
            elif start < end:
                self._ranges.append((start, end))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def range_of(self, seq: int) -> SeqRange | None:
        """The range in which a number lies; None if it is not leased. O(log ranges)."""
        position = bisect_left(self._ranges, (seq,)) - 1
        if position >= 0 and seq <= self._ranges[position][1]:
            return self._ranges[position]
        return None

    def contain(self, start: int, end: int) -> bool:
        """Whether all numbers of a range are leased. O(log ranges)."""
        position = bisect_right(self._ranges, (start, SEQS_END)) - 1
        return position >= 0 and end <= self._ranges[position][1]


def covered_ranges(ranges: Iterable[SeqRange], by: SeqRanges) -> set[SeqRange]:
    """Those of these ranges of which all numbers lie in the ranges `by`."""
    leased_ranges = LeasedRanges(by)
    return {(start, end) for start, end in ranges if leased_ranges.contain(start, end)}


def covers_any(lease: LeaseRecord, partition: int, seqs: Sequence[int]) -> bool:
    """Whether one of these rising sequence numbers lies in the lease's ranges."""
    for leased_partition, start, end in lease.ranges:
        if leased_partition == partition:
            position = bisect_right(seqs, start)
            if position < len(seqs) and seqs[position] <= end:
                return True
    return False
