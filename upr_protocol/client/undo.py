"""Going back when the server's history has parted from what was received."""

from __future__ import annotations

from typing import Protocol

from upr_protocol.ids import PartitionId, SeqNo


class Undo(Protocol):
    """Undoes what the server never had."""

    async def __call__(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        """Brings the application back.

        It is called while the application asks for its next event, so everything before is dealt
        with. Cancelled, or after a crash, it is called again: what is undone stays undone. The
        resume state says by then that the application is about to go back, and is saved if there
        is a store. An application that keeps the state itself and undoes here for good keeps
        `Consumer.dealt_with` with that; or it undoes when `RolledBack` comes, which is its next
        event, together with the state of that.

        Args:
            partition: The partition.
            ceiling: The highest number that the application and the server have in common.
            reason: Why, in the server's words.

        Returns:
            The number that the partition now stands at, and its stream goes on from: the end of a
            complete snapshot at or below `ceiling`, or 0 for a partition of which nothing is left;
            or `ceiling` itself, from whoever has read again every key that it received above it.
        """
