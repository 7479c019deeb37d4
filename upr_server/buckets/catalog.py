"""Which buckets there are: recovered from disk, created, deleted, and stopped cleanly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Final, Protocol

import structlog
import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_server.buckets.upkeep import Upkeep
from upr_server.engine import (
    STEP_PARTITIONS,
    Bucket,
    BucketError,
    BucketObserver,
    Buckets,
    Partition,
    PartitionImage,
    check_bucket,
)
from upr_server.runtime import essential
from upr_server.storage.api import Store
from upr_server.storage.calls import (
    CreateBucketFiles,
    DeleteAnswers,
    DeleteBucketFiles,
    LoadBuckets,
    MarkCleanStop,
    StartServing,
)
from upr_server.storage.errors import DataDirectoryError, DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk, recover_partitions
from upr_server.storage.online.maintenance import IDLE_S
from upr_server.storage.records import BucketRecord, LeaseRecord, PartialRecord, PartitionRecord
from upr_server.storage.stored_bucket import StoredAnswer, StoredBucket

PURGE_AGE_S: Final = 3 * 24 * 3600.0
"""A consumer that was away for less than this hears of every deletion when it comes back; one that
was away for longer may have to begin again."""

DELETED_ANSWERS_MAX: Final = 4096
"""Answers to publishers that are deleted in one transaction."""

log = structlog.get_logger(__name__)


class MapLifecycle(Protocol):
    """What recovering, deleting and stopping buckets means to their partition maps."""

    def restore_map(
        self,
        disk: BucketDisk,
        document: str,
        partials: Mapping[PartitionId, PartialRecord],
        *,
        is_clean: bool,
    ) -> None:
        """A bucket was found on disk, with this map."""

    def drop_bucket(self, bucket: str) -> None:
        """A bucket was deleted."""

    async def stop(self) -> None:
        """Stops replicating; what was received is on disk then.

        Raises:
            DiskFullError: Some of it found no room, and is dropped.
        """

    def is_suspect(self, bucket: str) -> bool:
        """Whether this node's stop must not count as a clean one."""


