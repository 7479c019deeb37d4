"""One partition's stream, as either side follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from upr_protocol.chunk import Chunk
from upr_protocol.errors import ProtocolError, Status
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.session.states import STREAM, StreamInput, StreamState, stream_input
from upr_protocol.wire import (
    Message,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
    Stream,
    StreamReply,
)

# An enum's attributes are slow to look up.
_BETWEEN: Final = StreamState.BETWEEN
_INSIDE: Final = StreamState.INSIDE


class StreamRecord:
    """The state of a stream, and the sequence number that it has reached.

    It holds the stream to its promise that nothing is omitted or repeated: it goes on where the
    client stands, a snapshot begins at the number where the stream stands, each chunk begins where
    the last one ended, and the snapshot ends where it said it would.

    A snapshot that was begun must be finished: the client may have been spared a key's older change
    because a newer one stood further on. So what takes its place, after a dropped cursor or a lost
    connection, must not end before it.

    Attributes:
        partition: The partition.
        opaque: The opaque of the `Stream` that asked for it.
        state: The state.
        seq: Everything up to here was streamed.
        end: The end of the snapshot that is being streamed, or that must still be finished; when
            there is none, that of the last one.
        complete: The last number at which the client is consistent.
        history_id: The history of the last snapshot.
    """

    __slots__ = ("complete", "end", "history_id", "opaque", "partition", "seq", "state")

    def __init__(self, request: Stream) -> None:
        self.partition: PartitionId = request.partition
        self.opaque: int = request.opaque
        self.state = StreamState.REQUESTED
        # What the client has, until the server answers.
        position = request.position
        self.seq: SeqNo = position.highest_received
        self.end: SeqNo = position.partial.end if position.partial else position.last_complete
        self.complete: SeqNo = position.last_complete
        self.history_id = HistoryId(0)

    def apply(self, message: Message) -> None:
        """Takes in a message about this stream. O(1).

        Raises:
            ProtocolError: It is out of turn, or skips or repeats sequence numbers. Nothing changed.
        """
        happened = stream_input(message)
        assert happened is not None
        state = STREAM[self.state].get(happened)
        if state is None:
            raise out_of_turn_error(message, self.state)
        if message.opaque != self.opaque:
            raise ProtocolError(
                f"{type(message).__name__} for partition {self.partition} has opaque "
                f"{message.opaque}, its stream {self.opaque}"
            )
        handle = self._HANDLERS.get(happened)
        if handle is not None:
            handle(self, message)
        self.state = state

    def takes_whole(self, chunk: Chunk) -> bool:
        """Whether `apply` would take a `PartitionSnapshot` of `chunk`, and the stream was not
        closed. O(1)."""
        return (
            self.state is _BETWEEN
            and self.history_id != 0
            and chunk.start == self.seq
            and chunk.end >= self.end
        )

    def takes_chunk(self, chunk: Chunk) -> bool:
        """Whether `apply` would take a `PartitionChunk` of `chunk`, and the stream was not closed.
        O(1)."""
        return self.state is _INSIDE and chunk.start == self.seq and chunk.end <= self.end

    def _accept(self, message: StreamReply) -> None:
        if message.seq != self.seq:
            # If it were lower, the client would apply older values, and its position could not say
            # so: after a crash in between it would keep them.
            raise ProtocolError(
                f"the stream of partition {self.partition} continues at {message.seq}, but the "
                f"client has received everything up to {self.seq}"
            )
        if self.seq >= self.end:
            # The connection broke between the last chunk and the end: nothing of that snapshot is
            # missing.
            self.complete = self.seq
        if self.seq <= self.complete:
            # The client has received nothing of an unfinished snapshot, and was spared nothing.
            self.end = self.seq

    def _refuse(self, message: StreamReply) -> None:
        # A client that went "back" to a higher number would miss what lies between.
        if message.status == Status.ROLLBACK and message.seq >= self.seq > 0:
            raise ProtocolError(
                f"the client is to roll back partition {self.partition} to {message.seq}, but it "
                f"has received only what is up to {self.seq}"
            )

    def _start(self, message: PartitionStart) -> None:
        if message.start != self.seq or message.end < self.end:
            raise ProtocolError(
                f"snapshot ({message.start}, {message.end}] of partition {self.partition} must "
                f"start at {self.seq} and end at {self.end} or above"
            )
        self.end = message.end
        self.history_id = message.history_id

    def _chunk(self, message: PartitionChunk) -> None:
        chunk = message.chunk
        if chunk.start != self.seq or chunk.end > self.end:
            raise ProtocolError(
                f"chunk ({chunk.start}, {chunk.end}] of partition {self.partition} must start at "
                f"{self.seq} and end at {self.end} or below"
            )
        self.seq = chunk.end

    def _whole(self, message: PartitionSnapshot) -> None:
        chunk = message.chunk
        if not self.history_id:
            raise ProtocolError(
                f"PartitionSnapshot of partition {self.partition} before any PartitionStart, which "
                "names the history"
            )
        if chunk.start != self.seq or chunk.end < self.end:
            raise ProtocolError(
                f"snapshot ({chunk.start}, {chunk.end}] of partition {self.partition} must start "
                f"at {self.seq} and end at {self.end} or above"
            )
        self.seq = self.end = self.complete = chunk.end

    def _finish(self, message: PartitionEnd) -> None:
        if not message.end == self.end == self.seq:
            raise ProtocolError(
                f"PartitionEnd of partition {self.partition} names {message.end}; the snapshot was "
                f"to end at {self.end}, and its chunks end at {self.seq}"
            )
        self.complete = message.end

    _HANDLERS: ClassVar[Mapping[StreamInput, Callable[[StreamRecord, Any], None]]] = {
        StreamInput.ACCEPT: _accept,
        StreamInput.REFUSE: _refuse,
        StreamInput.START: _start,
        StreamInput.CHUNK: _chunk,
        StreamInput.WHOLE: _whole,
        StreamInput.END: _finish,
    }


def out_of_turn_error(message: Message, state: StreamState) -> ProtocolError:
    """The error for a message that a stream in `state` does not allow."""
    return ProtocolError(
        f"{type(message).__name__} for partition {message.partition} is out of turn: {state.value}",
        Status.OUT_OF_TURN,
    )
