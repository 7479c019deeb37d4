"""Both ends of a session, with somebody behind them who does what is asked of them.

Each target begins behind a handshake: a fuzzer does not find one. The first byte says how the rest
arrives (see `pieces`), with or without its checksums put right; the second says where it begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from tests.fuzz.frames import MENDED, pieces
from tests.fuzz.mending import mended_frames
from tests.protocol.session.kit import (
    HISTORY,
    LOG,
    SAMPLES,
    encoded,
    frames,
    hello,
    hello_reply,
    stream,
    stream_end,
    stream_reply,
    taken,
)
from upr_protocol.chunk import Chunk
from upr_protocol.client.core.log_in import ClientLogIn
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError, Status
from upr_protocol.failover import PartialSnapshot, Position
from upr_protocol.ids import PartitionId, SeqNo, SnapshotKind
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, HANDSHAKE_BODY_BYTES_MAX, SCRAM_ITERATIONS_MIN
from upr_protocol.scram import (
    EXTERNAL,
    SCRAM,
    FirstMessage,
    ScramClient,
    ScramError,
    ScramServer,
    new_verifier,
)
from upr_protocol.security import Credentials
from upr_protocol.session import ClientSession, ServerSession, Session, SessionState
from upr_protocol.users import UsersError
from upr_protocol.wire import (
    HEADER_BYTES,
    Ack,
    Barrier,
    BarrierReply,
    CloseStream,
    ContinueLogIn,
    Credit,
    CycleEnd,
    Error,
    Go,
    HelloReply,
    LoggedIn,
    LogInChallenge,
    Message,
    Mutate,
    Open,
    Opened,
    PartitionChunk,
    PartitionEnd,
    PartitionStart,
    StartLogIn,
    Stream,
    StreamEnd,
)

LATE: Final = 0x40
"""In a first byte: nobody answers before all was heard."""

PARTITION: Final = 3
ERROR_BYTES_MAX: Final = HEADER_BYTES + Error.body_bytes_max

# One that was cut has a chunk to come, which takes of the window.
_CUT: Final = Position(LOG, SeqNo(5), SeqNo(7), PartialSnapshot(HISTORY, SeqNo(5), SeqNo(10)))

_SERVER_HEARD: Final[Sequence[Sequence[Message]]] = (
    (),
    (hello(),),
    (Open("bucket"),),
    (stream(PARTITION, 6, _CUT), stream(PARTITION + 1, 7)),
    (Go(),),
)
_CLIENT_HEARD: Final[Sequence[Sequence[Message]]] = (
    (),
    (hello_reply(),),
    (Opened(64, 1, opaque=Open.opcode),),
    (Credit(1 << 20), stream_reply(PARTITION, Stream.opcode)),
)


# A log-in, in which everything is known: so the reactions need to keep nothing.

LOG_IN: Final = 0x80
"""In a second byte: the server has users."""

_CREDENTIALS: Final = Credentials("user", "pencil")
_VERIFIER: Final = new_verifier("pencil", b"sixteen bytes...", SCRAM_ITERATIONS_MIN)
_FIRST: Final = ScramClient("user", "pencil", "client").client_first()
_LAST: Final = 2
"""Bytes in base64 whose last bits nobody looks at."""

_ITERATIONS: Final = re.compile(rb"i=(\d{5,})")


def scram_server(first: bytes = _FIRST) -> ScramServer:
    """The server's side, behind the client's first message."""
    message = FirstMessage.read(SCRAM, first, offers_binding=False)
    return ScramServer(message, _VERIFIER, "server")


def _client_log_in() -> tuple[ClientLogIn, StartLogIn]:
    log_in = ClientLogIn(_CREDENTIALS, "client")
    first = log_in.begin((SCRAM,))
    assert first is not None
    return log_in, first


def _response() -> ContinueLogIn:
    log_in, _ = _client_log_in()
    return log_in.respond(CHALLENGE)


FIRST: Final = StartLogIn(SCRAM, _FIRST)
CHALLENGE: Final = LogInChallenge(scram_server().server_first())
RESPONSE: Final = _response()
PROOF: Final = LoggedIn(scram_server().server_final(RESPONSE.data) or b"")

_SERVER_LOGS_IN: Final[Sequence[Sequence[Message]]] = ((), (hello(),), (FIRST,))
_CLIENT_LOGS_IN: Final[Sequence[Sequence[Message]]] = (
    (),
    (hello_reply(mechanisms=(SCRAM, EXTERNAL)),),
    (CHALLENGE,),
)


def heard_before(beginnings: Sequence[Sequence[Message]], second: int) -> bytes:
    """What was said before the fuzzed bytes: more or less of a handshake."""
    count = second % LOG_IN % len(beginnings) + 1
    return b"".join(encoded(*beginning) for beginning in beginnings[:count])


def server(data: bytes) -> None:
    """A server's session: any bytes behind a handshake, or behind the front of one."""
    has_users = bool(data[1:2] >= bytes([LOG_IN]))
    session = ServerSession(
        "fuzz:server", now=0.0, mechanisms=lambda: (SCRAM, EXTERNAL) if has_users else ()
    )
    _converse(session, _SERVER_LOGS_IN if has_users else _SERVER_HEARD, data, _serve)


