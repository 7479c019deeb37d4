"""What a stream promises Spark, whatever happens to the bucket: without Spark, against a model."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from tests.kit.effort import effort
from tests.spark.model_driver_client import BYTES_A_ROW, ModelDriverClient
from tests.spark.stream_reader import (
    PARTITIONS,
    Json,
    Ranges,
    offsets_of,
    ranges_of,
    reader_of,
    written,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.spark.batch_shares import StreamLimits, batch_ends, equal_shares
from upr_protocol.spark.offset import PartitionOffset, StreamOffset
from upr_protocol.spark.read_tasks import TASKS_MAX, PartitionRange, ReadTask, tasks_of

ROWS_MAX: Final = 7
NUMBERS = st.integers(0, PARTITIONS - 1)


class Query(RuleBasedStateMachine):
    """A query as Spark runs it: its offset log, its sink, and its restarts."""

    options: ClassVar[dict[str, str]] = {}
    limit: Any = ReadAllAvailable()
    may_lose_leases = False
    may_rewind = False

    def __init__(self) -> None:
        super().__init__()
        self.driver = ModelDriverClient(PARTITIONS)
        self.reader = reader_of(self.driver, partitions=None, **self.options)
        self.first = self.start = self.reader.initialOffset()
        self.end: Json | None = None
        """Where the batch ends that is planned and not committed."""
        self.batch: Ranges = []
        self.rows: list[tuple[int, int, int]] = []
        self.batches = 0
        self.restarts = 0
        self.partitions: set[int] | None = None
        """Those that the query reads; None for all."""
        self.log_of: dict[int, list[tuple[int, int]]] = {}
        """The sink: all rows by partition, as number and key."""
        self.ends_of: dict[int, set[int]] = {}
        self.reached: dict[int, int] = {
            partition: offset.seq for partition, offset in offsets_of(self.first).items()
        }

    # The bucket.

    @rule(partition=NUMBERS, keys=st.lists(st.integers(0, 4), max_size=12))
    def write(self, partition: int, keys: list[int]) -> None:
        for key in keys:
            self.driver.write(partition, key)

    @rule(partition=NUMBERS)
    def flush(self, partition: int) -> None:
        self.driver.flush(partition)

    @rule(partition=NUMBERS)
    def compact(self, partition: int) -> None:
        self.driver.compact(partition)

    @precondition(lambda self: len(self.driver.partitions) < 6)
    @rule()
    def add_partition(self) -> None:
        self.driver.add_partition()
        self.driver.write(len(self.driver.partitions) - 1, 0)
        self.driver.flush(len(self.driver.partitions) - 1)

    # The query.

    @precondition(lambda self: self.end is None)
    @rule()
    def plan(self) -> None:
        end = self.reader.latestOffset(self.start, self.limit)
        text = json.dumps(end)
        assert json.dumps(StreamOffset.of_json(json.loads(text)).to_json()) == text, "canonical"
        if end is self.start:
            return
        assert text != json.dumps(self.start)
        self.end = json.loads(text)
        if self.batches:
            # Of the batch before: only now does Spark say that it is committed.
            self.reader.commit(self.start)
        tasks = list(self.reader.partitions(self.start, end))
        self.batch = ranges_of(tasks)  # type: ignore[arg-type]
        self.check_batch(end)
        self.rows = self.read(tasks)

    def check_batch(self, end: Json) -> None:
        rows = 0
        ends = set()
        for partition, start, stop, came_from in self.batch:
            if partition not in ends:
                ends.add(partition)
                if came_from is not None:
                    assert came_from == self.reached.get(partition, 0)
                    assert start == 0 or self.may_rewind
                else:
                    assert start == self.reached.get(partition, 0), "nothing is missed or repeated"
            rows += stop - start
            assert stop <= self.driver.partitions[partition].persisted
            offset = offsets_of(end)[partition]
            assert offset.snapshot_start <= start <= stop <= offset.snapshot_end
            assert offset.seq == stop
            before = offsets_of(self.start).get(partition)
            if not self.may_lose_leases and before and before.seq < before.snapshot_end:
                snapshot = (before.snapshot_start, before.snapshot_end)
                assert (offset.snapshot_start, offset.snapshot_end) == snapshot, (
                    "a snapshot that began is ended"
                )
        if isinstance(self.limit, ReadMaxRows):
            assert rows <= self.limit.max_rows
        elif isinstance(self.limit, ReadMaxBytes):
            assert rows <= max(1, self.limit.max_bytes // BYTES_A_ROW)
        assert rows or any(came_from is not None for *_, came_from in self.batch)

    def read(self, tasks: Any) -> list[tuple[int, int, int]]:
        """What the tasks read, or would: partition, number, key; a key of -1 is a marker."""
        rows_read = []
        for task in tasks:
            for range_ in task.ranges:
                if range_.marker is not None:
                    assert range_.start == range_.marker.to_seq
                    rows_read.append((range_.partition, range_.start, -1))
                if range_.start < range_.end:
                    rows = self.driver.read(
                        range_.partition, range_.start, range_.end, task.lease_id
                    )
                    rows_read += [(range_.partition, seq, key) for seq, key in rows]
        return sorted(rows_read)

    @precondition(lambda self: self.end is not None)
    @rule()
    def read_it_again(self) -> None:
        assert self.end is not None
        tasks = list(self.reader.partitions(self.start, self.end))
        assert ranges_of(tasks) == self.batch  # type: ignore[arg-type]
        assert self.read(tasks) == self.rows

    @precondition(lambda self: self.end is not None)
    @rule()
    def commit(self) -> None:
        assert self.end is not None
        for partition, seq, key in self.rows:
            rows = self.log_of.setdefault(partition, [])
            if key == -1:
                rows[:] = [row for row in rows if row[0] <= seq]
            else:
                rows.append((seq, key))
        for partition, _, stop, _ in self.batch:
            self.reached[partition] = stop
            self.ends_of.setdefault(partition, set()).add(stop)
        self.start, self.end = self.end, None
        self.batches += 1

    @rule()
    def restart(self) -> None:
        self.restarts += 1
        self.reader.stop()
        self.reader = reader_of(self.driver, partitions=self.partitions, **self.options)
        if not self.batches:
            # Batch 0 is not committed: Spark asks a second time where to begin.
            again = self.reader.initialOffset()
            if self.end is None:
                self.first = self.start = again
                self.reached = {
                    partition: offset.seq for partition, offset in offsets_of(again).items()
                }
            else:
                self.start = again
        if self.end is not None:
            tasks = list(self.reader.partitions(self.start, self.end))
            assert ranges_of(tasks) == self.batch  # type: ignore[arg-type]
            assert self.read(tasks) == self.rows

    @precondition(lambda self: self.end is None)
    @rule(writes=st.lists(st.tuples(NUMBERS, st.integers(0, 4)), max_size=2))
    def run_until_what_there_is_now(self, writes: list[tuple[int, int]]) -> None:
        """`availableNow` ends, whatever is written meanwhile."""
        self.driver.before_next_lease = None
        self.restart()
        self.reader.prepareForTriggerAvailableNow()
        target = {
            index: partition.high
            for index, partition in enumerate(self.driver.partitions)
            if self.partitions is None or index in self.partitions
        }
        for _ in range(sum(target.values()) + 2):
            for partition_id, key in writes:
                self.driver.write(partition_id, key)
                self.driver.flush(partition_id)
            self.plan()
            if self.end is None:
                break
            assert all(stop <= target[number] for number, _, stop, _ in self.batch)
            self.commit()
        else:
            raise AssertionError("it does not end")
        assert all(self.reached.get(number, 0) == seq for number, seq in target.items())
        self.restart()

    @invariant()
    def leases_are_few(self) -> None:
        assert sum(lease.is_held for lease in self.driver.leases.values()) <= 2 + 2 * self.restarts

    def teardown(self) -> None:
        """In the end the sink has what the bucket has."""
        self.driver.before_next_lease = None
        if self.partitions is not None:
            self.partitions = None
            self.restart()
        self.driver.wait_until_persisted()
        for _ in range(1000):
            if self.end is not None:
                self.commit()
            self.plan()
            if self.end is None:
                break
        began = {partition: offset.seq for partition, offset in offsets_of(self.first).items()}
        for index, partition in enumerate(self.driver.partitions):
            newest = {
                key: seq for key, seq in partition.newest().items() if seq > began.get(index, 0)
            }
            assert {key: seq for seq, key in self.log_of.get(index, [])} == newest


class WithLimits(Query):
    options: ClassVar = {"maxOffsetsPerTrigger": str(ROWS_MAX)}
    limit = ReadMaxRows(ROWS_MAX)


class WithBytes(Query):
    options: ClassVar = {"maxBytesPerTrigger": str(ROWS_MAX * BYTES_A_ROW)}
    limit = ReadMaxBytes(ROWS_MAX * BYTES_A_ROW)


class FromLatest(Query):
    options: ClassVar = {"startingOffsets": "latest"}

    @precondition(lambda self: self.end is None and not self.batches)
    @rule()
    def begin_anew(self) -> None:
        """There is something before it begins."""
        self.restart()


class WithFailovers(WithLimits):
    """Histories part, leases lapse, and rollbacks are marked."""

    may_lose_leases = True
    options: ClassVar = {**WithLimits.options, "onRollback": "marker"}

    @precondition(lambda self: self.end is None)
    @rule(partition=NUMBERS, to=st.integers(0, 30))
    def fail_over(self, partition: int, to: int) -> None:
        self.driver.fail_over(partition, to)

    @precondition(lambda self: self.end is None)
    @rule(partition_id=NUMBERS, back=st.integers(1, 5))
    def fail_over_while_the_next_batch_is_planned(self, partition_id: int, back: int) -> None:
        """The numbers were asked for before. Others write as many rows as are lost."""
        self.write(partition_id, [1])
        self.flush(partition_id)

        def fail_over() -> None:
            partition = self.driver.partitions[partition_id]
            persisted = partition.persisted
            self.driver.fail_over(partition_id, max(0, self.reached.get(partition_id, 0) - back))
            while partition.high < persisted:
                self.driver.write(partition_id, 0)
            self.driver.flush(partition_id)

        self.driver.before_next_lease = fail_over

    @precondition(lambda self: self.end is None)
    @rule()
    def let_leases_lapse(self) -> None:
        self.driver.let_leases_lapse()

    @precondition(lambda self: self.batches)
    @rule(partitions=st.none() | st.sets(NUMBERS, min_size=1))
    def read_other_partitions(self, partitions: set[int] | None) -> None:
        """The query goes on with other options."""
        self.partitions = partitions
        self.restart()


class WithRewinds(WithFailovers):
    """The sink keeps all rows, and drops those above the number in a marker."""

    may_rewind = True
    options: ClassVar = {**WithLimits.options, "onRollback": "rewind"}

    @precondition(lambda self: self.end is None)
    @rule(partition=NUMBERS, back=st.integers(0, 5), beside=st.integers(-1, 1))
    def fail_over_beside_the_end_of_a_batch(self, partition: int, back: int, beside: int) -> None:
        ends = sorted(self.ends_of.get(partition, {0}))
        self.driver.fail_over(partition, max(0, ends[max(0, len(ends) - 1 - back)] + beside))

    @precondition(lambda self: self.end is None)
    @rule(partition_id=NUMBERS, back=st.integers(0, 3))
    def forget_deletions(self, partition_id: int, back: int) -> None:
        partition = self.driver.partitions[partition_id]
        partition.purge = max(partition.purge, partition.persisted - back)


PROFILE: Final = settings(max_examples=effort(75, 150), stateful_step_count=40, deadline=None)
TestQuery = Query.TestCase
TestQuery.settings = PROFILE
TestWithLimits = WithLimits.TestCase
TestWithLimits.settings = PROFILE
TestWithBytes = WithBytes.TestCase
TestWithBytes.settings = PROFILE
TestFromLatest = FromLatest.TestCase
TestFromLatest.settings = PROFILE
TestWithFailovers = WithFailovers.TestCase
TestWithFailovers.settings = PROFILE
TestWithRewinds = WithRewinds.TestCase
TestWithRewinds.settings = PROFILE


@pytest.mark.parametrize(
    "limits",
    [
        StreamLimits(),
        StreamLimits(numbers=1000),
        StreamLimits(numbers=40),
        StreamLimits(numbers=1),
        StreamLimits(nbytes=2020),
        StreamLimits(nbytes=202),
        StreamLimits(nbytes=1),
        StreamLimits(numbers=30, nbytes=900),
    ],
)
def test_a_batch_is_shared_out_by_backlog(limits: StreamLimits) -> None:
    stands = {0: (0, 100), 1: (200, 300), 2: (50, 50), 3: (5, 7)}
    partitions = {
        PartitionId(partition): PartitionOffset(
            FailoverLog(), SeqNo(seq), SeqNo(seq), SeqNo(snapshot_end)
        )
        for partition, (seq, snapshot_end) in stands.items()
    }
    ends = batch_ends(partitions, limits, dict.fromkeys(partitions, 10.0))
    assert all(ends[PartitionId(partition)] <= stands[partition][1] for partition in ends)
    total = sum(seq - stands[partition][0] for partition, seq in ends.items())
    if limits.numbers is not None:
        assert total <= limits.numbers
    if limits.nbytes is not None:
        assert total <= max(1, limits.nbytes // 10)
    batch_total = min(limits.numbers or 202, max(1, (limits.nbytes or 2020) // 10), 202)
    assert total == batch_total
    for number in ends:
        backlog = stands[number][1] - stands[number][0]
        assert abs(ends[number] - stands[number][0] - batch_total * backlog / 202) <= 1


def test_what_has_little_does_not_wait_for_what_is_written_to_all_the_time() -> None:
    backlogs = {"busy": 1_000_000, "calm": 3, "done": 0}
    shares = [equal_shares(100, backlogs)]
    while backlogs["calm"]:
        backlogs["calm"] -= shares[-1]["calm"]
        shares.append(equal_shares(100, backlogs))
    assert shares == [{"busy": 99, "calm": 1, "done": 0}] * 3 + [
        {"busy": 100, "calm": 0, "done": 0}
    ]


def test_a_batch_has_the_same_tasks_though_compaction_has_changed_its_size() -> None:
    """A write that runs again in other tasks is refused, each time that the query is started."""
    driver = ModelDriverClient(3)
    for partition, count in enumerate((30, 20, 50)):
        for key in range(count):
            driver.write(partition, key)
        driver.flush(partition)
    reader = reader_of(driver, maxPartitionBytes="200")
    initial = reader.initialOffset()
    end = reader.latestOffset(initial, ReadAllAvailable())

    def tasks() -> list[Ranges]:
        again = reader_of(driver, maxPartitionBytes="200")
        return [ranges_of([task]) for task in again.partitions(initial, end)]  # type: ignore[list-item]

    first = tasks()
    assert len(first) > 2
    driver.row_bytes //= 3
    assert tasks() == first
    # What an older version has planned is divided as that did.
    del end["number_bytes"]
    assert 0 < len(tasks()) < len(first)


def test_changes_not_yet_on_disk_are_streamed_only_on_request() -> None:
    driver = ModelDriverClient(1)
    driver.write(0, 0)
    reader = reader_of(driver)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) is start
    reader = reader_of(driver, stability="any")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert offsets_of(end)[0].seq == 1
    assert "lease" not in end
    (task,) = list(reader.partitions(start, end))
    assert isinstance(task, ReadTask)
    assert task.lease_id == 0
    reader.prepareForTriggerAvailableNow()
    driver.write(0, 0)
    assert reader.latestOffset(end, ReadAllAvailable()) is end


def test_tasks_are_few_and_about_equal() -> None:
    log = FailoverLog().with_branch(HistoryId(1), SeqNo(0))
    slices = [
        PartitionRange(
            PartitionId(partition), log, SeqNo(0), SeqNo(100), SeqNo(0), SeqNo(100), nbytes
        )
        for partition, nbytes in enumerate([10, 10, 1000, 10, 350, 0, 10])
    ]
    for bytes_max, tasks_min in ((10_000, 1), (100, 1), (10_000, 4), (1, 1), (10_000, 10_000)):
        tasks = tasks_of(slices, 7, bytes_max=bytes_max, tasks_min=tasks_min)
        assert {task.lease_id for task in tasks} == {7}
        reached = dict.fromkeys(range(7), 0)
        for task in tasks:
            assert len({range_.partition for range_ in task.ranges}) == len(task.ranges)
            for range_ in task.ranges:
                assert range_.start == reached[range_.partition] < range_.end
                reached[range_.partition] = range_.end
        assert set(reached.values()) == {100}
        assert len(tasks) >= min(tasks_min, 100)
        assert len(tasks) <= 2 * max(1390 // bytes_max, tasks_min) + 2 * len(slices)
    assert len(tasks_of(slices, 0, bytes_max=10_000, tasks_min=1)) == 1


def test_tasks_are_not_more_than_spark_can_plan() -> None:
    """`maxPartitionBytes=64`, of somebody who means MiB, made a task of each row."""
    log = FailoverLog().with_branch(HistoryId(1), SeqNo(0))
    end = SeqNo(3 * TASKS_MAX)
    range_ = PartitionRange(PartitionId(0), log, SeqNo(0), end, SeqNo(0), end, 100 * end)
    tasks = tasks_of([range_], 7, bytes_max=64, tasks_min=1)
    assert 0.9 * TASKS_MAX < len(tasks) <= 1.1 * TASKS_MAX
    assert sum(piece.end - piece.start for task in tasks for piece in task.ranges) == end


def test_a_plan_pins_the_ranges_from_the_streams_position() -> None:
    """And not the whole bucket, for as long as the lease lives."""
    driver = written(2, 100)
    reader = reader_of(driver)
    first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(first)
    assert driver.leases == {}
    for index in range(2):
        driver.write(index, 0)
    reader.prepareForTriggerAvailableNow()
    driver.write(0, 0)
    driver.flush(0)
    end = reader.latestOffset(first, ReadAllAvailable())
    assert [lease.ranges for lease in driver.leases.values()] == [[(0, 100, 101), (1, 100, 101)]]
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    reader.commit(end)
    assert driver.leases == {}
    # Nothing new, or a query that is stopped before it asks: nothing is pinned either.
    for again in (True, False):
        reader = reader_of(driver, startingOffsets="latest")
        reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        if again:
            start = reader.initialOffset()
            assert reader.latestOffset(start, ReadAllAvailable()) is start
        reader.stop()
        assert driver.leases == {}


def test_partitions_that_are_not_asked_for_any_more_stay_where_they_are() -> None:
    driver = written(3, 20)
    reader = reader_of(driver, maxOffsetsPerTrigger="30", onRollback="marker")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(30))
    few = reader_of(driver, partitions={1}, maxOffsetsPerTrigger="30", onRollback="marker")
    end = few.latestOffset(start, ReadMaxRows(30))
    tasks = list(few.partitions(start, end))
    assert ranges_of(tasks) == [(1, 10, 20, None)]  # type: ignore[arg-type]
    assert offsets_of(end)[0].seq == 10
    # The batch that was planned before is read whole.
    again = list(few.partitions(reader.initialOffset(), start))
    assert [partition_range[0] for partition_range in ranges_of(again)] == [0, 1, 2]  # type: ignore[arg-type]


def test_a_partition_that_is_not_asked_for_stays_inside_its_snapshot() -> None:
    """A failover below the snapshot's end is noticed when it is asked for again: the stream has not
    had what changed again before that end."""
    driver = ModelDriverClient(2)
    for key in (0, 1, 2, 3, 4, 0):
        driver.write(0, key)
        driver.write(1, key)
    for index in range(2):
        driver.flush(index)
        driver.compact(index)
    reader = reader_of(driver, onRollback="marker", maxOffsetsPerTrigger="6")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(6))
    few = reader_of(driver, partitions={1}, onRollback="marker")
    start = few.latestOffset(start, ReadAllAvailable())
    assert offsets_of(start)[0].snapshot_end == 6
    driver.fail_over(0, 4)
    reader = reader_of(driver, onRollback="marker")
    tasks = list(reader.partitions(start, reader.latestOffset(start, ReadAllAvailable())))
    assert ranges_of(tasks) == [(0, 0, 4, 3)]  # type: ignore[arg-type]


def test_a_lease_on_other_partitions_does_not_serve_one_that_is_asked_for_again() -> None:
    driver = written(2, 10)
    options: dict[str, Any] = {"maxOffsetsPerTrigger": "5"}
    reader = reader_of(driver, **options)
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(5))
    driver.let_leases_lapse()
    driver.leases.clear()
    few = reader_of(driver, partitions={1}, **options)
    start = few.latestOffset(start, ReadMaxRows(5))
    reader = reader_of(driver, **options)
    for _ in range(10):
        end = reader.latestOffset(start, ReadMaxRows(5))
        if end is start:
            break
        for task in reader.partitions(start, end):
            assert isinstance(task, ReadTask)
            for range_ in task.ranges:
                driver.read(range_.partition, range_.start, range_.end, task.lease_id)
        start = end
    assert {partition: offset.seq for partition, offset in offsets_of(start).items()} == {
        0: 10,
        1: 10,
    }
