"""The log of one bucket: its chunks by partition and number, and what changes with them.

A commit takes snapshots of any number of partitions, each with the record that says how far the
partition has come: what counts ends at a snapshot's end of each partition, always. A replica puts
the front of a snapshot there too, behind that end; it counts when the rest has come.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

import msgspec
from sortedcontainers import SortedDict

from upr_protocol.chunk import Chunk, Mutation, encoded_bytes
from upr_protocol.ids import SeqNo
from upr_server.storage.errors import CorruptionError
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
    parse_record,
    parse_token_key,
    partition_key,
    read_seq,
    seal,
    token_key,
    unseal,
)

COMMIT_RESERVE_BYTES: Final = 64 * 1024 * 1024
"""Room that a commit leaves for compaction, which could not make room without some."""


class Token(msgspec.Struct, frozen=True):
    """What a publisher was answered, to be kept or forgotten.

    Attributes:
        writer: The writer's ID.
        counter: The batch's number.
        answer: The answer, encoded; empty to forget it.
    """

    writer: bytes
    counter: int
    answer: bytes


class PartitionWrite(msgspec.Struct, frozen=True):
    """What a commit changes in one partition.

    Attributes:
        partition: Which one.
        record: What is true of it afterwards.
        chunks: What leads there, each beginning where the one before ends.
        tokens: Answers to keep and to forget.
        ends: The numbers at which snapshots end, of those at which a chunk ends.
        purge_seq: Tombstones at or below it may never have come here.
    """

    partition: int
    record: PartitionRecord
    chunks: Sequence[Chunk] = ()
    tokens: Sequence[Token] = ()
    ends: Sequence[SeqNo] = ()
    purge_seq: SeqNo = SeqNo(0)


class StoredPartition(msgspec.Struct, frozen=True):
    """A partition as it was found.

    Attributes:
        record: Its record.
        purge_seq: Its purge number.
        tokens: Remembered answers, by writer and rising counter.
        indexed: How far the index knows it.
        items: Keys that exist, as of there.
    """

    record: PartitionRecord
    purge_seq: SeqNo
    tokens: Sequence[Token]
    indexed: SeqNo = SeqNo(0)
    items: int = 0


class StoredBucket(msgspec.Struct, frozen=True):
    """A bucket as it was found.

    Attributes:
        record: What it is.
        is_clean: Whether it was stopped cleanly.
        partitions: Its partitions, by number.
        leases: Leases on it.
        cluster_map: Its partition map, as JSON; empty for none.
    """

    record: BucketRecord
    is_clean: bool
    partitions: Sequence[StoredPartition]
    leases: Sequence[LeaseRecord]
    cluster_map: str = ""


class ChunkLog:
    """One bucket's log.

    Args:
        ordered_map: Where it is kept.
    """

    def __init__(self, ordered_map: OrderedMap) -> None:
        self.ordered_map = ordered_map

    # Its life.

    def create(self, record: BucketRecord, partitions: Sequence[PartitionRecord]) -> None:
        """Begins it, in an empty map."""
        with self.ordered_map.write() as transaction:
            transaction.put(BUCKET, pack_record(BUCKET, record))
            for number, partition in enumerate(partitions):
                key = partition_key(PARTITION, number)
                transaction.put(key, pack_record(key, partition))

    def load(self) -> StoredBucket:
        """What it holds, chunks excepted. O(partitions + tokens + leases).

        Raises:
            CorruptionError: A record is damaged or missing.
        """
        with self.ordered_map.read() as transaction:
            sealed = transaction.get(BUCKET)
            if sealed is None:
                raise CorruptionError("the log has no record of its bucket")
            record = parse_record(BUCKET, sealed, BucketRecord)
            tokens: list[list[Token]] = [[] for _ in range(record.partition_count)]
            first, last = TOKEN, TOKEN + b"\xff" * 32
            for key, value in transaction.scan(first, last):
                partition, writer, counter = parse_token_key(key)
                if partition >= record.partition_count:
                    raise CorruptionError(f"a token of partition {partition}")
                tokens[partition].append(Token(writer, counter, unseal(key, value)))
            return StoredBucket(
                record,
                transaction.get(CLEAN_STOP) is not None,
                tuple(
                    StoredPartition(
                        self._record(transaction, number),
                        self._purge_seq(transaction, number),
                        tokens[number],
                    )
                    for number in range(record.partition_count)
                ),
                tuple(
                    parse_record(key, value, LeaseRecord)
                    for key, value in transaction.scan(LEASE, lease_key(SEQS_END))
                ),
                self._cluster_map(transaction),
            )

    def _cluster_map(self, transaction: ReadTransaction) -> str:
        sealed = transaction.get(PARTITION_MAP)
        return "" if sealed is None else parse_record(PARTITION_MAP, sealed, str)

    def _record(self, transaction: ReadTransaction, partition: int) -> PartitionRecord:
        key = partition_key(PARTITION, partition)
        sealed = transaction.get(key)
        if sealed is None:
            raise CorruptionError(f"the record of partition {partition} is missing")
        return parse_record(key, sealed, PartitionRecord)

    def _purge_seq(self, transaction: ReadTransaction, partition: int) -> SeqNo:
        return read_seq(transaction, partition_key(PURGE, partition))

    def start_serving(self, records: Iterable[tuple[int, PartitionRecord]]) -> None:
        """The server begins to serve: the mark of a clean stop goes, and `records` replace those of
        their partitions, in one commit."""
        with self.ordered_map.write() as transaction:
            transaction.delete(CLEAN_STOP)
            for number, record in records:
                key = partition_key(PARTITION, number)
                transaction.put(key, pack_record(key, record))

    def put_partition_map(
        self, document: str, records: Iterable[tuple[int, PartitionRecord]]
    ) -> None:
        """Keeps another partition map, and with it what it makes of partitions, in one commit.

        A record may say that the partition ends earlier, at a snapshot's end: then what the log has
        behind that goes.
        """
        with self.ordered_map.write() as transaction:
            transaction.put(PARTITION_MAP, pack_record(PARTITION_MAP, document))
            for number, record in records:
                self._truncate(transaction, number, record)

    def truncate(
        self, partition: int, record: PartitionRecord, tokens: Iterable[Token] = ()
    ) -> list[int]:
        """Has a partition end at `record.high`, a snapshot's end or 0: what is behind that goes.

        Args:
            partition: The partition.
            record: What is true of it afterwards.
            tokens: Answers to forget.

        Returns:
            The leases that this broke.
        """
        broken: list[int] = []
        with self.ordered_map.write() as transaction:
            self._truncate(transaction, partition, record)
            self._put_tokens(transaction, partition, tokens)
            if not record.high:
                transaction.delete(partition_key(PURGE, partition))
                transaction.delete(partition_key(FLOOR, partition))
            for key, sealed in list(transaction.scan(LEASE, lease_key(SEQS_END))):
                lease = parse_record(bytes(key), sealed, LeaseRecord)
                if lease.is_whole and any(
                    number == partition and end > record.high for number, _, end in lease.ranges
                ):
                    broken.append(lease.lease_id)
            for lease_id in broken:
                key = lease_key(lease_id)
                lease = parse_record(key, transaction.get(key) or b"", LeaseRecord)
                transaction.put(
                    key, pack_record(key, msgspec.structs.replace(lease, is_whole=False))
                )
        return broken

    def _truncate(
        self, transaction: WriteTransaction, partition: int, record: PartitionRecord
    ) -> None:
        before = self._record(transaction, partition)
        if record.received > before.received:
            raise ValueError(f"partition {partition} ends at {before.received}: {record.received}")
        if record.received < before.received:
            first = chunk_key(partition, record.received + 1)
            last = chunk_key(partition, SEQS_END)
            for key in [bytes(key) for key, _ in transaction.scan(first, last)]:
                transaction.delete(key)
        key = partition_key(PARTITION, partition)
        transaction.put(key, pack_record(key, record))

    def mark_clean_stop(self) -> None:
        """The server stops, and everything is here."""
        with self.ordered_map.write() as transaction:
            transaction.put(CLEAN_STOP, seal(CLEAN_STOP, b""))

    def remove_clean_mark(self) -> None:
        """Has the next start begin new histories, as after a stop that was not clean."""
        with self.ordered_map.write() as transaction:
            transaction.delete(CLEAN_STOP)

    # Writing.

    def commit(self, writes: Sequence[PartitionWrite]) -> None:
        """Puts whole snapshots on disk: all of it, or nothing.

        Raises:
            DiskFullError: There is no room; nothing has changed.
            StoreFailedError: Nobody knows what has changed.
            ValueError: A chunk does not follow on what is there.
        """
        with self.ordered_map.write(reserve_bytes=COMMIT_RESERVE_BYTES) as transaction:
            for write in writes:
                number, at = write.partition, self._record(transaction, write.partition).received
                ends = frozenset(write.ends)
                for chunk in write.chunks:
                    if chunk.start != at:
                        raise ValueError(f"{chunk!r} of partition {number} does not follow {at}")
                    at = chunk.end
                    key = chunk_key(number, at)
                    head = chunk_head(key, chunk.crc, ends_snapshot=at in ends)
                    transaction.put(key, head + bytes(chunk))
                if write.record.received != at:
                    raise ValueError(f"partition {number} ends at {at}: {write.record}")
                key = partition_key(PARTITION, number)
                transaction.put(key, pack_record(key, write.record))
                self._put_tokens(transaction, number, write.tokens)
                if write.purge_seq > self._purge_seq(transaction, number):
                    key = partition_key(PURGE, number)
                    transaction.put(key, pack_record(key, write.purge_seq))

    def _put_tokens(
        self, transaction: WriteTransaction, partition: int, tokens: Iterable[Token]
    ) -> None:
        for token in tokens:
            key = token_key(partition, token.writer, token.counter)
            if token.answer:
                transaction.put(key, seal(key, token.answer))
            else:
                transaction.delete(key)

    def put_lease(self, lease: LeaseRecord) -> None:
        """Keeps a lease, new or renewed."""
        key = lease_key(lease.lease_id)
        with self.ordered_map.write() as transaction:
            transaction.put(key, pack_record(key, lease))

    def delete_leases(self, lease_ids: Iterable[int]) -> None:
        """Forgets leases."""
        with self.ordered_map.write() as transaction:
            for lease_id in lease_ids:
                transaction.delete(lease_key(lease_id))

    # Reading.

    def high(self, partition: int) -> SeqNo:
        """The persisted snapshot end of a partition."""
        with self.ordered_map.read() as transaction:
            return self._record(transaction, partition).high

    def find_snapshot_end(self, partition: int, ceiling: SeqNo, floor: SeqNo) -> SeqNo | None:
        """The highest snapshot end in [`floor`, `ceiling`] of which the log knows; None when it
        knows of none. Above the index's watermark it knows of all; below one that a compaction went
        by, of none, whatever has become of the index since. O(chunks above the ceiling)."""
        with self.ordered_map.read() as transaction:
            high = self._record(transaction, partition).high
            floor = max(floor, read_seq(transaction, partition_key(FLOOR, partition)))
            if ceiling >= high >= floor:
                return high
            first, at = chunk_key(partition, floor), min(ceiling, high)
            while at >= floor and at:
                found = transaction.last(first, chunk_key(partition, at))
                if found is None:
                    break
                key, value = bytes(found[0]), found[1]
                _, end = parse_chunk_key(key)
                if parse_chunk_head(key, value)[1]:
                    return SeqNo(end)
                at = SeqNo(end - 1)
        return None

    def read(
        self,
        partition: int,
        after: int,
        through: int,
        *,
        bytes_max: int,
        mutations_max: int = 1 << 62,
        in_pieces: bool = False,
        copied: Callable[[Chunk], Chunk] = Chunk.copied,
    ) -> list[Chunk]:
        """Chunks of (`after`, `through`], in memory of their own, in one short transaction.

        Args:
            partition: The partition.
            after: Where the reader stands.
            through: The last number wanted; the log must have it.
            bytes_max: Ends with the chunk that comes to this.
            mutations_max: The same in mutations.
            in_pieces: Whether of a first chunk that is larger only the front may be read, at least
                one mutation.
            copied: Copies a chunk that the transaction sees, while what it was checked by is in
                the processor's cache.

        Returns:
            Chunks that begin at `after` and touch, at least one; the last ends at `through` or
            before it.

        Raises:
            CorruptionError: One is damaged, or missing.
        """
        chunks: list[Chunk] = []
        first, last = chunk_key(partition, after + 1), chunk_key(partition, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(first, last):
                chunk = parse_chunk(key, value)
                # Each goes on where the one before ended; only the first may begin earlier.
                if not chunk.start <= after < chunk.end or (chunks and chunk.start != after):
                    break
                piece = chunk.slice(SeqNo(after), SeqNo(through))
                if in_pieces and not chunks and piece.nbytes > bytes_max:
                    return [copied(_front(piece, bytes_max))]
                chunks.append(copied(piece))
                after = chunk.end
                bytes_max -= chunk.nbytes
                mutations_max -= chunk.count
                if after >= through or bytes_max <= 0 or mutations_max <= 0:
                    return chunks
        raise CorruptionError(f"the log of partition {partition} has nothing behind {after}")

    def find(self, partition: int, numbers: Sequence[int], bytes_max: int) -> list[Mutation]:
        """The mutations with these numbers, in their order. Each chunk is checked once.

        Args:
            partition: The partition.
            numbers: The numbers, in any order.
            bytes_max: The answer ends with the mutation that comes to this.

        Raises:
            CorruptionError: A chunk is damaged, or a mutation missing.
        """
        found: list[Mutation] = []
        # By last number; views of what the transaction sees.
        chunks: SortedDict[int, Chunk] = SortedDict()
        with self.ordered_map.read() as transaction:
            for number in numbers:
                at = chunks.bisect_left(number)
                chunk = chunks.peekitem(at)[1] if at < len(chunks) else None
                if chunk is None or chunk.start >= number:
                    chunk = self._chunk_of(transaction, partition, number)
                    chunks[chunk.end] = chunk
                seqs = cast("Sequence[int]", chunk.seqs)
                index = bisect_left(seqs, number)
                if index == chunk.count or seqs[index] != number:
                    raise CorruptionError(f"number {number} of partition {partition} is missing")
                row = chunk.mutation(index)
                found.append(row)
                bytes_max -= len(row.key) + len(row.value)
                if bytes_max <= 0:
                    break
        return found

    def _chunk_of(self, transaction: ReadTransaction, partition: int, number: int) -> Chunk:
        last = chunk_key(partition, SEQS_END)
        for key, value in transaction.scan(chunk_key(partition, number), last):
            chunk = parse_chunk(key, value)
            if chunk.start < number:
                return chunk
            break
        raise CorruptionError(f"the chunk with number {number} of partition {partition} is missing")

    def measure(self, ranges: Iterable[tuple[int, int, int]]) -> list[int]:
        """The bytes of the chunks that lie in each (partition, start, end], about: one that reaches
        beyond either bound counts by the share of its numbers. O(chunks)."""
        found = []
        with self.ordered_map.read() as transaction:
            for partition, start, end in ranges:
                nbytes, before = 0, start
                last = chunk_key(partition, SEQS_END)
                for key, value in transaction.scan(chunk_key(partition, start + 1), last):
                    _, through = parse_chunk_key(key)
                    if through > end:
                        nbytes += len(value) * (end - before) // (through - before)
                        break
                    nbytes += len(value)
                    before = through
                    if before >= end:
                        break
                found.append(nbytes)
        return found

    def sizes(self) -> dict[int, int]:
        """Bytes of chunks by partition, as they stand in the map. O(chunks)."""
        sizes: dict[int, int] = {}
        last = chunk_key(PARTITIONS_END - 1, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(CHUNK, last):
                partition, _ = parse_chunk_key(key)
                sizes[partition] = sizes.get(partition, 0) + len(value)
        return sizes


STORED_OVERHEAD_BYTES: Final = CHUNK_HEAD.size
"""What a chunk takes beside its own bytes."""


def _front(chunk: Chunk, bytes_max: int) -> Chunk:
    """As many mutations of a chunk, from its front, as come to so many bytes; at least one, if
    there is one."""
    keys, values = chunk.key_offsets, chunk.value_offsets

    def nbytes(count: int) -> int:
        return encoded_bytes(count, keys[count], values[count])

    count = max(1, bisect_right(range(chunk.count + 1), bytes_max, key=nbytes) - 1)
    if count >= chunk.count:
        return chunk
    return chunk.rows(0, count, chunk.start, SeqNo(chunk.seqs[count - 1]))
