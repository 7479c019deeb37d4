"""The store as one call after the other: what `ProcessStore` and `SimulatedStore` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import trio

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine import Want
from upr_server.storage.calls import (
    AnyCall,
    Begin,
    Commit,
    Create,
    Cut,
    Delete,
    DeleteLeases,
    Find,
    FindDue,
    Finish,
    Forget,
    ForgetIndex,
    Load,
    Measure,
    NewestEnd,
    PutLease,
    PutMap,
    Read,
    UpkeepStep,
)
from upr_server.storage.chunk_log import PartitionWrite, StoredBucket, Token
from upr_server.storage.errors import StoreFailedError
from upr_server.storage.key_index import Due
from upr_server.storage.port import Upkeep
from upr_server.storage.records import BucketRecord, LeaseRecord, PartitionRecord


class CallingStore(ABC):
    """A `Store` that turns its methods into calls. See the port for what they do."""

    def __init__(self) -> None:
        self.failed = trio.Event()
        self.failure = ""
        self._figures: dict[str, dict[str, object]] = {}

    @abstractmethod
    async def _answer(self, call: AnyCall) -> Any:
        """Has a call answered."""

    def has_failed(self, sentence: str) -> None:
        """Nothing more is acknowledged. The first reason is the one that is told."""
        if not self.failed.is_set():
            self.failure = sentence
            self.failed.set()

    async def _change(self, call: AnyCall) -> Any:
        """A call that changes something: after an error nobody knows what, and nothing more is
        acknowledged."""
        if self.failed.is_set():
            raise StoreFailedError(self.failure)
        try:
            found = await self._answer(call)
        except StoreFailedError as error:
            self.has_failed(str(error))
            raise
        if self.failed.is_set():
            # It was behind one that failed, and was done: nobody knows what that is worth.
            raise StoreFailedError(self.failure)
        return found

    async def load(self) -> list[StoredBucket]:
        """See `Store`."""
        return cast("list[StoredBucket]", await self._change(Load()))

    async def create(self, record: BucketRecord, partitions: Sequence[PartitionRecord]) -> None:
        """See `Store`."""
        await self._change(Create(record, partitions))
        # A read may have raced the deletion of one of the same name.
        await self._answer(Forget(record.name))

    async def delete(self, bucket: str) -> None:
        """See `Store`."""
        await self._change(Delete(bucket))
        # Not before: a read meanwhile would open it again, and the disk would never have the room
        # of a file that somebody has open.
        await self._answer(Forget(bucket))
        self._figures.pop(bucket, None)

    async def begin(self, bucket: str, records: Sequence[tuple[int, PartitionRecord]]) -> None:
        """See `Store`."""
        await self._change(Begin(bucket, records))

    async def finish(self, bucket: str) -> None:
        """See `Store`."""
        await self._change(Finish(bucket))

    async def commit(self, bucket: str, writes: Sequence[PartitionWrite]) -> None:
        """See `Store`."""
        await self._change(Commit(bucket, writes))

    async def put_lease(self, bucket: str, lease: LeaseRecord) -> None:
        """See `Store`."""
        await self._change(PutLease(bucket, lease))

    async def delete_leases(self, bucket: str, lease_ids: Sequence[int]) -> None:
        """See `Store`."""
        await self._change(DeleteLeases(bucket, lease_ids))

    async def put_map(
        self, bucket: str, document: str, records: Sequence[tuple[int, PartitionRecord]]
    ) -> None:
        """See `Store`."""
        await self._change(PutMap(bucket, document, records))

    async def cut(
        self, bucket: str, partition: int, record: PartitionRecord, tokens: Sequence[Token]
    ) -> list[int]:
        """See `Store`."""
        if not record.high:
            while await self._change(ForgetIndex(bucket, partition)):
                pass
        broken = await self._change(Cut(bucket, partition, record, tokens))
        return cast("list[int]", broken)

    async def newest_end(
        self, bucket: str, partition: int, ceiling: SeqNo, floor: SeqNo
    ) -> SeqNo | None:
        """See `Store`."""
        found = await self._answer(NewestEnd(bucket, partition, ceiling, floor))
        return cast("SeqNo | None", found)

    async def upkeep(
        self,
        bucket: str,
        *,
        urgent: bool,
        leases: Sequence[tuple[int, int, int]],
        lapsed: Sequence[LeaseRecord] = (),
        purge_before_cas: int,
        keep: int = 0,
    ) -> Upkeep:
        """See `Store`."""
        done, figures = await self._change(
            UpkeepStep(bucket, urgent, leases, lapsed, purge_before_cas, keep)
        )
        self._figures[bucket] = figures
        return cast("Upkeep", done)

    async def read(
        self, bucket: str, partition: int, after: SeqNo, through: SeqNo, bytes_max: int
    ) -> list[Chunk]:
        """See `Store`."""
        found = await self._answer(Read(bucket, partition, after, through, bytes_max))
        return cast("list[Chunk]", found)

    async def measure(self, bucket: str, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        """See `Store`."""
        return cast("list[int]", await self._answer(Measure(bucket, ranges)))

    async def find(
        self, bucket: str, partition: int, wants: Sequence[Want], indexed: int = 0
    ) -> list[Mutation | None]:
        """See `Store`."""
        found = await self._answer(Find(bucket, partition, wants, indexed))
        return cast("list[Mutation | None]", found)

    async def due(self, bucket: str, now: int, after: bytes, limit: int) -> tuple[list[Due], bytes]:
        """See `Store`."""
        found = await self._answer(FindDue(bucket, now, after, limit))
        return cast("tuple[list[Due], bytes]", found)

    def statistics(self, bucket: str) -> dict[str, object]:
        """See `Store`."""
        return self._figures.get(bucket, {})
