"""Rows into batches: gathered, sorted by partition, and laid out as chunks.

Where a batch ends depends on the rows alone, and neither on time nor on how Spark cuts them: a task
that is run again sends the same batches. There is no loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from upr_protocol.chunk import Chunk, encoded_bytes, published_chunk
from upr_protocol.hashing import partitions_of
from upr_protocol.ids import Operation, PartitionId
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

COUNTERS: Final = (Operation.INCREMENT, Operation.DECREMENT)
"""Operations whose second effect is not that of the first."""

_COUNTERS: Final = bytes(COUNTERS)
_CANNOT_FAIL: Final = bytes((Operation.SET, Operation.DELETE))

Column = tuple[NDArray[np.int64], NDArray[np.uint8]]
"""Offsets, and the bytes they point into."""


class PendingRows:
    """Rows that wait until there are enough of them.

    Args:
        batch_bytes: How many bytes are enough.
    """

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._pieces: list[pa.RecordBatch] = []
        self._nbytes = 0

    def add(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Takes in rows, as `rows.encode` gives them.

        Yields:
            What is enough: as many rows as `batch_bytes` holds, or a single one.
        """
        ends = np.cumsum(
            _sizes(rows.column("key")) + _sizes(rows.column("value")) + ENCODED_ROW_BYTES
        )
        first = before = 0
        while first < len(ends):
            room = self._batch_bytes - self._nbytes
            end = int(np.searchsorted(ends, before + room, side="right"))
            if end == first and not self._pieces:
                end += 1
            if end > first:
                self._pieces.append(rows.slice(first, end - first))
                self._nbytes += int(ends[end - 1]) - before
                first, before = end, int(ends[end - 1])
            if first < len(ends):
                yield from self.take_rest()

    def take_rest(self) -> Iterator[pa.RecordBatch]:
        """Yields what is left, if anything is."""
        if self._pieces:
            gathered = pa.Table.from_batches(self._pieces).combine_chunks()
            self._pieces, self._nbytes = [], 0
            yield gathered.to_batches()[0]


def published_chunks(rows: pa.RecordBatch, partitions: int) -> Iterator[tuple[PartitionId, Chunk]]:
    """A published chunk for each partition that any of `rows` belongs to, in their order; several
    where the answer to one would be too long.

    Args:
        rows: Rows as `rows.encode` gives them.
        partitions: How many partitions the bucket has.
    """
    ordered = SortedRows(rows, partitions)
    for partition in ordered.partitions():
        for bound in ordered.chunk_bounds(partition):
            yield partition, ordered.chunk(*bound)


class SortedRows:
    """Rows sorted by partition, from which chunks are cut. The rows of a partition stay in order.

    Args:
        rows: Rows as `rows.encode` gives them.
        partitions: How many partitions the bucket has.
    """

    def __init__(self, rows: pa.RecordBatch, partitions: int) -> None:
        homes = partitions_of(*_octets(rows.column("key")), partitions)
        if partitions > 1:
            order = np.argsort(homes, kind="stable")
            rows = rows.take(pa.array(order))
        self._counts = np.bincount(homes, minlength=partitions)
        self._ends = np.cumsum(self._counts)
        self._keys, self._values = _octets(rows.column("key")), _octets(rows.column("value"))
        self._operations = rows.column("op").to_numpy()
        self._others = {
            argument: rows.column(name).to_numpy()
            for argument, name in (("cas", "cas"), ("flags", "flags"), ("expiries", "expiry"))
            if name in rows.schema.names
        }

    def partitions(self) -> list[PartitionId]:
        """The partitions that have rows."""
        return [PartitionId(partition) for partition in np.flatnonzero(self._counts).tolist()]

    def chunk_bounds(self, partition: PartitionId, bytes_max: int = 0) -> Iterator[tuple[int, int]]:
        """Where the chunks of a partition begin and end, among all rows.

        Args:
            partition: The partition.
            bytes_max: What a chunk of several rows may have; 0 for any number.
        """
        end = int(self._ends[partition])
        begin = end - int(self._counts[partition])
        rows_max = self._rows_max(begin, end)
        while begin < end:
            last = min(begin + rows_max, end)
            if bytes_max:
                room = bytes_max - ENCODED_ROW_BYTES * (last - begin)
                last = max(begin + 1, min(last, self._within(begin, last, room)))
            yield begin, last
            begin = last

    def _rows_max(self, begin: int, end: int) -> int:
        """How many of these rows a chunk may have."""
        # As bytes: a call of NumPy for each chunk takes longer than a pass over its operations.
        operations = self._operations[begin:end].tobytes()
        if len(operations.translate(None, _COUNTERS)) < len(operations):
            return COUNTERS_MAX
        cas = self._others.get("cas", self._operations[:0])[begin:end]
        if cas.any() or operations.translate(None, _CANNOT_FAIL):
            return FALLIBLE_MAX
        return BUNDLE_MUTATIONS_MAX

    def _within(self, begin: int, end: int, room: int) -> int:
        """Where so many bytes of keys and values end that begin at a row."""
        (key_offsets, _), (value_offsets, _) = self._keys, self._values
        nbytes = key_offsets[begin : end + 1] + value_offsets[begin : end + 1]
        return begin + int(np.searchsorted(nbytes, nbytes[0] + room, side="right")) - 1

    def chunk(self, first: int, end: int) -> Chunk:
        """The published chunk of some rows."""
        return published_chunk(
            *_slice(self._keys, first, end),
            *_slice(self._values, first, end),
            self._operations[first:end].data,
            **{argument: column[first:end].data for argument, column in self._others.items()},
        )


def _sizes(column: pa.Array) -> NDArray[np.int64]:
    return np.diff(_octets(column)[0])


def _octets(column: pa.Array) -> Column:
    """A column of large binary, none null, without a copy."""
    _, offsets, data = column.buffers()
    offset_array = np.frombuffer(offsets, np.int64, len(column) + 1, 8 * column.offset)
    return offset_array, np.frombuffer(data or b"", np.uint8)


def _slice(column: Column, first: int, end: int) -> tuple[memoryview, memoryview]:
    """Part of a column, as a chunk has it: offsets from 0, of 4 bytes."""
    offsets, data = column
    low, high = offsets[first], offsets[end]
    return (offsets[first : end + 1] - low).astype(np.int32).data, data[low:high].data
