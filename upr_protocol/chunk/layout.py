"""Where the bytes of a chunk lie: the head, the padding, and offsets of strings of one length."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from struct import Struct
from typing import Final

from upr_protocol.ids import SeqNo

Buffer = bytes | bytearray | memoryview

if sys.byteorder != "little":
    raise ImportError("chunks are read in place, which needs a little-endian processor")

CHUNK_HEAD: Final = Struct("<IIIIQQ")
"""Count, key bytes, value bytes, reserved, start, end."""

CHUNK_HEAD_BYTES: Final = CHUNK_HEAD.size

EVEN_MAX: Final = 4096
"""Keys or values of one length are recognised, and cut in one call, up to so many and so long."""

LARGE_BYTES: Final = 2 * 1024 * 1024
"""What is larger is not copied where that can be avoided: new memory of 2 MiB takes 1.3 ms."""

_PADDING: Final = tuple(bytes(length) for length in range(8))


def padded(length: int) -> int:
    """The next multiple of 8."""
    return (length + 7) & ~7


def encoded_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """The encoded length of a chunk of `count` mutations with so many bytes of keys and values."""
    return (
        CHUNK_HEAD_BYTES
        + 16 * count
        + 2 * padded(4 * count)
        + 2 * padded(4 * count + 4)
        + padded(count)
        + padded(key_bytes)
        + padded(value_bytes)
    )


def covered_range(seqs: array[int], start: SeqNo | None, end: SeqNo | None) -> tuple[SeqNo, SeqNo]:
    """`start` and `end`, where given; otherwise from just below the first number to the last.
    Without numbers that is (0, 0]."""
    if start is None:
        start = SeqNo(max(seqs[0] - 1, 0) if seqs else 0)
    if end is None:
        end = SeqNo(seqs[-1] if seqs else start)
    return start, end


def encode_columns(
    start: SeqNo,
    end: SeqNo,
    seqs: array[int] | Buffer,
    cas: array[int] | Buffer,
    expiries: array[int] | Buffer,
    flags: array[int] | Buffer,
    key_offsets: array[int] | Buffer,
    value_offsets: array[int] | Buffer,
    operations: Buffer,
    key_bytes: Buffer,
    value_bytes: Buffer,
) -> bytes:
    """An encoded chunk of these columns, which the caller vouches for. One copy of each."""
    return b"".join(
        column_parts(
            start,
            end,
            seqs,
            cas,
            expiries,
            flags,
            key_offsets,
            value_offsets,
            operations,
            key_bytes,
            (value_bytes,),
        )
    )


def column_parts(
    start: SeqNo,
    end: SeqNo,
    seqs: array[int] | Buffer,
    cas: array[int] | Buffer,
    expiries: array[int] | Buffer,
    flags: array[int] | Buffer,
    key_offsets: array[int] | Buffer,
    value_offsets: array[int] | Buffer,
    operations: Buffer,
    key_bytes: Buffer,
    values: Sequence[Buffer],
) -> list[array[int] | Buffer]:
    """The same in pieces, without a copy; the bytes of the values may be in several."""
    count, key_length, value_length = len(operations), len(key_bytes), sum(map(len, values))
    after_words, after_offsets = _PADDING[-4 * count & 7], _PADDING[-4 * (count + 1) & 7]
    return [
        CHUNK_HEAD.pack(count, key_length, value_length, 0, start, end),
        seqs,
        cas,
        expiries,
        after_words,
        flags,
        after_words,
        key_offsets,
        after_offsets,
        value_offsets,
        after_offsets,
        operations,
        _PADDING[-count & 7],
        key_bytes,
        _PADDING[-key_length & 7],
        *values,
        _PADDING[-value_length & 7],
    ]


@lru_cache(maxsize=64)
def _multiples(length: int) -> bytes:
    return array("i", range(0, length * EVEN_MAX + 1, length)).tobytes()


def even_offsets(base: int, length: int, count: int) -> bytes:
    """Where each of `count` strings of `length` bytes ends, when `base` bytes stand before them;
    i32. At memory speed, as long as `base` is a multiple of `length`."""
    index, remainder = divmod(base, length)
    if remainder or index + count > EVEN_MAX:
        return array("i", range(base + length, base + length * count + 1, length)).tobytes()
    return _multiples(length)[4 * index + 4 : 4 * (index + count) + 4]


def offsets_of(strings: Sequence[bytes]) -> array[int]:
    """Where each of the strings begins when they follow one another, and where the last
    ends."""
    return array("i", accumulate(map(len, strings), initial=0))
