"""Open rows against the naive ones: runs of bundles, single rows, what does not fit."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kernel.builds import BUILDS, outcome
from tests.kernel.open_rows import PARTITIONS, ROWS_MAX, RUN_BYTES_MAX, Partitions
from tests.kit.placed_keys import key_in
from upr_kernel import Defect
from upr_protocol.chunk import Mutation, plain_chunk
from upr_protocol.ids import Operation

KEYS: Final = [
    [key_in(partition, PARTITIONS, b"k%d" % n) for n in range(6)] for partition in range(PARTITIONS)
]
PARTITION: Final = st.integers(0, PARTITIONS - 1)
VALUES: Final = st.one_of(
    st.binary(max_size=5), st.just(bytes(RUN_BYTES_MAX - 1)), st.just(bytes(RUN_BYTES_MAX))
)
of_each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int | None, list[Mutation]]:
    partition = draw(PARTITION)
    # Now and then the key of another partition.
    sources = draw(st.lists(st.sampled_from([partition] * 30 + [0]), min_size=1, max_size=12))
    rows = [
        Mutation(
            Operation.SET,
            KEYS[source][draw(st.integers(0, 5))],
            draw(VALUES),
            flags=draw(st.sampled_from([0, 7, (1 << 32) - 1])),
            expiry=draw(st.sampled_from([0, 9])),
        )
        for source in sources
    ]
    return draw(st.sampled_from([partition] * 8 + [None])), rows


class RowsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.partitions = Partitions()

    @rule(
        several=st.lists(runs(), min_size=1, max_size=6),
        cas=st.sampled_from([0, 5, 1000]),
        in_order=st.booleans(),
    )
    def add_runs(
        self, several: list[tuple[int | None, list[Mutation]]], cas: int, in_order: bool
    ) -> None:
        self.partitions.add_runs(several, cas, in_order=in_order)

    @rule(partition=PARTITION, row=st.integers(0, 5), gap=st.integers(0, 60), value=VALUES)
    def append(self, partition: int, row: int, gap: int, value: bytes) -> None:
        """A single row, behind numbers that counters took. The caller keeps table and flags."""
        naive = self.partitions.naive[partition]
        seq = naive.high + gap + 1
        key = b"single %d" % row
        for _, build in self.partitions.builds:
            rows = build[partition]
            rows.append(Operation.DELETE, key, value, seq, 8, 3, 4)
            if not rows.flags:
                rows.base = seq
            rows.flags.extend(bytes(seq + 1 - rows.base - len(rows.flags)))
            rows.high = seq
        naive.covered |= set(range(naive.high + 1 if naive.covered else seq, seq + 1))
        naive.high = seq
        naive.rows.append((Operation.DELETE, key, value, seq, 8, 3, 4))

    @rule(partition=PARTITION)
    def pop(self, partition: int) -> None:
        naive = self.partitions.naive[partition]
        outcome_kind, _ = self.partitions.each(partition, "pop")
        assert (outcome_kind == "returned") == bool(naive.rows)
        del naive.rows[-1:]

    @rule(partition=PARTITION)
    def take_rows(self, partition: int) -> None:
        """They became an array: flags and numbers stay."""
        self.partitions.each(partition, "clear")
        self.partitions.naive[partition].rows = []

    @rule(partition=PARTITION)
    def begin(self, partition: int) -> None:
        naive = self.partitions.naive[partition]
        self.partitions.each(partition, "begin", naive.high, 500)
        naive.begin(naive.high)

    @rule(partition=PARTITION)
    def let_go_of_flags(self, partition: int) -> None:
        """Older numbers have flags of their own: what is superseded there is returned."""
        naive = self.partitions.naive[partition]
        naive.flagged, naive.covered = set(), set()
        for _, rows in self.partitions.builds:
            rows[partition].flags.clear()

    @rule(partition=PARTITION)
    def come_to_have_counters(self, partition: int) -> None:
        self.partitions.naive[partition].has_counters = True
        for _, rows in self.partitions.builds:
            rows[partition].has_counters = True

    @rule(partition=PARTITION, mean_bytes=st.sampled_from([0, 40, 400]))
    def tidy(self, partition: int, mean_bytes: int) -> None:
        for _, build in self.partitions.builds:
            rows = build[partition]
            rows.added = rows.superseded = 0
            rows.mean_bytes, rows.tidy_at = mean_bytes, 10 * mean_bytes

    @invariant()
    def all_say_the_same(self) -> None:
        self.partitions.agree()

    def teardown(self) -> None:
        self.partitions.agree()


class FlaggedRowsMachine(RowsMachine):
    """The same without what the naive rows know nothing of."""

    let_go_of_flags = None  # type: ignore[assignment]
    pop = None  # type: ignore[assignment]

    @invariant()
    def all_say_what_the_model_does(self) -> None:
        self.partitions.check()


TestRows = RowsMachine.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFlaggedRows = FlaggedRowsMachine.TestCase
TestFlaggedRows.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_rows_are_added_in_runs_until_they_are_full() -> None:
    partitions = Partitions()
    run = [Mutation(Operation.SET, key, b"v") for key in KEYS[1]]
    for _ in range(-(-ROWS_MAX // len(run)) + 2):
        partitions.add_runs([(1, run), (None, run), (1, run[:1])], 7)
        partitions.check()
    assert partitions.builds[0][1][1].is_full


@of_each_build
def test_arguments_are_checked(build: Any) -> None:
    table = build.KeyTable()
    rows = build.OpenRows(table, 0, 10, 1000, 100)
    chunk = bytes(plain_chunk([b"a", b"b"], [b"1", b"2"]))

    def add(*args: Any) -> Any:
        return outcome(build.add_runs, *args)

    assert add(chunk, (0, 1), (rows,), 1, 1, 9, 99, False)[0] == "returned"
    assert add(chunk, (0, 1), (), 1, 1, 9, 99, False) == ("raised", TypeError)
    assert add(chunk, (0, 1), (rows,), 1, 0, 9, 99, False) == ("raised", ValueError)
    assert add(chunk[:-1], (0, 1), (rows,), 1, 1, 9, 99, False) == ("damaged", Defect.LAYOUT)
    for bounds in ((1, 0), (0, 3), (2, 2)):
        _, (numbers, *_) = add(chunk, bounds, (rows,), 1, 1, 9, 99, False)
        assert numbers == [None]
    assert outcome(rows.extend, chunk, 1, 3, 1, 1) == ("raised", IndexError)
    assert outcome(rows.extend, chunk[:-1], 0, 1, 1, 1) == ("damaged", Defect.LAYOUT)
    for wrong in ((256, 0, 0), (1, 1 << 32, 0), (1, 0, 1 << 32)):
        operation, flags, expiry = wrong
        arguments = (operation, b"k", b"", 1, 1, flags, expiry)
        assert outcome(rows.append, *arguments) == ("raised", OverflowError)
    assert len(rows) == 1


@of_each_build
def test_no_number_is_given_beyond_the_last(build: Any) -> None:
    rows = build.OpenRows(build.KeyTable(), 0, 10, 1000, 100)
    chunk = bytes(plain_chunk([b"a", b"b"], [b"1", b"2"]))
    for high, last_cas, cas in (
        ((1 << 63) - 3, 0, 1),
        (0, (1 << 64) - 3, 1),
        (0, 0, (1 << 64) - 2),
    ):
        rows.begin(high, 0)
        rows.last_cas = last_cas
        numbers, *_ = build.add_runs(chunk, (0, 2), (rows,), cas, 1, 9, 99, False)
        assert numbers == [None]
        assert (rows.high, len(rows), len(rows.table)) == (high, 0, 0)
