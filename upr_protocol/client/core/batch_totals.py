"""How many batches of a publisher have no final answer, in all and by when they were added."""

from __future__ import annotations

from collections.abc import Sequence

from upr_protocol.client.core.partition_batches import Batch


class BatchTotals:
    """Counts the batches of one publisher that have no final answer.

    Attributes:
        count: How many batches were added and have no final answer.
        nbytes: Their memory, roughly.
        answered_count: How many batches have had their final answer.
        answered_mutations: How many operations these had.
        resent_count: How often a batch was sent that had been sent before.
        period: The number of the period that is under way; see `end_period`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.answered_count = 0
        self.answered_mutations = 0
        self.resent_count = 0
        self.period = 0
        self._period_counts: dict[int, int] = {}
        """By period how many batches have no final answer, if any; the oldest comes first."""

    def note_added(self, count: int, nbytes: int) -> None:
        """So many batches were added in the period that is under way; their memory, in bytes."""
        if count:
            counts, period = self._period_counts, self.period
            counts[period] = counts.get(period, 0) + count
            self.count += count
            self.nbytes += nbytes

    def end_period(self) -> int:
        """Ends a period: `is_answered` tells when all that was added up to now is answered."""
        self.period += 1
        return self.period - 1

    def is_answered(self, period: int) -> bool:
        """Whether each batch of a period that has ended, and of those before, has its final answer.
        O(1)."""
        return next(iter(self._period_counts), self.period) > period

    def remove_answered(self, batches: Sequence[Batch], mutations: int, nbytes: int) -> None:
        """Counts out batches that have their final answer, with so many operations and bytes of
        memory; calls what waits for their answers."""
        self.count -= len(batches)
        self.nbytes -= nbytes
        self.answered_count += len(batches)
        self.answered_mutations += mutations
        counts = self._period_counts
        for batch in batches:
            counts[batch.period] -= 1
            if not counts[batch.period]:
                del counts[batch.period]
            on_answer = batch.on_answer
            if on_answer is not None:
                batch.on_answer = None
                on_answer(batch)
