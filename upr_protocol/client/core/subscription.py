"""What a consumer asks for, and how far that has come, whichever nodes stream its partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from upr_protocol.client.core import resume_state
from upr_protocol.client.core.barrier_tracker import BarrierTracker
from upr_protocol.client.core.delivery_tracker import Delivery, RollbackRequest, SavePriority
from upr_protocol.client.core.events import RolledBack
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import Position
from upr_protocol.ids import PARTITIONS_END, SEQ_MAX, HistoryId, PartitionId, PartitionState, SeqNo

End = int | Mapping[int, int] | Literal["now"] | None
"""Where streams end: at one sequence number, at one for each partition, at what the server has when
the first connection is made, or never."""


def _checked_partitions(partitions: Sequence[int] | None) -> tuple[PartitionId, ...]:
    """The partitions of a consumer's argument, sorted and without duplicates; empty for all.

    Raises:
        ValueError: The argument is empty, which must not come to mean all; or it names a partition
            that no bucket has.
    """
    if partitions is None:
        return ()
    if not partitions:
        raise ValueError("the list of partitions is empty; give None to stream all of them")
    unique = sorted(set(partitions))
    if not 0 <= unique[0] <= unique[-1] < PARTITIONS_END:
        raise ValueError(f"a partition must be 0 to {PARTITIONS_END - 1}")
    return tuple(map(PartitionId, unique))


@attrs.frozen
class Subscription:
    """What a consumer asks for; see also the arguments of `consume`.

    Attributes:
        partitions: The partitions to stream, sorted; empty for all of the bucket's, which is None
            as an argument.
        from_now: Whether partitions without a position start at what the server has, instead of at
            the beginning.
        with_answers: Whether the server's answers to publishers come, too.
    """

    partitions: tuple[PartitionId, ...] = attrs.field(default=None, converter=_checked_partitions)
    from_now: bool = False
    state: PartitionState = PartitionState.ACTIVE
    end: End = None
    lease_id: int = 0
    with_answers: bool = False
    with_logs: bool = False
    has_undo: bool = False
    key_prefix: bytes = b""


class SubscriptionState:
    """What the stream followers of one consumer share.

    Attributes:
        resume_state: The positions of everything received; the application may have processed less.
        partitions: The partitions to stream; None until a node has told how many there are.
        remaining_partitions: Those of them whose streams have not ended for good.
        accepted_partitions: The partitions whose stream a node has accepted at least once.
        unsaved_logs: The partitions whose position an answer has changed, if no delivery since
            then has that saved. It must be saved before any data of them.
        pending_rollbacks: The rollbacks that the application is undoing. Meanwhile their streams
            are not requested, on any connection: their positions are about to move.
        partition_count: How many partitions the bucket has; 0 until a node has told.
    """

    def __init__(self, subscription: Subscription, resume_state: ResumeState) -> None:
        self.subscription = subscription
        self.resume_state = resume_state
        self.partitions: tuple[PartitionId, ...] | None = None
        self.remaining_partitions: set[PartitionId] = set()
        self.accepted_partitions: set[PartitionId] = set()
        self.unsaved_logs: set[PartitionId] = set()
        self.pending_rollbacks: dict[PartitionId, RollbackRequest] = {}
        self.barriers = BarrierTracker()
        self.rollback_count = 0
        self.connection_count = 0
        self.partition_count = 0
        self._ends: dict[PartitionId, SeqNo] = {}
        self._end_histories: dict[PartitionId, HistoryId | None] = {}
        """The partitions whose end is decided. An end of "now" is a number in the history that the
        node was in when it told; a fixed end counts in any history: None."""

    @property
    def is_finished(self) -> bool:
        """Whether every stream has ended for good."""
        return self.partitions is not None and not self.remaining_partitions

    def learn_partitions(self, handshake: Handshake) -> list[Delivery]:
        """A node tells how many partitions the bucket has.

        Returns:
            `RolledBack` of the partitions that were streamed once, and that the bucket does not
            have any more.

        Raises:
            ServerError: The bucket does not have a partition that was asked for; or the bucket was
                deleted and created again with another number of partitions.
        """
        count = handshake.partition_count
        if self.partitions is not None:
            if count != self.partition_count:
                raise ServerError(
                    Status.HISTORY_CHANGED,
                    f"the bucket was deleted and created again, with {count} partitions instead of "
                    f"{self.partition_count}",
                )
            return []
        requested_partitions = self.subscription.partitions
        for partition in requested_partitions:
            if partition >= count:
                raise ServerError(
                    Status.BAD_ARGUMENT,
                    f"the bucket has partitions 0 to {count - 1}, not {partition}",
                )
        self.partition_count = count
        self.partitions = requested_partitions or tuple(map(PartitionId, range(count)))
        self.remaining_partitions = set(self.partitions)
        if requested_partitions:
            # The application hears nothing of partitions that it did not ask for.
            return []
        reason = "the bucket does not have this partition any more"
        return [
            self.roll_back(RollbackRequest(partition, SeqNo(0), reason), SeqNo(0))
            for partition, position in sorted(self.resume_state.positions.items())
            if partition >= count and position.highest_received
        ]

    def decide_bounds(self, partition: PartitionId, handshake: Handshake) -> bool:
        """Decides once where a partition's stream starts and ends, by what a node told of it.

        Returns:
            Whether that is decided. It is not while "now" needs a node whose partition was, at the
            handshake, in the state that the consumer asks for. Another node has numbers, too, but
            of a copy that is outdated or yet to be filled.
        """
        if partition in self._end_histories:
            return True
        subscription = self.subscription
        log = handshake.logs.get(partition)
        is_in_state = (
            log is not None
            and log.status == Status.OK
            and log.state is subscription.state
            and bool(log.log.entries)
        )
        if not is_in_state and (subscription.from_now or subscription.end == "now"):
            return False
        history_id: HistoryId | None = None
        if subscription.end == "now":
            assert log is not None
            self._ends[partition], history_id = log.high_seq, log.log.current
        elif isinstance(subscription.end, int):
            self._ends[partition] = SeqNo(subscription.end)
        elif subscription.end is not None:
            self._ends[partition] = SeqNo(subscription.end.get(partition, SEQ_MAX))
        if subscription.from_now:
            assert log is not None
            position = Position(log.log, log.high_seq, log.high_seq, None)
            # A position that was resumed from stays: "from now" is for the other partitions.
            self.resume_state.positions.setdefault(partition, position)
        self._end_histories[partition] = history_id
        return True

    def confirm_end(self, partition: PartitionId, history_id: HistoryId) -> bool:
        """A node accepted the stream of a partition in this history.

        Returns:
            Whether the stream's end counts there. An end of "now" that was read in another history
            does not: a failover may have replaced the node that sent it. Then the end is
            forgotten, and the next handshake decides.
        """
        if self._end_histories.get(partition) in (None, history_id):
            return True
        del self._end_histories[partition], self._ends[partition]
        return False

    def end_of(self, partition: PartitionId) -> SeqNo:
        """Where the stream of a partition ends."""
        return self._ends.get(partition, SEQ_MAX)

    def next_connection_number(self) -> int:
        """Numbers one more connection, of any follower."""
        self.connection_count += 1
        return self.connection_count

    def roll_back(self, request: RollbackRequest, to: SeqNo) -> Delivery:
        """Moves a partition back to `to`; gives `RolledBack`, for the application."""
        partition = request.partition
        self.rollback_count += 1
        position = resume_state.position_after_rollback(self.resume_state.position(partition), to)
        self.resume_state.positions[partition] = position
        event = RolledBack(partition, request.ceiling, to, request.reason)
        return Delivery(event, (partition, position), priority=SavePriority.URGENT)

    def finish_rollback(self, partition: PartitionId, to: SeqNo) -> RollbackRequest:
        """The application has rolled back to `to`.

        Returns:
            What it was asked for.

        Raises:
            ValueError: `to` is above the ceiling.
        """
        request = self.pending_rollbacks[partition]
        if not 0 <= to <= request.ceiling:
            raise ValueError(
                f"partition {partition} was rolled back to {to}, above its ceiling "
                f"{request.ceiling}"
            )
        del self.pending_rollbacks[partition]
        return request
