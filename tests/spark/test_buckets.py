"""Several buckets in one read or stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from tests.spark.bucket import change, put
from tests.spark.model_buckets import Buckets, ranges_of
from tests.spark.reads import load
from tests.spark.server import BlockingServer
from tests.spark.stream_reader import options_of, write_rows
from upr_protocol.errors import ServerError, Status
from upr_protocol.spark.batch_reader import options_of_buckets
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import ReadTask
from upr_protocol.spark.recipes import latest


def test_a_stream_reads_all_buckets_that_match_and_those_that_come_later() -> None:
    buckets = Buckets(a1=10, a2=20, b=5)
    reader = buckets.reader(bucketPattern="a.")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(reader, start, end) == [("a1", 0, 0, 10), ("a2", 0, 0, 20)]
    # A restart reads the same again, in another process.
    assert len(ranges_of(buckets.reader(bucketPattern="a."), start, end)) == 2
    reader.commit(end)
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    buckets.create("a3", 0)
    assert reader.latestOffset(end, ReadAllAvailable()) is end, "it has nothing"
    write_rows(buckets.drivers["a3"], 0, 3)
    write_rows(buckets.drivers["a1"], 0, 1)
    start, end = end, reader.latestOffset(end, ReadAllAvailable())
    assert ranges_of(reader, start, end) == [("a1", 0, 10, 11), ("a3", 0, 0, 3)]
    reader.commit(end)
    assert not any(driver.leases for driver in buckets.drivers.values())


@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(9)])
def test_a_batch_that_one_bucket_refuses_leaves_no_lease_in_the_others(limit: ReadLimit) -> None:
    buckets = Buckets(a=10, b=10)
    reader = buckets.reader(buckets="a,b", maxOffsetsPerTrigger="9")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    leases = [list(buckets.drivers[name].leases) for name in "ab"]
    for name in "ab":
        write_rows(buckets.drivers[name], 0, 10)

    def refuse() -> None:
        raise ServerError(Status.LIMIT_REACHED)

    buckets.drivers["b"].before_next_lease = refuse
    with pytest.raises(PipelineError, match="limit reached"):
        reader.latestOffset(start, limit)
    # The batch that was planned before may be read again.
    assert [list(buckets.drivers[name].leases) for name in "ab"] == leases
    assert ranges_of(reader, reader.initialOffset(), start)


def test_a_limit_holds_for_all_buckets_together() -> None:
    buckets = Buckets(a=30, b=60, c=0)
    reader = buckets.reader(buckets="a,b,c", maxOffsetsPerTrigger="9")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    # What comes later is not for this query, and takes no share from what is.
    write_rows(buckets.drivers["c"], 0, 1000)
    write_rows(buckets.drivers["b"], 0, 1000)
    end = reader.latestOffset(start, ReadMaxRows(9))
    assert ranges_of(reader, start, end) == [("a", 0, 0, 3), ("b", 0, 0, 6)]
    numbers = 9
    while (later := reader.latestOffset(end, ReadMaxRows(9))) is not end:
        size = sum(to - since for _, _, since, to in ranges_of(reader, end, later))
        assert 0 < size <= 9
        numbers += size
        reader.commit(end)
        end = later
    assert numbers == 90


def test_buckets_that_went_back_do_not_have_the_limit_each() -> None:
    buckets = Buckets(a=30, b=30, c=30)
    reader = buckets.reader(buckets="a,b,c", onRollback="marker", maxOffsetsPerTrigger="9")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    for name in ("a", "b"):
        buckets.drivers[name].fail_over(0, 20)
    write_rows(buckets.drivers["c"], 0, 5)
    sizes = []
    rows: dict[str, set[int]] = {"a": set(), "b": set(), "c": set()}
    while (later := reader.latestOffset(end, ReadMaxRows(9))) is not end:
        ranges = ranges_of(reader, end, later)
        sizes.append(sum(to - since for _, _, since, to in ranges))
        for name, _, since, to in ranges:
            rows[name].update(range(since, to))
        reader.commit(later)
        end = later
    assert sizes == [9, 9, 9, 9, 9]
    assert rows == {"a": set(range(20)), "b": set(range(20)), "c": set(range(30, 35))}


def test_a_bucket_without_a_share_has_no_backlog_that_was_read_before() -> None:
    buckets = Buckets(a=1000, b=1000)
    start = buckets.reader(buckets="a,b").initialOffset()
    start = buckets.reader(buckets="a,b").latestOffset(start, ReadAllAvailable())
    write_rows(buckets.drivers["a"], 0, 1)
    write_rows(buckets.drivers["b"], 0, 100)
    # Another process goes on there, and has a share for the longer backlog alone.
    reader = buckets.reader(buckets="a,b", maxOffsetsPerTrigger="1", consumerName="orders")
    end = reader.latestOffset(start, ReadMaxRows(1))
    assert ranges_of(reader, start, end) == [("b", 0, 1000, 1001)]
    document = reader.reportLatestOffset()
    assert document is not None
    assert document["metrics"]["totalOffsetsBehindLatest"] == 1 + 99
    assert list(buckets.drivers["a"].positions.values()) == [("orders", {0: 1000})]


def test_a_marker_of_one_bucket_comes_once() -> None:
    buckets = Buckets(a=10, b=10)
    reader = buckets.reader(buckets="a,b", onRollback="marker")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    buckets.drivers["a"].fail_over(0, 4)
    end = reader.latestOffset(start, ReadAllAvailable())
    (task,) = reader.partitions(start, end)
    assert isinstance(task, ReadTask)
    assert task.bucket == "a"
    assert task.ranges[0].marker is not None
    write_rows(buckets.drivers["b"], 0, 1)
    later = reader.latestOffset(end, ReadAllAvailable())
    assert ranges_of(reader, end, later) == [("b", 0, 10, 11)]


def test_a_bucket_that_is_deleted_ends_the_stream_or_is_left_out() -> None:
    buckets = Buckets(a=10, b=10)
    reader = buckets.reader(bucketPattern=".*")
    initial = reader.initialOffset()
    start = reader.latestOffset(initial, ReadAllAvailable())
    buckets.delete("a")
    with pytest.raises(PipelineError, match="has read a, which does not exist") as failed:
        reader.latestOffset(start, ReadAllAvailable())
    assert failed.value.code == "UPR_NO_BUCKET"
    reader = buckets.reader(bucketPattern=".*", failOnDataLoss="false")
    assert ranges_of(reader, initial, start) == [("b", 0, 0, 10)]
    end = reader.latestOffset(start, ReadAllAvailable())
    assert set(end["buckets"]) == {"b"}
    assert ranges_of(reader, start, end) == []


@pytest.mark.parametrize("ends_at_what_there_was", [False, True])
def test_a_stream_goes_on_after_a_bucket_was_deleted(ends_at_what_there_was: bool) -> None:
    buckets = Buckets(a=10, b=10, empty=0)
    reader = buckets.reader(bucketPattern=".*", failOnDataLoss="false", maxOffsetsPerTrigger="8")
    start = reader.initialOffset()
    if ends_at_what_there_was:
        reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(start, ReadMaxRows(8))
    for name in ("a", "empty"):
        buckets.delete(name)
    later = reader.latestOffset(end, ReadMaxRows(8))
    # The batch before is committed when the next one is planned.
    reader.commit(end)
    assert ranges_of(reader, end, later) == [("b", 0, 4, 10)]
    document = reader.reportLatestOffset()
    assert document is not None
    assert set(document["buckets"]) == {"b"}
    reader.commit(later)
    assert reader.latestOffset(later, ReadMaxRows(8)) is later
    reader.stop()


def test_a_bucket_that_is_not_named_any_more_is_asked_nothing() -> None:
    buckets = Buckets(a=10, b=10)
    reader = buckets.reader(buckets="a,b")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    buckets.delete("a")
    reader = buckets.reader(buckets="b")
    write_rows(buckets.drivers["b"], 0, 1)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert set(end["buckets"]) == {"b"}
    assert ranges_of(reader, start, end) == [("b", 0, 10, 11)]
    reader.commit(start)
    document = reader.reportLatestOffset()
    assert document is not None
    assert set(document["buckets"]) == {"b"}


def test_the_progress_counts_all_buckets() -> None:
    reader = Buckets(a=10, b=30).reader(buckets="a,b")
    reader.initialOffset()
    document = reader.reportLatestOffset()
    assert document is not None
    assert document["metrics"]["totalOffsetsBehindLatest"] == 40
    assert document["metrics"]["avgOffsetsBehindLatest"] == 20


def test_a_checkpoint_of_one_bucket_is_refused() -> None:
    reader = Buckets(a=1).reader(buckets="a")
    with pytest.raises(PipelineError, match=r"UPR_OFFSET.*of one bucket"):
        reader.latestOffset({"version": 2, "bucket": "a", "partitions": {}}, ReadAllAvailable())


def test_a_checkpoint_of_another_data_source_is_refused() -> None:
    reader = Buckets(a=1).reader(buckets="a")
    foreign: list[Any] = [5, {"logOffset": 0}, {"topic": {"0": 1}}, {"buckets": {"a": 5}}]
    for offset in foreign:
        with pytest.raises(PipelineError, match=r"UPR_OFFSET.*another data source"):
            reader.latestOffset(offset, ReadAllAvailable())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"buckets": "a", "bucketPattern": "a"}, "exclude each other"),
        ({"buckets": " , "}, "names no bucket"),
        ({"bucketPattern": "("}, "no regular expression"),
        ({"bucketPattern": "a{99999999999}"}, "no regular expression"),
        ({"buckets": "a", "url": "upr://h/b"}, "it names no bucket"),
        ({"buckets": "a", "startingOffsets": '{"0": 1}'}, 'like {"planes": {"0": 17'),
        ({"buckets": "a", "startingOffsets": '{"b": {"0": 1}}'}, "names the bucket b"),
    ],
)
def test_options_of_several_buckets_that_are_wrong(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError) as refusal:
        options_of(**{"url": "upr://h", **options})
    assert sentence in str(refusal.value)


def test_a_start_in_a_bucket_that_no_pattern_matches_is_refused(
    new_bucket: Callable[..., str],
) -> None:
    starts = '{"plans": {"0": 4}}'
    sentence = "names the bucket plans; the buckets read are planes"
    reader = Buckets(planes=10).reader(bucketPattern="pla.*", startingOffsets=starts)
    with pytest.raises(OptionError, match=sentence):
        reader.initialOffset()
    server, _, name = new_bucket(1).rpartition("/")
    for option in ("startingOffsets", "endingOffsets"):
        options = ReadOptions.parse({"url": server, "bucketPattern": name, option: starts})
        with pytest.raises(OptionError, match=f"names the bucket plans; .* are {name}"):
            options_of_buckets(options)


def test_spark_reads_and_streams_several_buckets(
    spark: SparkSession, server: BlockingServer, new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    urls = [new_bucket(partitions) for partitions in (1, 2, 1)]
    names = [url.rpartition("/")[2] for url in urls]
    for number, url in enumerate(urls):
        change(url, put(range(10 * (number + 1))))
    offsets = f'{{"{names[0]}": {{"0": 4}}}}'
    frame = load(
        spark, server.url(), buckets=",".join(names[:2]), startingOffsets=offsets, metadata="false"
    )
    assert frame.columns == ["bucket", "seq", "key", "value", "deleted"]
    counts = {row.bucket: row["count"] for row in frame.groupBy("bucket").count().collect()}
    assert counts == {names[0]: 6, names[1]: 20}
    assert latest(load(spark, server.url(), buckets=",".join(names))).count() == 60
    empty_frame = load(spark, server.url(), "key BINARY", bucketPattern="none-of-these")
    with pytest.raises(PySparkException, match=r"\[UPR_NO_BUCKET\].*bucketPattern"):
        empty_frame.collect()

    streamed: list[tuple[str, bytes]] = []

    def sink(batch: DataFrame, _batch_id: int) -> None:
        streamed.extend((row.bucket, bytes(row.key)) for row in batch.collect())

    pattern = "|".join(names[1:])
    reader = spark.readStream.format("upr").option("url", server.url())
    reader = reader.option("bucketPattern", pattern).option("maxOffsetsPerTrigger", 30)
    writer = reader.load().writeStream.foreachBatch(sink)
    writer = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    assert writer.start().awaitTermination(60)
    assert sorted(streamed) == sorted(
        (name, b"key-%d" % key)
        for name, count in zip(names[1:], (20, 30), strict=True)
        for key in range(count)
    )
