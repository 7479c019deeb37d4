"""Rows of a DataFrame as operations: columns of keys, values and the rest, without the rows that
cannot be any."""

from __future__ import annotations

from typing import Any, Final

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from upr_protocol.client.core.key_lookup import counter_delta
from upr_protocol.errors import Status
from upr_protocol.ids import Operation
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from upr_protocol.spark.texts import TEXT, column_texts, json_objects
from upr_protocol.spark.write_options import ColumnPath, WriteOptions, operation_word

Mask = NDArray[np.bool_]

WORDS: Final = {
    "set": Operation.SET,
    "upsert": Operation.SET,
    "add": Operation.ADD,
    "insert": Operation.ADD,
    "replace": Operation.REPLACE,
    "delete": Operation.DELETE,
    "increment": Operation.INCREMENT,
    "decrement": Operation.DECREMENT,
}
"""What the operation column may say, in whatever case."""

_COUNTS: Final = (Operation.INCREMENT, Operation.DECREMENT)

ROW_BYTES: Final = 256
"""What a rejected row takes in memory beside its key and value, about."""

_DAY_S: Final = 24 * 3600
_SECOND_US: Final = 1_000_000
"""Spark's timestamps are microseconds, whatever their time zone; its dates are days."""

_U32_MAX: Final = (1 << 32) - 1
_U64_MAX: Final = (1 << 64) - 1

WRITE_COLUMNS: Final = {"op": pa.uint8(), "key": TEXT, "value": TEXT}
OPTIONAL_COLUMNS: Final = {"cas": pa.uint64(), "flags": pa.uint32(), "expiry": pa.uint32()}


@attrs.frozen
class RejectedRow:
    """A row that is not written.

    Attributes:
        status: The reason as a code.
        reason: And as a sentence.
        operation: What was to be done, in the words of the API.
        key: Its key; None for none.
        value: Its value; None for none.
    """

    status: Status
    reason: str
    operation: str
    key: bytes | None
    value: bytes | None

    @property
    def nbytes(self) -> int:
        """What it takes in memory, about."""
        return ROW_BYTES + len(self.key or b"") + len(self.value or b"")


class _Problems:
    """The first problem of each row, by its number among those that were found."""

    def __init__(self, count: int) -> None:
        self._first_problems = np.zeros(count, np.uint8)
        self.reasons: list[tuple[Status, str]] = [(Status.OK, "")]

    def add(self, rows: Mask, status: Status, reason: str) -> None:
        if rows.any():
            self._first_problems[rows & (self._first_problems == 0)] = len(self.reasons)
            self.reasons.append((status, reason))

    @property
    def good(self) -> Mask:
        mask: Mask = self._first_problems == 0
        return mask

    def bad(self) -> list[tuple[int, Status, str]]:
        return [
            (int(index), *self.reasons[self._first_problems[index]])
            for index in np.flatnonzero(self._first_problems)
        ]


def encode(
    batch: pa.RecordBatch, options: WriteOptions
) -> tuple[pa.RecordBatch, list[RejectedRow]]:
    """A batch of rows as operations, in their order.

    Args:
        batch: The rows, as Spark hands them over.
        options: Which column is what.

    Returns:
        Columns `op`, `key` and `value`, and those of `cas`, `flags` and `expiry` that are in use,
        without any null; and the rows that are left out.
    """
    problems = _Problems(batch.num_rows)
    operations = _operations(batch, options, problems)
    keys = _keys(batch, options)
    key_bytes = _lengths(keys)
    problems.add(_nulls(keys), Status.BAD_KEY, "the key is null")
    problems.add(
        (key_bytes == 0) | (key_bytes > KEY_BYTES_MAX),
        Status.BAD_KEY,
        f"a key has 1 to {KEY_BYTES_MAX} bytes",
    )
    values = _values(batch, options, operations, problems)
    columns = [_bytes_array(operations), keys, _with_deltas(values, operations, problems)]
    names = list(WRITE_COLUMNS)
    for name, column, limit in (
        ("cas", options.cas_column, _U64_MAX),
        ("flags", options.flags_column, _U32_MAX),
        ("expiry", options.expiry_column, _U32_MAX),
    ):
        if column is not None:
            numbers = _numbers(_column(batch, column), name, limit, problems)
            columns.append(pa.array(numbers).cast(OPTIONAL_COLUMNS[name]))
            names.append(name)
    rows = pa.RecordBatch.from_arrays(columns, names=names)
    problem_rows = problems.bad()
    if not problem_rows:
        return rows, []
    rejected_rows = [
        RejectedRow(
            status,
            reason,
            operation_word(Operation(operations[index]), options.operation),
            keys[index].as_py(),
            values[index].as_py(),
        )
        for index, status, reason in problem_rows
    ]
    return rows.filter(pa.array(problems.good)), rejected_rows


