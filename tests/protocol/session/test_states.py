"""Every message in every state, said and heard, on both sides."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import pytest

from tests.protocol.session.kit import (
    SAMPLES,
    Pair,
    assert_refused,
    encoded,
    frames,
    portrait,
    taken,
)
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError, Status
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, HANDSHAKE_BODY_BYTES_MAX
from upr_protocol.session import ClientSession, Session, SessionState
from upr_protocol.wire import (
    HEADER_BYTES,
    MESSAGES,
    CreateBucket,
    Error,
    Hello,
    HelloReply,
    Message,
    Sender,
    Stats,
)
from upr_protocol.wire.frame import pack_header

# Who says what when, and where it leads; `.` where it may not be said. Written from
# design/2-wire.md, and not from the code. Over: a state that nothing leaves, in which nothing may
# be said and everything is ignored.
TABLE: Final = """
                    GREETING GREETED READY   OPENING OPEN      STREAMING

client Hello        GREETED  .       .       .       .         .
server HelloReply   .        READY   .       .       .         .
client Open         .        .       OPENING .       .         .
server PartitionLog .        .       .       OPENING .         .
server Opened       .        .       .       OPEN    .         .
client Go           .        .       .       .       STREAMING .
client Close        .        .       CLOSED  CLOSED  CLOSED    CLOSED
both   Error        CLOSED   CLOSED  CLOSED  CLOSED  CLOSED    CLOSED
both   Noop         .        .       READY   OPENING OPEN      STREAMING

client CreateBucket .        .       READY   .       OPEN      STREAMING
client DeleteBucket .        .       READY   .       OPEN      STREAMING
server BucketDone   .        .       READY   .       OPEN      STREAMING
client ListBuckets  .        .       READY   .       OPEN      STREAMING
server ListBucketsReply .    .       READY   .       OPEN      STREAMING
client Stats        .        .       READY   .       OPEN      STREAMING
server StatsReply   .        .       READY   .       OPEN      STREAMING
client GetMap       .        .       READY   .       OPEN      STREAMING
client Join         .        .       READY   .       OPEN      STREAMING
server MapReply     .        .       READY   .       OPEN      STREAMING
client NextEvents   .        .       READY   .       OPEN      STREAMING
server EventsReply  .        .       READY   .       OPEN      STREAMING
server Refusal      .        .       READY   READY   OPEN      STREAMING

client Stream       .        .       .       .       OPEN      STREAMING
server StreamReply  .        .       .       .       OPEN      STREAMING
client CloseStream  .        .       .       .       OPEN      STREAMING
server StreamEnd    .        .       .       .       OPEN      STREAMING

client Mutate       .        .       .       .       OPEN      STREAMING
server MutateReply  .        .       .       .       OPEN      STREAMING
server Credit       .        .       .       .       OPEN      STREAMING
client Get          .        .       .       .       OPEN      STREAMING
server GetReply     .        .       .       .       OPEN      STREAMING
client Seqnos       .        .       .       .       OPEN      STREAMING
server SeqnosReply  .        .       .       .       OPEN      STREAMING
client Await        .        .       .       .       OPEN      STREAMING
server AwaitReply   .        .       .       .       OPEN      STREAMING
client ReplicaAck   .        .       .       .       OPEN      STREAMING
client SetMap       .        .       .       .       OPEN      STREAMING
client Lease        .        .       .       .       OPEN      STREAMING
server LeaseReply   .        .       .       .       OPEN      STREAMING

