"""What a stream does when, between its steps, a node loses changes or another becomes active."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tests.spark.model_driver_client import ModelDriverClient
from tests.spark.stream_reader import offsets_of, ranges_of, reader_of, write_rows, written
from upr_protocol.client import HeldLease, PartitionInfo, PartitionNumbers
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.offset import StreamOffset
from upr_protocol.spark.read_tasks import ReadTask


def test_a_refusal_before_the_first_batch_names_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> HeldLease:
        raise ServerError(Status.RANGE_GONE, "partitions move between nodes")

    driver = written(1, 5)
    monkeypatch.setattr(driver, "acquire_lease", refuse)
    with pytest.raises(PipelineError, match=r"^\[UPR_RANGE_GONE\].*partitions move"):
        reader_of(driver).prepareForTriggerAvailableNow()


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


def test_a_stream_that_rewinds_goes_on_with_the_options_that_the_error_names() -> None:
    driver = ModelDriverClient(1)
    for key in (0, 1, 0, 1, 2):
        driver.write(0, key)
    driver.flush(0)
    reader = reader_of(driver, onRollback="rewind")
    initial = reader.initialOffset()
    end = reader.latestOffset(initial, ReadAllAvailable())
    driver.let_leases_lapse()
    driver.compact(0)
    # To set failOnDataLoss alone would be refused.
    with pytest.raises(PipelineError, match="set onRollback=marker and failOnDataLoss=false to"):
        reader.partitions(initial, end)
    reader = reader_of(driver, onRollback="marker", failOnDataLoss="false")
    tasks = list(reader.partitions(initial, end))
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
