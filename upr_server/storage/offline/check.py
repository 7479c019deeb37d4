"""Whether what lies in a bucket's two maps is what was put there: all of it, in order, found again.

It takes the bucket in stages: the log's map from end to end, the chunks of one partition after the
other with what the index says of them, the index's map from end to end. A stage that fails is a
problem like any other, and the next one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.errors import ChunkError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Operation, PartitionState, SeqNo
from upr_protocol.partition_map import PartitionMap
from upr_server.storage.errors import CorruptionError, StorageError
from upr_server.storage.lmdb_map import COMMIT, LmdbMap
from upr_server.storage.ordered_map import ReadTransaction
from upr_server.storage.records import (
    BUCKET,
    CHUNK,
    CLEAN,
    EXPIRY,
    FLOOR,
    INDEX_KEY_PREFIX,
    KEY,
    LEASE,
    MAP,
    NUMBERS_END,
    PARTITION,
    PARTITIONS_END,
    PURGE,
    TOKEN,
    WATERMARK,
    BucketRecord,
    IndexEntry,
    LeaseRecord,
    PartitionRecord,
    Watermark,
    chunk_key,
    expiry_key,
    index_key,
    lease_key,
    number_in,
    parse_chunk,
    parse_expiry_key,
    parse_record,
    parse_token_key,
    partition_key,
    unseal,
)

PROBLEMS_MAX: Final = 20
"""So many problems of one stage are told one by one; of the others, only how many they are."""

_END: Final = b"\xff" * 512
_GOES_ON_BYTES: Final = 8 * 1024 * 1024
_GOES_ON_KEYS: Final = 100_000

LOG_ADVICE: Final = (
    "restore the bucket from a copy, or have a replica take its place; what is damaged is refused, "
    "never served"
)
INDEX_ADVICE: Final = (
    "stop the server and delete the file data.mdb in the bucket's folder index: it is made anew "
    "from the log when the server runs again"
)


class Problem(msgspec.Struct, frozen=True, tag=True):
    """What is wrong, and what to do.

    Attributes:
        bucket: In which bucket.
        partition: In which partition of it; -1 when it is about none.
        what: What is wrong.
        advice: What to do.
    """

    bucket: str
    partition: int
    what: str
    advice: str

    def __str__(self) -> str:
        where = f"bucket {self.bucket}"
        if self.partition >= 0:
            where += f", partition {self.partition}"
        return f"{where}: {self.what}; {self.advice}"


class Checked(msgspec.Struct, frozen=True, tag=True):
    """How far it has come since the last of these.

    Attributes:
        chunks: Chunks that were read.
        chunk_bytes: Their bytes.
        keys: Keys that were looked at, in both maps.
    """

    chunks: int = 0
    chunk_bytes: int = 0
    keys: int = 0


class Stage(msgspec.Struct, frozen=True, tag=True):
    """A stage begins.

    Attributes:
        number: Which one.
        text: What is read.
        partition: Of which partition; -1 for none.
        is_index: Whether it is about the index alone.
    """

    number: int
    text: str
    partition: int = -1
    is_index: bool = False


Finding = Problem | Checked | Stage
_Wrong = tuple[int, str, bool]
"""Partition, what is wrong, whether only in the index."""


def open_map(path: Path) -> LmdbMap:
    """The folder `log` or `index` of a bucket, to be read while nobody else has it.

    Raises:
        StorageError: It cannot be opened.
    """
    return LmdbMap(path, readonly=True, is_alone=True, is_summed=path.name == "log")


def open_bucket(path: Path) -> tuple[LmdbMap, LmdbMap]:
    """Log and index of a bucket's folder; see `open_map`."""
    log = open_map(path / "log")
    try:
        return log, open_map(path / "index")
    except BaseException:
        log.close()
        raise


def partition_count(log: LmdbMap) -> int:
    """How many partitions a bucket has, also when the record that says so is damaged."""
    try:
        with log.read() as transaction:
            return _bucket_record(transaction).partition_count
    except StorageError:
        pass
    with log.read() as transaction:
        found = transaction.last(partition_key(PARTITION, 0), partition_key(PARTITION, 0xFFFF))
        return 0 if found is None else int.from_bytes(found[0][1:3]) + 1


