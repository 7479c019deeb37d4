"""One bucket and its disk: what carries mutations down, and what brings them up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog
import trio

from upr_protocol.chunk import Mutation
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, HistoryId, PartitionId, PartitionState
from upr_server.engine import (
    Bucket,
    FetchRequest,
    MutateResult,
    Partition,
    PartitionImage,
    Relief,
    WriterToken,
)
from upr_server.storage.api import Store
from upr_server.storage.calls import DeleteIndexEntries, FindExpired, FindItems, Truncate
from upr_server.storage.chunk_log import StoredBucket, StoredPartition, Token
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.flusher import Flusher
from upr_server.storage.online.leases import LeaseBook
from upr_server.storage.online.maintenance import IDLE_S, Maintenance
from upr_server.storage.records import LeaseRecord, PartitionRecord

DUE_MAX: Final = 512
"""Expired items that are taken from disk at a time."""

log = structlog.get_logger(__name__)


class BucketDisk:
    """See the module.

    Args:
        store: The disk.
        bucket: The bucket.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number.
        purge_age_s: How old a tombstone must be to go.
        nursery: Where backfills run; it must outlive `run`.
        leases: Those that were there.
        on_memory_freed: Called when memory may have become free.
        rest_s: See `Maintenance`.

    Attributes:
        store: The disk.
        bucket: The bucket.
        memory: What the bucket holds.
        flusher: Carries mutations to disk.
        leases: What must be left readable.
        maintenance: Has the log indexed and compacted.
        nursery: Where backfills run.
        backfills: Backfills that were begun, ever.
        backfill_bytes: What they have read, ever.
    """

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        *,
        time: Callable[[], float],
        new_id: Callable[[], int],
        purge_age_s: float,
        nursery: trio.Nursery,
        leases: Sequence[LeaseRecord] = (),
        on_memory_freed: Callable[[], None],
        rest_s: float = IDLE_S,
    ) -> None:
        self.store = store
        self.bucket = bucket
        self.memory = bucket.memory
        self._on_memory_freed = on_memory_freed
        self.flusher = Flusher(store, bucket, self.committed)
        self.leases = LeaseBook(store, bucket, time, new_id, leases)
        self.maintenance = Maintenance(
            store, bucket, self.flusher, self.leases, time, purge_age_s, on_memory_freed, rest_s
        )
        self.nursery = nursery
        self._scope = trio.CancelScope()
        self.backfills = 0
        self.backfill_bytes = 0
        self._fetches = self._fetched = 0
        self._flushed = trio.Event()
        self._left: DiskFullError | None = None
        self._ended = trio.Event()

    def committed(self) -> None:
        """Something was put on disk."""
        self.maintenance.committed()
        self._on_memory_freed()

    async def run(self) -> None:
        """Carries mutations to disk until `stop`, and what is left then."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.maintenance.run)
                    try:
                        await self.flusher.run()
                    except DiskFullError as error:
                        self._left = error
                    self._flushed.set()
                    nursery.cancel_scope.cancel()
        finally:
            self.flusher.refuse_all()
            self._ended.set()

    async def stop(self) -> None:
        """Brings what there is to disk, and ends; no more mutations may come. When the disk fails,
        this does not return: `run` raises.

        Raises:
            DiskFullError: Something is left in memory only.
        """
        self.flusher.stop()
        await self._flushed.wait()
        if self._left is not None:
            raise self._left

    async def abandon(self) -> None:
        """Ends, and leaves what is not on disk: the bucket was deleted."""
        self.maintenance.abandon()
        self._scope.cancel()
        await self._ended.wait()

    async def truncate(
        self, partition: PartitionId, record: PartitionRecord, tokens: Sequence[Token]
    ) -> list[int]:
        """Makes a partition end at `record.high`: a snapshot's end that is not below what is
        indexed, or 0. With 0 all of it goes, in several steps, so that commits may come between
        them: after a crash on the way the partition is what it was, and its index is made anew.

        Args:
            partition: The partition.
            record: What is true of it afterwards.
            tokens: Answers to forget.

        Returns:
            The leases that this broke.

        Raises:
            StorageError: It was not done, or not wholly.
        """
        name = self.bucket.name
        if not record.high:
            while await self.store.ask(DeleteIndexEntries(name, partition)):
                pass
        return await self.store.ask(Truncate(name, partition, record, tokens))

    # Reading.

    async def find(
        self, partition: Partition, requests: Sequence[FetchRequest]
    ) -> dict[bytes, Mutation | None]:
        """Items from disk: as many of those wanted as come to a bounded number of bytes, and at
        least one. The partition's eviction must be pinned.

        Raises:
            StorageError: The disk cannot tell.
        """
        await self.maintenance.wait_until_indexed(partition)
        self._fetches += 1
        self._fetched += len(requests)
        rows = await self.store.ask(
            FindItems(self.bucket.name, partition.id, requests, partition.eviction.indexed)
        )
        return {request.key: row for request, row in zip(requests, rows, strict=False)}

    async def expire(self, now: float) -> None:
        """Makes deletions of items that the disk says have expired. As these stay in memory until
        they are indexed, it goes on another time when memory is short."""
        if all(one.state is not PartitionState.ACTIVE for one in self.bucket.partitions):
            return
        after, more = b"", True
        while more and self.bucket.relief() is Relief.NOTHING:
            pins = {partition.id: partition.eviction.pin() for partition in self.bucket.partitions}
            try:
                due, after = await self.store.ask(
                    FindExpired(self.bucket.name, int(now), after, DUE_MAX)
                )
                for item in due:
                    partition = self.bucket.partitions[item.partition]
                    if partition.eviction.is_index_ready:
                        partition.expire_stored(item.key, item.seq, now)
                more = bool(after)
            finally:
                for number, pin in pins.items():
                    self.bucket.partitions[number].eviction.unpin(pin)

    def statistics(self) -> dict[str, object]:
        """Figures; sizes in bytes, times in seconds."""
        return {
            "flusher": self.flusher.statistics(),
            "disk": self.maintenance.statistics(),
            "backfill": {"begun": self.backfills, "bytes": self.backfill_bytes},
            "fetch": {"batches": self._fetches, "items": self._fetched},
            "leases": self.leases.statistics(),
        }


