"""The consumer's conversation: which streams to ask for, and what the answers come to.

No I/O: it says things through a session, takes in messages, and gives deliveries. One follower
lives through any number of connections to one node. What outlives the node, as partitions may move
to another, is the consumer's `Course`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from upr_protocol.client.core import resume_state
from upr_protocol.client.core.delivery_tracker import Delivery, RollbackRequest, SavePriority
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.results import status_of
from upr_protocol.client.core.retry import is_retryable
from upr_protocol.client.course import Course
from upr_protocol.client.events import (
    AnswersReceived,
    ChunkReceived,
    Completed,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    StreamEnded,
)
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import Position
from upr_protocol.ids import (
    HistoryId,
    PartitionId,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.session import ClientSession, SessionState
from upr_protocol.session.states import StreamState
from upr_protocol.wire import (
    HEADER_BYTES,
    Barrier,
    BarrierReply,
    CloseStream,
    Go,
    Message,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
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


@attrs.frozen
class Stray:
    """A stream that one node does not give, or not any more, and another one may.

    Attributes:
        partition: The partition.
        error: Why.
        map_revision: The revision of the node's partition map, as far as it told.
    """

    partition: PartitionId
    error: ServerError
    map_revision: int


class Follower:
    """Follows the streams of one node.

    Args:
        course: What it has in common with the followers of other nodes.

    Attributes:
        trouble: Why this connection is of no more use; None while it is.
        flowing: Whether this connection has come as far as `Go`.
        connection: Its number.
        mine: The partitions to follow there. Changed by `take_on` and `let_go`.
        strays: The streams that this node did not give. They are let go; whoever finds another
            node for them takes them out of this list.
    """

    def __init__(self, course: Course) -> None:
        self.trouble: ServerError | None = None
        self.flowing = False
        self.connection = 0
        self.mine: set[PartitionId] = set()
        self.strays: list[Stray] = []
        self._course = course
        self._session: ClientSession | None = None
        self._greeting: Handshake | None = None
        self._news = False
        """Whether this connection's answers say anything new of where the streams stand."""
        self._asked: set[PartitionId] = set()
        """Streams of this connection that the server has not answered for yet."""
        self._streaming: set[PartitionId] = set()
        """Those that it gives."""
        self._later: set[PartitionId] = set()
        """Those to be asked for once an earlier stream of theirs has ended."""
        self._covers: dict[bytes, set[PartitionId]] = {}
        """By barrier that was sent on this connection the streams that it is_retryable."""
        # By partition the snapshot that was begun last. The session knows it too, but may be ahead:
        # it takes in all that arrived before any of it comes here.
        self._snapshots: dict[PartitionId, PartitionStart] = {}

    @property
    def done(self) -> bool:
        """Whether every stream ended for good."""
        return self._course.done

    # The conversation.

    def enter(self, greeting: Handshake) -> Iterable[Delivery]:
        """A connection is greeted; comes before `begin`, as it tells which partitions there are.

        Raises:
            ServerError: A partition is wanted that the bucket does not have; or the bucket has
                other partitions than it had.
        """
        reason = "the bucket does not have this partition any more"
        return [
            self._go_back(RollbackRequest(partition, SeqNo(0), reason), SeqNo(0))
            for partition in self._course.enter(greeting)
        ]

    def begin(self, session: ClientSession, greeting: Handshake) -> None:
        """Asks on a new connection for the streams that are still wanted."""
        course = self._course
        self._session = session
        self._greeting = greeting
        self.connection = course.new_connection()
        self.trouble = None
        self.flowing = False
        self._news = False
        for kept in (self._asked, self._streaming, self._later, self._covers):
            kept.clear()
        for partition in sorted(self.mine & course.left):
            self._want(partition)

    def take_on(self, partition: PartitionId) -> None:
        """Follows one more partition, now or with the next connection."""
        if partition in self.mine:
            return
        self.mine.add(partition)
        if self._session is None:
            return
        if partition in self._session.streams:
            self._later.add(partition)
        else:
            self._want(partition)

    def let_go(self, partition: PartitionId) -> None:
        """Follows a partition no more: another node has it."""
        if partition not in self.mine:
            return
        self._leave(partition)
        session = self._session
        if session is None:
            return
        record = session.streams.get(partition)
        if record is not None and record.state in (StreamState.BETWEEN, StreamState.INSIDE):
            session.send(CloseStream(partition=partition, opaque=record.opaque))
        self._go_when_all_answered()

    def _leave(self, partition: PartitionId) -> None:
        self.mine.discard(partition)
        for kept in (self._asked, self._streaming, self._later, *self._covers.values()):
            kept.discard(partition)

    def _want(self, partition: PartitionId) -> None:
        assert self._greeting is not None
        if not self._course.settle(partition, self._greeting):
            reason = (
                f"partition {partition} was not {self._course.wishes.state.name.lower()} on this "
                "node when it was asked for its numbers"
            )
            self._ask_for_numbers_again(reason)
            return
        self._asked.add(partition)
        if partition not in self._course.undoing:
            self._ask(partition)

    def _ask_for_numbers_again(self, reason: str) -> None:
        """Gives the connection up: what a node has is told when it greets, and then only."""
        self.trouble = ServerError(Status.WRONG_STATE, reason)

    def _ask(self, partition: PartitionId) -> None:
        assert self._session is not None
        course = self._course
        position, lease_id = course.state.position(partition), course.wishes.lease_id
        if lease_id:
            # What is leased stays as it is, whatever server and history it is read from: that the
            # reader was cut inside it does not matter.
            reached = position.highest_received
            position = Position(position.log, reached, reached, None)
        self._session.send(
            Stream(
                course.wishes.state,
                position,
                course.end_of(partition),
                lease_id,
                course.wishes.with_answers,
                partition=partition,
                opaque=self._session.new_opaque(),
            )
        )

    def send_barriers(self) -> None:
        """Sends the barriers that have yet to pass this node's streams, when there is a connection
        that streams."""
        if not self.flowing:
            return
        assert self._session is not None
        for cookie in self._course.rounds.cookies_to_send(self._streaming):
            if cookie not in self._covers:
                self._session.send(Barrier(cookie))
                self._covers[cookie] = set(self._streaming)

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
        self._covers.clear()

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
        if isinstance(message, PartitionSnapshot):
            return self._whole(message)
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
            return self._barrier(message)
        if isinstance(message, StreamReply):
            return self._answer(message)
        if isinstance(message, StreamEnd):
            return self._ended(message)
        return ()

    def _move(self, partition: PartitionId, position: Position) -> tuple[PartitionId, Position]:
        self._course.state.positions[partition] = position
        return partition, position

    def _chunk(self, message: PartitionChunk) -> Delivery:
        partition, chunk = message.partition, message.chunk
        snapshot = self._snapshots[partition]
        position = resume_state.chunk_received(
            self._course.state.position(partition), snapshot.history_id, snapshot.end, chunk.end
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

    def _whole(self, message: PartitionSnapshot) -> Iterable[Delivery]:
        partition, chunk = message.partition, message.chunk
        begun = self._snapshots[partition]
        position = self._course.state.position(partition)
        inside = resume_state.chunk_received(position, begun.history_id, chunk.end, chunk.end)
        moved = self._move(partition, inside)
        start = SnapshotStart(
            partition,
            begun.history_id,
            chunk.start,
            chunk.end,
            SnapshotKind.MEMORY,
            False,
            begun.purge_seq,
        )
        return (
            Delivery(start),
            Delivery(
                ChunkReceived(partition, chunk), moved, HEADER_BYTES + chunk.nbytes, self.connection
            ),
            self._end_at(partition, chunk.end),
        )

    def _end(self, message: PartitionEnd) -> Delivery:
        return self._end_at(message.partition, message.end)

    def _end_at(self, partition: PartitionId, end: SeqNo) -> Delivery:
        position = resume_state.snapshot_completed(self._course.state.position(partition), end)
        return Delivery(
            SnapshotEnd(partition, end),
            self._move(partition, position),
            priority=SavePriority.COMPLETE,
        )

    def _barrier(self, message: BarrierReply) -> Iterable[Delivery]:
        rounds = self._course.rounds
        covered = self._covers.pop(message.cookie, set())
        ends = {p: end for p, end in message.ends if p in covered}
        rounds.add_passed(message.cookie, covered, ends)
        back = rounds.close_completed(self._course.left)
        self.send_barriers()  # it may not have passed what came to this node meanwhile
        return [Delivery(event) for event in back]

    def _answer(self, message: StreamReply) -> Iterable[Delivery]:
        partition, course = message.partition, self._course
        status = status_of(message.status)
        if self._is_over(partition):
            if status is not Status.OK:
                self._ask_later(partition)
            elif self._session is not None:
                self._session.send(CloseStream(partition=partition, opaque=message.opaque))
            return ()
        if status is Status.OK and not course.confirm_end(partition, message.log.current):
            reason = f"partition {partition} has another history now than its end was read in"
            self._ask_for_numbers_again(reason)
            return ()
        if status is Status.OK:
            self._asked.discard(partition)
            self._streaming.add(partition)
            before = course.state.position(partition)
            after = resume_state.stream_accepted(before, message.log)
            moved = self._move(partition, after)
            # The first time it is a position that may be nowhere else yet: that of "now".
            self._news |= partition not in course.accepted or after != before
            course.accepted.add(partition)
            # All are written down at once, before any data: none comes before `Go`, but an end that
            # was missing.
            ends = after.last_complete != before.last_complete
            self._go_when_all_answered()
            self.send_barriers()
            news = (self.flowing and self._news) or ends
            self._news = self._news and not self.flowing
            event = StreamAccepted(partition, message.log) if course.wishes.with_logs else None
            priority = SavePriority.URGENT if news else SavePriority.PARTIAL
            deliveries = [Delivery(event, moved, priority=priority)]
            if ends:
                deliveries += _only_the_end(partition, message.log.current, after.last_complete)
            return deliveries
        if status is Status.ROLLBACK and course.state.position(partition).highest_received:
            delivery = self._roll_back(partition, message.seq, message.reason)
            if partition not in course.undoing:
                self._ask(partition)
            return (delivery,)
        error = ServerError(status, f"partition {partition}: {message.reason}")
        self._lose(partition, error, message.map_revision)
        return ()

    def _is_over(self, partition: PartitionId) -> bool:
        """Whether what comes of the stream is of one that was let go."""
        return partition in self._later or partition not in self.mine

    def _ask_later(self, partition: PartitionId) -> None:
        if partition in self._later:
            self._later.discard(partition)
            self._want(partition)

    def _lose(self, partition: PartitionId, error: ServerError, map_revision: int) -> None:
        """The node does not give a stream: it may be elsewhere."""
        if not is_retryable(error):
            self.trouble = error
            return
        self._leave(partition)
        self.strays.append(Stray(partition, error, map_revision))
        self._go_when_all_answered()

    def _roll_back(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> Delivery:
        asked = RollbackRequest(partition, ceiling, reason)
        if self._course.wishes.undoes:
            self._course.undoing[partition] = asked
            return Delivery(asked)
        return self._go_back(asked, SeqNo(0))

    def rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """The application has undone what it was asked to, down to `to`: the stream is asked for
        from there, now or on the next connection.

        Raises:
            ValueError: That is above the ceiling.
        """
        asked = self._course.undone(partition, to)
        delivery = self._go_back(asked, to)
        if self._session is not None and partition in self._asked:
            self._ask(partition)
        return delivery

    def _go_back(self, asked: RollbackRequest, to: SeqNo) -> Delivery:
        partition, course = asked.partition, self._course
        course.rollbacks += 1
        position = resume_state.rolled_back(course.state.position(partition), to)
        event = RolledBack(partition, asked.ceiling, to, asked.reason)
        return Delivery(event, self._move(partition, position), priority=SavePriority.URGENT)

    def _ended(self, message: StreamEnd) -> Iterable[Delivery]:
        partition, status = message.partition, status_of(message.status)
        if self._is_over(partition):
            self._ask_later(partition)
            return ()
        self._streaming.discard(partition)
        if status not in _FOR_GOOD:
            reason = status.name.replace("_", " ").lower()
            error = ServerError(status, f"the stream of partition {partition} ended, {reason}")
            self._lose(partition, error, 0)
            return ()
        course = self._course
        course.finished.add(partition)
        deliveries = [Delivery(StreamEnded(partition, status))]
        if course.left:
            # Barriers may have waited for nothing else.
            deliveries += [Delivery(event) for event in course.rounds.close_completed(course.left)]
        return deliveries

    def _go_when_all_answered(self) -> None:
        if self._asked or self.flowing or self.trouble is not None or self._session is None:
            return
        if self._streaming:
            self._session.send(Go())
            self.flowing = True
            self.send_barriers()


def _only_the_end(partition: PartitionId, history_id: HistoryId, end: SeqNo) -> list[Delivery]:
    """What is told of a snapshot of which only the end was missing."""
    start = SnapshotStart(partition, history_id, end, end, SnapshotKind.MEMORY, False)
    return [Delivery(start), Delivery(SnapshotEnd(partition, end), priority=SavePriority.COMPLETE)]
