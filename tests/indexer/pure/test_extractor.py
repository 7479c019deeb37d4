"""Plain definitions, whose entries are made in a shorter way: they are the same."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.indexer.pure import extractor
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.extractor import NOT_JSON, Extractor, decode_values
from upr_server.indexer.pure.interpreter import WORK_MAX
from upr_server.indexer.pure.keys import (
    PLAIN_CHARACTERS,
    IndexKeyError,
    encode_parts,
    encode_plain_columns,
)

LONG = "s" * 64 * WORK_MAX
"""A string that costs more than it may."""

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**400, 2**513]),
    st.floats(),
    st.text(),
    st.sampled_from(["", "a\0b", "\ud800", "s" * 64, "s" * 65, "é" * 64, "s" * 300, LONG]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from("ab"), st.integers(), max_size=2),
)
documents = st.one_of(
    values, st.just(NOT_JSON), st.dictionaries(st.sampled_from("abc"), values, max_size=3)
)
paths = st.sampled_from(["a", "b", "c", "a.b", "b[0]", "@"])
definitions = st.lists(paths, min_size=1, max_size=6, unique=True).map(
    lambda key: IndexDefinition(tuple(key))
)


@given(definitions, st.lists(documents, max_size=30), st.booleans())
def test_the_short_way_gives_the_same(
    definition: IndexDefinition, contents: list[Any], with_designs: bool
) -> None:
    short, long = Extractor(definition), Extractor(definition)
    assert short.is_plain
    keys = [b"k", b"_design/d"] * len(contents)
    keys = keys[: len(contents)] if with_designs else [b"k"] * len(contents)
    # Several rounds: what one has cost counts in the next.
    for start in range(0, len(contents), 7):
        rows = list(zip(keys, contents, strict=True))[start : start + 7]
        encoded_keys = short.plain_keys([key for key, _ in rows], [value for _, value in rows])
        entries = [long.entries(key, document) for key, document in rows]
        assert [[key] if key else [] for key in encoded_keys] == [list(row) for row, _ in entries]
        assert not any(payload for _, payload in entries)
        assert (short.too_long, short.too_costly) == (long.too_long, long.too_costly)
        assert (short.failure, bool(short._excess_work)) == (long.failure, bool(long._excess_work))


@pytest.mark.parametrize(
    "definition",
    [
        IndexDefinition(("a",), "b"),
        IndexDefinition(("a",), each="a"),
        IndexDefinition(("a",), include=("b",)),
        IndexDefinition(("a", "document_key()")),
    ],
)
def test_only_plain_definitions_go_the_short_way(definition: IndexDefinition) -> None:
    assert not Extractor(definition).is_plain


columns = st.one_of(
    st.lists(values, max_size=4),
    st.lists(st.sampled_from(["", "a", "a\0b", "s" * 64, "s" * 65, "é"]), max_size=4),
    st.lists(st.text("abc"), max_size=4),
    st.lists(st.integers(), max_size=4),
    st.lists(st.integers(0, 2**53 + 1), max_size=4),
    st.lists(st.sampled_from([0, 1, 2**53 - 1, 2**53, 2**53 + 1]), max_size=4),
)


@given(st.lists(columns, min_size=1, max_size=5), st.integers(9, 99))
def test_plain_keys_are_encoded_the_same(parts: list[list[Any]], nbytes_max: int) -> None:
    count = min(map(len, parts))
    encoded_keys = encode_plain_columns([column[:count] for column in parts], nbytes_max)
    assert len(encoded_keys) == count
    for row, encoded in zip(zip(*parts, strict=False), encoded_keys, strict=True):
        try:
            expected = encode_parts(row)
        except IndexKeyError:
            expected = None
        if not all(map(_is_plain, row)) or expected is None or len(expected) > nbytes_max:
            assert encoded is None
        elif row[0] is None:
            assert encoded == b""
        else:
            assert encoded == expected


def _is_plain(part: Any) -> bool:
    if isinstance(part, str):
        return len(part) <= PLAIN_CHARACTERS and part.isascii()
    is_integer = isinstance(part, int) and not isinstance(part, bool)
    return part is None or (is_integer and -(2**63) <= part < 2**64)


def test_other_threads_have_their_turns_between_documents() -> None:
    """A thread gives the interpreter away only between steps of Python. The documents of a round in
    one call kept it for 10 ms and more, and the event loop waited."""
    decoded_by_steps = 0

    def note(_frame: FrameType, event: str, function: object) -> None:
        nonlocal decoded_by_steps
        decoded_by_steps += event == "c_call" and function == extractor._decode

    sys.setprofile(note)
    try:
        decoded = decode_values([b"1", b"{}", b"[2]"])
    finally:
        sys.setprofile(None)
    assert decoded == [1, {}, [2]]
    assert decoded_by_steps == len(decoded)


def test_what_was_counted_for_a_commit_that_fails_is_forgotten() -> None:
    """Otherwise an index would be left out whose documents are tried again and again, while the
    disk is full."""
    index = Extractor(IndexDefinition(("a",)))
    document = {"a": LONG}

    def fail() -> None:
        with index.attempt():
            assert index.entries(b"k", document) == ((), b"")
            raise OSError("full")

    for _ in range(100):
        with pytest.raises(OSError, match="full"):
            fail()
    assert (index.failure, index.too_costly) == ("", 0)
    with index.attempt():
        index.entries(b"k", document)
    assert (index.failure, index.too_costly) == ("", 1)
    for _ in range(100):
        with index.attempt():
            index.entries(b"k", document)
    assert index.failure
