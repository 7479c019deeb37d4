"""The numbers that a partition's index names: those of the mutations that compaction keeps.

The index is read once for all chunks, at some 1.5 µs an item. To look up the key of each mutation
takes 2.4 µs a mutation, and most are superseded where compaction is worth its while.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from upr_server.storage.key_index import KeyIndex

STEP_KEYS: Final = 16 * 1024
"""Entries of the index that one step reads: some 25 ms, for which a commit may wait."""

SPAN: Final = 1 << 28
"""For how many numbers it is recorded which are live: some 70 MB if there are live ones everywhere.
A partition with more is compacted in several parts, and each reads the index."""

_BLOCK_BITS: Final = 10
_BLOCK_MASK: Final = (1 << _BLOCK_BITS) - 1


class LiveSeqs:
    """Which of the numbers in (`after`, `through`] the index names.

    What the index takes in while it is read has numbers that no compaction under way comes to. It
    can only supersede mutations that are named here: these are kept until the next compaction.

    Args:
        index: The bucket's index.
        partition: The partition.
        after: See above.
        through: See above.

    Attributes:
        through: See above.
        is_complete: Whether all of the index was read.
    """

    def __init__(self, index: KeyIndex, partition: int, after: int, through: int) -> None:
        self._index = index
        self._partition = partition
        self._after = after
        self._last_key = b""
        self._blocks: dict[int, int] = {}
        """By the numbers' high bits, a bit for each live one."""
        self.through = through
        self.is_complete = False

    def read_step(self) -> None:
        """Reads `STEP_KEYS` entries.

        Raises:
            CorruptionError: One is damaged.
        """
        seqs, self._last_key = self._index.newest_seqs(self._partition, self._last_key, STEP_KEYS)
        blocks = self._blocks
        for seq in seqs:
            if self._after < seq <= self.through:
                number = seq >> _BLOCK_BITS
                blocks[number] = blocks.get(number, 0) | 1 << (seq & _BLOCK_MASK)
        self.is_complete = not self._last_key

    def are_live(self, seqs: Iterable[int]) -> bytes:
        """For each of these numbers 1 if the index names it, otherwise 0. O(numbers)."""
        flags = bytearray()
        number, block = -1, 0
        for seq in seqs:
            if seq >> _BLOCK_BITS != number:
                number = seq >> _BLOCK_BITS
                block = self._blocks.get(number, 0)
            flags.append(block >> (seq & _BLOCK_MASK) & 1)
        return bytes(flags)
