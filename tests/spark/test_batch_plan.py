"""What a read plans, without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from tests.kit.fake_server import put_keys
from tests.kit.threaded import ThreadedCluster, trio_thread
from tests.spark.model_driver_client import ModelDriverClient
from upr_protocol.client import BlockingClient
from upr_protocol.errors import ServerError, Status
from upr_protocol.partition_map import Assignment
from upr_protocol.spark import driver_connection
from upr_protocol.spark.batch_reader import plan
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import ReadTask

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def options_of(**options: str) -> ReadOptions:
    return ReadOptions.parse({"url": "upr://a,b/b", **options})


def ranges_of(tasks: list[ReadTask]) -> list[tuple[int, int, int]]:
    """Partition, start and end of what is read."""
    return sorted(
        (range_.partition, range_.start, range_.end) for task in tasks for range_ in task.ranges
    )


class BusyBucket(ModelDriverClient):
    """A bucket of one partition to which others write all the time."""

    def write_now(self) -> None:
        self.write(0, 0)
        self.times[0, self.partitions[0].high] = NOW

    def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
        self.write_now()
        return super().seqnos_at_time(time)


@pytest.mark.parametrize("stability", ["durable", "any"])
@pytest.mark.parametrize("bound", ["startingTimestamp", "endingTimestamp"])
def test_a_time_that_has_not_passed_is_a_bound_though_others_write(
    bound: str, stability: str
) -> None:
    bucket = BusyBucket(1)
    for _ in range(3):
        bucket.write_now()
    time = (NOW + timedelta(hours=1)).isoformat()
    tasks = plan(options_of(**{bound: time, "stability": stability}), bucket, 1)
    assert ranges_of(tasks) == ([] if bound == "startingTimestamp" else [(0, 0, 4)])


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
            assert ranges_of(plan(options_of(), driver, 7)) == ranges
        nodes.move({moved_partition: Assignment(active="b" if moved_partition == 0 else "a")})
        with pytest.raises(ServerError) as refused:
            plan(options_of(), driver, 7)
        assert refused.value.status is Status.RANGE_GONE
        assert ranges_of(plan(options_of(), driver, 8)) == ranges
        driver.close()
