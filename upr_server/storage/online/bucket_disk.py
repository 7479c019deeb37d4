"""One bucket and its disk: what writes its mutations, and what reads them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
import structlog
import trio

from upr_protocol.chunk import Mutation
from upr_protocol.concurrency import Notifier
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, HistoryId, PartitionId, PartitionState, SeqNo
from upr_server.engine import (
    Bucket,
    FetchRequest,
    MemoryAction,
    Partition,
    PartitionImage,
    WriterToken,
    unpack_result,
)
from upr_server.runtime import essential
from upr_server.storage.api import Store
from upr_server.storage.calls import (
    BucketCall,
    DeleteIndexEntries,
    FindExpired,
    FindItems,
    Truncate,
)
from upr_server.storage.errors import DiskFullError, StorageError
from upr_server.storage.online.flusher import Flusher
from upr_server.storage.online.leases import LeaseBook
from upr_server.storage.online.maintenance import IDLE_S, Maintenance
from upr_server.storage.records import LeaseRecord, PartitionRecord
from upr_server.storage.stored_bucket import StoredBucket, StoredPartition

DUE_MAX: Final = 512
"""Expired items that are read from disk at a time."""

EXPIRED_STEP: Final = 128
"""Expired items that are deleted before other tasks run: a millisecond, as each is a mutation of
its own."""

WOKEN_STEP: Final = 1024
"""Readers that are woken before other tasks run: below a millisecond. Every consumer may wait in
every partition."""

EXPIRED_PASSED_MAX: Final = 16 * 1024
"""Expired items that one call passes over, about: the disk has them, and they cannot be deleted
now. Millions may wait, for instance while a partition waits for a failover."""

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)


class BucketDisk:
    """A bucket, and what connects it with its disk.

    Args:
        store: The disk.
        bucket: The bucket.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number.
        purge_age_s: How old a tombstone must be to be dropped.
        nursery: Where backfills run; it must outlive `run`.
        leases: The leases that the disk has.
        damaged_leases: The IDs of those whose records are damaged.
        on_memory_freed: Called when memory may have become free.
        on_damage: Called with each partition that is refused while it is served, as a record of it
            is damaged, and whether everything that it has is on disk, and its steps made; others
            have their turn between them.
        rest_s: How long maintenance leaves a bucket alone that needs nothing.

    Attributes:
        store: The disk.
        bucket: The bucket.
        memory: What the bucket holds in memory.
        flusher: Writes its mutations to disk.
        leases: Ranges that must stay readable.
        maintenance: Has the log indexed and compacted.
        nursery: Where backfills run.
        progress: Notified when the disk or a replica has come further.
        backfills: How many backfills were started, ever.
        backfill_bytes: How many bytes they have read, ever.
        rows_left_out: How many rows streams have left out that ask for other keys, ever.
        bytes_left_out: What those would have taken.
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
        damaged_leases: Iterable[int] = (),
        on_memory_freed: Callable[[], None],
        on_damage: Callable[[Bucket, Partition, bool], Iterator[None]],
        rest_s: float = IDLE_S,
    ) -> None:
        self.store = store
        self.bucket = bucket
        self.memory = bucket.memory
        self._on_memory_freed = on_memory_freed
        self._on_damage = on_damage
        self.flusher = Flusher(store, bucket, self.note_committed, self.note_refused)
        self.leases = LeaseBook(store, bucket, time, new_id, leases, damaged_leases)
        self.maintenance = Maintenance(
            store, bucket, self.flusher, self.leases, time, purge_age_s, on_memory_freed, rest_s
        )
        self.nursery = nursery
        self.progress = Notifier()
        self._scope = trio.CancelScope()
        self.backfills = 0
        self.backfill_bytes = 0
        self.rows_left_out = 0
        self.bytes_left_out = 0
        # Where the next look for expired items goes on; empty for the beginning.
        self._expired_after = b""
        self._fetches = self._fetched_count = 0
        self._flushed = trio.Event()
        self._flush_error: DiskFullError | None = None
        self._ended = trio.Event()

    async def ask(self, call: BucketCall[Answer]) -> Answer:
        """Has a call about this bucket carried out, as `Store.ask` does.

        Raises:
            ServerError: `NO_BUCKET`: the bucket was deleted meanwhile. What the disk said may be
                about another bucket of the same name.
            StorageError: It was not carried out.
        """
        try:
            answer = await self.store.ask(call)
        except StorageError:
            self.maintenance.check_not_deleted()
            raise
        self.maintenance.check_not_deleted()
        return answer

    def note_committed(self) -> None:
        """Tells that something was put on disk: maintenance may have work, memory can go, and
        numbers are reached that others wait for."""
        self.maintenance.note_committed()
        self._on_memory_freed()
        self.progress.notify()

    def note_refused(self, partition: Partition, *, is_on_disk: bool = False) -> Iterator[None]:
        """Tells that a partition is refused from here on, as a damaged record of it was met. In
        steps, between which others may have their turn.

        Args:
            partition: The partition.
            is_on_disk: Whether everything that it has is on disk, as a replica's is.
        """
        self.maintenance.note_refused(partition)
        yield from self._on_damage(self.bucket, partition, is_on_disk)

    async def run(self) -> None:
        """Writes mutations to disk until `stop`, and then what is left.

        Raises:
            StoreFailedError: The disk has failed.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(essential(self.maintenance.run))
                    try:
                        await self.flusher.run()
                    except DiskFullError as error:
                        self._flush_error = error
                    self._flushed.set()
                    nursery.cancel_scope.cancel()
        finally:
            # Otherwise they would wait for ever.
            with trio.CancelScope(shield=True):
                await self.flusher.refuse_callbacks()
            self._ended.set()

    async def stop(self) -> None:
        """Writes what there is to disk, and ends; no more mutations may come. If the disk fails,
        this does not return: `run` raises.

        Raises:
            DiskFullError: Something is left in memory only.
        """
        self.flusher.stop()
        await self._flushed.wait()
        if self._flush_error is not None:
            raise self._flush_error

    async def abandon(self) -> None:
        """Ends without writing what is left: the bucket was deleted."""
        self.maintenance.abandon()
        self._scope.cancel()
        await self._ended.wait()
        self.flusher.stop_notifying()

    async def truncate(
        self, partition: PartitionId, record: PartitionRecord, answers: Sequence[bytes]
    ) -> list[int]:
        """Deletes what a partition has on disk behind `record.high`: a snapshot end that is not
        below what is indexed, or 0.

        For 0 its index entries are deleted first, in several steps, so that commits can come in
        between. After a crash on the way the partition is as it was, and is indexed again.

        Args:
            partition: The partition.
            record: Its record afterwards.
            answers: Answers to publishers to delete, as in `PartitionWrite`.

        Returns:
            The leases that this broke.

        Raises:
            StorageError: It was not done; index entries may be deleted nevertheless.
            ServerError: `NO_BUCKET`: the bucket was deleted meanwhile.
        """
        name = self.bucket.name
        has_entries, is_index_at_0 = not record.high, False
        try:
            while has_entries:
                has_entries = await self.ask(DeleteIndexEntries(name, partition))
                is_index_at_0 = True
            return await self.ask(Truncate(name, partition, record, answers))
        except StorageError:
            if is_index_at_0:
                # The partition stays as it is, and is indexed again. Not noted before: commits of
                # others would wait for its index.
                self.bucket.partitions[partition].note_index_progress(SeqNo(0), 0)
            raise

    # Reading.

    async def find_items(
        self, partition: Partition, requests: Sequence[FetchRequest]
    ) -> dict[bytes, Mutation | None]:
        """Items from disk, by key: as many of those asked for as fit into a bounded number of
        bytes, and at least one. None for a key that does not exist. The partition's eviction must
        be pinned.

        Raises:
            StorageError: The disk cannot tell.
            ServerError: `NO_BUCKET`: the bucket was deleted meanwhile.
        """
        await self.maintenance.wait_until_indexed(partition)
        self._fetches += 1
        self._fetched_count += len(requests)
        items = await self.ask(
            FindItems(self.bucket.name, partition.id, requests, partition.eviction.indexed_seq)
        )
        rows = items.all_rows()
        return {request.key: row for request, row in zip(requests, rows, strict=False)}

    async def expire_on_disk(self, now: float) -> None:
        """Deletes items that have expired on disk. Deletions stay in memory until they are indexed;
        so it stops when memory is short, and when it has passed over many items that cannot be
        deleted now. A later call continues there, and after the last one begins with the first.

        Raises:
            StorageError: The disk cannot tell, or the bucket was deleted.
        """
        partitions = self.bucket.partitions
        if all(partition.state is not PartitionState.ACTIVE for partition in partitions):
            return
        passed_count = 0
        while (
            passed_count < EXPIRED_PASSED_MAX
            and self.bucket.memory_action() is MemoryAction.NOTHING
        ):
            try:
                passed_count += await self._expire_some(partitions, now)
            except StorageError:
                # Otherwise each later call would begin where the disk cannot be read.
                self._expired_after = b""
                raise
            if not self._expired_after:
                return

    async def _expire_some(self, partitions: Sequence[Partition], now: float) -> int:
        """Goes over the next `DUE_MAX` expired items. Returns how many it has passed over."""
        pins = [(partition.eviction, partition.eviction.pin()) for partition in partitions]
        deleted_keys: list[bytes] = []
        changed_partitions: dict[Partition, None] = {}
        try:
            items, self._expired_after = await self.store.ask(
                FindExpired(self.bucket.name, int(now), self._expired_after, DUE_MAX)
            )
            for count, item in enumerate(items):
                if count and count % EXPIRED_STEP == 0:
                    await trio.lowlevel.checkpoint()
                if self.bucket.partitions is not partitions:
                    # The bucket was deleted meanwhile, and another may have its name.
                    self._expired_after = b""
                    return 0
                partition = partitions[item.partition]
                eviction, pin = pins[item.partition]
                is_certain = eviction.is_index_ready and eviction.is_pinned(pin)
                if is_certain and partition.expire_stored(item.key, item.seq, now):
                    deleted_keys.append(item.key)
                    changed_partitions[partition] = None
            # They are told once: there may be a hundred consumers of events. All partitions have
            # one observer.
            partitions[0].updates.notify_expired(deleted_keys)
            await _wake_readers(changed_partitions)
        finally:
            # This is done after a cancellation, too: a reader that is not woken may never look
            # again, and the disk is such a reader.
            for partition in changed_partitions:
                partition.snapshots.wake()
            for eviction, pin in pins:
                eviction.unpin(pin)
        return DUE_MAX - len(deleted_keys)

    def statistics(self) -> dict[str, object]:
        """Figures; sizes in bytes, times in seconds."""
        return {
            "flusher": self.flusher.statistics(),
            "disk": self.maintenance.statistics(),
            "backfill": {"begun": self.backfills, "bytes": self.backfill_bytes},
            "left_out": {"rows": self.rows_left_out, "bytes": self.bytes_left_out},
            "fetch": {"batches": self._fetches, "items": self._fetched_count},
            "leases": self.leases.statistics(),
        }


async def _wake_readers(changed_partitions: dict[Partition, None]) -> None:
    """Wakes those that wait for something to read, in steps. The partitions are taken out."""
    woken_count = 0
    while changed_partitions:
        partition, _ = changed_partitions.popitem()
        woken_count += partition.manager.cursor_count
        partition.snapshots.wake()
        if woken_count >= WOKEN_STEP:
            woken_count = 0
            await trio.lowlevel.checkpoint()


# What is on disk, in the engine's terms.


def recover_partitions(
    stored_bucket: StoredBucket, new_history_id: Callable[[], HistoryId]
) -> tuple[list[PartitionImage], list[tuple[int, PartitionRecord]]]:
    """The partitions of a bucket as the server takes them up after a start.

    After a stop that was not clean each active partition begins a new history at its persisted
    snapshot end: what it had above is gone, and consumers may have seen it. For a bucket with a
    partition map, the confirmation of the map decides whether a partition is still active, and in
    which history. A partition with a damaged record is dead, and its record stays as it is.

    Args:
        stored_bucket: The bucket as the disk has it.
        new_history_id: Draws a fresh non-zero random ID.

    Returns:
        Their images, and the records that must be on disk before anything is served.
    """
    images: list[PartitionImage] = []
    changed_records: list[tuple[int, PartitionRecord]] = []
    for partition_id, partition in enumerate(stored_bucket.partitions):
        record = partition.record
        failover_log = FailoverLog.of_pairs(record.failover_log)
        has_map = bool(stored_bucket.partition_map)
        if not has_map and not stored_bucket.is_clean and record.state == PartitionState.ACTIVE:
            failover_log = failover_log.with_branch(new_history_id(), record.high)
            pairs = tuple(failover_log.pairs())
            changed_records.append(
                (partition_id, msgspec.structs.replace(record, failover_log=pairs))
            )
        images.append(_image(partition, failover_log))
    return images, changed_records


def _image(partition: StoredPartition, failover_log: FailoverLog) -> PartitionImage:
    record = partition.record
    answers = {
        WriterToken(token.writer, token.counter): unpack_result(token.answer)
        for token in partition.tokens
    }
    # On disk they are ordered by publisher. The engine needs them by age, to forget the oldest.
    by_age = dict(sorted(answers.items(), key=lambda item: (item[1].last_seq, item[0].counter)))
    return PartitionImage(
        PartitionState(record.state),
        failover_log,
        record.high,
        Cas(record.last_cas),
        partition.indexed_seq,
        partition.purge_seq,
        by_age,
        partition.item_count,
        partition.damage,
        record.is_incomplete,
    )
