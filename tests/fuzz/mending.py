"""Bytes made sound on the outside, so that what is inside gets read.

No fuzzer guesses a CRC32C. So most targets first put right what only says whether the rest is
whole: magic, version, lengths and checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

from crc32c import crc32c

from upr_kernel import pack_header
from upr_protocol.chunk import CHUNK_HEAD_BYTES, encoded_bytes
from upr_protocol.wire.frame import HEADER_BYTES

_SAID: Final = Struct("<3xBHHII8x")
_CHUNK_HEAD: Final = Struct("<IIIIQQ")


def framed(data: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    """The frames in `data`: opcode, status, partition, opaque, body. A length that is too long
    ends with the data; what is too short for a header is left over."""
    offset = 0
    while len(data) - offset >= HEADER_BYTES:
        opcode, status, partition, opaque, length = _SAID.unpack_from(data, offset)
        offset += HEADER_BYTES
        body = data[offset : offset + (min(length, len(data) - offset) & ~7)]
        offset += len(body)
        yield opcode, status, partition, opaque, body


def mended_frames(data: bytes) -> bytes:
    """`data` as frames that all pass for whole."""
    return b"".join(
        pack_header(opcode, status, partition, opaque, len(body), crc32c(body)) + body
        for opcode, status, partition, opaque, body in framed(data)
    )


def mended_chunk(data: bytes) -> bytes:
    """`data` as a chunk whose lengths add up: as many mutations and bytes of keys as its head
    says, if there are so many; the values are the rest."""
    if len(data) < CHUNK_HEAD_BYTES:
        return data
    count, key_length, value_length, _, start, end = _CHUNK_HEAD.unpack_from(data)
    room = len(data) & ~7
    count = min(count, len(data) // 29)
    while count and encoded_bytes(count, 0, 0) > room:
        count -= 1
    bytes_left = room - encoded_bytes(count, 0, 0)
    if bytes_left < 0:
        return data
    key_length = min(key_length, bytes_left)
    bytes_left -= (key_length + 7) & ~7
    value_length = max(0, bytes_left - (-value_length & 7))
    head = _CHUNK_HEAD.pack(count, key_length, value_length, 0, start, max(start, end))
    return (head + data[CHUNK_HEAD_BYTES:])[: encoded_bytes(count, key_length, value_length)]
