"""Rows split by partition: the builds agree with each other, and with chunks made row by row."""

from __future__ import annotations

from array import array
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import BUILDS, agreed
from tests.kernel.row_columns import columns
from upr_kernel import Defect
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, Operation

ROWS: Final = st.lists(
    st.builds(
        Mutation,
        st.sampled_from(list(Operation)),
        st.binary(max_size=6),
        st.binary(max_size=20),
        cas=st.integers(0, (1 << 64) - 1).map(Cas),
        flags=st.integers(0, (1 << 32) - 1),
        expiry=st.integers(0, (1 << 32) - 1),
    ),
    max_size=12,
)


@given(st.lists(ROWS, max_size=4), st.integers(1, 40), st.binary(max_size=9), st.booleans())
def test_each_partition_gets_its_rows_in_their_order(
    parts: list[list[Mutation]], partition_count: int, before: bytes, are_plain: bool
) -> None:
    split: list[tuple[bytes | None, ...]] = [columns(rows, before) for rows in parts]
    if are_plain:
        split = [(*part[:5], None, None, None) for part in split]
    expected: dict[int, list[Mutation]] = {}
    for row in (row for rows in parts for row in rows):
        stored_row = Mutation(row.op, row.key, row.value) if are_plain else row
        expected.setdefault(partition_of(row.key, partition_count), []).append(stored_row)
    answer, chunks = agreed("split_rows", split, partition_count)
    assert answer == "returned"
    assert chunks == [
        (partition, bytes(Chunk.build(rows))) for partition, rows in sorted(expected.items())
    ]


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_columns_may_be_slices(build: Any) -> None:
    """At any address: what is read must not have to be aligned."""
    rows = [Mutation(Operation.SET, b"a", b"1"), Mutation(Operation.DELETE, b"b")]
    for shift in range(8):
        part = tuple(memoryview(bytes(shift) + column)[shift:] for column in columns(rows))
        assert build.split_rows([part], 1) == [(0, bytes(Chunk.build(rows)))]


ONE: Final = columns([Mutation(Operation.SET, b"key", b"value")])


@pytest.mark.parametrize("index", range(8))
def test_columns_of_other_lengths_are_refused(index: int) -> None:
    for column in (ONE[index] + b"\0", ONE[index][:-1]):
        part = (*ONE[:index], column, *ONE[index + 1 :])
        answer, _ = agreed("split_rows", [ONE, part], 3)
        assert (answer == "returned") == (index in (1, 3) and len(column) > len(ONE[index]))


@pytest.mark.parametrize("bounds", [(2, 1), (-1, 3), (0, 4), (0, 1 << 62), (-(1 << 63), 0)])
def test_offsets_that_leave_the_bytes_are_refused(bounds: tuple[int, int]) -> None:
    for index in (0, 2):
        part = (*ONE[:index], array("q", bounds).tobytes(), b"abc", *ONE[index + 2 :])
        assert agreed("split_rows", [part], 3) == ("damaged", Defect.OFFSETS)


@pytest.mark.parametrize(
    "arguments",
    [
        ((), 1),
        ([()], 1),
        ([list(ONE)], 1),
        ([(None, *ONE[1:])], 1),
        ([ONE], 0),
        ([ONE], (1 << 15) + 1),
        ([ONE], "1"),
        ([ONE],),
    ],
)
def test_other_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    assert agreed("split_rows", *arguments)[0] == "raised"
