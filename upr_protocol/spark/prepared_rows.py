"""Rows that a task prepares, and the driver publishes when it commits the batch of a stream.

Spark may run a batch of a stream again in other tasks: with other cores, another
`maxPartitionBytes`, another plan. What a task did the first time then says nothing about what is to
be done the second time. A `set` or a `delete` may simply be done again. An increment may not. So a
task does not publish the rows of a key that it increments or decrements. Its commit message carries
them to the driver, which commits a batch when all its tasks have succeeded.

The driver puts the rows into an order that does not depend on the tasks, and publishes them under a
writer ID made of the job: of query and batch, or of the option `writeId`. Each partition of the
bucket then judges what the *job* has done to it: the same rows are recognised, whatever tasks they
come from, and other rows are refused (`UPR_REPLAY_DIFFERS`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from upr_protocol.chunk import Chunk
from upr_protocol.client import WriterIdentity
from upr_protocol.client.core.publish_options import IN_FLIGHT_DEFAULT
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.spark.batches import (
    CHUNK_BYTES_MAX,
    COUNTERS,
    chunk_bounds,
    partition_chunks,
    rows_of_chunk,
)
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.publication import Publication, WriteCounts, writer_id
from upr_protocol.spark.rows import RejectedRow
from upr_protocol.spark.texts import TEXT
from upr_protocol.spark.write_options import WriteOptions

SPOOL_MEMORY_BYTES: Final = 32 * 1024 * 1024
"""Compressed rows that a task keeps in memory. More go to a temporary file."""

PREPARED_BYTES_MAX: Final = 256 * 1024 * 1024
"""Compressed rows that a task may hand to the driver: a quarter of what Spark lets a driver collect
(`spark.driver.maxResultSize`, 1 GiB by default)."""

ROUND_BATCHES: Final = IN_FLIGHT_DEFAULT
"""Batches that a commit sends to a partition under one writer ID. A server remembers the answers to
so many, however long they are; and it remembers 1,024 writers."""

_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class PreparedRows(WriterCommitMessage):
    """The rows of one task that the driver is to publish.

    Attributes:
        job: Names the batch of a stream, or the write, that the task is a part of.
        rows: The rows, as `rows.encode` gives them: an Arrow stream.
        rejected: Rows that cannot be operations.
        counts: What the task has published itself.
    """

    job: str
    rows: bytes
    rejected: tuple[RejectedRow, ...]
    counts: WriteCounts


class RowSpool:
    """The rows of a task, kept until it is known which keys have increments or decrements.

    A context manager: at the end it drops the rows.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(SPOOL_MEMORY_BYTES)  # noqa: SIM115
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._schema: pa.Schema | None = None
        self._counters: list[pa.Array] = []

    def __enter__(self) -> RowSpool:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._file.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Takes in rows, as `rows.encode` gives them."""
        if self._writer is None:
            self._schema = rows.schema
            self._writer = pa.ipc.new_stream(self._file, rows.schema, options=_COMPRESSED)
        self._writer.write_batch(rows)
        counts = np.isin(rows.column("op").to_numpy(), COUNTERS)
        if counts.any():
            self._counters.append(pc.unique(rows.column("key").filter(pa.array(counts))))

    @property
    def has_counters(self) -> bool:
        """Whether any row is an increment or a decrement."""
        return bool(self._counters)

    def counter_rows(self) -> bytes:
        """All rows of the keys that have increments or decrements, as an Arrow stream.

        Raises:
            PipelineError: The driver could not take so many.
        """
        stream = BytesIO()
        with pa.ipc.new_stream(stream, self._schema, options=_COMPRESSED) as writer:
            for rows in self._rows(of_counters=True):
                writer.write_batch(rows)
                if stream.tell() > PREPARED_BYTES_MAX:
                    raise PipelineError(
                        "UPR_BATCH_TOO_LARGE",
                        f"a task of this batch has more than {PREPARED_BYTES_MAX >> 20} MiB of "
                        "increments and decrements, which the driver publishes. Make the batches "
                        "of the stream smaller (maxFilesPerTrigger, maxOffsetsPerTrigger), or use "
                        "more tasks",
                    )
        return stream.getvalue()

    def other_rows(self) -> Iterator[pa.RecordBatch]:
        """All other rows, in their order; no batch is empty."""
        return self._rows(of_counters=False)

    def _rows(self, *, of_counters: bool) -> Iterator[pa.RecordBatch]:
        if self._writer is None:
            return
        self._writer.close()
        self._file.seek(0)
        counters = pc.unique(pa.chunked_array(self._counters, TEXT))
        for rows in pa.ipc.open_stream(self._file):
            mask = pc.is_in(rows.column("key"), counters)
            selected_rows = rows.filter(mask if of_counters else pc.invert(mask))
            if selected_rows.num_rows:
                yield selected_rows


def commit_rows(
    options: WriteOptions, prepared: Iterable[PreparedRows], attempt: int
) -> WriteCounts:
    """Publishes what the tasks of a job have prepared. A second time it has no second effect.

    Args:
        options: The options of the write.
        prepared: From the tasks of one job, in the order of their partitions; not empty.
        attempt: Rises from one run to the next.

    Returns:
        What was written.

    Raises:
        PipelineError: The rows are other ones than the first time, some were refused, or the server
            cannot be reached.
    """
    messages = list(prepared)
    job = f"{messages[0].job}/commit".encode()
    with Publication(options, writer_id(job, 0), attempt) as publication:
        for message in messages:
            publication.refuse_rows(list(message.rejected))
        table = pa.Table.from_batches(
            batch for message in messages for batch in pa.ipc.open_stream(BytesIO(message.rows))
        )
        rounds = rounds_of(table, publication.connect(), options.batch_bytes)
        for round_number, batches in enumerate(rounds):
            writer = WriterIdentity.of_task(writer_id(job, round_number), attempt)
            publication.publish(batches, writer)
        return publication.finish_dead_letters()


def rounds_of(
    table: pa.Table, partitions: int, batch_bytes: int
) -> Iterator[Iterator[tuple[PartitionId, Chunk]]]:
    """The batches of a commit, in rounds of at most `ROUND_BATCHES` for each partition.

    Args:
        table: The rows.
        partitions: The bucket's number of partitions.
        batch_bytes: The size of a batch, about, if it is less than `CHUNK_BYTES_MAX`.

    Raises:
        PipelineError: There are too many rows.
    """
    try:
        chunks = partition_chunks(in_stable_order(table).to_batches(), partitions)
    except OverflowError as error:
        raise PipelineError(
            "UPR_BATCH_TOO_LARGE",
            "a partition of the bucket gets more than 2 GiB from the increments and decrements of "
            "this batch. Make the batches of the stream smaller (maxFilesPerTrigger, "
            "maxOffsetsPerTrigger), or the write",
        ) from error
    chunk_bytes_max = min(batch_bytes, CHUNK_BYTES_MAX)
    bounds = [list(chunk_bounds(chunk, chunk_bytes_max)) for _, chunk in chunks]
    longest = max(map(len, bounds))
    for first_batch in range(0, longest, ROUND_BATCHES):
        yield (
            (partition, rows_of_chunk(chunk, *bound))
            for (partition, chunk), all_bounds in zip(chunks, bounds, strict=True)
            for bound in all_bounds[first_batch : first_batch + ROUND_BATCHES]
        )


def in_stable_order(table: pa.Table) -> pa.Table:
    """The rows in an order that does not depend on the tasks that they come from.

    By key. The rows of a key that are all increments are sorted, because their order makes no
    difference. Other rows of a key stay in the order of their task. Rows of one key in several
    tasks have no order to begin with.
    """
    table = table.combine_chunks()
    keys = table.column("key")
    codes = pc.dictionary_encode(keys).chunk(0).indices.to_numpy()
    has_order = np.zeros(len(codes), np.bool_)
    is_increment = table.column("op").to_numpy() == Operation.INCREMENT
    if "cas" in table.column_names:
        is_increment &= table.column("cas").to_numpy() == 0
    has_order[codes[~is_increment]] = True
    is_ordered = pa.array(has_order[codes])
    sort_columns = {"key": keys}
    for name in table.column_names:
        if name not in ("op", "key"):
            column = table.column(name)
            empty_value = pa.scalar(
                b"" if pa.types.is_large_binary(column.type) else 0, column.type
            )
            sort_columns[name] = pc.if_else(is_ordered, empty_value, column)
    # Stable: rows with the same keys of the sort stay in their order.
    order = pc.sort_indices(
        pa.table(sort_columns), sort_keys=[(name, "ascending") for name in sort_columns]
    )
    return table.take(order)