def _bytes_array(numbers: NDArray[np.uint8]) -> pa.Array:
    # `pa.array` imports pandas.
    return pa.Array.from_buffers(pa.uint8(), len(numbers), [None, pa.py_buffer(numbers)])


def _column(batch: pa.RecordBatch, path: ColumnPath) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(path[0]))
    for name in path[1:]:
        # A field is null where its struct is.
        column = column.flatten()[column.type.get_field_index(name)]
    return column


def _keys(batch: pa.RecordBatch, options: WriteOptions) -> pa.Array:
    """The keys; null where one of their columns is."""
    parts = [column_texts(_column(batch, path)) for path in options.key_columns]
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, pa.scalar(options.key_separator.encode(), TEXT))


def _nulls(column: pa.Array) -> Mask:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    mask: Mask = column.is_null().to_numpy(zero_copy_only=False)
    return mask


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """How many bytes each of a column of texts has; of one that is null, any number."""
    if not len(column):
        return np.zeros(0, np.int64)
    # No function of Arrow is used that takes a number of Python's: the first of these imports
    # pandas.
    offsets: NDArray[np.int64] = np.frombuffer(
        column.buffers()[1], np.int64, len(column) + 1, 8 * column.offset
    )
    return offsets[1:] - offsets[:-1]


def _operations(
    batch: pa.RecordBatch, options: WriteOptions, problems: _Problems
) -> NDArray[np.uint8]:
    if options.operation is not None:
        return np.full(batch.num_rows, options.operation, np.uint8)
    assert options.operation_column is not None
    # A string of Spark's may have any bytes: a function for UTF-8 would fail the task.
    words = pc.ascii_lower(_column(batch, options.operation_column).cast(pa.string()))
    known_words = pa.array(list(WORDS), pa.string())
    word_index = pc.index_in(words, known_words).fill_null(len(WORDS)).to_numpy()
    problems.add(
        word_index == len(WORDS),
        Status.BAD_ARGUMENT,
        f"unknown operation; use one of {', '.join(WORDS)}",
    )
    code_of_word = np.array([*WORDS.values(), Operation.SET], np.uint8)
    codes: NDArray[np.uint8] = code_of_word[word_index]
    return codes


def _values(
    batch: pa.RecordBatch,
    options: WriteOptions,
    operations: NDArray[np.uint8],
    problems: _Problems,
) -> pa.Array:
    if options.operation is Operation.DELETE:
        return pa.repeat(pa.scalar(b"", TEXT), batch.num_rows)
    columns = [_column(batch, path) for path in options.value_columns]
    if options.value_is_object:
        values = json_objects(columns, [path[-1] for path in options.value_columns])
    else:
        values = column_texts(columns[0])
    deletes = operations == Operation.DELETE
    if deletes.any():
        values = pc.if_else(pa.array(deletes), pa.scalar(b"", TEXT), values)
    problems.add(_nulls(values), Status.BAD_ARGUMENT, "the value is null")
    problems.add(
        _lengths(values) > VALUE_BYTES_MAX,
        Status.TOO_LARGE,
        f"a value has at most {VALUE_BYTES_MAX >> 20} MiB",
    )
    return values


def _with_deltas(values: pa.Array, operations: NDArray[np.uint8], problems: _Problems) -> pa.Array:
    """The values, with those of counters as the protocol has them."""
    counts = np.isin(operations, _COUNTS)
    if not counts.any():
        return values
    deltas: list[Any] = values.to_pylist()
    wrong = np.zeros(len(deltas), np.bool_)
    for index in np.flatnonzero(counts).tolist():
        text = deltas[index] or b""
        delta = int(text) if text.isdigit() and len(text) <= 20 else _U64_MAX + 1
        if delta > _U64_MAX:
            wrong[index] = True
        else:
            deltas[index] = counter_delta(Operation(int(operations[index])), delta, None, True)
    problems.add(
        wrong, Status.NOT_A_NUMBER, "a counter changes by a whole number from 0 to 2**64 - 1"
    )
    return pa.array(deltas, TEXT)


def _numbers(column: pa.Array, name: str, limit: int, problems: _Problems) -> NDArray[np.int64]:
    """A column of whole numbers, or of times as seconds since 1970; 0 where it is null."""
    kind = column.type
    if pa.types.is_date(kind):
        column = column.cast(pa.int32())
    numbers: NDArray[np.int64] = column.cast(pa.int64()).fill_null(0).to_numpy().copy()
    # Arrow's functions for times are not used: none takes all of Spark's times.
    if pa.types.is_date(kind):
        numbers *= _DAY_S
    elif pa.types.is_timestamp(kind):
        numbers //= _SECOND_US
    wrong = numbers < 0
    if limit == _U32_MAX:
        wrong |= numbers > limit
    problems.add(wrong, Status.BAD_ARGUMENT, f"{name} is a number from 0 to {limit}")
    numbers[wrong] = 0
    return numbers
