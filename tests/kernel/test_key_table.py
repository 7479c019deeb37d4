"""The key tables against the naive one: any interleaving, sizes at which they grow, large ones."""

from __future__ import annotations

from random import Random
from time import thread_time_ns
from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kernel.builds import BUILDS, outcome
from tests.kernel.tables import Tables
from upr_kernel import Defect
from upr_protocol.chunk import chunk_of_plain_sets

KEYS: Final = st.one_of(
    st.integers(0, 60).map(b"key %d".__mod__),
    st.binary(min_size=1, max_size=9),
    st.binary(min_size=254, max_size=255),
)

of_each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()
        self.seq = 0

    def next_seq(self, count: int = 1) -> int:
        self.seq += count
        return self.seq - count + 1

    @rule(key=KEYS, is_tombstone=st.booleans())
    def put(self, key: bytes, is_tombstone: bool) -> None:
        self.tables.put(key, self.next_seq(), is_tombstone=is_tombstone)
        self.tables.check_key(key)

    @rule(
        keys=st.lists(KEYS, max_size=80),
        behind=st.integers(0, 100),
        covered=st.integers(0, 60),
        is_covered=st.booleans(),
    )
    def put_run(self, keys: list[bytes], behind: int, covered: int, is_covered: bool) -> None:
        first = self.next_seq(len(keys))
        base = max(1, first - covered)
        flag_count = first + len(keys) - base if is_covered else 0
        self.tables.put_run(keys, first, max(0, first - behind), base, flag_count)

    @rule(first=st.integers(0, 1000), count=st.integers(1, 300))
    def put_many(self, first: int, count: int) -> None:
        keys = [b"many %d" % index for index in range(first, first + count)]
        self.tables.put_run(keys, self.next_seq(count), self.seq, 1, 0)

    @rule(behind=st.integers(0, 500), budget=st.integers(0, 400), tombstones_only=st.booleans())
    def evict(self, behind: int, budget: int, tombstones_only: bool) -> None:
        through = max(0, self.seq - behind)
        self.tables.evict(through, budget, tombstones_only=tombstones_only)

    @rule()
    def clear(self) -> None:
        self.tables.clear()

    @rule(key=KEYS)
    def look(self, key: bytes) -> None:
        self.tables.check_key(key)

    @invariant()
    def agree(self) -> None:
        self.tables.check()


def test_the_table_equals_a_dict_after_any_interleaving() -> None:
    profile = settings(max_examples=100, stateful_step_count=30, deadline=None)
    case: Any = TableMachine.TestCase
    case.settings = profile
    case().runTest()


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"number %06d" % index for index in range(first, first + count)]


def filled(build: Any, keys: list[bytes], rows: int = 500) -> Any:
    """A table of these keys, entered in runs; key n has number n + 1."""
    table = build.KeyTable()
    for low in range(0, len(keys), rows):
        some_keys = keys[low : low + rows]
        chunk = bytes(chunk_of_plain_sets(some_keys, [b""] * len(some_keys)))
        table.put_run(chunk, 0, len(some_keys), low + 1, 0, 1, bytearray())
    return table


@of_each_build
def test_a_large_table_grows_shrinks_and_forgets(build: Any) -> None:
    keys = numbered(60_000)
    table = filled(build, keys)
    table.check_invariants()
    assert [key for key, _, _ in table.entries()] == keys
    assert all(table.newest(key) == (seq, False) for seq, key in enumerate(keys, 1))
    assert table.newest(b"number 060000") == (0, False)
    full = table.nbytes
    assert table.evict(50_000, 55_000) == 50_000
    table.check_invariants()
    assert [key for key, _, _ in table.entries()] == keys[55_000:] + keys[50_000:55_000]
    while table.evict(59_990, 1_000):
        table.check_invariants()
    assert len(table) == 10
    for _ in range(5):
        table.evict(0, 1_000)
    assert table.nbytes < full // 10
    table.check_invariants()


@of_each_build
def test_keys_come_and_go_for_ever_in_bounded_memory(build: Any) -> None:
    table = build.KeyTable()
    sizes = []
    for seq in range(1, 60_000):
        table.put(b"number %d" % seq, seq)
        table.evict(max(0, seq - 100), 2)
        sizes.append(table.nbytes)
    assert 100 <= len(table) <= 202
    assert max(sizes) < 64 * 1024
    table.check_invariants()


@of_each_build
def test_a_table_that_grows_is_right_at_every_size(build: Any) -> None:
    """Beyond 4,096 slots a table grows in steps: searched and written to between any two."""
    keys = numbered(9_000)
    table = filled(build, keys[:3_000])
    random = Random(1)
    for seq, key in enumerate(keys[3_000:], 3_001):
        assert table.newest(key) == (0, False)
        assert table.put(key, seq) == 0
        known_seq = random.randrange(seq)
        assert table.newest(keys[known_seq]) == (known_seq + 1, False)
        if seq % 200 == 0:
            table.check_invariants()
    assert len(table) == 9_000


