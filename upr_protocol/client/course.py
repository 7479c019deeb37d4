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
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo


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
        self._settled: set[PartitionId] = set()

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
            Whether that is decided; when it is not, the node told too early, or is the wrong one.
        """
        if partition in self._settled:
            return True
        wishes = self.wishes
        told = greeting.logs.get(partition)
        owned = told is not None and told.status == Status.OK
        if not owned and greeting.map_revision and (wishes.from_now or wishes.end == "now"):
            return False
        high = told.high_seq if told is not None and owned else SeqNo(0)
        if wishes.end == "now":
            self._ends[partition] = high
        elif isinstance(wishes.end, int):
            self._ends[partition] = SeqNo(wishes.end)
        elif wishes.end is not None:
            self._ends[partition] = SeqNo(wishes.end.get(partition, SEQ_MAX))
        if wishes.from_now and told is not None and owned:
            self.state.positions.setdefault(partition, Position(told.log, high, high, None))
        self._settled.add(partition)
        return True

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