# What is on disk, as the engine takes it.


def recover_partitions(
    stored: StoredBucket, new_history_id: Callable[[], HistoryId]
) -> tuple[list[PartitionImage], list[tuple[int, PartitionRecord]]]:
    """The partitions of a bucket, as they are to be served.

    After anything but a clean stop each active partition begins a new history, at its persisted
    snapshot end: what it had above may have been seen, and is gone. Of a bucket with a partition
    map, whether it is active still, and in which history, is decided when that is confirmed.

    Args:
        stored: What was found.
        new_history_id: Draws a fresh non-zero random ID.

    Returns:
        Their images, and the records that must be on disk before anything is served.
    """
    images: list[PartitionImage] = []
    changed: list[tuple[int, PartitionRecord]] = []
    for number, partition in enumerate(stored.partitions):
        record = partition.record
        failover_log = FailoverLog.of(record.failover_log)
        alone = not stored.cluster_map
        if alone and not stored.is_clean and record.state == PartitionState.ACTIVE:
            failover_log = failover_log.branch(new_history_id(), record.high)
            pairs = tuple(failover_log.pairs())
            changed.append((number, msgspec.structs.replace(record, failover_log=pairs)))
        images.append(_image(partition, failover_log))
    return images, changed


def _image(partition: StoredPartition, failover_log: FailoverLog) -> PartitionImage:
    record = partition.record
    answers = {
        WriterToken(token.writer, token.counter): decode_answer(token.answer)
        for token in partition.tokens
    }
    # The order of the map is by writer; that of the numbers tells who was heard of last.
    by_age = dict(sorted(answers.items(), key=lambda item: (item[1].last_seq, item[0].counter)))
    return PartitionImage(
        PartitionState(record.state),
        failover_log,
        record.high,
        Cas(record.last_cas),
        partition.indexed,
        partition.purge_seq,
        by_age,
        partition.items,
    )


decode_answer: Final = msgspec.msgpack.Decoder(MutateResult).decode
