"""The log of one bucket: its chunks by partition and sequence number, and what changes with them.

A commit takes snapshots of any number of partitions, each with the record that says how far the
partition has come. So the log of each partition always ends at a snapshot end. Behind that end
there may be the front of a snapshot, of which a replica has received only that, or which is
written in several commits. It counts once the rest has arrived.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, TypeVar, cast

import msgspec
from sortedcontainers import SortedDict

from upr_kernel import answer_records
from upr_protocol.chunk import Chunk, Mutation, encoded_bytes
from upr_protocol.ids import PartitionState, SeqNo
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.ordered_map import OrderedMap, ReadTransaction, WriteTransaction
from upr_server.storage.records import (
    BUCKET,
    CHUNK,
    CHUNK_HEAD,
    CLEAN_STOP,
    FLOOR,
    LEASE,
    PARTITION,
    PARTITION_MAP,
    PARTITIONS_END,
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
    parse_chunk,
    parse_chunk_head,
    parse_chunk_key,
    parse_lease_key,
    parse_record,
    parse_token_key,
    partition_key,
    read_seq,
    token_key,
    with_checksum,
    without_checksum,
)

Item = TypeVar("Item")

COMMIT_RESERVE_BYTES: Final = 64 * 1024 * 1024
"""Free space that a commit leaves for compaction, which needs some to free more."""


class StoredAnswer(msgspec.Struct, frozen=True):
    """The answer to a publisher's batch, to be stored or deleted.

    Attributes:
        writer: The publisher's ID.
        counter: The batch's number.
        answer: The answer, encoded; empty to delete it.
    """

    writer: bytes
    counter: int
    answer: bytes


class PartitionWrite(msgspec.Struct, frozen=True):
    """What a commit changes in one partition.

    Attributes:
        partition: The partition.
        record: Its record afterwards.
        chunks: The mutations that lead there. Each chunk begins where the one before ends.
        answers: Answers to publishers to store and to delete, the oldest change first: strings of
            rows, as `PublisherAnswers` gives what has changed.
        ends: Those of the chunks' ends at which a snapshot ends.
        purge_seq: Tombstones up to here may be missing from the chunks.
    """

    partition: int
    record: PartitionRecord
    chunks: Sequence[Chunk] = ()
    answers: Sequence[bytes] = ()
    ends: Sequence[SeqNo] = ()
    purge_seq: SeqNo = SeqNo(0)

    @property
    def answer_bytes(self) -> int:
        """The bytes of all answers. O(strings)."""
        return sum(map(len, self.answers))


class StoredPartition(msgspec.Struct, frozen=True):
    """A partition as the disk has it.

    Attributes:
        record: Its record.
        purge_seq: Its purge number.
        tokens: Answers to publishers, by publisher and rising counter.
        indexed_seq: How far the index has followed the log.
        item_count: How many keys exist at `indexed_seq`.
        damage: Which of its records is damaged; empty for none. Then nothing is known of the
            partition, and the other fields are those of an empty one.
    """

    record: PartitionRecord
    purge_seq: SeqNo
    tokens: Sequence[StoredAnswer]
    indexed_seq: SeqNo = SeqNo(0)
    item_count: int = 0
    damage: str = ""


class StoredBucket(msgspec.Struct, frozen=True):
    """A bucket as the disk has it.

    Attributes:
        record: Its name and settings.
        is_clean: Whether it was stopped cleanly.
        partitions: Its partitions, in order.
        leases: Its leases, without those that are damaged.
        partition_map: Its partition map, as JSON; empty for none.
        reindex_reasons: Why the key index of partitions was damaged; it is made anew.
        damaged_leases: Why leases cannot be read, by their IDs.
    """

    record: BucketRecord
    is_clean: bool
    partitions: Sequence[StoredPartition]
    leases: Sequence[LeaseRecord]
    partition_map: str = ""
    reindex_reasons: dict[int, str] = {}
    damaged_leases: dict[int, str] = {}


_UNREADABLE: Final = PartitionRecord(PartitionState.DEAD, (), SeqNo(0), 0)
"""In place of a record that cannot be read."""


class ChunkLog:
    """One bucket's log.

    Args:
        ordered_map: Where the log is stored.
    """

    def __init__(self, ordered_map: OrderedMap) -> None:
        self.ordered_map = ordered_map

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

    def _record(self, transaction: ReadTransaction, partition: int) -> PartitionRecord:
        key = partition_key(PARTITION, partition)
        stored_value = transaction.get(key)
        if stored_value is None:
            raise CorruptionError(f"the record of partition {partition} is missing")
        return parse_record(key, stored_value, PartitionRecord)

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
    ) -> list[int]:
        """Stores another partition map and the partitions' records under it, in one commit.

        A record may make its partition end earlier, at a snapshot end: then what the log has behind
        it is deleted.

        Returns:
            How many bytes of chunks were deleted of each.
        """
        with self.ordered_map.write() as transaction:
            transaction.put(PARTITION_MAP, pack_record(PARTITION_MAP, document))
            return [self._truncate(transaction, partition, record) for partition, record in records]

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

    def commit(self, writes: Sequence[PartitionWrite]) -> None:
        """Puts whole snapshots on disk: all of it, or nothing.

        Raises:
            DiskFullError: There is not enough space; nothing has changed.
            StoreFailedError: The disk failed; whether anything has changed is unknown.
            ValueError: A chunk does not begin where the log ends.
        """
        with self.ordered_map.write(reserve_bytes=COMMIT_RESERVE_BYTES) as transaction:
            for write in writes:
                partition = write.partition
                end = self._record(transaction, partition).received_seq
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
                if write.purge_seq > self._purge_seq(transaction, partition):
                    key = partition_key(PURGE, partition)
                    transaction.put(key, pack_record(key, write.purge_seq))

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

        def delete(some_keys: Sequence[bytes]) -> None:
            with self.ordered_map.write() as transaction:
                for key in some_keys:
                    transaction.delete(key)

        # In their order: neighbours share pages.
        keys = sorted([token_key(partition, token.writer, token.counter) for token in tokens])
        _in_commits_that_fit(keys, delete)

    def put_lease(self, lease: LeaseRecord) -> None:
        """Stores a lease, new or renewed."""
        key = lease_key(lease.lease_id)
        with self.ordered_map.write() as transaction:
            transaction.put(key, pack_record(key, lease))

    def delete_leases(self, lease_ids: Iterable[int]) -> None:
        """Deletes leases; those that are not there are passed over."""
        with self.ordered_map.write() as transaction:
            for lease_id in lease_ids:
                transaction.delete(lease_key(lease_id))

    # Reading.

    def high_seq(self, partition: int) -> SeqNo:
        """The persisted snapshot end of a partition."""
        with self.ordered_map.read() as transaction:
            return self._record(transaction, partition).high

    def find_snapshot_end(self, partition: int, ceiling: SeqNo, floor: SeqNo) -> SeqNo | None:
        """The highest snapshot end in [`floor`, `ceiling`] that the log has marked, or None.

        Above the index's watermark every snapshot end is marked. Up to a watermark at which the
        partition was once compacted none is, even if the index was lost since: superseded mutations
        are missing there, so no point is a state of the past. O(chunks from the result to the
        ceiling).
        """
        with self.ordered_map.read() as transaction:
            high = self._record(transaction, partition).high
            floor = max(floor, read_seq(transaction, partition_key(FLOOR, partition)))
            if ceiling >= high >= floor:
                return high
            first_key, through = chunk_key(partition, floor), min(ceiling, high)
            while through >= floor and through:
                record = transaction.last(first_key, chunk_key(partition, through))
                if record is None:
                    break
                key, value = bytes(record[0]), record[1]
                _, end = parse_chunk_key(key)
                _, ends_snapshot = parse_chunk_head(key, value)
                if ends_snapshot:
                    return SeqNo(end)
                through = SeqNo(end - 1)
        return None

    def find_first_snapshot_end(self, partition: int, floor: SeqNo) -> SeqNo:
        """The lowest snapshot end at or above `floor` that the log has marked; it must hold as
        much. Points that compaction has passed are left out, as `find_snapshot_end` leaves them
        out. O(chunks from the floor to the result)."""
        with self.ordered_map.read() as transaction:
            high = self._record(transaction, partition).high
            floor = max(floor, read_seq(transaction, partition_key(FLOOR, partition)))
            if not floor:
                return SeqNo(0)
            last_key = chunk_key(partition, high)
            for key, value in transaction.scan(chunk_key(partition, floor), last_key):
                _, ends_snapshot = parse_chunk_head(key, value)
                if ends_snapshot:
                    return SeqNo(parse_chunk_key(key)[1])
        return high

    def find_seq_before(self, partition: int, cas: int) -> SeqNo:
        """The highest sequence number on disk up to which every mutation has a CAS below `cas`; 0
        when the first one has not. CAS values rise with the numbers, so this is a binary search: it
        reads and checks O(log(chunks)) chunks.

        Raises:
            CorruptionError: A chunk that was looked at is damaged.
        """
        low = 0
        with self.ordered_map.read() as transaction:
            high: int = self._record(transaction, partition).high
            while low < high:
                middle = (low + high) // 2
                chunk = self._first_with_rows(transaction, partition, middle, high)
                if chunk is None:
                    # Compaction left no row in (middle, high]: it says nothing of the time.
                    high = middle
                    continue
                rows_before = bisect_left(cast("Sequence[int]", chunk.cas), cas)
                if rows_before == chunk.count:
                    low = min(chunk.end, high)
                elif rows_before == 0:
                    high = min(chunk.start, middle)
                else:
                    return SeqNo(chunk.seqs[rows_before - 1])
        return SeqNo(low)

    def _first_with_rows(
        self, transaction: ReadTransaction, partition: int, after: int, through: int
    ) -> Chunk | None:
        """The first chunk with mutations that reaches beyond `after` and begins before `through`.
        A view of what the transaction sees."""
        last_key = chunk_key(partition, SEQS_END)
        for key, value in transaction.scan(chunk_key(partition, after + 1), last_key):
            chunk = parse_chunk(key, value)
            if chunk.start >= through:
                return None
            if chunk.count:
                return chunk
        return None

    def read_chunks(
        self,
        partition: int,
        after: int,
        through: int,
        *,
        bytes_max: int,
        mutations_max: int = 1 << 62,
        in_pieces: bool = False,
        copy_chunk: Callable[[Chunk], Chunk] = Chunk.copied,
    ) -> list[Chunk]:
        """Copies of the chunks of (`after`, `through`], read in one short transaction.

        Args:
            partition: The partition.
            after: Where the reader stands.
            through: The last sequence number to read; the log must have it.
            bytes_max: The answer ends with the chunk that reaches so many bytes in all,
            mutations_max: or so many mutations.
            in_pieces: Whether a first chunk of more bytes may be cut to its front, of at least one
                mutation.
            copy_chunk: Copies a chunk out of the transaction. That is done at once, while the chunk
                that was just checked is in the processor's cache.

        Returns:
            At least one chunk. The first begins at `after`, each begins where the one before ends,
            and the last ends at `through`, at a damaged chunk, or before them.

        Raises:
            CorruptionError: The first chunk is damaged or missing.
        """
        chunks: list[Chunk] = []
        first_key, last_key = chunk_key(partition, after + 1), chunk_key(partition, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(first_key, last_key):
                try:
                    chunk = parse_chunk(key, value)
                except CorruptionError:
                    if not chunks:
                        raise
                    break
                # Each chunk begins where the one before ended. Only the first may begin earlier,
                # when the reader stands inside it.
                if not chunk.start <= after < chunk.end or (chunks and chunk.start != after):
                    break
                unread_chunk = chunk.slice(SeqNo(after), SeqNo(through))
                if in_pieces and not chunks and unread_chunk.nbytes > bytes_max:
                    return [copy_chunk(_front(unread_chunk, bytes_max))]
                chunks.append(copy_chunk(unread_chunk))
                after = chunk.end
                bytes_max -= chunk.nbytes
                mutations_max -= chunk.count
                if after >= through or bytes_max <= 0 or mutations_max <= 0:
                    break
        if not chunks:
            raise CorruptionError(f"the log of partition {partition} has no chunk after {after}")
        return chunks

    def find_intact(self, partition: int, after: int, through: int) -> SeqNo:
        """Where the log can be read again after `after`: where the next intact chunk begins, or
        `through` if that is lower. O(damaged chunks)."""
        first_key, last_key = chunk_key(partition, after + 1), chunk_key(partition, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(first_key, last_key):
                try:
                    chunk = parse_chunk(key, value)
                except CorruptionError:
                    continue
                return SeqNo(min(chunk.start, through))
        return SeqNo(through)

    def find_mutations(
        self, partition: int, seqs: Sequence[int], bytes_max: int
    ) -> list[Mutation | str]:
        """The mutations with these sequence numbers, in the same order; what is damaged, in words,
        in place of one that is missing or whose chunk is damaged. Each chunk is checked once.

        Args:
            partition: The partition.
            seqs: The sequence numbers, in any order.
            bytes_max: The answer ends with the mutation that reaches so many bytes in all.
        """
        mutations: list[Mutation | str] = []
        with self.ordered_map.read() as transaction:
            chunks = _ChunkFinder(transaction, partition)
            for seq in seqs:
                try:
                    mutation = chunks.mutation(seq)
                except CorruptionError as error:
                    mutations.append(str(error))
                    continue
                mutations.append(mutation)
                bytes_max -= len(mutation.key) + len(mutation.value)
                if bytes_max <= 0:
                    break
        return mutations

    def measure_ranges(
        self, ranges: Iterable[tuple[int, int, int]], chunks_max: int
    ) -> list[tuple[int, SeqNo]]:
        """About how many bytes the chunks in each (partition, start, end] have. A chunk that
        reaches beyond the range counts by the share of its sequence numbers.

        Args:
            ranges: The ranges.
            chunks_max: How many chunks to look at, 1 or more.

        Returns:
            For each of the first ranges the bytes, and the number up to which they were counted:
            its end, but for the last one perhaps a lower number, from which to go on.
        """
        sizes: list[tuple[int, SeqNo]] = []
        with self.ordered_map.read() as transaction:
            for partition, start, end in ranges:
                nbytes, counted_through = 0, start
                last_key = chunk_key(partition, SEQS_END)
                scan = transaction.scan(chunk_key(partition, start + 1), last_key)
                for key, value in islice(scan, chunks_max):
                    chunks_max -= 1
                    _, through = parse_chunk_key(key)
                    if through > end:
                        share = end - counted_through, through - counted_through
                        nbytes += len(value) * share[0] // share[1]
                        counted_through = end
                        break
                    nbytes += len(value)
                    counted_through = through
                    if counted_through >= end:
                        break
                else:
                    if chunks_max:
                        # There are no more chunks.
                        counted_through = end
                sizes.append((nbytes, SeqNo(counted_through)))
                if not chunks_max:
                    break
        return sizes

    def chunk_bytes(self) -> dict[int, int]:
        """Stored bytes of chunks, by partition. O(chunks)."""
        sizes: dict[int, int] = {}
        last_key = chunk_key(PARTITIONS_END - 1, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(CHUNK, last_key):
                partition, _ = parse_chunk_key(key)
                sizes[partition] = sizes.get(partition, 0) + len(value)
        return sizes


class _ChunkFinder:
    """Finds mutations of one partition, and checks each chunk once.

    Args:
        transaction: Where to look.
        partition: The partition.
    """

    def __init__(self, transaction: ReadTransaction, partition: int) -> None:
        self._transaction = transaction
        self._partition = partition
        # By their last number. They are views of what the transaction sees.
        self._chunks: SortedDict[int, Chunk] = SortedDict()
        self._damages: dict[bytes, str] = {}

    def mutation(self, seq: int) -> Mutation:
        """The mutation with a sequence number.

        Raises:
            CorruptionError: It is missing, or its chunk is damaged.
        """
        position = self._chunks.bisect_left(seq)
        chunk = self._chunks.peekitem(position)[1] if position < len(self._chunks) else None
        if chunk is None or chunk.start >= seq:
            chunk = self._chunk_of(seq)
            self._chunks[chunk.end] = chunk
        chunk_seqs = cast("Sequence[int]", chunk.seqs)
        row = bisect_left(chunk_seqs, seq)
        if row == chunk.count or chunk_seqs[row] != seq:
            raise CorruptionError(f"mutation {seq} of partition {self._partition} is missing")
        return chunk.mutation(row)

    def _chunk_of(self, seq: int) -> Chunk:
        first_key, last_key = chunk_key(self._partition, seq), chunk_key(self._partition, SEQS_END)
        for key, value in self._transaction.scan(first_key, last_key):
            if key in self._damages:
                raise CorruptionError(self._damages[key])
            try:
                chunk = parse_chunk(key, value)
            except CorruptionError as error:
                self._damages[key] = str(error)
                raise
            if chunk.start < seq:
                return chunk
            break
        raise CorruptionError(
            f"the chunk with mutation {seq} of partition {self._partition} is missing"
        )


STORED_OVERHEAD_BYTES: Final = CHUNK_HEAD.size
"""What is stored with a chunk beside its own bytes."""


def _in_commits_that_fit(items: Sequence[Item], commit: Callable[[Sequence[Item]], None]) -> None:
    """Has all items committed at once; or, where a full disk has no room for that, fewer at a time.
    A deletion writes each page anew that it touches, and the pages of before are free for later
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


def _front(chunk: Chunk, bytes_max: int) -> Chunk:
    """The first mutations of a chunk: as many as fit in so many bytes, and at least one."""
    keys, values = chunk.key_offsets, chunk.value_offsets

    def nbytes(count: int) -> int:
        return encoded_bytes(count, keys[count], values[count])

    count = max(1, bisect_right(range(chunk.count + 1), bytes_max, key=nbytes) - 1)
    if count >= chunk.count:
        return chunk
    return chunk.rows(0, count, chunk.start, SeqNo(chunk.seqs[count - 1]))
