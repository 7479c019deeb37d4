"""Files as rows: CSV, JSON Lines, Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

import attrs
import msgspec

from upr_protocol.errors import UprError
from upr_protocol.limits import VALUE_BYTES_MAX

FORMATS: Final[Mapping[str, str]] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
"""Formats by the ends of files' names."""

_PARQUET_ROWS: Final = 10_000
_SURROGATES: Final = "surrogateescape"


class FileError(UprError):
    """The file cannot be read as what it is said to be; the message says what to do."""


@attrs.frozen
class Row:
    """One row.

    Attributes:
        line: The line it begins on, from 1; in Parquet, which has no lines, the row's number.
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
        line: As in `Row`.
        reason: What is wrong with it.
    """

    line: int
    reason: str


Rows = Iterator[Row | BadRow]


def read_rows(source: IO[bytes], form: str, null: Sequence[str] = ()) -> tuple[list[str], Rows]:
    """The columns of a file, as far as it names them up front, and its rows as they are read.

    Args:
        source: The file, from its beginning.
        form: `csv`, `jsonl` or `parquet`.
        null: Texts that stand for a missing value. In CSV there is no other way to say it.

    Raises:
        FileError: It is not of that format at all. Single bad rows are given as such.
    """
    missing = frozenset(null)
    if form == "csv":
        return _read_csv(source, missing)
    if form == "jsonl":
        return [], _read_json_lines(source, missing)
    return _read_parquet(source, missing)


def _read_csv(source: IO[bytes], null: frozenset[str]) -> tuple[list[str], Rows]:
    csv.field_size_limit(VALUE_BYTES_MAX)
    # Bytes that are not UTF-8 become surrogates, which no JSON can hold: the row that has them is
    # bad, and the next is not.
    lines = (line.decode("utf-8", _SURROGATES) for line in source)
    reader = csv.reader(lines, strict=True)
    try:
        columns = next(reader, None)
    except csv.Error as error:
        raise FileError(f"the first line is no CSV header: {error}") from error
    if not columns:
        raise FileError("the file is empty: a CSV file begins with a line of column names")
    columns[0] = columns[0].removeprefix("\ufeff")
    for column in columns:
        if columns.count(column) > 1:
            raise FileError(f"two columns are called {column!r}: give each a name of its own")
    return columns, _csv_rows(reader, columns, null)


def _csv_rows(reader: Any, columns: list[str], null: frozenset[str]) -> Rows:
    count = len(columns)
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield BadRow(line, f"no CSV: {error}")
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
    for line, data in enumerate(source, 1):
        text = data.strip()
        if not text:
            continue
        try:
            fields = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield BadRow(line, f"no JSON: {error}")
            continue
        if not isinstance(fields, dict):
            yield BadRow(line, 'a line holds one JSON object, as in {"name": "value"}')
            continue
        if null:
            fields = {
                name: None if isinstance(value, str) and value in null else value
                for name, value in fields.items()
            }
            yield _row(line, fields)
        else:
            # As it stands: a number with more digits than a float has keeps them.
            yield Row(line, fields, text)


def _read_parquet(source: IO[bytes], null: frozenset[str]) -> tuple[list[str], Rows]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise FileError(
            "reading Parquet needs pyarrow: pip install 'upr[arrow]', or convert the file to CSV"
        ) from error
    try:
        file = pq.ParquetFile(source)
        columns = list(file.schema_arrow.names)
    except (pa.ArrowException, OSError) as error:
        raise FileError(f"this is no Parquet file: {error}") from error

    def rows() -> Rows:
        number = 0
        batches = file.iter_batches(batch_size=_PARQUET_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise FileError(f"the file is damaged behind row {number}: {error}") from error
            if batch is None:
                return
            for fields in batch.to_pylist():
                number += 1
                if null:
                    fields = {
                        name: None if isinstance(value, str) and value in null else value
                        for name, value in fields.items()
                    }
                yield _row(number, fields)

    return columns, rows()


def _row(line: int, fields: Mapping[str, Any]) -> Row | BadRow:
    try:
        return Row(line, fields, _encode(fields))
    except UnicodeEncodeError:
        return BadRow(line, "the text is not UTF-8")
    except TypeError as error:
        return BadRow(line, f"it has no form as JSON: {error}")


_encode = msgspec.json.Encoder().encode
