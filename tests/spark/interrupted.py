"""Writers whose tasks are interrupted in the middle."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from upr_protocol.client import BlockingClient
from upr_protocol.spark import UprDataSource
from upr_protocol.spark.prepared_rows import PreparedRows
from upr_protocol.spark.publication import WriteCounts
from upr_protocol.spark.write_options import BATCH_BYTES_MIN, WriteOptions
from upr_protocol.spark.writer import BatchWriter

ROWS = 20_000
GO_PORT = "upr.test.port"
"""The local property that says who says go."""


def mutations(url: str) -> int:
    """How many mutations were ever made in a bucket."""
    with BlockingClient(url) as client:
        return sum(numbers.high_seq for numbers in client.seqnos())


def until_some_are_done(url: str) -> None:
    while not mutations(url):
        pass


class InterruptedWriter(BatchWriter):
    """Does something in the middle of its first attempts."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts | PreparedRows:
        return super().write(self.rows(iterator))

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for index, batch in enumerate(batches):
            if index == 10 and not context.attemptNumber():
                until_some_are_done(str(self._options.address))
                self.interrupt()
            yield self.changed(batch) if context.attemptNumber() else batch

    def interrupt(self) -> None:
        raise RuntimeError("interrupted")

    def changed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


class KilledWriter(InterruptedWriter):
    """Its process is killed."""

    def interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class ChangingWriter(InterruptedWriter):
    """Its rows are others when it is run again."""

    def changed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values = pc.binary_join_element_wise(batch.column("value"), "0", "")
        return batch.set_column(batch.schema.get_field_index("value"), "value", values)


class WaitingWriter(InterruptedWriter):
    """Waits until somebody says go."""

    def interrupt(self) -> None:
        context = TaskContext.get()
        assert context is not None
        port = context.getLocalProperty(GO_PORT)
        assert port is not None
        with socket.create_connection(("127.0.0.1", int(port))) as line:
            assert line.recv(2) == b"go"


class Interrupted(UprDataSource):
    """See `InterruptedWriter`."""

    writer_class = InterruptedWriter

    @classmethod
    def name(cls) -> str:
        return "interrupted"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return self.writer_class(WriteOptions.parse(self.options, schema, overwrite=overwrite))


class Killed(Interrupted):
    """See `KilledWriter`."""

    writer_class = KilledWriter


class Changing(Interrupted):
    """See `ChangingWriter`."""

    writer_class = ChangingWriter


def write_increments(
    spark: SparkSession, url: str, source: type[Interrupted], tasks: int, go_port: int = 0
) -> None:
    """Writes them, in pieces small enough to be interrupted between."""
    spark.dataSource.register(source)
    rows = spark.range(0, ROWS, 1, tasks).selectExpr(
        "'increment' AS op", "concat('key-', id) AS key", "'1' AS value"
    )
    writer = rows.write.format(source.name()).mode("append").option("url", url)
    writer = writer.option("operation", "apply").option("batchBytes", str(BATCH_BYTES_MIN))
    spark.sparkContext.setLocalProperty(GO_PORT, str(go_port))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    try:
        writer.save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


class Waiting(Interrupted):
    """See `WaitingWriter`."""

    writer_class = WaitingWriter