def client(data: bytes) -> None:
    """A client's session, which asks for everything there is as soon as it may."""
    has_users = bool(data[1:2] >= bytes([LOG_IN]))
    beginnings = _CLIENT_LOGS_IN if has_users else _CLIENT_HEARD
    _converse(ClientSession("fuzz:client", now=0.0), beginnings, data, _follow)


def _converse(
    session: Session,
    beginnings: Sequence[Sequence[Message]],
    data: bytes,
    react: Callable[[Session, Message], None],
) -> None:
    """Has `session` hear `data`, and checks all that is promised about it."""
    first, second, data = *(data[:2] + bytes(2))[:2], data[2:]
    _hear(session, heard_before(beginnings, second), react)
    taken(session)
    outgoing = b""
    if first & MENDED:
        data = mended_frames(data)
    late: list[Message] = []
    for piece in pieces(data, first):
        _hear(session, piece, (lambda _, message: late.append(message)) if first & LATE else react)
        outgoing += taken(session)
    if first & LATE:
        assert len(outgoing) <= 2 * len(data) + ERROR_BYTES_MAX, "it says little by itself"
    for message in late:
        if session.state is not SessionState.CLOSED:
            react(session, message)
    outgoing += taken(session)
    # All of it can be read, and nothing comes behind an error.
    assert not any(isinstance(message, Error) for message in frames(outgoing)[:-1])


def _hear(session: Session, piece: bytes, react: Callable[[Session, Message], None]) -> None:
    was_over = session.state is SessionState.CLOSED
    stranger = session.state not in (SessionState.OPEN, SessionState.STREAMING)
    session.receive(piece, 0.0)
    status = None
    try:
        for message in session.messages():
            assert not was_over
            stranger = False
            if session.state is not SessionState.CLOSED:
                react(session, message)
    except RemoteProtocolError as error:
        status = error.status
    if status is not None:
        (error_said,) = frames(bytes(session._outgoing[-1]))
        assert isinstance(error_said, Error)
        assert error_said.status == status
        assert session.state is SessionState.CLOSED
    elif isinstance(session, ServerSession) and not was_over:
        longest = HANDSHAKE_BODY_BYTES_MAX if stranger else FRAME_BODY_BYTES_MAX
        assert session.buffered <= HEADER_BYTES + longest
    assert session.window.used_bytes >= 0
    assert session.credit.used_bytes >= 0


def _answer(message: Message) -> Message:
    """A sample of what answers `message`."""
    return msgspec.structs.replace(
        SAMPLES[type(message).answers[-1]], partition=message.partition, opaque=message.opaque
    )


def _serve(session: Session, message: Message) -> None:
    """Answers, and streams: what a server does that keeps to the rules is refused by none."""
    assert isinstance(session, ServerSession)
    if isinstance(message, Stream):
        position = message.position
        session.send(stream_reply(message.partition, message.opaque, position.highest_received))
        session.mark_ready(message.partition)
    elif isinstance(message, StartLogIn | ContinueLogIn):
        _log_in(session, message)
        return
    elif type(message).answers:
        session.send(_answer(message))
    if isinstance(message, Open | Mutate):
        session.send(Credit(1))
    elif isinstance(message, CloseStream):
        session.send(stream_end(message.partition, message.opaque))
    elif isinstance(message, Ack):
        for partition in list(session.streams):
            session.mark_ready(partition)
    # One turn, so that others wait while more is heard.
    if session.window.is_open and (turn := session.next_partition()) is not None:
        _snapshot(session, turn)
        session.end_turn()