@of_each_build
def test_a_key_of_a_run_may_occur_again_in_it(build: Any) -> None:
    chunk = bytes(chunk_of_plain_sets([b"a", b"b", b"a", b"a"], [b""] * 4))
    table = build.KeyTable()
    flags = bytearray(3)
    assert table.put_run(chunk, 0, 4, 10, 9, 11, flags) == ([10], 2)
    assert flags == b"\0\1\0"
    assert table.entries() == [(b"a", 13, False), (b"b", 11, False)]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((b"", 1), ValueError),
        ((b"k" * 256, 1), ValueError),
        ((b"k", 0), ValueError),
        ((b"k", 1 << 63), ValueError),
    ],
)
@of_each_build
def test_invalid_keys_and_numbers_are_refused(
    build: Any, args: tuple[bytes, int], error: type[Exception]
) -> None:
    table = build.KeyTable()
    with pytest.raises(error):
        table.put(*args)
    assert (len(table), table.newest(args[0])) == (0, (0, False))
    table.check_invariants()


@of_each_build
def test_the_longest_key_and_the_highest_number(build: Any) -> None:
    table = build.KeyTable()
    table.put(b"k" * 255, (1 << 63) - 1, True)
    assert table.newest(b"k" * 255) == ((1 << 63) - 1, True)
    chunk = bytes(chunk_of_plain_sets([b"a"], [b""]))
    assert outcome(table.put_run, chunk, 0, 1, (1 << 63) - 1, 0, 1, bytearray())[0] == "raised"
    table.check_invariants()


@of_each_build
def test_nothing_of_a_damaged_run_is_entered(build: Any) -> None:
    table = build.KeyTable()
    chunk = bytearray(bytes(chunk_of_plain_sets([b"a", b"b" * 255, b"c" * 256, b""], [b""] * 4)))
    for low, high, expected in [
        (0, 2, "returned"),
        (0, 3, Defect.KEY_LENGTH),
        (2, 4, Defect.KEY_LENGTH),
        (0, 5, IndexError),
        (2, 1, IndexError),
    ]:
        table.clear()
        result = outcome(table.put_run, bytes(chunk), low, high, 1, 0, 1, bytearray())
        assert expected in result
        assert len(table) == (2 if result[0] == "returned" else 0)


@of_each_build
def test_the_flags_must_not_lie_in_the_chunk(build: Any) -> None:
    if build.__name__ != "upr_kernel._native":
        pytest.skip("the pure kernel has cut the keys before it sets a flag")
    chunk = bytearray(bytes(chunk_of_plain_sets([b"a", b"a"], [b"", b""])))
    with pytest.raises(ValueError, match="the flags lie in the chunk"):
        build.KeyTable().put_run(chunk, 0, 2, 1, 0, 1, chunk)


@pytest.mark.parametrize("count", [20_000, 60_000])
def test_a_table_that_has_shrunk_grows_after_all_slots_have_moved(count: int) -> None:
    if "native" not in BUILDS:
        pytest.skip("a dict is copied when it grows")
    table = filled(BUILDS["native"], numbered(count))
    seq = count

    def put_while_moving() -> list[int]:
        nonlocal seq
        homes = []
        while table.statistics()["moving"]:
            homes.append(table.statistics()["slots"])
            seq += 1
            table.put(b"%d" % seq, seq)
        return homes

    put_while_moving()
    while not table.statistics()["moving"]:
        table.evict(seq, 64)
    homes = put_while_moving()
    assert len(homes) > count // 40
    assert len(set(homes)) == 1, "it began to grow, and moved all that was left at once"


BYTES_A_KEY_MAX: Final = {"upr_kernel.pure": 130, "upr_kernel._native": 48}


@of_each_build
def test_a_key_takes_little_memory(build: Any) -> None:
    """Counted by the table, beside the key itself, at any size."""
    table = build.KeyTable()
    counted = []
    for seq, key in enumerate(numbered(40_000), 1):
        table.put(key, seq)
        if seq >= 10_000:
            counted.append((table.nbytes - len(key) * seq) / seq)
    assert max(counted) < BYTES_A_KEY_MAX[build.__name__], max(counted)


@of_each_build
def test_no_call_takes_long_while_a_table_grows(build: Any) -> None:
    if build.__name__ != "upr_kernel._native":
        pytest.skip("a dict is copied when it grows")
    keys = numbered(400_000)
    chunks = [
        bytes(chunk_of_plain_sets(keys[low : low + 16], [b""] * 16))
        for low in range(0, 400_000, 16)
    ]

    def longest_ns() -> int:
        table, durations = build.KeyTable(), []
        for index, chunk in enumerate(chunks):
            began_ns = thread_time_ns()
            table.put_run(chunk, 0, 16, 16 * index + 1, 0, 1, bytearray())
            durations.append(thread_time_ns() - began_ns)
        # An interrupt is counted as ours now and then; steps that are long are many.
        return sorted(durations)[-20]

    assert min(longest_ns() for _ in range(3)) < 2_000_000
