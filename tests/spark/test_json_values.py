"""Values parsed into structs: what fits, and what becomes null."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_type

from upr_protocol.spark.json_values import ValueParser, is_parsed, unparsed_values
from upr_protocol.spark.texts import column_texts

INNER = types.StructType([types.StructField("x", types.BooleanType())])
KIND = types.StructType(
    [
        types.StructField("a b", types.IntegerType()),
        types.StructField("s", types.StringType()),
        types.StructField("t", types.TimestampType()),
        types.StructField("d", types.DateType()),
        types.StructField("l", types.ArrayType(types.DoubleType())),
        types.StructField("n", INNER),
        types.StructField("f", types.FloatType()),
    ]
)
NOTHING = dict.fromkeys(KIND.fieldNames())


def parsed(*values: bytes | None) -> list[Any]:
    kind = to_arrow_type(KIND, timezone="UTC")
    return list(ValueParser(KIND).parse(pa.array(values, pa.binary()), kind).to_pylist())


def test_an_object_that_fits() -> None:
    text = (
        b'{"a b":-1,"s":"\\u00e4","t":"2024-01-31T12:00:00.000005Z","d":"2024-01-31",'
        b'"l":[1,2.5,null],"n":{"x":true,"more":1},"more":[]}'
    )
    (value,) = parsed(text)
    assert value == {
        "a b": -1,
        "s": "ä",
        "t": dt.datetime(2024, 1, 31, 12, 0, 0, 5, dt.UTC),
        "d": dt.date(2024, 1, 31),
        "l": [1.0, 2.5, None],
        "n": {"x": True},
        "f": None,
    }
    assert parsed(b"{}", b'{\n "n": null}', b'{"n":{}}', b'{"f":-2.5e38}') == [
        NOTHING,
        NOTHING,
        {**NOTHING, "n": {"x": None}},
        {**NOTHING, "f": float(np.float32(-2.5e38))},
    ]


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"text",
        b"5",
        b"null",
        b"[1]",
        b'{"a b":"1"}',
        b'{"a b":2147483648}',
        b'{"a b":1.5}',
        b'{"s":5}',
        b'{"t":"yesterday"}',
        b'{"t":"0001-01-01T00:00:00+01:00"}',
        b'{"t":"9999-12-31T23:59:59.999999-05:00"}',
        b'{"n":{"x":1}}',
        b'{"a b":1',
        b'{"a b":1}{}',
        b'{"s":"\xff"}',
        b'{"f":-1e39}',
        pytest.param(b'{"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep"),
    ],
)
def test_a_value_that_does_not_fit_is_null(value: bytes | None) -> None:
    values = pa.array([value, b'{"s":"next"}'], pa.binary())
    structs = ValueParser(KIND).parse(values, to_arrow_type(KIND, timezone="UTC"))
    assert structs.to_pylist() == [None, {**NOTHING, "s": "next"}]
    assert unparsed_values(values, structs).to_pylist() == [value, None]


def test_a_time_whose_year_in_utc_is_no_year_does_not_fit_anywhere() -> None:
    """Spark takes it, and whoever collects the rows gets an error of Python's."""
    times = types.ArrayType(types.TimestampType())
    kind = types.StructType([types.StructField("n", types.ArrayType(structs_with(times)))])
    first, last = "0001-01-01T00:00:00", "9999-12-31T23:59:59.999999"
    texts = [f"{first}Z", f"{last}Z", f"{first}-01:00", f"{last}+01:00"]
    bad_texts = [f"{first}+00:01", f"{last}-00:01"]
    values = [json.dumps({"n": [{"x": [None, text]}, {}]}) for text in (*texts, *bad_texts)]
    arrow_kind = to_arrow_type(kind, timezone="UTC")
    structs = ValueParser(kind).parse(pa.array(values, pa.binary()), arrow_kind).to_pylist()
    assert [struct["n"][0]["x"][1].year for struct in structs[:4]] == [1, 9999, 1, 9999]
    assert structs[4:] == [None, None]


def structs_with(kind: types.DataType) -> types.StructType:
    return types.StructType([types.StructField("x", kind)])


def test_types_that_values_are_parsed_into() -> None:
    assert is_parsed(KIND)
    assert not is_parsed(types.StringType())
    for kind in (types.DecimalType(9, 2), types.VariantType(), types.BinaryType()):
        assert not is_parsed(types.StructType([types.StructField("f", types.ArrayType(kind))]))


def test_a_value_without_what_is_not_null_does_not_fit() -> None:
    """Spark reads no null there, and its query would end with an error of Java's."""
    kind = types.StructType(
        [
            types.StructField("seats", types.IntegerType(), nullable=False),
            types.StructField("tags", types.ArrayType(types.StringType(), containsNull=False)),
        ]
    )
    values: list[bytes] = [
        b'{"seats":1}',
        b'{"seats":2,"tags":["a"]}',
        b'{"tags":[]}',
        b'{"seats":null}',
        b'{"seats":3,"tags":["a",null]}',
    ]
    arrow_kind = to_arrow_type(kind, timezone="UTC")
    structs = ValueParser(kind).parse(pa.array(values, pa.binary()), arrow_kind).to_pylist()
    assert structs[:2] == [{"seats": 1, "tags": None}, {"seats": 2, "tags": ["a"]}]
    assert structs[2:] == [None, None, None]


