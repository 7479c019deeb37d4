"""Rows into batches: gathered, split by partition, and laid out as chunks.

Where a batch ends depends on the rows alone, and neither on time nor on how Spark cuts them: a task
that is run again sends the same batches. There is no loop over rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from upr_kernel import split_rows
from upr_protocol.chunk import Buffer, Chunk, encoded_bytes
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX

ENCODED_ROW_BYTES: Final = encoded_bytes(8, 0, 0) // 8 + 1
"""What a row takes in a chunk beside its key and value, about."""

COUNTERS_MAX: Final = 1000
"""Rows of a chunk that has counters. A server remembers 164 KiB of answers for each writer and
partition, and the 16 batches that are in flight may all be in doubt: some 10,000 bytes for each. A
counter takes up to 10 of them, its value and where it stands. A batch that is sent again, because a
connection was lost, ends the write if its answer is not there any more."""

FALLIBLE_MAX: Final = 4000
"""Rows of a chunk without counters that can fail one by one: 2 bytes for each that does."""

CHUNK_BYTES_MAX: Final = 768 * 1024
"""Bytes of a chunk of several rows. A server keeps a chunk of up to 1 MiB as it came, and copies
the rows of a longer one."""

COUNTERS: Final = (Operation.INCREMENT, Operation.DECREMENT)
"""Operations that count each time: one that is applied twice leaves another value than once."""

_COUNTERS: Final = bytes(COUNTERS)
_CANNOT_FAIL: Final = bytes((Operation.SET, Operation.DELETE))


class PendingRows:
    """Rows that wait until there are enough of them.

    Args:
        batch_bytes: How many bytes are enough.
    """

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._pieces: list[pa.RecordBatch] = []
        self._nbytes = 0

    def add(self, rows: pa.RecordBatch) -> Iterator[list[pa.RecordBatch]]:
        """Takes in rows, as `rows.encode` gives them.

        Yields:
            What is enough: as many rows as `batch_bytes` holds, or a single one.
        """
        if not rows.num_rows:
            return
        ends = np.cumsum(
            _sizes(rows.column("key")) + _sizes(rows.column("value")) + ENCODED_ROW_BYTES
        )
        first_row = bytes_before = 0
        while first_row < len(ends):
            room = self._batch_bytes - self._nbytes
            end = int(np.searchsorted(ends, bytes_before + room, side="right"))
            if end == first_row and not self._pieces:
                end += 1
            if end > first_row:
                self._pieces.append(rows.slice(first_row, end - first_row))
                self._nbytes += int(ends[end - 1]) - bytes_before
                first_row, bytes_before = end, int(ends[end - 1])
            if first_row < len(ends):
                yield from self.take_rest()

    def take_rest(self) -> Iterator[list[pa.RecordBatch]]:
        """Yields what is left, if anything is."""
        if self._pieces:
            pieces, self._pieces, self._nbytes = self._pieces, [], 0
            yield pieces


def published_chunks(
    rows: list[pa.RecordBatch], partitions: int
) -> Iterator[tuple[PartitionId, Chunk]]:
    """A published chunk for each partition that any of `rows` belongs to, in their order; several
    where the answer to one would be too long.

    Args:
        rows: Rows as `rows.encode` gives them. The rows of a partition stay in their order. The
            list is emptied, so that the rows are not in memory twice while the chunks are sent.
        partitions: How many partitions the bucket has.
    """
    chunks = deque(partition_chunks(rows, partitions))
    rows.clear()
    while chunks:
        partition, chunk = chunks.popleft()
        for bounds in chunk_bounds(chunk, CHUNK_BYTES_MAX):
            yield partition, rows_of_chunk(chunk, *bounds)


def partition_chunks(
    rows: Iterable[pa.RecordBatch], partitions: int
) -> list[tuple[PartitionId, Chunk]]:
    """All rows of each partition that has any, as a chunk of any length. The arguments are those of
    `published_chunks`."""
    chunks = split_rows([_columns(batch) for batch in rows], partitions)
    return [(PartitionId(partition), Chunk(encoded)) for partition, encoded in chunks]


def chunk_bounds(chunk: Chunk, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Where the chunks that a chunk is sent as begin and end.

    Args:
        chunk: The rows of a partition.
        bytes_max: What a chunk of several rows may have, about.
    """
    begin, rows_max = 0, _rows_max(chunk)
    while begin < chunk.count:
        end = min(begin + rows_max, chunk.count)
        if chunk.nbytes > bytes_max:
            room = bytes_max - ENCODED_ROW_BYTES * (end - begin)
            end = max(begin + 1, min(end, _row_within(chunk, begin, end, room)))
        yield begin, end
        begin = end


