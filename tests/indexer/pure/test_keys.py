"""Keys as bytes: their order is that of the values, and they can be read again."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.indexer.pure.key_order import compare
from upr_server.indexer.pure.keys import IndexKeyError, decode_parts, encode_parts, end_of_prefix

NUMBERS = (
    st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(2**53 - 3, 2**53 + 3)
    | st.integers(-3, 3)
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=6) | st.text(
    "\0\1a\x7f\xff\uffff", max_size=4
)
PARTS = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3)
)
KEYS = st.lists(PARTS, min_size=2, max_size=2)


@given(KEYS, KEYS)
@example([2**53, 0], [2**53 + 1, 0])
@example([0.0, 0], [-0.0, 0])
@example(["a", 0], ["a\0", 0])
@example([["a"], 0], [["a", None], 0])
def test_bytes_compare_as_the_values_do(left: list[object], right: list[object]) -> None:
    a, b = encode_parts(left), encode_parts(right)
    assert (a > b) - (a < b) == compare(left, right)


@given(KEYS, st.binary(max_size=3))
def test_decoding_reverses_encoding(key: list[object], behind: bytes) -> None:
    data = encode_parts(key)
    parts, end = decode_parts(data + behind, len(key))
    assert compare(parts, key) == 0
    assert end == len(data)
    assert encode_parts(parts) == data


@given(PARTS, PARTS, PARTS, st.binary(min_size=1, max_size=3))
def test_a_prefix_is_a_range(
    first: object, second_part: object, second: object, behind: bytes
) -> None:
    prefix = encode_parts([first])
    inside = encode_parts([second_part, second]) + behind
    assert (prefix <= inside < end_of_prefix(prefix)) == (compare(first, second_part) == 0)


@given(st.binary(max_size=20))
@example(bytes.fromhex("08 0010000000000000 0000"))
def test_any_bytes_are_a_key_or_refused(data: bytes) -> None:
    try:
        parts, end = decode_parts(data, 1)
    except IndexKeyError:
        return
    assert end <= len(data)
    assert compare(decode_parts(encode_parts(parts), 1)[0], parts) == 0


@pytest.mark.parametrize("value", [{"a": 1}, float("nan"), float("inf"), "\ud800", 10**400])
def test_values_that_cannot_be_keys_are_refused(value: object) -> None:
    with pytest.raises(IndexKeyError):
        encode_parts([value])


def test_arrays_too_deep_are_refused() -> None:
    deep: list[object] = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(IndexKeyError):
        encode_parts([deep])


@pytest.mark.parametrize(
    "digits",
    [
        "bff0000000000000 8005",  # 1 and 5 more, which is 6
        "bff8000000000000 8001",  # 1.5 and 1 more
        "c340000000000000 8003",  # 2**53 and 3 more: its double is another
        "ffefffffffffffff 8001",  # the largest double, of which nothing is left
    ],
)
def test_bytes_of_a_number_that_does_not_exist_are_refused(digits: str) -> None:
    with pytest.raises(IndexKeyError):
        decode_parts(bytes.fromhex(f"08 {digits}"), 1)
    assert decode_parts(encode_parts([2**53 + 1, -(2**63), 2**64 - 1]), 3)[0] == [
        2**53 + 1,
        -(2**63),
        2**64 - 1,
    ]
