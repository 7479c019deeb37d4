"""Chunks as Arrow record batches: the columns that were asked for, mostly over the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from upr_protocol.chunk import Chunk
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.json_values import ValueParser, parser_of, unparsed_values
from upr_protocol.spark.read_tasks import RollbackMarker
from upr_protocol.spark.scalars import (
    bool_scalar,
    int8_scalar,
    int32_scalar,
    int64_scalar,
    text_array,
    text_scalar,
)
from upr_protocol.spark.schema import UNPARSED, check_schema

BATCH_ROWS: Final = 10_000
RECORD_BATCH_BYTES: Final = 8 * 1024 * 1024
"""A batch handed to Spark has at most so many rows, and about so many bytes. Larger ones are not
faster, and Spark begins later: a batch is held whole at several places."""

SMALL_ROWS: Final = 4096
"""Batches of fewer rows are put together: each costs Spark some tenths of a millisecond."""

_OPERATION_NAMES: Final = text_array(["", "set", "delete", "expire"])
"""The operations that are stored, by their code."""


class RecordBatchBuilder:
    """Makes record batches of the columns that a schema names.

    Args:
        schema: The columns.
        key: The only key of which there are rows; None for every key.
        bucket: The bucket that is read.

    Raises:
        OptionError: There is no such column.
    """

    def __init__(
        self,
        schema: StructType,
        key: bytes | None = None,
        bucket: str = "",
    ) -> None:
        check_schema(schema)
        self._bucket = bucket
        self._key = key
        self._names = schema.fieldNames()
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._parser = parser_of(schema)
        self._common = RepeatedColumns(
            {
                "op": text_scalar("set"),
                "bucket": text_scalar(bucket),
                "deleted": bool_scalar(False),
                "flags": _ZERO,
                "expiry": _ZERO,
            }
        )

    def of_snapshot(
        self, partition: PartitionId, history: str, start: SeqNo, end: SeqNo
    ) -> SnapshotColumns:
        """What makes record batches of the chunks of one snapshot.

        Args:
            partition: Its partition.
            history: Its history ID, as text.
            start: Where it begins.
            end: Where it ends.
        """
        scalars = {
            "partition": lambda: int32_scalar(partition),
            "history_id": lambda: text_scalar(history),
            "snapshot_start": lambda: int64_scalar(start),
            "snapshot_end": lambda: int64_scalar(end),
        }
        snapshot_columns = RepeatedColumns(
            {name: scalars[name]() for name in self._names if name in scalars}
        )
        return SnapshotColumns(
            self._schema, snapshot_columns, self._common, self._parser, self._key
        )

    def of_marker(self, partition: PartitionId, marker: RollbackMarker) -> pa.RecordBatch:
        """One row that says that a partition went back."""
        values: dict[str, object] = {
            "op": "rollback",
            "bucket": self._bucket,
            "partition": partition,
            "history_id": f"{marker.history_id:016x}",
            "seq": marker.to_seq,
            "snapshot_start": marker.to_seq,
            "snapshot_end": marker.from_seq,
            "key": b"",
            "value": None,
            UNPARSED: None,
            "deleted": False,
            "cas": 0,
            "flags": 0,
            "expiry": 0,
        }
        columns = [
            pa.array([values[name]], pa.binary() if name == "key" else kind).cast(kind)
            for name, kind in zip(self._names, self._schema.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


class RepeatedColumns:
    """Columns with the same value in every row. Each is made once, as long as the longest batch.

    Args:
        scalars: The value of each column, by the column's name.
    """

    def __init__(self, scalars: Mapping[str, pa.Scalar]) -> None:
        self._scalars = scalars
        self._columns: dict[str, pa.Array] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._scalars

    def column(self, name: str, count: int) -> pa.Array:
        """The first `count` rows of a column."""
        column = self._columns.get(name)
        if column is None or len(column) < count:
            column = self._columns[name] = pa.repeat(self._scalars[name], count)
        return column[:count]


class SnapshotColumns:
    """Makes record batches of chunks. Columns that are the same in every row are made once.

    Args:
        schema: The columns.
        snapshot_columns: The columns that are the same in every row of the snapshot.
        common: The columns that are the same in every snapshot: the bucket; `op` and `deleted`
            while every mutation is a set; flags and expiry times while all are 0.
        parser: What makes structs of the values; None where these stay bytes or text.
        key: The only key of which there are rows; None for all.
    """

    def __init__(
        self,
        schema: pa.Schema,
        snapshot_columns: RepeatedColumns,
        common: RepeatedColumns,
        parser: ValueParser | None,
        key: bytes | None = None,
    ) -> None:
        self._schema = schema
        self._key = key
        self._parser = parser
        self._snapshot_columns = snapshot_columns
        self._common = common

    def of_chunks(self, chunks: Sequence[Chunk]) -> pa.RecordBatch:
        """The mutations of chunks, those of the key if there is one, in their order. The columns
        that differ from row to row are put together, of several chunks, and no others.

        Args:
            chunks: At least one.

        Raises:
            PipelineError: A number does not fit in 63 bits, or a text is no UTF-8.
        """
        count, is_selected = sum(chunk.count for chunk in chunks), None
        if self._key is not None:
            keys = [_bytes(chunk.key_offsets, chunk.key_bytes, None) for chunk in chunks]
            is_selected = pc.equal(_joined(keys), self._key)
            count = is_selected.true_count
            if not count:
                return pa.RecordBatch.from_pylist([], self._schema)
        codes = [
            None if _is_all(chunk.operations, _SET_BYTE) else _codes(chunk) for chunk in chunks
        ]
        columns = {
            name: self._selected_column(name, chunks, codes, is_selected, count)
            for name in self._schema.names
            if name != UNPARSED
        }
        return record_batch_of(columns, self._schema, self._parser)

    def _selected_column(
        self,
        name: str,
        chunks: Sequence[Chunk],
        codes: Sequence[pa.Array | None],
        is_selected: pa.BooleanArray | None,
        count: int,
    ) -> pa.Array:
        """A column of the rows that are selected.

        Args:
            name: The column.
            chunks: The chunks.
            codes: The operations of each; None if all are sets.
            is_selected: Which rows are selected; None for all.
            count: How many those are.
        """
        parts = [
            self._column(name, chunk, chunk_codes)
            for chunk, chunk_codes in zip(chunks, codes, strict=True)
        ]
        if all(part is None for part in parts):
            return self._repeated_column(name, count)
        column = _joined(
            [
                self._repeated_column(name, chunk.count) if part is None else part
                for chunk, part in zip(chunks, parts, strict=True)
            ]
        )
        if name == "cas":
            _check_cas(column)
        return column if is_selected is None else column.filter(is_selected)

    def _column(self, name: str, chunk: Chunk, codes: pa.Array | None) -> pa.Array | None:
        """A column of a chunk; None if it is the same in every row.

        Args:
            name: The column.
            chunk: The chunk.
            codes: Its operations; None if all are sets.
        """
        if name == "key":
            return _bytes(chunk.key_offsets, chunk.key_bytes, None)
        if name == "value":
            validity = None if codes is None else pc.equal(codes, _SET).buffers()[1]
            return _bytes(chunk.value_offsets, chunk.value_bytes, validity)
        if codes is not None and name == "op":
            return _OPERATION_NAMES.take(codes)
        if codes is not None and name == "deleted":
            return pc.not_equal(codes, _SET)
        if name == "seq":
            return _seqs(chunk)
        if name == "cas":
            return _long(chunk.cas)
        if name in ("flags", "expiry"):
            numbers = chunk.flags if name == "flags" else chunk.expiries
            return None if _is_all(numbers, b"\0") else _unsigned(numbers)
        return None

    def _repeated_column(self, name: str, count: int) -> pa.Array:
        columns = self._snapshot_columns if name in self._snapshot_columns else self._common
        return columns.column(name, count)


_SET: Final = int8_scalar(Operation.SET)
_SET_BYTE: Final = bytes([Operation.SET])
_ZERO: Final = int64_scalar(0)
_LONG_MAX: Final = (1 << 63) - 1


def _is_all(column: memoryview, byte: bytes) -> bool:
    """Whether a column has this byte throughout. Bytes are compared many at a time; a call of
    `strip` looks at each."""
    return column.tobytes() == byte * column.nbytes


def record_batch_of(
    columns: Mapping[str, pa.Array], schema: pa.Schema, parser: ValueParser | None
) -> pa.RecordBatch:
    """Columns as a record batch of a schema.

    Args:
        columns: The columns of the schema, but `UNPARSED`, with values as bytes or text.
        schema: The schema.
        parser: What makes structs of the values; None where these stay bytes or text.

    Raises:
        PipelineError: A text is no UTF-8.
    """
    arrays = dict(columns)
    if parser is not None:
        values = arrays["value"]
        structs = parser.parse(values, schema.field("value").type)
        arrays |= {"value": structs, UNPARSED: unparsed_values(values, structs)}
    return pa.RecordBatch.from_arrays(
        [column_as(field.name, arrays[field.name], field.type) for field in schema], schema=schema
    )


def column_as(name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column of bytes as texts, where that was asked for.

    Raises:
        PipelineError: They are no UTF-8.
    """
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise PipelineError(
            "UPR_NO_TEXT",
            f"the column {name} was asked for as string, and holds bytes that are no UTF-8: ask "
            f"for it as binary ({error})",
        ) from error


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _codes(chunk: Chunk) -> pa.Array:
    return pa.Array.from_buffers(pa.int8(), chunk.count, [None, pa.py_buffer(chunk.operations)])


