"""What both ends of a session have in common: each message, sent or received, is checked and
applied here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import error as StructError
from typing import ClassVar, Final

from construct import ConstructError

from upr_protocol.chunk import Buffer
from upr_protocol.errors import (
    ADVICE,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    Status,
)
from upr_protocol.ids import PartitionId
from upr_protocol.session.context import SessionContext
from upr_protocol.session.rules import RULES
from upr_protocol.session.states import SESSION, SNAPSHOT_MESSAGES, StreamState, state_after_hello
from upr_protocol.session.stream import StreamRecord, out_of_turn_error
from upr_protocol.wire import (
    BEFORE_READY,
    HEADER_BYTES,
    MESSAGES,
    CloseStream,
    Error,
    FrameBuffer,
    Header,
    HelloReply,
    Message,
    Noop,
    Open,
    Refusal,
    Role,
    SessionState,
    Stream,
    StreamReply,
    decode,
)

_OUT_OF_TURN: Final = Status.OUT_OF_TURN

_SENTENCE_MAX: Final = 900
"""Characters of an error's sentence: in any script, with the advice, they fit the frame."""


class Session(SessionContext):
    """One end of a conversation. `ClientSession` and `ServerSession` are the two there are.

    Feed it with `receive` and go through `messages`, handling each before taking the next; queue
    messages with `send`; write what `take_outgoing` returns to the peer. Time comes in as `now`,
    seconds of any monotonic clock.

    Attributes:
        state: How far the conversation has come.
        streams: The streams that are requested, open or closing, by partition.
        outgoing_bytes: What `take_outgoing` would return, in bytes.
    """

    role: ClassVar[Role]
    peer: ClassVar[Role]

    def __init__(self, now: float, allocate: Callable[[int], Buffer] = bytearray) -> None:
        super().__init__(now)
        self.state = SessionState.GREETING
        self.streams: dict[PartitionId, StreamRecord] = {}
        self.outgoing_bytes = 0
        self._requests: dict[int, type[Message]] = {}
        self._frames = FrameBuffer(self._admit, allocate)
        self._outgoing: list[Buffer] = []

    # Outwards.

    def send(self, message: Message) -> None:
        """Queues `message` for `take_outgoing`.

        Raises:
            LocalProtocolError: This side must not say it, or not now, or a value does not fit the
                message's layout. Nothing was queued, and nothing changed.
        """
        kind = type(message)
        try:
            if not kind.sender & self.role:
                raise ProtocolError(f"{kind.__name__} must come from the other side", _OUT_OF_TURN)
            frame = _frame_of(message)
            length = len(frame[0]) if len(frame) == 1 else sum(map(len, frame))
            self._check_length(kind, length - HEADER_BYTES, self.role)
            self._process(message, length)
        except ProtocolError as error:
            raise LocalProtocolError(str(error), error.status) from error
        self._outgoing += frame
        self.outgoing_bytes += length
        self._sent(message)

    def take_outgoing(self, now: float) -> list[Buffer]:
        """What is to be written to the peer, as buffers, one after the other."""
        outgoing, self._outgoing = self._outgoing, []
        self.outgoing_bytes = 0
        if outgoing:
            self.keep_alive.note_sent(now)
        return outgoing

    # Inwards.

    def receive_buffer(self) -> memoryview:
        """Where the next bytes from the peer may be put, to stay there. Often empty."""
        return self._frames.receive_buffer()

    def receive(self, data: bytes, now: float, filled: int = 0) -> None:
        """Receives bytes from the peer: `filled` that were put into `receive_buffer`, and `data`
        after them. Go through all of `messages` before calling it again."""
        self.now = now
        if self.state is not SessionState.CLOSED:
            self.keep_alive.note_received(now)
            self._frames.receive(data, filled)

    def messages(self) -> Iterator[Message]:
        """The messages that are complete, in order. The session's state is the one after the
        message just yielded.

        Raises:
            RemoteProtocolError: The peer broke the protocol. An `Error` that tells it so is queued;
                write it and close the connection.
        """
        return filter(None, self.message_steps())

    def message_steps(self) -> Iterator[Message | None]:
        """The same, with None for each `CloseStream` that is dropped because there is no stream. A
        peer may send thousands together, and others may have their turn after each."""
        while self.state is not SessionState.CLOSED:
            try:
                frame = self._frames.next_frame()
                if frame is None:
                    return
                header, body = frame
                message = decode(header, body)
                if type(message) is CloseStream and message.partition not in self.streams:
                    yield None  # it was sent before our `StreamEnd` arrived
                    continue
                # A dropped message is processed all the same: it has used up the window, and its
                # sequence numbers must follow those before it.
                is_dropped = type(message) in SNAPSHOT_MESSAGES and self._dropped(message)
                self._process(message, HEADER_BYTES + header.length)
            except ProtocolError as error:
                self.fail(error.status, str(error))
                raise RemoteProtocolError(str(error), error.status) from error
            self._received(message)
            if is_dropped:
                self._discard(message)
            else:
                yield message

    def fail(self, status: Status, sentence: str) -> None:
        """Queues an `Error` and ends the session. What has arrived of a frame is forgotten at once:
        the peer may be long in taking the error. Does nothing when the session is over already."""
        if self.state is not SessionState.CLOSED:
            self.send(Error(sentence[:_SENTENCE_MAX], ADVICE.get(status, ""), status=status))
            self.forget_received()

    def forget_received(self) -> None:
        """Forgets what has arrived of a frame. Call it when the connection is over: the session is
        then in no reference cycle. Nothing is to be received after that."""
        self._frames.clear()

    @property
    def buffered(self) -> int:
        """Bytes received that are not yet a whole frame."""
        return self._frames.buffered

    @property
    def has_unread(self) -> bool:
        """Whether bytes have come that are in no message yet. If not, `messages` has no more."""
        return self._frames.is_in_frame

    @property
    def unfinished_frame_bytes(self) -> int:
        """The memory that holds what has arrived of a frame that is not whole, in bytes."""
        return self._frames.held_bytes

    @property
    def unfinished_body_bytes(self) -> int:
        """The length of the frame body that has begun and not ended; 0 between bodies."""
        return self._frames.unfinished_body_bytes

    # Time.

    def tick(self, now: float) -> bool:
        """Says `Noop` when this side was silent for the idle interval; at most once an interval,
        and not while something else waits to be sent. Call it at `keep_alive.next_check()`.

        Returns:
            Whether the peer may still be alive.
        """
        if self.state in BEFORE_READY or self.state is SessionState.CLOSED:
            return True
        if self.keep_alive.is_peer_dead(now):
            return False
        if self.keep_alive.is_noop_due(now):
            self.keep_alive.note_sent(now)
            if not self._outgoing:
                self.send(Noop())
        return True

    # One message: sent or received, it is checked against the tables and the rules, and applied.

    def _admit(self, header: Header) -> None:
        """Refuses a frame by its header, before a byte of its body is kept: a peer that may not say
        it, or says too much, costs no memory."""
        kind = MESSAGES.get(header.opcode)
        if kind is None:
            raise ProtocolError(
                f"no message has opcode {header.opcode:#04x}", Status.UNKNOWN_MESSAGE
            )
        if not kind.sender & self.peer:
            raise ProtocolError(f"{kind.__name__} must come from this side", _OUT_OF_TURN)
        if kind not in SESSION[self.state]:
            raise self._out_of_turn_error(kind)
        self._check_length(kind, header.length, self.peer)

    def _out_of_turn_error(self, kind: type[Message]) -> ProtocolError:
        return ProtocolError(f"{kind.__name__} is out of turn: {self.state.value}", _OUT_OF_TURN)

    def _check_length(self, kind: type[Message], length: int, sender: Role) -> None:
        limit = kind.body_bytes_max
        # What the server says it takes binds the client alone.
        if sender is Role.CLIENT:
            limit = min(limit, self.agreed.frame_body_bytes_max)
        if length > limit:
            raise ProtocolError(
                f"{kind.__name__} of {length} bytes; at most {limit}", Status.FRAME_TOO_LONG
            )

    def _process(self, message: Message, frame_bytes: int) -> None:
        """Checks `message` and applies it. What raises comes first: a message that is refused has
        changed nothing."""
        kind = type(message)
        state = SESSION[self.state].get(kind)
        if state is None:
            raise self._out_of_turn_error(kind)
        rule = RULES[kind]
        if rule.check is not None:
            rule.check(self, message)
        if rule.is_request:
            self._check_request(message)
        elif rule.is_answer:
            self._check_answer(message)
        # The last that may raise, and it changes the stream only if it does not: everything below
        # cannot fail.
        if rule.is_of_stream:
            self._follow(message)
        if rule.effect is not None:
            rule.effect(self, message, frame_bytes)
        if isinstance(message, HelloReply):
            state = state_after_hello(message)
        if rule.is_request:
            self._requests[message.opaque] = kind
        # A stream that was accepted keeps its request's opaque in use until `StreamEnd`.
        elif rule.ends_request and not (kind is StreamReply and message.status == Status.OK):
            del self._requests[message.opaque]
        self.state = state

    def _check_request(self, message: Message) -> None:
        """Checks that a request's opaque is free."""
        if message.opaque in self._requests:
            raise ProtocolError(f"opaque {message.opaque} is still in use", Status.OPAQUE_IN_USE)
        if len(self._requests) >= self.agreed.requests_open_max:
            raise ProtocolError(f"{len(self._requests)} requests are open already", Status.TOO_MANY)
        if isinstance(message, Open) and self._requests:
            # The refusals of two requests with one opaque could not be told apart.
            raise ProtocolError("Open must wait until no other request is open", _OUT_OF_TURN)

    def _check_answer(self, message: Message) -> None:
        """Checks that an answer has a request."""
        request = self._requests.get(message.opaque)
        # What refuses a stream is StreamReply, which says more.
        is_refusal = isinstance(message, Refusal) and request is not Stream
        if request is None or not (is_refusal or type(message) in request.answers):
            raise ProtocolError(
                f"{type(message).__name__} with opaque {message.opaque} answers no open request"
            )

    def _follow(self, message: Message) -> None:
        partition = message.partition
        record = self.streams.get(partition)
        if record is None:
            if not isinstance(message, Stream):
                raise out_of_turn_error(message, StreamState.ABSENT)
            self.streams[partition] = StreamRecord(message)
            return
        record.apply(message)
        if record.state is StreamState.ABSENT:
            del self.streams[partition]

    def _dropped(self, message: Message) -> bool:
        """Whether `message`, of a snapshot, is part of a stream that this side has closed."""
        record = self.streams.get(message.partition)
        return record is not None and record.state is StreamState.CLOSING

    # What the two roles add.

    def _sent(self, message: Message) -> None:
        """Called after `message` was queued."""

    def _received(self, message: Message) -> None:
        """Called after `message` was processed, before it is yielded."""

    def _discard(self, message: Message) -> None:
        """Called instead of yielding a frame of a closed stream."""


def _frame_of(message: Message) -> list[Buffer]:
    try:
        return message.frame_buffers()
    except (ConstructError, StructError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be written: {error}") from error
