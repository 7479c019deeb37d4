"""The consumer's conversation: which streams to ask for, and what the answers come to.

No I/O: it says things through a session, takes in messages, and gives deliveries. One follower
lives through any number of connections, and with it the state from which each of them goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from upr_protocol.client import resume
from upr_protocol.client.delivery import Delivery, RollBackAsked, Weight
from upr_protocol.client.events import (
    AnswersReceived,
    BarrierReached,
    ChunkReceived,
    Completed,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    StreamEnded,
)
from upr_protocol.client.greeting import Greeting
from upr_protocol.client.outcome import status_of
from upr_protocol.client.resume import ResumeState
from upr_protocol.client.wishes import Wishes
from upr_protocol.errors import LocalProtocolError, ServerError, Status
from upr_protocol.failover import Position
from upr_protocol.ids import (
    SEQ_MAX,
    HistoryId,
    PartitionId,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.limits import COOKIE_BYTES_MAX, OPEN_BARRIERS_MAX
from upr_protocol.session import ClientSession, SessionState
from upr_protocol.wire import (
    HEADER_BYTES,
    Barrier,
    BarrierReply,
    Go,
    Message,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionStart,
    ReplicaAck,
    Stream,
    StreamEnd,
    StreamReply,
)
from upr_protocol.wire import Completed as CompletedMessage

_FOR_GOOD: Final = frozenset({Status.END_REACHED, Status.STREAM_CLOSED, Status.BUCKET_DELETED})
"""Why a stream may end without being asked for again."""

PROGRESS: Final = (PartitionChunk, PartitionEnd)
"""What shows that a stream gets somewhere. That a connection is made does not: a server may accept
streams and end them again for ever."""


class Follower:
    """Follows the streams of one bucket.

    Attributes:
        state: How far everything that came goes; the application may have dealt with less.
        done: Whether every stream ended for good.
        trouble: Why this connection is of no more use; None while it is.
        flowing: Whether this connection has come as far as `Go`.
        rollbacks: How many times a partition went back.
        partition_count: How many partitions the bucket has; 0 before the first connection.
    """

    def __init__(self, wishes: Wishes, state: ResumeState) -> None:
        self.state = state
        self.done = False
        self.trouble: ServerError | None = None
        self.flowing = False
        self.rollbacks = 0
        self.connection = 0
        self._wishes = wishes
        self._session: ClientSession | None = None
        self._wanted: tuple[PartitionId, ...] | None = None
        self.partition_count = 0
        self._ends: dict[PartitionId, SeqNo] = {}
        self._finished: set[PartitionId] = set()
        self._accepted: set[PartitionId] = set()
        self._news = False
        """Whether this connection's answers say anything new of where the streams stand."""
        self._asked: set[PartitionId] = set()
        """Streams of this connection that the server has not answered for yet."""
        self._undoing: dict[PartitionId, RollBackAsked] = {}
        """Rollbacks that the application was asked for. Meanwhile nothing of them is asked for, on
        a later connection neither: their positions are about to move."""
        # By partition the snapshot that was begun last. The session knows it too, but may be ahead:
        # it takes in all that arrived before any of it comes here.
        self._snapshots: dict[PartitionId, PartitionStart] = {}
        self._barriers: deque[bytes] = deque()
        """Barriers that did not come back, oldest first."""

    # The conversation.

    def begin(self, session: ClientSession, greeting: Greeting) -> Iterable[Delivery]:
        """A connection is greeted: asks for the streams that are still wanted.

        Raises:
            ServerError: A partition is wanted that the bucket does not have; or the bucket has
                other partitions than it had.
        """
        self._session = session
        self.connection += 1
        self.trouble = None
        self.flowing = False
        self._news = False
        gone: list[Delivery] = []
        if self._wanted is None:
            gone = self._settle(greeting)
            assert self._wanted is not None
        elif greeting.partition_count != self.partition_count:
            raise ServerError(
                Status.HISTORY_CHANGED,
                f"the bucket was made anew, with {greeting.partition_count} partitions instead of "
                f"{self.partition_count}",
            )
        self._asked = {p for p in self._wanted if p not in self._finished}
        for partition in sorted(self._asked - self._undoing.keys()):
            self._ask(partition)
        if not self._asked:
            self.done = True
        return gone

    def _settle(self, greeting: Greeting) -> list[Delivery]:
        """Decides once what the wishes come to in this bucket; gives the rollbacks of partitions
        that it does not have any more."""
        wishes, count = self._wishes, greeting.partition_count
        self.partition_count = count
        wanted = wishes.partitions or tuple(map(PartitionId, range(count)))
        for partition in wanted:
            if partition >= count:
                raise ServerError(
                    Status.BAD_ARGUMENT,
                    f"the bucket has partitions 0 to {count - 1}, not {partition}",
                )
        self._wanted = wanted
        for partition in wanted:
            told = greeting.logs.get(partition)
            owned = told is not None and told.status == Status.OK
            high = told.high_seq if told is not None and owned else SeqNo(0)
            if wishes.end == "now":
                self._ends[partition] = high
            elif isinstance(wishes.end, int):
                self._ends[partition] = SeqNo(wishes.end)
            elif wishes.end is not None:
                self._ends[partition] = SeqNo(wishes.end.get(partition, SEQ_MAX))
            if wishes.from_now and told is not None and owned:
                self.state.positions.setdefault(partition, Position(told.log, high, high, None))
        gone = [] if wishes.partitions else [p for p in self.state.positions if p >= count]
        return [
            self._roll_back(partition, SeqNo(0), "the bucket does not have this partition any more")
            for partition in sorted(gone)
            if self.state.position(partition).highest_received
        ]

    def _ask(self, partition: PartitionId) -> None:
        assert self._session is not None
        position, lease_id = self.state.position(partition), self._wishes.lease_id
        if lease_id:
            # What is leased stays as it is, whatever server and history it is read from: that the
            # reader was cut inside it does not matter.
            reached = position.highest_received
            position = Position(position.log, reached, reached, None)
        self._session.send(
            Stream(
                self._wishes.state,
                position,
                self._ends.get(partition, SEQ_MAX),
                lease_id,
                self._wishes.with_answers,
                partition=partition,
                opaque=self._session.new_opaque(),
            )
        )

    @property
    def open_barriers(self) -> int:
        """Barriers that did not come back."""
        return len(self._barriers)

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier, now or as soon as there is a connection that streams.

        Raises:
            LocalProtocolError: Too many are open, or this one is, or it is too long.
        """
        # Checked here, as it may be sent only later, when nobody is there to be told.
        if not 1 <= len(cookie) <= COOKIE_BYTES_MAX:
            raise LocalProtocolError(f"a cookie is 1 to {COOKIE_BYTES_MAX} bytes")
        if len(self._barriers) >= OPEN_BARRIERS_MAX:
            raise LocalProtocolError(f"{OPEN_BARRIERS_MAX} barriers are open", Status.TOO_MANY)
        if cookie in self._barriers:
            raise LocalProtocolError(f"the barrier {cookie!r} is open", Status.OPAQUE_IN_USE)
        if self.flowing:
            assert self._session is not None
            self._session.send(Barrier(cookie))
        self._barriers.append(cookie)

    def report(self, report: ReplicaAck) -> bool:
        """Sends what a replica has, when there is a connection that takes it.

        Returns:
            Whether there is something to write.
        """
        session = self._session
        if session is None or session.state not in (SessionState.OPEN, SessionState.STREAMING):
            return False
        session.send(report)
        return True

    def disconnected(self) -> None:
        """The connection is gone; what was received stays."""
        self.flowing = False
        self._session = None

    def acknowledge(self, delivery: Delivery) -> bool:
        """The application has dealt with `delivery`: the server may send as much again.

        Returns:
            Whether there may be something to write.
        """
        session = self._session
        if (
            session is None
            or not delivery.nbytes
            or delivery.connection != self.connection
            or session.state is not SessionState.STREAMING
        ):
            return False
        session.acknowledge(delivery.nbytes)
        return True

    # What comes.

    def take(self, message: Message) -> Iterable[Delivery]:
        """Takes in a message of the server; an answer to something else is left alone."""
        if isinstance(message, PartitionChunk):
            return (self._chunk(message),)
        if isinstance(message, PartitionStart):
            return (self._start(message),)
        if isinstance(message, PartitionAnswers):
            return (Delivery(AnswersReceived(message.partition, message.rows)),)
        if isinstance(message, PartitionEnd):
            return (self._end(message),)
        if isinstance(message, CompletedMessage):
            return (Delivery(Completed(message.cycle)),)
        if isinstance(message, BarrierReply):
            if message.cookie in self._barriers:
                self._barriers.remove(message.cookie)
            return (Delivery(BarrierReached(message.cookie, dict(message.ends))),)
        if isinstance(message, StreamReply):
            return self._answer(message)
        if isinstance(message, StreamEnd):
            return self._ended(message)
        return ()

    def _move(self, partition: PartitionId, position: Position) -> tuple[PartitionId, Position]:
        self.state.positions[partition] = position
        return partition, position

    def _chunk(self, message: PartitionChunk) -> Delivery:
        partition, chunk = message.partition, message.chunk
        snapshot = self._snapshots[partition]
        position = resume.received(
            self.state.position(partition), snapshot.history_id, snapshot.end, chunk.end
        )
        return Delivery(
            ChunkReceived(partition, chunk),
            self._move(partition, position),
            HEADER_BYTES + chunk.nbytes,
            self.connection,
        )

    def _start(self, message: PartitionStart) -> Delivery:
        self._snapshots[message.partition] = message
        return Delivery(
            SnapshotStart(
                message.partition,
                message.history_id,
                message.start,
                message.end,
                message.kind,
                message.may_repeat,
                message.purge_seq,
            )
        )

    def _end(self, message: PartitionEnd) -> Delivery:
        partition = message.partition
        position = resume.completed(self.state.position(partition), message.end)
        return Delivery(
            SnapshotEnd(partition, message.end),
            self._move(partition, position),
            weight=Weight.COMPLETE,
        )

    def _answer(self, message: StreamReply) -> Iterable[Delivery]:
        partition = message.partition
        status = status_of(message.status)
        if status is Status.OK:
            self._asked.discard(partition)
            before = self.state.position(partition)
            after = resume.accepted(before, message.log)
            moved = self._move(partition, after)
            # The first time it is a position that may be nowhere else yet: that of "now".
            self._news |= partition not in self._accepted or after != before
            self._accepted.add(partition)
            # All are written down at once, before any data: none comes before `Go`, but an end that
            # was missing.
            ends = after.last_complete != before.last_complete
            news = (self._go_when_all_answered() and self._news) or ends
            event = StreamAccepted(partition, message.log) if self._wishes.with_logs else None
            weight = Weight.HEAVY if news else Weight.LIGHT
            deliveries = [Delivery(event, moved, weight=weight)]
            if ends:
                deliveries += _only_the_end(partition, message.log.current, after.last_complete)
            return deliveries
        if status is Status.ROLLBACK and self.state.position(partition).highest_received:
            delivery = self._roll_back(partition, message.seq, message.reason)
            if partition not in self._undoing:
                self._ask(partition)
            return (delivery,)
        self.trouble = ServerError(status, f"partition {partition}: {message.reason}")
        return ()

    def _roll_back(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> Delivery:
        asked = RollBackAsked(partition, ceiling, reason)
        if self._wishes.undoes:
            self._undoing[partition] = asked
            return Delivery(asked)
        return self._go_back(asked, SeqNo(0))

    def rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """The application has undone what it was asked to, down to `to`: the stream is asked for
        from there, now or on the next connection.

        Raises:
            ValueError: That is above the ceiling.
        """
        asked = self._undoing[partition]
        if not 0 <= to <= asked.ceiling:
            raise ValueError(f"partition {partition} went back to {to}, not to {asked.ceiling}")
        del self._undoing[partition]
        delivery = self._go_back(asked, to)
        if self._session is not None and partition in self._asked:
            self._ask(partition)
        return delivery

    def _go_back(self, asked: RollBackAsked, to: SeqNo) -> Delivery:
        partition = asked.partition
        self.rollbacks += 1
        position = resume.rolled_back(self.state.position(partition), to)
        event = RolledBack(partition, asked.ceiling, to, asked.reason)
        return Delivery(event, self._move(partition, position), weight=Weight.HEAVY)

    def _ended(self, message: StreamEnd) -> Iterable[Delivery]:
        partition, status = message.partition, status_of(message.status)
        if status not in _FOR_GOOD:
            reason = status.name.replace("_", " ").lower()
            self.trouble = ServerError(
                status, f"the stream of partition {partition} ended, {reason}"
            )
            return ()
        self._finished.add(partition)
        assert self._wanted is not None
        if self._finished.issuperset(self._wanted):
            self.done = True
        return (Delivery(StreamEnded(partition, status)),)

    def _go_when_all_answered(self) -> bool:
        if self._asked or self.flowing or self.trouble is not None:
            return False
        assert self._session is not None
        self._session.send(Go())
        self.flowing = True
        for cookie in self._barriers:
            self._session.send(Barrier(cookie))
        return True


def _only_the_end(partition: PartitionId, history_id: HistoryId, end: SeqNo) -> list[Delivery]:
    """What is told of a snapshot of which only the end was missing."""
    start = SnapshotStart(partition, history_id, end, end, SnapshotKind.MEMORY, False)
    return [Delivery(start), Delivery(SnapshotEnd(partition, end), weight=Weight.COMPLETE)]
