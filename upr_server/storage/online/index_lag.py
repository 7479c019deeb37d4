"""How far the key index of a bucket is behind its log, and how long commits wait for it.

The index follows in large batches, so it lags always. If commits went on however far it is behind,
it would fall behind further for as long as the load lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.ids import PartitionId, PartitionState
from upr_server.engine import Bucket

UNINDEXED_MAX: Final = 512 * 1024
"""Mutations that may be on disk and not yet in the index, without those of replicas. Beyond it
commits wait. Then memory fills and publishers slow down, and what is overwritten meanwhile need not
be written. Otherwise the index, and compaction, which needs it, would fall behind for as long as
the load lasts."""


class IndexLag:
    """Counts what the index of one bucket lacks, and has commits wait while it is too much.

    Args:
        bucket: The bucket.

    Attributes:
        left_unindexed: How many mutations the index leaves out so that they can be undone. Commits
            do not wait for these.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.left_unindexed = 0
        self._bucket = bucket
        self._moved = Notifier()
        self._can_move = True
        # Partitions whose index is damaged: it follows their log no further.
        self._stuck_partitions: set[PartitionId] = set()

    async def wait(self, is_urgent: Callable[[], bool]) -> None:
        """Lets the index catch up if it is far behind, and can.

        Args:
            is_urgent: Whether the next commit must not wait; `check_again` asks again.
        """
        await trio.lowlevel.checkpoint()
        await self._moved.wait_until(
            lambda: (
                not self._can_move
                or is_urgent()
                or self._hands_over()
                # Replicas wait for no index: what they load must not hold up publishers here.
                or self.unindexed_count(of_replicas=False) <= UNINDEXED_MAX + self.left_unindexed
            )
        )

    def check_again(self) -> None:
        """Whether a commit must not wait may have changed."""
        self._moved.notify()

    def _hands_over(self) -> bool:
        """Whether a partition takes no writes until all that it has is on disk. O(partitions)."""
        return any(
            partition.state is PartitionState.PENDING
            and partition.high_seq > partition.manager.persistence.committed_seq
            for partition in self._bucket.partitions
        )

    def unindexed_count(self, *, of_replicas: bool = True) -> int:
        """How many mutations are on disk and not yet in the index, those of replicas if
        `of_replicas`, without the partitions whose index is stuck. O(partitions)."""
        return sum(
            partition.manager.persistence.committed_seq - partition.eviction.indexed_seq
            for partition in self._bucket.partitions
            if partition.id not in self._stuck_partitions
            and (of_replicas or partition.state is not PartitionState.REPLICA)
        )

    def set_stuck(self, partition: PartitionId, is_stuck: bool) -> None:
        """Tells whether a partition's index is damaged. Then commits must not wait for it."""
        if is_stuck:
            self._stuck_partitions.add(partition)
        else:
            self._stuck_partitions.discard(partition)
        self._moved.notify()

    def set_can_move(self, can_move: bool) -> None:
        """Tells that the index has come further; or that it cannot, and commits must not wait."""
        self._can_move = can_move
        self._moved.notify()
