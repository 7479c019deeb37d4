"""What a consumer that remembers its received keys must undo after a failover.

**The target is the rollback ceiling itself.** Keys received only at or below the ceiling are still
correct. Keys received above it are read again. So nothing between the last complete snapshot end
and the ceiling is missing, although the consumer never had the state at the ceiling.

**Keys are read again when a stream is accepted,** before the application is given any of it, and in
the history in which the stream was accepted. If the server has left that history meanwhile, it
refuses. Then the keys are read in the history that the server is in now. That history's log is not
known yet, so no history is known to contain what was read. The stream ends as well. When the next
one is accepted, the same keys are read once more. Nothing of the first stream is held back, because
it may come without end: a node that was failed over may stream for a while before it learns of it.

**A key that is read again has its own sequence number,** which may be above the stream's start. A
missing key counts with the partition's high sequence number. Until a snapshot end reaches these
numbers, the partition matches no state of the server.

**Every accepted stream is compared with all received keys,** not only one that follows a rollback.
A key whose number is outside the accepted history is read again. A key that is in that history and
above the stream's start is merely ahead of the stream: it was read again earlier, or the
application was killed before it could acknowledge the event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import attrs

from upr_protocol.client.core.events import RolledBack, SnapshotEnd, StreamAccepted, Undone
from upr_protocol.client.core.key_lookup import Item
from upr_protocol.client.rollback.received_keys import ReceivedKeysSource, ReceivedVersion
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SEQ_MAX, HistoryId, PartitionId, SeqNo

BELOW_FLOOR: Final = "the received keys do not reach down to it, so the partition starts at 0"
FOREIGN: Final = "the application has changes that are not part of the server's history"

_ANY_HISTORY: Final = HistoryId(0)


@attrs.frozen
class RollbackPlan:
    """What to undo; and by key the version that was read again, of history 0 if the server had left
    the stream's history. `versions` is None when the partition starts at 0."""

    event: Undone
    versions: dict[bytes, ReceivedVersion] | None


ReadNewest = Callable[
    [PartitionId, Sequence[bytes], HistoryId], Awaitable[tuple[list[Item | None], SeqNo]]
]
"""Reads the newest items of keys, all of one partition, in a history; None for a missing key. Gives
the partition's high sequence number when the last of them was read, too. `ServerError` with
`HISTORY_CHANGED` if the partition is in another history; never with history 0, which is any."""


class RollbackPlanner:
    """Plans rollbacks from the received keys."""

    def __init__(self, received_keys: ReceivedKeysSource, read_newest: ReadNewest) -> None:
        self._received_keys = received_keys
        self._read_newest = read_newest
        self._rollbacks: dict[PartitionId, RolledBack] = {}
        """Rollbacks to be undone when the partition's stream is accepted."""
        self._consistent_from: dict[PartitionId, SeqNo] = {}
        """See `consistent_from`; `SEQ_MAX` while a partition's keys are yet to be compared."""

    async def choose_target(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:  # noqa: ARG002
        """The sequence number to roll back to; an `UndoCallback`. Undoes nothing yet."""
        # The application may be given many events of other partitions before this one's stream is
        # accepted. Until then no received key of this partition may be dropped.
        self._consistent_from[partition] = SEQ_MAX
        floor = await self._received_keys.floor(partition)
        return SeqNo(0) if ceiling < floor else ceiling

    def begin_rollback(self, event: RolledBack) -> RollbackPlan | None:
        """Takes in a partition's rollback. Idempotent.

        Returns:
            What to undo at once, if the partition starts at 0. Otherwise None: `compare` plans it.
        """
        partition = event.partition
        if event.to:
            self._consistent_from[partition] = SEQ_MAX
            self._rollbacks[partition] = event
            return None
        self._consistent_from[partition] = SeqNo(0)
        self._rollbacks.pop(partition, None)
        reason = f"{event.reason}; {BELOW_FLOOR}" if event.ceiling else event.reason
        return RollbackPlan(
            Undone(partition, event.ceiling, SeqNo(0), SeqNo(0), reason, {}), versions=None
        )

    async def compare(self, event: StreamAccepted, seq: SeqNo) -> RollbackPlan | None:
        """Compares the received keys with a stream that was accepted and starts after `seq`.

        Returns:
            What to undo before anything of the stream is processed, if there is something. If the
            server had left the stream's history, the next accepted stream brings a plan as well.
        """
        partition = event.partition
        foreign_keys = await self._received_keys.foreign_keys(partition, event.log, seq)
        items: dict[bytes, Item | None] = {}
        versions: dict[bytes, ReceivedVersion] = {}
        log: FailoverLog | None = event.log
        if foreign_keys.keys:
            newest, high_seq, log = await self._read_again(partition, foreign_keys.keys, event.log)
            items = dict(zip(foreign_keys.keys, newest, strict=True))
            versions = {key: _version(item, high_seq, log) for key, item in items.items()}
        consistent_from = SEQ_MAX
        if log is not None:
            consistent_from = max(
                foreign_keys.highest_seq, *(version.seq for version in versions.values()), seq
            )
        self._consistent_from[partition] = consistent_from
        rollback = self._rollbacks.pop(partition, None)
        if rollback is None:
            if not foreign_keys.keys:
                return None
            rollback = RolledBack(partition, seq, seq, FOREIGN)
        if log is None:
            # Although the stream may bring all of these keys, the next one needs a plan: only that
            # tells the application from where it is consistent.
            self._rollbacks[partition] = rollback
        undone = Undone(partition, rollback.ceiling, seq, consistent_from, rollback.reason, items)
        return RollbackPlan(undone, versions)

    async def _read_again(
        self, partition: PartitionId, keys: Sequence[bytes], log: FailoverLog
    ) -> tuple[list[Item | None], SeqNo, FailoverLog | None]:
        """The newest items of keys, and the partition's high sequence number. Then the log of the
        history that they were read in, which is `log`; or None if the server has left that."""
        try:
            items, high_seq = await self._read_newest(partition, keys, log.current)
        except ServerError as error:
            if error.status is not Status.HISTORY_CHANGED:
                raise
        else:
            return items, high_seq, log
        items, high_seq = await self._read_newest(partition, keys, _ANY_HISTORY)
        return items, high_seq, None

    def consistent_from(self, partition: PartitionId) -> SeqNo:
        """The first snapshot end at or above this is a state of the server; `SEQ_MAX` while that is
        not known."""
        return self._consistent_from.get(partition, SEQ_MAX)

    def is_compared(self, partition: PartitionId) -> bool:
        """Whether all received keys of the partition are known to be the server's. Keys of other
        partitions must not be dropped."""
        return self.consistent_from(partition) != SEQ_MAX

    def is_consistent_at(self, event: SnapshotEnd) -> bool:
        """Whether the partition is a state of the server at this snapshot end."""
        return event.end >= self._consistent_from.get(event.partition, 0)


def _version(item: Item | None, high_seq: SeqNo, log: FailoverLog | None) -> ReceivedVersion:
    """The version of a key that was read again; `log` is None if no log is known to contain it."""
    seq = high_seq if item is None else item.seq
    if log is None:
        # Every history contains what any had at 0.
        return ReceivedVersion(max(seq, SeqNo(1)), HistoryId(0))
    return ReceivedVersion(seq, log.history_with(seq))
