"""The format of what is stored: keys, values, and the checksum that each of them carries.

A bucket has two ordered maps. The **log** holds chunks by partition and sequence number, and the
records that must change in one commit with them. The **index** is derived from the log and can be
rebuilt. Integers in keys are big-endian, so that the order of the bytes is that of the numbers.

=====  ===========================  ==========================================================
map    key                          value
=====  ===========================  ==========================================================
both   a zero byte                  the number of the last commit (`lmdb_ordered_map` writes it)
log    ``b``                        a `BucketRecord`: name, settings
log    ``c``                        present only after a clean stop
log    ``f`` partition              compaction has dropped superseded mutations up to this number:
                                    no point below it is a state that the partition was in
log    ``g`` partition              the purge number
log    ``l`` lease                  a `LeaseRecord`
log    ``m``                        the partition map, as JSON; absent without one
log    ``p`` partition              a `PartitionRecord`: state, failover log, numbers
log    ``s`` partition, last number a chunk in its wire form, behind its `CHUNK_HEAD`
log    ``t`` partition, writer, n   the answer to a publisher's batch
index  ``e`` expiry, partition, n   the key of an item that expires at this time
index  ``k`` partition, key         an `KeyIndexEntry`: the number of the key's newest mutation
index  ``w`` partition              a `Watermark`: how far the index has followed the log
=====  ===========================  ==========================================================

LMDB has no checksums, so every value carries one. It covers the key, too: a record read from the
wrong place is as wrong as one with a flipped bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from struct import error as StructError
from typing import Any, Final, TypeVar

import msgspec
from crc32c import crc32c

from upr_kernel import record_mark
from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.errors import ChunkError
from upr_protocol.ids import HistoryId, PartitionState, SeqNo
from upr_server.storage.errors import CorruptionError
from upr_server.storage.ordered_map import ReadTransaction

FORMAT_VERSION: Final = 1
"""The version of everything that this module describes. A data directory names it."""

BUCKET: Final = b"b"
CLEAN_STOP: Final = b"c"
FLOOR: Final = b"f"
PURGE: Final = b"g"
LEASE: Final = b"l"
PARTITION_MAP: Final = b"m"
PARTITION: Final = b"p"
CHUNK: Final = b"s"
TOKEN: Final = b"t"
EXPIRY: Final = b"e"
KEY: Final = b"k"
WATERMARK: Final = b"w"

_PARTITION: Final = Struct(">cH")
_NUMBER: Final = Struct(">cHQ")
_LEASE: Final = Struct(">cQ")
_EXPIRY: Final = Struct(">cIHQ")
_TOKEN: Final = Struct(">cH16sQ")
_CRC: Final = Struct("<I")
_ENTRY: Final = Struct("<qII")
_ENTRY_BODY: Final = Struct("<qI")

CHUNK_HEAD: Final = Struct("<IIQ")
"""CRC32C of the chunk, CRC32C of the key and the other fields, and 1 if a snapshot ends with the
chunk, otherwise 0. It has 16 bytes so that the chunk's columns stay aligned."""

EXPIRY_MAX: Final = (1 << 32) - 1
"""No item expires later: in the year 2106."""

PARTITIONS_END: Final = 1 << 16
SEQS_END: Final = (1 << 64) - 1

INDEXED_SEQ_MAX: Final = (1 << 63) - 1
"""The highest sequence number that an entry of the key index can have."""


def _unpacked_key(layout: Struct, key: bytes, kind: str) -> tuple[Any, ...]:
    if len(key) != layout.size:
        raise CorruptionError(f"the {kind} key {key.hex()} has a wrong length")
    return layout.unpack(key)


def partition_key(kind: bytes, partition: int) -> bytes:
    """The key of a kind of record of which each partition has one."""
    return _PARTITION.pack(kind, partition)


