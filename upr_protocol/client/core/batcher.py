"""Collecting operations into chunks, one partition at a time."""

from __future__ import annotations

from typing import Final

import attrs

from upr_protocol.chunk import Buffer, Chunk, ChunkBuilder
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.limits import CHUNK_MUTATIONS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX

BATCH_MUTATIONS: Final = 1_000
"""With more operations, the cost of a batch beside them hardly matters."""

BATCH_BYTES: Final = 256 * 1024
"""Long enough for large sends, short enough that other messages do not wait behind one batch."""


BATCH_BYTES_LIMIT: Final = 8 * 1024 * 1024
"""With one more value of the largest size, the batch still fits a frame."""


@attrs.frozen
class BatchLimits:
    """When a batch is full.

    Attributes:
        mutations: At this many operations.
        nbytes: At this many encoded bytes; a single operation may be longer.
        linger_s: After this time, whatever it holds.
    """

    mutations: int = attrs.field(
        default=BATCH_MUTATIONS,
        validator=[attrs.validators.ge(1), attrs.validators.le(CHUNK_MUTATIONS_MAX)],
    )
    nbytes: int = attrs.field(default=BATCH_BYTES, validator=attrs.validators.le(BATCH_BYTES_LIMIT))
    linger_s: float = 0.005


class Batcher:
    """The batches being filled, at most one a partition.

    Args:
        partition_count: The bucket's.
        limits: When a batch is full.
    """

    __slots__ = ("_limits", "_open", "_partition_count")

    def __init__(self, partition_count: int, limits: BatchLimits) -> None:
        self._partition_count = partition_count
        self._limits = limits
        # In the order in which they were begun, and so in the order in which they are due.
        self._open: dict[PartitionId, tuple[float, ChunkBuilder]] = {}

    def __len__(self) -> int:
        """How many batches are being filled."""
        return len(self._open)

    def add(
        self,
        now: float,
        operation: Operation,
        key: bytes,
        value: Buffer = b"",
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
    ) -> tuple[PartitionId, Chunk] | None:
        """Adds an operation; gives the batch of its partition when that is now full. O(1).

        Raises:
            ServerError: The key or the value is longer than any server takes; nothing was added.
        """
        check_sizes(key, value)
        partition = partition_of(key, self._partition_count)
        entry = self._open.get(partition)
        if entry is None:
            entry = self._open[partition] = (now, ChunkBuilder())
        builder = entry[1]
        builder.append(operation, key, value, 0, cas, flags, expiry)
        if len(builder) < self._limits.mutations and builder.nbytes < self._limits.nbytes:
            return None
        del self._open[partition]
        return partition, builder.build()

    @property
    def due_at(self) -> float | None:
        """When the oldest batch is due; None without batches."""
        for begun_at, _ in self._open.values():
            return begun_at + self._limits.linger_s
        return None

    def due(self, now: float) -> list[tuple[PartitionId, Chunk]]:
        """Takes out the batches that are due."""
        linger_s = self._limits.linger_s
        partitions = []
        for partition, (begun_at, _) in self._open.items():
            if begun_at + linger_s > now:
                break
            partitions.append(partition)
        return [(partition, self._open.pop(partition)[1].build()) for partition in partitions]

    def all(self) -> list[tuple[PartitionId, Chunk]]:
        """Takes out every batch."""
        batches = [(partition, builder.build()) for partition, (_, builder) in self._open.items()]
        self._open.clear()
        return batches


def check_sizes(key: bytes, value: Buffer = b"") -> None:
    """Refuses what every server would refuse.

    Raises:
        ServerError: `BAD_KEY` or `TOO_LARGE`, as a server would.
    """
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ServerError(Status.BAD_KEY, f"a key of {len(key)} bytes")
    if len(value) > VALUE_BYTES_MAX:
        raise ServerError(Status.TOO_LARGE, f"a value of {len(value)} bytes")
