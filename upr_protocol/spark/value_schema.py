"""The struct into which a sample of JSON objects fits."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, Final

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from upr_protocol.spark.json_values import FLOAT_WORDS

NESTED_MAX: Final = 32
"""How many arrays and objects in each other have a type at most. Arrow sends a batch only if its
columns have fewer than 64, and Python's stack ends somewhere beyond."""

_LONG_MAX: Final = (1 << 63) - 1

_UNKNOWN: Final[DataType] = NullType()


class _Mixed(NullType):
    """The type of a field that can be no column: its values have types that no column has together,
    or are too deep."""


class _FloatWord(DataType):
    """The type of a text that stands for a float without a number in JSON, where it is among
    numbers."""


def struct_of(values: Iterable[bytes]) -> StructType | None:
    """The struct whose fields the objects among `values` have, by their names.

    Whole numbers are BIGINT, or DOUBLE if any of the field's has a fraction or more than 64 bits,
    or is one of `FLOAT_WORDS`. A field is left out if it is null in all of them, an array or an
    object without anything in it, of types that no column has together, as a number here and a text
    there, or more than `NESTED_MAX` deep.

    Args:
        values: JSON texts. Those that are not objects are ignored.

    Returns:
        The struct; None if no value is an object with a field that can be a column.
    """
    kinds = (_kind_of(value) for value in map(_object_in, values) if value is not None)
    struct = _without_unknown(reduce(_common_type, kinds, _UNKNOWN))
    return struct if isinstance(struct, StructType) else None


def _object_in(value: bytes) -> dict[str, Any] | None:
    try:
        parsed: object = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _kind_of(value: object, depth: int = 1) -> DataType:
    """The type of a value.

    Args:
        value: The value.
        depth: How many arrays and objects it is in, with itself.
    """
    if value is None:
        return NullType()
    if isinstance(value, bool):
        return BooleanType()
    if isinstance(value, int):
        return LongType() if -_LONG_MAX - 1 <= value <= _LONG_MAX else DoubleType()
    if isinstance(value, float):
        return DoubleType()
    if isinstance(value, str):
        return _FloatWord() if value in FLOAT_WORDS else StringType()
    if depth > NESTED_MAX:
        return _Mixed()
    if isinstance(value, list):
        items = (_kind_of(item, depth + 1) for item in value)
        return ArrayType(reduce(_common_type, items, _UNKNOWN))
    assert isinstance(value, dict)
    return StructType(
        [StructField(name, _kind_of(field, depth + 1)) for name, field in value.items()]
    )


def _common_type(left_type: DataType, right_type: DataType) -> DataType:
    """The type that values of both fit into."""
    if isinstance(left_type, StructType) and isinstance(right_type, StructType):
        kinds = {field.name: field.dataType for field in left_type}
        for field in right_type:
            first_kind = kinds.get(field.name)
            kinds[field.name] = (
                field.dataType if first_kind is None else _common_type(first_kind, field.dataType)
            )
        return StructType([StructField(name, kind) for name, kind in kinds.items()])
    if isinstance(left_type, ArrayType) and isinstance(right_type, ArrayType):
        return ArrayType(_common_type(left_type.elementType, right_type.elementType))
    if left_type == right_type or type(right_type) is NullType:
        return left_type
    if type(left_type) is NullType:
        return right_type
    both = {type(left_type), type(right_type)}
    if both <= {LongType, DoubleType, _FloatWord}:
        return DoubleType()
    return StringType() if both == {StringType, _FloatWord} else _Mixed()


def _without_unknown(kind: DataType) -> DataType | None:
    """The type without the fields that can be no column, the others by name; None if nothing is
    left of it."""
    if isinstance(kind, StructType):
        known_kinds = {
            field.name: known_kind
            for field in kind
            if (known_kind := _without_unknown(field.dataType)) is not None
        }
        fields = [StructField(name, known_kinds[name]) for name in sorted(known_kinds)]
        return StructType(fields) if fields else None
    if isinstance(kind, ArrayType):
        element = _without_unknown(kind.elementType)
        return None if element is None else ArrayType(element)
    if isinstance(kind, _FloatWord):
        return StringType()
    return None if isinstance(kind, NullType) else kind
