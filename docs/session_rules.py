"""What a session accepts and what it closes the connection for, at the edges of each rule.

Each case is played to a session, and the outcome is what that does. So a rule that changes changes
docs/vectors/session_rules.json, and `make check` says so. The file has the bytes of every message,
so that a client in another language can play the cases, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias

import attrs
import msgspec

from upr_protocol.chunk import Bundle, Chunk, Mutation
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.failover import NOTHING_YET, FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import (
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.limits import (
    COOKIE_BYTES_MAX,
    FRAME_BODY_BYTES_MAX,
    HANDSHAKE_BODY_BYTES_MAX,
    IDENTITY_BYTES_MAX,
    IDLE_INTERVAL_S_MAX,
    IDLE_INTERVAL_S_MIN,
    OPEN_BARRIERS_MAX,
    REQUESTS_OPEN_MAX,
    WINDOW_BYTES_MIN,
)
from upr_protocol.session import ClientSession, ServerSession
from upr_protocol.wire import (
    VERSION,
    Ack,
    Barrier,
    BarrierReply,
    CloseStream,
    Credit,
    FrameBuffer,
    Get,
    Go,
    Hello,
    HelloReply,
    Message,
    Mutate,
    Open,
    Opened,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    StartLogIn,
    Stats,
    StatsReply,
    Stream,
    StreamEnd,
    StreamReply,
    decode,
)

Json: TypeAlias = dict[str, object]

CLIENT: Final = "client"
SERVER: Final = "server"
SCRAM: Final = "SCRAM-SHA-256"
FRAME_BYTES_SHOWN: Final = 1024
"""A longer frame ends with one byte many times. The file has that byte once."""

REPEATED_MIN: Final = 8
"""So many messages of one type in a row are one entry with `times`."""

HISTORY: Final = HistoryId(7)
LOG: Final = FailoverLog.of_pairs([(7, 0)])
P0: Final = PartitionId(0)
OF_STREAM: Final[dict[str, Any]] = {"partition": P0, "opaque": 2}


@attrs.frozen
class Case:
    """Messages of which the last is accepted, or not.

    Attributes:
        rule: What is tried.
        messages: Each with who sends it. The last one's receiver judges it.
        mechanisms: The ways to log in that the server offers.
    """

    rule: str
    messages: tuple[tuple[str, Message], ...]
    mechanisms: tuple[str, ...] = ()

    def outcome(self) -> str:
        """`accepted`, or the status of the error with which the connection closes."""
        sender = self.messages[-1][0]
        session: ClientSession | ServerSession
        if sender == CLIENT:
            session = ServerSession("test:server", now=0.0, mechanisms=lambda: self.mechanisms)
        else:
            session = ClientSession("test:client", window_bytes=WINDOW_BYTES_MIN, now=0.0)
        for position, (message_sender, message) in enumerate(self.messages, 1):
            is_last = position == len(self.messages)
            if message_sender != sender:
                # A client greets by itself, and a server answers that.
                if not isinstance(message, Hello | HelloReply):
                    if isinstance(session, ServerSession) and isinstance(message, PartitionStart):
                        session.mark_ready(P0)
                        session.next_partition()
                    session.send(message)
                continue
            try:
                session.receive(_frame(message), 0.0)
                list(session.messages())
            except RemoteProtocolError as error:
                if not is_last:
                    raise
                return error.status.name
        return "accepted"

    def as_json(self) -> Json:
        """The case, and what came of it."""
        sender, last_message = self.messages[-1]
        runs = groupby(self.messages[:-1], lambda entry: (entry[0], type(entry[1])))
        return {
            "rule": self.rule,
            "before": [entry for _, run in runs for entry in _run_entries(list(run))],
            **_entry(sender, last_message),
            "outcome": self.outcome(),
        }


def _frame(message: Message) -> bytes:
    return b"".join(map(bytes, message.frame_buffers()))


def _run_entries(run: Sequence[tuple[str, Message]]) -> list[Json]:
    """Messages of one type in a row: each by itself, or the first of many with their number."""
    if len(run) < REPEATED_MIN:
        return [_entry(sender, message) for sender, message in run]
    assert [message for _, message in run] == _successors(run[0][1], len(run))
    return [{**_entry(*run[0]), "times": len(run)}]


def _entry(sender: str, message: Message) -> Json:
    frame = _frame(message)
    entry: Json = {"from": sender, "message": type(message).__name__}
    if len(frame) <= FRAME_BYTES_SHOWN:
        return entry | {"frame": frame.hex()}
    head = frame.rstrip(frame[-1:])
    return entry | {
        "frame": head.hex(),
        "then": {"byte": frame[-1:].hex(), "times": len(frame) - len(head)},
    }


def _successors(message: Message, count: int) -> list[Message]:
    """`message` and those behind it: each with the next opaque, or with the next number as its
    cookie."""
    if isinstance(message, Barrier):
        first = int(message.cookie)
        return [Barrier(b"%d" % (first + index)) for index in range(count)]
    return [
        msgspec.structs.replace(message, opaque=message.opaque + index) for index in range(count)
    ]


def read_case(entry: Json) -> Case:
    """The case that `Case.as_json` has written.

    Raises:
        RemoteProtocolError: The last message cannot be read.
    """
    before: Any = entry["before"]
    messages: list[tuple[str, Message]] = []
    for message_entry in (*before, entry):
        message = _read_message(message_entry)
        count = message_entry.get("times", 1)
        successors = _successors(message, count) if count > 1 else [message]
        messages += [(message_entry["from"], successor) for successor in successors]
    replies = (message for _, message in messages if isinstance(message, HelloReply))
    mechanisms = next((reply.mechanisms for reply in replies), ())
    return Case(str(entry["rule"]), tuple(messages), mechanisms)


def _read_message(entry: Any) -> Message:
    data = bytes.fromhex(entry["frame"])
    if "then" in entry:
        data += bytes.fromhex(entry["then"]["byte"]) * entry["then"]["times"]
    buffer = FrameBuffer(lambda _header: None)
    buffer.receive(data)
    frame = buffer.next_frame()
    assert frame is not None, "a frame of the file is not whole"
    return decode(*frame)


# --- messages that take many words ----------------------------------------------------------------


def _hello(
    identity: str = "test:client",
    versions: tuple[int, ...] = (VERSION,),
    window_bytes: int = WINDOW_BYTES_MIN,
    idle_interval_s: int = 20,
) -> Hello:
    return Hello(identity, versions, 0, window_bytes, idle_interval_s)


def _hello_reply(
    version: int = VERSION,
    features: int = 0,
    idle_interval_s: int = 20,
    frame_body_bytes_max: int = FRAME_BODY_BYTES_MAX,
    open_barriers_max: int = OPEN_BARRIERS_MAX,
    requests_open_max: int = REQUESTS_OPEN_MAX,
    identity: str = "test:server",
    mechanisms: tuple[str, ...] = (),
) -> HelloReply:
    return HelloReply(
        version,
        features,
        idle_interval_s,
        frame_body_bytes_max,
        open_barriers_max,
        requests_open_max,
        identity,
        mechanisms,
    )


def _stream(position: Position = NOTHING_YET, opaque: int = 2) -> Stream:
    return Stream(PartitionState.ACTIVE, position, partition=P0, opaque=opaque)


def _position(complete: int, received: int, partial: tuple[int, int] | None = None) -> Position:
    snapshot = (
        None if partial is None else PartialSnapshot(HISTORY, SeqNo(partial[0]), SeqNo(partial[1]))
    )
    return Position(LOG, SeqNo(complete), SeqNo(received), snapshot)


def _reply(seq: int = 0, status: Status = Status.OK) -> StreamReply:
    return StreamReply(SeqNo(seq), "", LOG, 0, partition=P0, opaque=2, status=status)


def _start(start: int, end: int, opaque: int = 2) -> PartitionStart:
    return PartitionStart(
        HISTORY,
        SeqNo(start),
        SeqNo(end),
        SeqNo(0),
        SnapshotKind.MEMORY,
        False,
        partition=P0,
        opaque=opaque,
    )


def _rows(start: int, end: int, value_bytes: int = 1) -> Chunk:
    row = Mutation(Operation.SET, b"key", bytes(value_bytes), SeqNo(end), Cas(1))
    return Chunk.build([row], SeqNo(start), SeqNo(end))


def _chunk(start: int, end: int, value_bytes: int = 1) -> PartitionChunk:
    return PartitionChunk(_rows(start, end, value_bytes), partition=P0, opaque=2)


def _whole(start: int, end: int, value_bytes: int = 1) -> PartitionSnapshot:
    return PartitionSnapshot(_rows(start, end, value_bytes), partition=P0, opaque=2)


def _mutate(opaque: int, value_bytes: int = 1) -> Mutate:
    row = Mutation(Operation.SET, b"key", bytes(value_bytes))
    return Mutate(Bundle.of_one_run(P0, Chunk.build([row])), opaque=opaque)


def _end(end: int) -> PartitionEnd:
    return PartitionEnd(SeqNo(end), partition=P0, opaque=2)


def _stream_end(status: Status) -> StreamEnd:
    return StreamEnd(partition=P0, opaque=2, status=status)


def _value_of_frame(kind: PartitionChunk | Mutate, frame_bytes: int) -> int:
    """How long the value of the one mutation is that makes the frame so long."""
    return frame_bytes - len(_frame(kind)) + 1


# --- conversations up to a point ------------------------------------------------------------------

Said: TypeAlias = tuple[tuple[str, Message], ...]

READY: Final[Said] = ((CLIENT, _hello()), (SERVER, _hello_reply()))
IN_BUCKET: Final[Said] = (
    *READY,
    (CLIENT, Open("b", opaque=1)),
    (SERVER, Opened(1, 0, opaque=1)),
)
ASKED: Final[Said] = (*IN_BUCKET, (CLIENT, _stream()))
STREAMING: Final[Said] = (*ASKED, (CLIENT, Go()), (SERVER, _reply()))
GONE: Final[Said] = (*ASKED, (CLIENT, Go()))
INSIDE: Final[Said] = (*STREAMING, (SERVER, _start(0, 10)))


def _client(rule: str, before: Said, *last_messages: Message) -> Case:
    return Case(rule, (*before, *((CLIENT, message) for message in last_messages)))


def _server(rule: str, before: Said, *last_messages: Message) -> Case:
    return Case(rule, (*before, *((SERVER, message) for message in last_messages)))


def _asked_from(position: Position) -> Said:
    return (*IN_BUCKET, (CLIENT, _stream(position)), (CLIENT, Go()))


def _greetings() -> Iterator[Case]:
    for window_bytes in (WINDOW_BYTES_MIN - 1, WINDOW_BYTES_MIN):
        yield _client(f"a window of {window_bytes}", (), _hello(window_bytes=window_bytes))
    for interval_s in (
        IDLE_INTERVAL_S_MIN - 1,
        IDLE_INTERVAL_S_MIN,
        IDLE_INTERVAL_S_MAX,
        IDLE_INTERVAL_S_MAX + 1,
    ):
        yield _client(f"an interval of {interval_s} s", (), _hello(idle_interval_s=interval_s))
    for count in (0, 1, IDENTITY_BYTES_MAX, IDENTITY_BYTES_MAX + 1):
        yield _client(f"an identity of {count} bytes", (), _hello(identity="i" * count))
    yield _client("an identity with a line end", (), _hello(identity="a\nb"))
    yield _client("a version that no server speaks", (), _hello(versions=(VERSION + 1,)))
    yield _client("several versions", (), _hello(versions=(VERSION + 1, VERSION)))
    for mechanism in (SCRAM, "PLAIN"):
        log_in = StartLogIn(mechanism, b"x")
        greeted = (READY[0], (SERVER, _hello_reply(mechanisms=(SCRAM,))))
        yield Case(f"log in with {mechanism}", (*greeted, (CLIENT, log_in)), (SCRAM,))
    greeting = READY[:1]
    yield _server("a version that was not offered", greeting, _hello_reply(version=VERSION + 1))
    yield _server("a feature that was not offered", greeting, _hello_reply(features=1))
    for interval_s in (20, 21):
        reply = _hello_reply(idle_interval_s=interval_s)
        yield _server(f"an interval of {interval_s} s where 20 was asked for", greeting, reply)
    for size in (HANDSHAKE_BODY_BYTES_MAX - 1, HANDSHAKE_BODY_BYTES_MAX):
        reply = _hello_reply(frame_body_bytes_max=size)
        yield _server(f"frames of {size} bytes at most", greeting, reply)
    yield _server("no open barriers", greeting, _hello_reply(open_barriers_max=0))
    yield _server("no open requests", greeting, _hello_reply(requests_open_max=0))
    yield _server("a server's identity of no bytes", greeting, _hello_reply(identity=""))


def _requests() -> Iterator[Case]:
    yield _client("Open while a request is open", READY, Stats(opaque=3), Open("b", opaque=4))
    yield _client("an opaque that is in use", READY, Stats(opaque=3), Stats(opaque=3))
    stream_opaque = Get((b"k",), partition=P0, opaque=2)
    yield _client("the opaque of a stream that was accepted", STREAMING, stream_opaque)
    for count in (REQUESTS_OPEN_MAX, REQUESTS_OPEN_MAX + 1):
        requests = [Stats(opaque=100 + number) for number in range(count)]
        yield _client(f"{count} open requests", READY, *requests)
    messages = (*READY, (CLIENT, Stats(opaque=3)))
    for status in (Status.OK, Status.NO_BUCKET):
        yield _server(
            f"Refusal with {status.name}", messages, Refusal("no", opaque=3, status=status)
        )
    yield _server("Refusal with an unknown status", messages, Refusal("no", opaque=3, status=999))
    refusal = Refusal("no", opaque=4, status=Status.NO_BUCKET)
    yield _server("Refusal of a request that nobody made", messages, refusal)
    refusal = Refusal("no", opaque=2, status=Status.NO_BUCKET)
    yield _server("Refusal of Stream", ASKED, refusal)
    small = ((CLIENT, _hello()), (SERVER, _hello_reply(frame_body_bytes_max=4096)))
    answer = StatsReply("x" * 5004, opaque=3)  # no padding behind the text
    yield _server(
        "a server's frame above what it takes itself", (*small, (CLIENT, Stats(opaque=3))), answer
    )


def _flows() -> Iterator[Case]:
    yield _client("Mutate without credit", IN_BUCKET, _mutate(3))
    credit = (*IN_BUCKET, (SERVER, Credit(1)))
    yield _client("Mutate above the credit that is left", credit, _mutate(3))
    frame_bytes = len(_frame(_mutate(3)))
    for bytes_left in (0, 1):
        credit = (*IN_BUCKET, (SERVER, Credit(frame_bytes + bytes_left)))
        yield _client(f"Mutate with {bytes_left} bytes of credit", credit, _mutate(3), _mutate(4))
    messages = (*STREAMING, (SERVER, _start(0, 10)), (SERVER, _chunk(0, 10)))
    used = len(_frame(_chunk(0, 10)))
    for count in (used, used + 1):
        yield _client(f"Ack of {count} bytes where {used} came", messages, Ack(count))
    for bytes_left in (0, 8):
        size = WINDOW_BYTES_MIN - bytes_left
        first = _chunk(0, 5, _value_of_frame(_chunk(0, 5), size))
        assert len(_frame(first)) == size
        yield _server(
            f"PartitionChunk with {bytes_left} bytes of window", INSIDE, first, _chunk(5, 10)
        )
        begun = (*INSIDE, (SERVER, _chunk(0, 9)), (SERVER, _chunk(9, 10)), (SERVER, _end(10)))
        last_bytes = size - 2 * len(_frame(_chunk(0, 9)))
        first_whole = _whole(10, 11, _value_of_frame(_chunk(0, 9), last_bytes))
        assert len(_frame(first_whole)) == last_bytes
        rule = f"PartitionSnapshot with {bytes_left} bytes of window"
        yield _server(rule, begun, first_whole, _whole(11, 12))


def _barriers() -> Iterator[Case]:
    for count in (0, 1, COOKIE_BYTES_MAX, COOKIE_BYTES_MAX + 1):
        yield _client(f"a cookie of {count} bytes", STREAMING, Barrier(bytes(count)))
    yield _client("a cookie that is in use", GONE, Barrier(b"a"), Barrier(b"a"))
    for count in (OPEN_BARRIERS_MAX, OPEN_BARRIERS_MAX + 1):
        barriers = [Barrier(b"%d" % number) for number in range(count)]
        yield _client(f"{count} open barriers", GONE, *barriers)
    two = (*STREAMING, (CLIENT, Barrier(b"a")), (CLIENT, Barrier(b"b")))
    for cookie in (b"a", b"b", b"c"):
        yield _server(f"barrier {cookie.decode()} back, of a and b", two, BarrierReply(cookie, ()))


def _positions() -> Iterator[Case]:
    for complete, received, partial in (
        (5, 5, None),
        (5, 6, None),
        (6, 5, None),
        (5, 7, (5, 9)),
        (5, 5, (5, 9)),
        (5, 9, (5, 9)),
        (5, 4, (5, 9)),
        (5, 10, (5, 9)),
        (8, 7, (5, 9)),
    ):
        rule = f"complete at {complete}, received {received}, snapshot {partial}"
        yield _client(rule, IN_BUCKET, _stream(_position(complete, received, partial)))
    at_five = _asked_from(_position(5, 5))
    for seq in (4, 5, 6):
        yield _server(f"a stream from 5 continues at {seq}", at_five, _reply(seq))


def _snapshots() -> Iterator[Case]:
    for start in (0, 1):
        yield _server(f"at 0, a snapshot from {start}", STREAMING, _start(start, 10))
    for end in (9, 10, 11):
        yield _server(f"inside (0, 10], another to {end}", INSIDE, _start(0, end))
    yield _server("PartitionChunk between snapshots", STREAMING, _chunk(0, 1))
    for start, end in ((0, 10), (0, 11), (1, 10)):
        yield _server(f"inside (0, 10], a chunk ({start}, {end}]", INSIDE, _chunk(start, end))
    yield _server("PartitionEnd before the last chunk", INSIDE, _chunk(0, 9), _end(10))
    yield _server("PartitionEnd behind the last chunk", INSIDE, _chunk(0, 10), _end(10))
    yield _server("PartitionEnd with another number", INSIDE, _chunk(0, 10), _end(9))
    yield _server("PartitionSnapshot before any PartitionStart", STREAMING, _whole(0, 1))
    ended = (*INSIDE, (SERVER, _chunk(0, 10)), (SERVER, _end(10)))
    yield _server("PartitionSnapshot in order", ended, _whole(10, 11))
    yield _server("PartitionSnapshot with a gap", ended, _whole(11, 12))
    yield _server("PartitionSnapshot inside a snapshot", INSIDE, _whole(0, 10))
    for rule, messages in (("between", STREAMING), ("inside", INSIDE)):
        yield _server(
            f"PartitionAnswers {rule} snapshots", messages, PartitionAnswers((), **OF_STREAM)
        )
    yield _server("another opaque than the stream's", STREAMING, _start(0, 10, opaque=3))
    for status in (Status.OK, Status.END_REACHED, Status.RIGHT_REVOKED, Status.NO_BUCKET):
        yield _server(f"StreamEnd with {status.name}", STREAMING, _stream_end(status))
    closed = (*INSIDE, (CLIENT, CloseStream(**OF_STREAM)))
    yield _server("a chunk of a stream that was closed", closed, _chunk(0, 10))
    own, other = CloseStream(**OF_STREAM), CloseStream(partition=P0, opaque=3)
    yield _client("CloseStream with the stream's opaque", STREAMING, own)
    yield _client("CloseStream with another opaque", STREAMING, other)
    yield _client("CloseStream before StreamReply", _asked_from(_position(0, 0)), own)
    yield _client("CloseStream of a partition without a stream", IN_BUCKET, other)
    yield _server("StreamReply for a stream that nobody asked for", IN_BUCKET, _reply())
    yield _server("StreamReply twice", STREAMING, _reply())


def cases() -> Iterable[Case]:
    """Every case."""
    for group in (_greetings, _requests, _flows, _barriers, _positions, _snapshots):
        yield from group()


def session_rules() -> list[Json]:
    """Every case, with its outcome."""
    return [case.as_json() for case in cases()]