def rows_of_chunk(chunk: Chunk, begin: int, end: int) -> Chunk:
    """Rows of a chunk as a chunk of their own."""
    if (begin, end) == (0, chunk.count):
        return chunk
    return chunk.rows(begin, end, SeqNo(0), SeqNo(0))


def _rows_max(chunk: Chunk) -> int:
    """How many of these rows a chunk may have."""
    # As bytes: a call of NumPy for each chunk takes longer than a pass over its rows.
    operations = chunk.operations.tobytes()
    if len(operations.translate(None, _COUNTERS)) < len(operations):
        return COUNTERS_MAX
    return BUNDLE_MUTATIONS_MAX if cannot_fail(chunk) else FALLIBLE_MAX


def cannot_fail(chunk: Chunk) -> bool:
    """Whether every row of a chunk has its effect if the chunk as a whole has: none has a
    condition. At memory speed."""
    has_condition = chunk.operations.tobytes().translate(None, _CANNOT_FAIL)
    return not has_condition and chunk.cas.tobytes() == bytes(8 * chunk.count)


def _row_within(chunk: Chunk, begin: int, end: int, room: int) -> int:
    """The row at which so many bytes of keys and values end that begin at a row."""
    key_ends = np.frombuffer(chunk.key_offsets, np.int32)[begin : end + 1].astype(np.int64)
    nbytes = key_ends + np.frombuffer(chunk.value_offsets, np.int32)[begin : end + 1]
    return begin + int(np.searchsorted(nbytes, nbytes[0] + room, side="right")) - 1


RowColumns = tuple[
    Buffer, Buffer, Buffer, Buffer, Buffer, Buffer | None, Buffer | None, Buffer | None
]
"""Rows as the kernel splits them: where the keys begin and their bytes, the same of the values,
operations, CAS values, flags and expiry times."""


def _columns(rows: pa.RecordBatch) -> RowColumns:
    """The columns of some rows, without a copy."""
    cas, flags, expiries = (
        _numbers(rows.column(name)) if name in rows.schema.names else None
        for name in ("cas", "flags", "expiry")
    )
    return (
        *_strings(rows.column("key")),
        *_strings(rows.column("value")),
        _numbers(rows.column("op")),
        cas,
        flags,
        expiries,
    )


def _strings(column: pa.Array) -> tuple[Buffer, Buffer]:
    """A column of large binary, none null: where each string begins, and the bytes."""
    _, offsets, data = column.buffers()
    begin, end = 8 * column.offset, 8 * (column.offset + len(column) + 1)
    return memoryview(offsets)[begin:end], b"" if data is None else memoryview(data)


def _numbers(column: pa.Array) -> Buffer:
    """A column of numbers, none null."""
    # `to_numpy` would import pandas.
    width = column.type.bit_width // 8
    _, data = column.buffers()
    return memoryview(data)[width * column.offset : width * (column.offset + len(column))]


def _sizes(column: pa.Array) -> NDArray[np.int64]:
    offsets: NDArray[np.int64] = np.frombuffer(_strings(column)[0], np.int64)
    return offsets[1:] - offsets[:-1]
