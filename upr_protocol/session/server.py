"""The server's end of a session: it also keeps the partition cycle and its barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

import attrs

from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.errors import LocalProtocolError, Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, OPEN_BARRIERS_MAX, REQUESTS_OPEN_MAX
from upr_protocol.session.barrier_queue import BarrierQueue
from upr_protocol.session.partition_cycle import EndOfCycle, PartitionCycle
from upr_protocol.session.session import Session
from upr_protocol.session.states import SNAPSHOT_MESSAGES, StreamState
from upr_protocol.wire import (
    HEADER_BYTES,
    RESULT_BYTES,
    VERSION,
    Barrier,
    BarrierReply,
    CloseStream,
    Hello,
    HelloReply,
    Message,
    Mutate,
    MutateReply,
    PartitionChunk,
    PartitionSnapshot,
    PartitionStart,
    Role,
    SessionState,
    SetFrames,
    StreamEnd,
    StreamEnds,
    chunk_frame,
    cycle_end_frame,
    decode_results,
    encode_reply,
    encode_set_replies,
    read_sets,
)

_DATA_STATES: Final = frozenset(Mutate.states)

# An enum's attributes are slow to look up.
_STREAMING: Final = SessionState.STREAMING
_INSIDE: Final = StreamState.INSIDE
_ACCEPTED: Final = (StreamState.BETWEEN, StreamState.INSIDE)


@attrs.frozen
class SessionStatistics:
    """What a server session can tell about itself.

    Attributes:
        state: How far the conversation has come.
        streams: Streams requested, open or closing.
        window_used: Bytes of stream frames that are not acknowledged.
        credit_left: Bytes of `Mutate` frames that the client may still send.
        barriers: Barriers open.
        cycles: Cycles completed.
    """

    state: SessionState
    streams: int
    window_used: int
    credit_left: int
    barriers: int
    cycles: int


class ServerSession(Session):
    """The side that listens. It answers `Hello` by itself, and brings barriers back by itself while
    `next_partition` is called.

    Args:
        identity: The server's own.
        now: The time.
        allocate: Gives so many writable bytes for a body; see `FrameBuffer`.
        mechanisms: Gives the ways to log in when the client has said `Hello`; none if there is no
            need to.
    """

    role: ClassVar[Role] = Role.SERVER
    peer: ClassVar[Role] = Role.CLIENT

    def __init__(
        self,
        identity: str,
        *,
        now: float,
        allocate: Callable[[int], Buffer] = bytearray,
        mechanisms: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        super().__init__(now, allocate)
        self._identity = identity
        self._mechanisms = mechanisms
        self._cycle = PartitionCycle()
        self._barrier_queue = BarrierQueue()

    @property
    def client_identity(self) -> str:
        """What the client calls itself; empty before its `Hello`."""
        return self.hello.identity if self.hello else ""

    def send(self, message: Message) -> None:
        """Queues `message` for `take_outgoing`. Only the partition whose turn it is sends a
        snapshot.

        Raises:
            LocalProtocolError: This side must not say it, or not now. Nothing was queued.
        """
        if type(message) in SNAPSHOT_MESSAGES and message.partition != self._cycle.current:
            raise LocalProtocolError(
                f"{type(message).__name__} for partition {message.partition} out of its turn; "
                f"current turn: {self._cycle.current}",
                Status.OUT_OF_TURN,
            )
        super().send(message)

    def send_snapshot(self, partition: PartitionId, chunk: Chunk) -> None:
        """Queues the `PartitionSnapshot` of `chunk`, as `send` would, at a third of the cost: a
        consumer that keeps up gets one for nearly every change. The partition has a stream.

        Raises:
            LocalProtocolError: As for `send`.
        """
        record = self.streams[partition]
        if not (self._may_send_rows(partition, chunk) and record.takes_whole(chunk)):
            # `send` says what is wrong.
            self.send(PartitionSnapshot(chunk, partition=partition, opaque=record.opaque))
            return
        record.seq = record.end = record.complete = chunk.end
        self._queue_rows(
            chunk_frame(PartitionSnapshot, chunk, partition, record.opaque), chunk.nbytes
        )
        self._cycle.begin_snapshot()

    def send_chunk(self, partition: PartitionId, chunk: Chunk) -> None:
        """Queues the `PartitionChunk` of `chunk`, as `send` would, at a third of the cost. The
        partition has a stream.

        Raises:
            LocalProtocolError: As for `send`.
        """
        record = self.streams[partition]
        if not (self._may_send_rows(partition, chunk) and record.takes_chunk(chunk)):
            # `send` says what is wrong.
            self.send(PartitionChunk(chunk, partition=partition, opaque=record.opaque))
            return
        record.seq = chunk.end
        self._queue_rows(chunk_frame(PartitionChunk, chunk, partition, record.opaque), chunk.nbytes)

    def _may_send_rows(self, partition: PartitionId, chunk: Chunk) -> bool:
        """Whether `send` would take a frame with `chunk`, as far as the stream's own state does not
        matter."""
        return (
            self.state is _STREAMING
            and partition == self._cycle.current
            and self.window.remaining_bytes > 0
            and chunk.nbytes <= FRAME_BODY_BYTES_MAX
        )

    def _queue_rows(self, frame: tuple[bytes, memoryview], body_bytes: int) -> None:
        """Queues a frame that takes from the client's window."""
        self._outgoing += frame
        self.outgoing_bytes += HEADER_BYTES + body_bytes
        self.window.note_sent(HEADER_BYTES + body_bytes)

    # Single operations, many at a time.

    def read_sets(self, partition_count: int) -> SetFrames | None:
        """The frames that come next, if the first of them publishes one plain `SET` and may come
        now; None otherwise. No more of them than may come now, one answered after the other.

        Nothing changes. Answer some of them, from the first on, with `answer_sets`; what is not
        answered comes out of `messages`.

        Args:
            partition_count: How many partitions the bucket has.
        """
        requests = self._requests
        if (
            self.state not in _DATA_STATES
            or self.credit.remaining_bytes <= 0
            or len(requests) >= self.agreed.requests_open_max
        ):
            return None
        sets = read_sets(*self._frames.received_bytes(), partition_count)
        if sets is None:
            return None
        count = frame_count = sets.frame_count
        # A frame may begin while any credit is left: the last one may exceed it.
        while count > 1 and sets.nbytes(count - 1) >= self.credit.remaining_bytes:
            count -= 1
        if requests:
            opaques = memoryview(sets.opaques).cast("I")
            in_use = (row for row in range(count) if opaques[row] in requests)
            count = next(in_use, count)
        if count == frame_count:
            return sets
        return sets.first(count) if count else None

    def answer_sets(self, sets: SetFrames, lines: bytes) -> None:
        """Takes the first frames of `sets`, as many as there are lines, and queues the answers.

        Args:
            sets: What `read_sets` returned last. Nothing was received or taken since.
            lines: What became of the frames, in their order, as lines of `MutateReply`; at least
                one. All succeeded.
        """
        nbytes = sets.nbytes(len(lines) // RESULT_BYTES)
        self._frames.skip_frames(nbytes)
        self.credit.note_sent(nbytes)
        replies = encode_set_replies(sets, lines)
        self._outgoing.append(replies)
        self.outgoing_bytes += len(replies)

    def answer_bundle(self, opaque: int, lines: bytes) -> None:
        """Queues the `MutateReply` of a bundle of which every run succeeded, as `send` would,
        without an object for each run.

        Args:
            opaque: The request's opaque.
            lines: What became of the runs, as lines of the message.

        Raises:
            LocalProtocolError: As for `send`.
        """
        if self.state not in _DATA_STATES or self._requests.get(opaque) is not Mutate:
            # `send` says what is wrong.
            self.send(MutateReply(0, tuple(decode_results(lines)), opaque=opaque))
            return
        del self._requests[opaque]
        reply = encode_reply(opaque, lines)
        self._outgoing.append(reply)
        self.outgoing_bytes += len(reply)

    # Streaming.

    def opaque_of(self, partition: PartitionId) -> int:
        """The opaque of `partition`'s stream."""
        return self.streams[partition].opaque

    def mark_ready(self, partition: PartitionId) -> None:
        """`partition` has something to send. Ignored when it is not streamed."""
        record = self.streams.get(partition)
        if record is not None and record.state in _ACCEPTED:
            self._cycle.mark_ready(partition)

    def next_partition(self) -> PartitionId | None:
        """The partition whose changes are to be sent now, after queueing the `CycleEnd` and the
        barriers that come before it. None when nothing is to be streamed: then every barrier came
        back.

        The turn lasts until `end_turn`, or until the partition's `StreamEnd` is sent or its
        `CloseStream` is received. A barrier that arrived before the turn trusts that it leads to
        the newest number the partition had when it began: where that takes several snapshots, send
        them all. Call this again after each turn, and whenever a partition is ready or a barrier
        came: one that finds nothing to stream comes back here.
        """
        if self.state is not _STREAMING:
            return None
        while True:
            turn = self._cycle.next_turn()
            if turn is None:
                # Every stream has reached its newest number, so every barrier has been reached too.
                if self.barriers:
                    self._return_barriers(self._barrier_queue.take_all())
                return None
            if self.barriers:
                self._return_due()
            if not isinstance(turn, EndOfCycle):
                return turn
            # Nothing but the session's state says whether it may be sent.
            frame = cycle_end_frame(turn.cycle)
            self._outgoing.append(frame)
            self.outgoing_bytes += len(frame)

    def end_turn(self) -> None:
        """The partition whose turn it is has nothing more to send, or nothing after all. When no
        partition has the turn, because its stream was closed, this does nothing.

        Raises:
            LocalProtocolError: Its snapshot has begun and not ended.
        """
        partition = self._cycle.current
        if partition is None:
            return
        if self.streams[partition].state is _INSIDE:
            raise LocalProtocolError(
                f"partition {partition} keeps its turn until its snapshot ends",
                Status.OUT_OF_TURN,
            )
        self._cycle.finish_turn()
        if self.barriers:
            self._return_due()

    @property
    def snapshot_ends(self) -> tuple[tuple[PartitionId, SeqNo], ...]:
        """For each stream that was accepted and not closed, the last sequence number at which the
        client is consistent."""
        return tuple(
            (record.partition, record.complete)
            for record in self.streams.values()
            if record.state in _ACCEPTED
        )

    def _return_due(self) -> None:
        self._return_barriers(self._barrier_queue.take_due(self._cycle.passed_position))

    def _return_barriers(self, cookies: list[bytes]) -> None:
        if cookies:
            ends = StreamEnds(self.snapshot_ends)
            for cookie in cookies:
                self.send(BarrierReply(cookie, ends))

    # Hooks.

    def _sent(self, message: Message) -> None:
        kind = type(message)
        if kind is PartitionSnapshot or kind is PartitionStart:
            self._cycle.begin_snapshot()
        elif kind is StreamEnd:
            self._leave(message.partition)

    def _received(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, Barrier):
            self._barrier_queue.add_barrier(message.cookie, self._cycle.barrier_position)
        elif isinstance(message, CloseStream):
            self._leave(message.partition)

    def _leave(self, partition: PartitionId) -> None:
        # If it had the turn, the cycle has passed it now, and barriers may be due.
        self._cycle.remove(partition)
        self._return_due()

    def _greet(self, hello: Hello) -> None:
        self.send(
            HelloReply(
                VERSION,
                0,
                hello.idle_interval_s,
                FRAME_BODY_BYTES_MAX,
                OPEN_BARRIERS_MAX,
                REQUESTS_OPEN_MAX,
                self._identity,
                self._mechanisms(),
            )
        )

    def statistics(self) -> SessionStatistics:
        """What the session can tell about itself."""
        return SessionStatistics(
            self.state,
            len(self.streams),
            self.window.used_bytes,
            self.credit.remaining_bytes,
            len(self.barriers),
            self._cycle.completed,
        )
