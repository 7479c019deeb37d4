"""Batches: every operation is in one, in order, and none is longer than wanted."""

from __future__ import annotations

from collections import defaultdict

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
    st.lists(mutations(stored=False), max_size=60),
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
        full = batcher.add(
            0.0, row.op, row.key, row.value, cas=row.cas, flags=row.flags, expiry=row.expiry
        )
        if full is not None:
            batches.append(full)
    rest = batcher.all()
    assert len(batcher) == 0
    assert len({partition for partition, _ in rest}) == len(rest)
    by_partition: defaultdict[int, list[Mutation]] = defaultdict(list)
    for partition, chunk in [*batches, *rest]:
        chunk.check_published()
        assert 1 <= chunk.count <= mutations_max
        by_partition[partition] += chunk
    for _, chunk in batches:
        assert chunk.count == mutations_max or chunk.nbytes >= nbytes
    expected: defaultdict[int, list[Mutation]] = defaultdict(list)
    for row in rows:
        expected[partition_of(row.key, partition_count)].append(row)
    assert by_partition == expected


def test_batches_fall_due_in_the_order_in_which_they_were_begun() -> None:
    batcher = Batcher(2, BatchLimits(linger_s=1.0))
    assert batcher.due_at is None
    keys = [
        next(k for k in (b"%d" % n for n in range(99)) if partition_of(k, 2) == p) for p in (0, 1)
    ]
    batcher.add(10.0, Operation.SET, keys[1])
    batcher.add(10.5, Operation.SET, keys[0])
    batcher.add(10.9, Operation.SET, keys[1])
    assert batcher.due_at == 11.0
    assert batcher.due(10.99) == []
    ((partition, chunk),) = batcher.due(11.0)
    assert (partition, chunk.count) == (1, 2)
    assert batcher.due_at == 11.5
    ((partition, chunk),) = batcher.due(99.0)
    assert (partition, chunk.count) == (0, 1)


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