class Check:
    """A check of one bucket.

    Args:
        name: The bucket's name.
        log: Its log.
        index: Its index.
    """

    def __init__(self, name: str, log: LmdbMap, index: LmdbMap) -> None:
        self._name = name
        self._log = log
        self._index = index

    def run(self, first_stage: int = 0) -> Iterator[Finding]:
        """Goes through the stages from `first_stage` on."""
        try:
            last = partition_count(self._log) + 1
        except StorageError as error:
            yield self._problem(-1, str(error), is_index=False)
            return
        for number in range(first_stage, last + 1):
            if number == 0:
                yield Stage(number, "the log's records")
                yield from self._stage(self._walk_log, is_index=False)
            elif number == last:
                yield Stage(number, "the index", is_index=True)
                yield from self._stage(self._walk_index, is_index=True)
            else:
                yield Stage(number, "the chunks", number - 1)
                yield from self._stage(_Partition(self._log, self._index, number - 1).walk, False)

    def _stage(
        self, walk: Callable[[], Iterator[_Wrong | Checked]], is_index: bool
    ) -> Iterator[Finding]:
        told = 0
        try:
            for found in walk():
                if isinstance(found, Checked):
                    yield found
                    continue
                told += 1
                if told <= PROBLEMS_MAX:
                    yield self._problem(*found)
        except Exception as error:  # noqa: BLE001  # damage may end a reader in any way
            yield self._problem(-1, f"it cannot be read to its end ({error})", is_index)
        if told > PROBLEMS_MAX:
            yield self._problem(-1, f"and {told - PROBLEMS_MAX} problems more there", is_index)

    def _problem(self, partition: int, what: str, is_index: bool) -> Problem:
        advice = INDEX_ADVICE if is_index else LOG_ADVICE
        return Problem(self._name, partition, what, advice)

    # The log's map.

    def _walk_log(self) -> Iterator[_Wrong | Checked]:
        try:
            self._log.verify()
        except StorageError as error:
            yield -1, str(error), False
        with self._log.read() as transaction:
            record: BucketRecord | None = None
            try:
                record = _bucket_record(transaction)
                if record.name != self._name:
                    yield -1, f"its record is that of the bucket {record.name}", False
            except StorageError as error:
                yield -1, str(error), False
            count = PARTITIONS_END if record is None else record.partition_count
            highs: dict[int, int] = {}
            for number in range(count if record else 0):
                try:
                    highs[number] = _check_partition_record(transaction, number)
                except (StorageError, ValueError) as error:
                    yield number, str(error), False
            for found in _walk(transaction, self._log.count(), "the log"):
                if isinstance(found, Checked):
                    yield found
                    continue
                if isinstance(found, str):
                    yield -1, found, False
                    continue
                key, value = found
                try:
                    _check_log_record(key, value, count, highs)
                except Exception as error:  # noqa: BLE001  # as above
                    yield -1, f"{_told(key)} in the log: {error}", False

    # The index's map.

    def _walk_index(self) -> Iterator[_Wrong | Checked]:
        count = partition_count(self._log)
        with self._index.read() as transaction:
            for found in _walk(transaction, self._index.count(), "the index"):
                if isinstance(found, Checked):
                    yield found
                    continue
                if isinstance(found, str):
                    yield -1, found, True
                    continue
                key, value = found
                try:
                    _check_index_record(transaction, key, value, count)
                except Exception as error:  # noqa: BLE001  # as above
                    yield -1, f"{_told(key)} in the index: {error}", True


def _told(key: bytes) -> str:
    return f"the record {key[:40].hex()}"


def _walk(
    transaction: ReadTransaction, count: int, name: str
) -> Iterator[Checked | str | tuple[bytes, Buffer]]:
    """Every key with its value, and a problem where the map is not in order."""
    before: bytes | None = None
    seen = 0
    for key, value in transaction.scan(b"", _END):
        if before is not None and key <= before:
            yield f"{name} has {_told(key)} behind {_told(before)}"
        before = key
        found = transaction.get(key)
        if found is None or bytes(found) != bytes(value):
            yield f"{name} has {_told(key)}, but does not find it"
        yield key, value
        seen += 1
        if not seen % _GOES_ON_KEYS:
            yield Checked(keys=_GOES_ON_KEYS)
    yield Checked(keys=seen % _GOES_ON_KEYS)
    if seen != count:
        yield f"{name} should have {count} records, and has {seen}"


def _bucket_record(transaction: ReadTransaction) -> BucketRecord:
    sealed = transaction.get(BUCKET)
    if sealed is None:
        raise CorruptionError("the log has no record of its bucket")
    return parse_record(BUCKET, sealed, BucketRecord)


