"""An index of some documents, in one slice or several, and answers to queries of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec
from hypothesis import strategies as st

from tests.indexer.brute_force import Row
from tests.indexer.index_batches import batch, whole
from tests.indexer.kit import source_of
from upr_server.indexer.answer import Answer
from upr_server.indexer.definitions import Index
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.explanation import FreshnessLog
from upr_server.indexer.index_file import IndexFile, IndexView
from upr_server.indexer.merge import MergedScan
from upr_server.indexer.pool import ANSWER_BYTES_MAX
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.pure.extractor import Extractor
from upr_server.indexer.query import (
    Bound,
    Query,
    Range,
)
from upr_server.indexer.slice_scanner import read_answer
from upr_server.indexer.slices import SliceScan

PARTS: Final = 3
DEFINITION: Final = IndexDefinition(("a", "b", "c"))
DEFINITIONS: Final = st.builds(
    IndexDefinition,
    st.just(DEFINITION.key),
    filter=st.sampled_from(("", "b")),
    each=st.sampled_from(("", "a", "b", "c")),
    include=st.sampled_from(((), ("d",), ("c", "@"))),
)
VALUES: Final = st.sampled_from(
    [None, False, True, 0, 1, 1.5, "", "x", "x\0", "y", [], [1], ["x", 1]]
)
DOCUMENTS: Final = st.dictionaries(st.sampled_from("abcd"), VALUES)
CONTENTS: Final = st.dictionaries(
    st.integers(0, 30).map(lambda key_number: b"k%d" % key_number),
    DOCUMENTS.map(lambda document: json.dumps(document).encode()),
    max_size=20,
)
KEYS: Final = st.lists(VALUES, max_size=PARTS)
BOUNDS: Final = st.none() | st.builds(Bound, KEYS, st.booleans())
RANGES: Final = st.one_of(st.builds(Range, prefix=KEYS), st.builds(Range, low=BOUNDS, high=BOUNDS))
RANGE_FIELDS: Final = st.one_of(
    RANGES.map(msgspec.structs.asdict),
    st.lists(RANGES, max_size=4).map(lambda ranges: {"ranges": tuple(ranges)}),
)


@st.composite
def queries(draw: st.DrawFn) -> Query:
    return Query(
        **draw(RANGE_FIELDS),
        descending=draw(st.booleans()),
        distinct=draw(st.integers(0, PARTS)),
    )


@contextmanager
def an_index(
    folder: Path, definition: IndexDefinition, contents: Mapping[bytes, bytes]
) -> Iterator[Index]:
    """An index of documents."""
    file = IndexFile(folder, "b")
    try:
        index = Index(IndexName("d", "i"), definition, file, Extractor(definition))
        items = [(seq, key, value) for seq, (key, value) in enumerate(contents.items(), 1)]
        changes = batch(0, whole(len(items)), items)
        file.apply_changes(RoundChanges([changes]), source_of(index))
        file.check_invariants()
        yield index
    finally:
        file.close()


def answer(index: Index, query: Query) -> Answer:
    return merged_answer([index], query)


def merged_answer(
    slices: Sequence[Index], query: Query, bytes_max: int = ANSWER_BYTES_MAX
) -> Answer:
    with ExitStack() as stack:
        views = [stack.enter_context(index.file.open_view()) for index in slices]
        return answer_of(views, slices, query, bytes_max)


def answer_of(
    views: Sequence[IndexView],
    slices: Sequence[Index],
    query: Query,
    bytes_max: int = ANSWER_BYTES_MAX,
) -> Answer:
    """The answer to a query of these moments of the slices."""
    name, definition = slices[0].name, slices[0].definition
    query.check()
    merged = MergedScan(name, definition, query, len(slices))
    while not merged.is_complete:
        scan = SliceScan(name, definition, merged.query, bytes_max)
        selection = merged.query.selection(len(definition.key))
        merged.add([read_answer(view, scan, selection, FreshnessLog()) for view in views])
    return msgspec.json.decode(b"".join(merged.answer().pieces()), type=Answer)


def rows_of(page: Answer) -> list[Row]:
    return [Row(entry.key, entry.id, entry.included) for entry in page.entries]
