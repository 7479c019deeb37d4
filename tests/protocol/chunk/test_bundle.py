"""Bundles, against the runs they are made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.strategies import U32, U64, bundles, mutations
from upr_protocol.chunk import (
    Bundle,
    BundlePart,
    BundleRun,
    Chunk,
    Mutation,
    chunk_of_plain_sets,
    encode_runs,
)
from upr_protocol.errors import ChunkError
from upr_protocol.ids import PARTITIONS_END, Cas, PartitionId, SeqNo
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, BUNDLE_RUNS_MAX

ROWS = st.lists(mutations(has_seqs=False), min_size=1, max_size=6)
RUNS = st.dictionaries(st.integers(0, PARTITIONS_END - 1), ROWS, min_size=1, max_size=5)


def run_of(partition: int, rows: int, counter: int = 0) -> BundleRun:
    return BundleRun(PartitionId(partition), rows, counter)


def part_of(partition: int, chunk: Chunk) -> BundlePart:
    return PartitionId(partition), chunk, 0, 0


def plain(count: int) -> Chunk:
    return chunk_of_plain_sets([b"%d" % index for index in range(count)], [b"value"] * count)


@given(RUNS, st.data())
def test_a_bundle_has_the_rows_of_its_runs_one_run_behind_the_other(
    rows_by_partition: dict[int, list[Mutation]], data: st.DataObject
) -> None:
    rows_of_runs = [rows for _, rows in sorted(rows_by_partition.items())]
    runs = [
        BundleRun(PartitionId(partition), len(rows), data.draw(U64), data.draw(U32))
        for partition, rows in sorted(rows_by_partition.items())
    ]
    bundle = Bundle.of_parts(
        [
            (run.partition, Chunk.build(rows), run.counter, run.chain)
            for run, rows in zip(runs, rows_of_runs, strict=True)
        ]
    )
    assert bundle.run_count == len(runs)
    assert bundle.row_counts == list(map(len, rows_of_runs))
    assert list(bundle.runs) == runs
    assert bundle.directory == encode_runs(runs)
    assert list(bundle.chunk) == [row for rows in rows_of_runs for row in rows]
    assert bundle.run_chunks() == [Chunk.build(rows) for rows in rows_of_runs]
    assert len(bundle) == sum(map(len, rows_of_runs))
    # It is the same bundle, whatever it was made of.
    same = Bundle(Chunk.build(row for rows in rows_of_runs for row in rows), runs)
    assert bundle == same
    assert bundle.bounds == same.bounds
    assert bundle.run_count == same.run_count
    bundle.chunk.check_published()


@given(bundles())
def test_a_bundle_of_some_runs_of_another_has_their_rows(bundle: Bundle) -> None:
    """What a publisher does when it sends refused runs again."""
    chosen_runs = range(0, len(bundle.runs), 2)
    again = Bundle.of_parts(
        [
            (run.partition, bundle.run_chunk(index), run.counter, run.chain)
            for index, run in enumerate(bundle.runs)
            if index in chosen_runs
        ]
    )
    assert again.run_chunks() == [bundle.run_chunk(index) for index in chosen_runs]
    assert list(again.runs) == [bundle.runs[index] for index in chosen_runs]


def test_a_bundle_of_one_run_is_over_the_same_bytes() -> None:
    chunk = plain(3)
    bundle = Bundle.of_one_run(PartitionId(5), chunk, counter=7, chain=9)
    assert bundle.runs == (BundleRun(PartitionId(5), 3, 7, 9),)
    assert bundle.chunk is bundle.run_chunk(0) is chunk
    assert Bundle.of_parts([(PartitionId(5), chunk, 7, 9)]).chunk is chunk


@given(bundles())
def test_a_bundle_without_rows_has_the_same_runs(bundle: Bundle) -> None:
    without_rows = bundle.without_rows()
    assert len(without_rows) == 0
    assert without_rows.runs == bundle.runs
    assert without_rows.bounds == bundle.bounds


def test_the_largest_number_of_runs_is_allowed() -> None:
    runs = [run_of(partition, 1) for partition in range(BUNDLE_RUNS_MAX)]
    assert Bundle(plain(BUNDLE_RUNS_MAX), runs).bounds == tuple(range(BUNDLE_RUNS_MAX + 1))


@pytest.mark.parametrize(
    ("runs", "rows", "reason"),
    [
        ([], 0, "1 to 1024 runs, not 0"),
        ([run_of(index, 1) for index in range(BUNDLE_RUNS_MAX + 1)], 1025, "not 1025"),
        ([run_of(1, 0)], 0, "no rows"),
        ([run_of(1, 2), run_of(2, 0)], 2, "no rows"),
        ([run_of(1, BUNDLE_MUTATIONS_MAX + 1)], 4097, "at most 4096 mutations, not 4097"),
        ([run_of(1, 4000), run_of(2, 97)], 4097, "at most 4096 mutations, not 4097"),
        ([run_of(1, 2)], 3, "have 2 rows, and its chunk has 3"),
        ([run_of(1, 2), run_of(2, 2)], 3, "have 4 rows, and its chunk has 3"),
        ([run_of(2, 1), run_of(1, 1)], 2, "order of their partitions"),
        ([run_of(1, 1), run_of(1, 1)], 2, "order of their partitions"),
    ],
)
def test_runs_that_do_not_divide_the_rows_are_refused(
    runs: list[BundleRun], rows: int, reason: str
) -> None:
    with pytest.raises(ChunkError, match=reason):
        Bundle(plain(rows), runs)


def test_numbers_in_a_part_are_not_published() -> None:
    numbered = plain(2).numbered(SeqNo(5), Cas(7), SeqNo(4), SeqNo(6))
    bundle = Bundle.of_parts([part_of(1, numbered), part_of(2, plain(1))])
    assert (bundle.chunk.start, bundle.chunk.end) == (0, 0)
    assert bundle.chunk.seqs.tolist() == [0, 0, 0]
    assert bundle.chunk.cas.tolist() == [7, 8, 0]


def test_damaged_parts_are_refused() -> None:
    damaged = bytearray(plain(3).encode())
    # The second of the key offsets, which follow the numbers, expiry times and flags.
    damaged[116:120] = (1000).to_bytes(4, "little")
    with pytest.raises(ChunkError, match="offsets of a part"):
        Bundle.of_parts([part_of(1, Chunk(damaged)), part_of(2, plain(1))])


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "1 to 1024 runs, not 0"),
        ([(index, 1) for index in range(BUNDLE_RUNS_MAX + 1)], "not 1025"),
        ([(1, 0)], "no rows"),
        ([(1, 2), (2, 0)], "no rows"),
        ([(1, 4000), (2, 97)], "at most 4096 mutations, not 4097"),
        ([(2, 1), (1, 1)], "order of their partitions"),
        ([(1, 1), (1, 1)], "order of their partitions"),
    ],
)
def test_parts_that_are_no_bundle_are_refused(parts: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(ChunkError, match=reason):
        Bundle.of_parts([part_of(partition, plain(rows)) for partition, rows in parts])
