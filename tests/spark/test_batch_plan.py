"""What a read plans, without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from tests.kit.fake_server import put_keys
from tests.kit.threaded import ThreadedCluster, trio_thread
from tests.spark.model_driver_client import ModelDriverClient
from upr_protocol.client import BlockingClient, HeldLease, PartitionInfo, PartitionNumbers
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import SEQ_MAX, PartitionId
from upr_protocol.partition_map import Assignment
from upr_protocol.spark import driver_connection
from upr_protocol.spark.batch_reader import BatchReader, plan
from upr_protocol.spark.driver_client import BucketDriverClient, DriverClient
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import ReadTask
from upr_protocol.spark.schema import default_schema

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def options_of(**options: str) -> ReadOptions:
    return ReadOptions.parse({"url": "upr://a,b/b", **options})


def planned(options: ReadOptions, driver: DriverClient, lease_id: int) -> list[ReadTask]:
    """The tasks of a read, whose lease is released if there are none."""
    with ExitStack() as leases:
        tasks = plan(options, driver, lease_id, leases)
        leases.pop_all()
    return tasks


def ranges_of(tasks: list[ReadTask]) -> list[tuple[int, int, int]]:
    """Partition, start and end of what is read."""
    return sorted(
        (range_.partition, range_.start, range_.end) for task in tasks for range_ in task.ranges
    )


class BusyBucket(ModelDriverClient):
    """A bucket of one partition to which others write all the time."""

    now = NOW

    def write_now(self) -> None:
        self.write(0, 0)
        self.times[0, self.partitions[0].high] = self.now

    def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
        self.write_now()
        return super().seqnos_at_time(time)

    def seqnos(self) -> Mapping[PartitionId, PartitionNumbers]:
        self.write_now()
        return super().seqnos()

    def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
        self.write_now()
        self.flush(0)
        return super().acquire_lease(lease_id, ranges)


def seqs_read(bucket: BusyBucket, lease_id: int = 1, **options: str) -> list[int]:
    """The numbers of partition 0 that are read."""
    tasks = planned(options_of(**options), bucket, lease_id)
    return [seq for _, start, end in ranges_of(tasks) for seq in range(start + 1, end + 1)]


@pytest.mark.parametrize("stability", ["durable", "any"])
def test_an_end_that_has_not_passed_is_a_bound_though_others_write(stability: str) -> None:
    bucket = BusyBucket(1)
    end = (NOW + timedelta(hours=1)).isoformat()
    seqs = seqs_read(bucket, endingTimestamp=end, stability=stability)
    assert seqs == list(range(1, len(seqs) + 1))
    assert 1 <= len(seqs) <= bucket.partitions[0].high


@pytest.mark.parametrize("stability", ["durable", "any"])
@pytest.mark.parametrize("end_time", [None, NOW + timedelta(hours=2)])
def test_a_start_that_has_not_passed_leaves_out_what_others_write_meanwhile(
    stability: str, end_time: datetime | None
) -> None:
    bucket = BusyBucket(1)
    options = {"startingTimestamp": (NOW + timedelta(hours=1)).isoformat(), "stability": stability}
    if end_time is not None:
        options["endingTimestamp"] = end_time.isoformat()
    assert seqs_read(bucket, 1, **options) == []


@pytest.mark.parametrize("stability", ["durable", "any"])
@pytest.mark.parametrize(
    ("options", "seqs"),
    [
        ({"startingTimestamp": NOW.isoformat(), "endingOffsets": '{"0": 3}'}, [(1, 5, 7)]),
        ({"startingOffsets": '{"0": 6}', "endingTimestamp": NOW.isoformat()}, [(1, 0, 5)]),
    ],
)
def test_nothing_is_between_a_number_and_a_time_in_a_partition_where_the_start_is_later(
    options: dict[str, str], seqs: list[tuple[int, int, int]], stability: str
) -> None:
    """Others are read: nobody knows which numbers the partitions have at a time."""
    bucket = ModelDriverClient(2)
    for partition in range(2):
        for seq in range(1, 8):
            bucket.write(partition, seq)
            bucket.times[partition, seq] = NOW + timedelta(hours=seq - 5.5)
        bucket.flush(partition)
    assert ranges_of(planned(options_of(**options, stability=stability), bucket, 1)) == seqs
    beyond = options_of(startingOffsets='{"0": 8}', endingTimestamp=NOW.isoformat())
    sentence = r"partition 0 of b cannot be read from 8 to 5: .* Correct startingOffsets"
    with pytest.raises(OptionError, match=sentence):
        planned(beyond, bucket, 2)


def test_a_start_that_has_passed_meanwhile_leaves_out_the_same_rows_each_time() -> None:
    bucket = BusyBucket(1)
    bucket.acquire_lease(1, [(0, 0, SEQ_MAX)])
    for hours in range(4):
        bucket.now = NOW + timedelta(hours=hours)
        bucket.write_now()
    bucket.acquire_lease(2, [(0, 0, SEQ_MAX)])
    options = {"startingTimestamp": (NOW + timedelta(hours=1)).isoformat()}
    for _ in range(2):
        assert seqs_read(bucket, 1, **options) == []
        assert seqs_read(bucket, 2, **options) == [3, 4, 5, 6]


@pytest.mark.parametrize("new_rows", [0, 20])
@pytest.mark.parametrize("bound", ["startingTimestamp", "endingTimestamp"])
def test_a_failover_between_the_numbers_at_a_time_and_the_rows_is_noticed(
    bound: str, new_rows: int
) -> None:
    """The new history has other rows up to the number: those since a start would be missing, and
    those after an end would be read."""

    class FailingBucket(ModelDriverClient):
        def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
            seqs = super().seqnos_at_time(time)
            self.fail_over(0, 4)
            for _ in range(new_rows):
                self.write(0, 0)
            return seqs

    bucket = FailingBucket(1)
    for seq in range(1, 11):
        bucket.write(0, 0)
        bucket.times[0, seq] = NOW - timedelta(hours=1)
    with pytest.raises(PipelineError, match="there was a failover") as failed:
        planned(options_of(**{bound: NOW.isoformat()}), bucket, 1)
    assert failed.value.code == "UPR_ROLLBACK"
    assert not bucket.leases


def timed_bucket() -> ModelDriverClient:
    """A bucket with ten rows, the last four of them since `NOW`."""
    bucket = ModelDriverClient(1)
    for seq in range(1, 11):
        bucket.write(0, 0)
        bucket.times[0, seq] = NOW + timedelta(hours=-1 if seq <= 6 else 1)
    return bucket


def test_an_action_after_one_that_met_a_failover_has_the_rows_since_a_time() -> None:
    """The lease of the first one was granted on numbers of the old history."""
    bucket, options = timed_bucket(), options_of(startingTimestamp=NOW.isoformat())

    def fail_over() -> None:
        bucket.fail_over(0, 4)
        bucket.times = {name: time for name, time in bucket.times.items() if name[1] <= 4}
        for _ in range(20):
            bucket.write(0, 0)
        bucket.flush(0)

    bucket.before_next_lease = fail_over
    with pytest.raises(PipelineError, match="there was a failover"):
        planned(options, bucket, 1)
    assert ranges_of(planned(options, bucket, 1)) == [(0, 4, 24)]


def test_an_action_that_meets_a_restart_leaves_the_lease_of_those_before() -> None:
    bucket, options = timed_bucket(), options_of(startingTimestamp=NOW.isoformat())
    ranges = [(0, 6, 10)]
    assert ranges_of(planned(options, bucket, 1)) == ranges
    bucket.write(0, 0)
    bucket.before_next_lease = lambda: bucket.fail_over(0, 11)
    with pytest.raises(PipelineError, match="there was a failover"):
        planned(options, bucket, 1)
    assert ranges_of(planned(options, bucket, 1)) == ranges


@pytest.mark.parametrize("to", [4, 10])
def test_a_failover_between_the_ends_that_nothing_pins_and_their_logs_is_noticed(to: int) -> None:
    """A task would wait until the new history has as many numbers."""

    class FailingBucket(ModelDriverClient):
        def partition_infos(self, *, refresh: bool = False) -> Mapping[PartitionId, PartitionInfo]:
            self.fail_over(0, to)
            return super().partition_infos(refresh=refresh)

    bucket = FailingBucket(1)
    for _ in range(10):
        bucket.write(0, 0)
    if to == 10:
        assert ranges_of(planned(options_of(stability="any"), bucket, 1)) == [(0, 0, 10)]
        return
    with pytest.raises(PipelineError, match="there was a failover") as failed:
        planned(options_of(stability="any"), bucket, 1)
    assert failed.value.code == "UPR_ROLLBACK"


@pytest.mark.parametrize("moved_partition", [0, 1])
def test_an_action_after_a_takeover_lacks_no_rows_and_has_none_twice(
    monkeypatch: pytest.MonkeyPatch, moved_partition: int
) -> None:
    """A lease belongs to its node. If another node was active for a partition when a DataFrame was
    read first, the next action on it must not put together what the nodes hold now."""
    with trio_thread() as thread:
        nodes = thread.call(lambda: ThreadedCluster(thread, "ab", 2))
        thread.call(lambda: put_keys(nodes.cluster.any, 20))
        nodes.move({1: Assignment(active="a" if moved_partition == 0 else "b")})
        monkeypatch.setattr(
            driver_connection, "BlockingClient", partial(BlockingClient, dial=nodes.dial)
        )
        driver = BucketDriverClient(options_of())
        highs = [partition.high for partition in nodes.cluster.any.partitions]
        ranges = [(partition, 0, high) for partition, high in enumerate(highs)]
        for _ in range(2):
            assert ranges_of(planned(options_of(), driver, 7)) == ranges
        nodes.move({moved_partition: Assignment(active="b" if moved_partition == 0 else "a")})
        with pytest.raises(ServerError) as refused:
            planned(options_of(), driver, 7)
        assert refused.value.status is Status.RANGE_GONE
        assert ranges_of(planned(options_of(), driver, 8)) == ranges
        driver.close()


class RefusingBucket(ModelDriverClient):
    """A bucket that refuses leases, and what was asked for of others before."""

    def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
        raise ServerError(Status.LIMIT_REACHED)


def reader_of(buckets: Mapping[str, ModelDriverClient]) -> BatchReader:
    options = ReadOptions.parse({"url": "upr://host:12000", "buckets": ",".join(buckets)})
    return BatchReader(
        options, default_schema(options), 7, driver_of=lambda o: buckets[o.address.bucket]
    )


def test_a_read_that_one_bucket_refuses_leaves_no_lease_in_the_others() -> None:
    buckets = {"a": ModelDriverClient(2), "b": ModelDriverClient(2), "c": RefusingBucket(2)}
    for bucket in buckets.values():
        bucket.write(0, 0)
    reader = reader_of(buckets)
    with pytest.raises(PipelineError, match="limit reached"):
        reader.partitions()
    assert not any(bucket.leases for bucket in buckets.values())


def test_a_later_action_that_one_bucket_refuses_leaves_the_leases_of_those_before() -> None:
    buckets = {"a": ModelDriverClient(2), "b": ModelDriverClient(2)}
    for bucket in buckets.values():
        bucket.write(0, 0)
    reader = reader_of(buckets)
    assert reader.partitions()
    buckets["b"] = RefusingBucket(2)
    with pytest.raises(PipelineError, match="limit reached"):
        reader.partitions()
    assert list(buckets["a"].leases) == [7]


def test_an_action_whose_lease_is_broken_fails_each_time() -> None:
    """It failed once, and released the lease: the next action had other rows than the first."""
    buckets = {"a": ModelDriverClient(1), "b": ModelDriverClient(1)}
    for bucket in buckets.values():
        bucket.write(0, 0)
        bucket.write(0, 0)
    reader = reader_of(buckets)
    assert reader.partitions()
    buckets["b"].let_leases_lapse()
    buckets["b"].compact(0)
    for _ in range(2):
        with pytest.raises(PipelineError) as failed:
            reader.partitions()
        assert failed.value.code == "UPR_RANGE_GONE"
    assert [list(bucket.leases) for bucket in buckets.values()] == [[7], [7]]
