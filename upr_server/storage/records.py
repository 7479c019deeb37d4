"""What stands in a store: keys, values, and the checksum that each of them carries.

A bucket has two ordered maps. The **log** holds chunks by partition and number, and beside them
whatever must change together with them; the **index** is derived from the log and can be made anew.
Integers in keys are big-endian, so that the order of the bytes is the order of the numbers.

=====  ===========================  ==========================================================
map    key                          value
=====  ===========================  ==========================================================
both   a zero byte                  the number of the last commit (`lmdb_store` writes it)
log    ``b``                        a `BucketRecord`: name, settings
log    ``c``                        there after a clean stop only
log    ``f`` partition              a compaction has dropped what was superseded up to this number:
                                    below it nothing is a state that the partition was in
log    ``g`` partition              the purge number
log    ``l`` lease                  a `LeaseRecord`
log    ``m``                        the partition map, as JSON; missing while there is none
log    ``p`` partition              a `PartitionRecord`: state, failover log, numbers
log    ``s`` partition, last number a chunk as it is sent, behind its `CHUNK_HEAD`
log    ``t`` partition, writer, n   what a publisher was answered
index  ``e`` expiry, partition, n   the key of an item that expires then
index  ``k`` partition, key         an `IndexEntry`: the number of the key's newest mutation
index  ``w`` partition              a `Watermark`: up to which number the index knows the log
=====  ===========================  ==========================================================

The store itself (LMDB) has no checksums, so every value has one of ours, and it covers the key: a
record that is read from the wrong place is as wrong as one with a flipped bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from struct import error as StructError
from typing import Final, TypeVar

import msgspec
from crc32c import crc32c

from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.errors import ChunkError
from upr_protocol.ids import HistoryId, PartitionState, SeqNo
from upr_server.storage.errors import CorruptionError
from upr_server.storage.ordered_map import ReadTransaction

FORMAT_VERSION: Final = 1
"""The version of everything that this module describes."""

BUCKET: Final = b"b"
CLEAN: Final = b"c"
FLOOR: Final = b"f"
PURGE: Final = b"g"
LEASE: Final = b"l"
MAP: Final = b"m"
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

CHUNK_HEAD: Final = Struct("<IIQ")
"""CRC32C of the chunk, CRC32C of the key and the other fields, and 1 where a snapshot ends with the
chunk, or 0: 16 bytes, so that the chunk's columns stay aligned."""

PARTITIONS_END: Final = 1 << 16
NUMBERS_END: Final = (1 << 64) - 1


def partition_key(kind: bytes, partition: int) -> bytes:
    """The key of what there is one of in a partition."""
    return _PARTITION.pack(kind, partition)


def chunk_key(partition: int, last: int) -> bytes:
    """The key of the chunk that ends at `last`; as a lower bound, of the first that ends there or
    later."""
    return _NUMBER.pack(CHUNK, partition, last)


def parse_chunk_key(key: bytes) -> tuple[int, int]:
    """Partition and last number.

    Raises:
        CorruptionError: It is no such key.
    """
    if len(key) != _NUMBER.size:
        raise CorruptionError(f"no chunk stands under {key.hex()}")
    _, partition, last = _NUMBER.unpack(key)
    return partition, last


def lease_key(lease_id: int) -> bytes:
    """The key of a lease."""
    return _LEASE.pack(LEASE, lease_id)


def token_key(partition: int, writer: bytes, counter: int) -> bytes:
    """The key of an answer to a publisher."""
    return _TOKEN.pack(TOKEN, partition, writer, counter)


def parse_token_key(key: bytes) -> tuple[int, bytes, int]:
    """Partition, writer, counter.

    Raises:
        CorruptionError: It is no such key.
    """
    if len(key) != _TOKEN.size:
        raise CorruptionError(f"no answer to a publisher stands under {key.hex()}")
    _, partition, writer, counter = _TOKEN.unpack(key)
    return partition, writer, counter


def expiry_key(expiry: int, partition: int, number: int) -> bytes:
    """The key of an item that expires, by the time at which it does."""
    return _EXPIRY.pack(EXPIRY, expiry, partition, number)