def _log_in(session: ServerSession, message: StartLogIn | ContinueLogIn) -> None:
    """Nothing but the one right proof lets in."""
    try:
        if isinstance(message, ContinueLogIn):
            outcome = scram_server().server_final(message.data)
            assert outcome is None or message.data[:-_LAST] == RESPONSE.data[:-_LAST]
            answer: Message | None = None if outcome is None else LoggedIn(outcome)
        elif message.mechanism == EXTERNAL:
            answer = None
        else:
            answer = LogInChallenge(scram_server(message.data).server_first())
    except (ScramError, UsersError):
        answer = None
    if answer is None:
        session.fail(Status.LOG_IN_FAILED, "no")
    else:
        session.send(answer)


def _snapshot(session: ServerSession, partition: PartitionId) -> None:
    """An empty one that comes to where the client must be brought."""
    record = session.streams[partition]
    about: dict[str, Any] = {"partition": partition, "opaque": record.opaque}
    seq, end, memory = record.seq, max(record.seq, record.end), SnapshotKind.MEMORY
    session.send(PartitionStart(HISTORY, seq, end, SeqNo(0), memory, False, **about))
    if seq < end:
        session.send(PartitionChunk(Chunk.build([], seq, end), **about))
    session.send(PartitionEnd(end, **about))


_REQUESTS: Final = tuple(
    msgspec.structs.replace(message, opaque=kind.opcode, partition=PARTITION)
    for kind, message in SAMPLES.items()
    if kind.answers and kind is not Open and kind is not Mutate
)


def _follow_log_in(session: ClientSession, message: HelloReply | LogInChallenge | LoggedIn) -> None:
    """Logs in, and opens the bucket."""
    if isinstance(message, LogInChallenge):
        # More iterations cost up to 200 ms, and that is all that they do.
        if not _ITERATIONS.search(message.data):
            with suppress(RemoteProtocolError):
                _say(session, _client_log_in()[0].respond(message))
    elif isinstance(message, HelloReply) and message.mechanisms:
        if SCRAM in message.mechanisms:
            _say(session, FIRST)
    elif isinstance(message, LoggedIn):
        log_in, _ = _client_log_in()
        log_in.respond(CHALLENGE)
        try:
            log_in.check(message)
        except RemoteProtocolError:
            session.fail(Status.LOG_IN_FAILED, "no")
        else:
            # Nothing but the one right proof is taken for the server.
            assert message.data.startswith(PROOF.data[:-_LAST])
            _say(session, Open("bucket", opaque=Open.opcode))
    else:
        _say(session, Open("bucket", opaque=Open.opcode))


def _follow(session: Session, message: Message) -> None:
    """Asks for everything, deals with what comes, and asks again."""
    assert isinstance(session, ClientSession)
    if isinstance(message, HelloReply | LogInChallenge | LoggedIn):
        _follow_log_in(session, message)
    elif isinstance(message, Opened):
        for request in (*_REQUESTS, Go(), Barrier(b"cookie")):
            _say(session, request)
    elif isinstance(message, PartitionChunk):
        session.acknowledge(HEADER_BYTES + message.chunk.nbytes)
    elif isinstance(message, BarrierReply):
        _say(session, Barrier(message.cookie))
    elif isinstance(message, CycleEnd):
        for partition, record in list(session.streams.items()):
            _say(session, CloseStream(partition=partition, opaque=record.opaque))
    elif isinstance(message, Credit):
        _say(session, msgspec.structs.replace(SAMPLES[Mutate], opaque=Mutate.opcode))
    elif isinstance(message, StreamEnd):
        _say(session, stream(message.partition, session.new_opaque()))


def _say(session: Session, message: Message) -> None:
    """Says what the other side may have forbidden: by its limits, its credit, or its silence."""
    before = session.outgoing_bytes
    try:
        session.send(message)
    except LocalProtocolError:
        assert session.outgoing_bytes == before
