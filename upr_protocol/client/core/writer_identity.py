"""Tokens: what makes a batch that is sent twice have one effect."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Final, Self

from upr_protocol.chunk import Chunk
from upr_protocol.ids import PartitionId

WRITER_BYTES: Final = 16
"""So many random bytes that no two publishers ever have the same."""


class WriterIdentity:
    """A publisher's identity towards the server, and its count of batches in each partition.

    The server remembers the answers to the last batches of a writer in a partition; the same
    counter again is the same batch again.

    Args:
        random_bytes: Gives so many random bytes.

    Attributes:
        id: 16 bytes.
        attempt: Which run of its task it is; 0 where tasks are not run again.
    """

    __slots__ = ("_chains", "_counters", "attempt", "id")

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self.id: Final = random_bytes(WRITER_BYTES)
        self.attempt = 0
        self._counters: Counter[PartitionId] = Counter()
        self._chains: dict[PartitionId, int] | None = None

    @classmethod
    def of_task(cls, writer_id: bytes, attempt: int = 0) -> Self:
        """The writer of a task that may be run again, from its beginning, with the same batches.

        The server is told how the batches hang together, and so notices when they are others the
        second time; and it refuses an attempt that a later one has overtaken.

        Args:
            writer_id: 16 bytes, the same in each run of the task.
            attempt: Rises from one run to the next.

        Raises:
            ValueError: The ID has not 16 bytes.
        """
        if len(writer_id) != WRITER_BYTES:
            raise ValueError(f"a writer's ID has {WRITER_BYTES} bytes, not {len(writer_id)}")
        writer = cls(lambda _: writer_id)
        writer.attempt = attempt
        writer._chains = {}
        return writer

    def next_counter(self, partition: PartitionId) -> int:
        """The number of the next batch to `partition`, from 1."""
        self._counters[partition] += 1
        return self._counters[partition]

    def next_chain(self, partition: PartitionId, chunk: Chunk) -> int:
        """What vouches for the next batch to `partition` and all before it; 0 if this is not the
        writer of a task."""
        if self._chains is None:
            return 0
        chain = self._chains[partition] = chunk.chained(self._chains.get(partition, 0))
        return chain
