"""Publishing the rows of a write: every batch under a token, every answer judged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Final, Self

from pyspark.sql.datasource import WriterCommitMessage

from upr_protocol.chunk import Chunk, CounterDelta
from upr_protocol.client import BlockingClient, WriterIdentity
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.client.core.results import status_of
from upr_protocol.client.core.writer_identity import WRITER_ID_BYTES
from upr_protocol.errors import ADVICE, ServerError, Status, UprError
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.spark.batches import COUNTERS, cannot_fail
from upr_protocol.spark.dead_letter import DeadLetters
from upr_protocol.spark.errors import PipelineError, as_pipeline_error
from upr_protocol.spark.options import idle_interval_s
from upr_protocol.spark.rows import RejectedRow
from upr_protocol.spark.write_options import WriteOptions, operation_word

EXAMPLES_MAX: Final = 5
"""Rows that an error names."""

EXAMPLE_BYTES_MAX: Final = 60
"""The bytes of a key that an error shows."""

WRITE_BUFFER_BYTES: Final = 16 * 1024 * 1024
"""Bytes that a publication has unsent or unanswered, at most."""

_ADVICE: Final = {
    Status.EXISTS: "the key exists; write with upsert or replace",
    Status.NOT_FOUND: "the key does not exist; write with upsert or insert",
}
"""Advice in the words of Spark's options, where the server's names other operations."""


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
        """Adds up what several tasks wrote."""
        counts = [message for message in messages if isinstance(message, WriteCounts)]
        return cls(
            sum(message.rows for message in counts),
            sum(message.failed for message in counts),
            sum(message.nbytes for message in counts),
        )

    def __str__(self) -> str:
        return f"{self.rows} rows written, {self.failed} refused, {self.nbytes} bytes"


class Publication:
    """Publishes the batches of one run of a task, or of one commit.

    A context manager. On an error it leaves no file of dead letters behind; what was published
    stays.

    Args:
        options: The options of the write.
        name: Names the task or the commit, the same in each run; 16 bytes. The file of its dead
            letters is called by it.
        attempt: Rises from one run to the next.
    """

    def __init__(self, options: WriteOptions, name: bytes, attempt: int) -> None:
        self._options = options
        self._client = BlockingClient(
            options.address,
            identity="upr:spark-writer",
            retry_timeout_s=options.timeout_s,
            idle_interval_s=idle_interval_s(options.timeout_s),
            # A live server that is short of memory is worth waiting for.
            credit_timeout_s=math.inf,
            durability=options.durability,
            copies=options.copies,
        )
        self._letters = None
        if options.dead_letter_path is not None:
            self._letters = DeadLetters(options.dead_letter_path, name.hex(), attempt)
        self._rows = self._failed = self._nbytes = 0
        # Partitions whose newest answer is `TOKEN_TOO_OLD`: whether the contents were the same is
        # not known yet.
        self._unconfirmed_partitions: set[PartitionId] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()
        if self._letters is not None:
            self._letters.discard_file()
        if isinstance(error, UprError) and not isinstance(error, PipelineError):
            raise as_pipeline_error(
                error, self._options.address, self._options.timeout_s
            ) from error

    def connect(self) -> int:
        """Connects.

        Returns:
            The bucket's number of partitions.
        """
        self._client.connect()
        return self._client.partition_count

    def publish(self, batches: Iterable[tuple[PartitionId, Chunk]], writer: WriterIdentity) -> None:
        """Publishes batches, and waits until all are answered.

        Args:
            batches: Taken as there is room.
            writer: Who publishes: the same in each run, with the same batches.

        Raises:
            PipelineError: A batch or a row was refused.
        """
        self._client.publish_each(
            batches, self._note_answer, writer=writer, buffer_bytes=WRITE_BUFFER_BYTES
        )
        if self._unconfirmed_partitions:
            raise _replay_differs_error("the task has fewer rows than when it was run before")

    def finish_dead_letters(self) -> WriteCounts:
        """Puts the dead letters in place.

        Returns:
            What was written.
        """
        if self._letters is not None:
            self._letters.finish_file()
        return WriteCounts(self._rows, self._failed, self._nbytes)

    def _note_answer(self, batch: Batch) -> None:
        chunk = batch.chunk
        self._nbytes += chunk.nbytes
        if batch.refusal is Status.TOKEN_TOO_OLD and cannot_fail(chunk):
            self._unconfirmed_partitions.add(batch.partition)
            self._rows += chunk.count
            return
        if batch.refusal is not None:
            raise _refusal_error(batch, batch.refusal)
        self._unconfirmed_partitions.discard(batch.partition)
        assert batch.result is not None
        rejected_rows = [
            _rejected_row(chunk, index, status_of(status), self._options)
            for index, status in batch.result.failures
            # What was to be deleted and is not there is as it should be.
            if status != Status.NOT_FOUND or chunk.operations[index] != Operation.DELETE
        ]
        self._rows += chunk.count - len(rejected_rows)
        self.refuse_rows(rejected_rows)

    def refuse_rows(self, rejected_rows: list[RejectedRow]) -> None:
        """Puts refused rows among the dead letters.

        Raises:
            PipelineError: There are such rows, and the write has no folder for them.
        """
        if not rejected_rows:
            return
        self._failed += len(rejected_rows)
        if self._letters is not None:
            self._letters.add(rejected_rows)
            return
        raise refused_rows_error(rejected_rows, self._rows)


def refused_rows_error(rejected_rows: list[RejectedRow], row_count: int) -> PipelineError:
    """The error of a write that fails on refused rows.

    Args:
        rejected_rows: The refused rows; at least one.
        row_count: Rows that were written before.
    """
    examples = "; ".join(_row_text(row) for row in rejected_rows[:EXAMPLES_MAX])
    ellipsis = (
        f"; and {len(rejected_rows) - EXAMPLES_MAX} more"
        if len(rejected_rows) > EXAMPLES_MAX
        else ""
    )
    return PipelineError(
        "UPR_ROWS_REFUSED",
        f"{len(rejected_rows)} rows of a batch were refused, after {row_count} that were written: "
        f"{examples}{ellipsis}. Correct them, or have them put aside: "
        '.option("onError", "deadLetter").option("deadLetterPath", "/a/folder")',
    )


def _refusal_error(batch: Batch, status: Status) -> PipelineError:
    where = f"batch {batch.counter} of the task in partition {batch.partition}"
    if status is Status.SUPERSEDED:
        return PipelineError("UPR_SUPERSEDED", f"{where} was refused: {ADVICE[status]}")
    if status is Status.REPLAY_DIFFERS:
        return _replay_differs_error(f"{where} differs from what the task sent when it ran before")
    if status is Status.TOKEN_TOO_OLD:
        return PipelineError(
            "UPR_REPLAY_TOO_OLD",
            f"{where} was done when the task was run before, and which of its rows failed is not "
            "known any more. Write with operation upsert or delete, or in more tasks (repartition) "
            "or smaller batches of the stream",
        )
    return PipelineError("UPR_REFUSED", f"{where} was refused: {ServerError(status)}")


def _replay_differs_error(difference: str) -> PipelineError:
    return PipelineError(
        "UPR_REPLAY_DIFFERS",
        f"{difference}. Make the rows and their order the same each time: write from a table or a "
        "checkpoint (DataFrame.checkpoint), without random numbers, the time of day, or an order "
        "that a shuffle leaves open",
    )


def _rejected_row(chunk: Chunk, index: int, status: Status, options: WriteOptions) -> RejectedRow:
    operation, value = Operation(chunk.operations[index]), chunk.value(index)
    if operation in COUNTERS:
        # As it was written: with the other bytes, nobody could write the row again.
        value = str(CounterDelta.decode(value).delta).encode()
    return RejectedRow(
        status,
        _ADVICE.get(status) or ADVICE.get(status, ""),
        operation_word(operation, options.operation),
        chunk.key(index),
        value,
    )


def _row_text(row: RejectedRow) -> str:
    key = "null" if row.key is None else repr(row.key[:EXAMPLE_BYTES_MAX])
    ellipsis = "…" if row.key is not None and len(row.key) > EXAMPLE_BYTES_MAX else ""
    return f"{row.operation} of {key}{ellipsis}: {row.status.name} ({row.reason})"


def writer_id(job: bytes, task: int) -> bytes:
    """What stands for a task at the server, in each of its runs.

    Args:
        job: What the task is a part of.
        task: Its Spark partition.
    """
    data = job + task.to_bytes(4, "little")
    return blake2b(data, digest_size=WRITER_ID_BYTES, person=b"upr spark").digest()


def job_of_write(write_id: str) -> str:
    """The job of a write whose caller has named it. It is no query and batch, nor a drawn job.

    Args:
        write_id: What the option `writeId` says.
    """
    digest = blake2b(write_id.encode(), digest_size=WRITER_ID_BYTES, person=b"upr spark write")
    return digest.hexdigest()


def attempt_of(started_s: int, task_attempt: int) -> int:
    """The number of one run of a task: higher than those of the runs before it.

    Args:
        started_s: When the driver began with the write, in seconds since 1970.
        task_attempt: Spark's number of the run, which rises for as long as its application runs.
    """
    return (started_s << 32) | (task_attempt & 0xFFFF_FFFF)
