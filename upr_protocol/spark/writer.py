"""Writing a DataFrame, or the batches of a stream, to a bucket.

Spark may run a task of a write twice, one run after the other or both at once, and a batch of a
stream again after a restart. So the batches of a task carry tokens that are the same each time, and
the server does each of them once:

- the writer's ID is a hash of the job and of the task's partition. The job of a write is an ID made
  on the driver; that of a batch of a stream is (query ID, batch ID), which a restart has again;
- the attempt rises from one run to the next, by the start of the driver and the task's number: what
  is left of an earlier run is refused as soon as a later one is at work;
- the chain vouches for the contents. When a task is run again with other rows, it is refused,
  instead of having half the effect of each.

The server knows the newest 64 batches of a task in each partition. When a task is further than
that and is run again, the older ones are passed over as done, if they are of a kind that cannot
fail row by row: the chain of the next one that is known vouches for them. And it knows the 1,024
tasks that it heard of last in each partition: what is run again after more of them counts as new.

There is a chain for each of the bucket's partitions: rows that the second run lacks are noticed in
those partitions that it writes to, and in no other.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from upr_protocol.chunk import Chunk
from upr_protocol.client import BlockingClient, WriterIdentity
from upr_protocol.client.core.results import status_of
from upr_protocol.client.core.unanswered_batches import Batch
from upr_protocol.client.core.writer_identity import WRITER_ID_BYTES
from upr_protocol.errors import ADVICE, BrokenError, ServerError, Status
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.spark.batches import Gathering, chunks
from upr_protocol.spark.dead_letter import DeadLetters
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.options import idle_interval_s
from upr_protocol.spark.rows import RejectedRow, encode
from upr_protocol.spark.write_options import WriteOptions

EXAMPLES_MAX: Final = 5
"""Rows that an error names."""

EXAMPLE_BYTES_MAX: Final = 60
"""Of each of them."""

WRITE_BUFFER_BYTES: Final = 16 * 1024 * 1024
"""What a task has on its way."""

_CANNOT_FAIL: Final = bytes((Operation.SET, Operation.DELETE))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriteCounts(WriterCommitMessage):
    """What a task, or all of them, wrote.

    Attributes:
        rows: Rows that were written, or were done already.
        failed: Rows that were refused, and are among the dead letters.
        nbytes: What was sent, without what was sent again.
    """

    rows: int = 0
    failed: int = 0
    nbytes: int = 0

    @classmethod
    def sum(cls, messages: Iterable[WriterCommitMessage | None]) -> WriteCounts:
        """All of them together."""
        counts = [message for message in messages if isinstance(message, WriteCounts)]
        return cls(
            sum(message.rows for message in counts),
            sum(message.failed for message in counts),
            sum(message.nbytes for message in counts),
        )

    def __str__(self) -> str:
        return f"{self.rows} rows written, {self.failed} refused, {self.nbytes} bytes"


class WriteTask:
    """One run of a task.

    Args:
        options: What the write is told.
        writer_id: 16 bytes, the same in each run of the task.
        attempt: Rises from one run to the next.
    """

    def __init__(self, options: WriteOptions, writer_id: bytes, attempt: int) -> None:
        self._options = options
        self._writer = WriterIdentity.of_task(writer_id, attempt)
        self._letters = None
        if options.dead_letter_path is not None:
            self._letters = DeadLetters(options.dead_letter_path, writer_id.hex(), attempt)
        self._rows = self._failed = self._nbytes = 0
        # Partitions whose newest answer is that the batch is too old to tell.
        self._not_vouched: set[PartitionId] = set()

    def write(self, rows: Iterator[pa.RecordBatch]) -> WriteCounts:
        """Writes all rows.

        Raises:
            PipelineError: It cannot go on. What was written stays.
        """
        options = self._options
        client = BlockingClient(
            options.address,
            identity="upr:spark-writer",
            retry_timeout_s=options.timeout_s,
            idle_interval_s=idle_interval_s(options.timeout_s),
            # While the server lives and is only short of memory, it is waited for.
            credit_timeout_s=math.inf,
            durability=options.durability,
            copies=options.copies,
        )
        try:
            client.connect()
            batches = self._batches(rows, client.partition_count)
            client.publish_each(
                batches, self._answered, writer=self._writer, buffer_bytes=WRITE_BUFFER_BYTES
            )
            if self._not_vouched:
                raise _differs("the task has fewer rows than when it was run before")
            if self._letters is not None:
                self._letters.finish()
        except BrokenError as error:
            raise PipelineError(
                "UPR_UNREACHABLE",
                f"{error}; the server was waited for for {options.timeout_s} s "
                "(timeoutSeconds). Run the write again when it is there",
            ) from error
        except ServerError as error:
            raise PipelineError("UPR_REFUSED", str(error)) from error
        finally:
            client.close()
            if self._letters is not None:
                self._letters.abandon()
        return WriteCounts(self._rows, self._failed, self._nbytes)

    def _batches(
        self, rows: Iterator[pa.RecordBatch], partitions: int
    ) -> Iterator[tuple[PartitionId, Chunk]]:
        gathering = Gathering(self._options.batch_bytes)
        for batch in rows:
            encoded, bad = encode(batch, self._options)
            self._refuse(bad)
            for enough in gathering.add(encoded):
                yield from chunks(enough, partitions)
        for rest in gathering.finish():
            yield from chunks(rest, partitions)

    def _answered(self, batch: Batch) -> None:
        chunk = batch.chunk
        self._nbytes += chunk.nbytes
        if batch.refusal is Status.TOKEN_TOO_OLD and _cannot_fail(chunk):
            self._not_vouched.add(batch.partition)
            self._rows += chunk.count
            return
        if batch.refusal is not None:
            raise _refused(batch, batch.refusal)
        self._not_vouched.discard(batch.partition)
        assert batch.result is not None
        bad = [
            _rejected_row(chunk, index, status_of(status))
            for index, status in batch.result.failures
            # What was to be deleted and is not there is as it should be.
            if status != Status.NOT_FOUND or chunk.operations[index] != Operation.DELETE
        ]
        self._rows += chunk.count - len(bad)
        self._refuse(bad)

    def _refuse(self, bad: list[RejectedRow]) -> None:
        if not bad:
            return
        self._failed += len(bad)
        if self._letters is not None:
            self._letters.add(bad)
            return
        examples = "; ".join(_described(row) for row in bad[:EXAMPLES_MAX])
        more = f"; and {len(bad) - EXAMPLES_MAX} more" if len(bad) > EXAMPLES_MAX else ""
        raise PipelineError(
            "UPR_ROWS_REFUSED",
            f"{len(bad)} rows of a batch were refused, after {self._rows} that were written: "
            f"{examples}{more}. Correct them, or have them put aside: "
            '.option("onError", "deadLetter").option("deadLetterPath", "/a/folder")',
        )


def _cannot_fail(chunk: Chunk) -> bool:
    """Whether every row of a batch has its effect, if the batch has."""
    return not chunk.operations.tobytes().translate(None, _CANNOT_FAIL) and not any(
        chunk.cas.tobytes()
    )


def _refused(batch: Batch, status: Status) -> PipelineError:
    where = f"batch {batch.counter} of the task in partition {batch.partition}"
    if status is Status.SUPERSEDED:
        return PipelineError("UPR_SUPERSEDED", f"{where} was refused: {ADVICE[status]}")
    if status is Status.REPLAY_DIFFERS:
        return _differs(f"{where} is another than when the task was run before")
    if status is Status.TOKEN_TOO_OLD:
        return PipelineError(
            "UPR_REPLAY_TOO_OLD",
            f"{where} was done when the task was run before, and which of its rows failed is not "
            "known any more. Write with operation upsert or delete, or in more tasks (repartition) "
            "or smaller batches of the stream",
        )
    return PipelineError("UPR_REFUSED", f"{where} was refused: {ServerError(status)}")


def _differs(what: str) -> PipelineError:
    return PipelineError(
        "UPR_REPLAY_DIFFERS",
        f"{what}. Make the rows and their order the same each time: write from a table or a "
        "checkpoint (DataFrame.checkpoint), without random numbers, the time of day, or an order "
        "that a shuffle leaves open",
    )


def _rejected_row(chunk: Chunk, index: int, status: Status) -> RejectedRow:
    return RejectedRow(
        status,
        ADVICE.get(status, ""),
        Operation(chunk.operations[index]).name.lower(),
        chunk.key(index),
        chunk.value(index),
    )


def _described(row: RejectedRow) -> str:
    key = "null" if row.key is None else repr(row.key[:EXAMPLE_BYTES_MAX])
    cut = "…" if row.key is not None and len(row.key) > EXAMPLE_BYTES_MAX else ""
    return f"{row.operation} of {key}{cut}: {row.status.name} ({row.reason})"


def writer_id(job: bytes, task: int) -> bytes:
    """What stands for a task at the server, in each of its runs.

    Args:
        job: What the task is a part of.
        task: Its Spark partition.
    """
    data = job + task.to_bytes(4, "little")
    return blake2b(data, digest_size=WRITER_ID_BYTES, person=b"upr spark").digest()


def attempt_of(started_s: int, task_attempt: int) -> int:
    """The number of one run of a task: higher than those of the runs before it.

    Args:
        started_s: When the driver began with the write, in seconds since 1970.
        task_attempt: Spark's number of the run, which rises for as long as its application runs.
    """
    return (started_s << 32) | (task_attempt & 0xFFFF_FFFF)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "writers write in tasks"
    return context


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame.

    Nothing is undone: when a task fails for good, what was written stays, by it and by others.

    Args:
        options: What the write is told.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._job = os.urandom(WRITER_ID_BYTES)
        self._started_s = int(time.time())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts:
        """Writes the rows of one task; its second run has no second effect."""
        context = _context()
        task = WriteTask(
            self._options,
            writer_id(self._job, context.partitionId()),
            attempt_of(self._started_s, context.taskAttemptId()),
        )
        return task.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Every task has written: says how much."""
        _log.info("wrote to %s: %s", self._options.address, WriteCounts.sum(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A task failed for good: says how much others wrote, which stays."""
        _log.warning(
            "a write to %s failed; what was written stays: %s",
            self._options.address,
            WriteCounts.sum(messages),
        )


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream.

    A batch that is run again, by a retry or after a restart, has no second effect, as long as its
    rows are the same. Nothing is undone when one fails.

    Args:
        options: What the write is told.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._started_s = int(time.time())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts:
        """Writes the rows of one task of a batch."""
        context = _context()
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise PipelineError(
                "UPR_NO_BATCH_ID",
                "Spark did not tell the task which batch of which query it writes; "
                "use a version from 4.2 on",
            )
        task = WriteTask(
            self._options,
            writer_id(f"{query}/{batch}".encode(), context.partitionId()),
            attempt_of(self._started_s, context.taskAttemptId()),
        )
        return task.write(iterator)

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  Spark's name
    ) -> None:
        """Every task of a batch has written: says how much."""
        counts = WriteCounts.sum(messages)
        _log.info("wrote batch %d to %s: %s", batchId, self._options.address, counts)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  Spark's name
    ) -> None:
        """A task of a batch failed for good: says how much others wrote, which stays."""
        counts = WriteCounts.sum(messages)
        _log.warning("batch %d failed; what was written stays: %s", batchId, counts)
