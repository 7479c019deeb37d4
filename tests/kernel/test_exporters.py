"""Exporters of buffers, and collections, that run Python, which changes what the kernel was given.
It takes what it was given, or refuses it, and reads nothing else."""

from __future__ import annotations

import gc
from array import array
from contextlib import suppress
from typing import Any, Final

import pytest

from tests.kernel.builds import BUILDS, Outcome, outcome
from tests.kernel.exporters import exporter_of
from tests.kernel.test_split_rows import columns, offsets
from upr_kernel import ChunkDefectError, Defect
from upr_kernel.pure.columns import Columns
from upr_protocol.chunk import Chunk, Mutation, chunk_of_plain_sets
from upr_protocol.ids import Operation

CHUNK: Final = bytes(chunk_of_plain_sets([b"a", b"b", b"c"], [b"1", b"2", b"3"]))

of_each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@of_each_build
def test_a_part_may_leave_the_list_while_it_is_gathered(build: Any) -> None:
    parts: list[tuple[Any, ...]] = []
    others: list[bytes] = []

    def drop_part() -> None:
        parts.clear()
        # They get the memory of the flags, if nobody else has a reference to them.
        others.extend(bytes([0, 0, row]) for row in range(1, 100))

    parts.append((exporter_of(CHUNK, drop_part), 0, 3, bytes([1, 0, 1]), None, 0))
    rows = list(Chunk(build.gather(parts, 0, 0)))
    assert [row.key for row in rows] == [b"b"]


@of_each_build
def test_columns_may_leave_the_list_while_they_are_split(build: Any) -> None:
    parts: list[tuple[Any, ...]] = []
    others: list[tuple[Any, ...]] = []
    rows = [Mutation(Operation.SET, b"key", b"value")]
    other_columns = columns([Mutation(Operation.SET, b"KEY", b"VALUE")])

    def drop_columns() -> None:
        parts.clear()
        # They get the memory of the tuple, if nobody else has a reference to it.
        others.extend((*other_columns,) for _ in range(100))

    key_offsets, *other = columns(rows)
    parts.append((exporter_of(key_offsets, drop_columns), *other))
    assert build.split_rows(parts, 1) == [(0, bytes(Chunk.build(rows)))]


@of_each_build
def test_columns_may_change_until_all_are_read(build: Any) -> None:
    key_offsets, *other = columns([Mutation(Operation.SET, b"key", b"value")])
    changing_offsets = bytearray(key_offsets)

    def lengthen_key() -> None:
        changing_offsets[:] = offsets([b"longer"], 0)

    def split() -> Outcome:
        exporter = exporter_of(key_offsets, lengthen_key)
        return outcome(build.split_rows, [(changing_offsets, *other), (exporter, *other)], 1)

    assert split() == ("damaged", Defect.OFFSETS)


@of_each_build
def test_a_chunk_may_change_in_a_collection(build: Any) -> None:
    """Python 3.11 may collect whenever an object is made, and run anything then."""
    chunk, flags, table = bytearray(CHUNK), bytearray(), build.KeyTable()
    offsets_at = Columns(chunk).key_offsets_at

    def lengthen_keys(phase: str, _info: object) -> None:
        if phase == "start":
            chunk[offsets_at + 4 : offsets_at + 16] = array("i", (201, 202, 203)).tobytes()

    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    gc.callbacks.append(lengthen_keys)
    gc.set_threshold(1)
    # More objects than the threshold: the next one that is made begins a collection.
    others: list[list[None]] = [[], []]
    try:
        with suppress(ChunkDefectError):
            gc.enable()
            table.put_run(chunk, 0, 3, 1, 0, 1, flags)
    finally:
        gc.callbacks.remove(lengthen_keys)
        gc.set_threshold(*thresholds)
    assert len(others) == 2
    assert [key for key, _, _ in table.entries()] in ([], [b"a", b"b", b"c"])
