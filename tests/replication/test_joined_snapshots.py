"""How a replica joins small received snapshots before it writes them to disk, against a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine.snapshots.collapse import JOINED_SNAPSHOTS_MAX, SHORT_RUN_BYTES_MAX
from upr_server.replication.joined_snapshots import join_snapshots

KEYS = 6
LARGE_BYTES = SHORT_RUN_BYTES_MAX // 3

PARTS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(0, KEYS - 1), st.sampled_from([1, 1, 1, LARGE_BYTES])), max_size=4
        ),
        st.integers(0, 2),
        st.booleans(),
    ),
    max_size=30,
)
"""Chunks: the key and the value's length of each mutation, how many sequence numbers without a
mutation follow, and whether the snapshot ends there."""


@attrs.define
class ReceivedStream:
    """The chunks and snapshot ends that a stream brings.

    Attributes:
        chunks: The chunks.
        ends: The sequence numbers at which snapshots end.
    """

    chunks: list[Chunk] = attrs.field(factory=list)
    ends: list[SeqNo] = attrs.field(factory=list)


def stream_of(
    parts: Iterable[tuple[Sequence[tuple[int, int]], int, bool]], seq: int = 7
) -> ReceivedStream:
    """A stream that starts after `seq`. A snapshot has each key once."""
    stream = ReceivedStream()
    keys_of_snapshot: set[int] = set()
    for rows, gap, ends in parts:
        start, mutations = seq, []
        for key, nbytes in rows:
            if key not in keys_of_snapshot:
                keys_of_snapshot.add(key)
                seq += 1
                operation = Operation.DELETE if key == 0 else Operation.SET
                value = b"" if key == 0 else b"%d" % seq * nbytes
                mutations.append(
                    Mutation(operation, b"k%d" % key, value, SeqNo(seq), Cas(seq * 10))
                )
        seq += gap
        if seq > start:
            stream.chunks.append(Chunk.build(mutations, SeqNo(start), SeqNo(seq)))
            if ends:
                stream.ends.append(SeqNo(seq))
                keys_of_snapshot.clear()
    return stream


def join(stream: ReceivedStream, *, is_continued: bool = False) -> tuple[ReceivedStream, int]:
    """The joined snapshots, and how many steps the join took."""
    steps = join_snapshots(stream.chunks, stream.ends, is_continued=is_continued)
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return ReceivedStream(*end.value), count
        count += 1


def contents(chunks: Iterable[Chunk], through: int) -> dict[bytes, Mutation]:
    """By key, the newest mutation up to a sequence number."""
    return {row.key: row for chunk in chunks for row in chunk if row.seq <= through}


@given(PARTS, st.booleans())
def test_the_contents_at_each_remaining_end_are_unchanged(
    parts: list[tuple[list[tuple[int, int]], int, bool]], is_continued: bool
) -> None:
    stream = stream_of(parts)
    joined, _ = join(stream, is_continued=is_continued)
    assert set(joined.ends) <= set(stream.ends)
    assert joined.ends[-1:] == stream.ends[-1:]
    assert [chunk.start for chunk in joined.chunks][:1] == [c.start for c in stream.chunks][:1]
    assert [chunk.end for chunk in joined.chunks][-1:] == [c.end for c in stream.chunks][-1:]
    assert all(before.end == after.start for before, after in pairwise(joined.chunks))
    for end in (*joined.ends, *(chunk.end for chunk in stream.chunks[-1:])):
        assert contents(joined.chunks, end) == contents(stream.chunks, end)
    for chunk in joined.chunks:
        chunk.check()
        assert [row.seq for row in chunk] == sorted(row.seq for row in chunk)
    # Each snapshot has each key once. The first may have begun before these chunks, so it is only
    # checked from there.
    first_seq = stream.chunks[0].start if stream.chunks else SeqNo(0)
    bounds = [first_seq, *joined.ends]
    for start, end in pairwise(bounds):
        keys = [row.key for chunk in joined.chunks for row in chunk if start < row.seq <= end]
        assert len(keys) == len(set(keys))
    if is_continued and stream.ends:
        assert joined.ends[0] == stream.ends[0]
    # Two neighbouring snapshots remain only if they are too large to be joined.
    ends = joined.ends[1:] if is_continued else joined.ends
    starts = [joined.ends[0] if is_continued and joined.ends else first_seq, *ends]
    sizes = [
        sum(c.nbytes for c in stream.chunks if start < c.end <= end)
        for start, end in pairwise(starts)
    ]
    assert all(before + after > SHORT_RUN_BYTES_MAX for before, after in pairwise(sizes))


def test_many_small_snapshots_become_few_chunks() -> None:
    """Each joined snapshot is a step, and other tasks run between steps."""
    stream = stream_of([([(index % KEYS, 1)], 0, True) for index in range(150)])
    joined, steps = join(stream)
    assert joined.ends == [7 + JOINED_SNAPSHOTS_MAX, 7 + 2 * JOINED_SNAPSHOTS_MAX, 157]
    assert [chunk.count for chunk in joined.chunks] == [KEYS, KEYS, KEYS]
    assert steps == 3


def test_large_snapshots_are_not_copied() -> None:
    stream = stream_of([([(1, 2 * LARGE_BYTES), (2, 2 * LARGE_BYTES)], 0, True)] * 3)
    joined, _ = join(stream)
    assert joined.ends == stream.ends
    assert all(a is b for a, b in zip(joined.chunks, stream.chunks, strict=True))


def test_the_received_part_of_an_unfinished_snapshot_is_not_changed() -> None:
    stream = stream_of([([(1, 1)], 0, True), ([(2, 1)], 0, True), ([(1, 1)], 0, False)])
    joined, _ = join(stream)
    assert joined.ends == stream.ends[1:]
    assert len(joined.chunks) == 2
    assert joined.chunks[1] is stream.chunks[2]
