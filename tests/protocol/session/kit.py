"""A client's and a server's session that exchange bytes in memory, a sample of every message, and
the full state of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest

from upr_protocol.chunk import Bundle, Chunk, Mutation
from upr_protocol.errors import ADVICE, RemoteProtocolError, Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import (
    Cas,
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.limits import WINDOW_BYTES_DEFAULT
from upr_protocol.session import ClientSession, ServerSession, Session, SessionState
from upr_protocol.session.states import STREAM_INPUTS
from upr_protocol.wire import (
    BEFORE_READY,
    MESSAGES,
    Ack,
    Await,
    AwaitReply,
    Barrier,
    BarrierReply,
    BucketDone,
    ChangeUsers,
    Close,
    CloseStream,
    ContinueLogIn,
    CreateBucket,
    Credit,
    CycleEnd,
    DeleteBucket,
    Error,
    EventsReply,
    FrameBuffer,
    Get,
    GetMap,
    GetReply,
    GetUsers,
    Go,
    Hello,
    HelloReply,
    Join,
    Lease,
    LeaseAction,
    LeaseReply,
    ListBuckets,
    ListBucketsReply,
    ListUsers,
    LoggedIn,
    LogInChallenge,
    MapReply,
    Message,
    Mutate,
    MutateReply,
    NextEvents,
    Noop,
    Open,
    Opened,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionLog,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    ReplicaAck,
    RunResult,
    Seqnos,
    SeqnosAt,
    SeqnosAtReply,
    SeqnosReply,
    SetMap,
    StartLogIn,
    Stats,
    StatsReply,
    Stream,
    StreamEnd,
    StreamReply,
    UsersReply,
    decode,
)

HISTORY: Final = HistoryId(7)
LOG: Final = FailoverLog.of_pairs([(7, 0)])
BEGINNING: Final = Position()

Cut = Callable[[bytes], Iterable[bytes]]
"""How bytes are split on their way."""


def whole(data: bytes) -> Iterable[bytes]:
    """The bytes in one piece."""
    return (data,)


def byte_by_byte(data: bytes) -> Iterable[bytes]:
    """Each byte as a piece of its own."""
    return (data[index : index + 1] for index in range(len(data)))


# Messages that are long to write.


def stored(start: int, end: int, value: bytes = b"v") -> Chunk:
    """A stored chunk that covers (start, end] and has a mutation for each number."""
    rows = [
        Mutation(Operation.SET, b"key-%d" % seq, value, SeqNo(seq))
        for seq in range(start + 1, end + 1)
    ]
    return Chunk.build(rows, SeqNo(start), SeqNo(end))


def published(value: bytes = b"v") -> Chunk:
    """A published chunk of one mutation."""
    return Chunk.build([Mutation(Operation.SET, b"key", value)])


def mutate(partition: int, opaque: int, value: bytes = b"v") -> Mutate:
    """A bundle of one mutation."""
    return Mutate(Bundle.of_one_run(PartitionId(partition), published(value)), opaque=opaque)


def mutate_reply(partition: int, opaque: int, seq: int = 1) -> MutateReply:
    """The reply to it."""
    seq_no = SeqNo(seq)
    result = RunResult(PartitionId(partition), Status.OK, HISTORY, seq_no, seq_no, Cas(seq))
    return MutateReply(0, (result,), opaque=opaque)


def stream(partition: int, opaque: int, position: Position = BEGINNING) -> Stream:
    return Stream(PartitionState.ACTIVE, position, partition=PartitionId(partition), opaque=opaque)


def stream_reply(partition: int, opaque: int, seq: int = 0, status: int = 0) -> StreamReply:
    return StreamReply(
        SeqNo(seq), "", LOG, partition=PartitionId(partition), opaque=opaque, status=status
    )


def start(partition: int, opaque: int, after: int, end: int) -> PartitionStart:
    return PartitionStart(
        HISTORY,
        SeqNo(after),
        SeqNo(end),
        SeqNo(0),
        SnapshotKind.MEMORY,
        False,
        partition=PartitionId(partition),
        opaque=opaque,
    )


def chunk(partition: int, opaque: int, after: int, end: int, value: bytes = b"v") -> PartitionChunk:
    return PartitionChunk(
        stored(after, end, value), partition=PartitionId(partition), opaque=opaque
    )


def snapshot(
    partition: int, opaque: int, after: int, end: int, value: bytes = b"v"
) -> PartitionSnapshot:
    return PartitionSnapshot(
        stored(after, end, value), partition=PartitionId(partition), opaque=opaque
    )


def end(partition: int, opaque: int, seq: int) -> PartitionEnd:
    return PartitionEnd(SeqNo(seq), partition=PartitionId(partition), opaque=opaque)


def close_stream(partition: int, opaque: int) -> CloseStream:
    return CloseStream(partition=PartitionId(partition), opaque=opaque)


def stream_end(partition: int, opaque: int, status: int = 65) -> StreamEnd:
    return StreamEnd(partition=PartitionId(partition), opaque=opaque, status=status)


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "identity": "test:client",
        "versions": (1,),
        "features": 0,
        "window_bytes": WINDOW_BYTES_DEFAULT,
        "idle_interval_s": 20,
    }
    return Hello(**(fields | changes))


def hello_reply(**changes: Any) -> HelloReply:
    fields: dict[str, Any] = {
        "version": 1,
        "features": 0,
        "idle_interval_s": 20,
        "frame_body_bytes_max": 32 * 1024 * 1024,
        "open_barriers_max": 64,
        "requests_open_max": 4096,
        "identity": "test:server",
    }
    return HelloReply(**(fields | changes))


def partition_log(partition: int, opaque: int, status: int = 0) -> PartitionLog:
    return PartitionLog(
        PartitionState.ACTIVE,
        SeqNo(10),
        SeqNo(0),
        SeqNo(0),
        LOG,
        partition=PartitionId(partition),
        opaque=opaque,
        status=status,
    )


OPAQUE: Final = 9
PARTITION: Final = PartitionId(3)
_ABOUT: Final[dict[str, Any]] = {"partition": PARTITION, "opaque": OPAQUE}

SAMPLES: Final[dict[type[Message], Message]] = {
    type(message): message
    for message in (
        hello(),
        hello_reply(),
        StartLogIn("SCRAM-SHA-256", b"first"),
        LogInChallenge(b"challenge"),
        ContinueLogIn(b"response"),
        LoggedIn(b"proof"),
        Error("something", "do something", status=134),
        Open("bucket", (3,), opaque=OPAQUE),
        partition_log(3, OPAQUE),
        Opened(64, 1, opaque=OPAQUE),
        stream(3, OPAQUE),
        stream_reply(3, OPAQUE),
        Go(),
        start(3, OPAQUE, 0, 10),
        chunk(3, OPAQUE, 0, 10),
        snapshot(3, OPAQUE, 10, 20),
        PartitionAnswers(((bytes(16), 1, 10, b"answer"),), **_ABOUT),
        end(3, OPAQUE, 10),
        CycleEnd(1),
        Barrier(b"cookie"),
        BarrierReply(b"cookie", ((PARTITION, SeqNo(10)),)),
        Ack(100),
        Noop(),
        stream_end(3, OPAQUE),
        close_stream(3, OPAQUE),
        Close(),
        mutate(3, OPAQUE),
        mutate_reply(3, OPAQUE),
        Credit(1000),
        Get((b"key",), **_ABOUT),
        GetReply(HISTORY, 1, stored(0, 1), **_ABOUT),
        Seqnos((3,), opaque=OPAQUE),
        SeqnosReply(((3, 7, 10, 0, 0),), opaque=OPAQUE),
        SeqnosAt(5, (3,), opaque=OPAQUE),
        SeqnosAtReply(((3, 7, 10),), opaque=OPAQUE),
        Await(HISTORY, SeqNo(1), 1000, Durability.MEMORY, **_ABOUT),
        AwaitReply(SeqNo(1), **_ABOUT),
        ReplicaAck(((PARTITION, HISTORY, SeqNo(1), SeqNo(1)),)),
        Lease(LeaseAction.ACQUIRE, 0, 60, "test", ((3, 0, 10),), opaque=OPAQUE),
        LeaseReply(1, 60, opaque=OPAQUE),
        CreateBucket("bucket", opaque=OPAQUE),
        DeleteBucket("bucket", opaque=OPAQUE),
        BucketDone(opaque=OPAQUE),
        ListBuckets(opaque=OPAQUE),
        ListBucketsReply((("bucket", 64, 0),), opaque=OPAQUE),
        Stats(opaque=OPAQUE),
        StatsReply("{}", opaque=OPAQUE),
        GetMap("bucket", opaque=OPAQUE),
        Join("bucket", "host:1", opaque=OPAQUE),
        SetMap(0, "{}", opaque=OPAQUE),
        MapReply(0, "", opaque=OPAQUE),
        ListUsers(opaque=OPAQUE),
        ChangeUsers("{}", opaque=OPAQUE),
        GetUsers(opaque=OPAQUE),
        UsersReply(0, opaque=OPAQUE),
        NextEvents("consumer", opaque=OPAQUE),
        EventsReply(0, opaque=OPAQUE),
        Refusal("no", opaque=OPAQUE, status=7),
    )
}
"""One of every message; see `Pair.prepare` for what must come before each."""


def encoded(*messages: Message) -> bytes:
    """The frames of `messages`."""
    return b"".join(bytes(piece) for message in messages for piece in message.frame_buffers())


def frames(data: bytes) -> list[Message]:
    """The messages in `data`, with no check of their order or limits: the reverse of `encoded`."""
    buffer = FrameBuffer(lambda header: None)
    buffer.receive(data)
    messages = []
    while (frame := buffer.next_frame()) is not None:
        messages.append(decode(*frame))
    assert not buffer.is_in_frame
    return messages


def taken(session: Session, now: float = 0.0) -> bytes:
    """Takes the bytes that `session` has to send, in one piece."""
    return b"".join(map(bytes, session.take_outgoing(now)))


LOG_IN_STATES: Final = BEFORE_READY - {SessionState.GREETING, SessionState.GREETED}


class Pair:
    """A client and a server, and the bytes between them.

    `client_sends` and `server_sends` send and deliver at once; `client.send`, `server.send` and
    `deliver` do it in two steps, so that messages can cross.

    Attributes:
        sent: What was sent to each side, as ("client" or "server", message).
        received: What each side's `messages` yielded of it.
    """

    def __init__(
        self,
        *,
        window_bytes: int = WINDOW_BYTES_DEFAULT,
        interval_s: int = 20,
        cut: Cut = whole,
        mechanisms: tuple[str, ...] = (),
    ) -> None:
        self.client = ClientSession(
            "test:client", window_bytes=window_bytes, idle_interval_s=interval_s, now=0.0
        )
        self.server = ServerSession("test:server", now=0.0, mechanisms=lambda: mechanisms)
        self.sent: list[tuple[str, Message]] = []
        self.received: list[tuple[str, Message]] = []
        self.now = 0.0
        self._cut = cut

    def to_server(self) -> list[Message]:
        """Delivers what the client has sent; returns what the server received."""
        return self._carry(self.client, self.server, "server")

    def to_client(self) -> list[Message]:
        """Delivers what the server has sent; returns what the client received."""
        return self._carry(self.server, self.client, "client")

    def deliver(self) -> None:
        """Delivers both ways until nothing is left to send."""
        while self.client.outgoing_bytes or self.server.outgoing_bytes:
            self.to_server()
            self.to_client()

    def _carry(self, sender: Session, receiver: Session, name: str) -> list[Message]:
        messages: list[Message] = []
        data = taken(sender, self.now)
        self.sent += [(name, message) for message in frames(data)]
        for piece in self._cut(data):
            receiver.receive(piece, self.now)
            messages += receiver.messages()
        self.received += [(name, message) for message in messages]
        return messages

    def client_sends(self, *messages: Message) -> list[Message]:
        """Sends from the client and delivers; returns what the server received."""
        for message in messages:
            self.client.send(message)
        return self.to_server()

    def server_sends(self, *messages: Message) -> list[Message]:
        """Sends from the server and delivers; returns what the client received. The turn of a
        partition ends with its snapshot."""
        for message in messages:
            self.server.send(message)
            if isinstance(message, PartitionEnd | PartitionSnapshot):
                self.server.end_turn()
        return self.to_client()

    def turn(self, partition: int) -> None:
        """Gives `partition` its turn."""
        self.server.mark_ready(PartitionId(partition))
        assert self.server.next_partition() == partition
        self.to_client()

    # Conversations up to a point.

    @classmethod
    def in_state(cls, state: SessionState, **options: Any) -> Pair:
        """A pair of which both sides are in `state`. In reality only one side is ever in a state of
        the handshake: the client begins in GREETED, and the server leaves it at once."""
        if state in LOG_IN_STATES:
            options.setdefault("mechanisms", ("SCRAM-SHA-256",))
        pair = cls(**options)
        if state in LOG_IN_STATES:
            pair.deliver()
            if state is not SessionState.UNAUTHENTICATED:
                pair.client_sends(SAMPLES[StartLogIn])
            if state is SessionState.CHALLENGED:
                pair.server_sends(SAMPLES[LogInChallenge])
            assert pair.client.state is pair.server.state is state
            return pair
        if state is SessionState.GREETING:
            taken(pair.client)
            pair.client.state = SessionState.GREETING
            return pair
        if state is SessionState.GREETED:
            taken(pair.client)
            pair.server.state = SessionState.GREETED
            pair.server.hello = hello()
            return pair
        pair.deliver()
        if state is SessionState.READY:
            return pair
        if state is SessionState.CLOSED:
            pair.client_sends(Close())
            return pair
        pair.client_sends(Open("bucket", opaque=OPAQUE))
        if state is SessionState.OPENING:
            return pair
        pair.server_sends(Opened(64, 1, opaque=OPAQUE))
        if state is SessionState.STREAMING:
            pair.client_sends(Go())
            assert pair.server.next_partition() is None
            pair.to_client()
        assert pair.client.state is pair.server.state is state
        return pair

    def accept(self, partition: int, opaque: int) -> None:
        """Opens a stream from the beginning."""
        self.client_sends(stream(partition, opaque))
        self.server_sends(stream_reply(partition, opaque))

    def prepare(self, kind: type[Message]) -> None:
        """Sends what must come before the sample of `kind`, in a state that allows it."""
        request = REQUESTS.get(kind)
        if kind is Mutate or request is Mutate:
            self.server_sends(Credit(1))
        if kind is Refusal and self.client.state is SessionState.OPENING:
            return
        if request is not None:
            self.client_sends(SAMPLES[request])
        elif kind in OF_A_STREAM:
            self.accept(PARTITION, OPAQUE)
            if kind not in {CloseStream, StreamEnd}:
                self.turn(PARTITION)
            if kind in {PartitionChunk, PartitionSnapshot, PartitionAnswers, PartitionEnd, Ack}:
                self.server_sends(start(PARTITION, OPAQUE, 0, 10))
            if kind in {PartitionSnapshot, PartitionEnd, Ack}:
                self.server_sends(chunk(PARTITION, OPAQUE, 0, 10))
            if kind is PartitionSnapshot:
                self.server_sends(end(PARTITION, OPAQUE, 10))
                self.turn(PARTITION)
        elif kind is BarrierReply:
            self.client_sends(Barrier(b"cookie"))


OF_A_STREAM: Final = frozenset(STREAM_INPUTS) - {Stream} | {Ack}
"""Messages that are sent only while there is a stream."""

REQUESTS: Final[dict[type[Message], type[Message]]] = {
    Refusal: Stats,
    **{
        answer: request
        for request in reversed(list(MESSAGES.values()))
        for answer in request.answers
        # `Open`'s answers have a state of their own.
        if request is not Open
    },
}
"""The request for each answer. Of several requests it is the one with the lowest opcode."""


def full_state(session: Session) -> dict[str, Any]:
    """All attributes of a session, except the bytes of a message that has not come completely."""
    attributes: dict[str, Any] = {
        "state": session.state,
        "hello": session.hello,
        "agreed": session.agreed,
        "streams": {
            partition: {name: getattr(record, name) for name in record.__slots__}
            for partition, record in session.streams.items()
        },
        "window": (session.window.remaining_bytes, session.window.used_bytes),
        "credit": (session.credit.remaining_bytes, session.credit.used_bytes),
        "barriers": list(session.barriers),
        "requests": dict(session._requests),
        "outgoing": [bytes(piece) for piece in session._outgoing],
        "outgoing_bytes": session.outgoing_bytes,
    }
    if isinstance(session, ServerSession):
        cycle = session._cycle
        attributes["cycle"] = (
            cycle._ready,
            cycle.current,
            cycle.barrier_position,
            cycle._announced,
        )
        attributes["queue"] = list(session._barrier_queue._queue)
    if isinstance(session, ClientSession):
        attributes["unacknowledged"] = session._unacknowledged
    return attributes


def assert_refused(session: Session, status: Status) -> str:
    """Checks that `session` refuses what it has received with one `Error`, and then sends nothing
    more.

    Returns:
        The sentence of the error.
    """
    with pytest.raises(RemoteProtocolError) as caught:
        list(session.messages())
    assert caught.value.status is status, caught.value
    (error,) = frames(taken(session))
    assert isinstance(error, Error)
    assert (error.status, error.advice) == (status, ADVICE[status])
    assert error.sentence == str(caught.value)
    assert session.state is SessionState.CLOSED
    session.receive(encoded(*SAMPLES.values()), 0.0)
    assert list(session.messages()) == []
    session.fail(Status.INTERNAL, "again")
    assert session.tick(1e9)
    assert taken(session) == b""
    return error.sentence
