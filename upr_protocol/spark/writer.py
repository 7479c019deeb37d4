"""Writing a DataFrame, or the batches of a stream, to a bucket.

Spark may run a task of a write twice, one run after the other or both at once, and a batch of a
stream again after a restart. So the batches of a task carry tokens that are the same each time, and
the server does each of them once:

- the writer's ID is a hash of the job and of the task's partition. The job of a batch of a stream
  is (query ID, batch ID), which a restart has again. The job of a write is drawn on the driver, or
  made of the option `writeId`, with which a caller says that a later write is the same one;
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

A batch of a stream may also run again in other tasks, and so may a write that has a `writeId`. Rows
whose second effect would count are therefore published by the driver: `prepared_rows`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from upr_protocol.chunk import Chunk
from upr_protocol.client import WriterIdentity
from upr_protocol.client.core.writer_identity import WRITER_ID_BYTES
from upr_protocol.ids import PartitionId
from upr_protocol.spark.batches import PendingRows, published_chunks
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.prepared_rows import PreparedRows, RowSpool, commit_rows
from upr_protocol.spark.publication import (
    Publication,
    WriteCounts,
    attempt_of,
    job_of_write,
    writer_id,
)
from upr_protocol.spark.rows import RejectedRow, encode
from upr_protocol.spark.worker_call import worker_call
from upr_protocol.spark.write_options import WriteOptions

_log = logging.getLogger(__name__)

REJECTED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Refused rows that a task keeps in memory, about, and hands to the driver. There they are dead
letters once, in whatever tasks the batch runs. More of them are the task's own."""


class WriteTask:
    """One run of a task.

    Args:
        options: The options of the write.
        writer_id: 16 bytes, the same in each run of the task.
        attempt: Rises from one run to the next.
    """

    def __init__(self, options: WriteOptions, writer_id: bytes, attempt: int) -> None:
        self._options = options
        self._writer_id = writer_id
        self._attempt = attempt

    def write(self, rows: Iterator[pa.RecordBatch]) -> WriteCounts:
        """Publishes all rows.

        Raises:
            PipelineError: It cannot go on. What was written stays.
        """
        with Publication(self._options, self._writer_id, self._attempt) as publication:
            self._publish_rows(
                publication, _encode_batches(rows, self._options, publication.refuse_rows)
            )
            return publication.finish_dead_letters()

    def write_or_prepare(
        self, rows: Iterator[pa.RecordBatch], job: str
    ) -> WriteCounts | PreparedRows:
        """Publishes all rows, but prepares those of keys with increments or decrements.

        Args:
            rows: The rows of the task.
            job: Names the batch of a stream, or the write, that the task is a part of.

        Raises:
            PipelineError: It cannot go on. What was written stays.
        """
        if self._options.operation is not None:
            return self.write(rows)
        rejected: list[RejectedRow] = []
        rejected_bytes = 0
        with (
            RowSpool() as spool,
            Publication(self._options, self._writer_id, self._attempt) as publication,
        ):

            def reject(bad_rows: list[RejectedRow]) -> None:
                nonlocal rejected_bytes
                # Row by row: where it is cut depends on the rows alone, as in each run.
                for row in bad_rows:
                    rejected.append(row)
                    rejected_bytes += row.nbytes
                    if rejected_bytes > REJECTED_BYTES_MAX:
                        publication.refuse_rows(rejected)
                        rejected.clear()
                        rejected_bytes = 0
                if self._options.dead_letter_path is None:
                    publication.refuse_rows(rejected)

            for encoded_rows in _encode_batches(rows, self._options, reject):
                spool.add(encoded_rows)
            prepared = spool.counter_rows() if spool.has_counters else None
            if prepared is None:
                publication.refuse_rows(rejected)
            self._publish_rows(publication, spool.other_rows())
            row_counts = publication.finish_dead_letters()
            if prepared is None:
                return row_counts
            return PreparedRows(job, prepared, tuple(rejected), row_counts)

    def _publish_rows(self, publication: Publication, rows: Iterable[pa.RecordBatch]) -> None:
        partitions = publication.connect()
        writer = WriterIdentity.of_task(self._writer_id, self._attempt)
        publication.publish(self._batches(rows, partitions), writer)

    def _batches(
        self, rows: Iterable[pa.RecordBatch], partitions: int
    ) -> Iterator[tuple[PartitionId, Chunk]]:
        pending_rows = PendingRows(self._options.batch_bytes)
        for encoded_rows in rows:
            for batch_rows in pending_rows.add(encoded_rows):
                yield from published_chunks(batch_rows, partitions)
        for last_rows in pending_rows.take_rest():
            yield from published_chunks(last_rows, partitions)


