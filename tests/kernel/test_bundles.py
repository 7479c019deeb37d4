"""Joining runs to a bundle: the builds agree with each other, and with lists of rows."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import agreed
from tests.protocol.strategies import U32, U64, published_chunks, stored_chunks
from upr_protocol.chunk import BundleRun, Chunk, chunk_of_plain_sets, decode_runs
from upr_protocol.ids import PartitionId, SeqNo

PLAIN: Final = bytes(chunk_of_plain_sets([b"a", b"b"], [b"", b"value"]))
EMPTY: Final = bytes(chunk_of_plain_sets([], []))


@given(
    st.dictionaries(U32, st.one_of(published_chunks(), stored_chunks()), max_size=6),
    st.data(),
)
def test_the_joined_rows_are_those_of_the_runs_without_numbers(
    chunks: dict[int, Chunk], data: st.DataObject
) -> None:
    runs = [
        (partition, bytes(chunk), data.draw(U64), data.draw(U32))
        for partition, chunk in sorted(chunks.items())
    ]
    result = agreed("join_runs", runs)
    if not all(chunk.count for chunk in chunks.values()):
        assert result == ("raised", ValueError)
        return
    answer, (directory, joined) = result
    assert answer == "returned"
    assert decode_runs(directory) == tuple(
        BundleRun(PartitionId(partition), chunks[partition].count, counter, chain)
        for partition, _, counter, chain in runs
    )
    rows = [
        msgspec.structs.replace(row, seq=0) for _, chunk in sorted(chunks.items()) for row in chunk
    ]
    assert joined == bytes(Chunk.build(rows, SeqNo(0), SeqNo(0)))


@pytest.mark.parametrize(
    ("runs", "result"),
    [
        ([(0, PLAIN, 0, 0), (0, PLAIN, 0, 0)], ("raised", ValueError)),
        ([(3, PLAIN, 0, 0), (2, PLAIN, 0, 0)], ("raised", ValueError)),
        ([(3, EMPTY, 0, 0)], ("raised", ValueError)),
        ([(1 << 32, PLAIN, 0, 0)], ("raised", OverflowError)),
        ([(-1, PLAIN, 0, 0)], ("raised", OverflowError)),
        ([(0, PLAIN, 1 << 64, 0)], ("raised", OverflowError)),
        ([(0, PLAIN, 0, 1 << 32)], ("raised", OverflowError)),
    ],
)
def test_what_is_no_bundle_is_refused(
    runs: list[tuple[int, bytes, int, int]], result: tuple[str, type[Exception]]
) -> None:
    assert agreed("join_runs", runs) == result
