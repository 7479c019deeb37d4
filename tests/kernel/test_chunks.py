"""Checking and gathering: the builds agree with each other, and with lists of rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import BUILDS, agreed, outcome
from tests.kernel.fuzz import mutated
from tests.kernel.targets import TARGETS
from tests.protocol.strategies import published_chunks, stored_chunks
from upr_kernel import (
    HAS_PREFIX,
    HAS_SEQS,
    MAY_EXPIRE,
    SEQS_RISE,
    UNCONDITIONAL,
    Defect,
)
from upr_kernel.pure.columns import Columns
from upr_protocol.chunk import Chunk, Mutation, chunk_of_plain_sets, published_chunk
from upr_protocol.chunk.layout import offsets_of
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PUBLISHED_OPERATIONS, STORED_OPERATIONS, Cas, Operation, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

LIMITS: Final = (KEY_BYTES_MAX, VALUE_BYTES_MAX)
PREFIX: Final = b"a"


@given(st.one_of(published_chunks(), stored_chunks()), st.sampled_from([b"", b"a", b"_design/"]))
def test_the_flags_say_what_a_chunk_holds(chunk: Chunk, prefix: bytes) -> None:
    answer, flags = agreed("check", bytes(chunk), PUBLISHED_OPERATIONS + b"\3", *LIMITS, prefix)
    assert answer == "returned"
    rows = list(chunk)
    seqs = [chunk.start, *(row.seq for row in rows)]
    for flag, holds in (
        (UNCONDITIONAL, all(row.op is Operation.SET and not row.cas for row in rows)),
        (MAY_EXPIRE, any(row.expiry for row in rows)),
        (HAS_PREFIX, any(row.key.startswith(prefix) for row in rows)),
        (HAS_SEQS, any(row.seq for row in rows)),
        (
            SEQS_RISE,
            all(a < b for a, b in pairwise(seqs)) and seqs[-1] <= chunk.end,
        ),
    ):
        assert bool(flags & flag) == holds, flag


@given(published_chunks(), st.integers(1, 1024), st.integers(0, 1024), st.data())
def test_the_first_key_in_another_partition_is_found(
    chunk: Chunk, partition_count: int, partition: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, chunk.count))
    high = data.draw(st.integers(low, chunk.count))
    keys = chunk.keys()
    owners = [partition_of(key, partition_count) for key in keys]
    if high > low and data.draw(st.booleans()):
        partition = owners[low]
    misplaced = (row for row in range(low, high) if owners[row] != partition)
    limit = data.draw(st.integers(0, KEY_BYTES_MAX))
    misplaced = (row for row in misplaced if 1 <= len(keys[row]) <= limit)
    result = agreed("find_misplaced", bytes(chunk), low, high, partition, partition_count, limit)
    assert result == ("returned", next(misplaced, high))


def test_numbers_of_rows_and_partitions_are_not_negative_and_have_64_bits() -> None:
    chunk = bytes(chunk_of_plain_sets([b"a", b"b"], [b"1", b"2"]))
    for place in range(5):
        for wrong_number in (-1, -2, 1 << 64):
            numbers = [0, 2, 0, 8, 250]
            numbers[place] = wrong_number
            result = agreed("find_misplaced", chunk, *numbers)
            assert result == ("raised", OverflowError), numbers


@pytest.mark.parametrize(
    ("keys", "values", "operations", "defect"),
    [
        ([b"a", b""], [b"", b""], None, Defect.KEY_LENGTH),
        ([b"k" * 251], [b""], None, Defect.KEY_LENGTH),
        ([b"a"], [b"12345"], None, Defect.VALUE_LENGTH),
        ([b"a"], [b""], bytes([Operation.EXPIRE]), Defect.OPERATION),
        ([b"a"], [b""], bytes([200]), Defect.OPERATION),
    ],
)
def test_each_rule_has_its_defect(
    keys: list[bytes], values: list[bytes], operations: bytes | None, defect: Defect
) -> None:
    chunk = bytes(
        published_chunk(
            bytes(offsets_of(keys)),
            b"".join(keys),
            bytes(offsets_of(values)),
            b"".join(values),
            operations or bytes([Operation.SET] * len(keys)),
        )
    )
    result = agreed("check", chunk, PUBLISHED_OPERATIONS, KEY_BYTES_MAX, 4, b"x")
    assert result == ("damaged", defect)


@pytest.mark.parametrize(
    ("offset", "value", "defect"),
    [
        (0, 4, Defect.LAYOUT),
        (0, 0xFFFF_FFFF, Defect.LAYOUT),
        (4, 2, Defect.KEY_SPAN),
        (32 + 2 * 24 + 2 * 16, 1, Defect.KEY_SPAN),
        (32 + 2 * 24 + 2 * 16 + 4, 3, Defect.KEY_ORDER),
        (32 + 2 * 24 + 2 * 16 + 4, 0xFFFF_FFFF, Defect.KEY_ORDER),
        (32 + 2 * 24 + 3 * 16, 1, Defect.VALUE_SPAN),
        (32 + 2 * 24 + 3 * 16 + 8, 9, Defect.VALUE_ORDER),
    ],
)
def test_each_damage_has_its_defect(offset: int, value: int, defect: Defect) -> None:
    chunk = bytearray(bytes(chunk_of_plain_sets([b"a", b"b", b"c"], [b"1", b"2", b"3"])))
    chunk[offset : offset + 4] = value.to_bytes(4, "little")
    result = agreed("check", bytes(chunk), STORED_OPERATIONS, *LIMITS, PREFIX)
    assert result == ("damaged", defect)


@given(
    published_chunks(),
    st.integers(0, (1 << 64) + 3),
    st.integers(0, (1 << 64) + 3),
    st.integers(-1, 1 << 64),
)
def test_numbering_in_place_writes_two_columns_and_the_range(
    chunk: Chunk, seq: int, cas: int, start: int
) -> None:
    ends = []
    for build in BUILDS.values():
        memory = bytearray(bytes(chunk))
        ends.append((outcome(build.number_rows, memory, seq, cas, start, 7), memory))
    assert all(end == ends[0] for end in ends)
    in_range = max(seq, cas) + chunk.count < 1 << 64 and 0 <= start < 1 << 64
    result, memory = ends[0]
    if not in_range:
        assert result == ("raised", OverflowError)
        assert memory == bytes(chunk)
        return
    assert result == ("returned", None)
    columns = Columns(memory)
    assert (columns.start, columns.end) == (start, 7)
    for first, offset in ((seq, columns.seqs_at), (cas, columns.cas_at)):
        numbers = columns.column(offset, 8, 0, chunk.count).cast("Q").tolist()
        assert numbers == list(range(first, first + chunk.count))
    assert memory[columns.expiries_at :] == bytes(chunk)[columns.expiries_at :]


@pytest.mark.parametrize("build", BUILDS)
def test_what_cannot_be_written_is_not_numbered(build: str) -> None:
    chunk = bytes(chunk_of_plain_sets([b"a"], [b"1"]))
    with pytest.raises(BufferError):
        BUILDS[build].number_rows(chunk, 1, 1, 0, 1)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[Any, ...], list[Mutation]]:
    """A part, and the rows that it stands for."""
    chunk: Chunk = draw(st.one_of(published_chunks(), stored_chunks()))
    low = draw(st.integers(0, chunk.count))
    high = draw(st.integers(low, chunk.count))
    skip = draw(st.none() | st.binary(min_size=high - low, max_size=high - low))
    seq = draw(st.none() | st.integers(1, 1 << 40))
    cas = draw(st.integers(1, 1 << 40)) if seq is not None else 0
    rows = []
    for index, row in enumerate(list(chunk)[low:high]):
        if skip is not None and skip[index]:
            continue
        if seq is not None:
            row = Mutation(
                row.op,
                row.key,
                row.value,
                SeqNo(seq + index),
                Cas(cas + index),
                row.flags,
                row.expiry,
            )
        rows.append(row)
    return (bytes(chunk), low, high, skip, seq, cas), rows


@given(st.lists(parts(), max_size=7), st.integers(0, 1 << 41))
def test_gathered_rows_equal_the_rows_of_the_parts(
    drawn: list[tuple[tuple[Any, ...], list[Mutation]]], start: int
) -> None:
    answer, encoded = agreed("gather", [part for part, _ in drawn], start, start + 1)
    assert answer == "returned"
    rows = [row for _, rows in drawn for row in rows]
    expected = Chunk.build(rows, SeqNo(start), SeqNo(start + 1))
    assert encoded == bytes(expected)


@given(
    st.one_of(published_chunks(), stored_chunks()),
    st.sampled_from([b"", b"a", b"k", b"\0"]),
    st.data(),
)
def test_the_rows_with_a_prefix_are_selected(
    chunk: Chunk, prefix: bytes, data: st.DataObject
) -> None:
    if chunk.count and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(chunk.keys()))
        prefix = key[: data.draw(st.integers(0, len(key)))] + data.draw(
            st.sampled_from([b"", b"z"])
        )
    answer, encoded = agreed("select_prefix", bytes(chunk), prefix)
    assert answer == "returned"
    rows = [row for row in chunk if row.key.startswith(prefix)]
    if len(rows) == chunk.count:
        assert encoded is None
    else:
        assert encoded == bytes(Chunk.build(rows, chunk.start, chunk.end))


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_parts_may_be_slices_of_a_frame(build: Any) -> None:
    """At any address: what is read must not have to be aligned."""
    chunk = bytes(chunk_of_plain_sets([b"a", b"b"], [b"12", b"3"]))
    for shift in range(8):
        frame = memoryview(bytes(shift) + chunk)[shift:]
        assert build.gather([(frame, 0, 2, None, None, 0)], 0, 0) == chunk


@pytest.mark.parametrize("name", TARGETS)
def test_the_builds_agree_on_what_chance_makes(name: str) -> None:
    for data in mutated(name, seed=0, count=20 if name == "table" else 300):
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"to repeat: python -m tests.kernel.fuzz {name} --hex {data.hex()}")
            raise
