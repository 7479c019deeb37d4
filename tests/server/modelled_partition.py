"""A partition with a list of all its mutations, and a store whose reads wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
import trio.testing

from tests.server.served_bucket import BUCKET, serving
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Operation, SeqNo
from upr_server.app import Server
from upr_server.engine import (
    Partition,
    batch_of,
)
from upr_server.storage.api import Store
from upr_server.storage.calls import StoreCall
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.simulated import SimulatedStore

NOW: Final = 1000.0
INDEXED_S: Final = 2.0
"""So long after the last commit, the index contains everything."""


class HeldReads(SimulatedStore):
    """A store in which calls of one kind wait while `released` is not set."""

    def __init__(self, kind: type[StoreCall[Any]]) -> None:
        super().__init__()
        self.released = trio.Event()
        self.released.set()
        self._kind = kind

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, self._kind):
            await self.released.wait()
        await super().wait(call)


class Model:
    """A partition, and a list of all its mutations."""

    def __init__(self, disk: BucketDisk, partition: Partition) -> None:
        self.disk = disk
        self.partition = partition
        self._written: list[tuple[bytes, bytes | None]] = []

    def write(self, *items: tuple[bytes, bytes]) -> None:
        """Sets items now."""
        rows = [Mutation(Operation.SET, key, value) for key, value in items]
        result = self.partition.mutate(batch_of(Chunk.build(rows, SeqNo(0), SeqNo(0))), now=NOW)
        self._written += items
        assert result.last_seq == len(self._written)

    def delete(self, *keys: bytes) -> None:
        """Deletes items now. Where the item exists, an expired item replaces it, and becomes a
        deletion."""
        rows = [Mutation(Operation.SET, key, b"", expiry=1) for key in keys]
        self.partition.mutate(batch_of(Chunk.build(rows, SeqNo(0), SeqNo(0))), now=NOW)
        assert self.partition.expire(NOW) == len(keys)
        self._written += [(key, b"") for key in keys]
        self._written += [(key, None) for key in keys]
        assert self.partition.high_seq == len(self._written)

    def contents(self, seq: int) -> dict[bytes, bytes]:
        """The items as of a sequence number."""
        written = dict(self._written[:seq])
        return {key: value for key, value in written.items() if value is not None}

    async def persist(self) -> None:
        """Waits until everything is on disk."""
        await self.disk.flusher.wait_until_persisted(self.partition, self.partition.high_seq)

    def forget(self) -> int:
        """Frees memory of everything on disk, as if memory were short; returns how many cursors
        were dropped."""
        manager = self.partition.manager
        dropped_count = manager.dropped_count
        while True:
            while manager.free_oldest():
                pass
            if not manager.drop_furthest_back():
                break
        while self.partition.eviction.evict(1000):
            pass
        manager.check_invariants()
        return manager.dropped_count - dropped_count


@asynccontextmanager
async def a_partition(
    store: Store | None = None,
) -> AsyncIterator[tuple[Server, Model]]:
    async with serving(store or SimulatedStore(), 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        yield server, Model(server.catalog.disks[bucket], bucket.partitions[0])


def items(first: int, count: int, size: int = 10) -> list[tuple[bytes, bytes]]:
    """So many items from a number on. Their 40 keys repeat, so they overwrite each other."""
    return [(b"key %d" % (n % 40), b"%d" % n + bytes(size)) for n in range(first, first + count)]


async def evicted(server: Server) -> None:
    """Waits until the index has everything, and frees all memory."""
    bucket = server.catalog.bucket(BUCKET)
    await trio.sleep(INDEXED_S)
    Model(server.catalog.disks[bucket], bucket.partitions[0]).forget()
    assert bucket.statistics()["keys"] == 0