class BucketCatalog:
    """The buckets of one server, in memory and on disk.

    Args:
        store: The disk.
        upkeep: Works on the buckets.
        quota_bytes_default: The memory quota of a bucket that is created without one.
        quotas: Quotas of buckets on disk by name, instead of those with which they were created.
        partitions_max: How many partitions all buckets may have together, for one more bucket to be
            created.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number.
        purge_age_s: How old a tombstone must be to be forgotten.
        observer: Is told what becomes of buckets.
        rest_s: How long the disk of a bucket with which there is nothing to do is left alone,
            unless its `maintenance` is woken. A caller that gives more than the default must wake
            it.

    Attributes:
        buckets: By name.
        disks: The disk of each bucket.
        damaged: Why the other buckets on disk are not served, by name: records that their start
            needs are damaged. Their names stay taken until they are deleted.
        quota_bytes_default: See above.
    """

    def __init__(
        self,
        store: Store,
        upkeep: Upkeep,
        *,
        quota_bytes_default: int,
        quotas: Mapping[str, int] = MappingProxyType({}),
        partitions_max: int,
        time: Callable[[], float],
        new_id: Callable[[], HistoryId],
        purge_age_s: float = PURGE_AGE_S,
        observer: BucketObserver | None = None,
        rest_s: float = IDLE_S,
    ) -> None:
        self.buckets = Buckets(new_id, upkeep.collapse_soon, observer)
        self.disks: dict[Bucket, BucketDisk] = {}
        self.damaged: dict[str, str] = {}
        self.quota_bytes_default = quota_bytes_default
        self._quotas = quotas
        self._store = store
        self._upkeep = upkeep
        self._time = time
        self._new_id = new_id
        self._purge_age_s = purge_age_s
        self._partitions_max = partitions_max
        self._rest_s = rest_s
        self._maps: MapLifecycle
        self._nursery: trio.Nursery
        # After an unclean stop, a damaged partition has begun no new history; and one that was
        # active when it was found damaged lacks on disk what others have. Should its record be
        # readable at the next start, it must begin one: until then no stop counts as clean.
        self._unsettled: set[Bucket] = set()
        self._on_delete: list[Callable[[Bucket], Iterator[None]]] = []
        self._on_damage: list[Callable[[Bucket, Partition, bool], Iterator[None]]] = []
        # Buckets are created and deleted one after the other.
        self._lock = trio.Lock()

    # Looking up.

    def bucket(self, name: str) -> Bucket:
        """The bucket of this name.

        Raises:
            ServerError: `NO_BUCKET`: no bucket has this name. `DAMAGED`: it cannot be served.
        """
        bucket = self.buckets.get(name)
        if bucket is None:
            self.check_not_damaged(name)
            raise ServerError(Status.NO_BUCKET, f"there is no bucket {name!r}")
        return bucket

    def check_not_damaged(self, name: str) -> None:
        """Checks that the bucket of this name is not one of those that cannot be served.

        Raises:
            ServerError: `DAMAGED`.
        """
        damage = self.damaged.get(name)
        if damage is not None:
            raise ServerError(
                Status.DAMAGED,
                f"the bucket {name!r} is not served, because it is damaged: {damage}",
            )

    def disk_of(self, name: str) -> BucketDisk | None:
        """The disk of the bucket with this name; None when there is no such bucket."""
        bucket = self.buckets.get(name)
        return None if bucket is None else self.disks[bucket]

    # Starting and stopping.

    @asynccontextmanager
    async def recovered_buckets(self, maps: MapLifecycle) -> AsyncIterator[None]:
        """The buckets that are on disk, for as long as the context. When it ends, everything that
        has changed meanwhile is on disk, and the mark of a clean stop with it.

        Args:
            maps: Are told of the buckets.

        Raises:
            StorageError: What is on disk cannot be read.
        """
        self._maps = maps
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            loaded = await self._store.ask(LoadBuckets())
            self.damaged.update(loaded.damaged_buckets)
            for name, damage in loaded.damaged_buckets.items():
                log.error(
                    "damaged bucket; the others are served; run upr-server check",
                    bucket=name,
                    damage=damage,
                )
            for name, reason in loaded.leftovers.items():
                log.warning("cannot remove what a crash left", folder=name, reason=reason)
            for stored_bucket in loaded.buckets:
                await self._recover(stored_bucket)
            yield
            await self._stop()
            nursery.cancel_scope.cancel()

    async def _recover(self, stored_bucket: StoredBucket) -> None:
        record = stored_bucket.record
        _log_damage(stored_bucket)
        images, changed = recover_partitions(stored_bucket, self._new_id)
        # This removes the marker of a clean stop: from now on the next start notices a crash.
        await self._store.ask(StartServing(record.name, changed))
        log.info(
            "bucket recovered",
            bucket=record.name,
            partitions=record.partition_count,
            mutations=sum(image.high_seq for image in images),
            after="a clean stop" if stored_bucket.is_clean else "an unclean stop: new histories",
        )
        bucket = self.buckets.create(
            record.name,
            record.partition_count,
            self._quotas.get(record.name, record.quota_bytes),
            images,
            incarnation=record.incarnation,
            is_new=False,
        )
        await self._delete_surplus_answers(bucket, images)
        if not stored_bucket.is_clean and any(
            partition.damage for partition in stored_bucket.partitions
        ):
            self._unsettled.add(bucket)
        disk = self._attach_disk(bucket, stored_bucket.leases, stored_bucket.damaged_leases)
        if stored_bucket.partition_map:
            partials = {
                PartitionId(partition_number): partition.record.partial
                for partition_number, partition in enumerate(stored_bucket.partitions)
                if partition.record.partial is not None
            }
            self._maps.restore_map(
                disk, stored_bucket.partition_map, partials, is_clean=stored_bucket.is_clean
            )

    async def _delete_surplus_answers(
        self, bucket: Bucket, images: Sequence[PartitionImage]
    ) -> None:
        """Deletes the answers to publishers that the bucket has no memory for: of these the disk
        would hear nothing more, even if a rollback undoes their batches. It has more of them where
        the quota was higher."""
        for partition, image in zip(bucket.partitions, images, strict=True):
            answers = partition.repeated_batches.answers
            tokens = [
                StoredAnswer(token.writer, token.counter, b"")
                for token in image.answers
                if answers.answer_to(token)[0] is None
            ]
            for begin in range(0, len(tokens), DELETED_ANSWERS_MAX):
                some_tokens = tokens[begin : begin + DELETED_ANSWERS_MAX]
                await self._store.ask(DeleteAnswers(bucket.name, partition.id, some_tokens))

    async def _stop(self) -> None:
        """Brings every bucket to disk, and marks those that are complete there. A bucket that finds
        no room does not keep the others from it."""
        failure: DiskFullError | None = None
        try:
            await self._maps.stop()
        except DiskFullError as error:
            failure = error
        for disk in self.disks.values():
            disk.flusher.stop()
        for bucket, disk in self.disks.items():
            try:
                await disk.stop()
                if not (self._maps.is_suspect(bucket.name) or bucket in self._unsettled):
                    await self._store.ask(MarkCleanStop(bucket.name))
            except DiskFullError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # Creating and deleting.

    async def create_bucket(self, name: str, partition_count: int, quota_bytes: int) -> None:
        """Creates a bucket; it is on disk when this returns. Cancelled, it is created or not, in
        memory and on disk alike.

        Raises:
            BucketError: It exists, an argument is out of its range, or there are too many
                partitions.
            ServerError: `DAMAGED`: it exists, and cannot be served.
            StorageError: It could not be put on disk.
        """
        check_bucket(name, partition_count, quota_bytes)
        await self._create(name, quota_bytes, [PartitionState.ACTIVE] * partition_count)

    async def create_dead_bucket(self, name: str, partition_count: int) -> BucketDisk:
        """Creates a bucket whose partitions are dead and empty.

        Raises:
            BucketError: It exists, an argument is out of its range, or there are too many
                partitions.
            ServerError: `DAMAGED`: it exists, and cannot be served.
            StorageError: It could not be put on disk.
        """
        check_bucket(name, partition_count, self.quota_bytes_default)
        states = [PartitionState.DEAD] * partition_count
        return await self._create(name, self.quota_bytes_default, states)

    async def _create(
        self, name: str, quota_bytes: int, states: Sequence[PartitionState]
    ) -> BucketDisk:
        async with self._lock:
            self.buckets.check_absent(name)
            self.check_not_damaged(name)
            self._check_partition_count(len(states))
            images: list[PartitionImage] = []
            partitions: list[PartitionRecord] = []
            for state in states:
                failover_log = self._first_log(state)
                images.append(PartitionImage(state, failover_log))
                pairs = tuple(failover_log.pairs())
                partitions.append(PartitionRecord(state, pairs, SeqNo(0), 0))
                if len(images) % STEP_PARTITIONS == 0:
                    await trio.lowlevel.checkpoint()
            incarnation = self._new_id()
            record = BucketRecord(name, len(states), quota_bytes, incarnation=incarnation)
            # The client that asked for it may leave meanwhile. What is on disk must be in memory,
            # too.
            with trio.CancelScope(shield=True):
                await self._store.ask(CreateBucketFiles(record, partitions))
                bucket = self.buckets.begin(
                    name, len(states), quota_bytes, images, incarnation=incarnation
                )
                for _ in bucket.make_partitions():
                    await trio.lowlevel.checkpoint()
            self.buckets.add(bucket, is_new=True)
            return self._attach_disk(bucket)

    def _check_partition_count(self, new_count: int) -> None:
        count = sum(len(bucket.partitions) for bucket in self.buckets)
        if count + new_count > self._partitions_max:
            raise BucketError(
                f"this node's buckets have {count} partitions, and may have {self._partitions_max} "
                "together; delete a bucket, or raise the server's partitions_max",
                Status.LIMIT_REACHED,
            )

    def _first_log(self, state: PartitionState) -> FailoverLog:
        if state is PartitionState.ACTIVE:
            return FailoverLog().with_branch(self._new_id(), SeqNo(0))
        return FailoverLog()

    def _attach_disk(
        self,
        bucket: Bucket,
        leases: Sequence[LeaseRecord] = (),
        damaged_leases: Iterable[int] = (),
    ) -> BucketDisk:
        disk = BucketDisk(
            self._store,
            bucket,
            time=self._time,
            new_id=self._new_id,
            purge_age_s=self._purge_age_s,
            leases=leases,
            damaged_leases=damaged_leases,
            on_memory_freed=self._upkeep.try_relief_again,
            on_damage=self._note_refused,
            rest_s=self._rest_s,
            nursery=self._nursery,
        )
        self._nursery.start_soon(essential(disk.run))
        self.disks[bucket] = disk
        self._upkeep.add_bucket(disk)
        return disk

    def call_on_delete(self, callback: Callable[[Bucket], Iterator[None]]) -> None:
        """Has `callback` called with each bucket that is deleted, and its steps made before the
        bucket's disk is given up; others have their turn between them."""
        self._on_delete.append(callback)

    def call_on_damage(self, callback: Callable[[Bucket, Partition, bool], Iterator[None]]) -> None:
        """Has `callback` called with each partition that is refused while it is served, as a record
        of it is damaged, and whether everything that it has is on disk; and its steps made. Others
        have their turn between them."""
        self._on_damage.append(callback)

    def _note_refused(
        self, bucket: Bucket, partition: Partition, is_on_disk: bool
    ) -> Iterator[None]:
        log.error(
            "damaged partition; the others are served; run upr-server check",
            bucket=bucket.name,
            partition=partition.id,
            damage=partition.damage,
        )
        if not is_on_disk:
            # Some of what it gave to others is not there.
            self._unsettled.add(bucket)
        for callback in self._on_damage:
            yield from callback(bucket, partition, is_on_disk)

    async def delete_bucket(self, name: str) -> None:
        """Deletes a bucket, and ends the streams of the clients that have it open. Cancelled, it is
        deleted or not, in memory and on disk alike.

        Raises:
            BucketError: No bucket has this name.
            StorageError: It could not be deleted. Its name stays taken, and it is not served.
                Another call tries again.
        """
        async with self._lock:
            if name in self.damaged:
                with trio.CancelScope(shield=True):
                    await self._store.ask(DeleteBucketFiles(name))
                del self.damaged[name]
                return
            # From now on nobody can open it, while the streams of those who have it open end.
            bucket = self.buckets.delete(name)
            self._unsettled.discard(bucket)
            self._maps.drop_bucket(name)
            self._upkeep.remove_bucket(bucket)
            with trio.CancelScope(shield=True):
                for callback in self._on_delete:
                    for _ in callback(bucket):
                        await trio.lowlevel.checkpoint()
                await self.disks.pop(bucket).abandon()
                failure: DataDirectoryError | None = None
                try:
                    await self._store.ask(DeleteBucketFiles(name))
                except DataDirectoryError as error:
                    failure = error
                    self.damaged[name] = str(error)
                # Even if its files are still there: it is not served any more.
                for _ in bucket.release_partitions():
                    await trio.lowlevel.checkpoint()
                if failure is not None:
                    raise failure


def _log_damage(stored_bucket: StoredBucket) -> None:
    """Logs what the store has found to be damaged as it opened a bucket."""
    name = stored_bucket.record.name
    for partition, damage in stored_bucket.reindex_reasons.items():
        log.error(
            "damaged key index; rebuilding it", bucket=name, partition=partition, damage=damage
        )
    for partition, stored_partition in enumerate(stored_bucket.partitions):
        if stored_partition.damage:
            log.error(
                "damaged partition; the others are served; run upr-server check",
                bucket=name,
                partition=partition,
                damage=stored_partition.damage,
            )
    for lease_id, damage in stored_bucket.damaged_leases.items():
        log.error("damaged lease; it is lost", bucket=name, lease=f"{lease_id:016x}", damage=damage)
