r"""Keys and values out of the columns of a DataFrame.

Each type has one text, so that a key is the same whoever writes it. It is the text that Spark's
`CAST(... AS STRING)` and `to_json` write, but for times, which lose nothing here:

| type | text |
|---|---|
| string, binary | its bytes; a string's in UTF-8 |
| whole numbers | decimal, `-5` |
| decimal | decimal with all its places, `1.50` |
| float, double | the shortest that reads back the same: `5.0`, `1.0E20`, `NaN`, `-Infinity` |
| boolean | `true`, `false` |
| date | `2024-01-31` |
| timestamp | `2024-01-31T12:00:00.000000Z`, in UTC whatever the session's time zone |
| timestamp without time zone | the same without `Z` |
| struct, array, map | JSON, without spaces and with the fields that are null |

In JSON, binary is base64, and `"NaN"`, `"Infinity"` and `"-Infinity"` are strings. Other types have
no text, as VARIANT and intervals.

A few texts are others than Spark's. Keys have been written with them, so they stay:

- Java before 19 writes some floats with more digits than they need: `9.999999999999999E22` is
  `1.0E23` here.
- `to_json` writes small decimals with an exponent, `1E-8`, and here they have all their places.
- `to_json` escapes control characters in capitals, `\u001F`; here it is `\u001f`.
- Keys of maps in JSON are the texts of their type. Spark has no text for some, as a date is its
  number of days there.
- A date or timestamp after the year 9999 has no plus.

A string that is not UTF-8 stays as it is. In JSON, U+FFFD stands for what is wrong in it, as in
that of `to_json`.

All texts are made a column at a time: 17 columns as an object cost some 3 µs a row.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types
from pyspark.sql.types import DataType

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
    types.NullType,
)
"""Spark's types that have a text here, beside those made of others."""

TEXT: Final = pa.large_binary()
"""The type of a column of texts."""

_STRING: Final = pa.large_string()

_PLACES_MAX: Final = 6
"""A decimal with more places is written with an exponent by Arrow, when it is small."""

_ARROW_DAYS_MIN: Final = -12687428
_ARROW_DAYS_END: Final = 11248738
"""The first days of the years -32767 and 32768, in days since 1970. Arrow computes years in 16
bits: its texts of times before and behind these are of other years, or say `out of range`."""

_DAY_US: Final = 24 * 3600 * 1_000_000

_PLAIN_FLOAT_MIN: Final = 1e-3
_PLAIN_FLOAT_END: Final = 1e7
"""Spark writes floats in this range without an exponent."""

_TO_ESCAPE: Final = r'[\x00-\x1f"\\]'
_ESCAPES: Final = {
    "\\": r"\\",  # first: the others bring backslashes
    **{
        character: msgspec.json.encode(character).decode()[1:-1]
        for character in ('"', *map(chr, range(32)))
    },
}
"""What JSON writes for a character of a string, by the character."""


def has_text(kind: DataType) -> bool:
    """Whether the values of a type of Spark's have a text here."""
    if isinstance(kind, types.StructType):
        return all(has_text(field.dataType) for field in kind)
    if isinstance(kind, types.ArrayType):
        return has_text(kind.elementType)
    if isinstance(kind, types.MapType):
        return has_text(kind.keyType) and has_text(kind.valueType)
    return isinstance(kind, SIMPLE_TYPES)


def column_texts(column: pa.Array) -> pa.Array:
    """A column's texts, as large binary; null stays null. See the module."""
    if pa.types.is_nested(column.type):
        column = pc.if_else(column.is_valid(), _json(column), pa.scalar(None, _STRING))
    elif not _is_bytes(column.type):
        column = _strings(column)
    return column.cast(TEXT)


