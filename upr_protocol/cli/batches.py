"""Items on their way into chunks, by partition.

A publisher would collect them as well; but it takes in any operation, and here are only stores
without conditions, of which a chunk is made at once from two lists: twice as fast.
"""

from __future__ import annotations

from typing import Final

from upr_protocol.chunk import Chunk, plain_chunk
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId

ITEMS_MAX: Final = 1_000
BYTES_MAX: Final = 256 * 1024
"""At either a batch is full: beyond that, larger ones are not faster."""


class Batches:
    """The batches being filled, at most one a partition.

    Args:
        partition_count: The bucket's.
    """

    def __init__(self, partition_count: int) -> None:
        self._partition_count = partition_count
        self._keys: dict[PartitionId, list[bytes]] = {}
        self._values: dict[PartitionId, list[bytes]] = {}
        self._nbytes: dict[PartitionId, int] = {}

    def add(self, key: bytes, value: bytes) -> tuple[PartitionId, Chunk] | None:
        """Adds an item; gives its partition's batch when that is now full. O(1) otherwise."""
        partition = partition_of(key, self._partition_count)
        keys = self._keys.get(partition)
        if keys is None:
            self._keys[partition], self._values[partition] = [key], [value]
            nbytes = len(key) + len(value)
        else:
            keys.append(key)
            self._values[partition].append(value)
            nbytes = self._nbytes[partition] + len(key) + len(value)
            if len(keys) >= ITEMS_MAX:
                return self._take(partition)
        self._nbytes[partition] = nbytes
        return self._take(partition) if nbytes >= BYTES_MAX else None

    def all(self) -> list[tuple[PartitionId, Chunk]]:
        """Takes out every batch. O(items)."""
        return [self._take(partition) for partition in list(self._keys)]

    def _take(self, partition: PartitionId) -> tuple[PartitionId, Chunk]:
        self._nbytes.pop(partition, None)
        return partition, plain_chunk(self._keys.pop(partition), self._values.pop(partition))
