"""Batches: every operation is in one, in order, and none is longer than wanted."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.strategies import mutations
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client.core.batcher import Batcher, BatchLimits
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation, PartitionId


@given(
    st.lists(mutations(has_seqs=False), max_size=60),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(0, 2000),
)
def test_everything_is_in_a_batch_in_order(
    rows: list[Mutation], partition_count: int, mutations_max: int, nbytes: int
) -> None:
    batcher = Batcher(partition_count, BatchLimits(mutations_max, nbytes, 1.0))
    batches: list[tuple[PartitionId, Chunk]] = []
    for row in rows:
        partition = batcher.add(
            0.0, row.op, row.key, row.value, cas=row.cas, flags=row.flags, expiry=row.expiry
        )
        assert partition == partition_of(row.key, partition_count)
        assert len(batcher) <= mutations_max
        if batcher.is_full:
            full = batcher.take()
            assert len({partition for partition, _ in full}) == len(full)
            size = sum(chunk.nbytes for _, chunk in full)
            assert sum(chunk.count for _, chunk in full) == mutations_max or size >= nbytes
            batches += full
    batches += batcher.take()
    assert len(batcher) == 0
    by_partition: defaultdict[int, list[Mutation]] = defaultdict(list)
    for partition, chunk in batches:
        chunk.check_published()
        assert 1 <= chunk.count <= mutations_max
        by_partition[partition] += chunk
    expected: defaultdict[int, list[Mutation]] = defaultdict(list)
    for row in rows:
        expected[partition_of(row.key, partition_count)].append(row)
    assert by_partition == expected


def test_operations_fall_due_a_while_after_the_first() -> None:
    batcher = Batcher(2, BatchLimits(linger_s=1.0))
    assert batcher.due_at is None
    batcher.add(10.0, Operation.SET, b"a")
    batcher.add(10.5, Operation.SET, b"b")
    assert batcher.due_at == 11.0
    assert sum(chunk.count for _, chunk in batcher.take()) == 2
    assert batcher.due_at is None
    assert batcher.take() == []
    batcher.add(10.9, Operation.SET, b"a")
    assert batcher.due_at == 11.9


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        (b"", b"", Status.BAD_KEY),
        (bytes(251), b"", Status.BAD_KEY),
        (b"k", bytes(20 * 1024 * 1024 + 1), Status.TOO_LARGE),
    ],
)
def test_what_no_server_takes_is_not_added(key: bytes, value: bytes, status: Status) -> None:
    batcher = Batcher(4, BatchLimits())
    with pytest.raises(ServerError) as caught:
        batcher.add(0.0, Operation.SET, key, value)
    assert caught.value.status is status
    assert len(batcher) == 0


def test_the_longest_key_and_value_that_a_server_takes_are_added() -> None:
    batcher = Batcher(4, BatchLimits())
    batcher.add(0.0, Operation.SET, bytes(250), bytes(20 * 1024 * 1024))
    assert len(batcher) == 1


@pytest.mark.parametrize(
    "wrong", [{"cas": -1}, {"cas": 1 << 64}, {"flags": 1 << 32}, {"expiry": 1.5}, {"value": {}}]
)
def test_what_does_not_fit_a_chunk_leaves_nothing_behind(wrong: dict[str, Any]) -> None:
    batcher = Batcher(4, BatchLimits())
    error_type = TypeError if "value" in wrong else ServerError
    for key in (b"k", b"l", b"m", b"n"):
        with pytest.raises(error_type, match=r"negative|dict"):
            batcher.add(0.0, Operation.SET, key, **wrong)
    assert len(batcher) == 0
    assert batcher.take() == []
    batcher.add(0.0, Operation.SET, b"k", b"1")
    with pytest.raises(error_type):
        batcher.add(0.0, Operation.SET, b"k", **wrong)
    batcher.add(0.0, Operation.SET, b"k", b"2")
    ((partition, chunk),) = batcher.take()
    assert partition == partition_of(b"k", 4)
    assert chunk.values() == [b"1", b"2"]
    chunk.check_published()
