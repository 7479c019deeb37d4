"""Marks of the log's records: the sum of all of them tells what the last commit left."""

from __future__ import annotations

from struct import Struct
from typing import Final
from zlib import crc32

from crc32c import crc32c

from upr_kernel.pure.columns import Buffer

KEY_BYTES_MAX: Final = 511
"""The longest key that the disk takes."""

MARKED_BYTES_MAX: Final = 1024
"""Of a longer value only the length counts: it lies in pages of its own, and to look at the first
page of each would be to read half the disk."""

FRONT_BYTES: Final = 16
"""How much of a shorter value counts: its front. That of a chunk is its head."""

_CHUNK: Final = b"s"
"""What the key of a chunk begins with."""

_CHUNK_HEAD: Final = Struct("<IIQ")
"""The CRC32C of the chunk; that of the key, the field before and a 1 if the next is 1; and whether
a snapshot ends here."""

_CRC: Final = Struct("<I")


def record_mark(key: bytes, value: Buffer, is_checked: bool, /) -> int:
    """A number below 2**32 for a record of the log. O(bytes), 1,535 of them at most.

    Args:
        key: Its key.
        value: Its value.
        is_checked: Whether to compare its checksum, too, if its front counts: of a chunk that of
            the head, of any other the CRC32C of the key and the rest, which it begins with.

    Returns:
        The mark; -1 if the checksum was compared and differs.

    Raises:
        ValueError: The key is longer than `KEY_BYTES_MAX`.
    """
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"a key of {len(key)} bytes")
    length = len(value)
    mark = crc32(length.to_bytes(8), crc32(key))
    if length > MARKED_BYTES_MAX:
        return mark
    if is_checked and not _is_front_intact(key, value):
        return -1
    return crc32(value[:FRONT_BYTES], mark)


def _is_front_intact(key: bytes, value: Buffer) -> bool:
    if key[:1] != _CHUNK:
        return len(value) >= _CRC.size and _CRC.unpack_from(value)[0] == crc32c(
            value[_CRC.size :], crc32c(key)
        )
    if len(value) < _CHUNK_HEAD.size:
        return False
    crc, head_crc, mark = _CHUNK_HEAD.unpack_from(value)
    return mark <= 1 and bool(
        head_crc == crc32c(_CRC.pack(crc) + bytes([mark] if mark else []), crc32c(key))
    )
