"""Every query of an index, against brute force over the documents."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.indexer.brute_force import Row, expected_answer, index_rows
from tests.indexer.counted_reads import counted_reads
from tests.indexer.index_batches import batch, whole
from tests.indexer.kit import source_of
from tests.indexer.queried_index import (
    CONTENTS,
    DEFINITION,
    DEFINITIONS,
    KEYS,
    PARTS,
    an_index,
    answer,
    merged_answer,
    queries,
    rows_of,
)
from tests.kit.effort import effort
from upr_protocol.ids import PartitionId
from upr_server.indexer import query as query_module
from upr_server.indexer import short_scan
from upr_server.indexer.definitions import Index
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.explanation import RangeEnd, ReadRange
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.pool import ANSWER_BYTES_MAX
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import (
    KEY_SIZE_MAX,
    KEY_VALUES_MAX,
    Bound,
    Query,
    QueryError,
    Range,
    _size_of,
    read_query,
)
from upr_server.indexer.short_scan import selection_of
from upr_server.indexer.slices import SliceId

DEEP: Final = base64.urlsafe_b64encode(b"\x0a" * 2000 + b"\0" * 2000 + b"\x05\x05k").decode()


@contextmanager
def slices_of(
    folder: Path, definition: IndexDefinition, contents: Mapping[bytes, bytes], count: int
) -> Iterator[list[Index]]:
    """The slices of an index of documents."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                an_index(
                    folder / SliceId(part, count).folder,
                    definition,
                    {key: value for key, value in contents.items() if sum(key) % count == part},
                )
            )
            for part in range(count)
        ]


def all_rows(
    slices: Sequence[Index], query: Query, limit: int, bytes_max: int = ANSWER_BYTES_MAX
) -> list[Row]:
    """The entries of all pages."""
    rows: list[Row] = []
    continuation = ""
    while True:
        page_query = msgspec.structs.replace(query, limit=limit, continuation=continuation)
        page = merged_answer(slices, page_query, bytes_max)
        rows += rows_of(page)
        assert len(page.entries) <= limit
        continuation = page.continuation
        if not continuation:
            return rows


