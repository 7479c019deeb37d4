"""The chunk: as it is sent, and as it is stored; and the records that are stored beside it."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

from crc32c import crc32c

from tests.fuzz.frames import MENDED
from tests.fuzz.mending import mended_chunk
from upr_protocol.chunk import Chunk, ChunkBuilder, Mutation
from upr_protocol.errors import ChunkError, RemoteProtocolError
from upr_protocol.ids import PUBLISHED_OPERATIONS, STORED_OPERATIONS, Cas, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from upr_protocol.partition_map import PartitionMap, PartitionMapError
from upr_server.replication.received_answers import checked_answers
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.records import (
    CHUNK,
    CHUNK_HEAD,
    BucketRecord,
    KeyIndexEntry,
    LeaseRecord,
    PartitionRecord,
    Watermark,
    chunk_head,
    parse_chunk,
    parse_chunk_key,
    parse_expiry_key,
    parse_record,
    parse_token_key,
    with_checksum,
)
from upr_server.storage.simulated_disk import SimulatedDisk


def chunk(data: bytes) -> None:
    """A chunk as it is sent: a first byte, whether the lengths are put right, then the chunk.

    What passes the checks is what the slow and simple form of them lets pass, and then everything
    works that is done with chunks.
    """
    first, data = data[0] if data else 0, data[1:]
    try:
        chunk = Chunk(mended_chunk(data) if first & MENDED else data)
    except ChunkError:
        return
    assert _passes_as_published(chunk) == _is_published(chunk)
    passes = _passes_as_stored(chunk)
    assert passes == _is_stored(chunk)
    if passes:
        _use(chunk)


def _passes_as_published(chunk: Chunk) -> bool:
    try:
        keys = chunk.check_published()
    except ChunkError:
        return False
    assert keys == [row.key for row in chunk]
    return True


def _passes_as_stored(chunk: Chunk) -> bool:
    try:
        chunk.check()
    except ChunkError:
        return False
    return True


def _spans(offsets: list[int], length: int, lengths: range) -> bool:
    return (
        offsets[0] == 0
        and offsets[-1] == length
        and all(end - start in lengths for start, end in pairwise(offsets))
    )


def _is_sound(chunk: Chunk, operations: bytes) -> bool:
    return (
        _spans(chunk.key_offsets.tolist(), chunk.key_length, range(1, KEY_BYTES_MAX + 1))
        and _spans(chunk.value_offsets.tolist(), chunk.value_length, range(VALUE_BYTES_MAX + 1))
        and all(operation in operations for operation in chunk.operations)
    )


def _is_published(chunk: Chunk) -> bool:
    return (
        _is_sound(chunk, PUBLISHED_OPERATIONS)
        and not any(chunk.seqs)
        and not (chunk.start or chunk.end)
    )


def _is_stored(chunk: Chunk) -> bool:
    numbers = [chunk.start, *chunk.seqs]
    return (
        _is_sound(chunk, STORED_OPERATIONS)
        and all(a < b for a, b in pairwise(numbers))
        and numbers[-1] <= chunk.end
    )


def _use(chunk: Chunk) -> None:
    """Does all that is done with a stored chunk, and compares with a list of rows."""
    rows = list(chunk)
    start, end = chunk.start, chunk.end
    assert [chunk.mutation(index) for index in range(len(rows))] == rows
    assert list(Chunk.build(rows, start, end)) == rows
    builder = ChunkBuilder()
    builder.extend(chunk)
    builder.extend(chunk, bytes(index % 3 == 0 for index in range(len(rows))))
    assert list(builder.build()) == rows + rows[::3]
    middle = SeqNo((start + end) // 2)
    older, newer = chunk.slice(start, middle), chunk.slice(middle, end)
    assert list(older) == [row for row in rows if row.seq <= middle]
    assert list(newer) == [row for row in rows if row.seq > middle]
    numbered = chunk.numbered(SeqNo(1), Cas(1), SeqNo(0), SeqNo(len(rows)))
    assert numbered.keys() == chunk.keys()
    assert numbered.values() == chunk.values()
    numbered.check()


def stored(data: bytes) -> None:
    """A chunk as it is stored: a first byte, whether both checksums are put right, then its
    partition and last number, as in its key, then the value."""
    first, key, value = data[0] if data else 0, CHUNK + data[1:11], data[11:]
    if first & MENDED:
        inside = mended_chunk(value[CHUNK_HEAD.size :])
        head = chunk_head(key, crc32c(inside), ends_snapshot=bool(value[8:9] > b"\x7f"))
        value = head + inside
    try:
        chunk = parse_chunk(key, value)
    except CorruptionError:
        return
    assert chunk.crc == crc32c(value[CHUNK_HEAD.size :])
    if _passes_as_stored(chunk):
        _read(key, value, list(chunk), chunk.start, chunk.end)


def _read(key: bytes, value: bytes, rows: list[Mutation], start: SeqNo, end: SeqNo) -> None:
    """Reads the chunk out of a log that has nothing else."""
    disk = SimulatedDisk()
    with disk.write() as writer:
        writer.put(key, value)
    log, partition = ChunkLog(disk), parse_chunk_key(key)[0]
    middle = SeqNo((start + end) // 2)
    assert log.chunk_bytes() == {partition: len(value)}
    if start < end:
        (whole,) = log.read_chunks(partition, middle, end, bytes_max=1)
        assert list(whole) == [row for row in rows if row.seq > middle]
        most = len(value) // 2
        (front,) = log.read_chunks(partition, start, end, bytes_max=most, in_pieces=True)
        assert list(front) == [row for row in rows if row.seq <= front.end]
        assert len(front) <= 1 or front.nbytes <= most
    numbers = [row.seq for row in rows][::-1]
    assert log.find_mutations(partition, numbers, 1 << 40) == rows[::-1]


def record(data: bytes) -> None:
    """A record: a first byte, whether its checksum is put right, then its key's 3 bytes, then it.
    It may also be a partition map, or an answer to a publisher: these come from peers, too."""
    first, key, value = data[0] if data else 0, data[1:4], data[4:]
    if first & MENDED:
        value = with_checksum(key, value)
    for kind in (BucketRecord, PartitionRecord, LeaseRecord, Watermark, SeqNo, str):
        with suppress(CorruptionError):
            parse_record(key, value, kind)
    with suppress(CorruptionError):
        KeyIndexEntry.parse(key, value)
    with suppress(PartitionMapError):
        PartitionMap.decode(value[4:])
    with suppress(RemoteProtocolError):
        checked_answers([(bytes(16), 1, 2, value[4:])])
    for parse in (parse_chunk_key, parse_token_key, parse_expiry_key):
        with suppress(CorruptionError):
            parse(data)