def _seqs(chunk: Chunk) -> pa.Array:
    if chunk.seqs[-1] > _LONG_MAX:  # they rise
        raise _too_large("seq", chunk.seqs[-1])
    return _long(chunk.seqs)


def _check_cas(column: pa.Array) -> None:
    least = pc.min(column).as_py()
    if least < 0:
        raise _too_large("cas", least + (1 << 64))


def _too_large(name: str, value: int) -> PipelineError:
    return PipelineError(
        "UPR_TOO_LARGE",
        f"the column {name} holds {value}, and Spark has no type for it: leave the column out by "
        ".schema(...)",
    )


def _long(column: memoryview) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(column), [None, pa.py_buffer(column)])


def _unsigned(column: memoryview) -> pa.Array:
    column_array = pa.Array.from_buffers(pa.uint32(), len(column), [None, pa.py_buffer(column)])
    return column_array.cast(pa.int64())


def _bytes(offsets: memoryview, data: memoryview, validity: pa.Buffer | None) -> pa.Array:
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def resized(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Puts rows into batches that are neither small nor large; no batch is empty."""
    small_batches: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        size = batch.nbytes  # which goes through all columns
        is_small = batch.num_rows < SMALL_ROWS and size < RECORD_BATCH_BYTES
        if small_batches and (
            not is_small or rows + batch.num_rows > BATCH_ROWS or nbytes + size > RECORD_BATCH_BYTES
        ):
            yield _concatenated(small_batches)
            small_batches, rows, nbytes = [], 0, 0
        if not is_small:
            yield from _split(batch, size)
        elif batch.num_rows:
            small_batches.append(batch)
            rows += batch.num_rows
            nbytes += size
    if small_batches:
        yield _concatenated(small_batches)


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    # Arrow would copy a single batch, too.
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _split(batch: pa.RecordBatch, nbytes: int) -> Iterator[pa.RecordBatch]:
    count = max(-(-batch.num_rows // BATCH_ROWS), -(-nbytes // RECORD_BATCH_BYTES))
    size = max(1, -(-batch.num_rows // count))
    for start in range(0, batch.num_rows, size):
        yield batch.slice(start, size)
