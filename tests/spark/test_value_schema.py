"""The struct that is inferred of values: each of them fits into it."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_type

from upr_protocol.spark.json_values import ValueParser, is_parsed
from upr_protocol.spark.value_schema import NESTED_MAX, struct_of

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.sampled_from(["a", "b", "a b", "ä"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=4)


@given(st.lists(OBJECTS | JSON, max_size=6))
def test_each_object_of_the_sample_fits(values: list[Any]) -> None:
    texts = [json.dumps(value).encode() for value in values]
    struct = struct_of(texts)
    objects = [value for value in values if isinstance(value, dict)]
    if struct is None:
        assert not any(_column_names(objects))
        return
    assert is_parsed(struct)
    assert set(struct.fieldNames()) >= _column_names(objects)
    kind = to_arrow_type(struct, timezone="UTC")
    parsed = ValueParser(struct).parse(pa.array(texts, pa.binary()), kind)
    for value, row in zip(values, parsed.to_pylist(), strict=True):
        assert (row is not None) == isinstance(value, dict)


def _column_names(objects: list[dict[str, Any]]) -> set[str]:
    """Of fields that have values of one simple type, or whole numbers and others, and no other."""
    kinds: dict[str, set[type]] = {}
    for value in objects:
        for name, field in value.items():
            if field is not None:
                kinds.setdefault(name, set()).add(float if type(field) is int else type(field))
    return {
        name for name, types_ in kinds.items() if len(types_) == 1 and types_ <= {bool, float, str}
    }


@pytest.mark.parametrize(
    ("values", "ddl"),
    [
        (['{"b":1,"a":"x"}'], "struct<a:string,b:bigint>"),
        (['{"a":1}', '{"a":2.5}', '{"a":null}'], "struct<a:double>"),
        (['{"a":18446744073709551615}'], "struct<a:double>"),
        (['{"a":1,"b":true}', '{"a":"x"}'], "struct<b:boolean>"),
        (['{"a":"NaN","b":"NaN"}', '{"a":1,"b":"x"}', '{"a":"NaN"}'], "struct<a:double,b:string>"),
        (['{"a":["Infinity"],"b":true}', '{"b":"NaN"}'], "struct<a:array<string>>"),
        (['{"a":"x","e":1}', '{"a":"NaN"}', '{"a":1}'], "struct<e:bigint>"),
        (['{"a":[1]}', '{"a":[]}', '{"a":[2.5,null]}'], "struct<a:array<double>>"),
        (['{"a":{"x":1}}', '{"a":{"y":"2","z":{}}}'], "struct<a:struct<x:bigint,y:string>>"),
        (['{"a":[1,"x"],"b":[],"c":{},"d":null,"e":1}'], "struct<e:bigint>"),
        (["17", "[]", "no JSON", "\udcff", '{"e":1}'], "struct<e:bigint>"),
        (["17", "{}", '{"a":null}'], None),
        ([], None),
        (["[" * 100_000], None),
    ],
)
def test_the_rules(values: list[str], ddl: str | None) -> None:
    struct = struct_of(value.encode("utf-8", "surrogateescape") for value in values)
    assert (None if struct is None else struct.simpleString()) == ddl


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_field_that_is_nested_too_deep_is_left_out(opening: str, closing: str) -> None:
    """The value itself is the first of the objects in each other."""
    for depth in (NESTED_MAX - 1, NESTED_MAX, 600):
        deep_field = f"{opening * depth}1{closing * depth}"
        struct = struct_of([f'{{"deep":{deep_field},"e":1}}'.encode(), b'{"e":2}'])
        assert struct is not None
        is_column = depth < NESTED_MAX
        assert struct.fieldNames() == (["deep", "e"] if is_column else ["e"])
        # Spark's workers hand on what has the type.
        kind = to_arrow_type(struct, timezone="UTC")
        pa.RecordBatch.from_arrays([pa.nulls(1, kind)], names=["value"]).serialize()


def test_types_that_do_not_fit_together_stay_left_out_whatever_comes_later() -> None:
    struct = struct_of([b'{"a":1,"b":1}', b'{"a":"x"}', b'{"a":1}', b'{"a":null}'])
    assert struct == types.StructType([types.StructField("b", types.LongType())])
