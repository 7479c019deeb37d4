"""Which partition a key belongs to."""

from __future__ import annotations

from zlib import crc32

from upr_protocol.ids import PartitionId


def partition_of(key: bytes, partitions: int) -> PartitionId:
    """The partition of `key` in a bucket of `partitions`, by Couchbase's rule."""
    return PartitionId(((crc32(key) >> 16) & 0x7FFF) % partitions)
