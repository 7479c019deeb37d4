"""What a query's progress and the server say of how far a stream is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests.spark.bucket import change, put
from upr_protocol.client import BlockingClient


def test_progress_and_server_say_how_far_a_stream_is(
    spark: SparkSession, new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    url = new_bucket(2)
    change(url, put(range(100)))
    distances: list[int] = []

    def look(batch: DataFrame, _batch_id: int) -> None:
        batch.collect()
        with BlockingClient(url) as client:
            (consumer,) = client.stats(client.address.bucket)["leases"]["consumers"]
        assert consumer["name"] == "orders"
        distances.append(consumer["numbers_behind"])

    reader = spark.readStream.format("upr").option("url", url).option("consumerName", "orders")
    writer = reader.option("maxOffsetsPerTrigger", "60").load().writeStream.foreachBatch(look)
    writer = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    query = writer.start()
    assert query.awaitTermination(60)
    metrics = [
        json.loads(source["latestOffset"])["metrics"]
        for progress in query.recentProgress
        for source in progress["sources"]
    ]
    assert [line["totalOffsetsBehindLatest"] for line in metrics][:2] == [40, 0]
    assert metrics[0]["estimatedTotalBytesBehindLatest"] > 40
    assert distances == [100, 40], "of what is done, not of what is planned"
    change(url, put(range(5)))
    with BlockingClient(url) as client:
        (consumer,) = client.stats(client.address.bucket)["leases"]["consumers"]
    assert consumer["numbers_behind"] == 5, "though no query runs"
    with pytest.raises(PySparkException, match=r"UPR_OPTION.*consumerName.*printable"):
        spark.readStream.format("upr").option("url", url).option("consumerName", "\n").load()


def test_a_stream_that_cannot_begin_says_why(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's process for streams shows an error of its own if there is no reader."""
    reader = spark.readStream.format("upr").option("url", "upr://127.0.0.1:1/b")
    writer = reader.option("endingOffsets", "latest").load().writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    sentence = r"\[UPR_OPTION\] the option endingOffsets is for a read, and this is a stream"
    with pytest.raises(StreamingQueryException, match=sentence):
        query.awaitTermination(60)
