"""Exporters of buffers, and collections, that run Python, which changes what the kernel was given.
It takes what it was given, or refuses it, and reads nothing else."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest

from tests.kernel.builds import BUILDS, Outcome, outcome
from tests.kernel.exporters import exporter_of
from tests.kernel.row_columns import columns, offsets
from tests.kernel.targets import RUN
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


@contextmanager
def collecting_with_each_object(action: Callable[[], None]) -> Iterator[None]:
    """Runs `action` in each collection. Python 3.11 may collect whenever an object is made, and run
    anything then; here it does with every object."""
    others: list[list[None]] = [[], []]

    def run(phase: str, _info: object) -> None:
        if phase == "start":
            action()
        else:
            # As many objects as the threshold: the next one that is made begins a collection.
            others.append([])

    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    gc.callbacks.append(run)
    gc.set_threshold(1)
    try:
        gc.enable()
        yield
    finally:
        gc.callbacks.remove(run)
        gc.set_threshold(*thresholds)


@of_each_build
def test_a_chunk_may_change_in_a_collection(build: Any) -> None:
    chunk, flags, table = bytearray(CHUNK), bytearray(), build.KeyTable()
    offsets_at = Columns(chunk).key_offsets_at

    def lengthen_keys() -> None:
        chunk[offsets_at + 4 : offsets_at + 16] = array("i", (201, 202, 203)).tobytes()

    with suppress(ChunkDefectError), collecting_with_each_object(lengthen_keys):
        table.put_run(chunk, 0, 3, 1, 0, 1, flags)
    assert [key for key, _, _ in table.entries()] in ([], [b"a", b"b", b"c"])


@of_each_build
@pytest.mark.parametrize("collections_before", range(9))
def test_the_chunk_of_a_bundle_may_change_in_a_collection(
    build: Any, collections_before: int
) -> None:
    """Each run supersedes a number that has no flag, so that lists are made while it is added."""
    limits, key_count = (4, 9000, 3, 1 << 30, 7, 10, 5, 6), 3
    keys = [b"a", b"b", b"c"]
    chunk = bytearray(CHUNK)
    offsets_at = Columns(chunk).key_offsets_at
    rows = build.OpenRows(build.KeyTable(), build.Answers(*limits), 0, 100, 1 << 20, 1 << 20)
    for seq, key in enumerate(keys, 1):
        rows.table.put(key, seq)
    rows.high, rows.history_id, rows.has_counters = key_count, 7, True
    runs = b"".join(RUN.pack(0, 1, counter, 0) for counter in range(key_count))
    collections: list[None] = []

    def lengthen_keys() -> None:
        collections.append(None)
        if len(collections) > collections_before:
            chunk[offsets_at + 4 : offsets_at + 16] = array("i", (201, 202, 203)).tobytes()

    with collecting_with_each_object(lengthen_keys):
        build.add_runs(chunk, 0, runs, bytes(16), (rows,), 0, None, 1, 100, 1 << 20, False)
    added_keys = [rows.find(seq)[1] for seq in rows.seqs()]
    assert added_keys == keys[: len(added_keys)]
    assert [key for key, _, _ in rows.table.entries()] == keys
