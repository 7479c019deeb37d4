"""Joining frames of single operations: the builds agree with each other, and with messages."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import BUILDS, agreed
from upr_protocol.chunk import Bundle, BundleRun, Chunk, Mutation
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import Mutate, MutateReply, RunResult

PARTITIONS: Final = 3
RUN: Final = Struct("<IIQI4x")
LINE: Final = Struct("<IIQQQQ")
LIMITS: Final = (250, 1000, b"\0")


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
    frames, end, ends = [], len(before), []
    for mutation, writer, counter, opaque in sets:
        frames.append(frame_of(mutation, writer, counter, opaque))
        end += len(frames[-1])
        ends.append(end)
    data = before + b"".join(frames)
    answer, joined = agreed("join_sets", data, len(before), frames_max, PARTITIONS, *LIMITS)
    assert answer == "returned"
    chunk, flags, *columns = joined
    sets = sets[:frames_max]
    rows = [mutation for mutation, *_ in sets]
    assert chunk == bytes(Chunk.build(rows, SeqNo(0), SeqNo(0)))
    assert ("returned", flags) == agreed("check", chunk, bytes([Operation.SET]), *LIMITS)
    runs = [
        BundleRun(PartitionId(partition_of(row.key, PARTITIONS)), 1, c) for row, _, c, _ in sets
    ]
    writers = [writer for _, writer, _, _ in sets]
    assert columns == [
        b"".join(RUN.pack(*run) for run in runs),
        b"".join(writers) if len(set(writers)) > 1 else writers[0],
        array("I", [opaque for *_, opaque in sets]).tobytes(),
        array("I", ends[:frames_max]).tobytes(),
    ]
    # Cut short, or behind a frame that is damaged, the others are still joined.
    last = frames[-1]
    damaged = last[:-1] + bytes([last[-1] ^ 1])
    for changed in (last[:-1], damaged, last[:30], b""):
        data = b"".join(frames[:-1]) + changed
        answer, joined = agreed("join_sets", data, 0, 1000, PARTITIONS, *LIMITS)
        assert answer == "returned"
        assert (len(joined[4]) // 4 if joined else 0) == len(frames) - 1


U16: Final = st.integers(0, (1 << 16) - 1)
FIELDS: Final = st.tuples(st.integers(0, 255), U16, U16, U32, U32, U32)


@given(FIELDS, st.binary(max_size=30), st.binary(max_size=30), st.integers(0, 8 * 24 - 1))
def test_a_header_is_read_as_it_was_packed(
    fields: tuple[int, ...], before: bytes, behind: bytes, bit: int
) -> None:
    answer, header = agreed("pack_header", *fields)
    assert answer == "returned"
    data, offset = before + header + behind, len(before)
    is_padded = fields[4] % 8 == 0
    assert agreed("read_header", data, offset) == ("returned", fields if is_padded else None)
    changed = bytearray(data)
    changed[offset + bit // 8] ^= 1 << bit % 8
    assert agreed("read_header", bytes(changed), offset) == ("returned", None)
    for cut, cut_offset in (
        (data, offset + len(behind) + 1),
        (data[: offset + 23], offset),
        (b"", 0),
    ):
        assert agreed("read_header", cut, cut_offset) == ("raised", ValueError)


@pytest.mark.parametrize("place", range(6))
def test_a_field_that_is_out_of_range_is_in_no_header(place: int) -> None:
    most = [(1 << 8) - 1, *[(1 << 16) - 1] * 2, *[(1 << 32) - 1] * 3]
    assert agreed("pack_header", *most)[0] == "returned"
    for wrong in (most[place] + 1, -1, 1 << 64):
        fields = [*most[:place], wrong, *most[place + 1 :]]
        assert agreed("pack_header", *fields) == ("raised", OverflowError)


U64: Final = st.integers(0, (1 << 64) - 1)
RESULTS: Final = st.builds(
    RunResult,
    st.integers(0, (1 << 32) - 1).map(PartitionId),
    U32,
    U64.map(HistoryId),
    U64.map(SeqNo),
    U64.map(SeqNo),
    U64.map(Cas),
)


@given(st.lists(U32, min_size=1, max_size=5), st.integers(0, 4), st.data())
def test_replies_are_those_that_messages_are(
    opaques: list[int], run_count: int, data: st.DataObject
) -> None:
    results = st.lists(RESULTS, min_size=run_count, max_size=run_count)
    replies = [MutateReply(0, tuple(data.draw(results)), opaque=opaque) for opaque in opaques]
    lines = b"".join(LINE.pack(*run) for reply in replies for run in reply.runs)
    answer, frames = agreed("encode_replies", array("I", opaques).tobytes(), lines)
    assert answer == "returned"
    assert frames == b"".join(bytes(part) for reply in replies for part in reply.frame_buffers())


def test_replies_that_have_not_as_many_lines_as_the_others_are_refused() -> None:
    for opaques, lines in ((b"", b""), (bytes(3), b""), (bytes(8), bytes(40)), (bytes(4), b"\0")):
        assert agreed("encode_replies", opaques, lines) == ("raised", ValueError)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_nothing_is_joined_of_a_key_or_value_that_is_too_long(build: object) -> None:
    join_sets = build.join_sets  # type: ignore[attr-defined]
    data = frame_of(Mutation(Operation.SET, b"key", b"value"), bytes(16), 1, 1)
    assert join_sets(data, 0, 1, PARTITIONS, 3, 5, b"") is not None
    assert join_sets(data, 0, 1, PARTITIONS, 2, 5, b"") is None
    assert join_sets(data, 0, 1, PARTITIONS, 3, 4, b"") is None
    assert join_sets(data, 0, 0, PARTITIONS, 3, 5, b"") is None
