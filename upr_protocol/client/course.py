"""Where a consumer's streams begin and end, and how far they have come, whichever nodes they are
followed on."""

from __future__ import annotations

from upr_protocol.client.core.barrier_tracker import BarrierTracker
from upr_protocol.client.core.delivery_tracker import RollbackRequest
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.wishes import Wishes
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import Position
from upr_protocol.ids import SEQ_MAX, HistoryId, PartitionId, SeqNo


class Course:
    """What the followers of one consumer have in common.

    Attributes:
        wishes: What the consumer asked for.
        state: How far everything that came goes; the application may have dealt with less.
        wanted: The partitions to stream; None before the bucket was seen.
        finished: Those of them whose streams ended for good.
        rounds: The barriers on their way.
        accepted: Those that some node once accepted.
        undoing: Rollbacks that the application was asked for. Meanwhile nothing of them is asked
            for, on another connection neither: their positions are about to move.
        rollbacks: How many times a partition went back.
        connections: Connections of all followers.
        partition_count: How many partitions the bucket has; 0 before a node told of it.
    """

    def __init__(self, wishes: Wishes, state: ResumeState) -> None:
        self.wishes = wishes
        self.state = state
        self.wanted: tuple[PartitionId, ...] | None = None
        self.finished: set[PartitionId] = set()
        self.accepted: set[PartitionId] = set()
        self.undoing: dict[PartitionId, RollbackRequest] = {}
        self.rounds = BarrierTracker()
        self.rollbacks = 0
        self.connections = 0
        self.partition_count = 0
        self._ends: dict[PartitionId, SeqNo] = {}
        self._settled: dict[PartitionId, HistoryId | None] = {}
        """The partitions whose end is decided. An end of "now" is a number of the history that the
        node was in when it told; a fixed one goes for any history: None."""

    @property
    def done(self) -> bool:
        """Whether every stream ended for good."""
        return self.wanted is not None and len(self.finished) == len(self.wanted)

    @property
    def left(self) -> set[PartitionId]:
        """The partitions that are still to be streamed."""
        return set(self.wanted or ()) - self.finished

    def enter(self, greeting: Handshake) -> list[PartitionId]:
        """A node told of the bucket.

        Returns:
            The partitions that were streamed once and that the bucket does not have any more.

        Raises:
            ServerError: A partition is wanted that the bucket does not have; or the bucket has
                other partitions than it had.
        """
        count = greeting.partition_count
        if self.wanted is not None:
            if count != self.partition_count:
                raise ServerError(
                    Status.HISTORY_CHANGED,
                    f"the bucket was made anew, with {count} partitions instead of "
                    f"{self.partition_count}",
                )
            return []
        self.partition_count = count
        wanted = self.wishes.partitions or tuple(map(PartitionId, range(count)))
        for partition in wanted:
            if partition >= count:
                raise ServerError(
                    Status.BAD_ARGUMENT,
                    f"the bucket has partitions 0 to {count - 1}, not {partition}",
                )
        self.wanted = wanted
        gone = [] if self.wishes.partitions else [p for p in self.state.positions if p >= count]
        return [p for p in sorted(gone) if self.state.position(p).highest_received]

    def settle(self, partition: PartitionId, greeting: Handshake) -> bool:
        """Decides once where `partition` begins and ends, by what a node told of it.

        Returns:
            Whether that is decided. It is not while "now" has to be decided by a node that was not,
            when it greeted, in the state that the consumer asks for: it has numbers, but they are
            those of a copy that was left behind, or has yet to be filled.
        """
        if partition in self._settled:
            return True
        wishes = self.wishes
        log = greeting.logs.get(partition)
        holds = (
            log is not None
            and log.status == Status.OK
            and log.state is wishes.state
            and bool(log.log.entries)
        )
        if not holds and (wishes.from_now or wishes.end == "now"):
            return False
        history_id: HistoryId | None = None
        if wishes.end == "now":
            assert log is not None
            self._ends[partition], history_id = log.high_seq, log.log.current
        elif isinstance(wishes.end, int):
            self._ends[partition] = SeqNo(wishes.end)
        elif wishes.end is not None:
            self._ends[partition] = SeqNo(wishes.end.get(partition, SEQ_MAX))
        if wishes.from_now:
            assert log is not None
            here = Position(log.log, log.high_seq, log.high_seq, None)
            self.state.positions.setdefault(partition, here)
        self._settled[partition] = history_id
        return True

    def confirm_end(self, partition: PartitionId, history_id: HistoryId) -> bool:
        """A node accepted the stream of `partition` in this history.

        Returns:
            Whether its end counts there. An end of "now" that was read in another history does not:
            the node that told it may have been left behind by a failover. It is forgotten then, and
            the next greeting decides.
        """
        if self._settled.get(partition) in (None, history_id):
            return True
        del self._settled[partition], self._ends[partition]
        return False

    def end_of(self, partition: PartitionId) -> SeqNo:
        """Where the stream of `partition` ends."""
        return self._ends.get(partition, SEQ_MAX)

    def new_connection(self) -> int:
        """A number for one more connection, of whichever follower."""
        self.connections += 1
        return self.connections

    def undone(self, partition: PartitionId, to: SeqNo) -> RollbackRequest:
        """The application has undone what it was asked to, down to `to`; gives what that was.

        Raises:
            ValueError: That is above the ceiling.
        """
        asked = self.undoing[partition]
        if not 0 <= to <= asked.ceiling:
            raise ValueError(f"partition {partition} went back to {to}, not to {asked.ceiling}")
        del self.undoing[partition]
        return asked
