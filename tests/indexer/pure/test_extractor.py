"""Plain definitions, whose entries are made in a shorter way: they are the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.extractor import NOT_JSON, Extractor
from upr_server.indexer.pure.interpreter import WORK_MAX
from upr_server.indexer.pure.keys import PLAIN_CHARACTERS, IndexKeyError, encode_parts, encode_plain

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


@given(definitions, st.lists(documents, max_size=30))
def test_the_short_way_gives_the_same(definition: IndexDefinition, contents: list[Any]) -> None:
    short, long = Extractor(definition), Extractor(definition)
    assert short._is_plain
    long._is_plain = False
    for document in contents:
        short_entries, payload = short.entries(b"k", document)
        long_entries, long_payload = long.entries(b"k", document)
        assert (list(short_entries), payload) == (list(long_entries), long_payload)
        assert (short.too_long, short.too_costly) == (long.too_long, long.too_costly)
        assert (short._excess_work, short.failure) == (long._excess_work, long.failure)


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
    assert not Extractor(definition)._is_plain


@given(st.lists(values, max_size=4))
def test_plain_keys_are_encoded_the_same(parts: list[Any]) -> None:
    encoded = encode_plain(parts)
    if encoded is not None:
        assert encoded == encode_parts(parts)
        return
    try:
        encode_parts(parts)
    except IndexKeyError:
        return
    assert any(not _is_plain(part) for part in parts)


def _is_plain(part: Any) -> bool:
    if isinstance(part, str):
        return len(part) <= PLAIN_CHARACTERS and part.isascii()
    is_integer = isinstance(part, int) and not isinstance(part, bool)
    return part is None or (is_integer and -(2**63) <= part < 2**64)
