"""Random legal conversations. Bytes are on their way in both directions, both sides act whenever
they like, and neither takes the other for a liar; when all is quiet, both have the same books."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.effort import effort
from tests.protocol.session.kit import (
    HISTORY,
    LOG,
    chunk,
    close_stream,
    end,
    full_state,
    mutate,
    mutate_reply,
    snapshot,
    start,
    stream,
    stream_end,
    stream_reply,
    taken,
)
from upr_protocol.errors import Status
from upr_protocol.failover import PartialSnapshot, Position
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.session import ClientSession, ServerSession, SessionState, StreamState
from upr_protocol.wire import (
    HEADER_BYTES,
    Barrier,
    BarrierReply,
    CloseStream,
    Credit,
    CycleEnd,
    Get,
    GetReply,
    Go,
    Message,
    Mutate,
    Noop,
    Open,
    Opened,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    Stream,
    StreamReply,
)

PARTITIONS: Final = st.integers(0, 3).map(PartitionId)
LIVE: Final = (StreamState.BETWEEN, StreamState.INSIDE)
VALUE: Final = b"v" * 9000


class Conversation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.client = ClientSession("test:client", window_bytes=WINDOW_BYTES_MIN, now=0.0)
        self.server = ServerSession("test:server", now=0.0)
        self.to_server = self.to_client = b""
        # The server's application: numbers given, requests to answer, whose turn it is and what it
        # must reach.
        self.high = [0, 0, 0, 0]
        self.asked: list[Message] = []
        self.turn: PartitionId | None = None
        self.turn_end = 0
        # What each barrier promises: the numbers given before it came, by (partition, opaque).
        self.promised: dict[bytes, dict[tuple[PartitionId, int], int]] = {}
        # The client's application: what it has of each partition (complete, received, end).
        self.has = [(0, 0, 0)] * 4
        self.to_acknowledge: list[int] = []
        self.cookies = 0
        self.sent_cookies: list[bytes] = []
        self.back: list[bytes] = []
        self.cycle = 0
        self.in_cycle = -1
        self.carry_all()
        self.client.send(Open("b", opaque=self.client.new_opaque()))
        self.carry_all()

    # The bytes between.

    def carry(self, session: ClientSession | ServerSession, length: int) -> None:
        if session is self.server:
            self.to_server += taken(self.client)
            data, self.to_server = self.to_server[:length], self.to_server[length:]
        else:
            self.to_client += taken(self.server)
            data, self.to_client = self.to_client[:length], self.to_client[length:]
        session.receive(data, 0.0)
        for message in session.messages():
            if session is self.server:
                self.at_server(message)
            else:
                self.at_client(message)

    def carry_all(self) -> None:
        while (
            self.client.outgoing_bytes
            or self.server.outgoing_bytes
            or self.to_server
            or self.to_client
        ):
            self.carry(self.server, 1 << 30)
            self.carry(self.client, 1 << 30)

    @rule(length=st.integers(1, 3000))
    def carry_some_to_the_server(self, length: int) -> None:
        self.carry(self.server, length)

    @rule(length=st.integers(1, 30_000))
    def carry_some_to_the_client(self, length: int) -> None:
        self.carry(self.client, length)

    # What both applications make of it.

    def at_server(self, message: Message) -> None:
        if isinstance(message, Open):
            self.server.send(Opened(4, 1, opaque=message.opaque))
        elif isinstance(message, Barrier):
            self.promised[message.cookie] = {
                (partition, record.opaque): self.high[partition]
                for partition, record in self.server.streams.items()
                if record.state in LIVE
            }
        elif isinstance(message, Stream | CloseStream | Get | Mutate):
            if isinstance(message, CloseStream) and self.turn == message.partition:
                self.turn = None
            self.asked.append(message)

    def at_client(self, message: Message) -> None:
        partition = message.partition
        if isinstance(message, BarrierReply):
            self.back.append(message.cookie)
            self.check_barrier(message)
        elif isinstance(message, CycleEnd):
            assert message.cycle > self.cycle
            self.cycle, self.in_cycle = message.cycle, -1
        elif isinstance(message, StreamReply) and message.status == Status.OK:
            complete, received, until = self.has[partition]
            assert message.seq == received
            if received == until:  # nothing of that snapshot was missing but the word of its end
                self.has[partition] = (received, received, received)
        elif isinstance(message, PartitionStart):
            # One after the other in partition order; a turn may take several snapshots.
            complete, received, until = self.has[partition]
            assert partition >= self.in_cycle
            self.in_cycle = partition
            assert message.start == received
            self.has[partition] = (complete, received, message.end)
        elif isinstance(message, PartitionSnapshot):
            complete, received, until = self.has[partition]
            assert partition >= self.in_cycle
            self.in_cycle = partition
            assert message.chunk.start == received
            assert message.chunk.end >= until
            self.has[partition] = (message.chunk.end, message.chunk.end, message.chunk.end)
            self.to_acknowledge.append(HEADER_BYTES + message.chunk.nbytes)
        elif isinstance(message, PartitionChunk):
            complete, received, until = self.has[partition]
            assert message.chunk.start == received
            self.has[partition] = (complete, message.chunk.end, until)
            self.to_acknowledge.append(HEADER_BYTES + message.chunk.nbytes)
        elif isinstance(message, PartitionEnd):
            self.has[partition] = (message.end, message.end, message.end)

    def check_barrier(self, message: BarrierReply) -> None:
        ends = dict(message.ends)
        for (partition, opaque), high in self.promised.pop(message.cookie).items():
            record = self.client.streams.get(partition)
            if record is not None and record.opaque == opaque and record.state in LIVE:
                assert record.complete >= high
        for partition, snapshot_end in ends.items():
            record = self.client.streams[partition]
            if record.state in LIVE:
                assert record.complete == snapshot_end == self.has[partition][0]

    # The client acts.

    @rule(partition=PARTITIONS)
    def ask_for_a_stream(self, partition: PartitionId) -> None:
        if partition in self.client.streams:
            return
        complete, received, until = self.has[partition]
        partial = None
        if received > complete:
            partial = PartialSnapshot(HISTORY, SeqNo(complete), SeqNo(until))
        position = Position(LOG, SeqNo(complete), SeqNo(received), partial)
        self.client.send(stream(partition, self.client.new_opaque(), position))

    @rule(partition=PARTITIONS)
    def close_a_stream(self, partition: PartitionId) -> None:
        record = self.client.streams.get(partition)
        if record is not None and record.state in LIVE:
            self.client.send(close_stream(partition, record.opaque))

    @precondition(lambda self: self.client.state is SessionState.OPEN)
    @rule()
    def go(self) -> None:
        self.client.send(Go())

    @precondition(lambda self: self.client.state is SessionState.STREAMING)
    @rule()
    def send_a_barrier(self) -> None:
        if len(self.client.barriers) < 64:
            self.cookies += 1
            cookie = b"%d" % self.cookies
            self.client.send(Barrier(cookie))
            self.sent_cookies.append(cookie)

    @rule()
    def deal_with_a_chunk(self) -> None:
        if self.to_acknowledge:
            self.client.acknowledge(self.to_acknowledge.pop(0))

    @precondition(lambda self: self.client.credit.is_open)
    @rule(size=st.integers(1, 3000))
    def publish(self, size: int) -> None:
        self.client.send(mutate(3, self.client.new_opaque(), b"x" * size))

    @rule()
    def ask_for_a_key(self) -> None:
        self.client.send(Get((b"key",), opaque=self.client.new_opaque()))

    @rule()
    def say_nothing(self) -> None:
        self.client.send(Noop())
        self.server.send(Noop())

    # The server acts.

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.asked:
            index = data.draw(st.integers(0, len(self.asked) - 1))
            self.answer_one(self.asked.pop(index), refuse=data.draw(st.booleans()))

    def answer_one(self, request: Message, *, refuse: bool) -> None:
        partition, opaque = request.partition, request.opaque
        if isinstance(request, Stream):
            seq = request.position.highest_received
            status = Status.ROLLBACK if refuse else Status.OK
            self.server.send(stream_reply(partition, opaque, seq, status))
            if not refuse and (self.high[partition] > seq or request.position.partial):
                self.server.mark_ready(partition)
        elif isinstance(request, CloseStream):
            self.server.send(stream_end(partition, opaque, Status.STREAM_CLOSED))
        elif refuse:
            self.server.send(Refusal("no", opaque=opaque, status=Status.TEMPORARY_FAILURE))
        elif isinstance(request, Get):
            self.server.send(GetReply(HISTORY, 1, chunk(0, 0, 0, 1).chunk, opaque=opaque))
        else:
            self.server.send(mutate_reply(3, opaque))

    @rule(size=st.integers(1, 5000))
    def grant_credit(self, size: int) -> None:
        self.server.send(Credit(size))

    @rule(partition=PARTITIONS)
    def mutate(self, partition: PartitionId) -> None:
        self.high[partition] += 1
        self.server.mark_ready(partition)

    @rule(partition=PARTITIONS)
    def end_a_stream(self, partition: PartitionId) -> None:
        record = self.server.streams.get(partition)
        if record is not None and record.state in LIVE:
            if self.turn == partition:
                self.turn = None
            self.server.send(stream_end(partition, record.opaque, Status.STATE_CHANGED))

    @rule(
        steps=st.integers(1, 4), length=st.integers(1, 3), drop=st.booleans(), whole=st.booleans()
    )
    def send_some(self, steps: int, length: int, drop: bool, whole: bool) -> None:
        for _ in range(steps):
            self.send_something(length, drop=drop, whole=whole)

    def send_something(self, length: int = 1, *, drop: bool = False, whole: bool = False) -> bool:
        """Goes on with the turn, in snapshots of `length` or more: others closed them there."""
        server = self.server
        if self.turn is None:
            self.turn = server.next_partition()
            if self.turn is None:
                assert not server.barriers
                return False
            self.turn_end = self.high[self.turn]
        record = server.streams[self.turn]
        partition, opaque, seq = record.partition, record.opaque, record.seq
        until = max(record.end, min(seq + length, self.high[partition]))
        if record.state is StreamState.BETWEEN and seq >= self.turn_end:
            self.turn = None
            server.end_turn()
        elif record.state is StreamState.BETWEEN and record.history_id and whole:
            if not server.window.is_open:
                return False
            server.send(snapshot(partition, opaque, seq, until, VALUE))
        elif record.state is StreamState.BETWEEN or (drop and seq < record.end):
            server.send(start(partition, opaque, seq, until))
        elif seq == record.end:
            server.send(end(partition, opaque, seq))
        elif server.window.is_open:
            server.send(chunk(partition, opaque, seq, seq + 1, VALUE))
        else:
            return False
        return True

    # What always holds, and what holds when all is quiet.

    @invariant()
    def neither_is_ahead_of_the_other(self) -> None:
        client, server = self.client, self.server
        assert server.window.used_bytes >= client.window.used_bytes
        assert server.credit.remaining_bytes >= client.credit.remaining_bytes
        assert set(server.barriers) <= set(client.barriers)
        assert self.back == self.sent_cookies[: len(self.back)]
        server._cycle.check_invariants()

    @rule()
    def fall_quiet(self) -> None:
        self.carry_all()
        books = [self.books(session) for session in (self.client, self.server)]
        assert books[0] == books[1]
        assert (
            self.client.window.remaining_bytes == WINDOW_BYTES_MIN - self.client.window.used_bytes
        )
        for session in (self.client, self.server):
            streams = {record.opaque for record in session.streams.values()}
            requests = {request.opaque for request in self.asked}
            assert set(session._requests) == streams | requests

    @staticmethod
    def books(session: ClientSession | ServerSession) -> dict[str, Any]:
        whole = full_state(session)
        return {
            name: whole[name]
            for name in ("state", "streams", "window", "credit", "barriers", "requests", "agreed")
        }

    def teardown(self) -> None:
        """After the last fault, everything comes to its end."""
        self.carry_all()
        if self.client.state is SessionState.OPEN:
            self.client.send(Go())
        for _ in range(2000):
            self.fall_quiet()
            for request in self.asked:
                self.answer_one(request, refuse=False)
            self.asked.clear()
            if not self.send_something() and not self.to_acknowledge:
                break
            for length in self.to_acknowledge:
                self.client.acknowledge(length)
            self.to_acknowledge.clear()
        else:
            raise AssertionError("it never comes to an end")
        self.carry_all()
        assert not self.client.barriers
        assert not self.promised
        assert self.back == self.sent_cookies
        for partition, record in self.client.streams.items():
            assert record.complete == self.high[partition]


Conversation.TestCase.settings = settings(
    max_examples=effort(100, 200), stateful_step_count=60, deadline=None
)
TestConversation = Conversation.TestCase
