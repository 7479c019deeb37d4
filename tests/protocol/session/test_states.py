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
    full_state,
    taken,
)
from upr_kernel import pack_header
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError, Status
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, HANDSHAKE_BODY_BYTES_MAX
from upr_protocol.session import ClientSession, Session, SessionState
from upr_protocol.session.states import SESSION
from upr_protocol.wire import (
    HEADER_BYTES,
    MESSAGES,
    CreateBucket,
    Error,
    Hello,
    HelloReply,
    Message,
    Open,
    Refusal,
    Role,
    Stats,
)

STATES: Final = [state for state in SessionState if state is not SessionState.CLOSED]

# What the declarations must come to, counted by hand: a message with a wrong state or sender
# changes one of these numbers.
MESSAGES_SAID: Final = {
    SessionState.GREETING: {"client": 2, "server": 1},
    SessionState.GREETED: {"client": 1, "server": 2},
    SessionState.UNAUTHENTICATED: {"client": 2, "server": 1},
    SessionState.AUTHENTICATING: {"client": 1, "server": 3},
    SessionState.CHALLENGED: {"client": 2, "server": 1},
    SessionState.READY: {"client": 14, "server": 9},
    SessionState.OPENING: {"client": 3, "server": 5},
    SessionState.OPEN: {"client": 24, "server": 18},
    SessionState.STREAMING: {"client": 25, "server": 25},
    SessionState.CLOSED: {"client": 0, "server": 0},
}

MOVES: Final = """
    GREETING  Hello      GREETED
    GREETED   HelloReply READY
    UNAUTHENTICATED StartLogIn          AUTHENTICATING
    AUTHENTICATING  LogInChallenge CHALLENGED
    AUTHENTICATING  LoggedIn       READY
    CHALLENGED      ContinueLogIn  AUTHENTICATING
    READY     Open       OPENING
    OPENING   Opened     OPEN
    OPENING   Refusal    READY
    OPEN      Go         STREAMING
    READY     Close      CLOSED
    OPENING   Close      CLOSED
    OPEN      Close      CLOSED
    STREAMING Close      CLOSED
    GREETING  Error      CLOSED
    GREETED   Error      CLOSED
    UNAUTHENTICATED Error          CLOSED
    AUTHENTICATING  Error          CLOSED
    CHALLENGED      Error          CLOSED
    READY     Error      CLOSED
    OPENING   Error      CLOSED
    OPEN      Error      CLOSED
    STREAMING Error      CLOSED
"""
"""All that moves a session from one state to another."""


def _role(side: str) -> Role:
    return Role.CLIENT if side == "client" else Role.SERVER


def _leads_to(side: str, kind: type[Message], state: SessionState) -> SessionState | None:
    """Where `kind` leads when `side` says it in `state`; None when it must not."""
    return SESSION[state].get(kind) if kind.sender & _role(side) else None


def _pair(side: str, kind: type[Message], state: SessionState) -> Pair:
    """A pair in `state`, ready for `side` to say the sample of `kind` if it may be said at all."""
    pair = Pair.in_state(state)
    if _leads_to(side, kind, state) is not None:
        pair.prepare(kind)
    taken(pair.client)
    taken(pair.server)
    return pair


def test_every_message_has_a_sample() -> None:
    assert set(SAMPLES) == set(MESSAGES.values())


def test_only_the_handshake_and_a_goodbye_move_a_session() -> None:
    moves = {
        (state.name, kind.__name__, follows.name)
        for state, row in SESSION.items()
        for kind, follows in row.items()
        if follows is not state
    }
    assert moves == {tuple(line.split()) for line in MOVES.strip().splitlines()}


@pytest.mark.parametrize("state", SessionState)
def test_as_many_messages_may_be_said_in_a_state_as_were_counted(state: SessionState) -> None:
    counts = {
        side: sum(_leads_to(side, kind, state) is not None for kind in MESSAGES.values())
        for side in ("client", "server")
    }
    assert counts == MESSAGES_SAID[state]


def test_a_request_may_be_answered_or_refused_in_every_state_that_may_follow() -> None:
    # `Open` is said only while no other request is open.
    unreachable = {SessionState.OPENING, SessionState.CLOSED}
    for row in SESSION.values():
        for kind, follows in row.items():
            if kind.answers and kind is not Open:
                for later in {follows, *SESSION[follows].values()} - unreachable:
                    assert {*kind.answers, Refusal} <= SESSION[later].keys()
    assert {*Open.answers, Refusal} <= SESSION[SessionState.OPENING].keys()