def _partition_record(transaction: ReadTransaction, partition: int) -> PartitionRecord:
    key = partition_key(PARTITION, partition)
    sealed = transaction.get(key)
    if sealed is None:
        raise CorruptionError("the log has no record of it")
    return parse_record(key, sealed, PartitionRecord)


def _check_partition_record(transaction: ReadTransaction, partition: int) -> int:
    """The high number; a ValueError when the record says what cannot be."""
    record = _partition_record(transaction, partition)
    log = FailoverLog.of(record.failover_log)
    partial = record.partial
    if partial is not None and not record.high < partial.received <= partial.end:
        raise ValueError(f"it cannot have {partial} behind {record.high}")
    # A replica knows its master's log before it has what that tells of.
    is_replica = record.state == PartitionState.REPLICA
    if log.entries and log.entries[0].seq > record.high and not is_replica:
        raise ValueError(f"a history begins at {log.entries[0].seq}, above {record.high}")
    return record.high


def _check_log_record(key: bytes, value: Buffer, count: int, highs: dict[int, int]) -> None:
    # What stands by itself was looked at, or will be with its partition.
    if key not in (BUCKET, COMMIT):
        check = _LOG_RECORDS.get(key[:1])
        if check is None:
            raise ValueError("nothing of the kind is ever written")
        check(key, value, count, highs)


def _check_chunk_key(key: bytes, _value: Buffer, count: int, _highs: dict[int, int]) -> None:
    if len(key) != len(chunk_key(0, 0)) or int.from_bytes(key[1:3]) >= count:
        raise ValueError("it is a chunk of a partition that is not there")


def _check_token(key: bytes, value: Buffer, count: int, _highs: dict[int, int]) -> None:
    if not unseal(key, value) or parse_token_key(key)[0] >= count:
        raise ValueError("it is an answer that nobody was given")


def _check_lease(key: bytes, value: Buffer, count: int, highs: dict[int, int]) -> None:
    lease = parse_record(key, value, LeaseRecord)
    if lease_key(lease.lease_id) != key:
        raise ValueError(f"it is the lease {lease.lease_id}")
    for partition, start, end in lease.ranges if lease.is_whole else ():
        if partition >= count or not start <= end <= highs.get(partition, NUMBERS_END):
            raise ValueError(f"it leases ({start}, {end}] of partition {partition}")


def _check_dropped(key: bytes, value: Buffer, count: int, highs: dict[int, int]) -> None:
    through = parse_record(key, value, SeqNo)
    _check_partition_key(key, value, count, highs)
    if through > highs.get(int.from_bytes(key[1:]), NUMBERS_END):
        what = "tombstones are purged" if key[:1] == PURGE else "what was superseded is dropped"
        raise ValueError(f"{what} up to {through}, above the last number")


def _check_partition_key(key: bytes, _value: Buffer, count: int, _highs: dict[int, int]) -> None:
    if len(key) != len(partition_key(PARTITION, 0)) or int.from_bytes(key[1:]) >= count:
        raise ValueError("it is of a partition that is not there")


def _check_clean(key: bytes, value: Buffer, _count: int, _highs: dict[int, int]) -> None:
    if key != CLEAN or unseal(key, value):
        raise ValueError("it is no mark of a clean stop")


def _check_map(key: bytes, value: Buffer, count: int, _highs: dict[int, int]) -> None:
    found = PartitionMap.decode(parse_record(key, value, str))
    if key != MAP or len(found.partitions) != count:
        raise ValueError(f"it is a partition map of {len(found.partitions)} partitions")


_LOG_RECORDS: Final[dict[bytes, Callable[[bytes, Buffer, int, dict[int, int]], None]]] = {
    CHUNK: _check_chunk_key,
    CLEAN: _check_clean,
    LEASE: _check_lease,
    MAP: _check_map,
    PARTITION: _check_partition_key,
    FLOOR: _check_dropped,
    PURGE: _check_dropped,
    TOKEN: _check_token,
}


