"""Which partition a key belongs to: Couchbase's rule, over the CRC-32 of zlib."""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

from upr_kernel.defects import ChunkDefectError, Defect
from upr_kernel.pure.columns import U64_END, Buffer, Columns


def partition_of(key: Buffer, partition_count: int) -> int:
    """The partition of a key."""
    return (crc32(key) >> 16 & 0x7FFF) % partition_count


def find_misplaced(
    chunk: Buffer, low: int, high: int, partition: int, partition_count: int, key_bytes_max: int, /
) -> int:
    """The first row whose key does not belong to a partition. O(bytes of the keys).

    Args:
        chunk: An encoded chunk.
        low: The first row to look at.
        high: One more than the last.
        partition: The partition to which the keys of these rows should belong.
        partition_count: How many partitions there are.
        key_bytes_max: A longer key, and an empty one, is no key, and belongs nowhere: it is
            passed over.

    Returns:
        The row; `high` when every key belongs there.

    Raises:
        ChunkDefectError: The chunk's lengths or offsets do not add up.
        OverflowError: A number is negative, or has more than 64 bits.
        ValueError: The chunk does not have these rows, or there is no partition.
    """
    numbers = low, high, partition, partition_count, key_bytes_max
    if min(numbers) < 0 or max(numbers) >= U64_END:
        raise OverflowError("a number is out of range")
    columns = Columns(chunk)
    if not low <= high <= columns.count or partition_count < 1:
        raise ValueError("rows or partitions out of range")
    offsets = columns.column(columns.key_offsets_at, 4, low, high + 1).cast("I").tolist()
    if offsets[-1] > columns.key_length or any(a > b for a, b in pairwise(offsets)):
        raise ChunkDefectError(Defect.OFFSETS)
    keys = columns.view[columns.keys_at :]
    for row, (begin, end) in enumerate(pairwise(offsets), low):
        is_key = 0 < end - begin <= key_bytes_max
        if is_key and partition_of(keys[begin:end], partition_count) != partition:
            return row
    return high
