from __future__ import annotations

import datetime as dt

import pytest

from upr_protocol.cli.keys import KeyMaker


def test_a_key_is_the_columns_in_the_order_asked_for() -> None:
    fields = {"b": "x", "a": 7, "c": "no"}
    assert KeyMaker(["a"]).key(fields) == b"7"
    assert KeyMaker(["b", "a"]).key(fields) == b"x:7"
    assert KeyMaker(["b", "a"], "/").key(fields) == b"x/7"


@pytest.mark.parametrize("value", [None, "", b""])
def test_a_part_that_is_missing_or_empty_means_no_key(value: object) -> None:
    assert KeyMaker(["a", "b"]).key({"a": "x", "b": value}) is None


def test_a_column_that_the_row_does_not_have_means_no_key() -> None:
    assert KeyMaker(["a"]).key({"b": 1}) is None


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (0, b"0"),
        (-3, b"-3"),
        (1.5, b"1.5"),
        (True, b"true"),
        (False, b"false"),
        ("é", "é".encode()),
        (b"\xff\x00", b"\xff\x00"),
        (dt.date(2013, 1, 2), b"2013-01-02"),
        (dt.datetime(2013, 1, 2, 3, tzinfo=dt.UTC), b"2013-01-02T03:00:00+00:00"),
    ],
)
def test_values_as_keys(value: object, key: bytes) -> None:
    assert KeyMaker(["a"]).key({"a": value}) == key


@pytest.mark.parametrize("value", [[1], {"x": 1}])
def test_lists_and_objects_are_no_keys(value: object) -> None:
    with pytest.raises(ValueError, match="a holds a"):
        KeyMaker(["a"]).key({"a": value})


def test_a_key_is_at_most_250_bytes() -> None:
    assert KeyMaker(["a"]).key({"a": "x" * 250}) == b"x" * 250
    with pytest.raises(ValueError, match="has 251 bytes"):
        KeyMaker(["a"]).key({"a": "x" * 251})
