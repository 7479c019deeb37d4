"""Batches that wait until there is enough for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
)

from tests.spark.bucket import change, put
from tests.spark.manual_clock import Clock
from tests.spark.model_buckets import Buckets
from tests.spark.model_buckets import ranges_of as ranges_of_buckets
from tests.spark.model_driver_client import ModelDriverClient
from tests.spark.stream_reader import options_of, ranges_of, write_rows
from tests.spark.waiting import until
from upr_protocol.client import PartitionNumbers
from upr_protocol.ids import PartitionId
from upr_protocol.spark.batch_delay import BatchDelay
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.micro_batch_reader import MicroBatchReader
from upr_protocol.spark.read_options import DELAY_S_DEFAULT
from upr_protocol.spark.schema import default_schema

ENOUGH = 10


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), max_size=30))
def test_a_batch_begins_when_there_is_enough_or_a_change_has_waited_long_enough(
    steps: list[tuple[int, int]],
) -> None:
    clock = Clock()
    delay = BatchDelay(ENOUGH, 60.0, clock)
    arrivals_s: list[float] = []
    is_first = True
    for count, wait_s in steps:
        clock.now_s += wait_s
        arrivals_s += [clock.now_s] * count
        is_due = bool(arrivals_s) and (
            is_first or len(arrivals_s) >= ENOUGH or clock.now_s - arrivals_s[0] >= 60
        )
        assert delay.must_wait(len(arrivals_s)) == (not is_due)
        if is_due:
            arrivals_s.clear()
            is_first = False


class Waiting:
    """A stream whose batches wait, of a bucket without a server, at the end of its first batch."""

    def __init__(self, **options_given: str) -> None:
        self.clock = Clock()
        self.driver = ModelDriverClient(2)
        write_rows(self.driver, 0, 5)
        options = options_of(minOffsetsPerTrigger=str(ENOUGH), **options_given)
        delay = BatchDelay(ENOUGH, options.delay_s, self.clock)
        self.reader = MicroBatchReader(options, default_schema(options), self.driver, delay)
        self.limit: ReadLimit = self.reader.getDefaultReadLimit()
        self.end = self.reader.initialOffset()
        self.first = self.batch()

    def batch(self) -> list[tuple[int, int, int, int | None]]:
        """What the next batch reads; nothing while it waits."""
        start, self.end = self.end, self.reader.latestOffset(self.end, self.limit)
        if self.end is start:
            return []
        self.reader.commit(start)
        return ranges_of(list(self.reader.partitions(start, self.end)))  # type: ignore[arg-type]


def test_a_stream_waits_for_enough_changes_of_all_partitions() -> None:
    stream = Waiting()
    assert stream.limit == ReadMinRows(ENOUGH)
    assert stream.first == [(0, 0, 5, None)], "the first batch does not wait"
    write_rows(stream.driver, 0, ENOUGH - 1)
    assert not stream.batch()
    write_rows(stream.driver, 1, 1)
    assert stream.batch() == [(0, 5, 14, None), (1, 0, 1, None)]


def test_changes_that_arrive_behind_the_look_wait_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Waiting()
    numbers = stream.driver.seqnos

    def numbers_before_a_write() -> Mapping[PartitionId, PartitionNumbers]:
        rows = numbers()
        if stream.driver.partitions[0].high == 5:
            write_rows(stream.driver, 0, ENOUGH - 1)
        return rows

    monkeypatch.setattr(stream.driver, "seqnos", numbers_before_a_write)
    assert not stream.batch(), "there was nothing to begin a batch for"
    assert not stream.batch(), "there is not enough"
    write_rows(stream.driver, 0, 1)
    assert stream.batch() == [(0, 5, 15, None)]


def test_no_change_waits_for_longer_than_the_delay() -> None:
    stream = Waiting(maxTriggerDelay="2m")
    write_rows(stream.driver, 0, 1)
    assert not stream.batch()
    stream.clock.now_s += 119
    assert not stream.batch()
    stream.clock.now_s += 1
    assert stream.batch() == [(0, 5, 6, None)]


def test_the_rest_of_a_snapshot_does_not_wait() -> None:
    stream = Waiting(maxOffsetsPerTrigger="20")
    assert stream.limit == ReadMaxRows(20)
    write_rows(stream.driver, 0, 21)
    assert stream.batch() == [(0, 5, 25, None)]
    assert stream.batch() == [(0, 25, 26, None)]


def test_a_rollback_does_not_wait() -> None:
    stream = Waiting(onRollback="marker")
    stream.driver.fail_over(0, 3)
    assert stream.batch() == [(0, 0, 3, 5)]


def test_a_query_that_ends_at_what_there_is_does_not_wait() -> None:
    stream = Waiting()
    write_rows(stream.driver, 0, 1)
    assert not stream.batch()
    stream.reader.prepareForTriggerAvailableNow()
    assert stream.batch() == [(0, 5, 6, None)]
    write_rows(stream.driver, 1, 1)
    assert not stream.batch()
    # As Trigger.Once does.
    stream = Waiting()
    write_rows(stream.driver, 0, 1)
    stream.limit = ReadAllAvailable()
    assert stream.batch() == [(0, 5, 6, None)]


def test_a_stream_of_several_buckets_waits_for_enough_in_all_of_them() -> None:
    buckets = Buckets(a=1, b=0)
    reader = buckets.reader(buckets="a,b", minOffsetsPerTrigger=str(ENOUGH))
    limit = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    end = reader.latestOffset(start, limit)
    assert ranges_of_buckets(reader, start, end) == [("a", 0, 0, 1)]
    write_rows(buckets.drivers["a"], 0, 4)
    write_rows(buckets.drivers["b"], 0, 5)
    assert reader.latestOffset(end, limit) is end
    write_rows(buckets.drivers["b"], 0, 1)
    later = reader.latestOffset(end, limit)
    assert ranges_of_buckets(reader, end, later) == [("a", 0, 1, 5), ("b", 0, 0, 6)]


@pytest.mark.parametrize(
    ("text", "delay_s"), [("500ms", 0.5), ("30s", 30), ("15m", 900), ("2 min", 120), ("1H", 3600)]
)
def test_delays(text: str, delay_s: float) -> None:
    assert options_of(minOffsetsPerTrigger="1", maxTriggerDelay=text).delay_s == delay_s
    assert options_of(minOffsetsPerTrigger="1").delay_s == DELAY_S_DEFAULT


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"maxTriggerDelay": "1m"}, "needs the option minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "1", "maxTriggerDelay": "15"}, "like 15m"),
        ({"minOffsetsPerTrigger": "1", "maxTriggerDelay": "1 week"}, "like 15m"),
        ({"minOffsetsPerTrigger": "0"}, "no whole number from 1"),
        ({"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, "more than maxOffsets"),
    ],
)
def test_delays_that_are_wrong(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        options_of(**options)


def test_spark_waits_for_enough(
    spark: SparkSession, new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    url = new_bucket(2)
    change(url, put(range(5)))
    counts: list[int] = []

    def sink(batch: DataFrame, _batch_id: int) -> None:
        counts.append(batch.count())

    reader = spark.readStream.format("upr").option("url", url).option("minOffsetsPerTrigger", 50)
    writer = reader.load().writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    try:
        until(lambda: counts == [5], "the first batch is done", 60)
        change(url, put(range(100, 110)))
        # Each returns when a trigger has found nothing to do: the first one's may have begun before
        # the change, and the second one's has not.
        query.processAllAvailable()
        query.processAllAvailable()
        assert counts == [5]
        change(url, put(range(200, 245)))
        until(lambda: len(counts) == 2, "there is enough", 60)
        assert counts == [5, 55]
    finally:
        query.stop()
