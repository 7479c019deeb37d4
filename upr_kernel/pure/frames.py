"""Headers of frames; frames that publish one plain `SET` each, joined to one chunk; and the answers
to bundles."""

from __future__ import annotations

from array import array
from itertools import accumulate
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from upr_kernel.defects import ChunkDefectError
from upr_kernel.flags import HAS_PREFIX, MAY_EXPIRE, UNCONDITIONAL
from upr_kernel.pure.columns import HEAD, HEAD_BYTES, Columns, padded
from upr_kernel.pure.partition import partition_of

JoinedSets = tuple[bytes, int, bytes, bytes, bytes, bytes]
"""A chunk, what `check` says of it, and of each frame the run, the writer, the opaque and where it
ends."""

# `upr_protocol.wire` describes these layouts: the header; the fields of `Mutate`; its only run; and
# what stands before and behind the lines of a `MutateReply` without failures and counters.
_HEADER: Final = Struct("<HBBHHIIII")
_MUTATE: Final = Struct("<16sQBBHI")
_RUN: Final = Struct("<IIQI4x")
_REPLY_HEAD: Final = Struct("<QQ")
_REPLY_TAIL: Final = bytes(16)
_LINE_BYTES: Final = 40
_CHECKED_BYTES: Final = 20
_CHUNK_AT: Final = _HEADER.size + _MUTATE.size + _RUN.size

_MAGIC: Final = 0x5055
_VERSION: Final = 1
_FIELDS_MAX: Final = (0xFF, 0xFFFF, 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF, 0xFFFF_FFFF)

_MUTATE_BEGIN: Final = (0x5055, 1, 0x11, 0)
"""Magic, version, opcode and status of the header."""

_PLAIN: Final = (0, 0, 0, 0, 1)
"""No attempt, level 0, no copies, padding, and one run."""

_REPLY_BEGIN: Final = (0x5055, 1, 0x91, 0, 0xFFFF)
"""The same of an answer, with no partition."""

_SET: Final = 1
_WORDS: Final = Struct("<II")


def pack_header(
    opcode: int, status: int, partition: int, opaque: int, length: int, body_crc: int, /
) -> bytes:
    """The 24 bytes of a frame's header.

    Raises:
        OverflowError: A field is out of range.
    """
    fields = opcode, status, partition, opaque, length, body_crc
    if any(
        not 0 <= field <= field_max for field, field_max in zip(fields, _FIELDS_MAX, strict=True)
    ):
        raise OverflowError("a field of a header is out of range")
    checked = _HEADER.pack(_MAGIC, _VERSION, *fields, 0)[:_CHECKED_BYTES]
    return checked + crc32c(checked).to_bytes(4, "little")


def read_header(data: bytes, offset: int, /) -> tuple[int, int, int, int, int, int] | None:
    """The opcode, status, partition, opaque, length and body's CRC of a frame's header.

    Args:
        data: What was received.
        offset: Where the header begins.

    Returns:
        The fields; None for a header that is not sound: another magic or version, a wrong checksum,
        or a length that is not padded.

    Raises:
        ValueError: The header is not whole.
    """
    if not 0 <= offset <= len(data) - _HEADER.size:
        raise ValueError("the header is not whole")
    magic, version, *fields, header_crc = _HEADER.unpack_from(data, offset)
    opcode, status, partition, opaque, length, body_crc = fields
    if (
        (magic, version) != (_MAGIC, _VERSION)
        or length % 8
        or crc32c(data[offset : offset + _CHECKED_BYTES]) != header_crc
    ):
        return None
    return opcode, status, partition, opaque, length, body_crc


class _Set(NamedTuple):
    end: int
    opaque: int
    writer: bytes
    run: bytes
    key: bytes
    value: bytes
    expiry: int
    flags: int


def join_sets(
    data: bytes,
    offset: int,
    frames_max: int,
    partition_count: int,
    key_bytes_max: int,
    value_bytes_max: int,
    prefix: bytes,
    /,
) -> JoinedSets | None:
    """Joins frames that each publish one plain `SET` to one chunk. O(bytes).

    It takes whole and sound `Mutate` frames with one run of one row: a `SET` without an expected
    CAS, of a key and a value of right lengths, for the partition of the key, to be answered from
    memory, without an attempt or a chain. It stops before the first frame that is anything else.

    Args:
        data: What was received.
        offset: Where the first frame begins.
        frames_max: How many frames to join at most.
        partition_count: How many partitions the bucket has.
        key_bytes_max: The length of the longest key.
        value_bytes_max: The length of the longest value.
        prefix: What `HAS_PREFIX` asks for.

    Returns:
        The chunk, a row for each frame; the flags that `check` gives for it; the frames' runs as in
        the directory of a bundle; their writers, or one where all have the same; their opaques and
        their ends, of 4 bytes each. None where the first frame does not fit.

    Raises:
        ValueError: The offset is behind the end, or there is no partition.
    """
    if not 0 <= offset <= len(data) or partition_count < 1:
        raise ValueError("offset, partitions or bytes out of range")
    sets: list[_Set] = []
    while len(sets) < frames_max:
        entry = _read(data, offset, partition_count, key_bytes_max, value_bytes_max)
        if entry is None:
            break
        sets.append(entry)
        offset = entry.end
    if not sets:
        return None
    writers = [entry.writer for entry in sets]
    return (
        _joined(sets),
        _flags_of(sets, prefix),
        b"".join(entry.run for entry in sets),
        b"".join(writers) if len(set(writers)) > 1 else writers[0],
        array("I", [entry.opaque for entry in sets]).tobytes(),
        array("I", [entry.end for entry in sets]).tobytes(),
    )


