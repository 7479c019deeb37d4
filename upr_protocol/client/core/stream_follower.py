"""Which streams a consumer asks one node for, and what the node's answers come to.

No I/O: a follower sends through a session, receives messages, and gives deliveries. It lives
through any number of connections to its node. What outlives the node, because partitions may move
to another, is in the consumer's `SubscriptionState`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from upr_protocol.client.core import resume_state
from upr_protocol.client.core.delivery_tracker import Delivery, RollbackRequest, SavePriority
from upr_protocol.client.core.events import CycleCompleted, StreamAccepted, StreamEnded
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.results import status_of
from upr_protocol.client.core.retry import is_retryable
from upr_protocol.client.core.snapshot_deliveries import SnapshotDeliveries, missing_end_deliveries
from upr_protocol.client.core.subscription import SubscriptionState
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.session import ClientSession, SessionState
from upr_protocol.session.states import SNAPSHOT_MESSAGES, StreamState
from upr_protocol.wire import (
    Barrier,
    BarrierReply,
    CloseStream,
    CycleEnd,
    Go,
    Message,
    PartitionChunk,
    PartitionEnd,
    ReplicaAck,
    Stream,
    StreamEnd,
    StreamReply,
)

_FINAL_STATUSES: Final = frozenset(
    {Status.END_REACHED, Status.STREAM_CLOSED, Status.BUCKET_DELETED}
)
"""Why a stream may end without being requested again."""

PROGRESS_MESSAGES: Final = (PartitionChunk, PartitionEnd)
"""What shows that a stream makes progress. A connection does not: a server may accept streams and
end them again for ever."""


ReplicaReport = tuple[PartitionId, HistoryId, SeqNo, SeqNo]
"""What a replica has of a partition: the history, and in it the last complete snapshot ends that it
has received, and on disk."""


@attrs.frozen
class RefusedStream:
    """A stream that one node does not give, or not any more, and that another node may give; and
    the revision of the node's partition map, 0 if it did not tell."""

    partition: PartitionId
    error: ServerError
    map_revision: int


@attrs.define(eq=False)
class _ConnectionStreams:
    """What has been said on one connection.

    Attributes:
        connection_number: The connection's number, among those of all followers.
        has_sent_go: Whether `Go` was sent: data may come.
        requested_partitions: Streams that the node has yet to answer for.
        partitions_to_reopen: Streams to request once an earlier stream of the partition has ended.
        barriers: By cookie of a barrier that was sent the streams that it passes.
        reports: By partition what a replica has of it, to be sent.
    """

    session: ClientSession
    handshake: Handshake
    connection_number: int
    has_sent_go: bool = False
    requested_partitions: set[PartitionId] = attrs.field(factory=set)
    streaming_partitions: set[PartitionId] = attrs.field(factory=set)
    partitions_to_reopen: set[PartitionId] = attrs.field(factory=set)
    barriers: dict[bytes, set[PartitionId]] = attrs.field(factory=dict)
    reports: dict[PartitionId, ReplicaReport] = attrs.field(factory=dict)

    @property
    def accepts_reports(self) -> bool:
        """Whether a replica may send reports."""
        return self.session.state in (SessionState.OPEN, SessionState.STREAMING)

    def high_seq_of(self, partition: PartitionId) -> SeqNo | None:
        """The highest sequence number that the node told of a partition; None if it did not."""
        told_log = self.handshake.logs.get(partition)
        return None if told_log is None or told_log.status else told_log.high_seq

    def forget(self, partition: PartitionId) -> None:
        """The partition's stream is of no interest any more."""
        for partitions in (
            self.requested_partitions,
            self.streaming_partitions,
            self.partitions_to_reopen,
            *self.barriers.values(),
        ):
            partitions.discard(partition)


