"""Values parsed into structs: what fits, and what becomes null."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
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
