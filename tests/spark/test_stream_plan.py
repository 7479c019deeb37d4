"""What a stream promises Spark, whatever happens to the bucket: without Spark, against a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, ClassVar, Final

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructField, StructType

from tests.kit.effort import effort
from tests.spark.model_driver_client import BYTES_A_ROW, ModelDriverClient
from upr_protocol.client import HeldLease, PartitionInfo, PartitionNumbers
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.limits import LEASE_TIME_TO_LIVE_S_MAX
from upr_protocol.spark import UprDataSource
from upr_protocol.spark.batch_shares import StreamLimits, batch_ends, equal_shares
from upr_protocol.spark.consumer_position import (
    AGAIN_AFTER_REFUSAL_S,
    AGAIN_AFTER_S,
    ConsumerPosition,
)
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.micro_batch_reader import MicroBatchReader
from upr_protocol.spark.offset import PartitionOffset, StreamOffset
from upr_protocol.spark.partition_rollback import BATCH_ENDS_MAX, with_batch_end
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import TASKS_MAX, PartitionRange, ReadTask, tasks_of
from upr_protocol.spark.schema import READ_COLUMNS, default_schema

PARTITIONS: Final = 3
ROWS_MAX: Final = 7
NUMBERS = st.integers(0, PARTITIONS - 1)

Json = dict[str, Any]
Ranges = list[tuple[int, int, int, int | None]]


def options_of(**options_given: str) -> ReadOptions:
    return ReadOptions.parse({"url": "upr://localhost/b", **options_given}, streaming=True)


def reader_of(
    driver: ModelDriverClient, *, partitions: set[int] | None = None, **options_given: str
) -> MicroBatchReader:
    """A reader of some partitions of a bucket, or of all."""
    options = options_of(**options_given)
    reader = MicroBatchReader(options, default_schema(options), driver)
    if partitions is not None:
        reader._driver = FewerPartitions(driver, partitions)
    return reader


def ranges_of(tasks: list[ReadTask]) -> Ranges:
    """Partition, start and end of what tasks read, and from where it went back."""
    ranges: list[PartitionRange] = sorted(
        (range_ for task in tasks for range_ in task.ranges),
        key=lambda range_: (range_.partition, range_.start),
    )
    return [
        (
            range_.partition,
            range_.start,
            range_.end,
            range_.marker.from_seq if range_.marker else None,
        )
        for range_ in ranges
    ]


def offsets_of(document: dict[str, Any]) -> dict[int, PartitionOffset]:
    """Where an offset stands in each partition."""
    return {int(key): offset for key, offset in StreamOffset.of_json(document).partitions.items()}


class FewerPartitions:
    """A driver of which only some partitions are asked for."""

    def __init__(self, driver: ModelDriverClient, partitions: set[int]) -> None:
        self._driver = driver
        self._partitions = partitions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def seqnos(self) -> Any:
        rows = self._driver.seqnos()
        return {partition: row for partition, row in rows.items() if partition in self._partitions}


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


# The parts.


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


@pytest.mark.parametrize(
    ("lost_after", "went_to"), [(29, 20), (20, 20), (19, 10), (10, 10), (9, 0)]
)
def test_a_stream_rewinds_to_the_newest_end_of_a_batch_that_was_not_lost(
    lost_after: int, went_to: int
) -> None:
    driver = ModelDriverClient(1)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.initialOffset()
    for _ in range(3):
        write_rows(driver, 0, 10)
        start = reader.latestOffset(start, ReadAllAvailable())
        reader.commit(start)
    driver.fail_over(0, lost_after)
    driver.write(0, 0)
    driver.flush(0)
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = list(reader.partitions(start, end))
    assert ranges_of(tasks) == [(0, went_to, lost_after + 1, 30)]  # type: ignore[arg-type]
    # A query that does not rewind any more goes back to 0.
    reader = reader_of(driver, onRollback="marker")
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = list(reader.partitions(start, end))
    assert ranges_of(tasks) == [(0, 0, lost_after + 1, 30)]  # type: ignore[arg-type]


def test_a_rewind_does_not_go_to_an_end_that_was_reached_with_other_options() -> None:
    """A batch may have lacked rows then."""
    driver = written(1, 10)
    reader = reader_of(driver, onRollback="marker", failOnDataLoss="false")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    write_rows(driver, 0, 10)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 15)
    tasks = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    assert ranges_of(list(tasks)) == [(0, 0, 15, 20)]  # type: ignore[arg-type]


def test_a_rewind_does_not_go_to_the_end_of_a_snapshot_that_other_options_went_on_with() -> None:
    driver = written(1, 10)
    reader = reader_of(driver, onRollback="rewind", maxOffsetsPerTrigger="5")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(5))
    reader = reader_of(driver, onRollback="marker", failOnDataLoss="false")
    start = reader.latestOffset(start, ReadAllAvailable())
    assert offsets_of(start)[0].seq == 10
    write_rows(driver, 0, 10)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 15)
    tasks = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    assert ranges_of(list(tasks)) == [(0, 0, 15, 20)]  # type: ignore[arg-type]


def test_a_rewind_does_not_go_into_a_snapshot_that_was_left() -> None:
    driver = written(2, 10)
    reader = reader_of(driver, onRollback="rewind", maxOffsetsPerTrigger="10")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))
    assert offsets_of(start)[0].seq == 5
    few = reader_of(driver, partitions={1}, onRollback="rewind")
    start = few.latestOffset(start, ReadAllAvailable())
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 8)
    tasks = list(reader.partitions(start, reader.latestOffset(start, ReadAllAvailable())))
    assert ranges_of(tasks)[0] == (0, 0, 8, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"stability": "any"}, {"failOnDataLoss": "false"}])
def test_a_rewind_needs_batches_that_lack_nothing(options: dict[str, str]) -> None:
    with pytest.raises(PipelineError, match="rewind, which needs stability=durable"):
        options_of(onRollback="rewind", **options)


@pytest.mark.parametrize(
    ("columns", "options", "missing"),
    [
        ("key value seq deleted", {"onRollback": "marker"}, "op, partition"),
        ("op partition key value", {"onRollback": "rewind"}, "seq"),
        ("op partition key", {"onRollback": "marker", "buckets": "a,b"}, "bucket"),
        ("op partition key value", {"onRollback": "marker"}, ""),
        ("key value seq deleted", {}, ""),
    ],
)
def test_markers_need_the_columns_that_tell_them(
    columns: str, options: dict[str, str], missing: str
) -> None:
    """A marker would look like an item with an empty key, and the lost rows would stay."""
    url = "upr://localhost" if "buckets" in options else "upr://localhost/b"
    source = UprDataSource({"url": url, **options})
    schema = StructType([StructField(name, *READ_COLUMNS[name]) for name in columns.split()])
    sentence = f"what a marker is about: {missing} is missing"
    reader = source.streamReader(schema)
    if not missing:
        assert isinstance(reader, MicroBatchReader)
        return
    # Spark would not show what is raised before there is a reader.
    with pytest.raises(PipelineError, match=sentence):
        reader.initialOffset()
    with pytest.raises(PipelineError, match=sentence):
        reader.partitions({}, {})
    with pytest.raises(PipelineError, match=sentence):
        reader.latestOffset({}, ReadAllAvailable())


def test_a_rewind_goes_to_0_where_deletions_behind_the_number_were_removed() -> None:
    driver = written(1, 10)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    write_rows(driver, 0, 10)
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 15)
    driver.partitions[0].purge = 12
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = list(reader.partitions(start, end))
    assert ranges_of(tasks) == [(0, 0, 15, 20)]  # type: ignore[arg-type]


def test_ends_of_batches_are_few_and_far_apart_where_they_are_old() -> None:
    offset = PartitionOffset()
    for seq in range(100, 100_001, 100):
        offset = PartitionOffset(
            seq=SeqNo(seq),
            snapshot_end=SeqNo(seq),
            batch_ends=with_batch_end(
                attrs.evolve(offset, seq=SeqNo(seq), snapshot_end=SeqNo(seq))
            ),
        )
    assert len(offset.batch_ends) == BATCH_ENDS_MAX
    assert offset.batch_ends[:2] == (100_000, 99_900)
    assert offset.batch_ends[-1] == 0
    distances = [100_000 - seq for seq in offset.batch_ends[1:]]
    assert all(further >= 2 * near for near, further in pairwise(distances)), distances
    inside = PartitionOffset(seq=SeqNo(5), snapshot_end=SeqNo(9), batch_ends=(SeqNo(3),))
    assert with_batch_end(inside) == (3,)


SEQS = st.integers(0, 2**64 - 1).map(SeqNo)
LOGS = st.dictionaries(SEQS, st.integers(1, 2**64 - 1), max_size=3).map(
    lambda by_seq: FailoverLog.of_pairs(
        (history, seq)
        for seq, history in sorted(by_seq.items(), reverse=True)
        if list(by_seq.values()).count(history) == 1
    )
)
PARTITION_OFFSETS = st.builds(
    PartitionOffset,
    LOGS,
    SEQS,
    SEQS,
    SEQS,
    st.none() | SEQS,
    st.lists(SEQS, max_size=3).map(tuple),
)
OFFSETS = st.builds(
    StreamOffset,
    st.just("b"),
    st.dictionaries(st.integers(0, 1023).map(PartitionId), PARTITION_OFFSETS, max_size=4),
    st.integers(0, 2**64 - 1),
    st.none() | st.dictionaries(st.just(PartitionId(3)), PARTITION_OFFSETS),
    st.booleans(),
    st.integers(0, 2**40),
    st.none() | st.text(max_size=3),
)


@given(OFFSETS)
def test_an_offset_is_read_as_it_was_written(offset: StreamOffset) -> None:
    assert StreamOffset.of_json(json.loads(json.dumps(offset.to_json()))) == offset


def test_an_offset_is_short() -> None:
    log = FailoverLog.of_pairs([(2**63 + 1, 0)])
    at_end = PartitionOffset(log, SeqNo(20_000), SeqNo(20_000), SeqNo(20_000))
    partitions = {PartitionId(partition): at_end for partition in range(64)}
    assert len(json.dumps(StreamOffset("b", partitions, 7).to_json())) < 2500


def test_an_offset_of_the_first_version_is_read() -> None:
    first = {
        "version": 1,
        "bucket": "b",
        "lease": "0000000000000007",
        "partitions": {
            "3": {"log": [["00000000000000ff", 2]], "seq": 5, "snapshot": [4, 9], "came_from": 8}
        },
    }
    assert StreamOffset.of_json(first).to_json() == {
        "version": 2,
        "bucket": "b",
        "lease": "0000000000000007",
        "partitions": {"3": "5[4-9]<8 00000000000000ff@2"},
    }


def test_a_foreign_offset_is_refused() -> None:
    good = StreamOffset("b", {PartitionId(0): PartitionOffset(FailoverLog(), SeqNo(5))}).to_json()
    assert StreamOffset.of_json(good).to_json() == good
    for wrong, sentence in (
        ({**good, "version": 3}, "version 3"),
        ({}, "an offset of another data source"),
        ({"0": 5}, "an offset of another data source"),
        # Spark's own source `rate` has numbers.
        (5, "an offset of another data source"),
        ({"buckets": {"b": good}}, "a stream of several buckets, and not of one"),
        (
            {**good, "partitions": {"0": {"seq": -1, "log": [], "snapshot": [0, 0]}}},
            "another data source",
        ),
        (
            {**good, "version": 1, "partitions": {"0": {"seq": -1, "log": []}}},
            "another data source",
        ),
        ({**good, "partitions": {"0": "5 no log"}}, "another data source"),
        ({**good, "partitions": []}, "another data source"),
        ({**good, "partitions": {"0": f"5 1{'0' * 16}@0"}}, "another data source"),
        ({**good, "lease": "1" + "0" * 16}, "another data source"),
        ({**good, "lease": "-1"}, "another data source"),
        ({**good, "number_bytes": float("inf")}, "another data source"),
    ):
        with pytest.raises(PipelineError, match=sentence) as refusal:
            StreamOffset.of_json(wrong)
        assert refusal.value.code == "UPR_OFFSET"
    reader = reader_of(ModelDriverClient(1))
    with pytest.raises(PipelineError, match="of the bucket 'other'"):
        reader.commit({**good, "bucket": "other"})


def test_a_refusal_before_the_first_batch_names_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> HeldLease:
        raise ServerError(Status.RANGE_GONE, "partitions move between nodes")

    driver = written(1, 5)
    monkeypatch.setattr(driver, "acquire_lease", refuse)
    with pytest.raises(PipelineError, match=r"^\[UPR_RANGE_GONE\].*partitions move"):
        reader_of(driver).prepareForTriggerAvailableNow()


def test_a_checkpoint_of_other_keys_is_refused() -> None:
    """The rows that those have had so far would be missing."""
    driver = written(1, 5)
    filters: list[dict[str, str]] = [{}, {"keyPrefix": "a"}, {"keyPrefix": "b"}, {"key": "a"}]
    for own in filters:
        reader = reader_of(driver, partitions=None, **own)
        initial = reader.initialOffset()
        start = reader.latestOffset(initial, ReadAllAvailable())
        of_older_version = {name: field for name, field in start.items() if name != "keys"}
        for other in filters:
            reader = reader_of(driver, partitions=None, **other)
            assert reader.latestOffset(of_older_version, ReadAllAvailable()) is of_older_version
            if other == own:
                assert reader.latestOffset(start, ReadAllAvailable()) is start
                continue
            with pytest.raises(PipelineError, match="begin with a new checkpoint") as failed:
                reader.latestOffset(start, ReadAllAvailable())
            assert failed.value.code == "UPR_OFFSET"
            with pytest.raises(PipelineError, match=r"of a stream with .*, and not with "):
                reader.partitions(initial, start)


def test_a_rollback_fails_the_query_and_says_everything() -> None:
    driver = ModelDriverClient(2)
    for _ in range(10):
        driver.write(1, 0)
    driver.flush(1)
    reader = reader_of(driver)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    driver.fail_over(1, 4)
    with pytest.raises(PipelineError) as failed:
        reader.latestOffset(start, ReadAllAvailable())
    assert failed.value.code == "UPR_ROLLBACK"
    text = str(failed.value)
    assert "partition 1 of b has to go back from 10 to 4" in text
    first, second = (driver.partitions[1].log.pairs())[::-1]
    assert f"followed [{first[0]:016x} from 0]" in text
    assert f"has [{second[0]:016x} from 4, {first[0]:016x} from 0]" in text
    # Also where the log has a batch that is to be read again.
    initial = StreamOffset("b", {}, is_initial=True).to_json()
    with pytest.raises(PipelineError, match="UPR_ROLLBACK"):
        reader.partitions(initial, start)


@pytest.mark.parametrize("on_rollback", ["fail", "marker"])
@pytest.mark.parametrize(
    ("stability", "request_name"),
    [("durable", "acquire_lease"), ("durable", "partition_infos"), ("any", "partition_infos")],
)
def test_a_failover_while_a_batch_is_planned_is_noticed(
    stability: str, request_name: str, on_rollback: str
) -> None:
    """The new history has other changes 5 to 10. A batch from 10 on would lack them, and its offset
    would be of the new history."""

    class FailingDriver(ModelDriverClient):
        request_name = ""

        def fail_over_at(self, request_name: str) -> None:
            if request_name == self.request_name:
                self.request_name = ""
                self.fail_over(0, 4)
                write_rows(self, 0, 20)

        def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
            self.fail_over_at("acquire_lease")
            return super().acquire_lease(lease_id, ranges)

        def partition_infos(self, *, refresh: bool = False) -> Any:
            self.fail_over_at("partition_infos")
            return super().partition_infos(refresh=refresh)

    driver = FailingDriver(1)
    write_rows(driver, 0, 10)
    reader = reader_of(driver, stability=stability, onRollback=on_rollback)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(start)
    write_rows(driver, 0, 5)
    driver.request_name = request_name
    if on_rollback == "fail":
        with pytest.raises(PipelineError, match="has to go back from 10 to 4"):
            reader.latestOffset(start, ReadAllAvailable())
        assert not driver.leases
        return
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 0, 24, 10)]  # type: ignore[arg-type]
    assert len(driver.leases) == (stability == "durable")


def test_a_batch_that_cannot_be_planned_pins_nothing() -> None:
    """The query ends with the error; its lease would hold compaction until it ends by itself."""

    class FailingDriver(ModelDriverClient):
        is_away = False

        def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
            self.is_away = True
            return super().acquire_lease(lease_id, ranges)

        def partition_infos(self, *, refresh: bool = False) -> Any:
            if self.is_away:
                raise PipelineError("UPR_CONNECTION", "away")
            return super().partition_infos(refresh=refresh)

    driver = FailingDriver(1)
    write_rows(driver, 0, 10)
    reader = reader_of(driver)
    start = reader.initialOffset()
    with pytest.raises(PipelineError, match="away"):
        reader.latestOffset(start, ReadAllAvailable())
    assert driver.is_away
    assert not driver.leases


@pytest.mark.parametrize("stability", ["durable", "any"])
def test_a_failover_while_the_beginning_is_looked_for_is_noticed(stability: str) -> None:
    """The new history has other changes up to 10, and the stream would not read them."""

    class FailingDriver(ModelDriverClient):
        def partition_infos(self, *, refresh: bool = False) -> Any:
            if self.partitions[0].high == 10:
                self.fail_over(0, 4)
                write_rows(self, 0, 3)
            return super().partition_infos(refresh=refresh)

    driver = FailingDriver(1)
    write_rows(driver, 0, 10)
    reader = reader_of(driver, stability=stability, startingOffsets="latest")
    start = reader.initialOffset()
    write_rows(driver, 0, 4)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 7, 11, None)]  # type: ignore[arg-type]


class LateDriver(ModelDriverClient):
    """Knows the logs as they were when it asked for the numbers last, as a connection that was made
    before does."""

    logs: Mapping[PartitionId, PartitionInfo] = {}

    def seqnos(self) -> Mapping[PartitionId, PartitionNumbers]:
        self.logs = super().partition_infos()
        return super().seqnos()

    def partition_infos(self, *, refresh: bool = False) -> Mapping[PartitionId, PartitionInfo]:
        return super().partition_infos() if refresh else self.logs


def test_another_node_that_grants_the_lease_of_a_batch_is_noticed() -> None:
    """It has all that there was, and its own history. With the old one in the offset, a stream
    would have to go back that has lost nothing."""
    driver = LateDriver(1)
    write_rows(driver, 0, 10)
    reader = reader_of(driver)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(start)
    write_rows(driver, 0, 5)

    def take_over() -> None:
        driver.fail_over(0, 15)
        write_rows(driver, 0, 5)

    driver.before_next_lease = take_over
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 10, 20, None)]  # type: ignore[arg-type]
    assert reader.latestOffset(end, ReadAllAvailable()) is end


class LosingDriver(ModelDriverClient):
    """A bucket of one partition that loses rows as soon as it has granted a lease, and gets fewer
    new ones.

    Attributes:
        losses: How often it does.
    """

    losses = 0.0

    def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
        lease = super().acquire_lease(lease_id, ranges)
        if self.losses:
            self.losses -= 1
            self.fail_over(0, self.partitions[0].high - 5)
            write_rows(self, 0, 3)
        return lease


def test_a_batch_does_not_end_where_a_new_history_has_yet_to_come() -> None:
    driver = LosingDriver(1)
    write_rows(driver, 0, 10)
    reader = reader_of(driver)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(start)
    write_rows(driver, 0, 10)
    driver.losses = 1
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 10, 18, None)]  # type: ignore[arg-type]
    assert len(driver.leases) == 1


def test_a_batch_that_nothing_pins_does_not_end_where_a_new_history_has_yet_to_come() -> None:
    class FailingDriver(ModelDriverClient):
        is_to_fail = False

        def partition_infos(self, *, refresh: bool = False) -> Mapping[PartitionId, PartitionInfo]:
            if self.is_to_fail:
                self.is_to_fail = False
                self.fail_over(0, 15)
                write_rows(self, 0, 3)
            return super().partition_infos(refresh=refresh)

    driver = FailingDriver(1)
    write_rows(driver, 0, 10)
    reader = reader_of(driver, stability="any")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(start)
    write_rows(driver, 0, 10)
    driver.is_to_fail = True
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 10, 18, None)]  # type: ignore[arg-type]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_plan_that_meets_one_failover_after_another_ends(*, is_new: bool) -> None:
    class FailingDriver(LosingDriver):
        def partition_infos(self, *, refresh: bool = False) -> Mapping[PartitionId, PartitionInfo]:
            if is_new:
                self.fail_over(0, self.partitions[0].high)
            return super().partition_infos(refresh=refresh)

    driver = FailingDriver(1)
    write_rows(driver, 0, 100)
    driver.losses = math.inf
    reader = reader_of(driver, startingOffsets="latest" if is_new else "earliest")
    with pytest.raises(PipelineError, match="again and again") as failed:
        reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert failed.value.code == "UPR_SERVER"
    assert not driver.leases


@pytest.mark.parametrize("to", [4, 5, 6])
def test_a_failover_between_a_snapshots_parts_and_its_end(to: int) -> None:
    """The first part has no row of the key, as the last number of the snapshot superseded it. Where
    that number is lost, the key would be missing."""
    driver = ModelDriverClient(1)
    for _ in range(6):
        driver.write(0, 0)
    driver.flush(0)
    driver.compact(0)
    reader = reader_of(driver, onRollback="marker", maxOffsetsPerTrigger="5")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(5))  # of the options
    start_of_0 = offsets_of(start)[0]
    assert (start_of_0.snapshot_start, start_of_0.snapshot_end) == (0, 6)
    driver.fail_over(0, to)
    reader.commit(start)
    with pytest.raises(PipelineError, match="UPR_ROLLBACK") if to < 6 else nullcontext():
        reader_of(driver).latestOffset(start, ReadAllAvailable())
    end = reader.latestOffset(start, ReadAllAvailable())
    ranges = ranges_of(list(reader.partitions(start, end)))  # type: ignore[arg-type]
    assert ranges == [(0, 5, 6, None) if to == 6 else (0, 0, to, 5)]


def test_a_failover_after_the_rest_of_a_snapshot_was_planned_anew() -> None:
    """The rest was pinned by a lease that is gone, and no batch has read of it since."""
    driver = ModelDriverClient(2)
    for key in (0, 1, 2, 0):
        driver.write(0, key)
    driver.flush(0)
    driver.compact(0)
    reader = reader_of(driver, onRollback="marker", maxOffsetsPerTrigger="2")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(2))
    reader.commit(start)
    driver.leases.clear()
    for key in range(100):
        driver.write(1, key)
    driver.flush(1)
    reader = reader_of(driver, onRollback="marker", maxOffsetsPerTrigger="1")
    start = reader.latestOffset(start, ReadMaxRows(1))
    assert offsets_of(start)[0].seq == 2
    driver.fail_over(0, 3)  # The key 0 is at 1 again, which was superseded when that was read.
    end = reader.latestOffset(start, ReadAllAvailable())
    ranges = ranges_of(list(reader.partitions(start, end)))  # type: ignore[arg-type]
    assert ranges[0] == (0, 0, 3, 2)


def test_a_batch_that_is_not_whole_any_more_is_not_read() -> None:
    driver = ModelDriverClient(1)
    for key in (0, 1, 0, 1, 2):
        driver.write(0, key)
    driver.flush(0)
    reader = reader_of(driver)
    initial = reader.initialOffset()
    end = reader.latestOffset(initial, ReadAllAvailable())
    driver.let_leases_lapse()
    driver.compact(0)
    with pytest.raises(PipelineError, match="failOnDataLoss=false") as failed:
        reader.partitions(initial, end)
    assert failed.value.code == "UPR_RANGE_GONE"
    tasks = list(reader_of(driver, failOnDataLoss="false").partitions(initial, end))
    assert ranges_of(tasks) == [(0, 0, 5, None)]  # type: ignore[arg-type]


def test_a_batch_of_which_another_node_has_become_active_is_not_read() -> None:
    """The lease is there for the other partitions. So nothing refuses to renew it, and without a
    look at its ranges each task would fail, each time that the query is started."""
    driver = ModelDriverClient(2)
    for partition in range(2):
        for key in (0, 1, 0, 2):
            driver.write(partition, key)
        driver.flush(partition)
    reader = reader_of(driver)
    initial = reader.initialOffset()
    end = reader.latestOffset(initial, ReadAllAvailable())
    driver.take_over(1)
    driver.partitions[1].persisted = 3
    with pytest.raises(PipelineError, match="another node has become active") as failed:
        reader.partitions(initial, end)
    assert failed.value.code == "UPR_RANGE_GONE"
    (task,) = reader_of(driver, failOnDataLoss="false").partitions(initial, end)
    assert isinstance(task, ReadTask)
    assert ranges_of([task]) == [(0, 0, 4, None), (1, 0, 4, None)]
    for range_ in task.ranges:
        assert driver.read(range_.partition, range_.start, range_.end, task.lease_id)


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


def written(partitions: int, rows: int) -> ModelDriverClient:
    """A bucket with so many rows in each partition, all on disk."""
    driver = ModelDriverClient(partitions)
    for partition in range(partitions):
        write_rows(driver, partition, rows)
    return driver


def write_rows(driver: ModelDriverClient, partition: int, rows: int) -> None:
    """Writes so many rows to a partition, and to disk."""
    for key in range(rows):
        driver.write(partition, key)
    driver.flush(partition)


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


@pytest.mark.parametrize("is_takeover", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_query_that_is_to_end_ends_with_all_keys_after_a_failover(
    *, is_begun: bool, is_takeover: bool
) -> None:
    """Nothing holds there what is up to the old end. A batch that ends there has no row of the
    keys that had changed again behind it."""
    driver = written(1, 10)
    reader = reader_of(driver, onRollback="marker", maxOffsetsPerTrigger="5")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    contents: dict[int, int] = {}

    def run_batch() -> bool:
        nonlocal start
        end = reader.latestOffset(start, ReadMaxRows(5))
        if end is start:
            return False
        for task in reader.partitions(start, end):
            assert isinstance(task, ReadTask)
            for range_ in task.ranges:
                if range_.marker is not None:
                    contents.clear()
                rows = driver.read(range_.partition, range_.start, range_.end, task.lease_id)
                contents.update({key: seq for seq, key in rows})
        start = end
        return True

    if is_begun:
        assert run_batch()
    if is_takeover:
        driver.take_over(0)
    else:
        driver.fail_over(0, 4)
        driver.leases.clear()
    for _ in range(10):
        driver.write(0, 0)
    driver.flush(0)
    driver.compact(0)
    newest = driver.partitions[0].newest()
    for _ in range(10):
        if not run_batch():
            break
        write_rows(driver, 0, 1)
    else:
        raise AssertionError("it does not end")
    assert contents == newest


def test_a_query_that_is_to_end_notices_another_node_that_grants_its_lease() -> None:
    """That has compacted as it liked: up to the old end it has no row of a key that has changed
    again behind it."""
    driver = written(1, 10)
    reader = reader_of(driver)
    reader.prepareForTriggerAvailableNow()

    def take_over() -> None:
        write_rows(driver, 0, 10)
        driver.take_over(0)

    driver.before_next_lease = take_over
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    (task,) = reader.partitions(reader.initialOffset(), end)
    assert ranges_of([task]) == [(0, 0, 20, None)]  # type: ignore[list-item]
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    assert len(driver.leases) == 1


def test_a_stream_begins_at_a_time() -> None:
    driver = written(2, 5)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    for partition in range(2):
        for seq in range(1, 6):
            driver.times[partition, seq] = noon + timedelta(seconds=seq - 3 - partition)
    reader = reader_of(driver, startingTimestamp=noon.isoformat())
    start = reader.initialOffset()
    assert reader.initialOffset() == start, "Spark asks again"
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 2, 5, None), (1, 3, 5, None)]  # type: ignore[arg-type]


@pytest.mark.parametrize("on_rollback", ["fail", "marker"])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_failover_before_a_stream_has_begun_at_its_time(
    *, is_asked: bool, on_rollback: str
) -> None:
    """The rows since then begin at another number in the new history, and nothing was read that
    would have to be undone."""
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)

    class FailingDriver(ModelDriverClient):
        is_to_fail = False

        def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
            seqs = super().seqnos_at_time(time)
            if self.is_to_fail:
                self.is_to_fail = False
                self.lose_rows()
            return seqs

        def lose_rows(self) -> None:
            self.fail_over(0, 4)
            self.times = {number: time for number, time in self.times.items() if number[1] <= 4}
            write_rows(self, 0, 20)

    driver = FailingDriver(1)
    write_rows(driver, 0, 10)
    driver.times = {(0, seq): noon - timedelta(seconds=1) for seq in range(1, 11)}
    driver.is_to_fail = is_asked
    options = {"startingTimestamp": noon.isoformat(), "onRollback": on_rollback}
    reader = reader_of(driver, partitions=None, **options)
    start = reader.initialOffset()
    if not is_asked:
        driver.lose_rows()
    end = reader.latestOffset(start, ReadAllAvailable())
    for again in (reader, reader_of(driver, partitions=None, **options)):
        assert ranges_of(list(again.partitions(start, end))) == [(0, 4, 24, None)]  # type: ignore[arg-type]


@pytest.mark.parametrize("stability", ["durable", "any"])
@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(2)])
def test_a_stream_begins_at_a_time_that_has_not_passed(limit: Any, stability: str) -> None:
    """Also where rows from before that time come while the first batch is planned."""
    now = datetime(2026, 1, 31, tzinfo=UTC)
    hour = timedelta(hours=1)

    def write(time: datetime) -> None:
        for partition_id in range(PARTITIONS):
            driver.write(partition_id, 0)
            driver.times[partition_id, driver.partitions[partition_id].high] = time
            driver.flush(partition_id)

    class BusyDriver(ModelDriverClient):
        is_busy = False

        def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
            seqs = super().seqnos_at_time(time)
            if self.is_busy:
                write(now)
            return seqs

    driver = BusyDriver(PARTITIONS)
    options = {"startingTimestamp": (now + hour).isoformat(), "stability": stability}
    write(now)
    reader = reader_of(driver, partitions=None, **options)
    first = start = reader.initialOffset()
    for driver.is_busy in (True, False):
        write(now)
        assert reader.latestOffset(start, limit) == start
    assert not driver.leases
    for hours in (1, 2):
        write(now + hours * hour)
    seqs: list[int] = []
    while (end := reader.latestOffset(start, limit)) != start:
        ranges = ranges_of(list(reader.partitions(start, end)))  # type: ignore[arg-type]
        # Another process finds another beginning, and reads the same rows again.
        other_reader = reader_of(driver, partitions=None, **options)
        assert other_reader.initialOffset() != first
        assert ranges_of(list(other_reader.partitions(start, end))) == ranges  # type: ignore[arg-type]
        seqs += [seq for _, begin, last, _ in ranges for seq in range(begin + 1, last + 1)]
        start = end
    high = driver.partitions[0].high
    assert sorted(seqs) == sorted([high - 1, high] * PARTITIONS)


@pytest.mark.parametrize("stability", ["durable", "any"])
@pytest.mark.parametrize("now", [False, True])
def test_a_stream_that_was_away_while_deletions_were_forgotten(stability: str, now: bool) -> None:
    driver = written(2, 10)
    reader = reader_of(driver, stability=stability)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(start)
    for _ in range(5):
        driver.write(1, 0)
    driver.flush(1)
    driver.partitions[1].purge = 12
    for on_rollback in ("fail", "marker"):
        reader = reader_of(driver, stability=stability, onRollback=on_rollback)
        if now:
            reader.prepareForTriggerAvailableNow()
        if on_rollback == "fail":
            with pytest.raises(PipelineError, match="deletions from 10") as failed:
                reader.latestOffset(start, ReadAllAvailable())
            assert failed.value.code == "UPR_RANGE_GONE"
            continue
        end = reader.latestOffset(start, ReadAllAvailable())
        tasks = list(reader.partitions(start, end))
        assert ranges_of(tasks) == [(1, 0, 15, 10)]  # type: ignore[arg-type]


def test_deletions_that_are_forgotten_do_not_matter_inside_a_snapshot() -> None:
    driver = written(1, 20)
    reader = reader_of(driver, maxOffsetsPerTrigger="5")
    start = reader.initialOffset()
    driver.partitions[0].purge = 15
    for index in range(4):
        end = reader.latestOffset(start, ReadMaxRows(5))
        if index == 2:
            driver.fail_over(0, 20)  # an unclean restart: a new history at the end
        tasks = list(reader.partitions(start, end))
        assert ranges_of(tasks) == [(0, 5 * index, 5 * index + 5, None)]  # type: ignore[arg-type]
        start = end
    assert reader.latestOffset(start, ReadMaxRows(5)) is start


def test_the_rest_of_a_batch_is_read_though_deletions_were_removed() -> None:
    driver = written(1, 10)
    reader = reader_of(driver)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(start)
    for key in (0, 0, 1):
        driver.write(0, key)
    driver.flush(0)
    end = reader.latestOffset(start, ReadAllAvailable())
    driver.let_leases_lapse()
    driver.compact(0)
    driver.partitions[0].purge = 12
    reader = reader_of(driver, failOnDataLoss="false")
    tasks = list(reader.partitions(start, end))
    assert ranges_of(tasks) == [(0, 10, 13, None)]  # type: ignore[arg-type]
    (task,) = tasks
    assert isinstance(task, ReadTask)
    assert driver.read(0, 10, 13, task.lease_id) == [(12, 0), (13, 1)]
    # The lease ends when a later batch is committed.
    driver.write(0, 5)
    driver.flush(0)
    later = reader.latestOffset(end, ReadAllAvailable())
    reader.commit(later)
    assert task.lease_id not in driver.leases


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


@pytest.mark.parametrize("on_rollback", ["fail", "marker"])
def test_a_stream_of_a_key_notices_that_its_bucket_was_created_again(on_rollback: str) -> None:
    """With another number of partitions the key is in another one, and the bucket still has one of
    the old number."""
    reader = reader_of(written(3, 10), partitions={1}, onRollback=on_rollback)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    new_bucket = ModelDriverClient(2, first_history=100)
    write_rows(new_bucket, 0, 5)
    reader = reader_of(new_bucket, partitions={0}, onRollback=on_rollback)
    if on_rollback == "fail":
        with pytest.raises(PipelineError, match="partition 1 of b has to go back from 10 to 0"):
            reader.latestOffset(start, ReadAllAvailable())
        return
    end = reader.latestOffset(start, ReadAllAvailable())
    for _ in range(2):
        ranges = ranges_of(list(reader.partitions(start, end)))  # type: ignore[arg-type]
        assert ranges == [(0, 0, 5, None), (1, 0, 0, 10)]
    assert reader.latestOffset(end, ReadAllAvailable()) is end, "the marker comes once"


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


def test_the_progress_says_how_far_the_stream_is_behind() -> None:
    driver = written(2, 20)
    write_rows(driver, 0, 10)
    reader = reader_of(driver, maxOffsetsPerTrigger="10")
    start = reader.initialOffset()

    def metrics() -> dict[str, float]:
        document = reader.reportLatestOffset()
        assert document is not None
        assert offsets_of(document)[0].seq == 30
        metrics: dict[str, float] = document["metrics"]
        return metrics

    assert metrics() == {
        "minOffsetsBehindLatest": 20,
        "maxOffsetsBehindLatest": 30,
        "avgOffsetsBehindLatest": 25.0,
        "totalOffsetsBehindLatest": 50,
    }
    end = reader.latestOffset(start, ReadMaxRows(10))
    assert metrics() == {
        "minOffsetsBehindLatest": 16,
        "maxOffsetsBehindLatest": 24,
        "avgOffsetsBehindLatest": 20.0,
        "totalOffsetsBehindLatest": 40,
        "estimatedTotalBytesBehindLatest": 40 * BYTES_A_ROW,
    }
    reader = reader_of(driver)
    assert reader.latestOffset(end, ReadAllAvailable()) is not end
    assert metrics()["totalOffsetsBehindLatest"] == 0
    assert metrics()["secondsBehindLatest"] == 0
    assert metrics()["estimatedTotalBytesBehindLatest"] == 0


def test_a_named_stream_puts_its_position_when_batches_are_done() -> None:
    driver = written(2, 20)

    def put() -> list[tuple[str, dict[int, int]]]:
        return list(driver.positions.values())

    reader = reader_of(driver, consumerName="orders", maxOffsetsPerTrigger="20")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(20))
    assert put() == [("orders", {0: 0, 1: 0})], "the batch was not done yet"
    for _ in range(3):
        start, end = end, reader.latestOffset(end, ReadMaxRows(20))
        reader.commit(start)
    assert put() == [("orders", {0: 20, 1: 20})]
    # Another process replaces what this one has put, also if that was put by the other lease.
    for _ in range(2):
        write_rows(driver, 0, 1)
        reader = reader_of(driver, consumerName="orders")
        end = reader.latestOffset(end, ReadAllAvailable())
        assert len(put()) == 1
    driver.write(1, 5)
    reader = reader_of(driver, consumerName="orders", stability="any")
    end = reader.latestOffset(end, ReadAllAvailable())
    end = reader.latestOffset(end, ReadAllAvailable())
    assert put() == [("orders", {0: 22, 1: 20})], "as far as it is on disk"


class RefusingDriver(ModelDriverClient):
    """A bucket whose server may refuse positions."""

    refuses = False
    puts = 0

    def put_position(self, lease_id: int, owner: str, seqs: Mapping[int, int]) -> None:
        self.puts += 1
        if self.refuses:
            raise ServerError(Status.LIMIT_REACHED, "there are too many leases")
        super().put_position(lease_id, owner, seqs)


def test_a_position_that_is_refused_does_not_end_the_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = RefusingDriver(1)
    write_rows(driver, 0, 20)
    driver.refuses = True
    reader = reader_of(driver, consumerName="orders")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 0, 20, None)]  # type: ignore[arg-type]
    for _ in range(3):
        assert reader.latestOffset(end, ReadAllAvailable()) is end
    assert driver.puts == 2, "where it is has changed once"
    (record,) = caplog.records
    assert "there are too many leases" in record.getMessage()


def test_a_position_that_does_not_change_is_put_again() -> None:
    driver = RefusingDriver(1)
    now = 0.0
    position = ConsumerPosition(driver, "orders", lambda: now)
    offset = StreamOffset("b", {})
    position.put_offset(offset)
    now = AGAIN_AFTER_S - 1
    position.put_offset(offset)
    assert driver.puts == 1
    now = AGAIN_AFTER_S
    position.put_offset(offset)
    assert driver.puts == 2
    assert len(driver.positions) == 1
    assert AGAIN_AFTER_S < LEASE_TIME_TO_LIVE_S_MAX
    driver.refuses = True
    now += AGAIN_AFTER_S
    position.put_offset(offset)
    driver.refuses = False
    now += AGAIN_AFTER_REFUSAL_S
    position.put_offset(offset)
    assert driver.puts == 4
    assert len(driver.positions) == 1


def test_offsets_of_partitions_that_are_not_there() -> None:
    with pytest.raises(PipelineError, match="names partition 7 of b; the partitions read are"):
        reader_of(written(2, 5), startingOffsets='{"7": 1}').initialOffset()
    with pytest.raises(PipelineError, match="needs stability=durable"):
        options_of(stability="any", maxBytesPerTrigger="5")