def _encode_batches(
    rows: Iterable[pa.RecordBatch],
    options: WriteOptions,
    reject: Callable[[list[RejectedRow]], None],
) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        encoded_rows, rejected_rows = encode(batch, options)
        reject(rejected_rows)
        yield encoded_rows


def _commit(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], started_s: int
) -> WriteCounts:
    """Publishes what the tasks of a job have prepared. Returns what was written in all."""
    prepared = [message for message in messages if isinstance(message, PreparedRows)]
    counts = [WriteCounts.sum(messages), *(message.counts for message in prepared)]
    if prepared:
        counts.append(commit_rows(options, prepared, attempt_of(started_s, 0)))
    return WriteCounts.sum(counts)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "writers write in tasks"
    return context


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame.

    Nothing is undone: when a task fails for good, what was written stays, by it and by others. With
    the option `writeId` a later write of the same name and the same rows has no second effect.

    Args:
        options: The options of the write.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._job = os.urandom(WRITER_ID_BYTES).hex()
        if options.write_id is not None:
            self._job = job_of_write(options.write_id)
        self._started_s = int(time.time())

    @worker_call()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts | PreparedRows:
        """Writes the rows of one task, or prepares them for `commit`; its second run has no second
        effect."""
        context = _context()
        task = WriteTask(
            self._options,
            writer_id(self._job.encode(), context.partitionId()),
            attempt_of(self._started_s, context.taskAttemptId()),
        )
        if self._options.write_id is None:
            return task.write(iterator)
        return task.write_or_prepare(iterator, self._job)

    @worker_call()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Every task has succeeded: publishes what they have prepared.

        Raises:
            PipelineError: It cannot go on. What was written stays.
        """
        counts = _commit(self._options, messages, self._started_s)
        _log.info("wrote to %s: %s", self._options.address, counts)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A task failed for good: says how much others wrote, which stays."""
        _log.warning(
            "a write to %s failed; rows already written stay: %s",
            self._options.address,
            WriteCounts.sum(messages),
        )


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream.

    A batch that is run again, by a retry or after a restart, has no second effect, as long as its
    rows are the same. What a failed batch has written stays.

    Args:
        options: The options of the write.
    """

    def __init__(self, options: WriteOptions) -> None:
        if options.write_id is not None:
            raise OptionError(
                "the option writeId is for a write inside foreachBatch: a stream names its batches "
                "itself. Leave it out"
            )
        self._options = options
        self._started_s = int(time.time())

    @worker_call()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts | PreparedRows:
        """Writes the rows of one task of a batch, or prepares them for `commit`."""
        context = _context()
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise PipelineError(
                "UPR_NO_BATCH_ID",
                "Spark did not tell the task which batch of which query it writes; "
                "use a version from 4.2 on",
            )
        job = f"{query}/{batch}"
        task = WriteTask(
            self._options,
            writer_id(job.encode(), context.partitionId()),
            attempt_of(self._started_s, context.taskAttemptId()),
        )
        return task.write_or_prepare(iterator, job)

    @worker_call()
    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  Spark's name
    ) -> None:
        """Every task of a batch has succeeded: publishes what they have prepared.

        Raises:
            PipelineError: It cannot go on. What was written stays. Or the trigger is `continuous`:
                only then a task that succeeds has no message, as Spark has given it no rows. Spark
                logs this error, and commits nothing more; the query does not fail.
        """
        if None in messages:
            raise PipelineError(
                "UPR_CONTINUOUS",
                "Spark gives a bucket no rows with the trigger continuous, so nothing is written; "
                "start the query with another trigger and a new checkpointLocation",
            )
        counts = _commit(self._options, messages, self._started_s)
        _log.info("wrote batch %d to %s: %s", batchId, self._options.address, counts)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  Spark's name
    ) -> None:
        """A task of a batch failed for good: says how much others wrote, which stays."""
        counts = WriteCounts.sum(messages)
        _log.warning("batch %d failed; rows already written stay: %s", batchId, counts)
