"""The chunk builder, against a list of rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.strategies import mutations, stored_chunks
from upr_protocol.chunk import (
    ChunkBuilder,
    Mutation,
)
from upr_protocol.ids import SEQ_MAX, Cas, Operation, SeqNo

MIB = 1024 * 1024


def a_set(seq: int, key: bytes, value: bytes = b"") -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq))


@given(st.data())
def test_a_builder_is_a_list_of_rows(data: st.DataObject) -> None:
    builder, rows = ChunkBuilder(), list[Mutation]()
    for _ in range(data.draw(st.integers(0, 8))):
        action = data.draw(st.sampled_from(["append", "extend", "some", "numbered"]))
        if action == "append":
            row = data.draw(mutations())
            builder.append(row.op, row.key, row.value, row.seq, row.cas, row.flags, row.expiry)
            rows.append(row)
        else:
            chunk = data.draw(stored_chunks(10))
            more = list(chunk)
            keep = None
            if action != "extend":
                keep = data.draw(st.lists(st.booleans(), min_size=len(more), max_size=len(more)))
            if action == "numbered":
                seqs = list(range(7, 7 + len(more)))
                cas = list(range(9, 9 + len(more)))
                builder.extend_numbered(chunk, seqs, cas, keep)
                more = [
                    Mutation(m.op, m.key, m.value, SeqNo(s), Cas(c), m.flags, m.expiry)
                    for m, s, c in zip(more, seqs, cas, strict=True)
                ]
            else:
                builder.extend(chunk, keep)
            rows += more if keep is None else [m for m, k in zip(more, keep, strict=True) if k]
        built = builder.build(SeqNo(0), SEQ_MAX)
        assert list(built) == rows
        assert len(builder) == len(rows)
        assert builder.nbytes == built.nbytes


def test_a_built_chunk_does_not_change_while_the_builder_continues() -> None:
    builder = ChunkBuilder()
    builder.append(Operation.SET, b"a", b"1", 1)
    first = builder.build()
    builder.append(Operation.DELETE, b"c", b"", 4)
    assert list(first) == [a_set(1, b"a", b"1")]
    assert (builder.build().start, builder.build().end) == (0, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": 256},
        {"key": "text"},
        {"value": {}},
        {"seq": -1},
        {"cas": 1 << 64},
        {"flags": 1 << 32},
        {"expiry": 0.5},
    ],
)
def test_a_row_that_does_not_fit_leaves_nothing_behind(wrong: dict[str, Any]) -> None:
    builder = ChunkBuilder()
    row: dict[str, Any] = {"op": Operation.SET, "seq": 1, "cas": 2, "flags": 3, "expiry": 4}
    for turn in range(2):
        with pytest.raises((OverflowError, TypeError, ValueError)):
            builder.append(**{"key": b"wrong", "value": b"wrong", **row, **wrong})
        assert len(builder) == turn
        builder.append(key=b"right", value=b"right", **row)
    expected = Mutation(Operation.SET, b"right", b"right", SeqNo(1), Cas(2), 3, 4)
    assert list(builder.build(SeqNo(0), SEQ_MAX)) == [expected] * 2