def _read(
    data: bytes, offset: int, partition_count: int, key_bytes_max: int, value_bytes_max: int
) -> _Set | None:
    if len(data) - offset < _CHUNK_AT + HEAD_BYTES:
        return None
    *begin, _, opaque, length, body_crc, header_crc = _HEADER.unpack_from(data, offset)
    body_at, end = offset + _HEADER.size, offset + _HEADER.size + length
    if tuple(begin) != _MUTATE_BEGIN or end > len(data) or length % 8:
        return None
    writer, *fields = _MUTATE.unpack_from(data, body_at)
    run_at = body_at + _MUTATE.size
    partition, row_count, _, chain = _RUN.unpack_from(data, run_at)
    if tuple(fields) != _PLAIN or row_count != 1 or chain:
        return None
    try:
        columns = Columns(memoryview(data)[offset + _CHUNK_AT : end])
    except ChunkDefectError:
        return None
    entry = _row_of(columns, end, opaque, writer, data[run_at : run_at + _RUN.size])
    if entry is None or not (
        0 < len(entry.key) <= key_bytes_max and len(entry.value) <= value_bytes_max
    ):
        return None
    is_sound = (
        crc32c(data[offset : offset + _CHECKED_BYTES]) == header_crc
        and crc32c(data[body_at:end]) == body_crc
        and partition_of(entry.key, partition_count) == partition
    )
    return entry if is_sound else None


def _row_of(columns: Columns, end: int, opaque: int, writer: bytes, run: bytes) -> _Set | None:
    """A frame with the only row of a chunk; None where it is no plain `SET`."""
    view = columns.view
    count, key_length, value_length, *more_fields = HEAD.unpack_from(view)
    if count != 1 or any(more_fields) or any(view[columns.seqs_at : columns.expiries_at]):
        return None
    if (
        view[columns.operations_at] != _SET
        or _WORDS.unpack_from(view, columns.key_offsets_at) != (0, key_length)
        or _WORDS.unpack_from(view, columns.value_offsets_at) != (0, value_length)
    ):
        return None
    return _Set(
        end,
        opaque,
        writer,
        run,
        bytes(view[columns.keys_at : columns.keys_at + key_length]),
        bytes(view[columns.values_at : columns.values_at + value_length]),
        int.from_bytes(view[columns.expiries_at : columns.expiries_at + 4], "little"),
        int.from_bytes(view[columns.flags_at : columns.flags_at + 4], "little"),
    )


def _flags_of(sets: list[_Set], prefix: bytes) -> int:
    flags = UNCONDITIONAL
    if any(entry.expiry for entry in sets):
        flags |= MAY_EXPIRE
    if any(entry.key.startswith(prefix) for entry in sets):
        flags |= HAS_PREFIX
    return flags


def _joined(sets: list[_Set]) -> bytes:
    count = len(sets)
    keys = b"".join(entry.key for entry in sets)
    values = b"".join(entry.value for entry in sets)
    columns = (
        HEAD.pack(count, len(keys), len(values), 0, 0, 0),
        bytes(16 * count),
        array("I", [entry.expiry for entry in sets]).tobytes(),
        array("I", [entry.flags for entry in sets]).tobytes(),
        array("i", accumulate((len(entry.key) for entry in sets), initial=0)).tobytes(),
        array("i", accumulate((len(entry.value) for entry in sets), initial=0)).tobytes(),
        bytes((_SET,)) * count,
        keys,
        values,
    )
    return b"".join(column.ljust(padded(len(column)), b"\0") for column in columns)


def encode_replies(opaques: bytes, lines: bytes, /) -> bytes:
    """The `MutateReply` frames that answer these requests, one behind the other: nothing failed,
    nothing was counted, and no run was refused. O(bytes).

    Args:
        opaques: The requests' opaques, of 4 bytes each; at least one.
        lines: What became of the runs of each request. All requests have as many runs.

    Raises:
        ValueError: There is no request, or they cannot have as many runs.
    """
    reply_count, remainder = divmod(len(opaques), 4)
    if not reply_count or remainder or len(lines) % (_LINE_BYTES * reply_count):
        raise ValueError("each reply has as many lines as the others")
    step = len(lines) // reply_count
    pieces: list[bytes] = []
    for index, opaque in enumerate(memoryview(opaques).cast("I")):
        head = _REPLY_HEAD.pack(0, step // _LINE_BYTES)
        body = head + lines[index * step : (index + 1) * step] + _REPLY_TAIL
        fields = (*_REPLY_BEGIN, opaque, len(body), crc32c(body))
        checksum = crc32c(_HEADER.pack(*fields, 0)[:_CHECKED_BYTES])
        pieces += _HEADER.pack(*fields, checksum), body
    return b"".join(pieces)
