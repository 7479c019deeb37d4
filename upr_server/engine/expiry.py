"""The expiry index: items by expiry time.

A heap with an entry for each item stored with an expiry time. An entry stays when its item is
superseded: the hash table tells which are stale. A stale entry is ignored when its time comes, and
the heap is cleaned when they come to outnumber the others.

**Cleaning** goes in steps, as a heap of 300,000 entries takes 50 ms. The heap is set aside, and a
new one begins. Each step takes entries off the end of the old heap, which stays a heap by that, and
puts those that are not stale into the new one. Meanwhile the first of all is the first of one of
the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from upr_server.engine.hash_table import HashTable
from upr_server.engine.memory_account import MemoryAccount

EXPIRY_BYTES: Final = 130
"""What an entry takes, about: a tuple (64), two numbers (64). The key is the hash table's."""

CLEAN_MIN: Final = 1024
"""Additions between two cleanings, at least."""

CLEAN_STEP: Final = 2
"""Entries that an addition looks at while the heap is being cleaned. So cleaning ends before the
new heap is half as long as the old one was."""

RUN_CLEAN_MAX: Final = 256
"""Entries that a run of additions looks at, however long it is: 0.3 ms. Without this bound,
cleaning would take more time than the rest of the work for a run of 4,096. What is left is cleaned
once a second."""

STALE_MAX: Final = 64
"""Stale entries that one question removes: at 1 to 2 µs each."""

_Entry = tuple[int, int, bytes]


class ExpiryIndex:
    """When each item expires.

    Args:
        table: The partition's hash table, which tells stale entries.
        memory: What the bucket holds.
    """

    __slots__ = (
        "_clean_at",
        "_cleared_heaps",
        "_heap",
        "_live_count",
        "_memory",
        "_old_heap",
        "_table",
    )

    def __init__(self, table: HashTable, memory: MemoryAccount) -> None:
        self._table = table
        self._memory = memory
        self._heap: list[_Entry] = []
        # What is left of the heap that is being cleaned, and how many entries were kept of it.
        self._old_heap: list[_Entry] = []
        self._live_count = 0
        self._clean_at = CLEAN_MIN
        # What `clear` forgot, and whose memory is still to be given back.
        self._cleared_heaps: list[list[_Entry]] = []

    def __len__(self) -> int:
        """Entries, stale ones too."""
        return len(self._heap) + len(self._old_heap)

    def add(self, expiry: int, seq: int, key: bytes) -> None:
        """Enters the item with this number, which the table has already. O(log entries)."""
        heappush(self._heap, (expiry, seq, key))
        self._note_added(1)

    def add_all(self, entries: Iterable[tuple[int, int, bytes]]) -> None:
        """Enters items: the expiry time, the number and the key of each. Those with an expiry time
        of 0 are passed over. O(items log entries)."""
        heap, count_before, push = self._heap, len(self._heap), heappush
        for entry in entries:
            if entry[0]:
                push(heap, entry)
        self._note_added(len(heap) - count_before)

    def _note_added(self, count: int) -> None:
        self._memory.expiries += EXPIRY_BYTES * count
        if self._old_heap:
            self.clean(min(CLEAN_STEP * count, RUN_CLEAN_MAX))
        elif len(self._heap) > self._clean_at:
            self.begin_cleaning()

    def _first_heap(self) -> list[_Entry]:
        """The heap that has the first entry of all; it is empty when there is none."""
        heap, old_heap = self._heap, self._old_heap
        return old_heap if old_heap and (not heap or old_heap[0] < heap[0]) else heap

    def next_expiry(self) -> int | None:
        """No item expires before this, in seconds since 1970; None when none will expire.

        It is when the next item expires, unless more than `STALE_MAX` stale entries come before
        that. These are removed. O(log entries).
        """
        holds_item = self._table.holds_item
        for _ in range(STALE_MAX):
            heap = self._first_heap()
            if not heap:
                return None
            if holds_item(heap[0][2], heap[0][1]):
                return heap[0][0]
            heappop(heap)
            self._memory.expiries -= EXPIRY_BYTES
        heap = self._first_heap()
        return heap[0][0] if heap else None

    def is_due(self, now: float) -> bool:
        """Whether `take_expired` has something to do: an item has expired, or may have. It is true
        without one only where more than `STALE_MAX` stale entries are due. O(log entries)."""
        if not self.may_be_due(now):
            return False
        expiry = self.next_expiry()
        return expiry is not None and expiry <= now

    def may_be_due(self, now: float) -> bool:
        """Whether the time of an entry has come, stale or not. O(1)."""
        heap = self._first_heap()
        return bool(heap) and heap[0][0] <= now

    def take_expired(self, now: float, entries_max: int) -> list[bytes]:
        """The keys of items that have expired, by their times; they leave the index.

        O(entries_max log entries). It ends early after so many entries, stale ones too: see
        `is_due`.
        """
        holds_item = self._table.holds_item
        keys: list[bytes] = []
        for entry_count in range(entries_max):
            heap = self._first_heap()
            if not heap or heap[0][0] > now:
                self._memory.expiries -= EXPIRY_BYTES * entry_count
                return keys
            _, seq, key = heappop(heap)
            if holds_item(key, seq):
                keys.append(key)
        self._memory.expiries -= EXPIRY_BYTES * entries_max
        return keys

    @property
    def is_cleaning(self) -> bool:
        """Whether `clean` has something to do."""
        return bool(self._old_heap or self._cleared_heaps)

    def begin_cleaning(self) -> None:
        """Begins to remove the stale entries, unless that is under way. O(1).

        `add` does so when there may be many; the caller must when the table has evicted keys.
        """
        if not self._old_heap:
            self._old_heap, self._heap = self._heap, []
            self._live_count = 0

    def clean(self, entries_max: int) -> int:
        """Goes on removing the stale entries, and then the memory of what `clear` forgot.
        O(entries_max log entries).

        Args:
            entries_max: How many entries to look at.

        Returns:
            How many were looked at; 0 when no cleaning is under way.
        """
        if not self._old_heap:
            return self._return_memory(entries_max)
        heap, old_heap, holds_item = self._heap, self._old_heap, self._table.holds_item
        count = min(entries_max, len(old_heap))
        live_count = 0
        for _ in range(count):
            entry = old_heap.pop()
            if holds_item(entry[2], entry[1]):
                heappush(heap, entry)
                live_count += 1
        self._live_count += live_count
        self._memory.expiries -= EXPIRY_BYTES * (count - live_count)
        if count and not old_heap:
            self._clean_at = 2 * self._live_count + CLEAN_MIN
        return count

    def clear(self) -> None:
        """Forgets every item. To give back the memory of 300,000 entries takes 46 ms, so `clean`
        does that."""
        self._memory.expiries -= self.nbytes
        self._cleared_heaps += [heap for heap in (self._heap, self._old_heap) if heap]
        self._heap, self._old_heap = [], []
        self._clean_at = CLEAN_MIN

    def _return_memory(self, entries_max: int) -> int:
        if not self._cleared_heaps:
            return 0
        heap = self._cleared_heaps[-1]
        count = min(entries_max, len(heap))
        del heap[len(heap) - count :]
        if not heap:
            self._cleared_heaps.pop()
        return count

    @property
    def nbytes(self) -> int:
        """What it takes, about."""
        return EXPIRY_BYTES * len(self)

    def check_invariants(self) -> None:
        """Both heaps' orders. O(entries)."""
        for heap in self._heap, self._old_heap:
            assert all(heap[(i - 1) // 2] <= heap[i] for i in range(1, len(heap))), "not a heap"
            assert all(expiry > 0 for expiry, _, _ in heap)
