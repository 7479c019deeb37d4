"""The counters of one open snapshot.

The event that an increment replaces is taken out of the middle, for which one would use a balanced
tree by sequence number. Numbers only ever rise, so an insertion-ordered dict by number is sorted
already, and both operations cost O(1): docs/adr/0004-counters-in-insertion-order.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from upr_protocol.chunk import Mutation
from upr_server.engine.memory_account import MemoryAccount

COUNTER_BYTES: Final = 330
"""What a counter takes beside its key and value, about: its row (96), the row's numbers (3 of 32),
two bytes objects' heads (82), its slot in the dict (55)."""


def counter_bytes(counter: Mutation) -> int:
    """What one counter takes in memory, about."""
    return COUNTER_BYTES + len(counter.key) + len(counter.value)


class Counters:
    """Counter events by sequence number, in its order; each key at most once."""

    __slots__ = ("_by_seq", "_memory", "nbytes")

    def __init__(self, memory: MemoryAccount) -> None:
        self._memory = memory
        self._by_seq: dict[int, Mutation] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._by_seq)

    def append(self, counter: Mutation) -> None:
        """Adds an event whose number is above all others. O(1)."""
        self._by_seq[counter.seq] = counter
        nbytes = counter_bytes(counter)
        self.nbytes += nbytes
        self._memory.counters += nbytes

    def extend(self, counters: Sequence[Mutation]) -> None:
        """Adds events by rising number, all above the others. O(events)."""
        self._by_seq.update((counter.seq, counter) for counter in counters)
        nbytes = sum([counter_bytes(counter) for counter in counters])
        self.nbytes += nbytes
        self._memory.counters += nbytes

    def remove(self, seq: int) -> bool:
        """Takes out the event with this number, if it is here. O(1)."""
        counter = self._by_seq.pop(seq, None)
        if counter is None:
            return False
        freed_bytes = counter_bytes(counter)
        self.nbytes -= freed_bytes
        self._memory.counters -= freed_bytes
        return True

    def find(self, seq: int) -> Mutation | None:
        """The event with this number. O(1)."""
        return self._by_seq.get(seq)

    def in_order(self) -> list[Mutation]:
        """All events, by rising number. O(counters), a copy of so many pointers."""
        # Never `next(iter(...))` on this dict: its front may be a long stretch of deleted slots.
        return list(self._by_seq.values())

    def check_invariants(self) -> None:
        """Order, uniqueness, bytes. O(counters)."""
        assert all(a < b for a, b in pairwise(self._by_seq)), "counters out of order"
        assert all(seq == row.seq for seq, row in self._by_seq.items()), "misplaced"
        keys = [counter.key for counter in self._by_seq.values()]
        assert len(set(keys)) == len(keys), "a counter occurs twice"
        assert self.nbytes == sum(map(counter_bytes, self._by_seq.values())), "counter bytes"
