"""Entries of the key index: the builds agree with each other, and with a dict."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import agreed
from tests.protocol.strategies import stored_chunks
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Operation, SeqNo
from upr_server.storage.records import KeyIndexEntry

PREFIX: Final = b"k\0\1"

KEYS: Final = st.one_of(
    st.binary(min_size=1, max_size=3),
    st.sampled_from([b"a", b"ab", b"b", b"\xff" * 250]),
)


@st.composite
def neighbours(draw: st.DrawFn) -> list[Chunk]:
    """Stored chunks, each of which begins where the one before ends; some keys occur again."""
    chunks, seq = list[Chunk](), draw(st.integers(0, 1 << 40))
    for count in draw(st.lists(st.integers(0, 12), max_size=5)):
        start, rows = seq, list[Mutation]()
        for _ in range(count):
            seq += draw(st.integers(1, 3))
            rows.append(
                Mutation(
                    draw(st.sampled_from([Operation.SET, Operation.DELETE, Operation.EXPIRE])),
                    draw(KEYS),
                    seq=SeqNo(seq),
                    expiry=draw(st.sampled_from([0, 0, 7, (1 << 32) - 1])),
                )
            )
        chunks.append(Chunk.build(rows, SeqNo(start), SeqNo(seq)))
    return chunks


@given(neighbours())
def test_the_newest_mutation_of_each_key_is_an_entry(chunks: list[Chunk]) -> None:
    newest = {row.key: row for chunk in chunks for row in chunk}
    entries, items, may_expire = [], 0, False
    for key, row in sorted(newest.items()):
        is_item = row.op is Operation.SET
        entry = KeyIndexEntry(row.seq, row.expiry if is_item else 0, not is_item)
        entries.append((PREFIX + key, entry.pack(PREFIX + key)))
        items += is_item
        may_expire |= entry.expiry > 0
    result = agreed("index_entries", list(map(bytes, chunks)), PREFIX)
    assert result == ("returned", (entries, items, may_expire))


@given(stored_chunks(max_size=40))
def test_entries_are_parsed_as_they_were(chunk: Chunk) -> None:
    answer, (entries, _, _) = agreed("index_entries", [bytes(chunk)], PREFIX)
    assert answer == "returned"
    seqs = {KeyIndexEntry.parse(key, value).seq for key, value in entries}
    assert seqs == {row.seq for row in {row.key: row for row in chunk}.values()}


@pytest.mark.parametrize(
    ("seq", "outcome"),
    [((1 << 63) - 1, "returned"), (1 << 63, "raised"), ((1 << 64) - 1, "raised")],
)
def test_a_number_has_63_bits(seq: int, outcome: str) -> None:
    rows = [Mutation(Operation.SET, b"a", seq=SeqNo(seq))]
    chunk = Chunk.build(rows, SeqNo(seq - 1), SeqNo(seq))
    assert agreed("index_entries", [bytes(chunk)], PREFIX)[0] == outcome


@pytest.mark.parametrize(
    "arguments", [((), PREFIX), ([b""], PREFIX), ([1], PREFIX), ([], "k"), ([],)]
)
def test_other_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    assert agreed("index_entries", *arguments)[0] != "returned"
