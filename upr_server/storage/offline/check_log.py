"""Checking a bucket's log: its records from end to end, and the chunks of each partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.errors import ChunkError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Operation, PartitionState, SeqNo
from upr_protocol.partition_map import PartitionMap
from upr_server.storage.errors import CorruptionError, StorageError
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.lmdb_transactions import COMMIT
from upr_server.storage.offline.bucket_files import read_bucket_record
from upr_server.storage.offline.findings import Damage, Progress, Report
from upr_server.storage.offline.map_walk import walk_map
from upr_server.storage.ordered_map import ReadTransaction
from upr_server.storage.records import (
    BUCKET,
    CHUNK,
    CLEAN_STOP,
    FLOOR,
    LEASE,
    PARTITION,
    PARTITION_MAP,
    PARTITIONS_END,
    PURGE,
    SEQS_END,
    TOKEN,
    KeyIndexEntry,
    LeaseRecord,
    PartitionRecord,
    chunk_key,
    lease_key,
    parse_chunk,
    parse_record,
    parse_token_key,
    partition_key,
    without_checksum,
)

_PROGRESS_BYTES: Final = 8 * 1024 * 1024

_RECEIVED_STATES: Final = (PartitionState.REPLICA, PartitionState.DEAD)
"""What there is of such a partition came from another node, or may have."""


def check_records(log: LmdbOrderedMap, bucket: str) -> Iterator[Report]:
    """Checks every record of a log except the contents of its chunks.

    Args:
        log: The log.
        bucket: The name that the bucket should have.
    """
    try:
        log.verify()
    except StorageError as error:
        yield Damage(str(error))
    with log.read() as transaction:
        partition_count, records = PARTITIONS_END, dict[int, PartitionRecord]()
        try:
            record = read_bucket_record(transaction)
        except StorageError as error:
            yield Damage(str(error))
        else:
            partition_count = record.partition_count
            if record.name != bucket:
                yield Damage(f"its record is that of the bucket {record.name}")
            for partition in range(partition_count):
                try:
                    records[partition] = _check_partition_record(transaction, partition)
                except (StorageError, ValueError) as error:
                    yield Damage(str(error), partition)
        check = _RecordCheck(partition_count, records)
        yield from walk_map(transaction, log.count(), "log", check)


def read_partition_record(transaction: ReadTransaction, partition: int) -> PartitionRecord:
    """A partition's record in the log.

    Raises:
        CorruptionError: It is damaged or missing.
    """
    key = partition_key(PARTITION, partition)
    stored_value = transaction.get(key)
    if stored_value is None:
        raise CorruptionError("the log has no record of it")
    return parse_record(key, stored_value, PartitionRecord)


def _check_partition_record(transaction: ReadTransaction, partition: int) -> PartitionRecord:
    """Returns the record. Raises `ValueError` if it contradicts itself."""
    record = read_partition_record(transaction, partition)
    log = FailoverLog.of_pairs(record.failover_log)
    partial = record.partial
    if partial is not None and not record.high < partial.received_seq <= partial.end:
        raise ValueError(f"it cannot have {partial} after {record.high}")
    # A replica knows its source's log before it has the data that the log tells of.
    is_received = record.state in _RECEIVED_STATES
    if log.entries and log.entries[0].seq > record.high and not is_received:
        raise ValueError(f"a history begins at {log.entries[0].seq}, above {record.high}")
    return record


class _RecordCheck:
    """Checks one record after the other, each by its kind.

    Args:
        partition_count: How many partitions the bucket has.
        records: The record of each partition, if it is good.
    """

    def __init__(self, partition_count: int, records: dict[int, PartitionRecord]) -> None:
        self._partition_count = partition_count
        self._records = records
        self._checks: dict[bytes, Callable[[bytes, Buffer], None]] = {
            CHUNK: self._check_chunk_key,
            CLEAN_STOP: self._check_clean_stop,
            FLOOR: self._check_dropped,
            LEASE: self._check_lease,
            PARTITION: self._check_partition_key,
            PARTITION_MAP: self._check_partition_map,
            PURGE: self._check_dropped,
            TOKEN: self._check_token,
        }

    def __call__(self, key: bytes, value: Buffer) -> None:
        """Raises an exception if the record is wrong."""
        if key in (BUCKET, COMMIT):
            # These were checked before the walk.
            return
        check = self._checks.get(key[:1])
        if check is None:
            raise ValueError("no record has this kind of key")
        check(key, value)

    def _check_chunk_key(self, key: bytes, _value: Buffer) -> None:
        # The chunk itself is checked with its partition.
        if len(key) != len(chunk_key(0, 0)):
            raise ValueError("its key has a wrong length")
        self._check_partition(int.from_bytes(key[1:3]))

    def _check_partition_key(self, key: bytes, _value: Buffer) -> None:
        if len(key) != len(partition_key(PARTITION, 0)):
            raise ValueError("its key has a wrong length")
        self._check_partition(int.from_bytes(key[1:]))

    def _check_partition(self, partition: int) -> None:
        if partition >= self._partition_count:
            raise ValueError(f"it belongs to partition {partition}, which does not exist")

    def _check_token(self, key: bytes, value: Buffer) -> None:
        if not without_checksum(key, value):
            raise ValueError("it is an empty answer to a publisher")
        self._check_partition(parse_token_key(key)[0])

    def _check_lease(self, key: bytes, value: Buffer) -> None:
        lease = parse_record(key, value, LeaseRecord)
        if lease_key(lease.lease_id) != key:
            raise ValueError(f"it is the lease {lease.lease_id}")
        for partition, start, end in lease.ranges if lease.is_whole else ():
            self._check_partition(partition)
            if not start <= end <= self._high(partition):
                raise ValueError(f"it leases ({start}, {end}] of partition {partition}")

    def _check_dropped(self, key: bytes, value: Buffer) -> None:
        through = parse_record(key, value, SeqNo)
        self._check_partition_key(key, value)
        partition = int.from_bytes(key[1:])
        record = self._records.get(partition)
        if key[:1] == PURGE and record is not None and record.state in _RECEIVED_STATES:
            # The number is the source's, and what lies below it may not have come.
            return
        if through > self._high(partition):
            subject = "tombstones" if key[:1] == PURGE else "superseded mutations"
            raise ValueError(f"it says that {subject} are dropped up to {through}, above the high")

    def _high(self, partition: int) -> int:
        record = self._records.get(partition)
        return SEQS_END if record is None else record.high

    def _check_clean_stop(self, key: bytes, value: Buffer) -> None:
        if key != CLEAN_STOP or without_checksum(key, value):
            raise ValueError("it should be the empty mark of a clean stop")

    def _check_partition_map(self, key: bytes, value: Buffer) -> None:
        partition_map = PartitionMap.decode(parse_record(key, value, str))
        if key != PARTITION_MAP or len(partition_map.partitions) != self._partition_count:
            raise ValueError(
                f"it is a partition map of {len(partition_map.partitions)} partitions, and should "
                f"have {self._partition_count}"
            )


class PartitionLogCheck:
    """Checks the chunks of one partition.

    Args:
        log: The bucket's log.
        partition: The partition.

    Attributes:
        newest: The newest mutation of each key up to the watermark.
        is_whole: Whether nothing is wrong so far; if not, `newest` may be wrong, too.
    """

    def __init__(self, log: LmdbOrderedMap, partition: int) -> None:
        self._log = log
        self._partition = partition
        self.newest: dict[bytes, KeyIndexEntry] = {}
        self.is_whole = True

    def check_chunks(self, received_seq: int | None, watermark: int) -> Iterator[Report]:
        """Reads all chunks.

        Args:
            received_seq: Where the last one should end; None if nobody can tell.
            watermark: How far the index has followed the log.
        """
        partition, end, progress = self._partition, 0, Progress()
        first_key, last_key = chunk_key(partition, 0), chunk_key(partition, SEQS_END)
        with self._log.read() as transaction:
            for key, value in transaction.scan(first_key, last_key):
                progress = Progress(progress.chunks + 1, progress.chunk_bytes + len(value))
                try:
                    chunk = parse_chunk(key, value)
                    chunk.check()
                except (StorageError, ChunkError) as error:
                    # Where the damaged chunk ends is known from its key.
                    end = max(end, int.from_bytes(key[3:11]))
                    yield self._damage(str(error))
                    continue
                if chunk.start != end:
                    yield self._damage(f"the log has no chunks from {end} to {chunk.start}")
                end = chunk.end
                self._add(chunk, watermark)
                if progress.chunk_bytes >= _PROGRESS_BYTES:
                    yield progress
                    progress = Progress()
        yield progress
        if received_seq is not None and end != received_seq:
            yield self._damage(f"the log ends at {end}, and should end at {received_seq}")

    def _damage(self, text: str) -> Damage:
        self.is_whole = False
        return Damage(text, self._partition)

    def _add(self, chunk: Chunk, watermark: int) -> None:
        if chunk.start >= watermark:
            return
        chunk = chunk.slice(chunk.start, SeqNo(watermark))
        for key, seq, operation, expiry in zip(
            chunk.keys(),
            chunk.seqs.tolist(),
            chunk.operations.tobytes(),
            chunk.expiries.tolist(),
            strict=True,
        ):
            is_set = operation == Operation.SET
            # The index does not store a tombstone's expiry.
            self.newest[key] = KeyIndexEntry(seq, expiry if is_set else 0, not is_set)
