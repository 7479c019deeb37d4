"""The key table: each key's newest sequence number, and whether that mutation is a tombstone.

Keys have an order: that in which they were entered, and then that in which `evict` has put them
back. The native table has the same one.
"""

from __future__ import annotations

from itertools import count, islice, repeat
from sys import getsizeof
from typing import Final

from upr_kernel.pure.columns import Buffer, Columns

KEY_BYTES_MAX: Final = 255

SEQ_END: Final = 1 << 63
"""One more than the highest number: the native table has a bit less than 64 for it."""

ENTRY_BYTES: Final = 69
"""What a key takes beside its own bytes and its slots in the dict: the number (32), the head of a
bytes object (33), and what the allocator rounds up."""

SLOTS_BYTES_MAX: Final = 112
"""A dict that takes more than this a key after some were forgotten is made anew: it would shrink by
itself only when it grows."""

SLOTS_BYTES_MIN: Final = 64 * 1024
"""A dict below this is left alone."""


class KeyTable:
    """Key to the number of its newest mutation, and whether that is a tombstone.

    Attributes:
        items: Keys whose newest mutation is not a tombstone.
    """

    # An entry is one integer, to save memory: the number, negative for a tombstone.
    __slots__ = ("_entries", "_key_bytes", "items")

    def __init__(self) -> None:
        self._entries: dict[bytes, int] = {}
        self._key_bytes = 0
        self.items = 0

    def __len__(self) -> int:
        """Keys, with tombstones."""
        return len(self._entries)

    def entries(self) -> list[tuple[bytes, int, bool]]:
        """Each key in its order, its newest number, and whether that is a tombstone. O(keys)."""
        return [(key, abs(entry), entry < 0) for key, entry in self._entries.items()]

    def newest(self, key: bytes) -> tuple[int, bool]:
        """The number of the key's newest mutation, and whether that is a tombstone. O(1).

        The number is 0 when the table does not know the key.
        """
        entry = self._entries.get(key, 0)
        return (entry, False) if entry >= 0 else (-entry, True)

    def holds_item(self, key: bytes, seq: int, /) -> bool:
        """Whether the mutation with this number is the key's newest, and no tombstone. O(1)."""
        return self._entries.get(key) == seq

    def put(self, key: bytes, seq: int, is_tombstone: bool = False, /) -> int:
        """Enters one mutation. O(1), with growing in small steps.

        Args:
            key: 1 to 255 bytes.
            seq: The number of its newest mutation, 1 to 2**63 - 1.
            is_tombstone: Whether that is a deletion.

        Returns:
            The number that was its newest; 0 when the table did not know the key.

        Raises:
            ValueError: The key or the number is not one.
        """
        _check_seq(seq)
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError("a key is 1 to 255 bytes")
        previous = self._entries.get(key, 0)
        self._entries[key] = -seq if is_tombstone else seq
        self.items += (not is_tombstone) - (previous > 0)
        if not previous:
            self._key_bytes += len(key)
        return abs(previous)

    def put_run(
        self,
        chunk: Buffer,
        low: int,
        high: int,
        first_seq: int,
        start: int,
        base: int,
        flags: bytearray,
        /,
    ) -> tuple[list[int], int]:
        """Enters rows of a chunk that all store values: the hot loop of the whole engine. O(rows).

        A number of the open snapshot that is superseded is flagged where the flags reach it;
        otherwise it is returned.

        Args:
            chunk: An encoded chunk.
            low: The first row.
            high: The row behind the last.
            first_seq: The number of the first row; the others follow on.
            start: The open snapshot's start: numbers above it are in the open snapshot.
            base: The number of the first flag.
            flags: A flag for each number from `base` on; 1 for superseded. Not part of the chunk.

        Returns:
            Numbers of the open snapshot that were superseded and have no flag, in the order of the
            rows, and how many keys had no earlier mutation in the open snapshot.

        Raises:
            ChunkDefectError: The chunk is damaged; nothing was entered.
            IndexError: The chunk does not have the rows; nothing was entered.
        """
        _check_seq(first_seq)
        keys = Columns(chunk).keys(low, high)
        if first_seq + len(keys) >= SEQ_END:
            raise ValueError("a sequence number is 1 to 2**63 - 1")
        entries, end = self._entries, base + len(flags)
        superseded: list[int] = []
        deleted_rows: list[int] = []
        new_keys: list[bytes] = []
        fresh = 0
        # `map` is lazy: each key is looked up when its turn comes, after what stands before it.
        previously = map(entries.get, keys, repeat(0))
        for seq, key, previous in zip(count(first_seq), keys, previously, strict=False):
            entries[key] = seq
            if not previous:
                new_keys.append(key)
                continue
            if previous < 0:
                deleted_rows.append(previous)
                previous = -previous
            if previous <= start:
                fresh += 1
            elif base <= previous < end:
                flags[previous - base] = 1
            else:
                superseded.append(previous)
        self.items += len(deleted_rows) + len(new_keys)
        self._key_bytes += sum(map(len, new_keys))
        return superseded, fresh + len(new_keys)

    def evict(self, through: int, budget: int, tombstones_only: bool = False, /) -> int:
        """Looks at the `budget` keys that stand first, and forgets those up to a number.

        O(budget). The others are put at the end, so that the next call looks at others.

        Args:
            through: Keys whose newest number is at most this are forgotten.
            budget: How many keys to look at.
            tombstones_only: Whether to forget only tombstones.

        Returns:
            How many were forgotten.

        Raises:
            MemoryError: There is no memory to put a key at the end, and none was forgotten. If some
                were, the native table looks at fewer.
        """
        entries = self._entries
        evicted_count = 0
        for key, entry in list(islice(entries.items(), budget)):
            del entries[key]
            if -through <= entry <= (0 if tombstones_only else through):
                evicted_count += 1
                self._key_bytes -= len(key)
                self.items -= entry > 0
            else:
                entries[key] = entry
        slots = getsizeof(entries)
        if slots > SLOTS_BYTES_MIN and slots > SLOTS_BYTES_MAX * len(entries):
            self._entries = dict(entries)
        return evicted_count

    def clear(self) -> None:
        """Forgets every key."""
        self._entries = {}
        self._key_bytes = self.items = 0

    @property
    def nbytes(self) -> int:
        """What the table takes, about. O(1)."""
        entries = self._entries
        return getsizeof(entries) + ENTRY_BYTES * len(entries) + self._key_bytes

    def statistics(self) -> dict[str, int]:
        """Keys, items and bytes; the native table adds its slots, and whether they move."""
        return {"keys": len(self), "items": self.items, "bytes": self.nbytes}

    def check_invariants(self) -> None:
        """Counts what is counted. O(keys)."""
        entries = self._entries
        assert 0 not in entries.values(), "a key without a number"
        assert self.items == sum(entry > 0 for entry in entries.values()), "items"
        assert self._key_bytes == sum(map(len, entries)), "key bytes"


def _check_seq(seq: int) -> None:
    if not 0 < seq < SEQ_END:
        raise ValueError("a sequence number is 1 to 2**63 - 1")