def test_a_session_begins_where_it_should() -> None:
    pair = Pair()
    assert pair.client.state is SessionState.GREETED
    assert pair.server.state is SessionState.GREETING


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_side_can_send_exactly_the_messages_that_the_state_allows(
    side: str, state: SessionState
) -> None:
    for kind in MESSAGES.values():
        pair = _pair(side, kind, state)
        session: Session = pair.client if side == "client" else pair.server
        before = full_state(session)
        follows = _leads_to(side, kind, state)
        if follows is not None:
            session.send(SAMPLES[kind])
            assert session.state is follows
            data = taken(session)
            assert frames(data)[0] == SAMPLES[kind]
            assert len(frames(data)) == 1
            continue
        with pytest.raises(LocalProtocolError) as caught:
            session.send(SAMPLES[kind])
        assert caught.value.status is Status.OUT_OF_TURN
        assert full_state(session) == before


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_side_accepts_exactly_the_messages_that_the_state_allows(
    side: str, state: SessionState
) -> None:
    for kind in MESSAGES.values():
        pair = _pair(side, kind, state)
        session: Session = pair.server if side == "client" else pair.client
        follows = _leads_to(side, kind, state)
        session.receive(encoded(SAMPLES[kind]), 0.0)
        if follows is None:
            assert_refused(session, Status.OUT_OF_TURN)
            continue
        assert list(session.messages()) == [SAMPLES[kind]]
        if follows is SessionState.GREETED:  # the server answers at once
            assert [type(message) for message in frames(taken(session))] == [HelloReply]
            follows = SessionState.READY
        assert session.state is follows
        assert taken(session) == b""
        assert session.buffered == 0


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_closed_session_sends_nothing_and_ignores_everything(side: str) -> None:
    for sample in SAMPLES.values():
        pair = Pair.in_state(SessionState.CLOSED)
        session: Session = pair.client if side == "client" else pair.server
        before = full_state(session)
        with pytest.raises(LocalProtocolError):
            session.send(sample)
        session.receive(encoded(sample) + b"garbage", 0.0)
        assert list(session.messages()) == []
        assert session.buffered == 0
        assert full_state(session) == before


def test_a_stranger_can_send_no_long_frame() -> None:
    """A frame's limit is its message's. So that it is 4 KiB before `Open` was answered, no message
    that a client may send until then is longer."""
    for state in STATES:
        if state not in (SessionState.OPEN, SessionState.STREAMING):
            for kind in SESSION[state]:
                if kind.sender & Role.CLIENT:
                    assert kind.body_bytes_max <= HANDSHAKE_BODY_BYTES_MAX


@pytest.mark.parametrize("length", [8, FRAME_BODY_BYTES_MAX, FRAME_BODY_BYTES_MAX + 8, 0xFFFF_FFF8])
def test_a_length_costs_no_memory(length: int) -> None:
    for message in SAMPLES.values():
        for state in (SessionState.READY, SessionState.STREAMING):
            pair = Pair.in_state(state)
            for session in (pair.client, pair.server):
                session.receive(pack_header(message.opcode, 0, 3, 9, length, 0) + bytes(100), 0.0)
                with suppress(RemoteProtocolError):
                    list(session.messages())
                assert session.buffered <= HEADER_BYTES + 100


def test_an_answer_to_hello_is_all_that_a_server_says_by_itself() -> None:
    pair = Pair()
    pair.to_server()
    assert [type(message) for message in frames(taken(pair.server))] == [HelloReply]


def test_an_unknown_opcode_is_refused_in_every_state() -> None:
    for state in STATES:
        pair = Pair.in_state(state)
        taken(pair.client)
        taken(pair.server)
        for session in (pair.client, pair.server):
            session.receive(_with_opcode(0x7F), 0.0)
            assert_refused(session, Status.UNKNOWN_MESSAGE)


def _with_opcode(opcode: int) -> bytes:
    return pack_header(opcode, 0, 0xFFFF, 0, 0, 0)


def test_an_error_ends_the_session_without_an_error_in_return() -> None:
    for state in STATES:
        pair = Pair.in_state(state)
        taken(pair.client)
        taken(pair.server)
        for session in (pair.client, pair.server):
            error = Error("no more", "", status=Status.INTERNAL)
            session.receive(encoded(error), 0.0)
            assert list(session.messages()) == [error]
            assert session.state is SessionState.CLOSED
            assert taken(session) == b""


def test_a_failing_session_sends_one_error_however_long_the_sentence() -> None:
    for state in STATES:
        pair = Pair.in_state(state)
        taken(pair.client)
        taken(pair.server)
        for session in (pair.client, pair.server):
            for sentence in ("漢" * 5000, "again"):
                session.fail(Status.INTERNAL, sentence)
            (error,) = frames(taken(session))
            assert isinstance(error, Error)
            assert error.sentence
            assert set(error.sentence) == {"漢"}


def test_a_value_that_does_not_fit_the_layout_is_not_sent() -> None:
    pair = Pair.in_state(SessionState.READY)
    before = full_state(pair.client)
    for message in (
        Stats(bucket="x" * 70_000),
        Stats(bucket="\ud800"),
        Stats(opaque=1 << 32),
        CreateBucket("b", quota_bytes=-1),
    ):
        with pytest.raises(LocalProtocolError):
            pair.client.send(message)
    assert full_state(pair.client) == before


def test_the_client_introduces_itself_with_the_identity_it_was_given() -> None:
    session = ClientSession("who:am-i", window_bytes=1 << 20, idle_interval_s=7, now=0.0)
    (message,) = frames(taken(session))
    assert message == Hello(
        identity="who:am-i", versions=(1,), features=0, window_bytes=1 << 20, idle_interval_s=7
    )
