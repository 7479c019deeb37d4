"""The columns of chunks against a naive model, without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StringType, StructField, StructType

from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.spark import record_batches
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.read_tasks import RollbackMarker
from upr_protocol.spark.record_batches import (
    BATCH_ROWS,
    RECORD_BATCH_BYTES,
    SMALL_ROWS,
    RecordBatchBuilder,
    RowSnapshot,
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


SNAPSHOT = RowSnapshot(PartitionId(7), "00ff", SeqNo(3), SeqNo(1 << 40))


def batches_of(
    builder: RecordBatchBuilder, chunks: Iterable[tuple[Chunk, RowSnapshot]]
) -> list[pa.RecordBatch]:
    """What the builder makes of chunks, whose memory is used again once they were added."""
    batches: list[pa.RecordBatch] = []
    for chunk, snapshot in chunks:
        memory = bytearray(bytes(chunk))
        batches += builder.add(Chunk(memoryview(memory).toreadonly()), snapshot)
        memory[:] = b"\xee" * len(memory)
    batches += builder.take_rest()
    assert not list(builder.take_rest())
    return batches


@given(
    st.lists(st.one_of(ROWS, SETS, PLAIN), min_size=1, max_size=4),
    st.lists(st.sampled_from(list(READ_COLUMNS)), min_size=1, unique=True),
    st.none() | st.sampled_from((b"a", b"ab")),
    st.integers(1, 7),
    st.integers(1, 40),
)
def test_the_columns_of_chunks(
    chunks: list[list[Any]],
    names: list[str],
    key: bytes | None,
    rows_max: int,
    bytes_max: int,
) -> None:
    """Only of the rows with the key, if there is one. A batch is full, or the next row does not
    fit in it."""
    firsts = [4 + sum(map(len, chunks[:index])) for index in range(len(chunks))]
    all_rows = [
        row for rows, first in zip(chunks, firsts, strict=True) for row in expected(rows, first)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_batches, "BATCH_ROWS", rows_max)
        patch.setattr(record_batches, "RECORD_BATCH_BYTES", bytes_max)
        builder = RecordBatchBuilder(schema(names), key, "planes")
        # What was taken belongs to the taker: the second round does not change it.
        rounds = [
            batches_of(
                builder,
                [
                    (chunk_of(rows, first), SNAPSHOT)
                    for rows, first in zip(chunks, firsts, strict=True)
                ],
            )
            for _ in range(2)
        ]

    for batches in rounds:
        for batch in batches:
            batch.validate(full=True)
            assert 0 < batch.num_rows <= rows_max
        assert [row for batch in batches for row in batch.to_pylist()] == [
            {name: row[name] for name in names} for row in all_rows if key in (None, row["key"])
        ]
    if key is None and {"key", "value"} <= set(names):
        sizes = [
            len(key) + len(value) * (operation == Operation.SET)
            for rows in chunks
            for operation, key, value, *_ in rows
        ]
        assert [batch.num_rows for batch in rounds[0]] == greedy(sizes, rows_max, bytes_max)


def greedy(sizes: list[int], rows_max: int, bytes_max: int) -> list[int]:
    """The naive model: a row begins a new batch if the one before is full."""
    counts, nbytes = [0], 0
    for size in sizes:
        if counts[-1] and (counts[-1] == rows_max or nbytes + size > bytes_max):
            counts.append(0)
            nbytes = 0
        counts[-1] += 1
        nbytes += size
    return counts


def test_a_batch_has_as_many_rows_as_it_may() -> None:
    chunks = [
        (chunk_of([(Operation.SET, b"k", b"v", 1, 0, 0)] * count, first), SNAPSHOT)
        for first, count in ((1, 3), (4, BATCH_ROWS - 1), (3 + BATCH_ROWS, 2 * BATCH_ROWS))
    ]
    batches = batches_of(RecordBatchBuilder(schema(["seq"])), chunks)
    assert [batch.num_rows for batch in batches] == [BATCH_ROWS, BATCH_ROWS, BATCH_ROWS, 2]
    seqs = [seq.as_py() for batch in batches for seq in batch.column("seq")]
    assert seqs == list(range(1, 3 * BATCH_ROWS + 3))


@pytest.mark.parametrize("name", ["seq", "cas"])
def test_a_number_that_spark_has_no_type_for(name: str) -> None:
    snapshot = RowSnapshot(PartitionId(7), "00ff", SeqNo(0), SeqNo(LONG_MAX))
    for value in (LONG_MAX, LONG_MAX + 1):
        chunk_builder = ChunkBuilder()
        seq, cas = (value, 1) if name == "seq" else (1, value)
        chunk_builder.append(Operation.SET, b"key", seq=seq, cas=cas)
        last_chunk = chunk_builder.build()
        builder = RecordBatchBuilder(schema([name]))
        if value == LONG_MAX:
            (batch,) = batches_of(builder, [(last_chunk, snapshot)])
            assert batch.to_pylist() == [{name: value}]
            continue
        valid = chunk_of([(Operation.SET, b"key", b"", 2, 0, 0)], first=0)
        for chunks in ([last_chunk], [valid, last_chunk]):
            builder = RecordBatchBuilder(schema([name]))
            with pytest.raises(
                PipelineError, match=rf"UPR_TOO_LARGE.*column {name} holds {value},"
            ):
                batches_of(builder, [(chunk, snapshot) for chunk in chunks])


def test_a_deletion_where_values_are_not_null_is_refused_with_a_sentence() -> None:
    """Spark would end the query with an error of Java's."""
    not_null = StructType([StructField("value", StringType(), nullable=False)])
    snapshot = RowSnapshot(PartitionId(7), "00ff", SeqNo(0), SeqNo(2))
    row = (Operation.SET, b"key", b"value", 1, 0, 0)
    (batch,) = batches_of(RecordBatchBuilder(not_null), [(chunk_of([row], 1), snapshot)])
    assert batch.to_pylist() == [{"value": "value"}]
    rows = [row, (Operation.DELETE, *row[1:])]
    with pytest.raises(PipelineError, match=r"UPR_OPTION.*column value is NOT NULL"):
        batches_of(RecordBatchBuilder(not_null), [(chunk_of(rows, 1), snapshot)])
    marker = RollbackMarker(HistoryId(1), SeqNo(0), SeqNo(2))
    with pytest.raises(PipelineError, match=r"UPR_OPTION.*column value is NOT NULL"):
        RecordBatchBuilder(not_null).of_marker(PartitionId(7), marker)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.one_of(ROWS, SETS, PLAIN)), min_size=1, max_size=5),
    st.lists(st.sampled_from(list(READ_COLUMNS)), min_size=1, unique=True),
)
def test_a_batch_has_rows_of_several_snapshots(
    chunks: list[tuple[int, list[Any]]], names: list[str]
) -> None:
    """Each snapshot has a partition, a history and bounds of its own."""
    snapshots = [
        RowSnapshot(PartitionId(index), f"{index:04x}", SeqNo(index), SeqNo(100 + index))
        for index in range(3)
    ]
    own = [
        {
            "partition": index,
            "history_id": f"{index:04x}",
            "snapshot_start": index,
            "snapshot_end": 100 + index,
        }
        for index in range(3)
    ]
    builder = RecordBatchBuilder(schema(names), None, "planes")
    (batch,) = batches_of(
        builder, [(chunk_of(rows, 4), snapshots[index]) for index, rows in chunks]
    )
    batch.validate(full=True)
    assert batch.to_pylist() == [
        {name: (row | own[index])[name] for name in names}
        for index, rows in chunks
        for row in expected(rows, 4)
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
