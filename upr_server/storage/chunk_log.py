"""The log of one bucket: its chunks by partition and sequence number, and what changes with them.

A commit takes snapshots of any number of partitions, each with the record that says how far the
partition has come. So the log of each partition always ends at a snapshot end. Behind that end
there may be the front of a snapshot, of which a replica has received only that, or which is
written in several commits. It counts once the rest has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from upr_kernel import answer_records
from upr_protocol.ids import PartitionState, SeqNo
from upr_server.storage.chunk_reader import ChunkReader
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.ordered_map import ReadTransaction, WriteTransaction
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import (
    BUCKET,
    CHUNK_HEAD,
    CLEAN_STOP,
    FLOOR,
    LEASE,
    PARTITION,
    PARTITION_MAP,
    PURGE,
    SEQS_END,
    TOKEN,
    BucketRecord,
    LeaseRecord,
    PartitionRecord,
    chunk_head,
    chunk_key,
    lease_key,
    pack_record,
    parse_lease_key,
    parse_record,
    parse_token_key,
    partition_key,
    read_seq,
    token_key,
    with_checksum,
    without_checksum,
)
from upr_server.storage.stored_bucket import StoredAnswer, StoredBucket, StoredPartition

Item = TypeVar("Item")

COMMIT_RESERVE_BYTES: Final = 64 * 1024 * 1024
"""Free space that a commit leaves for compaction, which needs some to free more."""

STORED_OVERHEAD_BYTES: Final = CHUNK_HEAD.size
"""What is stored with a chunk beside its own bytes."""

_UNREADABLE: Final = PartitionRecord(PartitionState.DEAD, (), SeqNo(0), 0)
"""In place of a record that cannot be read."""


class ChunkLog(ChunkReader):
    """One bucket's log, for who writes it.

    Args:
        ordered_map: Where the log is stored.
    """

    # From creation to a clean stop.

    def create(self, record: BucketRecord, partitions: Sequence[PartitionRecord]) -> None:
        """Writes the first records, into an empty map."""
        with self.ordered_map.write() as transaction:
            transaction.put(BUCKET, pack_record(BUCKET, record))
            for partition, partition_record in enumerate(partitions):
                self._put_record(transaction, partition, partition_record)

    def load(self) -> StoredBucket:
        """Reads everything except chunks. O(partitions + tokens + leases). A damaged record of a
        partition concerns this partition, and a damaged lease this lease.

        Raises:
            CorruptionError: A record of the whole bucket is damaged or missing; or a key is not one
                that is written here.
        """
        with self.ordered_map.read() as transaction:
            stored_value = transaction.get(BUCKET)
            if stored_value is None:
                raise CorruptionError("the log has no record of its bucket")
            record = parse_record(BUCKET, stored_value, BucketRecord)
            tokens: list[list[StoredAnswer]] = [[] for _ in range(record.partition_count)]
            damages: dict[int, str] = {}
            first_key, last_key = TOKEN, TOKEN + b"\xff" * 32
            for key, value in transaction.scan(first_key, last_key):
                partition, writer, counter = parse_token_key(key)
                if partition >= record.partition_count:
                    raise CorruptionError(
                        f"there is a token of partition {partition}, but the bucket has only "
                        f"{record.partition_count} partitions"
                    )
                try:
                    answer = without_checksum(key, value)
                except CorruptionError as error:
                    damages.setdefault(partition, str(error))
                else:
                    tokens[partition].append(StoredAnswer(writer, counter, answer))
            leases, damaged_leases = self._leases(transaction)
            return StoredBucket(
                record,
                self._is_clean(transaction),
                tuple(
                    self._stored_partition(
                        transaction, partition, tokens[partition], damages.get(partition, "")
                    )
                    for partition in range(record.partition_count)
                ),
                leases,
                self._cluster_map(transaction),
                damaged_leases=damaged_leases,
            )

    def _stored_partition(
        self,
        transaction: ReadTransaction,
        partition: int,
        tokens: Sequence[StoredAnswer],
        damage: str,
    ) -> StoredPartition:
        if not damage:
            try:
                # Nothing that a start needs, but a rollback and compaction do.
                read_seq(transaction, partition_key(FLOOR, partition))
                return StoredPartition(
                    self._record(transaction, partition),
                    self._purge_seq(transaction, partition),
                    tokens,
                )
            except CorruptionError as error:
                damage = str(error)
        return StoredPartition(_UNREADABLE, SeqNo(0), (), damage=damage)

    def _leases(
        self, transaction: ReadTransaction
    ) -> tuple[tuple[LeaseRecord, ...], dict[int, str]]:
        """The leases, and why others cannot be read, by their IDs."""
        leases: list[LeaseRecord] = []
        damaged_leases: dict[int, str] = {}
        for key, value in transaction.scan(LEASE, lease_key(SEQS_END)):
            try:
                leases.append(parse_record(key, value, LeaseRecord))
            except CorruptionError as error:
                damaged_leases[parse_lease_key(key)] = str(error)
        return tuple(leases), damaged_leases

    def _is_clean(self, transaction: ReadTransaction) -> bool:
        """Whether there is the mark of a clean stop. A damaged one is none: that is always safe."""
        stored_value = transaction.get(CLEAN_STOP)
        if stored_value is None:
            return False
        try:
            without_checksum(CLEAN_STOP, stored_value)
        except CorruptionError:
            return False
        return True

    def _cluster_map(self, transaction: ReadTransaction) -> str:
        stored_value = transaction.get(PARTITION_MAP)
        return "" if stored_value is None else parse_record(PARTITION_MAP, stored_value, str)

    def _put_record(
        self, transaction: WriteTransaction, partition: int, record: PartitionRecord
    ) -> None:
        key = partition_key(PARTITION, partition)
        transaction.put(key, pack_record(key, record))

    def _purge_seq(self, transaction: ReadTransaction, partition: int) -> SeqNo:
        return read_seq(transaction, partition_key(PURGE, partition))

    def start_serving(self, records: Iterable[tuple[int, PartitionRecord]]) -> None:
        """Removes the mark of a clean stop and replaces these partitions' records, in one commit:
        the server is about to serve the bucket."""
        with self.ordered_map.write() as transaction:
            transaction.delete(CLEAN_STOP)
            for partition, record in records:
                self._put_record(transaction, partition, record)

    def delete_fronts(self, records: Sequence[tuple[int, PartitionRecord]]) -> None:
        """Deletes the fronts of snapshots that partitions have behind their ends, in one commit; or
        in several, where a full disk has no room for that one. O(chunks deleted).

        Args:
            records: The partitions, and their records without the fronts.

        Raises:
            DiskFullError: There is no room even for a smaller commit.
        """

        def delete(some_records: Sequence[tuple[int, PartitionRecord]]) -> None:
            with self.ordered_map.write() as transaction:
                for partition, record in some_records:
                    self._truncate(transaction, partition, record)

        _in_commits_that_fit(records, delete)

    def put_partition_map(
        self, document: str, records: Iterable[tuple[int, PartitionRecord]]
    ) -> tuple[dict[int, int], dict[int, str]]:
        """Stores another partition map and the partitions' records under it, in one commit; but
        nothing of a partition whose record is damaged.

        A record may make its partition end earlier, at a snapshot end: then what the log has behind
        it is deleted.

        Returns:
            How many bytes of chunks were deleted of each partition; and what is damaged of the
            others.
        """
        deleted_bytes: dict[int, int] = {}
        damages: dict[int, str] = {}
        with self.ordered_map.write() as transaction:
            transaction.put(PARTITION_MAP, pack_record(PARTITION_MAP, document))
            for partition, record in records:
                try:
                    self._record(transaction, partition)
                except CorruptionError as error:
                    damages[partition] = str(error)
                else:
                    deleted_bytes[partition] = self._truncate(transaction, partition, record)
        return deleted_bytes, damages

    def truncate(
        self, partition: int, record: PartitionRecord, answers: Iterable[bytes] = ()
    ) -> tuple[list[int], int]:
        """Deletes what a partition has behind `record.high`, a snapshot end or 0.

        Args:
            partition: The partition.
            record: Its record afterwards.
            answers: Answers to delete, as in `PartitionWrite`.

        Returns:
            The leases that this broke: their ranges reach behind the new end. And how many bytes of
            chunks were deleted.

        Raises:
            ValueError: The partition ends earlier already.
        """
        with self.ordered_map.write() as transaction:
            deleted_bytes = self._truncate(transaction, partition, record)
            self._put_answers(transaction, partition, answers)
            if not record.high:
                transaction.delete(partition_key(PURGE, partition))
                transaction.delete(partition_key(FLOOR, partition))
            return self._break_leases(transaction, partition, record.high), deleted_bytes

    def empty_partition(self, partition: int, record: PartitionRecord) -> None:
        """Deletes everything that a partition has, whatever is damaged of it.

        Args:
            partition: The partition.
            record: Its record afterwards: that of an empty partition.
        """
        with self.ordered_map.write() as transaction:
            for first_key, last_key in (
                (chunk_key(partition, 0), chunk_key(partition, SEQS_END)),
                (token_key(partition, bytes(16), 0), token_key(partition, b"\xff" * 16, SEQS_END)),
            ):
                for key in [bytes(key) for key, _ in transaction.scan(first_key, last_key)]:
                    transaction.delete(key)
            transaction.delete(partition_key(PURGE, partition))
            transaction.delete(partition_key(FLOOR, partition))
            self._break_leases(transaction, partition, SeqNo(0))
            self._put_record(transaction, partition, record)

    def _break_leases(self, transaction: WriteTransaction, partition: int, end: SeqNo) -> list[int]:
        """Marks the leases as broken whose ranges reach behind the new end of a partition, and
        deletes those that cannot be read."""
        broken_leases: list[int] = []
        for key, stored_value in list(transaction.scan(LEASE, lease_key(SEQS_END))):
            try:
                lease = parse_record(key, stored_value, LeaseRecord)
            except CorruptionError:
                transaction.delete(key)
                broken_leases.append(parse_lease_key(key))
                continue
            if lease.is_whole and any(
                leased_partition == partition and leased_end > end
                for leased_partition, _, leased_end in lease.ranges
            ):
                lease = msgspec.structs.replace(lease, is_whole=False)
                transaction.put(key, pack_record(key, lease))
                broken_leases.append(lease.lease_id)
        return broken_leases

    def _truncate(
        self, transaction: WriteTransaction, partition: int, record: PartitionRecord
    ) -> int:
        """Replaces a partition's record, and deletes the chunks behind its end. Returns the bytes
        that they took."""
        end = self._record(transaction, partition).received_seq
        if record.received_seq > end:
            raise ValueError(f"partition {partition} ends at {end}, before {record.received_seq}")
        deleted_bytes = 0
        if record.received_seq < end:
            first_key = chunk_key(partition, record.received_seq + 1)
            scan = transaction.scan(first_key, chunk_key(partition, SEQS_END))
            for key, nbytes in [(bytes(key), len(value)) for key, value in scan]:
                transaction.delete(key)
                deleted_bytes += nbytes
        self._put_record(transaction, partition, record)
        return deleted_bytes

    def mark_clean_stop(self) -> None:
        """Sets the mark of a clean stop: everything that the server had is in the log."""
        with self.ordered_map.write() as transaction:
            transaction.put(CLEAN_STOP, with_checksum(CLEAN_STOP, b""))

    def remove_clean_mark(self) -> None:
        """Has the next start begin new histories, as after a stop that was not clean."""
        with self.ordered_map.write() as transaction:
            transaction.delete(CLEAN_STOP)

    # Writing.

    def commit(self, writes: Sequence[PartitionWrite]) -> dict[int, str]:
        """Puts whole snapshots on disk: all of it, or nothing; but nothing of a partition of which
        a record that must change is damaged.

        Returns:
            What is damaged of such partitions, by partition.

        Raises:
            DiskFullError: There is not enough space; nothing has changed.
            StoreFailedError: The disk failed; whether anything has changed is unknown.
            ValueError: A chunk does not begin where the log ends.
        """
        damages: dict[int, str] = {}
        with self.ordered_map.write(reserve_bytes=COMMIT_RESERVE_BYTES) as transaction:
            for write in writes:
                partition = write.partition
                try:
                    end = self._record(transaction, partition).received_seq
                    purge_seq = self._purge_seq(transaction, partition)
                except CorruptionError as error:
                    damages[partition] = str(error)
                    continue
                snapshot_ends = frozenset(write.ends)
                for chunk in write.chunks:
                    if chunk.start != end:
                        raise ValueError(
                            f"{chunk!r} of partition {partition} does not begin at the log's end, "
                            f"{end}"
                        )
                    end = chunk.end
                    key = chunk_key(partition, end)
                    head = chunk_head(key, chunk.crc, ends_snapshot=end in snapshot_ends)
                    transaction.put(key, b"".join((head, chunk.encode())))
                if write.record.received_seq != end:
                    raise ValueError(f"partition {partition} ends at {end}, not as {write.record}")
                self._put_record(transaction, partition, write.record)
                self._put_answers(transaction, partition, write.answers)
                if write.purge_seq > purge_seq:
                    key = partition_key(PURGE, partition)
                    transaction.put(key, pack_record(key, write.purge_seq))
        return damages

    def _put_answers(
        self, transaction: WriteTransaction, partition: int, answers: Iterable[bytes]
    ) -> None:
        # Only the last change of each record, in the order of the keys: neighbours share pages.
        newest: dict[bytes, bytes] = {}
        for rows in answers:
            newest.update(answer_records(rows, partition_key(TOKEN, partition)))
        for key, stored_value in sorted(newest.items()):
            if stored_value:
                transaction.put(key, stored_value)
            else:
                transaction.delete(key)

    def delete_answers(self, partition: int, tokens: Iterable[StoredAnswer]) -> None:
        """Deletes answers to publishers; those that are not there are passed over. They lie
        anywhere: where a full disk has no room for one commit, there are several.

        Raises:
            DiskFullError: There is no room even for a smaller commit; some may be deleted.
        """
        self._delete_keys(token_key(partition, token.writer, token.counter) for token in tokens)

    def put_lease(self, lease: LeaseRecord) -> None:
        """Stores a lease, new or renewed."""
        key = lease_key(lease.lease_id)
        with self.ordered_map.write() as transaction:
            transaction.put(key, pack_record(key, lease))

    def delete_leases(self, lease_ids: Iterable[int]) -> None:
        """Deletes leases; those that are not there are passed over. Thousands may have
        lapsed: where a full disk has no room for one commit, there are several.

        Raises:
            DiskFullError: There is no room even for a smaller commit; some may be deleted.
        """
        self._delete_keys(map(lease_key, lease_ids))

    def _delete_keys(self, keys: Iterable[bytes]) -> None:
        def delete(some_keys: Sequence[bytes]) -> None:
            with self.ordered_map.write() as transaction:
                for key in some_keys:
                    transaction.delete(key)

        # In their order: neighbours share pages.
        _in_commits_that_fit(sorted(keys), delete)


def _in_commits_that_fit(items: Sequence[Item], commit: Callable[[Sequence[Item]], None]) -> None:
    """Has all items committed at once; or, where a full disk has no room for that, fewer at a time.
    A deletion writes each page again that it touches, and the pages of before are free for later
    commits: so small ones go on where a large one finds no room.

    Raises:
        DiskFullError: There is no room even for one of them. Those before it are committed.
    """
    begin, count = 0, len(items)
    while begin < len(items):
        try:
            commit(items[begin : begin + count])
        except DiskFullError:
            if count == 1:
                raise
            count = max(1, count // 8)
        else:
            begin += count
