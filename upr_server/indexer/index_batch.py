"""Index batches: a part of a partition's stream, as it goes through the queues to the indexes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.ids import PartitionId
from upr_server.indexer.mark import Mark
from upr_server.indexer.pool import MemoryPool

BATCH_OVERHEAD_BYTES: Final = 256
"""What a batch counts for beside its chunks."""


class DocumentChange(msgspec.Struct, frozen=True):
    """A new state of a document.

    Attributes:
        key: The document's key.
        value: The document's bytes; None when it was deleted.
        document: The value as JSON; `NOT_JSON` if it is not JSON, or the document was deleted.
    """

    key: bytes
    value: bytes | None
    document: Any


@attrs.frozen
class IndexBatch:
    """A part of a partition's stream.

    Attributes:
        partition: The partition.
        mark: How far the partition is after the batch.
        chunks: The mutations.
        rollback_documents: What a rollback puts in place of what the server has lost, by document
            key; None when the batch is not a rollback.
        clears_one_of: If not 0, all entries of the partition are removed first; the bucket has so
            many partitions.
        nbytes: What it has reserved of the pool.
    """

    partition: PartitionId
    mark: Mark
    chunks: Sequence[Chunk] = ()
    rollback_documents: Mapping[bytes, bytes | None] | None = None
    clears_one_of: int = 0
    nbytes: int = 0

    @property
    def clears_partition(self) -> bool:
        """Whether all entries of the partition are removed first."""
        return self.clears_one_of > 0

    @property
    def is_rollback(self) -> bool:
        """Whether the mark counts even if it is lower than the one before."""
        return self.clears_partition or self.rollback_documents is not None


@attrs.define
class _OpenBatch:
    """What came of a partition and is not a batch yet.

    Attributes:
        mark: How far the partition is after it.
        chunks: The mutations.
        nbytes: What they have reserved of the pool.
    """

    mark: Mark
    chunks: list[Chunk] = attrs.field(factory=list)
    nbytes: int = 0


class BatchAssembler:
    """Collects a stream's chunks to batches: whole snapshots, or parts of large ones.

    With whole snapshots an index goes in one commit from one state that the server had to another.
    But a snapshot may be larger than the memory.

    Args:
        pool: Chunks and batches reserve their bytes from it.
        put: Called with each batch.
        batch_bytes: When so much of a snapshot has come, it becomes a batch.
    """

    def __init__(
        self, pool: MemoryPool, put: Callable[[IndexBatch], None], batch_bytes: int
    ) -> None:
        self._pool = pool
        self._put = put
        self._batch_bytes = batch_bytes
        self._open: dict[PartitionId, _OpenBatch] = {}

    def add_chunk(self, partition: PartitionId, chunk: Chunk, mark: Mark) -> None:
        """Adds a chunk, after which the partition is at `mark`."""
        self._pool.reserve(chunk.nbytes)
        batch = self._open.get(partition)
        if batch is None:
            batch = self._open[partition] = _OpenBatch(mark)
        batch.chunks.append(chunk)
        batch.nbytes += chunk.nbytes
        batch.mark = mark
        if batch.nbytes >= self._batch_bytes:
            self.flush_partition(partition)

    def complete_snapshot(self, partition: PartitionId, mark: Mark) -> None:
        """Puts what came of a partition, which is at `mark` now. Without chunks the batch only
        moves the mark."""
        batch = self._open.pop(partition, None) or _OpenBatch(mark)
        self._pool.reserve(BATCH_OVERHEAD_BYTES)
        nbytes = batch.nbytes + BATCH_OVERHEAD_BYTES
        self._put(IndexBatch(partition, mark, batch.chunks, nbytes=nbytes))

    def is_open(self, partition: PartitionId) -> bool:
        """Whether chunks of a partition wait for the rest of their snapshot."""
        return partition in self._open

    def flush_partition(self, partition: PartitionId) -> None:
        """Puts what came of a partition, though its snapshot is not whole."""
        if partition in self._open:
            self.complete_snapshot(partition, self._open[partition].mark)

    def flush_all(self) -> None:
        """Flushes every partition, so that no stream waits for memory that only this releases."""
        for partition in list(self._open):
            self.flush_partition(partition)

    def put_batch(self, batch: IndexBatch) -> None:
        """Hands on a batch, and reserves its overhead."""
        self._pool.reserve(BATCH_OVERHEAD_BYTES)
        self._put(attrs.evolve(batch, nbytes=batch.nbytes + BATCH_OVERHEAD_BYTES))

    def drop_partition(self, partition: PartitionId) -> None:
        """Drops what came of a partition and is not a batch yet."""
        batch = self._open.pop(partition, None)
        if batch is not None:
            self._pool.release(batch.nbytes)

    def drop_all(self) -> None:
        """Drops what is not a batch yet, of every partition."""
        for partition in list(self._open):
            self.drop_partition(partition)
