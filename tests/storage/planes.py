"""The bucket `planes` for tests of the store, and what they write to it."""

from __future__ import annotations

from typing import Final

from tests.storage.log_model import chunk_of, record_of, row
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Operation, SeqNo
from upr_server.storage.api import Store
from upr_server.storage.calls import (
    CreateBucketFiles,
    ReadChunks,
)
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord

PARTITIONS: Final = 4
BUCKET: Final = BucketRecord("planes", PARTITIONS, 1 << 20)
MAP_BYTES: Final = 1 << 30
PLENTY: Final = 1 << 24


async def create(store: Store) -> None:
    """Creates the bucket."""
    await store.ask(CreateBucketFiles(BUCKET, [record_of(0)] * PARTITIONS))


def some_write(partition: int, high: int, count: int = 3, expiry: int = 0) -> PartitionWrite:
    """Sets so many keys of a partition, from the number behind `high` on."""
    rows = [
        row(Operation.SET, b"key %d" % seq, seq, seq, expiry)
        for seq in range(high + 1, high + count + 1)
    ]
    chunk = chunk_of(rows, high, high + count)
    return PartitionWrite(partition, record_of(high + count), [chunk])


def one_row(seq: int) -> Chunk:
    """A chunk that sets a key at `seq`."""
    return chunk_of([row(Operation.SET, b"k", seq, seq)], seq - 1, seq)


async def read_all(store: Store, partition: int, through: int) -> list[Mutation]:
    """All mutations of a partition on disk, up to `through`."""
    rows: list[Mutation] = []
    after = SeqNo(0)
    while after < through:
        chunks = await store.ask(ReadChunks(BUCKET.name, partition, after, SeqNo(through), 200))
        assert chunks[0].start == after
        after = chunks[-1].end
        for chunk in chunks:
            rows += chunk
    return rows
