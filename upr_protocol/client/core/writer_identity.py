"""The tokens of batches: by them a batch that is sent twice has one effect."""

from __future__ import annotations

from typing import Final, Self

from upr_protocol.chunk import Chunk
from upr_protocol.ids import PartitionId

WRITER_ID_BYTES: Final = 16
"""The length of a writer's ID."""


class WriterIdentity:
    """A publisher's identity towards the server, and its count of batches in each partition.

    The server remembers the answers to the last batches of a writer in a partition; the same
    counter again is the same batch again.

    Args:
        writer_id: 16 random bytes, so that no two publishers ever have the same.

    Attributes:
        attempt: Which run of its task it is; 0 where tasks are not run again.

    Raises:
        ValueError: The ID does not have 16 bytes.
    """

    __slots__ = ("_chains", "_counters", "attempt", "id")

    def __init__(self, writer_id: bytes) -> None:
        if len(writer_id) != WRITER_ID_BYTES:
            raise ValueError(f"a writer's ID has {WRITER_ID_BYTES} bytes, not {len(writer_id)}")
        self.id: Final = writer_id
        self.attempt = 0
        self._counters: dict[PartitionId, int] = {}
        self._chains: dict[PartitionId, int] | None = None

    @classmethod
    def of_task(cls, writer_id: bytes, attempt: int = 0) -> Self:
        """The writer of a task that may run again, from its beginning, with the same batches.

        The server is told how the batches hang together. So it notices when the second run sends
        other ones, and it refuses an attempt that a later one has overtaken.

        Args:
            writer_id: 16 bytes, the same in each run of the task.
            attempt: Rises from one run to the next.
        """
        writer = cls(writer_id)
        writer.attempt = attempt
        writer._chains = {}
        return writer

    def next_counter(self, partition: PartitionId) -> int:
        """The number of the next batch to `partition`, from 1."""
        counter = self._counters[partition] = self._counters.get(partition, 0) + 1
        return counter

    def next_token(self, partition: PartitionId, chunk: Chunk) -> tuple[int, int]:
        """The number of the next batch to `partition`, and its chain: a checksum over it and all
        before it; 0 unless this is the writer of a task."""
        counter = self._counters[partition] = self._counters.get(partition, 0) + 1
        if self._chains is None:
            return counter, 0
        chain = self._chains[partition] = chunk.chained_crc(self._chains.get(partition, 0))
        return counter, chain