def chunk_key(partition: int, last_seq: int) -> bytes:
    """The key of the chunk that ends at `last_seq`. As the lower bound of a scan, it finds the
    first chunk that ends there or later."""
    return _NUMBER.pack(CHUNK, partition, last_seq)


def parse_chunk_key(key: bytes) -> tuple[int, int]:
    """Partition and last number.

    Raises:
        CorruptionError: The key has another length.
    """
    _, partition, last_seq = _unpacked_key(_NUMBER, key, "chunk")
    return partition, last_seq


def lease_key(lease_id: int) -> bytes:
    """The key of a lease."""
    return _LEASE.pack(LEASE, lease_id)


def parse_lease_key(key: bytes) -> int:
    """The lease's ID.

    Raises:
        CorruptionError: The key has another length.
    """
    _, lease_id = _unpacked_key(_LEASE, key, "lease")
    return int(lease_id)


def token_key(partition: int, writer: bytes, counter: int) -> bytes:
    """The key of an answer to a publisher."""
    return _TOKEN.pack(TOKEN, partition, writer, counter)


def parse_token_key(key: bytes) -> tuple[int, bytes, int]:
    """Partition, writer, counter.

    Raises:
        CorruptionError: The key has another length.
    """
    _, partition, writer, counter = _unpacked_key(_TOKEN, key, "token")
    return partition, writer, counter


def expiry_key(expiry: int, partition: int, seq: int) -> bytes:
    """The key under which an item that expires is found by its time."""
    return _EXPIRY.pack(EXPIRY, expiry, partition, seq)


def parse_expiry_key(key: bytes) -> tuple[int, int, int]:
    """Expiry time, partition, sequence number.

    Raises:
        CorruptionError: The key has another length.
    """
    _, expiry, partition, seq = _unpacked_key(_EXPIRY, key, "expiry")
    return expiry, partition, seq


def index_entry_key(partition: int, key: bytes) -> bytes:
    """The key of the index entry of an item's key."""
    return _PARTITION.pack(KEY, partition) + key


INDEX_ENTRY_KEY_PREFIX: Final = _PARTITION.size
"""How many bytes stand before the item's key in the key of its index entry."""


# Checksums.


def with_checksum(key: bytes, value: bytes) -> bytes:
    """`value` behind a checksum of `key` and `value`."""
    return _CRC.pack(crc32c(value, crc32c(key))) + value


def without_checksum(key: bytes, stored_value: Buffer) -> bytes:
    """The value that was stored under `key` behind a checksum.

    Raises:
        CorruptionError: The checksum is missing or does not match.
    """
    data = bytes(stored_value)
    if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != crc32c(data[4:], crc32c(key)):
        raise CorruptionError(f"checksum mismatch in record {key!r}")
    return data[4:]


def chunk_head(key: bytes, crc: int, *, ends_snapshot: bool = False) -> bytes:
    """The head of a chunk stored under `key`.

    Args:
        key: The key.
        crc: The chunk's CRC32C.
        ends_snapshot: Whether a snapshot ends with the chunk: the log up to there is a state that
            the partition was in. Compaction does not keep this mark.
    """
    return CHUNK_HEAD.pack(crc, _head_crc(key, crc, ends_snapshot), ends_snapshot)


def _head_crc(key: bytes, crc: int, mark: int) -> int:
    return crc32c(_CRC.pack(crc) + bytes([mark] if mark else []), crc32c(key))


def parse_chunk_head(key: bytes, value: Buffer) -> tuple[int, bool]:
    """The CRC32C of the chunk stored under `key`, and whether a snapshot ends with it.

    Raises:
        CorruptionError: The head is damaged.
    """
    try:
        crc, head_crc, mark = CHUNK_HEAD.unpack_from(value)
    except StructError as error:
        raise CorruptionError(f"the head of chunk {key.hex()} is cut short: {error}") from error
    if mark > 1 or head_crc != _head_crc(key, crc, mark):
        raise CorruptionError(f"checksum mismatch in the head of chunk {key.hex()}")
    return crc, bool(mark)


