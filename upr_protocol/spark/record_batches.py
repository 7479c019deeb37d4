"""Chunks as Arrow record batches: the columns that were asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from upr_protocol.chunk import Chunk
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.gathered_columns import GATHERED_COLUMNS, GatheredColumns
from upr_protocol.spark.json_values import ValueParser, parser_of, unparsed_values
from upr_protocol.spark.read_tasks import RollbackMarker
from upr_protocol.spark.scalars import (
    bool_scalar,
    int8_scalar,
    int32_array,
    int32_scalar,
    int64_array,
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


@attrs.frozen
class RowSnapshot:
    """The snapshot of a partition that rows are of.

    Attributes:
        partition: The partition.
        history: The history ID, as text.
        start: Where the snapshot begins.
        end: Where it ends.
    """

    partition: PartitionId
    history: str
    start: SeqNo
    end: SeqNo


class RecordBatchBuilder:
    """Makes record batches of the columns that a schema names, each of `BATCH_ROWS` rows while
    there are as many. Nothing is made of the columns that are not asked for.

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
        needed_names = {*self._names, *(() if key is None else ("key",))}
        if needed_names & {"op", "deleted", "value"}:
            needed_names.add("operation")
        self._gathered = GatheredColumns(
            [name for name in GATHERED_COLUMNS if name in needed_names],
            BATCH_ROWS,
            RECORD_BATCH_BYTES,
        )
        self._repeated = RepeatedColumns()
        self._snapshots: list[RowSnapshot] = []
        self._row_counts: list[int] = []
        """How many rows there are of each snapshot."""
        self._count = 0

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
            pa.array([values[field.name]], pa.binary() if field.name == "key" else field.type)
            for field in self._schema
        ]
        return _record_batch(columns, self._schema)

    def add(self, chunk: Chunk, snapshot: RowSnapshot) -> Iterator[pa.RecordBatch]:
        """Copies the rows of a chunk, which is not referred to afterwards. Yields the batches that
        are full before that.

        Args:
            chunk: The next rows.
            snapshot: What they are of.

        Raises:
            PipelineError: See `take_rest`.
        """
        low = 0
        while True:
            high = self._end_of_fitting(chunk, low)
            if low < high:
                self._add_rows(chunk, low, high, snapshot)
            if high == chunk.count:
                return
            low = high
            yield from self.take_rest()

    def _end_of_fitting(self, chunk: Chunk, low: int) -> int:
        """The end of the rows from `low` on that fit in the batch: at least one fits in an empty
        batch."""
        high = min(chunk.count, low + BATCH_ROWS - self._count)
        bytes_left = RECORD_BATCH_BYTES - self._gathered.nbytes
        if chunk.key_length + chunk.value_length <= bytes_left:
            return high
        keys, values = chunk.key_offsets, chunk.value_offsets
        bytes_end = keys[low] + values[low] + bytes_left
        fitting_end = bisect_right(
            range(high + 1), bytes_end, lo=low + 1, key=lambda row: keys[row] + values[row]
        )
        return fitting_end - 1 if self._count else max(fitting_end - 1, low + 1)

    def _add_rows(self, chunk: Chunk, low: int, high: int, snapshot: RowSnapshot) -> None:
        self._gathered.add(chunk, low, high)
        if self._snapshots and self._snapshots[-1] is snapshot:
            self._row_counts[-1] += high - low
        else:
            self._snapshots.append(snapshot)
            self._row_counts.append(high - low)
        self._count += high - low

    def take_rest(self) -> Iterator[pa.RecordBatch]:
        """Yields what was added and not yielded yet, those rows of it that have the key if there is
        one; nothing if that is no row.

        Raises:
            PipelineError: A number does not fit in 63 bits, a text is no UTF-8, or a column that is
                to have no nulls has some.
        """
        if not self._count:
            return
        gathered = self._gathered.take()
        columns = {name: self._column(name, gathered) for name in self._names if name != UNPARSED}
        self._snapshots, self._row_counts = [], []
        self._count = 0
        if self._key is not None:
            is_selected = pc.equal(gathered["key"], self._key)
            columns = {name: column.filter(is_selected) for name, column in columns.items()}
            if not is_selected.true_count:
                return
        yield record_batch_of(columns, self._schema, self._parser)

    def _column(self, name: str, gathered: Mapping[str, pa.Array]) -> pa.Array:
        """A column of all rows that were added, of which `gathered` has those that chunks have."""
        if name in _OF_SNAPSHOT:
            return self._snapshot_column(name)
        if name == "bucket":
            return self._repeated.column(name, self._bucket, self._count)
        if name in ("op", "deleted", "value"):
            return self._operation_column(name, gathered)
        column = gathered[name]
        if name in ("seq", "cas"):
            _check_long(name, column)
        elif name in ("flags", "expiry"):
            if _is_all(column, b"\0"):
                return self._repeated.column(name, 0, self._count)
            return column.cast(pa.int64())
        return column

    def _operation_column(self, name: str, gathered: Mapping[str, pa.Array]) -> pa.Array:
        codes = gathered["operation"]
        if _is_all(codes, _SET_BYTE):
            if name == "value":
                return gathered[name]
            return self._repeated.column(name, "set" if name == "op" else False, self._count)
        if name == "op":
            return _OPERATION_NAMES.take(codes)
        if name == "deleted":
            return pc.not_equal(codes, _SET)
        _, offsets, data = gathered[name].buffers()
        validity = pc.equal(codes, _SET).buffers()[1]
        return pa.Array.from_buffers(pa.binary(), self._count, [validity, offsets, data])

    def _snapshot_column(self, name: str) -> pa.Array:
        value_of, array_of = _OF_SNAPSHOT[name]
        values = [value_of(snapshot) for snapshot in self._snapshots]
        if len(values) == 1:
            return self._repeated.column(name, values[0], self._count)
        indices = np.repeat(np.arange(len(values), dtype=np.int32), self._row_counts)
        return array_of(values).take(
            pa.Array.from_buffers(pa.int32(), self._count, [None, pa.py_buffer(indices)])
        )


