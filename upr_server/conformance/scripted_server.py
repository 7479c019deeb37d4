"""A server that follows a script: a session that holds the client to the protocol's rules."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Final, TypeVar

import trio

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import (
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.limits import SCRAM_ITERATIONS_MIN
from upr_protocol.scram import SCRAM, FirstMessage, ScramError, ScramServer, new_verifier
from upr_protocol.session import ServerSession
from upr_protocol.users import UsersError
from upr_protocol.wire import (
    Ack,
    Close,
    ContinueLogIn,
    Credit,
    Go,
    Hello,
    LoggedIn,
    LogInChallenge,
    Message,
    Noop,
    Open,
    Opened,
    PartitionChunk,
    PartitionEnd,
    PartitionLog,
    PartitionSnapshot,
    PartitionStart,
    StartLogIn,
    Stream,
    StreamReply,
)
from upr_server.conformance.failure import ConformanceError, expect_message, what_was_done

M = TypeVar("M", bound=Message)

RECEIVE_TIMEOUT_S: Final = 20.0
HISTORY: Final = HistoryId(0x1122334455667788)
LOG: Final = FailoverLog.of_pairs([(HISTORY, 0)])
P5: Final = PartitionId(5)
PARTITION_COUNT: Final = 8


def rows_of(*seqs: int) -> list[Mutation]:
    """A `SET` for each number: `key-N` is `value-N`."""
    return [
        Mutation(Operation.SET, b"key-%d" % seq, b"value-%d" % seq, SeqNo(seq), Cas(seq))
        for seq in seqs
    ]


class ScriptedServer:
    """The server's end of one connection.

    Args:
        stream: The connection.

    Attributes:
        session: Checks every message of the client.
        mechanisms: The ways to log in that the client is offered; set it before `Hello` is heard.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.mechanisms: tuple[str, ...] = ()
        self.session = ServerSession(
            "conformance", now=trio.current_time(), mechanisms=lambda: self.mechanisms
        )
        self._stream = stream
        self._heard_messages: list[Message] = []
        self._has_received_go = False

    # Hearing and saying.

    async def receive(self) -> Message | None:
        """The client's next message; None when it has closed the connection.

        Raises:
            ConformanceError: It broke a rule of the protocol, or said nothing for long.
        """
        with trio.move_on_after(RECEIVE_TIMEOUT_S):
            await trio.lowlevel.checkpoint()
            while not self._heard_messages:
                await self.flush()
                try:
                    data = await self._stream.receive_some()
                except trio.BrokenResourceError:
                    return None
                if not data:
                    return None
                self.session.receive(bytes(data), trio.current_time())
                broken = self._read_events()
                if broken:
                    await self.flush()
                    raise ConformanceError(f"the client broke the protocol: {broken}")
            message = self._heard_messages.pop(0)
            self._has_received_go |= isinstance(message, Go)
            return message
        raise ConformanceError(f"the client said nothing for {RECEIVE_TIMEOUT_S:.0f} s")

    def _read_events(self) -> str:
        """Takes what has come from the session; says which rule the client broke, if any."""
        try:
            for message in self.session.messages():
                # The session has answered `Hello` by itself.
                if not isinstance(message, Hello):
                    self._heard_messages.append(message)
        except RemoteProtocolError as error:
            return str(error)
        return ""

    async def expect(self, kind: type[M]) -> M:
        """The client's next message, which must be of this kind; `Noop`, `Ack` and `Go` may come
        before.

        Raises:
            ConformanceError: Another message came, or the end.
        """
        return await expect_message("client", kind, self.receive, (Noop, Ack, Go))

    async def expect_go(self) -> None:
        """Waits for `Go`, which the client sends at any time after `Opened`: perhaps it has come
        before a message that a scenario expected.

        Raises:
            ConformanceError: Another message came, or the end.
        """
        if not self._has_received_go:
            await self.expect(Go)

    async def send(self, *messages: Message) -> None:
        """Sends messages, if the session allows them."""
        for message in messages:
            self.session.send(message)
        await self.flush()

    async def flush(self) -> None:
        """Writes what the session holds."""
        data = b"".join(map(bytes, self.session.take_outgoing(trio.current_time())))
        if data:
            await self._stream.send_all(data)

    async def send_bytes(self, data: bytes) -> None:
        """Sends bytes, whatever they are."""
        await self._stream.send_all(data)

    async def cut_connection(self) -> None:
        """Closes the connection without a goodbye: it is lost."""
        await trio.aclose_forcefully(self._stream)

    async def expect_end(self) -> None:
        """Waits until the client sends `Close`, or closes the connection; a `Go` may have been on
        its way."""
        while (message := await self.receive()) is not None and not isinstance(message, Close):
            if not isinstance(message, Noop | Ack | Go):
                raise ConformanceError(f"expected the end; the client {what_was_done(message)}")
        await self.cut_connection()

    # The steps of a conversation.

    async def log_in(self, user: str, password: str, *, is_impostor: bool = False) -> None:
        """Receives a log-in by SCRAM-SHA-256, and lets the client in. An impostor does not know the
        password, and says that the proof is right.

        Raises:
            ConformanceError: The client logs in otherwise, as another user, or with another
                password.
        """
        self.mechanisms = (SCRAM,)
        request = await self.expect(StartLogIn)
        verifier = new_verifier(password, b"conformance salt", SCRAM_ITERATIONS_MIN)
        try:
            first_message = FirstMessage.read(request.mechanism, request.data, offers_binding=False)
            exchange = ScramServer(first_message, verifier, "conformance", b"")
            await self.send(LogInChallenge(exchange.server_first()))
            outcome = exchange.server_final((await self.expect(ContinueLogIn)).data)
        except (ScramError, UsersError) as error:
            raise ConformanceError(f"the log-in is malformed: {error}") from error
        if first_message.name != user or outcome is None:
            raise ConformanceError(f"the client does not prove to be {user!r}")
        await self.send(LoggedIn(b"v=" + b64encode(bytes(32)) if is_impostor else outcome))

    async def open_bucket(self, *, credit: int = 1 << 20) -> None:
        """Receives `Open`, and tells of the partitions asked for: each has `LOG` and numbers up to
        100."""
        request = await self.expect(Open)
        for partition in request.partitions or range(PARTITION_COUNT):
            state, seq, about = PartitionState.ACTIVE, SeqNo(100), PartitionId(partition)
            await self.send(
                PartitionLog(state, seq, seq, SeqNo(0), LOG, partition=about, opaque=request.opaque)
            )
        await self.send(Opened(PARTITION_COUNT, 0, opaque=request.opaque), Credit(credit))

    async def accept_stream(self) -> Stream:
        """Receives `Stream` of partition 5, and accepts it."""
        request = await self.expect(Stream)
        seq = request.position.highest_received
        await self.send(StreamReply(seq, "conformance", LOG, partition=P5, opaque=request.opaque))
        return request

    async def begin_streaming(self) -> Stream:
        """Plays the whole way to `Go`, with a stream of partition 5 that is accepted."""
        await self.open_bucket()
        request = await self.accept_stream()
        await self.expect_go()
        return request

    def _turn(self) -> None:
        """Gives partition 5 the turn, unless it has it."""
        self.session.mark_ready(P5)
        self.session.next_partition()

    async def begin_snapshot(
        self,
        start: int,
        end: int,
        *,
        kind: SnapshotKind = SnapshotKind.MEMORY,
        may_repeat: bool = False,
        turn: bool = True,
    ) -> None:
        """Begins a snapshot of partition 5."""
        if turn:
            self._turn()
        await self.send(
            PartitionStart(
                HISTORY, SeqNo(start), SeqNo(end), SeqNo(0), kind, may_repeat,
                partition=P5, opaque=self.session.opaque_of(P5),
            )
        )  # fmt: skip

    async def send_chunk(self, start: int, end: int, rows: Sequence[Mutation]) -> None:
        """Sends a part of the snapshot."""
        chunk = Chunk.build(rows, SeqNo(start), SeqNo(end))
        await self.send(PartitionChunk(chunk, partition=P5, opaque=self.session.opaque_of(P5)))

    async def end_snapshot(self, end: int) -> None:
        """Ends the snapshot, and the turn."""
        await self.send(PartitionEnd(SeqNo(end), partition=P5, opaque=self.session.opaque_of(P5)))
        self.session.end_turn()

    async def send_snapshot(self, start: int, end: int, rows: Sequence[Mutation]) -> None:
        """Sends a snapshot in one frame, once the window is open."""
        while not self.session.window.is_open:
            message = await self.receive()
            if not isinstance(message, Noop | Ack):
                raise ConformanceError(
                    f"the window is used up: expected Ack, not {type(message).__name__}"
                )
        self._turn()
        chunk = Chunk.build(rows, SeqNo(start), SeqNo(end))
        await self.send(PartitionSnapshot(chunk, partition=P5, opaque=self.session.opaque_of(P5)))
        self.session.end_turn()
