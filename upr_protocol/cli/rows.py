"""Files as rows (CSV, JSON Lines, Parquet), and the keys of rows."""

from __future__ import annotations

import csv
import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import IO, Any, Final, cast

import attrs
import msgspec

from upr_protocol.errors import UprError
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

FORMATS: Final[Mapping[str, str]] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
"""Formats by file name extension."""

_LINE_BYTES_MAX: Final = 4 * VALUE_BYTES_MAX
"""A line is held in memory whole. Quotes, escapes and spaces may make it longer than its value."""

_PARQUET_ROWS: Final = 10_000
_SURROGATES: Final = "surrogateescape"


class FileError(UprError):
    """The file does not have the expected format; the message says what to do."""


@attrs.frozen
class Row:
    """One row.

    Attributes:
        line: The line on which it begins, counted from 1; in Parquet the row's number.
        fields: Its values by column.
        json: The row as JSON.
    """

    line: int
    fields: Mapping[str, Any]
    json: bytes


@attrs.frozen
class BadRow:
    """A row that cannot be read.

    Attributes:
        line: The line on which it begins, counted from 1; in Parquet the row's number.
        reason: Why not.
    """

    line: int
    reason: str


Rows = Iterator[Row | BadRow]


def read_rows(source: IO[bytes], form: str, null: Sequence[str] = ()) -> tuple[list[str], Rows]:
    """The columns of a file, empty if its header does not name them, and its rows, read lazily.

    Args:
        source: The file, from its beginning.
        form: `csv`, `jsonl` or `parquet`.
        null: Texts that stand for a missing value; CSV has no other way to say so.

    Raises:
        FileError: The file as a whole does not have that format. A bad row is a `BadRow`.
    """
    null_texts = frozenset(null)
    if form == "csv":
        return _read_csv(source, null_texts)
    if form == "jsonl":
        return [], _read_json_lines(source, null_texts)
    return _read_parquet(source, null_texts)


class _LongLineError(Exception):
    """A line is longer than `_LINE_BYTES_MAX`."""

    def __str__(self) -> str:
        return f"it has more than {_LINE_BYTES_MAX >> 20} MiB, the limit of a line"


