"""Operations in any order: batches by partition on the way out, results in their own order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client.core.batcher import Batcher, BatchLimits
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.client.core.results import Failure, WriteResult, results_of
from upr_protocol.ids import PartitionId


class OperationBatches:
    """Puts operations into batches, and brings their results back into order."""

    __slots__ = ("_mutations", "_partition_count", "_results", "_rows_of")

    def __init__(self, mutations: Iterable[Mutation], partition_count: int) -> None:
        self._mutations = mutations
        self._partition_count = partition_count
        self._results: dict[int, WriteResult | Failure] = {}
        # By the chunk's identity: it lives until its batch is answered.
        self._rows_of: dict[int, list[int]] = {}

    def batches(self) -> Iterator[tuple[PartitionId, Chunk]]:
        """Every operation in a batch of its partition, in order.

        Raises:
            ServerError: A key or value is longer than any server takes.
        """
        batcher = Batcher(self._partition_count, BatchLimits())

        def take() -> Iterator[tuple[PartitionId, Chunk]]:
            for partition, chunk in batcher.take():
                self._rows_of[id(chunk)] = rows.pop(partition)
                yield partition, chunk

        rows: defaultdict[PartitionId, list[int]] = defaultdict(list)
        for row, mutation in enumerate(self._mutations):
            partition = batcher.add(
                0.0,
                mutation.op,
                mutation.key,
                mutation.value,
                cas=mutation.cas,
                flags=mutation.flags,
                expiry=mutation.expiry,
            )
            rows[partition].append(row)
            if batcher.is_full:
                yield from take()
        yield from take()

    def note_answered(self, batch: Batch) -> None:
        """A batch was answered, or refused for good."""
        results: Sequence[WriteResult | Failure]
        if batch.result is None:
            results = batch.failures()
        else:
            results = results_of(batch.partition, batch.chunk, batch.result)
        self._results.update(zip(self._rows_of.pop(id(batch.chunk)), results, strict=True))

    def results(self) -> list[WriteResult | Failure]:
        """The result of each operation, in their order, once every batch is answered."""
        return [self._results[row] for row in range(len(self._results))]
