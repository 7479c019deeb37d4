"""Design documents: what they say, and where they go wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.indexer.pure.definition import (
    INDEXES_MAX,
    DefinitionError,
    IndexDefinition,
    IndexName,
    fingerprint,
    parse_design,
)
from upr_server.indexer.pure.expressions import is_true
from upr_server.indexer.pure.extractor import Extractor, decode_value
from upr_server.indexer.pure.keys import encode_parts


def test_a_design_names_its_indexes() -> None:
    text = b'{"indexes": {"a": {"key": ["x", "y.z"], "filter": "x > `1`"}, "b": {"key": ["n"]}}}'
    design = parse_design("d", text)
    assert design.indexes == {
        "a": IndexDefinition(("x", "y.z"), "x > `1`"),
        "b": IndexDefinition(("n",)),
    }


def test_a_design_has_a_bounded_number_of_indexes() -> None:
    indexes = {f"i{number}": {"key": ["x"]} for number in range(INDEXES_MAX)}
    assert len(parse_design("d", json.dumps({"indexes": indexes}).encode()).indexes) == INDEXES_MAX
    indexes["more"] = {"key": ["x"]}
    with pytest.raises(DefinitionError, match=f"at most {INDEXES_MAX}") as caught:
        parse_design("d", json.dumps({"indexes": indexes}).encode())
    assert caught.value.place == "indexes"


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("{", "", "not valid JSON"),
        ("[]", "", "an object"),
        ("{}", "indexes", "at least one"),
        ('{"indexes": {}}', "indexes", "at least one"),
        ('{"indexes": {"a": {"key": ["x"]}}, "more": 1}', "more", "unknown field"),
        ('{"indexes": {"a b": {"key": ["x"]}}}', "indexes.a b", "invalid index name"),
        (
            '{"indexes": {"-a": {"key": ["x"]}}}',
            "indexes.-a",
            "and begin with a letter, a digit or _",
        ),
        ('{"indexes": {"a": {}}}', "indexes.a", "key"),
        ('{"indexes": {"a": {"key": "x"}}}', "indexes.a.key", "array"),
        ('{"indexes": {"a": {"key": []}}}', "indexes.a.key", "1 to 16"),
        ('{"indexes": {"a": {"key": ["x", 1]}}}', "indexes.a.key[1]", "str"),
        ('{"indexes": {"a": {"key": ["x", "y..z"]}}}', "indexes.a.key[1]", "column 3: unexpected"),
        ('{"indexes": {"a": {"key": ["x["]}}}', "indexes.a.key[0]", "column 3: the expression"),
        (
            '{"indexes": {"a": {"key": ["x-y"]}}}',
            "indexes.a.key[0]",
            "column 2: Unknown token '-'; write a name with a - in double quotes",
        ),
        (
            '{"indexes": {"a": {"key": ["x"], "filter": "x > 5"}}}',
            "indexes.a.filter",
            "column 5: unexpected 5; write a number between backticks",
        ),
        ('{"indexes": {"a": {"key": [""]}}}', "indexes.a.key[0]", "empty"),
        (
            '{"indexes": {"a": {"key": ["x"], "filter": "x && nope(x)"}}}',
            "indexes.a.filter",
            "column 6: unknown function nope()",
        ),
        (
            '{"indexes": {"a": {"key": ["length()"]}}}',
            "indexes.a.key[0]",
            "column 1: length() takes 1 arguments, not 0",
        ),
        ('{"indexes": {"a": {"key": ["x"], "each": "y"}}}', "indexes.a.each", "one of the key's"),
        (
            '{"indexes": {"a": {"key": ["x", "x"], "each": "x"}}}',
            "indexes.a.each",
            "stands there once",
        ),
        (
            '{"indexes": {"a": {"key": ["x"], "include": ["y", "z["]}}}',
            "indexes.a.include[1]",
            "column 3: the expression",
        ),
        (
            '{"indexes": {"a": {"key": ["x"], "include": [' + '"y",' * 16 + '"y"]}}}',
            "indexes.a.include",
            "at most 16",
        ),
        ('{"indexes": {"a": {"key": ["' + "!" * 3000 + 'x"]}}}', "indexes.a.key[0]", "too deep"),
        ('{"indexes": {"a": {"key": ["x' + "|x" * 101 + '"]}}}', "indexes.a.key[0]", "too deep"),
    ],
)
def test_a_mistake_has_its_place(text: str, place: str, reason: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_design("d", text.encode())
    assert caught.value.place == place
    assert reason in caught.value.reason


@given(st.recursive(st.none() | st.text() | st.integers(), st.lists) | st.binary())
def test_any_text_is_a_design_or_is_refused(value: object) -> None:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(DefinitionError):
        parse_design("d", text)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 101, "é", ".a"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(DefinitionError):
        parse_design(name, b'{"indexes": {"a": {"key": ["x"]}}}')


def test_another_definition_is_another_index() -> None:
    name, definition = IndexName("d", "i"), IndexDefinition(("x",))
    assert fingerprint(name, definition) == fingerprint(name, IndexDefinition(("x",)))
    assert fingerprint(name, definition) != fingerprint(name, IndexDefinition(("x",), "y"))
    assert fingerprint(name, definition) != fingerprint(IndexName("d", "j"), definition)


@pytest.mark.parametrize(
    ("key", "filter_", "value", "parts"),
    [
        (("x",), "", '{"x": 1}', [1]),
        (("x",), "", '{"x": [1, "a"]}', [[1, "a"]]),
        (("x", "y"), "", '{"x": false}', [False, None]),
        (("x",), "", '{"y": 1}', None),
        (("x",), "", '{"x": null}', None),
        (("x", "y"), "", '{"y": 1}', None),
        (("x",), "", '{"x": {"a": 1}}', None),
        (("x",), "", "x", None),
        (("x",), "", "[1]", None),
        (("@",), "", "7", [7]),
        (("x",), "y", '{"x": 1, "y": 0}', [1]),
        (("x",), "y", '{"x": 1, "y": ""}', None),
        (("x",), "y > `2`", '{"x": 1, "y": 3}', [1]),
        (("x",), "y > `2`", '{"x": 1, "y": 2}', None),
        (("length(x)",), "", '{"x": 5}', None),
        (("length(x)",), "", '{"x": "abc"}', [3]),
        (("x",), "contains(tags, x)", '{"x": 1, "tags": "abc"}', None),
        (("max_by(x, &y).y",), "", '{"x": [{"y": 1}, {"y": "a"}]}', None),
        (("x", "ceil(to_number(y))"), "", '{"x": 1, "y": "1e999"}', [1, None]),
        (("x", "y[::0]"), "", '{"x": 1, "y": [1]}', [1, None]),
        (("document_key()", "x"), "", '{"x": 5}', ["k1", 5]),
        (("x",), "starts_with(document_key(), 'k')", '{"x": 5}', [5]),
        (("x",), "starts_with(document_key(), 'j')", '{"x": 5}', None),
        (("x",), "", '{"x": "' + "a" * 258 + '"}', ["a" * 258]),
        (("x",), "", '{"x": "' + "a" * 259 + '"}', None),
    ],
)
def test_which_documents_an_index_contains(
    key: tuple[str, ...], filter_: str, value: str, parts: list[object] | None
) -> None:
    extractor = Extractor(IndexDefinition(key, filter_))
    entries = extractor.entries(b"k1", decode_value(value.encode()))
    assert entries == ((() if parts is None else (encode_parts(parts),)), b"")


@pytest.mark.parametrize(
    ("value", "expected", "included"),
    [
        ('{"t": ["b", "a", "b"], "n": 1}', [["a", 1], ["b", 1]], b"[1,null]"),
        ('{"t": ["a", null, {"x": 1}, ["c"]]}', [["a", None], [["c"], None]], b"[null,null]"),
        ('{"t": [1, 1.0], "m": {"x": []}}', [[1, None]], b'[null,{"x":[]}]'),
        ('{"t": "a"}', [["a", None]], b"[null,null]"),
        ('{"t": []}', [], b"[null,null]"),
        ('{"n": 1}', [], b"[1,null]"),
        ('{"t": ["a", "' + "b" * 300 + '"]}', [["a", None]], b"[null,null]"),
        ('{"t": ["a"], "m": "' + "x" * 4096 + '"}', [["a", None]], b""),
    ],
)
def test_an_array_makes_an_entry_for_each_element(
    value: str, expected: list[list[object]], included: bytes
) -> None:
    extractor = Extractor(IndexDefinition(("t", "n"), each="t", include=("n", "m")))
    entries, payload = extractor.entries(b"k1", decode_value(value.encode()))
    assert list(entries) == [encode_parts(parts) for parts in expected]
    assert payload == included
    assert extractor.too_long == ("b" * 300 in value)


def test_an_array_of_too_many_elements_costs_too_much() -> None:
    extractor = Extractor(IndexDefinition(("t",), each="t", include=("x",)))
    entries, _ = extractor.entries(b"k", {"t": list(range(1000))})
    assert (len(entries), extractor.too_costly) == (1000, 0)
    assert extractor.entries(b"k", {"t": list(range(3000))}) == ((), b"")
    assert extractor.entries(b"k", {"t": list(range(1000)), "x": "x" * 4000}) == ((), b"")
    assert extractor.too_costly == 2


def test_long_parts_beside_an_array_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded_bytes = 0

    def encode_and_count(parts: Sequence[object]) -> bytes:
        nonlocal encoded_bytes
        encoded = encode_parts(parts)
        encoded_bytes += len(encoded)
        return encoded

    monkeypatch.setattr("upr_server.indexer.pure.extractor.encode_parts", encode_and_count)
    extractor = Extractor(IndexDefinition(("t", "x"), each="t"))
    assert extractor.entries(b"k", {"t": list(range(1000)), "x": "a" * 100_000}) == ((), b"")
    assert extractor.too_long == 1
    assert encoded_bytes < 200_000


def test_a_document_with_several_elements_that_are_too_long_counts_once() -> None:
    extractor = Extractor(IndexDefinition(("t",), each="t"))
    keys, _ = extractor.entries(b"k", {"t": ["a" * 300, "b", "c" * 300]})
    assert keys == [encode_parts(["b"])]
    assert extractor.too_long == 1


@pytest.mark.parametrize("expression", ["&a", "[x, &a]", "{y: &a}", "sum(x)"])
def test_an_included_value_that_has_no_json_is_left_out(expression: str) -> None:
    extractor = Extractor(IndexDefinition(("t",), include=(expression,)))
    document = decode_value(b'{"t": 1, "x": [%b, 1]}' % (b"9" * 4300))
    assert extractor.entries(b"k", document) == ((encode_parts([1]),), b"")


def test_a_document_whose_key_is_not_text_has_no_included_key() -> None:
    extractor = Extractor(IndexDefinition(("x",), include=("document_key()",)))
    assert extractor.entries(b"\xff", {"x": 1}) == ((encode_parts([1]),), b"")


def test_design_documents_are_in_no_index() -> None:
    assert not Extractor(IndexDefinition(("x",))).entries(b"_design/d", {"x": 1})[0]


@pytest.mark.parametrize("value", [0, 0.0, 1, "a", [0], {"a": 0}, True])
def test_values_that_a_filter_takes_for_true(value: object) -> None:
    assert is_true(value)


@pytest.mark.parametrize("value", [False, None, "", [], {}])
def test_values_that_a_filter_takes_for_false(value: object) -> None:
    assert not is_true(value)
