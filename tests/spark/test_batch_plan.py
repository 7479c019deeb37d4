"""What a read plans, without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from tests.spark.model_driver_client import ModelDriverClient
from upr_protocol.spark.batch_reader import plan
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.slices import ReadTask

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def options_of(**options: str) -> ReadOptions:
    return ReadOptions.parse({"url": "upr://a,b/b", **options})


def ranges_of(tasks: list[ReadTask]) -> list[tuple[int, int, int]]:
    """Partition, start and end of what is read."""
    return sorted((part.partition, part.start, part.end) for task in tasks for part in task.slices)


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
