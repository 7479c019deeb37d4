"""The evaluation: what a batch with conditions or counters comes to, before any of it is stored.

**Slices.** A batch has one token and one answer, so no snapshot may end inside it: a replica, or a
node after a crash, would have a part of it and no answer, and apply that part again when the batch
is sent again. So a batch is stored in one step. The longer work comes before that, in slices: each
operation sees what those before it in the batch would store, and nothing of the partition changes.
Others have their turn between two slices. If they change the partition, the evaluation begins
again, and items that expire wait until the batch is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from upr_server.engine.batch import MutationBatch
from upr_server.engine.evaluation_result import EvaluationResult
from upr_server.engine.evaluation_steps import EvaluatedPartition, EvaluationSteps
from upr_server.engine.lookup import NOTHING_FETCHED, FetchedItems, FetchRequest, ItemLookup

UNLIMITED_COST: Final = 1 << 62
"""The cost of a step that goes on until the work is done."""

RESTARTS_MIN: Final = 3
"""Restarts after which the slices become longer."""


class Evaluation:
    """Works out one batch.

    Args:
        batch: The batch; the partition is active, and the batch is new to it.
        partition: Its partition.
        lookup: Finds what the partition's keys hold.
        now: Seconds since 1970.

    Attributes:
        result: What it comes to.
        is_done: Whether all outcomes are known.
        cost: What was done so far, in rows of a plain batch.
    """

    # The work goes on in a generator, which holds its own object and not this one. So there is no
    # reference cycle, and an evaluation that is given up is freed at once, with the values that it
    # has joined: Python's collector does not look at what lives for more than a moment.

    __slots__ = ("_partition", "_restarts", "_steps", "_work", "cost", "is_done", "result")

    def __init__(
        self, batch: MutationBatch, partition: EvaluatedPartition, lookup: ItemLookup, now: float
    ) -> None:
        self._partition = partition
        self._restarts = 0
        self.result = EvaluationResult(now)
        self._work = EvaluationSteps(batch, partition, lookup, self.result)
        self._steps: Iterator[list[FetchRequest]] | None = None
        self.is_done = False
        self.cost = 0

    def step(
        self, fetched_items: FetchedItems = NOTHING_FETCHED, cost_max: int = UNLIMITED_COST
    ) -> list[FetchRequest]:
        """Goes on with the work, until it is done or something is missing.

        Nothing of the partition changes, but that items which have expired are deleted once nothing
        is missing any more.

        Args:
            fetched_items: What was read from disk, since the partition's eviction was pinned.
            cost_max: About how much to do, in rows of a plain batch; one value may exceed it.

        Returns:
            What must be read from disk before it can go on.
        """
        result, work = self.result, self._work
        if (
            result.content_version is not None
            and result.content_version != self._partition.content_version
        ):
            # An outcome depends on what its key held. After any change all outcomes are worked out
            # again: to find those that are still right would cost as much. The rows that were cut
            # stay.
            self.is_done = False
            result.content_version = None
            self._steps = None
            self._restarts += 1
            # Others wait while this one is worked out, but items expire meanwhile: thousands, one
            # after the other.
            self._partition.hold_expiry()
        if self.is_done:
            return []
        if self._steps is None:
            self._steps = work.steps()
        work.fetched_items = fetched_items
        # Twice as much after each further restart. With equal slices, a partition that others write
        # to all the time would change between two of them for ever, and the batch would never be
        # applied. The first restarts keep their slices, as few requests in a queue need more. When
        # the slices grew from the first restart on, items that expired all the time made a step of
        # 40 ms.
        cost_max <<= max(0, self._restarts - RESTARTS_MIN)
        work.cost_left = work.cost_max = cost_max
        fetch_requests = next(self._steps, None)
        self.cost += cost_max - work.cost_left
        if fetch_requests is not None:
            return fetch_requests
        self.is_done = True
        return []