def parse_chunk(key: bytes, value: Buffer) -> Chunk:
    """The chunk stored under `key`, checked against both of its checksums. Copies nothing.

    Raises:
        CorruptionError: The chunk is damaged, or was stored under another key.
    """
    crc, _ = parse_chunk_head(key, value)
    try:
        chunk = Chunk(memoryview(value)[CHUNK_HEAD.size :])
        if chunk.crc != crc:
            raise CorruptionError(f"checksum mismatch in {chunk!r}")
    except ChunkError as error:
        raise CorruptionError(f"the chunk {key.hex()} cannot be parsed: {error}") from error
    if chunk.end != parse_chunk_key(key)[1]:
        raise CorruptionError(f"{chunk!r} is stored under the key {key.hex()} of another chunk")
    return chunk


def mark_before_damage(key: bytes, value: Buffer) -> int:
    """The mark of a damaged record as it was before one byte of its front was changed; its mark as
    it is, if no change of one byte there makes its checksum match. Tries 4,096 changes: 1 ms."""
    data = bytearray(value)
    for position in range(min(CHUNK_HEAD.size, len(data))):
        damaged_byte = data[position]
        for byte in range(256):
            data[position] = byte
            mark = record_mark(key, data, True)
            if mark >= 0:
                return mark
        data[position] = damaged_byte
    return record_mark(key, value, False)


# Records.


class BucketRecord(msgspec.Struct, frozen=True):
    """A bucket's name and settings.

    Attributes:
        name: The bucket's name.
        partition_count: How many partitions it has.
        quota_bytes: The memory that it may take.
        version: The format's version.
        incarnation: A random number that tells apart buckets of one name that were created one
            after the other. 0 in records older than the field; older servers ignore it.
    """

    name: str
    partition_count: int
    quota_bytes: int
    version: int = FORMAT_VERSION
    incarnation: int = 0


class PartialRecord(msgspec.Struct, frozen=True):
    """The snapshot of which the log has the front: a replica has received it in part, or another
    partition's goes to disk in several commits.

    Attributes:
        history_id: The history that the snapshot belongs to.
        start: Where it begins, exclusive.
        end: Where it ends.
        received_seq: The log holds everything up to here; `received` on disk.
    """

    history_id: HistoryId
    start: SeqNo
    end: SeqNo
    received_seq: SeqNo = msgspec.field(name="received")


class PartitionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A partition's state, which changes in one commit with its chunks.

    Attributes:
        state: The partition's state on this node.
        failover_log: (history ID, sequence number) pairs, newest first.
        high: The persisted snapshot end: the log holds everything up to here.
        last_cas: No CAS up to here is assigned again.
        partial: What the log holds of the snapshot behind `high`; None if nothing.
        is_incomplete: Whether the copy may lack changes that this node once had, and acknowledged:
            it copies the partition again, and has not reached yet what the active node had.
            Missing in older records, and where it is not so; older servers ignore it.
    """

    state: PartitionState
    failover_log: tuple[tuple[int, int], ...]
    high: SeqNo
    last_cas: int
    partial: PartialRecord | None = None
    is_incomplete: bool = False

    @property
    def received_seq(self) -> SeqNo:
        """The log holds everything up to here."""
        return self.high if self.partial is None else self.partial.received_seq


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease, as it survives a restart.

    Attributes:
        lease_id: The lease's ID.
        owner: The name of the client that holds it.
        ranges: (partition, start, end), start exclusive. Empty if others needed its place after it
            had lapsed: then it is not whole, and only its ID is remembered.
        time_to_live_s: How long it lives without renewal.
        expires_at: When it lapses without renewal, in seconds since 1970. A lapsed lease protects
            nothing from compaction, but while it is whole its owner can renew it.
        is_whole: Whether compaction has dropped nothing in its ranges since it was granted.
        is_position: Whether it was asked for with empty ranges, to say where its owner stands.
            Missing in older records.
    """

    lease_id: int
    owner: str
    ranges: tuple[tuple[int, int, int], ...]
    time_to_live_s: int
    expires_at: float
    is_whole: bool = True
    is_position: bool = False