class RepeatedColumns:
    """Columns with the same value in every row. Each is made once, as long as the longest batch,
    until its value changes."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[object, pa.Array]] = {}

    def column(self, name: str, value: str | int, count: int) -> pa.Array:
        """`count` rows of a value.

        Args:
            name: The column.
            value: Its value.
            count: How many rows.
        """
        old_value, column = self._columns.get(name, (None, None))
        if column is None or old_value != value or len(column) < count:
            column = pa.repeat(_SCALARS[name](value), count)
            self._columns[name] = value, column
        return column[:count]


_SET: Final = int8_scalar(Operation.SET)
_SET_BYTE: Final = bytes([Operation.SET])

_OF_SNAPSHOT: Final[
    dict[str, tuple[Callable[[RowSnapshot], Any], Callable[[Sequence[Any]], pa.Array]]]
] = {
    "partition": (lambda snapshot: snapshot.partition, int32_array),
    "history_id": (lambda snapshot: snapshot.history, text_array),
    "snapshot_start": (lambda snapshot: snapshot.start, int64_array),
    "snapshot_end": (lambda snapshot: snapshot.end, int64_array),
}
"""The columns that are the same in every row of a snapshot: what gives the value, and what makes a
column of such values."""

_SCALARS: Final[dict[str, Callable[[Any], pa.Scalar]]] = {
    "op": text_scalar,
    "bucket": text_scalar,
    "deleted": bool_scalar,
    "flags": int64_scalar,
    "expiry": int64_scalar,
    "partition": int32_scalar,
    "history_id": text_scalar,
    "snapshot_start": int64_scalar,
    "snapshot_end": int64_scalar,
}
"""What makes a value of a column that may be the same in every row."""


def _is_all(column: pa.Array, byte: bytes) -> bool:
    """Whether a column of numbers, none null, has this byte throughout. Bytes are compared many at
    a time; a call of `strip` looks at each."""
    data: bytes = column.buffers()[1].to_pybytes()
    return data == byte * len(data)


def record_batch_of(
    columns: Mapping[str, pa.Array], schema: pa.Schema, parser: ValueParser | None
) -> pa.RecordBatch:
    """Columns as a record batch of a schema.

    Args:
        columns: The columns of the schema, but `UNPARSED`, with values as bytes or text.
        schema: The schema.
        parser: What makes structs of the values; None where these stay bytes or text.

    Raises:
        PipelineError: A text is no UTF-8, or a column that is to have no nulls has some.
    """
    arrays = dict(columns)
    if parser is not None:
        values = arrays["value"]
        structs = parser.parse(values, schema.field("value").type)
        arrays |= {"value": structs, UNPARSED: unparsed_values(values, structs)}
    return _record_batch([arrays[field.name] for field in schema], schema)


def _record_batch(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    for field, column in zip(schema, columns, strict=True):
        if column.null_count and not field.nullable:
            # Spark would rely on it, and end with an error of Java's.
            raise PipelineError(
                "UPR_OPTION",
                f"the column {field.name} is NOT NULL in the schema, and has nulls: a deletion has "
                "no value, and a value that does not fit its struct is null. Leave NOT NULL out",
            )
    return pa.RecordBatch.from_arrays(
        [
            column_as(field.name, column, field.type)
            for field, column in zip(schema, columns, strict=True)
        ],
        schema=schema,
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


def _check_long(name: str, column: pa.Array) -> None:
    # A call of Arrow's function takes longer than NumPy's whole pass over a batch.
    least = int(np.frombuffer(column.buffers()[1], np.int64).min())
    if least < 0:
        raise too_large_error(name, least + (1 << 64))


def too_large_error(name: str, number: int) -> PipelineError:
    """The error of a column that has a number of more than 63 bits."""
    return PipelineError(
        "UPR_TOO_LARGE",
        f"the column {name} holds {number}, and Spark has no type for it: leave the column out by "
        ".schema(...)",
    )


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