def parse_expiry_key(key: bytes) -> tuple[int, int, int]:
    """Expiry time, partition, number.

    Raises:
        CorruptionError: It is no such key.
    """
    if len(key) != _EXPIRY.size:
        raise CorruptionError(f"nothing expires under {key.hex()}")
    _, expiry, partition, number = _EXPIRY.unpack(key)
    return expiry, partition, number


def index_key(partition: int, key: bytes) -> bytes:
    """The key of a key's newest number."""
    return _PARTITION.pack(KEY, partition) + key


INDEX_KEY_PREFIX: Final = _PARTITION.size


# Checksums.


def seal(key: bytes, value: bytes) -> bytes:
    """`value` behind a checksum of `key` and `value`."""
    return _CRC.pack(crc32c(value, crc32c(key))) + value


def unseal(key: bytes, sealed: Buffer) -> bytes:
    """The value that was sealed under `key`.

    Raises:
        CorruptionError: It is not what was sealed, or not there.
    """
    data = bytes(sealed)
    if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != crc32c(data[4:], crc32c(key)):
        raise CorruptionError(f"the record {key!r} does not have its checksum")
    return data[4:]


def chunk_head(key: bytes, crc: int, *, ends_snapshot: bool = False) -> bytes:
    """What stands before a chunk stored under `key`.

    Args:
        key: The key.
        crc: The chunk's CRC32C.
        ends_snapshot: Whether a snapshot ends with it: what the log holds up to there is a state
            that the partition was in. A compaction forgets it.
    """
    return CHUNK_HEAD.pack(crc, _head_crc(key, crc, ends_snapshot), ends_snapshot)


def _head_crc(key: bytes, crc: int, mark: int) -> int:
    return crc32c(_CRC.pack(crc) + bytes([mark] if mark else []), crc32c(key))


def parse_chunk_head(key: bytes, value: Buffer) -> tuple[int, bool]:
    """The CRC32C of the chunk stored under `key`, and whether a snapshot ends with it.

    Raises:
        CorruptionError: It is not what was stored there.
    """
    try:
        crc, head_crc, mark = CHUNK_HEAD.unpack_from(value)
    except StructError as error:
        raise CorruptionError(f"no chunk under {key.hex()}: {error}") from error
    if mark > 1 or head_crc != _head_crc(key, crc, mark):
        raise CorruptionError(f"the head of chunk {key.hex()} does not have its checksum")
    return crc, bool(mark)


def parse_chunk(key: bytes, value: Buffer) -> Chunk:
    """The chunk stored under `key`, checked against both of its checksums. Copies nothing.

    Raises:
        CorruptionError: It is not what was stored there.
    """
    crc, _ = parse_chunk_head(key, value)
    try:
        chunk = Chunk(memoryview(value)[CHUNK_HEAD.size :])
        if chunk.crc != crc:
            raise CorruptionError(f"{chunk!r} in the log does not have its checksum")
    except ChunkError as error:
        raise CorruptionError(f"no chunk under {key.hex()}: {error}") from error
    if chunk.end != parse_chunk_key(key)[1]:
        raise CorruptionError(f"{chunk!r} stands under the key {key.hex()}")
    return chunk


# Records.


class BucketRecord(msgspec.Struct, frozen=True):
    """What a bucket is.

    Attributes:
        name: Its name.
        partition_count: How many partitions it has.
        quota_bytes: The memory it may take.
        version: The format's version.
        incarnation: Which bucket of this name it is: a random number. 0 in records that are older
            than the field; who does not know it passes over it.
    """

    name: str
    partition_count: int
    quota_bytes: int
    version: int = FORMAT_VERSION
    incarnation: int = 0


class PartialRecord(msgspec.Struct, frozen=True):
    """The snapshot of which a replica has the front only.

    Attributes:
        history_id: The history that it is of.
        start: Where it begins, exclusive.
        end: Where it ends.
        received: The log holds everything up to here.
    """

    history_id: HistoryId
    start: SeqNo
    end: SeqNo
    received: SeqNo


class PartitionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a partition beside its chunks; changes in one commit with them.

    Attributes:
        state: What this node is for it.
        failover_log: (history ID, number) pairs, newest first.
        high: The persisted snapshot end: the log holds everything up to here.
        last_cas: No CAS up to here is given again.
        partial: What the log holds of the snapshot behind that; None for nothing.
    """

    state: PartitionState
    failover_log: tuple[tuple[int, int], ...]
    high: SeqNo
    last_cas: int
    partial: PartialRecord | None = None

    @property
    def received(self) -> SeqNo:
        """The log holds everything up to here."""
        return self.high if self.partial is None else self.partial.received


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease, as it survives a restart.

    Attributes:
        lease_id: Its number.
        owner: Who holds it.
        ranges: (partition, start, end), start exclusive.
        time_to_live_s: How long it lives without renewal.
        expires_at: When that will be, in seconds since 1970. Then it holds nothing back any more,
            but is good again when it is renewed, as long as it is whole.
        is_whole: Whether nothing in its ranges was dropped since it was granted.
    """

    lease_id: int
    owner: str
    ranges: tuple[tuple[int, int, int], ...]
    time_to_live_s: int
    expires_at: float
    is_whole: bool = True


class Watermark(msgspec.Struct, frozen=True):
    """How far the index has come in one partition.

    Attributes:
        seq: It knows the newest mutation up to here of every key.
        items: Keys that exist, as of there.
        garbage_bytes: What mutations up to here take in the log that others superseded, about.
    """

    seq: SeqNo = SeqNo(0)
    items: int = 0
    garbage_bytes: int = 0


class IndexEntry(msgspec.Struct, frozen=True):
    """What the index knows of a key.

    Attributes:
        number: The number of its newest mutation, negative for a tombstone.
        expiry: When the item expires, 0 for never.
    """

    number: int
    expiry: int

    def pack(self, key: bytes) -> bytes:
        """The value that stands under `key`."""
        return bytes(pack_entries([key], [(self.number, self.expiry)])[0][1])

    @classmethod
    def parse(cls, key: bytes, value: Buffer) -> IndexEntry:
        """The reverse of `pack`; raises `CorruptionError`."""
        if len(value) != _ENTRY.size:
            raise CorruptionError(f"the index entry {key!r} has {len(value)} bytes")
        number, expiry, crc = _ENTRY.unpack(value)
        if crc != crc32c(key + bytes(value[:12])):
            raise CorruptionError(f"the index entry {key!r} does not have its checksum")
        return cls(number, expiry)


_UNSIGNED: Final = Struct("<qI")


def pack_entries(
    keys: Iterable[bytes], entries: Iterable[tuple[int, int]]
) -> list[tuple[bytes, Buffer]]:
    """Entries (number, expiry) as they stand under `keys`; the index writes millions of them."""
    pack, pack_crc = _UNSIGNED.pack, _CRC.pack
    packed: list[tuple[bytes, Buffer]] = []
    for key, (number, expiry) in zip(keys, entries, strict=True):
        body = pack(number, expiry)
        packed.append((key, body + pack_crc(crc32c(key + body))))
    return packed


Record = TypeVar("Record")


def pack_record(key: bytes, record: object) -> bytes:
    """A record as it stands under `key`."""
    return seal(key, msgspec.msgpack.encode(record))


def parse_record(key: bytes, value: Buffer, kind: type[Record]) -> Record:
    """The reverse of `pack_record`.

    Raises:
        CorruptionError: It is not what was written.
    """
    try:
        return msgspec.msgpack.decode(unseal(key, value), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"the record {key!r} cannot be read: {error}") from error


def number_in(transaction: ReadTransaction, key: bytes) -> SeqNo:
    """The number that stands under `key`; 0 when there is none.

    Raises:
        CorruptionError: It is not what was stored there.
    """
    sealed = transaction.get(key)
    return SeqNo(0) if sealed is None else parse_record(key, sealed, SeqNo)
