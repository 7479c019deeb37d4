"""Key tables of every build beside a naive model, all of which must say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.kernel.builds import BUILDS, Outcome, outcome
from upr_protocol.chunk import chunk_of_plain_sets


class NaiveTable:
    """The table as entries in their order, entered one by one."""

    def __init__(self) -> None:
        self.entries: dict[bytes, tuple[int, bool]] = {}

    def put(self, key: bytes, seq: int, *, is_tombstone: bool) -> int:
        previous, _ = self.entries.get(key, (0, False))
        self.entries[key] = (seq, is_tombstone)
        return previous

    def put_run(
        self, keys: Sequence[bytes], first: int, start: int, base: int, flags: bytearray
    ) -> tuple[list[int], int]:
        superseded, fresh = [], 0
        for seq, key in enumerate(keys, first):
            previous = self.put(key, seq, is_tombstone=False)
            if previous <= start:
                fresh += 1
            elif base <= previous < base + len(flags):
                flags[previous - base] = 1
            else:
                superseded.append(previous)
        return superseded, fresh

    def evict(self, through: int, budget: int, *, tombstones_only: bool) -> int:
        evicted = 0
        for key in list(self.entries)[:budget]:
            entry = self.entries.pop(key)
            seq, is_tombstone = entry
            if seq > through or (tombstones_only and not is_tombstone):
                self.entries[key] = entry
            else:
                evicted += 1
        return evicted

    def in_order(self) -> list[tuple[bytes, int, bool]]:
        return [(key, *entry) for key, entry in self.entries.items()]


class Tables:
    """One table of each build, and the naive one."""

    def __init__(self) -> None:
        self.naive = NaiveTable()
        self.tables: list[Any] = [build.KeyTable() for build in BUILDS.values()]

    def put(self, key: bytes, seq: int, *, is_tombstone: bool = False) -> None:
        expected = self.naive.put(key, seq, is_tombstone=is_tombstone)
        for table in self.tables:
            assert table.put(key, seq, is_tombstone) == expected

    def put_run(
        self, keys: Sequence[bytes], first: int, start: int, base: int, flag_count: int
    ) -> None:
        # The run lies in the middle of a chunk.
        chunk = bytes(
            chunk_of_plain_sets([b"before", *keys, b"behind"], [b"value"] * (len(keys) + 2))
        )
        flags = bytearray(flag_count)
        expected = self.naive.put_run(keys, first, start, base, flags)
        for table in self.tables:
            built = bytearray(flag_count)
            assert table.put_run(chunk, 1, len(keys) + 1, first, start, base, built) == expected
            assert built == flags

    def put_damaged(self, chunk: bytes, low: int, high: int, first: int) -> Outcome:
        """Enters a run of a chunk that may be damaged, in all builds alike; not in the naive one,
        which takes over what they have."""
        flags = [bytearray(4) for _ in self.tables]
        outcomes = [
            outcome(table.put_run, chunk, low, high, first, 3, 5, built)
            for table, built in zip(self.tables, flags, strict=True)
        ]
        assert all(result == outcomes[0] for result in outcomes), outcomes
        assert all(built == flags[0] for built in flags)
        entries = self.tables[0].entries()
        if outcomes[0][0] != "returned":
            assert entries == self.naive.in_order(), "entered in part"
        self.naive.entries = {key: (seq, is_tombstone) for key, seq, is_tombstone in entries}
        return outcomes[0]

    def evict(self, through: int, budget: int, *, tombstones_only: bool = False) -> None:
        expected = self.naive.evict(through, budget, tombstones_only=tombstones_only)
        for table in self.tables:
            assert table.evict(through, budget, tombstones_only) == expected

    def clear(self) -> None:
        self.naive.entries = {}
        for table in self.tables:
            table.clear()

    def check(self) -> None:
        """Everything that a table says of itself, and its invariants. O(keys)."""
        entries = self.naive.in_order()
        items = [key for key, _, is_tombstone in entries if not is_tombstone]
        for table in self.tables:
            table.check_invariants()
            assert table.entries() == entries
            assert (len(table), table.items) == (len(entries), len(items))
            assert table.nbytes >= sum(len(key) for key, _, _ in entries)
            statistics = table.statistics()
            assert statistics["keys"] == len(entries)
            assert statistics["items"] == len(items)
            assert statistics["bytes"] == table.nbytes

    def check_key(self, key: bytes) -> None:
        """What the tables say of one key."""
        seq, is_tombstone = self.naive.entries.get(key, (0, False))
        for table in self.tables:
            assert table.newest(key) == (seq, is_tombstone)
            assert table.holds_item(key, seq) == (seq > 0 and not is_tombstone)
            assert not table.holds_item(key, seq + 1)
