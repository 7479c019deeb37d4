"""One partition's stream, as either side follows it."""

from __future__ import annotations

from upr_protocol.errors import ProtocolError, Status
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.session.states import STREAM, StreamInput, StreamState, stream_input
from upr_protocol.wire import Message, PartitionChunk, PartitionEnd, PartitionStart, StreamReply


class StreamRecord:
    """The state of a stream, and the number it has come to.

    It holds the stream to its promise that nothing is omitted: a snapshot begins at the number where
    the stream stands, each chunk begins where the last one ended, and the snapshot ends where it
    said it would.
    """

    __slots__ = ("end", "history_id", "opaque", "partition", "seq", "state")

    def __init__(self, partition: PartitionId, opaque: int) -> None:
        self.partition = partition
        self.opaque = opaque
        self.state = StreamState.ABSENT
        self.seq = SeqNo(0)
        """Everything up to here was streamed."""
        self.end = SeqNo(0)
        """The last snapshot's end, or the end of the one being streamed."""
        self.history_id = HistoryId(0)
        """The history of the last snapshot."""

    def apply(self, message: Message) -> None:
        """Takes in a message about this stream.

        Raises:
            ProtocolError: It is out of turn, or leaves out or repeats numbers.
        """
        given = stream_input(message)
        assert given is not None
        state = STREAM[self.state].get(given)
        if state is None:
            raise ProtocolError(
                f"{type(message).__name__} for partition {self.partition}, where "
                f"{self.state.value}",
                Status.OUT_OF_TURN,
            )
        if given is not StreamInput.REQUEST and message.opaque != self.opaque:
            raise ProtocolError(
                f"{type(message).__name__} for partition {self.partition} has opaque "
                f"{message.opaque}, its stream {self.opaque}"
            )
        if isinstance(message, PartitionChunk):
            chunk = message.chunk
            if chunk.start != self.seq or chunk.end > self.end:
                raise ProtocolError(
                    f"a chunk of ({chunk.start}, {chunk.end}] in partition {self.partition}, "
                    f"which stands at {self.seq} in a snapshot that ends at {self.end}"
                )
            self.seq = chunk.end
        elif isinstance(message, PartitionStart):
            if message.start != self.seq or message.end < message.start:
                raise ProtocolError(
                    f"a snapshot of ({message.start}, {message.end}] in partition "
                    f"{self.partition}, which stands at {self.seq}"
                )
            self.end = message.end
            self.history_id = message.history_id
        elif isinstance(message, PartitionEnd):
            if not message.end == self.end == self.seq:
                raise ProtocolError(
                    f"the snapshot of partition {self.partition} ends at {message.end}, it was to "
                    f"end at {self.end}, and what came ends at {self.seq}"
                )
        elif isinstance(message, StreamReply) and state is StreamState.BETWEEN:
            self.seq = self.end = message.seq
        self.state = state
