"""Keys and values out of the columns of a DataFrame.

Each type has one text, so that a key is the same whoever writes it:

| type | text |
|---|---|
| string, binary | its bytes; a string's in UTF-8 |
| whole numbers | decimal, `-5` |
| decimal | decimal with all its places, `1.50` |
| float, double | the shortest that reads back the same: `1`, `0.1`, `1e+20`, `nan`, `inf` |
| boolean | `true`, `false` |
| date | `2024-01-31` |
| timestamp | `2024-01-31T12:00:00.000000Z`, in UTC whatever the session's time zone |
| timestamp without time zone | the same without `Z` |
| struct, array, map | JSON, without spaces; in it binary is base64, `nan` and `inf` are null |

All but the last are made a column at a time; JSON is made row by row, at some 2 µs each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types

SIMPLE_TYPES: Final = (
    types.StringType,
    types.CharType,
    types.VarcharType,
    types.BinaryType,
    types.IntegralType,
    types.FractionalType,
    types.BooleanType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
    types.StructType,
    types.ArrayType,
    types.MapType,
    types.NullType,
)
"""Spark's types that have a text here."""

TEXT: Final = pa.large_binary()
"""The type of a column of texts."""

_PLACES_MAX: Final = 6
"""A decimal with more places is written with an exponent by Arrow, when it is small."""

_to_json: Final = msgspec.json.Encoder(decimal_format="number").encode


def texts(column: pa.Array) -> pa.Array:
    """A column's texts, as large binary; null stays null. See the module."""
    kind = column.type
    if pa.types.is_nested(kind):
        return _json(column.to_pylist(), _plain(kind))
    if pa.types.is_decimal(kind) and kind.scale > _PLACES_MAX:
        decimals = [None if value is None else f"{value:f}" for value in column.to_pylist()]
        return pa.array(decimals, pa.large_string()).cast(TEXT)
    if pa.types.is_timestamp(kind):
        if kind.tz is not None:
            column = column.cast(pa.timestamp("us", "UTC"))
        column = pc.replace_substring(column.cast(pa.string()), " ", "T", max_replacements=1)
    if not _is_octets(column.type):
        column = column.cast(pa.large_string())
    return column.cast(TEXT)


def objects(columns: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """A JSON object a row, of several columns; large binary, none null."""
    pairs = zip(names, columns, strict=True)
    kind = pa.struct([pa.field(name, column.type) for name, column in pairs])
    rows = pa.StructArray.from_arrays(columns, fields=list(kind))
    return _json(rows.to_pylist(), _plain(kind))


def _is_octets(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )


def _json(rows: list[Any], plain: Callable[[Any], Any]) -> pa.Array:
    return pa.array([None if row is None else _to_json(plain(row)) for row in rows], TEXT)


def _plain(kind: pa.DataType) -> Callable[[Any], Any]:
    """How a value of a type, as Arrow gives it, is to be handed to the JSON encoder."""
    if pa.types.is_struct(kind):
        fields = [(field.name, _plain(field.type)) for field in kind]
        return _unless_null(lambda row: {name: plain(row[name]) for name, plain in fields})
    if pa.types.is_map(kind):
        item = _plain(kind.item_type)
        key = _plain(kind.key_type)
        return _unless_null(lambda pairs: {_name(key(k)): item(value) for k, value in pairs})
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = _plain(kind.value_type)
        return _unless_null(lambda values: [item(value) for value in values])
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return _unless_null(lambda time: time.astimezone(UTC))
    return _as_it_is


def _unless_null(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else plain(value)


def _as_it_is(value: Any) -> Any:
    return value


def _name(key: Any) -> str:
    """The name that a map's key has in an object."""
    return key if isinstance(key, str) else _to_json(key).decode().strip('"')