def test_floats_without_a_number_in_json_are_read_as_they_are_written() -> None:
    """Otherwise a row with one, which a write puts into a JSON object, would be read as null."""
    words = b'{"f":"-Infinity","l":["NaN",1,null,"Infinity"]}'
    (value,) = parsed(words)
    assert value["f"] == -math.inf
    assert math.isnan(value["l"][0])
    assert value["l"][1:] == [1.0, None, math.inf]
    column = pa.array([value["l"]], pa.list_(pa.float64()))
    assert column_texts(column).to_pylist() == [b'["NaN",1.0,null,"Infinity"]']
    assert parsed(b'{"f":"nan"}', b'{"s":"NaN","l":["inf"]}') == [None, None]
    assert parsed(b'{"s":"NaN","f":"NaN","a b":"NaN"}', b'{"s":"NaN"}') == [
        None,
        {**NOTHING, "s": "NaN"},
    ]


def test_the_largest_float_is_read_as_it_is_written() -> None:
    """Its shortest text is a little more than the float. What is nearer to the next one, which is
    none, does not fit."""
    largest = float(np.finfo(np.float32).max)
    (text,) = column_texts(pa.array([largest], pa.float32())).to_pylist()
    assert text == b"3.4028235E38"
    rows = parsed(b'{"f":%s}' % text, b'{"f":-%s}' % text, b'{"f":3.4028236E38}')
    assert rows == [{**NOTHING, "f": largest}, {**NOTHING, "f": -largest}, None]


BITS: Final[dict[type[types.DataType], int]] = {types.ByteType: 8, types.LongType: 64}
NAMES: Final = st.sampled_from(["a", "A", "ä", ""])
SIMPLE: Final = st.sampled_from(
    [
        types.ByteType(),
        types.LongType(),
        types.DoubleType(),
        types.BooleanType(),
        types.StringType(),
        types.DateType(),
    ]
)


def structs_of(kinds: st.SearchStrategy[types.DataType]) -> st.SearchStrategy[types.StructType]:
    fields = st.builds(types.StructField, NAMES, kinds, st.booleans())
    return st.lists(fields, max_size=3, unique_by=lambda field: field.name).map(types.StructType)


KINDS: Final = st.recursive(
    SIMPLE,
    lambda inner: st.builds(types.ArrayType, inner, st.booleans()) | structs_of(inner),
    max_leaves=5,
)
SCALARS: Final = (
    st.none()
    | st.booleans()
    | st.sampled_from([127, 128, -128, -129, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "NaN", "-Infinity", "nan", "2024-02-29", "2023-02-29", "0000-01-01"])
    | st.text(max_size=2)
)
VALUES: Final = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def likely_values(draw: st.DrawFn, kind: types.DataType) -> Any:
    """Values of which most fit."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    if isinstance(kind, types.StructType):
        return {field.name: draw(likely_values(field.dataType)) for field in kind}
    if isinstance(kind, types.ArrayType):
        return draw(st.lists(likely_values(kind.elementType), max_size=2))
    return draw(SCALARS.filter(lambda value: _fitted(value, kind, is_nullable=False)[0]))


def _fitted(value: Any, kind: types.DataType, *, is_nullable: bool) -> tuple[bool, Any]:
    """The rules of docs/spark.md, one value at a time: whether it fits, and as what."""
    if value is None:
        return is_nullable, None
    if isinstance(kind, types.StructType):
        if not isinstance(value, dict):
            return False, None
        fields = {
            field.name: _fitted(value.get(field.name), field.dataType, is_nullable=field.nullable)
            for field in kind
        }
        return all(fits for fits, _ in fields.values()), {
            name: field for name, (_, field) in fields.items()
        }
    if isinstance(kind, types.ArrayType):
        if not isinstance(value, list):
            return False, None
        items = [_fitted(item, kind.elementType, is_nullable=kind.containsNull) for item in value]
        return all(fits for fits, _ in items), [item for _, item in items]
    if isinstance(kind, types.BooleanType):
        return isinstance(value, bool), value
    if isinstance(kind, types.StringType):
        return isinstance(value, str), value
    if isinstance(kind, types.DateType):
        try:
            return True, dt.date.fromisoformat(value)
        except (TypeError, ValueError):
            return False, None
    if isinstance(kind, types.DoubleType):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_word = isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity")
        return is_number or is_word, float(value) if is_number or is_word else None
    bits = BITS[type(kind)]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and -(1 << bits - 1) <= value < 1 << bits - 1, value


@given(st.data())
def test_what_fits_is_what_the_rules_say(data: st.DataObject) -> None:
    """Of a field that an object has twice, both have to fit, and the last one counts."""
    kind = data.draw(structs_of(KINDS))
    values = data.draw(st.lists(likely_values(kind), min_size=1, max_size=4))
    texts, expected = [], []
    for value in values:
        text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
        fits, struct = _fitted(value, kind, is_nullable=False)
        if isinstance(value, dict) and value and data.draw(st.booleans()):
            name, first_value = next(iter(value)), data.draw(SCALARS)
            text = f"{{{json.dumps(name)}: {json.dumps(first_value)}, {text[1:]}"
            for field in kind:
                if field.name == name:
                    nullable = field.nullable
                    fits &= _fitted(first_value, field.dataType, is_nullable=nullable)[0]
        texts.append(text.encode())
        expected.append(struct if fits else None)
    column = pa.array(texts, pa.binary())
    structs = ValueParser(kind).parse(column, to_arrow_type(kind, timezone="UTC"))
    # NaN equals nothing, and its text does.
    assert repr(structs.to_pylist()) == repr(expected)
    assert unparsed_values(column, structs).to_pylist() == [
        text if struct is None else None for text, struct in zip(texts, expected, strict=True)
    ]
