"""The columns of a round's documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.indexer.index_batches import batch, whole
from upr_server.indexer import document_rows
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.pure.extractor import decode_values

Item = tuple[bytes, bytes | None]

PARTITIONS = st.integers(0, 2)
ITEMS = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"\xff"]), st.sampled_from([b"1", b"{", None])),
    max_size=4,
    unique_by=lambda item: item[0],
)


def batches_of(steps: Sequence[tuple[int, list[Item]]]) -> list[IndexBatch]:
    """A batch for each step; those of one partition follow on each other."""
    seqs = Counter[int]()
    batches: list[IndexBatch] = []
    for partition, items in steps:
        first_seq = seqs[partition] + 1
        seqs[partition] += len(items)
        rows = [(seq, key, value) for seq, (key, value) in enumerate(items, first_seq)]
        batches.append(batch(partition, whole(seqs[partition]), rows))
    return batches


@given(st.lists(st.tuples(PARTITIONS, ITEMS), max_size=6), st.sets(PARTITIONS), st.booleans())
def test_the_rows_of_some_partitions_are_those_of_their_batches(
    steps: list[tuple[int, list[Item]]], covered: set[int], is_decoded: bool
) -> None:
    batches = batches_of(steps)
    changes = RoundChanges(batches)
    if is_decoded:
        assert len(changes.rows.documents) == len(changes.rows)
    rows = changes.of(covered.__contains__).rows
    model = RoundChanges([item for item in batches if item.partition in covered]).rows
    assert (rows.back_keys, rows.keys, rows.values) == (
        model.back_keys,
        model.keys,
        model.values,
    )
    assert list(rows.documents) == list(model.documents)


def test_documents_are_decoded_once_though_an_index_takes_some_partitions_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new index takes the partitions that have joined the running indexes' stream."""
    decoded: list[bytes] = []

    def note_decoded(values: Sequence[bytes]) -> list[Any]:
        decoded.extend(values)
        return decode_values(values)

    monkeypatch.setattr(document_rows, "decode_values", note_decoded)
    changes = RoundChanges(batches_of([(0, [(b"a", b"1")]), (1, [(b"b", b"2")])]))
    assert changes.rows.documents == [1, 2]
    for _ in range(2):
        assert changes.of(lambda partition: partition == 1).rows.documents == [2]
    assert decoded == [b"1", b"2"]