def _check_index_record(
    transaction: ReadTransaction, key: bytes, value: Buffer, count: int
) -> None:
    kind = key[:1]
    if kind == EXPIRY:
        expiry, partition, number = parse_expiry_key(key)
        indexed = index_key(partition, unseal(key, value))
        entry = transaction.get(indexed)
        if entry is None or IndexEntry.parse(indexed, entry) != IndexEntry(number, expiry):
            raise ValueError("something expires then that is not there")
    elif kind == KEY:
        entry_of = IndexEntry.parse(key, value)
        partition = int.from_bytes(key[1:3])
        if partition >= count or len(key) == INDEX_KEY_PREFIX:
            raise ValueError("it is of a partition that is not there")
        if entry_of.expiry:
            expires = expiry_key(entry_of.expiry, partition, abs(entry_of.number))
            sealed = transaction.get(expires)
            if sealed is None or unseal(expires, sealed) != key[INDEX_KEY_PREFIX:]:
                raise ValueError("it expires, but nothing says when")
    elif kind == WATERMARK:
        parse_record(key, value, Watermark)
        if len(key) != len(partition_key(WATERMARK, 0)) or int.from_bytes(key[1:]) >= count:
            raise ValueError("it is of a partition that is not there")
    elif key != COMMIT:
        raise ValueError("nothing of the kind is ever written")


class _Partition:
    """One partition's chunks, and what the index says of them."""

    def __init__(self, log: LmdbMap, index: LmdbMap, number: int) -> None:
        self._log = log
        self._index = index
        self._number = number
        self._newest: dict[bytes, tuple[int, int]] = {}
        self._is_whole = True

    def walk(self) -> Iterator[_Wrong | Checked]:
        number = self._number
        high, received, purge_seq = 0, 0, 0
        try:
            with self._log.read() as transaction:
                record = _partition_record(transaction, number)
                high, received = record.high, record.received
                purge_seq = number_in(transaction, partition_key(PURGE, number))
        except StorageError:
            self._is_whole = False  # the log's own stage says so
        mark = Watermark()
        key = partition_key(WATERMARK, number)
        with self._index.read() as transaction:
            sealed = transaction.get(key)
            if sealed is not None:
                mark = parse_record(key, sealed, Watermark)
        yield from self._chunks(received, mark.seq)
        if mark.seq > high:
            yield number, f"the index knows number {mark.seq}, the log only {high}", True
        if self._is_whole:
            yield from self._entries(mark, purge_seq)

    def _chunks(self, received: int, watermark: int) -> Iterator[_Wrong | Checked]:
        number, at = self._number, 0
        read = Checked()
        with self._log.read() as transaction:
            for key, value in transaction.scan(
                chunk_key(number, 0), chunk_key(number, NUMBERS_END)
            ):
                read = Checked(read.chunks + 1, read.chunk_bytes + len(value))
                try:
                    chunk = parse_chunk(key, value)
                    chunk.check()
                except (StorageError, ChunkError) as error:
                    self._is_whole = False
                    at = max(at, int.from_bytes(key[3:11]))
                    yield number, str(error), False
                    continue
                if chunk.start != at:
                    self._is_whole = False
                    yield number, f"the log has nothing from {at} to {chunk.start}", False
                at = chunk.end
                self._take(chunk, watermark)
                if read.chunk_bytes >= _GOES_ON_BYTES:
                    yield read
                    read = Checked()
        yield read
        if at != received:
            self._is_whole = False
            yield number, f"the log ends at {at}, and should end at {received}", False

    def _take(self, chunk: Chunk, watermark: int) -> None:
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
            self._newest[key] = (seq if operation == Operation.SET else -seq, expiry)

    def _entries(self, mark: Watermark, purge_seq: int) -> Iterator[_Wrong | Checked]:
        partition, items = self._number, 0
        newest = self._newest
        with self._index.read() as transaction:
            for key, (number, expiry) in newest.items():
                indexed = index_key(partition, key)
                value = transaction.get(indexed)
                if value is None:
                    yield partition, f"the index does not find the key {_shown(key)}", True
                    continue
                entry = IndexEntry.parse(indexed, value)
                if entry != IndexEntry(number, expiry):
                    what = f"the newest number of the key {_shown(key)} is {abs(number)}"
                    yield partition, f"{what}, and not {abs(entry.number)}", True
            for indexed, value in transaction.scan(
                index_key(partition, b""), _entries_end(partition)
            ):
                entry = IndexEntry.parse(indexed, value)
                items += entry.number > 0
                key = indexed[INDEX_KEY_PREFIX:]
                if key not in newest and not -purge_seq <= entry.number < 0:
                    yield partition, f"the log has nothing of the key {_shown(key)}", True
        yield Checked(keys=len(newest))
        if items != mark.items:
            yield partition, f"the index has {items} items, and should have {mark.items}", True


def _entries_end(partition: int) -> bytes:
    return index_key(partition, _END)


def _shown(key: bytes) -> str:
    return repr(key[:80])[1:]


def problems(findings: Iterable[Finding]) -> list[Problem]:
    """The problems among what was found."""
    return [finding for finding in findings if isinstance(finding, Problem)]