class Watermark(msgspec.Struct, frozen=True):
    """How far the index has followed the log of one partition.

    Attributes:
        seq: The index has the newest mutation of every key up to here.
        item_count: How many keys exist at `seq`; `items` on disk.
        garbage_bytes: About how many bytes of the log up to here are superseded mutations.
        damaged_through: The last number of the log that could not be read when the index passed it;
            0 for none. An entry that is not above it may have been superseded by a lost mutation.
            Missing in older records.
    """

    seq: SeqNo = SeqNo(0)
    item_count: int = msgspec.field(default=0, name="items")
    garbage_bytes: int = 0
    damaged_through: SeqNo = SeqNo(0)


class KeyIndexEntry(msgspec.Struct, frozen=True):
    """The newest mutation of a key.

    Attributes:
        seq: Its sequence number.
        expiry: When the item expires, 0 for never.
        is_tombstone: Whether it is a deletion.
    """

    seq: int
    expiry: int
    is_tombstone: bool = False

    def pack(self, key: bytes) -> bytes:
        """The value stored under `key`."""
        body = _ENTRY_BODY.pack(-self.seq if self.is_tombstone else self.seq, self.expiry)
        return body + _CRC.pack(crc32c(key + body))

    @classmethod
    def parse(cls, key: bytes, value: Buffer) -> KeyIndexEntry:
        """The reverse of `pack`.

        Raises:
            CorruptionError: The value is damaged.
        """
        if len(value) != _ENTRY.size:
            raise CorruptionError(
                f"the index entry {key!r} has {len(value)} bytes, and should have {_ENTRY.size}"
            )
        signed_seq, expiry, crc = _ENTRY.unpack(value)
        if crc != crc32c(key + bytes(value[:12])):
            raise CorruptionError(f"checksum mismatch in index entry {key!r}")
        return cls(abs(signed_seq), expiry, signed_seq < 0)


def parse_seqs(entries: Iterable[tuple[bytes, Buffer]]) -> list[int]:
    """The sequence number of each of these index entries, which are keys and values.

    It does what `KeyIndexEntry.parse` does, for half the time: compaction looks at every key.

    Raises:
        CorruptionError: A value is damaged.
    """
    seqs: list[int] = []
    for key, value in entries:
        if len(value) == _ENTRY.size:
            signed_seq, _, crc = _ENTRY.unpack(value)
            if crc == crc32c(key + value[: _ENTRY_BODY.size]):
                seqs.append(abs(signed_seq))
                continue
        seqs.append(KeyIndexEntry.parse(key, value).seq)
    return seqs


def parse_index_entry(value: Buffer) -> tuple[int, int]:
    """The signed sequence number and the expiry of an index entry that was just made."""
    signed_seq, expiry, _ = _ENTRY.unpack(value)
    return signed_seq, expiry


Record = TypeVar("Record")


def pack_record(key: bytes, record: object) -> bytes:
    """A record as it is stored under `key`."""
    return with_checksum(key, msgspec.msgpack.encode(record))


def parse_record(key: bytes, value: Buffer, kind: type[Record]) -> Record:
    """The reverse of `pack_record`.

    Raises:
        CorruptionError: The record is damaged.
    """
    try:
        return msgspec.msgpack.decode(without_checksum(key, value), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"the record {key!r} cannot be decoded: {error}") from error


def read_seq(transaction: ReadTransaction, key: bytes) -> SeqNo:
    """The sequence number stored under `key`; 0 when there is nothing.

    Raises:
        CorruptionError: The record is damaged.
    """
    stored_value = transaction.get(key)
    return SeqNo(0) if stored_value is None else parse_record(key, stored_value, SeqNo)
