"""A driver that streams files of increments into a bucket, and may die in a batch.

`main` takes URL and FOLDER: the task of the first file hangs until that of the second has done its
work, then the whole driver is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from tests.spark.conftest import SPARK_OPTIONS
from upr_protocol.spark import UprDataSource
from upr_protocol.spark.prepared_rows import PreparedRows
from upr_protocol.spark.publication import WriteCounts
from upr_protocol.spark.write_options import WriteOptions
from upr_protocol.spark.writer import StreamWriter

FOLDER = "UPR_TEST_FOLDER"
GROUP = "UPR_TEST_GROUP"

FILES = "spark.sql.files."
TWO_TASKS = {f"{FILES}openCostInBytes": "4194304", f"{FILES}minPartitionNum": "2"}
"""A file is as large for Spark as a task may read."""
ONE_TASK = {f"{FILES}openCostInBytes": "0", f"{FILES}minPartitionNum": "1"}


def put_increments(folder: Path, name: str, keys: Sequence[str]) -> None:
    """A file of increments by 1."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    columns = {"op": ["increment"] * len(keys), "key": keys, "value": ["1"] * len(keys)}
    parquet.write_table(pa.table(columns), source / f"{name}.parquet")


def count(spark: SparkSession, url: str, folder: Path, source: str, tasks: dict[str, str]) -> None:
    """Streams all files there are, in one batch."""
    for name, value in tasks.items():
        spark.conf.set(name, value)
    files = spark.readStream.schema("op string, key string, value string")
    writer = files.parquet(str(folder / "source")).writeStream.format(source)
    writer = writer.option("url", url).option("operation", "apply")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
        for name in tasks:
            spark.conf.unset(name)


def die() -> None:
    """The driver is gone: Python, JVM and all."""
    os.killpg(int(os.environ[GROUP]), signal.SIGKILL)
    signal.pause()


class DyingStreamWriter(StreamWriter):
    """Has the driver die."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts | PreparedRows:
        context = TaskContext.get()
        assert context is not None
        done_path = Path(os.environ[FOLDER], "done")
        if context.partitionId() == 0:
            while not done_path.exists():
                pass
            die()
        message = super().write(iterator)
        done_path.touch()
        return message


class Dying(UprDataSource):
    """See `DyingStreamWriter`."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        return DyingStreamWriter(WriteOptions.parse(self.options, schema, overwrite=overwrite))


class FailingStreamWriter(StreamWriter):
    """Fails when the batch is committed at the server, and Spark does not know it."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        super().commit(messages, batchId)
        raise RuntimeError("the driver fails after the commit")


class Failing(UprDataSource):
    """See `FailingStreamWriter`."""

    @classmethod
    def name(cls) -> str:
        return "failing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        return FailingStreamWriter(WriteOptions.parse(self.options, schema, overwrite=overwrite))


def main() -> None:
    url, folder = sys.argv[1:]
    os.environ.update({FOLDER: folder, GROUP: str(os.getpgid(0))})
    builder = SparkSession.builder.master("local[2]")
    for name, value in SPARK_OPTIONS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(Dying)
    count(spark, url, Path(folder), "dying", TWO_TASKS)
