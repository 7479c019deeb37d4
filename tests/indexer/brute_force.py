"""Brute force: what an index contains, and what a query of it answers, as plainly as can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cmp_to_key
from typing import Any

import attrs
import jmespath
import msgspec
from jmespath import functions

from tests.indexer.pure.key_order import compare
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.extractor import ENCODED_BYTES_MAX
from upr_server.indexer.pure.keys import IndexKeyError, encode_parts
from upr_server.indexer.query import Query, Range


@attrs.frozen
class Row:
    """An entry of an index.

    Attributes:
        key: The parts of its key.
        id: The document's key.
        included: The included values; None if there are none.
    """

    key: list[Any]
    id: str = ""
    included: list[Any] | None = None


@attrs.frozen
class Expected:
    """The answer to a query, without a limit.

    Attributes:
        rows: The entries, or the distinct beginnings of their keys.
        count: How many there are.
        min: The lowest key; None if there is none.
        max: The highest key, likewise.
    """

    rows: list[Row]
    count: int
    min: list[Any] | None
    max: list[Any] | None


class _Functions(functions.Functions):  # type: ignore[misc]
    def __init__(self, key: str) -> None:
        self._key = key

    @functions.signature()  # type: ignore[untyped-decorator]
    def _func_document_key(self) -> str:
        return self._key


def _value(expression: str, key: str, document: Any) -> Any:
    options = jmespath.Options(custom_functions=_Functions(key))
    try:
        return jmespath.search(expression, document, options)
    except Exception:  # noqa: BLE001  a failing expression is null
        return None


def index_rows(definition: IndexDefinition, contents: Mapping[bytes, bytes]) -> list[Row]:
    """The entries of an index of `contents`, in order."""
    rows: list[Row] = []
    for key, text in contents.items():
        try:
            document = msgspec.json.decode(text)
        except msgspec.DecodeError:
            continue
        rows += _document_rows(definition, key.decode(), document)
    return sorted(rows, key=cmp_to_key(_compare_rows))


def _document_rows(definition: IndexDefinition, key: str, document: Any) -> list[Row]:
    if definition.filter:
        is_in = _value(definition.filter, key, document)
        # Zero equals False, and JMESPath takes it for true.
        if is_in is False or (is_in in (None, "", [], {}) and not isinstance(is_in, int | float)):
            return []
    parts = [_value(expression, key, document) for expression in definition.key]
    included = [_value(expression, key, document) for expression in definition.include] or None
    alternatives = [parts]
    if definition.each:
        place = definition.key.index(definition.each)
        elements = parts[place] if isinstance(parts[place], list) else [parts[place]]
        alternatives = [[*parts[:place], element, *parts[place + 1 :]] for element in elements]
    rows: list[Row] = []
    for alternative in alternatives:
        row = Row(alternative, key, included)
        is_new = all(compare(existing.key, alternative) != 0 for existing in rows)
        if alternative[0] is not None and is_new and _is_key(alternative):
            rows.append(row)
    return rows


def _is_key(parts: list[Any]) -> bool:
    try:
        return len(encode_parts(parts)) <= ENCODED_BYTES_MAX
    except IndexKeyError:
        return False


def _compare_rows(left: Row, right: Row) -> int:
    order = compare(left.key, right.key)
    ids = left.id.encode(), right.id.encode()
    return order or (ids[0] > ids[1]) - (ids[0] < ids[1])


def _contains(bounds: Query | Range, key: Sequence[Any]) -> bool:
    if bounds.prefix is not None:
        return compare(list(key[: len(bounds.prefix)]), bounds.prefix) == 0
    if bounds.low is not None:
        order = compare(list(key[: len(bounds.low.key)]), bounds.low.key)
        if order < 0 or (order == 0 and bounds.low.key and not bounds.low.inclusive):
            return False
    if bounds.high is not None:
        order = compare(list(key[: len(bounds.high.key)]), bounds.high.key)
        if order > 0 or (order == 0 and bounds.high.key and not bounds.high.inclusive):
            return False
    return True


def expected_answer(rows: Sequence[Row], query: Query) -> Expected:
    """What a query of an index with these entries answers."""
    ranges: Sequence[Query | Range] = [query] if query.ranges is None else query.ranges
    selected = [row for row in rows if any(_contains(key_range, row.key) for key_range in ranges)]
    if query.distinct:
        beginnings: list[Row] = []
        for row in selected:
            beginning = row.key[: query.distinct]
            if not beginnings or compare(beginnings[-1].key, beginning) != 0:
                beginnings.append(Row(beginning))
        selected = beginnings
    return Expected(
        selected[::-1] if query.descending else selected,
        len(selected),
        selected[0].key if selected else None,
        selected[-1].key if selected else None,
    )
