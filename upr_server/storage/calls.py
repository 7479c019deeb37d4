"""Every call to a node's disk, as a value that carries itself out: `await store.ask(Commit(...))`.

A call is made in the server, and runs where the disk is: in a process of its own over LMDB, or in
the server's own loop over simulated disks. To add one, write a subclass here and `ask` for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar, get_args

import msgspec

from upr_protocol.chunk import LARGE_BYTES, Chunk, Mutation
from upr_protocol.ids import SeqNo
from upr_protocol.partition_map import PartitionMap, PartitionMapError
from upr_server.engine import FetchRequest
from upr_server.storage.bucket_maintenance import MaintenanceStep
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.errors import CorruptionError, encodable
from upr_server.storage.key_index import ExpiredItem
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord, LeaseRecord, PartitionRecord
from upr_server.storage.storage_server import StorageServer
from upr_server.storage.stored_bucket import StoredAnswer, StoredBucket

Answer_co = TypeVar("Answer_co", covariant=True)


class StoreCall(msgspec.Struct, Generic[Answer_co], frozen=True, tag=True):
    """A request to the disk.

    Attributes:
        is_read: Whether it changes nothing: then it runs beside the calls that do.
        answer_type: The type of its answer, taken from the base class `StoreCall[...]`.
    """

    is_read: ClassVar[bool] = False
    answer_type: ClassVar[Any] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        (cls.answer_type,) = get_args(cls.__dict__["__orig_bases__"][0])

    def run_on(self, server: StorageServer) -> Answer_co:
        """Carries it out.

        Raises:
            StorageError: It could not be done.
        """
        raise NotImplementedError


class BucketCall(StoreCall[Answer_co], Generic[Answer_co], frozen=True):
    """A request to the disk of one bucket.

    Attributes:
        bucket: The bucket's name.
    """

    bucket: str

    def run_on(self, server: StorageServer) -> Answer_co:
        """Carries it out on the bucket, which is opened if it is not open yet."""
        return self.run(server.bucket_storage(self.bucket))

    def run(self, bucket: BucketStorage) -> Answer_co:
        """Carries the call out, and gives its answer."""
        raise NotImplementedError


def all_calls(base: type[StoreCall[Any]] = StoreCall) -> Iterator[type[StoreCall[Any]]]:
    """Every call there is."""
    for call in base.__subclasses__():
        if call is not BucketCall:
            yield call
        yield from all_calls(call)


# The life of buckets.


class LoadedBuckets(msgspec.Struct, frozen=True):
    """What a start finds on disk.

    Attributes:
        buckets: The buckets that can be served, by name.
        damaged_buckets: Why the others cannot be served, by the name of the bucket's folder.
        leftovers: Why folders that a crash left could not be removed, by name.
    """

    buckets: Sequence[StoredBucket]
    damaged_buckets: dict[str, str]
    leftovers: dict[str, str] = {}


class LoadBuckets(StoreCall[LoadedBuckets], frozen=True):
    """Opens every bucket that there is, and answers what they are. A bucket with a damaged record
    that its start needs stays closed, and keeps no other bucket from being opened."""

    def run_on(self, server: StorageServer) -> LoadedBuckets:
        buckets: list[StoredBucket] = []
        damaged_buckets: dict[str, str] = {}
        leftovers = {
            encodable(name): encodable(reason) for name, reason in server.remove_leftovers().items()
        }
        for name in server.names():
            try:
                bucket = server.bucket_storage(name).open()
                if bucket.record.name != name:
                    # Somebody has copied or renamed the folder.
                    raise CorruptionError(f"its record is that of the bucket {bucket.record.name}")
                _check_partition_map(bucket)
                buckets.append(bucket)
            except CorruptionError as error:
                server.close_bucket(name)
                damaged_buckets[encodable(name)] = encodable(str(error))
        return LoadedBuckets(buckets, damaged_buckets, leftovers)


def _check_partition_map(bucket: StoredBucket) -> None:
    """Raises `CorruptionError` if the bucket has a partition map that cannot be used."""
    if not bucket.partition_map:
        return
    name, count = bucket.record.name, bucket.record.partition_count
    reason = ""
    try:
        partition_map = PartitionMap.decode(bucket.partition_map)
        if (partition_map.bucket, len(partition_map.partitions)) != (name, count):
            reason = (
                f"it is of bucket {partition_map.bucket!r} with {len(partition_map.partitions)} "
                f"partitions, not {count}"
            )
    except PartitionMapError as error:
        reason = str(error)
    if reason:
        raise CorruptionError(
            f"its partition map cannot be used: {reason}; let this node copy the bucket again from "
            "another node, or replace it by its dump"
        )


class CreateBucketFiles(StoreCall[None], frozen=True):
    """Makes a bucket. It is there, whole, when this is answered, or not at all."""

    record: BucketRecord
    partitions: Sequence[PartitionRecord]

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self.record.name

    def run_on(self, server: StorageServer) -> None:
        server.create(self.record, self.partitions)


class DeleteBucketFiles(StoreCall[None], frozen=True):
    """Deletes a bucket and all that is in it."""

    name: str

    def run_on(self, server: StorageServer) -> None:
        server.delete(self.name)


class CloseBucket(StoreCall[None], frozen=True):
    """Closes the files of a bucket; the next call opens them again. `Store.ask` asks for it after a
    bucket was created or deleted."""

    is_read: ClassVar[bool] = True

    name: str

    def run_on(self, server: StorageServer) -> None:
        server.close_bucket(self.name)


class StartServing(BucketCall[None], frozen=True):
    """Removes the mark of a clean stop and replaces these partitions' records, before anything is
    served."""

    records: Sequence[tuple[int, PartitionRecord]]

    def run(self, bucket: BucketStorage) -> None:
        bucket.log.start_serving(self.records)


class MarkCleanStop(BucketCall[None], frozen=True):
    """Sets the mark of a clean stop: everything is on disk."""

    def run(self, bucket: BucketStorage) -> None:
        bucket.log.mark_clean_stop()


# Event queues.


class TakeEventQueues(StoreCall[bytes], frozen=True):
    """Reads the event queues that a clean stop saved, and removes them: once this is answered no
    crash brings them back. Answers no bytes when nothing was saved.

    `CorruptionError` says that they are damaged, and removed nevertheless; `DataDirectoryError`
    that they cannot be read or removed.
    """

    def run_on(self, server: StorageServer) -> bytes:
        return server.event_queues.take()


class SaveEventQueues(StoreCall[None], frozen=True):
    """Saves the event queues for the next start: all of them, or nothing."""

    data: bytes

    def run_on(self, server: StorageServer) -> None:
        server.event_queues.save(self.data)


# Users.


class LoadUsers(StoreCall[bytes], frozen=True):
    """Reads the users of the cluster. Answers no bytes when none were saved.

    `CorruptionError` says that they are damaged; `DataDirectoryError` that they cannot be read.
    """

    def run_on(self, server: StorageServer) -> bytes:
        return server.users.load()


class SaveUsers(StoreCall[None], frozen=True):
    """Replaces the users of the cluster: all of them, or nothing."""

    data: bytes

    def run_on(self, server: StorageServer) -> None:
        server.users.save(self.data)


# Changes.


class Commit(BucketCall[dict[int, str]], frozen=True):
    """Puts whole snapshots of any number of partitions on disk, all or none; but nothing of one
    that has a damaged record. Answers what is damaged of such partitions, by partition."""

    writes: Sequence[PartitionWrite]

    def run(self, bucket: BucketStorage) -> dict[int, str]:
        return bucket.commit(self.writes)


class DeleteAnswers(BucketCall[None], frozen=True):
    """Deletes answers to publishers of a partition; those that are not there are passed over."""

    partition: int
    tokens: Sequence[StoredAnswer]

    def run(self, bucket: BucketStorage) -> None:
        bucket.log.delete_answers(self.partition, self.tokens)


class PutLease(BucketCall[None], frozen=True):
    """Stores a lease, new or renewed."""

    lease: LeaseRecord

    def run(self, bucket: BucketStorage) -> None:
        bucket.log.put_lease(self.lease)


class DeleteLeases(BucketCall[None], frozen=True):
    """Deletes leases; those that are not there are passed over."""

    lease_ids: Sequence[int]

    def run(self, bucket: BucketStorage) -> None:
        bucket.log.delete_leases(self.lease_ids)


class PutPartitionMap(BucketCall[dict[int, str]], frozen=True):
    """Stores another partition map and the partitions' records under it, but nothing of a partition
    that has a damaged record. A record may make its partition end earlier, but not below what is
    indexed. Answers what is damaged of partitions, by partition."""

    document: str
    records: Sequence[tuple[int, PartitionRecord]]

    def run(self, bucket: BucketStorage) -> dict[int, str]:
        return bucket.put_partition_map(self.document, self.records)


class Truncate(BucketCall[list[int]], frozen=True):
    """Deletes what a partition has behind `record.high`, a snapshot end not below what is indexed,
    and answers to publishers. Answers the leases that this broke."""

    partition: int
    record: PartitionRecord
    answers: Sequence[bytes]

    def run(self, bucket: BucketStorage) -> list[int]:
        return bucket.truncate(self.partition, self.record, self.answers)


class RefusePartition(BucketCall[None], frozen=True):
    """Has a partition neither read nor written any more: a damaged record of it was met, and
    `damage` tells which."""

    partition: int
    damage: str

    def run(self, bucket: BucketStorage) -> None:
        bucket.refuse(self.partition, self.damage)


class DeleteIndexEntries(BucketCall[bool], frozen=True):
    """One bounded step of taking a partition out of the index, before it is truncated to 0. Answers
    whether there is more."""

    partition: int

    def run(self, bucket: BucketStorage) -> bool:
        return bucket.delete_index_entries(self.partition)


class Maintain(BucketCall[tuple[MaintenanceStep, dict[str, Any]]], frozen=True, kw_only=True):
    """One bounded step of indexing or compaction, if there is something to do. Answers what was
    done, and the bucket's figures.

    Attributes:
        urgent: Whether to index what there is, however little.
        leases: (partition, start, end) of the ranges that are held.
        lapsed_leases: Leases that hold nothing back. If something of their ranges is dropped, the
            same commit marks them broken.
        purge_before_cas: Tombstones with a lower CAS are old enough to go.
        keep_unindexed: How many of the bucket's mutations stay unindexed: what is not indexed can
            be truncated.
    """

    urgent: bool
    leases: Sequence[tuple[int, int, int]]
    lapsed_leases: Sequence[LeaseRecord] = ()
    purge_before_cas: int
    keep_unindexed: int = 0

    def run(self, bucket: BucketStorage) -> tuple[MaintenanceStep, dict[str, Any]]:
        step = bucket.maintenance.step(
            urgent=self.urgent,
            leases=self.leases,
            lapsed_leases=self.lapsed_leases,
            purge_before_cas=self.purge_before_cas,
            keep_unindexed=self.keep_unindexed,
        )
        return step, bucket.statistics()


# Reads.


class FindSnapshotEnd(BucketCall[SeqNo | None], frozen=True):
    """Finds the highest snapshot end in [`floor`, `ceiling`] at which a partition can be
    truncated."""

    is_read: ClassVar[bool] = True

    partition: int
    ceiling: SeqNo
    floor: SeqNo

    def run(self, bucket: BucketStorage) -> SeqNo | None:
        return bucket.log.find_snapshot_end(self.partition, self.ceiling, self.floor)


class FindFirstSnapshotEnd(BucketCall[SeqNo], frozen=True):
    """Finds the lowest snapshot end at or above `floor`, which the disk has, that is a state of the
    partition still."""

    is_read: ClassVar[bool] = True

    partition: int
    floor: SeqNo

    def run(self, bucket: BucketStorage) -> SeqNo:
        return bucket.log.find_first_snapshot_end(self.partition, self.floor)


class FindSeqBefore(BucketCall[SeqNo], frozen=True):
    """Finds the highest sequence number on disk up to which every mutation has a CAS below
    `cas`."""

    is_read: ClassVar[bool] = True

    partition: int
    cas: int

    def run(self, bucket: BucketStorage) -> SeqNo:
        return bucket.log.find_seq_before(self.partition, self.cas)


class ReadChunks(BucketCall[list[Chunk]], frozen=True):
    """Reads the chunks of (`after`, `through`]: at least one mutation, and no more chunks once
    `bytes_max` is reached."""

    is_read: ClassVar[bool] = True

    partition: int
    after: SeqNo
    through: SeqNo
    bytes_max: int

    def run(self, bucket: BucketStorage) -> list[Chunk]:
        return bucket.log.read_chunks(
            self.partition,
            self.after,
            self.through,
            bytes_max=self.bytes_max,
            in_pieces=True,
            copy_chunk=bucket.copy_chunk,
        )


MEASURED_CHUNKS_MAX: Final = 4096
"""Chunks that one `MeasureRanges` looks at: 2 ms, for which other reads wait. A log may have
millions."""


class MeasureRanges(BucketCall[list[tuple[int, SeqNo]]], frozen=True):
    """The bytes of the chunks in each (partition, start, end], for as many of the ranges as come to
    a bounded number of chunks. `ChunkLog.measure_ranges` describes the answer."""

    is_read: ClassVar[bool] = True

    ranges: Sequence[tuple[int, int, int]]

    def run(self, bucket: BucketStorage) -> list[tuple[int, SeqNo]]:
        return bucket.log.measure_ranges(self.ranges, MEASURED_CHUNKS_MAX)


class ItemsFound(msgspec.Struct, frozen=True):
    """The answer to `FindItems`. Large values go beside the message, in chunks of one mutation: to
    read one out of the message would hold the server's loop for 13 ms.

    Attributes:
        rows: The items; None also in the place of one with a large value.
        large_rows: The items with large values.
        places: Their places among the rows.
    """

    rows: list[Mutation | None]
    large_rows: list[Chunk]
    places: list[int]

    @classmethod
    def of(cls, rows: list[Mutation | None]) -> ItemsFound:
        """The answer with these rows."""
        places = [
            place
            for place, row in enumerate(rows)
            if row is not None and len(row.value) > LARGE_BYTES
        ]
        large_rows: list[Chunk] = []
        for place in places:
            row = rows[place]
            assert row is not None
            large_rows.append(Chunk.build([row]))
            rows[place] = None
        return cls(rows, large_rows, places)

    def all_rows(self) -> list[Mutation | None]:
        """The rows, with those that have large values in their places. These refer to memory of
        the answer."""
        rows = list(self.rows)
        for place, chunk in zip(self.places, self.large_rows, strict=True):
            rows[place] = chunk.shared_mutation(0)
        return rows


class FindItems(BucketCall[ItemsFound], frozen=True):
    """Looks items up by key, as of the index's watermark, which has reached `indexed_seq`. Answers
    as many as fit into one answer, and at least one. What is damaged is a `damaged_item`."""

    is_read: ClassVar[bool] = True

    partition: int
    requests: Sequence[FetchRequest]
    indexed_seq: int = 0

    def run(self, bucket: BucketStorage) -> ItemsFound:
        rows = bucket.items.find(self.partition, self.requests, indexed_seq=self.indexed_seq)
        return ItemsFound.of(rows)


class FindExpired(BucketCall[tuple[list[ExpiredItem], bytes]], frozen=True):
    """Finds items that expired at `now` or before, among the `limit` entries behind the
    continuation `after`. Answers them with the next continuation, which is empty at the end."""

    is_read: ClassVar[bool] = True

    now: int
    after: bytes
    limit: int

    def run(self, bucket: BucketStorage) -> tuple[list[ExpiredItem], bytes]:
        return bucket.index.find_expired(self.now, self.after, self.limit)