def json_objects(columns: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """A JSON object a row, of several columns; large binary, none null."""
    return _object(columns, names).cast(TEXT)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _strings(column: pa.Array) -> pa.Array:
    """The texts of a column that is neither nested nor bytes; null stays null."""
    kind = column.type
    if pa.types.is_decimal(kind) and kind.scale > _PLACES_MAX:
        decimals = [None if value is None else f"{value:f}" for value in column.to_pylist()]
        return pa.array(decimals, _STRING)
    if pa.types.is_floating(kind):
        return _floats(column)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _times(column)
    return column.cast(_STRING)


def _times(column: pa.Array) -> pa.Array:
    """Dates and timestamps as `2024-01-31`, `2024-01-31T12:00:00.000000` and, with a time zone,
    `2024-01-31T12:00:00.000000Z`."""
    is_date = pa.types.is_date(column.type)
    zone = ""
    if not is_date and column.type.tz is not None:
        column, zone = column.cast(pa.timestamp("us", "UTC")), "Z"
    strings = pc.replace_substring(column.cast(_STRING), " ", "T", max_replacements=1)
    numbers = column.cast(pa.int32() if is_date else pa.int64())
    day = 1 if is_date else _DAY_US
    is_far = pc.or_(
        pc.less(numbers, _ARROW_DAYS_MIN * day), pc.greater_equal(numbers, _ARROW_DAYS_END * day)
    ).fill_null(False)
    if not pc.any(is_far).as_py():
        return strings
    far_numbers = numbers.filter(is_far).to_pylist()
    if is_date:
        texts = [str(np.datetime64(days, "D")) for days in far_numbers]
    else:
        # Seconds and microseconds are converted apart: NumPy takes the lowest number of
        # microseconds for no time.
        moments = [divmod(microseconds, 1_000_000) for microseconds in far_numbers]
        texts = [f"{np.datetime64(seconds, 's')}.{us:06d}{zone}" for seconds, us in moments]
    return pc.replace_with_mask(strings, is_far, pa.array(texts, _STRING))


def _floats(column: pa.Array) -> pa.Array:
    """Floats as Spark writes them: `5.0`, `0.1`, `1.0E20`, `NaN`, `-Infinity`."""
    strings = column.cast(_STRING)
    strings = pc.if_else(
        pc.match_substring(strings, "."),
        strings,
        _joined(strings, ".0"),
    )
    size = pc.abs(column)
    is_plain = pc.or_(
        pc.equal(size, 0),
        pc.and_(pc.greater_equal(size, _PLAIN_FLOAT_MIN), pc.less(size, _PLAIN_FLOAT_END)),
    )
    is_scientific = pc.invert(is_plain).fill_null(False)
    if not pc.any(is_scientific).as_py():
        return strings
    values = column.filter(is_scientific).to_numpy(zero_copy_only=False)
    return pc.replace_with_mask(
        strings, is_scientific, pa.array([_scientific(value) for value in values], _STRING)
    )


def _scientific(value: np.floating) -> str:
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    text = np.format_float_scientific(value, unique=True, trim="0", exp_digits=1)
    return text.replace("e+", "E").replace("e", "E")


# JSON, a column at a time. A null is the text `null`: an array of texts has none.


def _json(column: pa.Array) -> pa.Array:
    """Each value as JSON."""
    kind = column.type
    if pa.types.is_null(kind):
        return pa.array(["null"] * len(column), _STRING)
    if pa.types.is_struct(kind) and not kind.num_fields:
        text = pa.array(["{}"] * len(column), _STRING)
        return pc.if_else(column.is_valid(), text, pa.scalar("null", _STRING))
    if pa.types.is_struct(kind):
        text = _object(column.flatten(), [field.name for field in kind])
    elif pa.types.is_map(kind):
        names = _quoted(_strings_of_any(column.keys))
        text = _in_brackets(column, _joined(names, ":", _json(column.items)), "{", "}")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        text = _in_brackets(column, _json(column.values), "[", "]")
    elif _is_bytes(kind) or not _is_number_or_boolean(kind):
        text = _quoted(_strings_of_any(column))
    elif pa.types.is_floating(kind):
        text = _strings(column)
        no_number = pc.invert(pc.is_finite(column)).fill_null(False)
        if pc.any(no_number).as_py():
            text = pc.if_else(no_number, _joined('"', text, '"'), text)
    else:
        text = _strings(column)
    return pc.if_else(column.is_valid(), text, pa.scalar("null", _STRING))


def _is_number_or_boolean(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
    )


def _strings_of_any(column: pa.Array) -> pa.Array:
    """Texts that are to be quoted: bytes in base64, values of types made of others as JSON."""
    if _is_bytes(column.type):
        encoded = [
            None if value is None else base64.b64encode(value).decode()
            for value in column.to_pylist()
        ]
        return pa.array(encoded, _STRING)
    return _json(column) if pa.types.is_nested(column.type) else _strings(column)


def _quoted(strings: pa.Array) -> pa.Array:
    strings = _utf_8(strings)
    if pc.any(pc.match_substring_regex(strings, _TO_ESCAPE)).as_py():
        for character, escape in _ESCAPES.items():
            if pc.any(pc.match_substring(strings, character)).as_py():
                strings = pc.replace_substring(strings, character, escape)
    return _joined('"', strings, '"')


def _utf_8(strings: pa.Array) -> pa.Array:
    """Strings, with U+FFFD in place of what is not UTF-8."""
    data = strings.cast(TEXT)
    try:
        return data.cast(_STRING)
    except pa.ArrowInvalid:
        texts = [text and text.decode(errors="replace") for text in data.to_pylist()]
        return pa.array(texts, _STRING)


def _object(columns: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    parts: list[pa.Array | str] = []
    for index, (name, column) in enumerate(zip(names, columns, strict=True)):
        opening = "{" if index == 0 else ","
        parts += [f"{opening}{msgspec.json.encode(name).decode()}:", _json(column)]
    return _joined(*parts, "}")


def _in_brackets(column: pa.Array, items: pa.Array, opening: str, closing: str) -> pa.Array:
    """The items of each list or map, as texts, between brackets."""
    kind = pa.LargeListArray if pa.types.is_large_list(column.type) else pa.ListArray
    lists = kind.from_arrays(column.offsets, items)
    return _joined(opening, pc.binary_join(lists, pa.scalar(",", _STRING)), closing)


def _joined(*parts: pa.Array | str) -> pa.Array:
    scalars = [pa.scalar(part, _STRING) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar("", _STRING))
