"""Open rows against the naive ones: runs of bundles, single rows, what does not fit."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kernel.builds import BUILDS, outcome
from tests.kernel.open_rows import (
    NO_WRITER,
    PARTITIONS,
    ROWS_MAX,
    RUN_BYTES_MAX,
    Partitions,
    PublishedRun,
    new_rows,
)
from tests.kit.placed_keys import key_in
from upr_kernel import Defect
from upr_protocol.chunk import Chunk, Mutation, chunk_of_plain_sets
from upr_protocol.ids import Cas, HistoryId, Operation, SeqNo
from upr_server.engine.mutate_result import MutateResult, pack_result

KEYS: Final = [
    [key_in(partition, PARTITIONS, b"k%d" % n) for n in range(6)] for partition in range(PARTITIONS)
]
PARTITION: Final = st.integers(0, PARTITIONS - 1)
VALUES: Final = st.one_of(
    st.binary(max_size=5), st.just(bytes(RUN_BYTES_MAX - 1)), st.just(bytes(RUN_BYTES_MAX))
)
of_each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


WRITER: Final = st.sampled_from([NO_WRITER] + [bytes([number]) * 16 for number in range(1, 5)])


@st.composite
def runs(draw: st.DrawFn) -> PublishedRun:
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
    return PublishedRun(
        draw(st.sampled_from([partition] * 20 + [PARTITIONS])),
        rows,
        draw(WRITER),
        draw(st.integers(0, 40)),
        draw(st.sampled_from([0] * 20 + [1])),
        draw(st.sampled_from([False] * 20 + [True])),
    )


class RowsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.partitions = Partitions()

    @rule(
        several=st.lists(runs(), min_size=1, max_size=6),
        cas=st.sampled_from([0, 5, 1000]),
        row_count=st.sampled_from([0, 3]),
        in_order=st.booleans(),
    )
    def add_runs(
        self, several: list[PublishedRun], cas: int, row_count: int, in_order: bool
    ) -> None:
        rows_before = several[0].rows[:row_count]
        self.partitions.add_runs(several, cas, rows_before=rows_before, in_order=in_order)

    @rule(partition=PARTITION, history_id=st.sampled_from([0, 7, 7, (1 << 64) - 1]))
    def change_history(self, partition: int, history_id: int) -> None:
        self.partitions.set_all(partition, history_id=history_id)

    @rule(partition=PARTITION, is_awaited=st.booleans())
    def await_change(self, partition: int, is_awaited: bool) -> None:
        self.partitions.set_all(partition, is_awaited=is_awaited)

    @rule(partition=PARTITION, has_refused=st.booleans())
    def refuse_batches(self, partition: int, has_refused: bool) -> None:
        self.partitions.refuse(partition, has_refused=has_refused)

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
    run = PublishedRun(1, [Mutation(Operation.SET, key, b"v") for key in KEYS[1]])
    for _ in range(-(-ROWS_MAX // len(run.rows)) + 2):
        partitions.add_runs([run, run._replace(skipped=True), run._replace(rows=run.rows[:1])], 7)
        partitions.check()
    assert partitions.builds[0][1][1].is_full


def test_of_two_runs_of_a_writer_the_second_is_judged_behind_the_first() -> None:
    partitions = Partitions()
    run = PublishedRun(1, [Mutation(Operation.SET, KEYS[1][0], b"v")], b"sixteen bytes id", 5)
    other_writer = run._replace(writer=bytes(15) + b"w")
    partitions.add_runs([run, run, run._replace(counter=6), other_writer], 7)
    partitions.check()
    assert partitions.naive[1].high == 3


def test_a_later_attempt_leaves_out_earlier_ones() -> None:
    partitions = Partitions()
    run = PublishedRun(1, [Mutation(Operation.SET, KEYS[1][0], b"v")], b"sixteen bytes id", 5)
    partitions.add_runs([run], 7, attempt=2)
    partitions.check()
    for build, targets in partitions.builds:
        arguments = (run.writer, 6, 1)
        assert not targets[1].answers.is_new(*arguments), build


RUN: Final = Struct("<IIQI4x")
NUMBER: Final = st.sampled_from([0, 1, 127, 128, 255, 256, 65535, 65536, (1 << 32) - 1, 1 << 32])


@given(NUMBER, NUMBER, NUMBER, NUMBER, st.integers(1, 8))
def test_what_is_remembered_is_the_packed_result(
    high: int, cas: int, attempt: int, history_id: int, row_count: int
) -> None:
    rows_of_run = [Mutation(Operation.SET, b"k%d" % row, b"v") for row in range(row_count)]
    chunk, writer = bytes(Chunk.build(rows_of_run).encode()), b"sixteen bytes id"
    for build in BUILDS.values():
        rows = new_rows(build, 0)
        rows.begin(high, 0)
        rows.history_id = 1 + history_id
        run = RUN.pack(0, row_count, 9, 0)
        build.add_runs(chunk, 0, run, writer, (rows,), attempt, None, cas, 9, 99, False)
        result = MutateResult(
            HistoryId(1 + history_id),
            SeqNo(high + 1),
            SeqNo(high + row_count),
            Cas(max(1, cas)),
            attempt=attempt,
        )
        assert rows.answers.newest(writer) == (9, pack_result(result))
        assert rows.answers.attempt(writer) == attempt


@of_each_build
def test_arguments_are_checked(build: Any) -> None:
    rows = new_rows(build, 0)
    chunk = bytes(chunk_of_plain_sets([b"a", b"b"], [b"1", b"2"]))
    run = RUN.pack(0, 1, 0, 0)

    def add(*args: Any, writers: bytes = NO_WRITER, skip: bytes | None = None) -> Any:
        chunk, first_row, runs, targets = args
        return outcome(
            build.add_runs, chunk, first_row, runs, writers, targets, 0, skip, 1, 9, 99, False
        )

    assert add(chunk, 0, run, (rows,))[0] == "returned"
    assert add(chunk, 0, run + b"\0", (rows,)) == ("raised", ValueError)
    assert add(chunk, 0, run, (rows,), writers=bytes(15)) == ("raised", ValueError)
    assert add(chunk, 0, run, (rows,), writers=bytes(32)) == ("raised", ValueError)
    assert add(chunk, 0, run, (rows,), skip=bytes(2)) == ("raised", ValueError)
    assert add(chunk, 1 << 32, run, (rows,)) == ("raised", OverflowError)
    assert add(chunk[:-1], 0, run, (rows,)) == ("damaged", Defect.LAYOUT)
    assert add(chunk, 0, b"", (rows,)) == ("returned", (b"", [], [], [], 0, 0, 0))
    for first_row, row_count in ((0, 3), (2, 1), (2, 0), (0, (1 << 32) - 1), ((1 << 32) - 1, 9)):
        _, (lines, left, *_) = add(chunk, first_row, RUN.pack(0, row_count, 0, 0), (rows,))
        assert (lines, left) == (bytes(40), [0])
    # Rows that stand where those of another partition should.
    _, (_, left, *_) = add(chunk, 0, RUN.pack(1, 1, 0, 0), (rows, rows))
    assert left == [0]
    assert outcome(rows.extend, chunk, 1, 3, 1, 1) == ("raised", IndexError)
    assert outcome(rows.extend, chunk[:-1], 0, 1, 1, 1) == ("damaged", Defect.LAYOUT)
    for wrong in ((256, 0, 0), (1, 1 << 32, 0), (1, 0, 1 << 32)):
        operation, flags, expiry = wrong
        arguments = (operation, b"k", b"", 1, 1, flags, expiry)
        assert outcome(rows.append, *arguments) == ("raised", OverflowError)
    assert len(rows) == 1


@of_each_build
def test_no_number_is_given_beyond_the_last(build: Any) -> None:
    rows = new_rows(build, 0)
    chunk = bytes(chunk_of_plain_sets([b"a", b"b"], [b"1", b"2"]))
    for high, last_cas, cas in (
        ((1 << 63) - 3, 0, 1),
        (0, (1 << 64) - 3, 1),
        (0, 0, (1 << 64) - 2),
    ):
        rows.begin(high, 0)
        rows.last_cas = last_cas
        run = RUN.pack(0, 2, 0, 0)
        _, left, *_ = build.add_runs(chunk, 0, run, NO_WRITER, (rows,), 0, None, cas, 9, 99, False)
        assert left == [0]
        assert (rows.high, len(rows), len(rows.table)) == (high, 0, 0)


@of_each_build
def test_a_snapshot_does_not_begin_while_its_flags_are_read(build: Any) -> None:
    rows = new_rows(build, 0)
    rows.begin(5, 0)
    rows.append(Operation.SET, b"k", b"v", 6, 1, 0, 0)
    rows.flags.extend(b"\0")
    for start, tidy_at in ((-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)):
        assert outcome(rows.begin, start, tidy_at) == ("raised", OverflowError)
    with memoryview(rows.flags), pytest.raises(BufferError):
        rows.begin(9, 0)
    assert (rows.start, len(rows), rows.first, bytes(rows.flags)) == (5, 1, 6, b"\0")
    rows.begin(9, 0)
    assert (rows.start, len(rows), rows.first, bytes(rows.flags)) == (9, 0, 0, b"")
