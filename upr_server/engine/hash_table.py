"""The hash table: each key's newest sequence number (seeds 000 and 002).

One table a partition serves everything that starts from a key: deduplication (a previous number
above the open snapshot's start means that the older event is in the open snapshot), existence, and
reads (the value is found by its number). Why it holds numbers and not values, and why there is no
second index for the open snapshot: docs/adr/0003-one-hash-table.md.
"""

from __future__ import annotations

from itertools import count, islice, repeat
from sys import getsizeof
from typing import Final

from upr_server.engine.memory import Memory

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
    """Key to the number of its newest mutation; negative when that is a tombstone.

    The sign tells existence without a look at the mutation. Tombstones stay: until they are
    persisted, the table is what knows of them (seed 002). What the disk's index knows may be
    evicted.

    Attributes:
        numbers: The table itself. The hot loops of this module read and write it; everybody else
            reads it through `newest`.
        items: Keys that exist: those whose number is positive.
    """

    __slots__ = ("_key_bytes", "_memory", "_nbytes", "items", "numbers")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._key_bytes = 0
        self._nbytes = 0
        self.numbers: dict[bytes, int] = {}
        self.items = 0

    def __len__(self) -> int:
        """Keys known, with tombstones."""
        return len(self.numbers)

    def newest(self, key: bytes) -> int:
        """The signed number of the key's newest mutation; 0 when there never was one. O(1)."""
        return self.numbers.get(key, 0)

    def put(self, key: bytes, number: int) -> None:
        """Enters one mutation. O(1).

        Args:
            key: The key.
            number: Its new number, negative for a tombstone.
        """
        previous = self.numbers.get(key, 0)
        self.numbers[key] = number
        self.items += (number > 0) - (previous > 0)
        if not previous:
            self._grew(len(key))

    def put_all(
        self, keys: list[bytes], first: int, start: int, base: int, flags: bytearray
    ) -> tuple[list[int], int]:
        """Enters a run of mutations that all store values: the hot loop of the whole engine.

        O(keys). What the run supersedes in the open snapshot is flagged right here where it lies
        in the window, which is where most of it lies, and else returned.

        Args:
            keys: The keys; one may occur again.
            first: The number of the first; the others follow on.
            start: The open snapshot's start: numbers above it are in the open snapshot.
            base: The number that the window's first flag is for.
            flags: The window's skip flags, reaching to the run's last number.

        Returns:
            Numbers of the open snapshot that were superseded and are not flagged yet, in no order,
            and how many keys had no earlier mutation in the open snapshot.
        """
        numbers = self.numbers
        superseded: list[int] = []
        deleted: list[int] = []
        new: list[bytes] = []
        elsewhere = 0
        # `map` is lazy: each key is looked up when its turn comes, after what stands before it.
        previously = map(numbers.get, keys, repeat(0))
        for number, key, previous in zip(count(first), keys, previously, strict=False):
            numbers[key] = number
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
        inside = [number for number in deleted if number > start]
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
        numbers = self.numbers
        evicted = key_bytes = items = 0
        for key, number in list(islice(numbers.items(), budget)):
            del numbers[key]
            if -through <= number <= through:
                evicted += 1
                key_bytes += len(key)
                items += number > 0
            else:
                numbers[key] = number
        self.items -= items
        slots = getsizeof(numbers)
        if slots > SLOTS_BYTES_MIN and slots > SLOTS_BYTES_MAX * len(numbers):
            self.numbers = dict(numbers)
        self._grew(-key_bytes)
        return evicted

    def _grew(self, key_bytes: int) -> None:
        self._key_bytes += key_bytes
        before, self._nbytes = self._nbytes, self._measured()
        self._memory.table += self._nbytes - before

    def _measured(self) -> int:
        numbers = self.numbers
        return getsizeof(numbers) - _EMPTY_BYTES + ENTRY_BYTES * len(numbers) + self._key_bytes

    @property
    def nbytes(self) -> int:
        """What the table takes, about."""
        return self._nbytes

    def statistics(self) -> dict[str, int]:
        """Keys, keys that exist, and bytes."""
        return {"keys": len(self.numbers), "items": self.items, "bytes": self.nbytes}

    def check_invariants(self) -> None:
        """Counts what is counted. O(keys)."""
        assert 0 not in self.numbers.values(), "a key without a number"
        assert self.items == sum(number > 0 for number in self.numbers.values()), "items"
        assert self._key_bytes == sum(map(len, self.numbers)), "key bytes"
        assert self._nbytes == self._measured(), "bytes"
        assert len({abs(number) for number in self.numbers.values()}) == len(self.numbers), (
            "two keys with one number"
        )
