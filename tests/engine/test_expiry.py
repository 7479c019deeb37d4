"""The expiry index against a naive model, and the work that one call of it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kit.effort import effort
from upr_server.engine.expiry import CLEAN_MIN, RUN_CLEAN_MAX, STALE_MAX, ExpiryIndex
from upr_server.engine.hash_table import HashTable
from upr_server.engine.memory_account import MemoryAccount

KEYS: Final = [b"%d" % index for index in range(12)]
MANY: Final = 20_000
LOOKS_AN_ADDITION: Final = 2
"""Entries that an addition looks at, beside its own, while the index is being cleaned."""


class IndexMachine(RuleBasedStateMachine):
    """The model is the items that the table has, each with its expiry time and number."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryAccount()
        self.table = HashTable(MemoryAccount())
        self.index = ExpiryIndex(self.table, self.memory)
        self.items: dict[bytes, tuple[int, int]] = {}
        self.seq = 0

    def due(self, now: float) -> list[bytes]:
        """The keys that have expired, by time and number."""
        return sorted(
            (key for key, (expiry, _) in self.items.items() if expiry <= now),
            key=lambda key: self.items[key],
        )

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=30),
        first=st.integers(1, 40),
        step=st.integers(0, 3),
    )
    def store(self, keys: list[bytes], first: int, step: int) -> None:
        expiries = [first + index * step for index in range(len(keys))]
        for seq, (key, expiry) in enumerate(zip(keys, expiries, strict=True), self.seq + 1):
            self.table.put(key, seq)
            self.items[key] = (expiry, seq)
        self.index.add_all(
            zip(expiries, range(self.seq + 1, self.seq + 1 + len(keys)), keys, strict=True)
        )
        self.seq += len(keys)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        self.seq += 1
        self.table.put(key, self.seq, is_tombstone=True)
        self.items.pop(key, None)

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        through = round(share * self.seq)
        self.table.evict(through, len(self.table))
        self.items = {key: item for key, item in self.items.items() if item[1] > through}

    @rule()
    def begin_cleaning(self) -> None:
        self.index.begin_cleaning()

    @rule(entries_max=st.integers(1, 40))
    def clean(self, entries_max: int) -> None:
        is_cleaning = self.index.is_cleaning
        looked_at = self.index.clean(entries_max)
        assert bool(looked_at) == is_cleaning
        assert looked_at <= entries_max

    @rule(now=st.integers(0, 60), entries_max=st.integers(1, 40))
    def take(self, now: int, entries_max: int) -> None:
        due, entries_before = self.due(now), len(self.index)
        keys = self.index.take_expired(now, entries_max)
        assert keys == due[: len(keys)]
        assert len(keys) <= entries_max
        # Where some are left, it has looked at as many entries as it may.
        assert len(keys) == len(due) or entries_before - len(self.index) == entries_max
        for key in keys:
            del self.items[key]
            self.seq += 1
            self.table.put(key, self.seq, is_tombstone=True)

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.items.clear()
        self.index.clear()

    @rule(now=st.integers(0, 60))
    def ask(self, now: int) -> None:
        # With few stale entries the answers are exact.
        while self.index.clean(len(self.index) + 1):
            pass
        expiries = [expiry for expiry, _ in self.items.values()]
        assert self.index.next_expiry() == min(expiries, default=None)
        assert self.index.is_due(now) == bool(self.due(now))

    @invariant()
    def whole(self) -> None:
        self.index.check_invariants()
        assert self.memory.expiries == self.index.nbytes
        assert len(self.index) >= len(self.items)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=effort(100, 200), stateful_step_count=40, deadline=None)


class _CountingTable:
    """A hash table that counts the entries that were looked at."""

    def __init__(self) -> None:
        self.keys = HashTable(MemoryAccount())
        self.looked_at = 0

    def holds_item(self, key: bytes, seq: int) -> bool:
        self.looked_at += 1
        return self.keys.holds_item(key, seq)

    def looks(self, call: Callable[[], object]) -> int:
        before = self.looked_at
        call()
        return self.looked_at - before


