"""Values that are JSON objects, parsed into a struct column.

msgspec parses a value at a time. Arrow's own parser takes many at once, but one bad line spoils all
of them.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Final, Literal, Required, TypedDict, get_args

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types
from pyspark.sql.types import DataType

_INTEGER_BITS: Final[dict[type[DataType], int]] = {
    types.ByteType: 8,
    types.ShortType: 16,
    types.IntegerType: 32,
    types.LongType: 64,
}
_FLOAT_END: Final = 2.0**128 - 2.0**103
"""Halfway from the largest FLOAT to the next one, which is none: Arrow makes the largest of what is
less, as of its own shortest text, 3.4028235E38, and an infinity of the rest."""

_DAY_US: Final = 24 * 60 * 60 * 1_000_000
_EPOCH_DAY: Final = dt.date(1970, 1, 1).toordinal()
_FIRST_US: Final = (dt.date.min.toordinal() - _EPOCH_DAY) * _DAY_US
_LAST_US: Final = (dt.date.max.toordinal() - _EPOCH_DAY + 1) * _DAY_US - 1
"""The first and the last microsecond since 1970 that a `datetime` can be."""

_PYTHON_TYPES: Final[dict[type[DataType], Any]] = {
    types.StringType: str,
    types.BooleanType: bool,
    types.FloatType: Annotated[float, msgspec.Meta(gt=-_FLOAT_END, lt=_FLOAT_END)],
    types.DoubleType: float,
    types.DateType: dt.date,
    types.TimestampType: Annotated[dt.datetime, msgspec.Meta(tz=True)],
    types.TimestampNTZType: Annotated[dt.datetime, msgspec.Meta(tz=False)],
}


_MISFITS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for a value that does not fit. Some thousand arrays in each other are too
many, also in a field to be left out."""

_FloatWord = Literal["NaN", "Infinity", "-Infinity"]

FLOAT_WORDS: Final = get_args(_FloatWord)
"""What a write, and Spark's `to_json`, write for floats that JSON has no number for."""


def is_parsed(kind: DataType) -> bool:
    """Whether values can be parsed into a type: a struct of simple types, arrays and structs."""
    return isinstance(kind, types.StructType) and _fits(kind)


def _fits(kind: DataType) -> bool:
    if isinstance(kind, types.StructType):
        return all(_fits(field.dataType) for field in kind)
    if isinstance(kind, types.ArrayType):
        return _fits(kind.elementType)
    return type(kind) in _INTEGER_BITS or type(kind) in _PYTHON_TYPES


class ValueParser:
    """Parses values into structs.

    Args:
        kind: The struct, for which `is_parsed` holds.
    """

    def __init__(self, kind: DataType) -> None:
        self._kind = kind
        self._decode = msgspec.json.Decoder(_python_type(kind)).decode
        self._decode_words = msgspec.json.Decoder(_python_type(kind, with_words=True)).decode

    def parse(self, values: pa.Array, kind: pa.StructType) -> pa.Array:
        """A struct for each value; null for a value that is null, or not an object that fits.

        A field that the value lacks is null, and one that the struct lacks is left out. Of a field
        that the value has twice, both have to fit, and the last one counts.

        Args:
            values: A column of bytes.
            kind: The struct, as Arrow has it.
        """
        rows = [self._one(value) for value in values.to_pylist()]
        structs = pa.array(rows, kind)
        if _has_year_out_of_range(structs):
            rows = [None if _has_year_out_of_range(pa.array([row], kind)) else row for row in rows]
            structs = pa.array(rows, kind)
        return structs

    def _one(self, value: bytes | None) -> Any:
        if value is None:
            return None
        try:
            return self._decode(value)
        except _MISFITS:
            return self._with_words(value)

    def _with_words(self, value: bytes) -> Any:
        """A value in which words may stand for floats. Few have any: they are not looked for in
        those that fit without."""
        try:
            return _with_floats(self._decode_words(value), self._kind)
        except _MISFITS:
            return None


def _with_floats(value: Any, kind: DataType) -> Any:
    """A value with floats in place of `FLOAT_WORDS`."""
    if isinstance(kind, types.StructType) and value is not None:
        kinds = {field.name: field.dataType for field in kind}
        return {name: _with_floats(field, kinds[name]) for name, field in value.items()}
    if isinstance(kind, types.ArrayType) and value is not None:
        return [_with_floats(item, kind.elementType) for item in value]
    is_word = isinstance(kind, (types.FloatType, types.DoubleType)) and isinstance(value, str)
    return float(value) if is_word else value


def _has_year_out_of_range(column: pa.Array) -> bool:
    """Whether a column, or one that it is made of, has a timestamp that no `datetime` in UTC can
    be: its year is 0 or 10000 there. Whoever collects it would get an error instead of the rows."""
    if pa.types.is_timestamp(column.type):
        bounds = pc.min_max(column.view(pa.int64()))
        least, most = bounds["min"].as_py(), bounds["max"].as_py()
        return least is not None and not _FIRST_US <= least <= most <= _LAST_US
    if pa.types.is_struct(column.type):
        return any(
            _has_year_out_of_range(column.field(index)) for index in range(column.type.num_fields)
        )
    return pa.types.is_list(column.type) and _has_year_out_of_range(column.values)


def parser_of(schema: types.StructType) -> ValueParser | None:
    """What parses the values of a read; None if its columns ask for no struct."""
    for field in schema:
        if field.name == "value" and isinstance(field.dataType, types.StructType):
            return ValueParser(field.dataType)
    return None


def unparsed_values(values: pa.Array, parsed: pa.Array) -> pa.Array:
    """The values that do not fit, each in its place; null elsewhere.

    Args:
        values: A column of bytes.
        parsed: What `ValueParser.parse` made of them.
    """
    return pc.if_else(parsed.is_null(), values, pa.nulls(len(values), values.type))


def _python_type(kind: DataType, *, with_words: bool = False) -> Any:
    """The type that msgspec is to decode. Null fits, too, but at the top and where the type says
    NOT NULL: there Spark relies on it.

    Args:
        kind: Spark's type.
        with_words: Whether `FLOAT_WORDS` fit where a float does.
    """
    if isinstance(kind, types.StructType):
        fields: dict[str, Any] = {}
        for field in kind:
            field_type = _python_type(field.dataType, with_words=with_words)
            fields[field.name] = field_type | None if field.nullable else Required[field_type]
        return TypedDict("Value", fields, total=False)  # type: ignore[operator]
    if isinstance(kind, types.ArrayType):
        element = _python_type(kind.elementType, with_words=with_words)
        if kind.containsNull:
            element |= None
        return list[element]  # type: ignore[valid-type]
    if with_words and isinstance(kind, (types.FloatType, types.DoubleType)):
        return _PYTHON_TYPES[type(kind)] | _FloatWord
    bits = _INTEGER_BITS.get(type(kind))
    if bits is None:
        return _PYTHON_TYPES[type(kind)]
    least = -(1 << bits - 1)
    return Annotated[int, msgspec.Meta(ge=least, le=-least - 1)]
