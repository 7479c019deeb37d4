"""The columns of chunks against a naive model, without Spark."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructField, StructType

from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.record_batches import (
    BATCH_ROWS,
    RECORD_BATCH_BYTES,
    SMALL_ROWS,
    RecordBatchBuilder,
    resized,
)
from upr_protocol.spark.schema import READ_COLUMNS

NAMES = {Operation.SET: "set", Operation.DELETE: "delete", Operation.EXPIRE: "expire"}
LONG_MAX = (1 << 63) - 1

ROWS = st.lists(
    st.tuples(
        st.sampled_from(list(NAMES)),
        st.binary(min_size=1, max_size=9) | st.sampled_from((b"a", b"ab", b"b")),
        st.binary(max_size=9),
        st.sampled_from((0, 1, LONG_MAX)),
        st.sampled_from((0, 1, (1 << 32) - 1)),
        st.sampled_from((0, 256, (1 << 32) - 1)),
    ),
    min_size=1,
    max_size=6,
)
SETS = ROWS.map(lambda rows: [(Operation.SET, *row[1:]) for row in rows])
PLAIN = SETS.map(lambda rows: [(*row[:4], 0, 0) for row in rows])


def schema(names: list[str]) -> StructType:
    return StructType([StructField(name, *READ_COLUMNS[name]) for name in names])


def chunk_of(rows: list[Any], first: int) -> Chunk:
    builder = ChunkBuilder()
    for seq, (operation, key, value, cas, flags, expiry) in enumerate(rows, first):
        value = b"" if operation != Operation.SET else value
        builder.append(operation, key, value, seq, cas, flags, expiry)
    return builder.build()


def expected(rows: list[Any], first: int) -> list[dict[str, object]]:
    return [
        {
            "op": NAMES[operation],
            "bucket": "planes",
            "partition": 7,
            "history_id": "00ff",
            "seq": seq,
            "snapshot_start": 3,
            "snapshot_end": 1 << 40,
            "key": key,
            "value": value if operation == Operation.SET else None,
            "deleted": operation != Operation.SET,
            "cas": cas,
            "flags": flags,
            "expiry": expiry,
        }
        for seq, (operation, key, value, cas, flags, expiry) in enumerate(rows, first)
    ]


@given(
    st.lists(st.one_of(ROWS, SETS, PLAIN), min_size=1, max_size=4),
    st.lists(st.sampled_from(list(READ_COLUMNS)), min_size=1, unique=True),
    st.none() | st.sampled_from((b"a", b"ab")),
)
def test_the_columns_of_chunks(
    chunks: list[list[Any]], names: list[str], key: bytes | None
) -> None:
    """Only of the rows with the key, if there is one."""
    snapshot = RecordBatchBuilder(schema(names), key, "planes").of_snapshot(
        PartitionId(7), "00ff", SeqNo(3), SeqNo(1 << 40)
    )

    firsts = [4 + sum(map(len, chunks[:index])) for index in range(len(chunks))]
    made = [chunk_of(rows, first) for rows, first in zip(chunks, firsts, strict=True)]
    all_rows = [
        row for rows, first in zip(chunks, firsts, strict=True) for row in expected(rows, first)
    ]
    middle = len(chunks) // 2
    for some_chunks, rows in (
        (made[:1], all_rows[: len(chunks[0])]),
        (made, all_rows),
        (made[middle:], all_rows[firsts[middle] - 4 :]),
    ):
        batch = snapshot.of_chunks(some_chunks)
        batch.validate(full=True)
        assert batch.to_pylist() == [
            {name: row[name] for name in names} for row in rows if key in (None, row["key"])
        ]


@pytest.mark.parametrize("name", ["seq", "cas"])
def test_a_number_that_spark_has_no_type_for(name: str) -> None:
    for value in (LONG_MAX, LONG_MAX + 1):
        builder = ChunkBuilder()
        seq, cas = (value, 1) if name == "seq" else (1, value)
        builder.append(Operation.SET, b"key", seq=seq, cas=cas)
        snapshot = RecordBatchBuilder(schema([name])).of_snapshot(
            PartitionId(7), "00ff", SeqNo(0), SeqNo(LONG_MAX)
        )
        if value == LONG_MAX:
            assert snapshot.of_chunks([builder.build()]).to_pylist() == [{name: value}]
            continue
        valid = chunk_of([(Operation.SET, b"key", b"", 2, 0, 0)], first=0)
        for chunks in ([builder.build()], [valid, builder.build()]):
            with pytest.raises(
                PipelineError, match=rf"UPR_TOO_LARGE.*column {name} holds {value},"
            ):
                snapshot.of_chunks(chunks)


@given(
    st.lists(st.one_of(ROWS, SETS, PLAIN), min_size=1, max_size=4),
    st.lists(st.sampled_from(list(READ_COLUMNS)), min_size=1, unique=True),
)
def test_snapshots_share_the_columns_that_are_the_same_in_all(
    snapshots: list[list[Any]], names: list[str]
) -> None:
    """Each snapshot has a partition, a history and bounds of its own."""
    builder = RecordBatchBuilder(schema(names), None, "planes")
    for index, rows in enumerate(snapshots):
        own = {
            "partition": index,
            "history_id": f"{index:04x}",
            "snapshot_start": index,
            "snapshot_end": 100 + index,
        }
        snapshot = builder.of_snapshot(
            PartitionId(index), f"{index:04x}", SeqNo(index), SeqNo(100 + index)
        )
        batch = snapshot.of_chunks([chunk_of(rows, 4)])
        assert batch.to_pylist() == [
            {name: (row | own)[name] for name in names} for row in expected(rows, 4)
        ]


def numbered_batch(first: int, count: int, width: int) -> pa.RecordBatch:
    numbers = [b"%0*d" % (width, number) for number in range(first, first + count)]
    return pa.RecordBatch.from_arrays([pa.array(numbers, pa.binary())], names=["number"])


@given(
    st.lists(
        st.sampled_from((0, 1, 100, SMALL_ROWS - 1, SMALL_ROWS, 2 * BATCH_ROWS + 1)), max_size=6
    ),
    st.sampled_from((8, 2000)),
)
@settings(max_examples=30, deadline=None)
def test_batches_are_resized(counts: list[int], width: int) -> None:
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    batches = [
        numbered_batch(first, count, width) for first, count in zip(firsts, counts, strict=True)
    ]

    sizes = []
    number = 0
    for batch in resized(batches):
        expected_batch = numbered_batch(number, batch.num_rows, width)
        assert batch.equals(expected_batch)
        assert 0 < batch.num_rows <= BATCH_ROWS
        assert batch.nbytes <= 1.01 * RECORD_BATCH_BYTES
        sizes.append(batch.num_rows)
        number += batch.num_rows
    assert number == sum(counts)
    for size, next_size in pairwise(sizes):
        assert (
            size >= SMALL_ROWS
            or next_size >= SMALL_ROWS
            or size + next_size > BATCH_ROWS
            or width > 8
        )


def test_a_small_batch_between_large_ones_is_not_copied() -> None:
    large, small = numbered_batch(0, SMALL_ROWS, 8), numbered_batch(0, 10, 8)
    for batches in ([small], [small, large]):
        first = next(resized(batches))
        assert first.column(0).buffers()[2].address == small.column(0).buffers()[2].address