@settings(max_examples=effort(150, 300))
@given(
    DEFINITIONS,
    CONTENTS,
    st.lists(st.tuples(queries(), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_every_query_answers_what_brute_force_finds(
    tmp_path_factory: pytest.TempPathFactory,
    definition: IndexDefinition,
    contents: dict[bytes, bytes],
    drawn_queries: list[tuple[Query, int]],
    slice_count: int,
) -> None:
    rows = index_rows(definition, contents)
    folder = tmp_path_factory.mktemp("index")
    with slices_of(folder, definition, contents, slice_count) as slices:
        for query, limit in drawn_queries:
            expected = expected_answer(rows, query)
            assert all_rows(slices, query, 10_000) == expected.rows
            assert all_rows(slices, query, limit) == expected.rows
            # Pages that end as they are full, at a different place in each slice.
            assert all_rows(slices, query, 10_000, 100 * limit) == expected.rows
            question = msgspec.structs.replace(query, count=True, min=True, max=True)
            summary = merged_answer(slices, question)
            assert (summary.count, summary.min, summary.max) == (
                expected.count,
                expected.min,
                expected.max,
            )


@settings(max_examples=200)
@given(
    DEFINITIONS,
    CONTENTS,
    queries(),
    st.integers(1, 30),
    st.sampled_from(({}, {"count": True}, {"min": True}, {"max": True, "count": True})),
)
def test_an_explanation_counts_what_was_read(
    tmp_path_factory: pytest.TempPathFactory,
    definition: IndexDefinition,
    contents: dict[bytes, bytes],
    query: Query,
    limit: int,
    summary: dict[str, Any],
) -> None:
    rows = index_rows(definition, contents)
    query = msgspec.structs.replace(query, **(summary or {"limit": limit}))
    with an_index(tmp_path_factory.mktemp("index"), definition, contents) as index:
        plain = answer(index, query)
        with counted_reads(index.file) as counts:
            explained = answer(index, msgspec.structs.replace(query, explain=True))
        explanation = explained.explanation
        assert explanation is not None
        assert msgspec.structs.replace(explained, explanation=None) == plain
        assert explanation.searches == counts.searches
        assert explanation.entries_read == counts.entries
        assert explanation.included_read == counts.values
        assert explanation.entries_given == len(plain.entries)
        assert explanation.index_entries == len(rows)
        assert (explanation.ended_by == "limit") is bool(plain.continuation)
        # The ranges say in words what was read: they hold the same entries as the query.
        ranges = tuple(
            Range(low=as_bound(range_.low), high=as_bound(range_.high))
            for range_ in explanation.ranges
        )
        in_words = Query(ranges=ranges, descending=query.descending, distinct=query.distinct)
        expected = expected_answer(rows, query)
        assert expected_answer(rows, in_words) == expected
        if not (summary or query.distinct):
            # One entry more where a range ends before the index does, or a page before its range.
            surplus = len(explanation.ranges) + bool(plain.continuation)
            assert 0 <= explanation.entries_read - len(plain.entries) <= surplus


def as_bound(end: RangeEnd | None) -> Bound | None:
    return None if end is None else Bound(end.key, end.inclusive)


def test_an_explanation_tells_where_a_page_begins(tmp_path: Path) -> None:
    contents = {b"k%d" % index: b'{"a": %d, "b": 1}' % (index % 2) for index in range(9)}
    with an_index(tmp_path, DEFINITION, contents) as index:
        query = Query(prefix=[1], limit=2, explain=True)
        first = answer(index, query)
        second = answer(index, msgspec.structs.replace(query, continuation=first.continuation))
    assert first.explanation is not None
    assert second.explanation is not None
    end = RangeEnd([1], True)
    assert first.explanation.ranges == (ReadRange(end, end),)
    behind_last = RangeEnd([1, 1, None], False, "k3")
    assert second.explanation.ranges == (ReadRange(behind_last, end),)
    assert second.explanation.entries_read == 2
    assert second.explanation.ended_by == "ranges"
    assert first.explanation.entries_read == 3
    assert first.explanation.ended_by == "limit"


def test_distinct_beginnings_are_found_without_reading_every_entry(tmp_path: Path) -> None:
    contents = {b"k%d" % index: b'{"a": %d, "b": %d}' % (index % 3, index) for index in range(3000)}
    with an_index(tmp_path, DEFINITION, contents) as index:
        reads = 0

        def count_reads(frame: Any, event: str, argument: Any) -> None:
            nonlocal reads
            if event == "c_call" and getattr(argument, "__name__", "") in ("set_range", "__next__"):
                reads += 1

        sys.setprofile(count_reads)
        try:
            summary = answer(index, Query(distinct=1, count=True, min=True, max=True))
        finally:
            sys.setprofile(None)
        assert (summary.count, summary.min, summary.max) == (3, [0], [2])
        assert reads < 20


@settings(max_examples=100)
@given(DEFINITIONS, st.lists(CONTENTS, min_size=2, max_size=4))
def test_an_index_follows_its_documents(
    tmp_path_factory: pytest.TempPathFactory,
    definition: IndexDefinition,
    states: list[dict[bytes, bytes]],
) -> None:
    """Entries of elements and included values come and go with their documents."""
    contents: dict[bytes, bytes] = {}
    seq = 0
    with an_index(tmp_path_factory.mktemp("index"), definition, {}) as index:
        source = source_of(index)
        for state in states:
            items: list[tuple[int, bytes, bytes | None]] = []
            for key in contents.keys() | state.keys():
                seq += 1
                items.append((seq, key, state.get(key)))
            contents = state
            changes = batch(0, whole(seq), items)
            index.file.apply_changes(RoundChanges([changes]), source)
            index.file.check_invariants()
            assert all_rows([index], Query(), 10_000) == index_rows(definition, contents)
            # The same documents again change nothing.
            again = IndexBatch(PartitionId(0), whole(seq), rollback_documents=contents)
            assert index.file.apply_changes(RoundChanges([again]), source) == 0
        cleared = IndexBatch(PartitionId(0), whole(0), clears_one_of=1)
        index.file.apply_changes(RoundChanges([cleared]), source)
        index.file.check_invariants()
        assert index.file.entry_count() == 0


@pytest.mark.parametrize("array_key", ["", "a"])
def test_included_values_change_beside_a_key_that_does_not(tmp_path: Path, array_key: str) -> None:
    definition = IndexDefinition(("a",), each=array_key, include=("d",))
    contents = {b"k": b'{"a": ["x", "y"], "d": 1}'}
    with an_index(tmp_path, definition, contents) as index:
        long_value = '"' + "x" * 5000 + '"'
        for seq, value in enumerate(("2", "2", long_value, '{"n": [3]}', "null"), 2):
            contents = {b"k": b'{"a": ["x", "y"], "d": %s}' % value.encode()}
            change = batch(0, whole(seq), [(seq, b"k", contents[b"k"])])
            index.file.apply_changes(RoundChanges([change]), source_of(index))
            entries = answer(index, Query()).entries
            expected = None if value == long_value else [json.loads(value)]
            assert [entry.included for entry in entries] == [expected] * (2 if array_key else 1)


@pytest.mark.parametrize("descending", [False, True])
def test_a_beginning_that_two_ranges_share_is_found_once(tmp_path: Path, descending: bool) -> None:
    contents = {b"k%d" % index: b'{"a": 1, "b": %d}' % index for index in range(9)}
    ranges = (Range(prefix=[1, 2]), Range(prefix=[1, 5]))
    with an_index(tmp_path, DEFINITION, contents) as index:
        page = answer(index, Query(ranges=ranges, distinct=1, descending=descending))
    assert [entry.key for entry in page.entries] == [[1]]


@pytest.mark.parametrize(
    ("fields", "place", "reason"),
    [
        ({"count": True, "limit": 5}, "limit", "exclude `limit`"),
        ({"min": True, "limit": 5}, "limit", "exclude `limit`"),
        ({"max": True, "continuation": "x"}, "continuation", "exclude `continuation`"),
        ({"distinct": 4}, "distinct", "4 parts are too many: keys of this index have 3"),
        ({"ranges": (), "prefix": [1]}, "ranges", "and not both"),
        ({"ranges": (Range(prefix=[1], low=Bound([2])),)}, "ranges[0].prefix", "and not both"),
        ({"ranges": (Range(), Range(high=Bound([{}])))}, "ranges[1].high.key", "an object"),
        ({"distinct": 1, "continuation": "CQB4AAFr"}, "continuation", "invalid"),
        ({"continuation": "BQ=="}, "continuation", "invalid"),
        # Deep enough to exhaust the interpreter's stack.
        ({"continuation": DEEP}, "continuation", "invalid"),
        ({"prefix": ["x" * KEY_SIZE_MAX]}, "prefix", "at most 1024 values and characters"),
        ({"low": Bound([[0] * KEY_SIZE_MAX])}, "low.key", "at most 1024 values and characters"),
        ({"ranges": (Range(prefix=[[["ab"] * 400]]),)}, "ranges[0].prefix", "at most 1024 values"),
        (
            {"ranges": (Range(prefix=[[0] * 999]),) * 33},
            "ranges",
            "the bounds have more than 32000 values together",
        ),
    ],
)
def test_a_query_that_contradicts_itself_is_refused(
    fields: dict[str, Any], place: str, reason: str
) -> None:
    with pytest.raises(QueryError, match=reason) as caught:
        check(Query(**fields))
    assert caught.value.place == place


NESTED = st.recursive(
    st.integers() | st.text(max_size=3), lambda values: st.lists(values, max_size=4), max_leaves=20
)


def naive_size(value: Any) -> int:
    """Values and characters of a key's value, itself included."""
    if isinstance(value, list):
        return 1 + sum(map(naive_size, value))
    return 1 + (len(value) if isinstance(value, str) else 0)


@given(st.lists(st.lists(NESTED, max_size=PARTS), max_size=4), st.integers(1, 60))
def test_bounds_are_refused_by_their_size(keys: list[list[Any]], size_max: int) -> None:
    query = Query(ranges=tuple(Range(low=Bound(key)) for key in keys))
    sizes = [naive_size(key) - 1 for key in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_module, "KEY_SIZE_MAX", size_max)
        if max(sizes, default=0) <= size_max:
            query.check()
        else:
            with pytest.raises(QueryError, match="values and characters"):
                query.check()


def test_values_over_the_bound_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 1 MiB has half a million: to count them held the event loop for 30 ms."""
    counted = 0

    def size_of(key: list[Any], size_max: int) -> tuple[int, int]:
        nonlocal counted
        counted += len(key)
        return _size_of(key, size_max)

    monkeypatch.setattr(query_module, "_size_of", size_of)
    with pytest.raises(QueryError, match="values together"):
        Query(ranges=(Range(prefix=[0] * 500),) * 1000).check()
    assert counted == KEY_VALUES_MAX + 500


async def test_the_values_of_many_ranges_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count them again took the event loop 2.5 ms more."""
    counted = 0

    def size_of(key: list[Any], size_max: int) -> tuple[int, int]:
        nonlocal counted
        counted += 1
        return _size_of(key, size_max)

    monkeypatch.setattr(query_module, "_size_of", size_of)
    query = Query(ranges=tuple(Range(prefix=[number]) for number in range(1000)))
    query.check()
    assert len((await selection_of(query, PARTS)).ranges) == 1000
    assert counted == 1000


@given(queries())
async def test_many_bounds_select_the_same_in_a_thread(query: Query) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_scan, "VALUES_MAX", 0)
        assert await selection_of(query, PARTS) == query.selection(PARTS)
    assert await selection_of(query, PARTS) == query.selection(PARTS)


def check(query: Query) -> None:
    query.check()
    query.selection(PARTS)


@given(KEYS.filter(len), KEYS.filter(len))
def test_ranges_that_meet_are_read_once(first: list[object], second: list[object]) -> None:
    """Each range begins with a key; the ranges of a scan never overlap."""
    query = Query(ranges=(Range(low=Bound(first)), Range(prefix=second), Range(high=Bound(first))))
    (whole_range,) = query.selection(PARTS).ranges
    assert whole_range.low == b""


@pytest.mark.parametrize(
    ("body", "place", "words"),
    [
        (b'{"hold_s": 61}', "hold_s", "60.0"),
        (b'{"low": {"key": 1}}', "low.key", "array"),
        (b'{"colour": 1}', "colour", "unknown field"),
        (b'{"low": {"colour": 1}}', "low.colour", "unknown field"),
        (b'{"consistency": "soon"}', "consistency", "use `any`, `at_least` or `now`"),
        (b'{"\\ud800": 1}', "body", ""),
        (b"{", "body", "truncated"),
        (b"[]", "body", "object"),
        (b"\xff", "body", ""),
        (b"[" * 100_000, "body", ""),
    ],
)
def test_a_body_that_is_no_query_is_refused_with_its_field(
    body: bytes, place: str, words: str
) -> None:
    """The place was `body`, whatever the field."""
    with pytest.raises(QueryError) as caught:
        read_query(body)
    assert caught.value.place == place
    assert str(caught.value).startswith(f"{place}: ")
    assert words in str(caught.value)
    assert "$" not in str(caught.value)
