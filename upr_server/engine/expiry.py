"""The expiry index: items by expiry time.

A heap with an entry for each item stored with an expiry time. An entry stays when its item is
superseded: the hash table tells which are stale. A stale entry is ignored when its time comes, and
the heap is cleaned when they come to outnumber the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from upr_server.engine.hash_table import HashTable
from upr_server.engine.memory_account import MemoryAccount

EXPIRY_BYTES: Final = 130
"""What an entry takes, about: a tuple (64), two numbers (64). The key is the hash table's."""

CLEAN_MIN: Final = 1024
"""Additions between two cleanings, at least."""


class ExpiryIndex:
    """When each item expires.

    Args:
        table: The partition's hash table, which tells stale entries.
        memory: What the bucket holds.
    """

    __slots__ = ("_clean_at", "_heap", "_memory", "_table")

    def __init__(self, table: HashTable, memory: MemoryAccount) -> None:
        self._table = table
        self._memory = memory
        self._heap: list[tuple[int, int, bytes]] = []
        self._clean_at = CLEAN_MIN

    def __len__(self) -> int:
        """Entries, stale ones too."""
        return len(self._heap)

    def add(self, expiry: int, seq: int, key: bytes) -> None:
        """Enters the item with this number, which the table has already. O(log entries).

        Cleaning, O(entries), comes after as many additions.
        """
        heappush(self._heap, (expiry, seq, key))
        self._memory.expiries += EXPIRY_BYTES
        if len(self._heap) > self._clean_at:
            self.clean()

    def add_all(self, expiries: Sequence[int], first: int, keys: Sequence[bytes]) -> None:
        """Enters a run of items, those with an expiry time of 0 excepted."""
        for seq, (expiry, key) in enumerate(zip(expiries, keys, strict=True), first):
            if expiry:
                self.add(expiry, seq, key)

    def next_expiry(self) -> int | None:
        """When the next item expires, in seconds since 1970; None when none will.

        O(log entries) for each stale entry on top, which goes.
        """
        heap, holds_item = self._heap, self._table.holds_item
        while heap and not holds_item(heap[0][2], heap[0][1]):
            heappop(heap)
            self._memory.expiries -= EXPIRY_BYTES
        return heap[0][0] if heap else None

    def is_due(self, now: float) -> bool:
        """Whether an item has expired and `take` has not given it yet."""
        return bool(self._heap) and self._heap[0][0] <= now and self._is_still_due(now)

    def _is_still_due(self, now: float) -> bool:
        expiry = self.next_expiry()
        return expiry is not None and expiry <= now

    def take(self, now: float) -> bytes | None:
        """The key of an item that has expired, which leaves the index; None when none has."""
        if not self.is_due(now):
            return None
        self._memory.expiries -= EXPIRY_BYTES
        return heappop(self._heap)[2]

    def clean(self) -> None:
        """Removes the stale entries. O(entries).

        `add` calls it when there may be many; the caller must when the table has evicted keys.
        """
        holds_item = self._table.holds_item
        before = len(self._heap)
        self._heap = [entry for entry in self._heap if holds_item(entry[2], entry[1])]
        heapify(self._heap)
        self._memory.expiries -= EXPIRY_BYTES * (before - len(self._heap))
        self._clean_at = 2 * len(self._heap) + CLEAN_MIN

    def clear(self) -> None:
        """Forgets every item."""
        self._memory.expiries -= self.nbytes
        self._heap = []
        self._clean_at = CLEAN_MIN

    @property
    def nbytes(self) -> int:
        """What it takes, about."""
        return EXPIRY_BYTES * len(self._heap)

    def check_invariants(self) -> None:
        """The heap's order and bound. O(entries)."""
        heap = self._heap
        assert all(heap[(i - 1) // 2] <= heap[i] for i in range(1, len(heap))), "not a heap"
        assert len(heap) <= self._clean_at, (len(heap), self._clean_at)
        assert all(expiry > 0 for expiry, _, _ in heap)