class StreamFollower:
    """Follows the streams of one node.

    Args:
        state: What it shares with the followers of other nodes.

    Attributes:
        partitions: The partitions to follow on this node; see `add_partition`.
        failure: Why the connection is of no more use; None while it is.
        refused_streams: Streams that this node refused. The follower has removed them; the code
            that finds another node for them takes them from this list.
    """

    def __init__(self, state: SubscriptionState) -> None:
        self.partitions: set[PartitionId] = set()
        self.failure: ServerError | None = None
        self.refused_streams: list[RefusedStream] = []
        self._state = state
        self._snapshots = SnapshotDeliveries(
            state.resume_state, with_answers=state.subscription.with_answers
        )
        self._connection: _ConnectionStreams | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every stream, of all nodes, has ended for good."""
        return self._state.is_finished

    @property
    def has_streams_to_keep(self) -> bool:
        """Whether the connection goes on when its node refuses a stream: that of a replica which
        has other streams there, or has asked for some. Publishers may wait for its reports."""
        connection = self._connection
        return (
            self._state.subscription.with_answers
            and connection is not None
            and bool(connection.requested_partitions or connection.streaming_partitions)
        )

    # The life of a connection.

    def connection_made(self, session: ClientSession, handshake: Handshake) -> None:
        """Requests the remaining streams on a new connection, once the subscription has learned
        which partitions there are."""
        self.failure = None
        self._connection = _ConnectionStreams(
            session, handshake, self._state.next_connection_number()
        )
        for partition in sorted(self.partitions & self._state.remaining_partitions):
            self._open_stream(self._connection, partition)

    def connection_lost(self) -> None:
        """The connection is lost; what was received stays."""
        self._connection = None

    # Which partitions.

    def add_partition(self, partition: PartitionId) -> None:
        """Follows one more partition, now or on the next connection."""
        if partition in self.partitions:
            return
        self.partitions.add(partition)
        connection = self._connection
        if connection is None:
            return
        if partition in connection.session.streams:
            # It was here before, and its closing is not answered yet.
            connection.partitions_to_reopen.add(partition)
        else:
            self._open_stream(connection, partition)

    def remove_partition(self, partition: PartitionId) -> None:
        """Stops following a partition: another node has it."""
        if partition not in self.partitions:
            return
        self.partitions.discard(partition)
        connection = self._connection
        if connection is None:
            return
        connection.forget(partition)
        session = connection.session
        stream = session.streams.get(partition)
        if stream is not None and stream.state in (StreamState.BETWEEN, StreamState.INSIDE):
            session.send(CloseStream(partition=partition, opaque=stream.opaque))
        self._go_if_all_answered(connection)

    def _open_stream(self, connection: _ConnectionStreams, partition: PartitionId) -> None:
        if not self._state.decide_bounds(partition, connection.handshake):
            log = connection.handshake.logs.get(partition)
            if log is not None and log.status == Status.DAMAGED:
                self.failure = ServerError(
                    Status.DAMAGED, f"the server's copy of partition {partition} is damaged"
                )
                return
            wanted_state = self._state.subscription.state.name.lower()
            self._give_up_connection(
                f"partition {partition} was not {wanted_state} on this node when it was asked for "
                "its numbers"
            )
            return
        connection.requested_partitions.add(partition)
        if partition not in self._state.pending_rollbacks:
            self._request_stream(connection.session, partition)

    def _give_up_connection(self, reason: str) -> None:
        """Has the connection closed and a new one made: only a handshake tells a partition's
        numbers."""
        self.failure = ServerError(Status.WRONG_STATE, reason)

    def _request_stream(self, session: ClientSession, partition: PartitionId) -> None:
        state, subscription = self._state, self._state.subscription
        position = state.resume_state.position(partition)
        if subscription.lease_id:
            # A leased range is the same on any server and in any history, so it does not matter
            # that the reader was cut inside a snapshot.
            highest_received = position.highest_received
            position = Position(position.log, highest_received, highest_received, None)
        session.send(
            Stream(
                subscription.state,
                position,
                state.end_of(partition),
                subscription.lease_id,
                subscription.with_answers,
                subscription.key_prefix,
                partition=partition,
                opaque=session.new_opaque(),
            )
        )

    def _go_if_all_answered(self, connection: _ConnectionStreams) -> None:
        """Has the server send data, once every stream is answered for. So the new logs of all
        streams are saved at once, before any data."""
        if connection.requested_partitions or connection.has_sent_go or self.failure is not None:
            return
        if connection.streaming_partitions:
            connection.session.send(Go())
            connection.has_sent_go = True
            self.send_barriers()

    # What the application has to say.

    def acknowledge(self, delivery: Delivery) -> bool:
        """The application has processed a delivery: the server may send as many bytes again.

        Returns:
            Whether there may be something to write.
        """
        connection = self._connection
        if (
            connection is None
            or not delivery.nbytes
            or delivery.connection_number != connection.connection_number
            or connection.session.state is not SessionState.STREAMING
        ):
            return False
        connection.session.acknowledge(delivery.nbytes)
        return True

    def send_barriers(self) -> None:
        """Sends the barriers that have yet to pass this node's streams, if it streams."""
        connection = self._connection
        if connection is None or not connection.has_sent_go:
            return
        for cookie in self._state.barriers.cookies_to_send(connection.streaming_partitions):
            if cookie not in connection.barriers:
                connection.session.send(Barrier(cookie))
                connection.barriers[cookie] = set(connection.streaming_partitions)

    def report(self, report: ReplicaReport) -> bool:
        """Notes what a replica has of a partition for the next `send_reports`, instead of what was
        noted before; drops it if the connection takes no reports.

        Returns:
            Whether it was noted.
        """
        if self._connection is None or not self._connection.accepts_reports:
            return False
        self._connection.reports[report[0]] = report
        return True

    def send_reports(self) -> None:
        """Sends the reports that were noted, in one message."""
        connection = self._connection
        if connection is not None and connection.reports and connection.accepts_reports:
            connection.session.send(ReplicaAck(tuple(connection.reports.values())))
            connection.reports.clear()

    def note_rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """The application has rolled back to `to`, from where the stream is requested now, or on
        the next connection.

        Raises:
            ValueError: `to` is above the ceiling.
        """
        delivery = self._state.roll_back(self._state.finish_rollback(partition, to), to)
        connection = self._connection
        if connection is not None and partition in connection.requested_partitions:
            self._request_stream(connection.session, partition)
        return delivery

    # What the server has to say.

    def receive(self, message: Message) -> Iterable[Delivery]:
        """Receives a message; ignores answers to other requests."""
        connection = self._connection
        assert connection is not None
        if type(message) in SNAPSHOT_MESSAGES:
            deliveries = self._snapshots.receive(message, connection.connection_number)
            if message.partition in self._state.unsaved_logs:
                # The last answer before `Go` was a refusal; or the log came over a connection that
                # was lost before its `Go`, and is not new on this one.
                self._state.unsaved_logs.clear()
                return (Delivery(None, priority=SavePriority.URGENT), *deliveries)
            return deliveries
        if isinstance(message, CycleEnd):
            return (Delivery(CycleCompleted(message.cycle)),)
        if isinstance(message, BarrierReply):
            return self._barrier_returned(connection, message)
        if isinstance(message, StreamReply):
            return self._stream_answered(connection, message)
        if isinstance(message, StreamEnd):
            return self._stream_ended(connection, message)
        return ()

    def _barrier_returned(
        self, connection: _ConnectionStreams, message: BarrierReply
    ) -> Iterable[Delivery]:
        barriers = self._state.barriers
        # Only the streams that were open when the barrier was sent: it passed no others.
        passed_partitions = connection.barriers.pop(message.cookie, set())
        ends = {partition: end for partition, end in message.ends if partition in passed_partitions}
        barriers.add_passed(message.cookie, passed_partitions, ends)
        completed_barriers = barriers.close_completed(self._state.remaining_partitions)
        # The barrier may have yet to pass partitions that came to this node meanwhile.
        self.send_barriers()
        return [Delivery(event) for event in completed_barriers]

    def _stream_answered(
        self, connection: _ConnectionStreams, message: StreamReply
    ) -> Iterable[Delivery]:
        partition, status = message.partition, status_of(message.status)
        if self._is_removed(connection, partition):
            # The stream was removed before its answer came. If the server accepted it, it must be
            # closed first, and `StreamEnd` reopens it.
            if status is not Status.OK:
                self._reopen(connection, partition)
            else:
                connection.session.send(CloseStream(partition=partition, opaque=message.opaque))
            return ()
        if status is Status.OK:
            return self._stream_accepted(connection, message)
        # A client that has received nothing cannot roll back; to ask again would not help.
        if (
            status is Status.ROLLBACK
            and self._state.resume_state.position(partition).highest_received
        ):
            return (self._rollback_ordered(connection, message),)
        error = ServerError(status, f"partition {partition}: {message.reason}")
        self._stream_refused(connection, partition, error, message.map_revision)
        return ()

    def _stream_accepted(
        self, connection: _ConnectionStreams, message: StreamReply
    ) -> Iterable[Delivery]:
        partition, log, state = message.partition, message.log, self._state
        if not state.confirm_end(partition, log.current):
            self._give_up_connection(
                f"partition {partition} is in another history than its end was read in"
            )
            return ()
        connection.requested_partitions.discard(partition)
        connection.streaming_partitions.add(partition)
        old_position = state.resume_state.position(partition)
        new_position = resume_state.position_after_acceptance(old_position, log)
        state.resume_state.positions[partition] = new_position
        # The first time the position itself may be new to the application: that of "now".
        if partition not in state.accepted_partitions or new_position != old_position:
            state.unsaved_logs.add(partition)
        state.accepted_partitions.add(partition)
        self._go_if_all_answered(connection)
        self.send_barriers()
        # The last answer before `Go` has the logs of all streams saved, before any data. Only a
        # snapshot's missing end comes before `Go`: it has its own log saved.
        has_missing_end = new_position.last_complete != old_position.last_complete
        is_urgent = has_missing_end or (connection.has_sent_go and bool(state.unsaved_logs))
        if connection.has_sent_go:
            state.unsaved_logs.clear()
        event = None
        if state.subscription.with_logs:
            event = StreamAccepted(partition, log, connection.high_seq_of(partition))
        priority = SavePriority.URGENT if is_urgent else SavePriority.PARTIAL
        deliveries = [Delivery(event, (partition, new_position), priority=priority)]
        if has_missing_end:
            deliveries += missing_end_deliveries(partition, log.current, new_position.last_complete)
        return deliveries

    def _rollback_ordered(self, connection: _ConnectionStreams, message: StreamReply) -> Delivery:
        request = RollbackRequest(message.partition, message.seq, message.reason)
        self._state.barriers.forget_passed(request.partition)
        if self._state.subscription.has_undo:
            self._state.pending_rollbacks[request.partition] = request
            return Delivery(request)
        delivery = self._state.roll_back(request, SeqNo(0))
        self._request_stream(connection.session, request.partition)
        return delivery

    def _stream_ended(
        self, connection: _ConnectionStreams, message: StreamEnd
    ) -> Iterable[Delivery]:
        partition, status = message.partition, status_of(message.status)
        if self._is_removed(connection, partition):
            self._reopen(connection, partition)
            return ()
        connection.streaming_partitions.discard(partition)
        if status not in _FINAL_STATUSES:
            reason = status.name.replace("_", " ").lower()
            error = ServerError(status, f"the stream of partition {partition} ended, {reason}")
            self._stream_refused(connection, partition, error, 0)
            return ()
        state = self._state
        state.remaining_partitions.discard(partition)
        deliveries = [Delivery(StreamEnded(partition, status))]
        if state.remaining_partitions:
            # Barriers may have waited for this stream and no other.
            completed_barriers = state.barriers.close_completed(state.remaining_partitions)
            deliveries += [Delivery(event) for event in completed_barriers]
        return deliveries

    def _is_removed(self, connection: _ConnectionStreams, partition: PartitionId) -> bool:
        """Whether a message belongs to a stream that this follower has removed."""
        return partition in connection.partitions_to_reopen or partition not in self.partitions

    def _reopen(self, connection: _ConnectionStreams, partition: PartitionId) -> None:
        if partition in connection.partitions_to_reopen:
            connection.partitions_to_reopen.discard(partition)
            self._open_stream(connection, partition)

    def _stream_refused(
        self,
        connection: _ConnectionStreams,
        partition: PartitionId,
        error: ServerError,
        map_revision: int,
    ) -> None:
        if not is_retryable(error):
            self.failure = error
            return
        self.partitions.discard(partition)
        connection.forget(partition)
        self.refused_streams.append(RefusedStream(partition, error, map_revision))
        self._go_if_all_answered(connection)
