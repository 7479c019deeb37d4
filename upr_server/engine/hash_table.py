"""The hash table: each key's newest sequence number.

One table a partition serves everything that starts from a key: deduplication (a previous number
above the open snapshot's start means that the older event is in the open snapshot), existence, and
reads (the value is found by its number). Why it holds numbers and not values, and why there is no
second index for the open snapshot: docs/adr/0003-one-hash-table.md.

An entry is one integer, to save memory: the number, negative when the mutation is a tombstone. No
other module sees the sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, repeat
from sys import getsizeof
from typing import Final

from upr_server.engine.memory_account import MemoryAccount

ENTRY_BYTES: Final = 69
"""What a key takes beside its own bytes and its slots in the dict: the number (32), the head of a
bytes object (33), and what the allocator rounds up."""

SLOTS_BYTES_MAX: Final = 112
"""A dict that takes more than this a key after some were forgotten is made anew: it would shrink by
itself only when it grows."""

SLOTS_BYTES_MIN: Final = 64 * 1024
"""A dict below this is left alone."""

_EMPTY_BYTES: Final = getsizeof({})


class HashTable:
    """Key to the number of its newest mutation, and whether that is a tombstone.

    Whether a key exists is told without a look at the mutation. Tombstones stay: until they are
    persisted, only the table knows of them. What the disk's index knows may be evicted.

    Attributes:
        items: Keys that exist: those whose newest mutation is not a tombstone.
    """

    __slots__ = ("_entries", "_key_bytes", "_memory", "_nbytes", "items")

    def __init__(self, memory: MemoryAccount) -> None:
        self._memory = memory
        self._key_bytes = 0
        self._nbytes = 0
        self._entries: dict[bytes, int] = {}
        self.items = 0

    def __len__(self) -> int:
        """Keys known, with tombstones."""
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[bytes, int, bool]]:
        """Each key, its newest mutation's number, and whether that is a tombstone."""
        return ((key, abs(entry), entry < 0) for key, entry in self._entries.items())

    def newest(self, key: bytes) -> tuple[int, bool]:
        """The number of the key's newest mutation, and whether that is a tombstone. O(1).

        The number is 0 when the table does not know the key.
        """
        entry = self._entries.get(key, 0)
        return (entry, False) if entry >= 0 else (-entry, True)

    def holds_item(self, key: bytes, seq: int) -> bool:
        """Whether the mutation with this number is the key's newest, and no tombstone. O(1)."""
        return self._entries.get(key) == seq

    def put(self, key: bytes, seq: int, *, is_tombstone: bool = False) -> int:
        """Enters one mutation. O(1).

        Args:
            key: The key.
            seq: The number of its newest mutation.
            is_tombstone: Whether that is a deletion.

        Returns:
            The number of the mutation that was its newest; 0 when the table did not know the key.
        """
        previous = self._entries.get(key, 0)
        self._entries[key] = -seq if is_tombstone else seq
        self.items += (not is_tombstone) - (previous > 0)
        if not previous:
            self._grew(len(key))
        return abs(previous)

    def put_all(
        self, keys: list[bytes], first: int, start: int, base: int, flags: bytearray
    ) -> tuple[list[int], int]:
        """Enters a run of mutations that all store values: the hot loop of the whole engine.

        O(keys). What the run supersedes in the open snapshot is mostly recent: where it is covered
        by the skip flags it is flagged here, and else returned.

        Args:
            keys: The keys; one may occur again.
            first: The number of the first; the others follow on.
            start: The open snapshot's start: numbers above it are in the open snapshot.
            base: The number of the first skip flag.
            flags: The skip flags, reaching to the run's last number.

        Returns:
            Numbers of the open snapshot that were superseded and are not flagged yet, in no order,
            and how many keys had no earlier mutation in the open snapshot.
        """
        entries = self._entries
        superseded: list[int] = []
        deleted: list[int] = []
        new: list[bytes] = []
        elsewhere = 0
        # `map` is lazy: each key is looked up when its turn comes, after what stands before it.
        previously = map(entries.get, keys, repeat(0))
        for seq, key, previous in zip(count(first), keys, previously, strict=False):
            entries[key] = seq
            if previous >= base:
                flags[previous - base] = 1
            elif previous > start:
                superseded.append(previous)
            elif previous > 0:
                elsewhere += 1
            elif previous:
                deleted.append(-previous)
            else:
                new.append(key)
        if not (deleted or new):
            return superseded, elsewhere
        inside = [seq for seq in deleted if seq > start]
        superseded += inside
        if new:
            self._grew(sum(map(len, new)))
        self.items += len(deleted) + len(new)
        return superseded, elsewhere + len(new) + len(deleted) - len(inside)

    def evict(self, through: int, budget: int) -> int:
        """Looks at the `budget` keys that stand first, and forgets those that the disk knows.

        O(budget). The others are put at the end, so that the next call looks at others.

        Args:
            through: The disk knows the newest mutation of every key up to this number.
            budget: How many keys to look at.

        Returns:
            How many were forgotten.
        """
        entries = self._entries
        evicted = key_bytes = items = 0
        for key, entry in list(islice(entries.items(), budget)):
            del entries[key]
            if -through <= entry <= through:
                evicted += 1
                key_bytes += len(key)
                items += entry > 0
            else:
                entries[key] = entry
        self.items -= items
        slots = getsizeof(entries)
        if slots > SLOTS_BYTES_MIN and slots > SLOTS_BYTES_MAX * len(entries):
            self._entries = dict(entries)
        self._grew(-key_bytes)
        return evicted

    def clear(self) -> None:
        """Forgets every key."""
        self._memory.table -= self._nbytes
        self._entries = {}
        self._key_bytes = self._nbytes = self.items = 0

    def _grew(self, key_bytes: int) -> None:
        self._key_bytes += key_bytes
        before, self._nbytes = self._nbytes, self._measured()
        self._memory.table += self._nbytes - before

    def _measured(self) -> int:
        entries = self._entries
        return getsizeof(entries) - _EMPTY_BYTES + ENTRY_BYTES * len(entries) + self._key_bytes

    @property
    def nbytes(self) -> int:
        """What the table takes, about."""
        return self._nbytes

    def statistics(self) -> dict[str, int]:
        """Keys, keys that exist, and bytes."""
        return {"keys": len(self._entries), "items": self.items, "bytes": self.nbytes}

    def check_invariants(self) -> None:
        """Counts what is counted. O(keys)."""
        entries = self._entries
        assert 0 not in entries.values(), "a key without a number"
        assert self.items == sum(entry > 0 for entry in entries.values()), "items"
        assert self._key_bytes == sum(map(len, entries)), "key bytes"
        assert self._nbytes == self._measured(), "bytes"
        assert len({abs(entry) for entry in entries.values()}) == len(entries), (
            "two keys with one number"
        )
