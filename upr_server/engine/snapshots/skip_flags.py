"""Skip flags: which of the newest documents are superseded, by sequence number.

Most of what a mutation supersedes is recent. So the flags of the newest arrays stand together in
one bytearray, and the hot loop flags a number with one subtraction and one store: 14 ns a mutation,
against 86 when the flags stand in each array and the superseded numbers are sorted and swept over
the arrays. Older arrays have flags of their own: they
get their part of the shared ones (`DocumentList.move_flags_to_arrays`).
"""

from __future__ import annotations

from typing import Final

from upr_kernel import OpenRows
from upr_protocol.ids import SeqNo

COVERED_MIN: Final = 8192
"""Numbers that the flags may always cover: 8 KiB a partition at most."""

COVERED_PER_LIVE: Final = 4
"""Numbers that they may cover for each live mutation, which takes a hundred times as much."""


class SkipFlags:
    """A flag for each number from `base` on, or none at all: 1 for skipped.

    Args:
        rows: The rows of the open snapshot. The flags stand there, so that the kernel sets them.

    Attributes:
        flags: The flags.
    """

    __slots__ = ("_rows", "flags")

    def __init__(self, rows: OpenRows) -> None:
        self._rows = rows
        self.flags = rows.flags

    @property
    def base(self) -> int:
        """The number of the first flag; without flags it means nothing."""
        return self._rows.base

    def __len__(self) -> int:
        return len(self.flags)

    def __contains__(self, seq: int) -> bool:
        return bool(self.flags) and seq >= self._rows.base

    def extend(self, first_seq: SeqNo, count: int) -> None:
        """Covers `count` more numbers from `first_seq` on, which must follow on the last."""
        if not self.flags:
            self._rows.base = first_seq
        self.flags += bytes(count)

    def extend_through(self, seq: SeqNo) -> int:
        """Covers a number above all covered ones, and those between; returns how many."""
        if not self.flags:
            self._rows.base = seq
        count = seq + 1 - self._rows.base - len(self.flags)
        self.flags += bytes(count)
        return count

    def skip(self, seq: int) -> None:
        """Flags a covered number."""
        self.flags[seq - self._rows.base] = 1

    def count_skipped(self, first_seq: int, last_seq: int) -> int:
        """How many of the numbers in [`first_seq`, `last_seq`] are flagged. At memory speed."""
        base = self._rows.base
        return self.flags.count(1, first_seq - base, last_seq + 1 - base)

    def clear(self, first_seq: int, last_seq: int) -> None:
        """Takes back the flags of the numbers in [`first_seq`, `last_seq`]."""
        base = self._rows.base
        self.flags[first_seq - base : last_seq + 1 - base] = bytes(last_seq - first_seq + 1)

    def drop_below(self, seq: int) -> None:
        """Drops all flags below `seq`."""
        del self.flags[: seq - self._rows.base]
        self._rows.base = seq

    def excess_flags(self, live: int) -> int:
        """How many flags to let go of, with so many live mutations: none up to a limit, and then
        down to half of it, so that the cost is spread over as many numbers."""
        limit = COVERED_MIN + COVERED_PER_LIVE * live
        return len(self.flags) - limit // 2 if len(self.flags) > limit else 0
