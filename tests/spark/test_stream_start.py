"""Where a stream starts: at a time, and after it was away while deletions were forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tests.spark.model_driver_client import ModelDriverClient
from tests.spark.stream_reader import PARTITIONS, ranges_of, reader_of, write_rows, written
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.read_tasks import ReadTask


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
