"""Which partition a key belongs to."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final
from zlib import crc32

from upr_protocol.ids import PartitionId
from upr_protocol.limits import KEY_BYTES_MAX

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROWS: Final = 16 * 1024
"""Keys hashed together: their intermediate results stay in the processor's cache."""


def partition_of(key: bytes, partitions: int) -> PartitionId:
    """The partition of `key` in a bucket of `partitions`, by Couchbase's rule."""
    return PartitionId(((crc32(key) >> 16) & 0x7FFF) % partitions)


def partitions_of(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], partitions: int
) -> NDArray[np.uint16]:
    """`partition_of` for a column of keys, some 5 ns a byte. It needs NumPy.

    Args:
        offsets: Where each key begins, and where the last ends. None is longer than a key may be.
        data: The keys, one after another.
        partitions: How many partitions the bucket has.
    """
    import numpy as np

    # CRC-32 is linear: the sum of what each byte adds, which depends on how far it stands from the
    # end, and of what there is to zeros of that length.
    adds, zeros = _tables()
    partition_ids = np.empty(len(offsets) - 1, np.uint16)
    for first in range(0, len(partition_ids), _ROWS):
        ends = offsets[first + 1 : first + _ROWS + 1]
        lengths = ends - offsets[first : first + len(ends)]
        hashes = zeros[lengths]
        longest, shortest = int(lengths.max()), int(lengths.min())
        for distance in range(longest):
            if distance < shortest:
                hashes ^= adds[distance][data[ends - (distance + 1)]]
                continue
            rows = np.flatnonzero(lengths > distance)
            hashes[rows] ^= adds[distance][data[ends[rows] - (distance + 1)]]
        partition_ids[first : first + len(ends)] = hashes % np.uint16(partitions)
    return partition_ids


@cache
def _tables() -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """What a byte adds to the 15 bits that count, by its distance from the key's end; and those
    bits of as many zeros."""
    import numpy as np

    step = np.array([crc32(bytes((byte,))) ^ crc32(b"\0") for byte in range(256)], np.uint32)
    rows = [step]
    for _ in range(KEY_BYTES_MAX - 1):
        rows.append(step[rows[-1] & 0xFF] ^ (rows[-1] >> np.uint32(8)))
    zeros = np.array([crc32(bytes(length)) for length in range(KEY_BYTES_MAX + 1)], np.uint32)
    return _bits_that_count(np.stack(rows)), _bits_that_count(zeros)


def _bits_that_count(crcs: NDArray[np.uint32]) -> NDArray[np.uint16]:
    return ((crcs >> 16) & 0x7FFF).astype("uint16")
