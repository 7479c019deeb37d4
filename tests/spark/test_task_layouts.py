"""A batch of a stream that runs again in other tasks: other cores, another `maxPartitionBytes`,
adaptive execution."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.kit.process import ROOT, environment
from tests.spark.bucket_values import contents
from tests.spark.increments import ONE_TASK, TWO_TASKS, Failing, count, put_increments
from upr_protocol.client import BlockingClient

NewBucket = Callable[..., str]


def run_and_die(url: str, folder: Path) -> None:
    """Has a driver of its own write the batch in two tasks, and die."""
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.spark.increments import main; main()",
            url,
            str(folder),
        ],
        cwd=ROOT,
        env=environment(PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=200,
        start_new_session=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stdout[-4000:]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["killed while a task hangs", "failed after the commit"])
def test_a_batch_that_runs_again_in_one_task_counts_once(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path, how: str
) -> None:
    url = new_bucket()
    for name in ("first", "second"):
        put_increments(tmp_path, name, [f"counter-{index % 10}" for index in range(5000)])
    if how == "killed while a task hangs":
        run_and_die(url, tmp_path)
    else:
        spark.dataSource.register(Failing)
        with pytest.raises(PySparkException, match="the driver fails after the commit"):
            count(spark, url, tmp_path, Failing.name(), TWO_TASKS)
        assert contents(url) == {b"counter-%d" % index: b"1000" for index in range(10)}
    count(spark, url, tmp_path, "upr", ONE_TASK)
    assert contents(url) == {b"counter-%d" % index: b"1000" for index in range(10)}
    put_increments(tmp_path, "third", ["counter-0"])
    count(spark, url, tmp_path, "upr", TWO_TASKS)
    with BlockingClient(url) as client:
        item = client.get("counter-0")
        assert item is not None
        assert item.value == b"1001"


def write_increments_in(
    spark: SparkSession, url: str, tasks: int, write_id: str, count: int = 5000
) -> None:
    """Increments ten counters, as a write inside `foreachBatch` does."""
    rows = spark.range(0, count, 1, tasks).selectExpr(
        "'increment' AS op", "concat('counter-', id % 10) AS key", "'1' AS value"
    )
    writer = rows.write.format("upr").mode("append").option("url", url)
    writer.option("operation", "apply").option("writeId", write_id).save()


def counters(count: int) -> dict[bytes, bytes]:
    return {b"counter-%d" % index: b"%d" % count for index in range(10)}


def test_a_write_with_an_id_counts_once_in_whatever_tasks(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket()
    for tasks in (2, 1, 3):
        write_increments_in(spark, url, tasks, "query/7")
        assert contents(url) == counters(500)
    write_increments_in(spark, url, 2, "query/8")
    assert contents(url) == counters(1000)
    with pytest.raises(PySparkException, match="UPR_REPLAY_DIFFERS"):
        write_increments_in(spark, url, 1, "query/8", count=5010)
    assert contents(url) == counters(1000)


def test_a_batch_that_foreach_batch_writes_again_counts_once(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    put_increments(tmp_path, "first", [f"counter-{index % 10}" for index in range(100)])
    attempts: list[int] = []

    def write_and_fail_once(batch: DataFrame, batch_id: int) -> None:
        attempts.append(batch_id)
        writer = batch.repartition(len(attempts)).write.format("upr").mode("append")
        writer = writer.option("url", url).option("operation", "apply")
        writer.option("writeId", f"the query/{batch_id}").save()
        if len(attempts) == 1:
            raise RuntimeError("the driver fails after the write")

    files = spark.readStream.schema("op string, key string, value string")
    stream = files.parquet(str(tmp_path / "source")).writeStream.foreachBatch(write_and_fail_once)
    stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(PySparkException, match="the driver fails after the write"):
        stream.trigger(availableNow=True).start().awaitTermination()
    assert contents(url) == counters(10)
    stream.trigger(availableNow=True).start().awaitTermination()
    assert attempts == [0, 0]
    assert contents(url) == counters(10)


def test_a_stream_refuses_an_id_for_its_writes(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    put_increments(tmp_path, "first", ["counter-0"])
    files = spark.readStream.schema("op string, key string, value string")
    writer = files.parquet(str(tmp_path / "source")).writeStream.format("upr")
    writer = writer.option("url", new_bucket()).option("writeId", "mine")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(PySparkException, match=r"UPR_OPTION.*writeId.*foreachBatch"):
        writer.trigger(availableNow=True).start().awaitTermination()
