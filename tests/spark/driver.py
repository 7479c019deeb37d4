"""A Spark driver in a process of its own, which may be killed, or kill its executors.

The command line is a job, as JSON; see `Job`. Whoever starts it has to give it a session of its
own: the group is what is killed. It has to import `main` from here: what stands in a main module
Spark would send around by value.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from tests.spark.conftest import SPARK_OPTIONS
from upr_protocol.spark import UprDataSource
from upr_protocol.spark.batch_reader import BatchReader
from upr_protocol.spark.micro_batch_reader import MicroBatchReader
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import ReadTask
from upr_protocol.spark.recipes import LatestState

COLUMNS = ("partition", "history_id", "seq", "key", "value", "deleted")


class Job(msgspec.Struct):
    """What the driver does.

    Attributes:
        work: `stream`: from `url` into files under `folder`. `copy`: from `url` to `target`.
            `chain`: a stream from `url` to `target`, with a counter of the rows beside them; and
            the latest state of `of_table` in a Delta table under `folder`.
        url: The bucket to read.
        folder: Where its checkpoint, its results and its signs of life are.
        target: The bucket to write.
        master: Spark's master.
        options: Options of the read.
        once: Whether the query ends with what there is when it begins.
        dies: `planned`: when it has planned a batch, before it is read. `written`: when the sink
            has written a batch, before Spark knows. `reading`: not the driver, but workers of a
            stream, each when it has read something. Empty for never.
        in_batch: In which batch that is.
        raises: Whether only the query ends then, with an error of the sink.
        of_table: The bucket whose latest state the table holds.
    """

    work: str
    url: str
    folder: str
    target: str = ""
    master: str = "local[2]"
    options: dict[str, str] = {}
    once: bool = True
    dies: str = ""
    in_batch: int = 0
    raises: bool = False
    of_table: str = ""


class SinkError(Exception):
    """What a query does not survive."""


JOB = "UPR_TEST_JOB"
GROUP = "UPR_TEST_GROUP"


def job() -> Job:
    """The job, in whichever process of the driver."""
    return msgspec.json.decode(os.environ[JOB], type=Job)


def die() -> None:
    """The driver is gone: Python, JVM and all; or the query alone."""
    if job().raises:
        raise SinkError
    os.killpg(int(os.environ[GROUP]), signal.SIGKILL)
    signal.pause()


class DyingStreamReader(MicroBatchReader):
    """A stream that tells where it begins, and has the driver die when it has planned a batch."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        offset = super().initialOffset()
        Path(job().folder, "began").touch()
        return offset

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        tasks = super().partitions(start, end)
        batches = Path(job().folder, "checkpoint", "offsets").glob("[0-9]*")
        if (
            job().dies == "planned"
            and max(int(folder.name) for folder in batches) == job().in_batch
        ):
            die()
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batches = super().read(partition)
        if job().dies == "reading" and is_to_die(partition):
            yield next(batches)
            Path(job().folder, "a worker died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from batches


def is_to_die(partition: InputPartition) -> bool:
    """Whether the worker of a task dies: at the beginning of a bucket and sometimes later, and not
    when the task runs again."""
    assert isinstance(partition, ReadTask)
    context = TaskContext.get()
    assert context is not None
    return not context.attemptNumber() and sum(range_.start for range_ in partition.ranges) % 3 == 0


class DyingBatchReader(BatchReader):
    """A read whose executor dies when it has read something."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in super().read(partition):
            yield batch.slice(0, 100)
            kill_executor_once("read")
            yield batch.slice(100)


class DyingSource(UprDataSource):
    """The data source, with readers that die."""

    def streamReader(self, schema: StructType) -> MicroBatchReader:  # noqa: N802  Spark's name
        return DyingStreamReader(ReadOptions.parse(self.options, streaming=True), schema)

    def reader(self, schema: StructType) -> BatchReader:
        return DyingBatchReader(ReadOptions.parse(self.options), schema, self._lease_id)


def kill_executor_once(when: str) -> None:
    """Ends the JVM that this Python worker works for, if that was not done yet."""
    try:
        Path(job().folder, f"killed while it {when}s").touch(exist_ok=False)
    except FileExistsError:
        return
    # Above the worker there is the daemon that made it, and above that the executor.
    parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(parent), signal.SIGKILL)
    signal.pause()


def sink(frame: DataFrame, batch: int) -> None:
    """Writes a batch to a file of its own, also when it is done again."""
    if job().raises and job().dies == "planned" and batch == job().in_batch:
        die()
    rows = [
        [row.partition, row.history_id, row.seq, row.key.hex(), row.value.hex(), row.deleted]
        for row in frame.select(*COLUMNS).collect()
    ]
    folder = Path(job().folder, "batches", str(batch))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / uuid.uuid4().hex).write_bytes(msgspec.json.encode(sorted(rows)))
    if job().dies == "written" and batch == job().in_batch:
        die()


def some_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows; the executor dies when some have been written."""
    for index, batch in enumerate(batches):
        if index == 3:
            kill_executor_once("write")
        yield batch


def stream(spark: SparkSession) -> None:
    """Streams a bucket into files."""
    reader = spark.readStream.format("upr").option("url", job().url).options(**job().options)
    start(reader.load().writeStream.foreachBatch(sink), "checkpoint").awaitTermination()


def copy(spark: SparkSession) -> None:
    """Copies one bucket to another."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    changes = spark.read.format("upr").option("url", job().url).options(**job().options).load()
    rows = changes.select("key", "value").mapInArrow(some_rows, "key binary, value binary")
    writer = rows.write.format("upr").mode("append").option("url", job().target)
    writer.option("batchBytes", str(64 * 1024)).save()
    assert TaskContext.get() is None, "this is the driver"


def chain(spark: SparkSession) -> None:
    """Runs both streams of a chain."""
    queries = [start_counting(spark), start_table(spark)]
    if not job().once:
        spark.streams.awaitAnyTermination()
    for query in queries:
        query.awaitTermination()


def start(writer: DataStreamWriter, checkpoint: str) -> StreamingQuery:
    """Starts a query; the job says when it ends."""
    writer = writer.option("checkpointLocation", str(Path(job().folder, checkpoint)))
    return (writer.trigger(availableNow=True) if job().once else writer).start()


def start_counting(spark: SparkSession) -> StreamingQuery:
    """Streams a bucket to another, each row once: set as it is, and counted in its counter."""
    reader = spark.readStream.format("upr").option("url", job().url).options(**job().options)
    rows = reader.schema("key STRING, value STRING").load()
    mutations = rows.selectExpr(
        "inline(array("
        "named_struct('op', 'set', 'key', key, 'value', value),"
        "named_struct('op', 'increment', 'key', concat('rows-', value), 'value', '1')))"
    )
    writer = mutations.writeStream.format("upr").option("url", job().target)
    return start(writer.option("operation", "apply"), "checkpoint")


def start_table(spark: SparkSession) -> StreamingQuery:
    """Keeps the latest state of a bucket in a table, as the recipe does."""
    reader = spark.readStream.format("upr").option("url", job().of_table).options(**job().options)
    sink = LatestState(str(Path(job().folder, "table")))
    changes = reader.option("onRollback", "rewind").load()
    return start(changes.writeStream.foreachBatch(sink), "table-checkpoint")


def main() -> None:
    """Does the job that the command line names."""
    os.environ[JOB] = sys.argv[1]
    os.environ[GROUP] = str(os.getpgid(0))
    builder = SparkSession.builder.master(job().master).appName("tests")
    for name, value in SPARK_OPTIONS.items():
        builder = builder.config(name, value)
    for name in (JOB, GROUP):
        builder = builder.config(f"spark.executorEnv.{name}", os.environ[name])
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(DyingSource)
    {"stream": stream, "copy": copy, "chain": chain}[job().work](spark)
    spark.stop()