class _Lines:
    """The lines of a file. In place of one that is too long it raises `_LongLineError`, and then
    goes on behind it.

    Attributes:
        count: How many lines were given or refused.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self.count = 0
        self._read = source.readline
        self._is_inside_line = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        # The rest of the line is skipped later: it may have no end, and a caller that stops at the
        # error does not need it skipped.
        while self._is_inside_line:
            self._is_inside_line = _is_cut(self._read(_LINE_BYTES_MAX + 1))
        line = self._read(_LINE_BYTES_MAX + 1)
        if not line:
            raise StopIteration
        self.count += 1
        if _is_cut(line):
            self._is_inside_line = True
            raise _LongLineError
        return line


def _is_cut(line: bytes) -> bool:
    return len(line) > _LINE_BYTES_MAX and not line.endswith(b"\n")


def _read_csv(source: IO[bytes], null: frozenset[str]) -> tuple[list[str], Rows]:
    csv.field_size_limit(VALUE_BYTES_MAX)
    # Bytes that are not UTF-8 become surrogates, which JSON cannot encode: only the row that holds
    # them is bad.
    lines = _Lines(source)
    texts = map(partial(str, encoding="utf-8", errors=_SURROGATES), lines)
    try:
        # Before the quotes are read: they may be around the first name.
        first_line = next(texts, "").removeprefix("\ufeff")
        reader = csv.reader(chain((first_line,), texts), strict=True)
        columns = next(reader, None)
    except (csv.Error, _LongLineError) as error:
        raise FileError(
            f"the first line is not a CSV header: {error}; begin the file with the columns' names"
        ) from error
    if not columns:
        raise FileError("the file is empty: a CSV file begins with a line of column names")
    _check_names_differ(columns)
    return columns, _csv_rows(reader, lines, columns, null)


def _check_names_differ(columns: Sequence[str]) -> None:
    """Makes sure that a row can hold every column: of two with one name it would hold the last.

    Raises:
        FileError: Two have one name.
    """
    names = set[str]()
    for column in columns:
        if column in names:
            raise FileError(f"two columns are named {column!r}: rename one of them")
        names.add(column)


def _csv_rows(reader: Any, lines: _Lines, columns: list[str], null: frozenset[str]) -> Rows:
    count = len(columns)
    while True:
        line = lines.count + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except (csv.Error, _LongLineError) as error:
            yield BadRow(line, f"not CSV: {error}")
            continue
        if not values:
            continue
        if len(values) != count:
            yield BadRow(line, f"{len(values)} values for {count} columns")
            continue
        if null:
            values = [None if value in null else value for value in values]
        fields = dict(zip(columns, values, strict=True))
        yield _row(line, fields)


def _read_json_lines(source: IO[bytes], null: frozenset[str]) -> Rows:
    decode = msgspec.json.Decoder().decode
    lines = _Lines(source)
    while True:
        try:
            text = next(lines).strip()
        except StopIteration:
            return
        except _LongLineError as error:
            yield BadRow(lines.count, str(error))
            continue
        line = lines.count
        if not text:
            continue
        try:
            fields = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield BadRow(line, f"not JSON: {error}")
            continue
        if not isinstance(fields, dict):
            yield BadRow(line, 'expected one JSON object per line, as in {"name": "value"}')
            continue
        if null and any(isinstance(value, str) and value in null for value in fields.values()):
            yield _row(line, _with_nulls(fields, null))
        else:
            # The text is stored unchanged: encoding again would round long numbers to floats.
            yield Row(line, fields, text)


def _read_parquet(source: IO[bytes], null: frozenset[str]) -> tuple[list[str], Rows]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise FileError(
            "reading Parquet needs pyarrow: pip install 'upr-server[arrow]', or convert the file "
            "to CSV"
        ) from error
    try:
        file = pq.ParquetFile(source)
        columns = list(file.schema_arrow.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"this is not a Parquet file: {error}; name its format with --format"
        ) from error
    _check_names_differ(columns)

    def rows() -> Rows:
        row = 0
        batches = file.iter_batches(batch_size=_PARQUET_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise FileError(
                    f"the file is damaged after row {row}: {error}; make it and load it again"
                ) from error
            if batch is None:
                return
            for fields in _fields_of_rows(batch):
                row += 1
                if isinstance(fields, str):
                    yield BadRow(row, fields)
                else:
                    yield _row(row, _with_nulls(fields, null) if null else fields)

    return columns, rows()


def _fields_of_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The values of each row of a record batch by column; in place of a row that has a value which
    Python cannot hold, as a date after the year 9999, the reason."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except Exception:  # noqa: BLE001  whatever the type of the column has it raise
        for index in range(batch.num_rows):
            try:
                (fields,) = batch.slice(index, 1).to_pylist()
            except Exception as error:  # noqa: BLE001
                yield f"Python cannot hold it: {error}"
            else:
                yield fields
    else:
        yield from rows


def _with_nulls(fields: Mapping[str, Any], null: frozenset[str]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, str) and value in null else value
        for name, value in fields.items()
    }


def _row(line: int, fields: Mapping[str, Any]) -> Row | BadRow:
    try:
        return Row(line, fields, _encode(fields))
    except UnicodeEncodeError:
        return BadRow(line, "the text is not UTF-8")
    except TypeError as error:
        return BadRow(line, f"JSON cannot hold it: {error}")


def _text_of_time(value: Any) -> str:
    """The text of a value that JSON has no type for, if it is one of pandas' times: pyarrow makes
    them of nanoseconds where pandas is installed. Their zone is written as that of other times."""
    if isinstance(value, dt.datetime | dt.timedelta):
        text: str = cast("Any", value).isoformat()
        return f"{text.removesuffix('+00:00')}Z" if text.endswith("+00:00") else text
    raise TypeError(f"it has no text for a {type(value).__name__}")


_encode = msgspec.json.Encoder(enc_hook=_text_of_time).encode


class KeyMaker:
    """Makes a row's key from its columns.

    Args:
        columns: The columns of the key, in order.
        separator: The text between two columns.
    """

    __slots__ = ("_columns", "_separator")

    def __init__(self, columns: Sequence[str], separator: str = ":") -> None:
        self._columns = tuple(columns)
        self._separator = separator.encode(errors=_SURROGATES)

    def key(self, fields: Mapping[str, Any]) -> bytes | None:
        """The key of the row with these `fields`; None if one of its columns is missing or empty.

        Raises:
            ValueError: The key would be too long, or a column holds a list or an object.
        """
        parts = []
        for column in self._columns:
            part = _part(column, fields.get(column))
            if not part:
                return None
            parts.append(part)
        key = self._separator.join(parts)
        if len(key) > KEY_BYTES_MAX:
            raise ValueError(f"its key has {len(key)} bytes; the limit is {KEY_BYTES_MAX}")
        return key


def _part(column: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if value is None:
        return b""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int | float):
        return str(value).encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, dt.date | dt.time):
        return value.isoformat().encode()
    raise ValueError(f"{column} holds a {type(value).__name__}, which cannot be part of a key")