def _stored(
    count: int, stale: int, memory: MemoryAccount | None = None
) -> tuple[_CountingTable, ExpiryIndex]:
    """An index with `count` entries, of which the first `stale` by their time are stale."""
    table = _CountingTable()
    index = ExpiryIndex(table, memory or MemoryAccount())  # type: ignore[arg-type]
    for seq in range(1, count + 1):
        table.keys.put(b"%d" % seq, seq)
        index.add(seq, seq, b"%d" % seq)
    for seq in range(1, stale + 1):
        table.keys.put(b"%d" % seq, count + seq, is_tombstone=True)
    return table, index


def test_no_call_looks_at_more_entries_than_it_says() -> None:
    table, index = _stored(0, 0)
    for seq in range(1, MANY + 1):
        looked_at_before = table.looked_at
        index.add(seq, seq, b"%d" % seq)
        assert table.looked_at - looked_at_before <= LOOKS_AN_ADDITION
    table, index = _stored(MANY, MANY - 1)
    assert len(index) == MANY
    assert table.looks(index.next_expiry) <= STALE_MAX
    assert table.looks(lambda: index.is_due(MANY + 1)) <= STALE_MAX
    assert table.looks(lambda: index.take_expired(MANY + 1, 100)) <= 100
    assert table.looks(index.begin_cleaning) == 0
    assert table.looks(lambda: index.clean(100)) <= 100


def test_items_are_taken_by_their_times_while_the_index_is_being_cleaned() -> None:
    memory = MemoryAccount()
    table, index = _stored(100, 0, memory)
    index.begin_cleaning()
    for seq in range(101, 111):
        table.keys.put(b"%d" % seq, seq)
        index.add(seq - 100, seq, b"%d" % seq)
    assert index.is_cleaning
    assert index.next_expiry() == 1
    keys = [key for seq in range(1, 121) for key in index.take_expired(seq, 30)]
    expected = [key for index in range(1, 11) for key in (index, 100 + index)]
    assert keys == [b"%d" % key for key in (*expected, *range(11, 101))]
    assert not index
    assert memory.expiries == 0


def test_a_long_run_looks_at_few_entries_while_the_index_is_being_cleaned() -> None:
    table, index = _stored(MANY, MANY // 2)
    index.begin_cleaning()
    keys = [b"new %d" % number for number in range(4096)]
    entries = [(9, seq, key) for seq, key in enumerate(keys, MANY + 1)]
    looks = table.looks(lambda: index.add_all(entries))
    assert 0 < looks <= RUN_CLEAN_MAX
    while index.clean(100):
        pass
    index.check_invariants()


def test_what_is_forgotten_is_given_back_in_steps() -> None:
    memory = MemoryAccount()
    table, index = _stored(MANY, 0, memory)
    index.clear()
    assert (len(index), memory.expiries, index.next_expiry()) == (0, 0, None)
    table.keys.put(b"new", MANY + 1)
    index.add(5, MANY + 1, b"new")
    assert index.is_cleaning
    counts = []
    while count := index.clean(1000):
        counts.append(count)
    assert sum(counts) == MANY
    assert max(counts) <= 1000
    assert index.take_expired(5, 10) == [b"new"]


def test_an_item_behind_stale_entries_is_due_and_taken_in_the_end() -> None:
    _, index = _stored(CLEAN_MIN, CLEAN_MIN - 1)
    keys: list[bytes] = []
    while index.is_due(CLEAN_MIN):
        keys += index.take_expired(CLEAN_MIN, 50)
    assert keys == [b"%d" % CLEAN_MIN]
    assert not index


def test_an_index_is_not_due_for_a_stale_entry_before_an_item() -> None:
    _, index = _stored(2, 1)
    assert not index.is_due(1)
    assert index.is_due(2)


def test_the_index_does_not_grow_with_stale_entries() -> None:
    table, memory = HashTable(MemoryAccount()), MemoryAccount()
    index = ExpiryIndex(table, memory)
    for seq in range(1, MANY):
        table.put(b"k", seq)
        index.add(1000 + seq, seq, b"k")
        assert len(index) <= 1.5 * CLEAN_MIN + 2
    assert memory.expiries == index.nbytes
    index.check_invariants()


def test_an_index_of_live_entries_is_not_cleaned_again_and_again() -> None:
    table, index = _stored(MANY, 0)
    assert len(index) == MANY
    assert table.looked_at < 1.5 * MANY