server PartitionStart .      .       .       .       .         STREAMING
server PartitionChunk .      .       .       .       .         STREAMING
server PartitionSnapshot .   .       .       .       .         STREAMING
server PartitionAnswers .    .       .       .       .         STREAMING
server PartitionEnd .        .       .       .       .         STREAMING
server Completed    .        .       .       .       .         STREAMING
client Barrier      .        .       .       .       .         STREAMING
server BarrierReply .        .       .       .       .         STREAMING
client Ack          .        .       .       .       .         STREAMING
"""

STATES: Final = [state for state in SessionState if state is not SessionState.CLOSED]
KINDS: Final = {kind.__name__: kind for kind in MESSAGES.values()}


def _read_table() -> dict[tuple[str, type[Message], SessionState], SessionState | None]:
    head, *rows = [line.split() for line in TABLE.splitlines() if line.strip()]
    assert head == [state.name for state in STATES]
    table: dict[tuple[str, type[Message], SessionState], SessionState | None] = {}
    for who, name, *cells in rows:
        for state, cell in zip(STATES, cells, strict=True):
            leads = None if cell == "." else SessionState[cell]
            for side in ("client", "server"):
                may = who in (side, "both")
                table[side, KINDS[name], state] = leads if may else None
    return table


ALLOWED: Final = _read_table()
EVERY: Final = [
    pytest.param(side, kind, state, id=f"{side}-{kind.__name__}-{state.name}")
    for side in ("client", "server")
    for kind in KINDS.values()
    for state in STATES
]


def _pair(side: str, kind: type[Message], state: SessionState) -> Pair:
    """A pair in `state`, ready for `side` to say the sample of `kind` if it may be said at all."""
    pair = Pair.at(state)
    if ALLOWED[side, kind, state] is not None:
        pair.prepare(kind)
    taken(pair.client)
    taken(pair.server)
    return pair


def test_the_table_covers_every_message_and_state() -> None:
    assert {(kind, state) for _, kind, state in ALLOWED} == {
        (kind, state) for kind in MESSAGES.values() for state in STATES
    }
    assert set(SAMPLES) == set(MESSAGES.values())
    assert len(EVERY) == 2 * 48 * 6


def test_who_sends_what_is_declared_as_the_table_says() -> None:
    for kind in MESSAGES.values():
        for side, sender in (("client", Sender.CLIENT), ("server", Sender.SERVER)):
            may = any(ALLOWED[side, kind, state] is not None for state in STATES)
            assert may == bool(kind.sender & sender)


def test_a_session_begins_where_it_should() -> None:
    pair = Pair()
    assert pair.client.state is SessionState.GREETED
    assert pair.server.state is SessionState.GREETING


@pytest.mark.parametrize(("side", "kind", "state"), EVERY)
def test_said(side: str, kind: type[Message], state: SessionState) -> None:
    pair = _pair(side, kind, state)
    session: Session = pair.client if side == "client" else pair.server
    before = portrait(session)
    expected = ALLOWED[side, kind, state]
    if expected is not None:
        session.send(SAMPLES[kind])
        assert session.state is expected
        data = taken(session)
        assert frames(data)[0] == SAMPLES[kind]
        assert len(frames(data)) == 1
        return
    with pytest.raises(LocalProtocolError) as caught:
        session.send(SAMPLES[kind])
    assert caught.value.status is Status.OUT_OF_TURN
    assert portrait(session) == before


@pytest.mark.parametrize(("side", "kind", "state"), EVERY)
def test_heard(side: str, kind: type[Message], state: SessionState) -> None:
    pair = _pair(side, kind, state)
    session: Session = pair.server if side == "client" else pair.client
    expected = ALLOWED[side, kind, state]
    session.receive(encoded(SAMPLES[kind]), 0.0)
    if expected is not None:
        assert list(session.events()) == [SAMPLES[kind]]
        if expected is SessionState.GREETED:  # the server answers at once
            assert [type(message) for message in frames(taken(session))] == [HelloReply]
            expected = SessionState.READY
        assert session.state is expected
        assert taken(session) == b""
        assert session.buffered == 0
        return
    assert_refused(session, Status.OUT_OF_TURN)


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_when_it_is_over_nothing_is_said_and_everything_ignored(
    side: str, kind: type[Message]
) -> None:
    pair = Pair.at(SessionState.CLOSED)
    session: Session = pair.client if side == "client" else pair.server
    before = portrait(session)
    with pytest.raises(LocalProtocolError):
        session.send(SAMPLES[kind])
    session.receive(encoded(SAMPLES[kind]) + b"garbage", 0.0)
    assert list(session.events()) == []
    assert session.buffered == 0
    assert portrait(session) == before


def test_a_stranger_can_send_no_long_frame() -> None:
    """A frame's limit is its message's. So that it is 4 KiB before `Open` was answered, no message
    that a client may send until then is longer."""
    for (side, kind, state), leads in ALLOWED.items():
        early = state not in (SessionState.OPEN, SessionState.STREAMING)
        if side == "client" and early and leads is not None:
            assert kind.body_bytes_max <= HANDSHAKE_BODY_BYTES_MAX


@pytest.mark.parametrize("length", [8, FRAME_BODY_BYTES_MAX, FRAME_BODY_BYTES_MAX + 8, 0xFFFF_FFF8])
def test_a_length_costs_no_memory(length: int) -> None:
    for message in SAMPLES.values():
        for state in (SessionState.READY, SessionState.STREAMING):
            pair = Pair.at(state)
            for session in (pair.client, pair.server):
                session.receive(pack_header(message.opcode, 0, 3, 9, length, 0) + bytes(100), 0.0)
                with suppress(RemoteProtocolError):
                    list(session.events())
                assert session.buffered <= HEADER_BYTES + 100


def test_an_answer_to_hello_is_all_that_a_server_says_by_itself() -> None:
    pair = Pair()
    pair.to_server()
    assert [type(message) for message in frames(taken(pair.server))] == [HelloReply]


def test_an_unknown_opcode_is_refused_in_every_state() -> None:
    for state in STATES:
        pair = Pair.at(state)
        taken(pair.client)
        taken(pair.server)
        for session in (pair.client, pair.server):
            session.receive(_with_opcode(0x7F), 0.0)
            assert_refused(session, Status.UNKNOWN_MESSAGE)


def _with_opcode(opcode: int) -> bytes:
    from upr_protocol.wire.frame import pack_header

    return pack_header(opcode, 0, 0xFFFF, 0, 0, 0)


def test_an_error_ends_the_session_without_an_error_in_return() -> None:
    for state in STATES:
        pair = Pair.at(state)
        taken(pair.client)
        taken(pair.server)
        for session in (pair.client, pair.server):
            error = Error("no more", "", status=Status.INTERNAL)
            session.receive(encoded(error), 0.0)
            assert list(session.events()) == [error]
            assert session.state is SessionState.CLOSED
            assert taken(session) == b""


def test_failing_says_so_once_however_long_the_story() -> None:
    for state in STATES:
        pair = Pair.at(state)
        taken(pair.client)
        taken(pair.server)
        for session in (pair.client, pair.server):
            for sentence in ("漢" * 5000, "again"):
                session.fail(Status.INTERNAL, sentence)
            (error,) = frames(taken(session))
            assert isinstance(error, Error)
            assert error.sentence
            assert set(error.sentence) == {"漢"}


def test_what_does_not_fit_its_layout_is_not_said() -> None:
    pair = Pair.at(SessionState.READY)
    before = portrait(pair.client)
    for message in (
        Stats(bucket="x" * 70_000),
        Stats(bucket="\ud800"),
        Stats(opaque=1 << 32),
        CreateBucket("b", quota_bytes=-1),
    ):
        with pytest.raises(LocalProtocolError):
            pair.client.send(message)
    assert portrait(pair.client) == before


def test_the_client_introduces_itself_as_it_was_told() -> None:
    session = ClientSession("who:am-i", window_bytes=1 << 20, idle_interval_s=7, now=0.0)
    (said,) = frames(taken(session))
    assert said == Hello(
        identity="who:am-i", versions=(1,), features=0, window_bytes=1 << 20, idle_interval_s=7
    )
