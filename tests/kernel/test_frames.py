"""Joining frames of single operations: the builds agree with each other, and with messages."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import BUILDS, agreed
from upr_protocol.chunk import Bundle, Chunk, Mutation
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.wire import Mutate

PARTITIONS: Final = 3
LIMITS: Final = (250, 1000)


def frame_of(mutation: Mutation, writer: bytes, counter: int, opaque: int) -> bytes:
    partition = PartitionId(partition_of(mutation.key, PARTITIONS))
    chunk = Chunk.build([mutation], SeqNo(0), SeqNo(0))
    message = Mutate(Bundle.of_one_run(partition, chunk, counter), writer, opaque=opaque)
    return b"".join(map(bytes, message.frame_buffers()))


U32: Final = st.integers(0, (1 << 32) - 1)

SETS: Final = st.tuples(
    st.builds(
        Mutation,
        op=st.just(Operation.SET),
        key=st.binary(min_size=1, max_size=20),
        value=st.binary(max_size=30),
        flags=U32,
        expiry=U32,
    ),
    st.sampled_from([bytes(16), b"sixteen bytes id"]),
    st.integers(0, (1 << 64) - 1),
    U32,
)


@given(st.lists(SETS, min_size=1, max_size=70), st.integers(1, 70), st.binary(max_size=40))
def test_a_chunk_of_all_rows_and_a_description_of_each_frame(
    sets: list[tuple[Mutation, bytes, int, int]], frames_max: int, before: bytes
) -> None:
    frames, described, end = [], [], len(before)
    for mutation, writer, counter, opaque in sets:
        frames.append(frame_of(mutation, writer, counter, opaque))
        end += len(frames[-1])
        described.append((end, opaque, partition_of(mutation.key, PARTITIONS), writer, counter))
    data = before + b"".join(frames)
    answer, joined = agreed("join_sets", data, len(before), frames_max, PARTITIONS, *LIMITS)
    assert answer == "returned"
    rows = [mutation for mutation, *_ in sets[:frames_max]]
    assert joined == (bytes(Chunk.build(rows, SeqNo(0), SeqNo(0))), described[:frames_max])
    # Cut short, or behind a frame that is damaged, the others are still joined.
    last = frames[-1]
    damaged = last[:-1] + bytes([last[-1] ^ 1])
    for changed in (last[:-1], damaged, last[:30], b""):
        data = b"".join(frames[:-1]) + changed
        answer, joined = agreed("join_sets", data, 0, 1000, PARTITIONS, *LIMITS)
        assert answer == "returned"
        assert len(joined[1] if joined else []) == len(frames) - 1


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_nothing_is_joined_of_a_key_or_value_that_is_too_long(build: object) -> None:
    join_sets = build.join_sets  # type: ignore[attr-defined]
    data = frame_of(Mutation(Operation.SET, b"key", b"value"), bytes(16), 1, 1)
    assert join_sets(data, 0, 1, PARTITIONS, 3, 5) is not None
    assert join_sets(data, 0, 1, PARTITIONS, 2, 5) is None
    assert join_sets(data, 0, 1, PARTITIONS, 3, 4) is None
    assert join_sets(data, 0, 0, PARTITIONS, 3, 5) is None
