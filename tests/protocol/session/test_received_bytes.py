"""What a session holds of frames that have begun, and when it forgets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.session.kit import Pair, encoded, hello, mutate, taken
from upr_protocol.errors import Status
from upr_protocol.session import ServerSession, Session, SessionState
from upr_protocol.wire import HEADER_BYTES, Credit, Message, Stats


def _open_server() -> ServerSession:
    pair = Pair.in_state(SessionState.OPEN)
    pair.server_sends(Credit(1 << 20))
    return pair.server


def _feed(session: Session, piece: bytes, now: float) -> None:
    """As a connection does: the bytes of a body straight into it, the others beside it."""
    room = session.receive_buffer()
    filled = min(len(room), len(piece))
    room[:filled] = piece[:filled]
    session.receive(piece[filled:], now, filled)


@given(
    values=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 90), max_size=40),
)
def test_a_session_tells_what_has_come_of_a_frame(values: list[int], lengths: list[int]) -> None:
    session = _open_server()
    messages: list[Message] = [mutate(3, opaque, b"x" * n) for opaque, n in enumerate(values)]
    frames = [encoded(message) for message in messages]
    data = b"".join(frames)
    received: list[Message] = []
    position = 0
    for length in [*lengths, *[70] * (len(data) // 70 + 1)]:
        _feed(session, data[position : position + length], 0.0)
        position = min(position + length, len(data))
        received += session.messages()
        whole = 0
        while whole < len(frames) and sum(map(len, frames[: whole + 1])) <= position:
            whole += 1
        assert received == messages[:whole]
        unfinished = position - sum(map(len, frames[:whole]))
        body_begun = whole < len(frames) and unfinished >= HEADER_BYTES
        body_bytes = len(frames[whole]) - HEADER_BYTES if body_begun else 0
        assert session.unfinished_body_bytes == body_bytes
        assert session.buffered == (unfinished - HEADER_BYTES if body_begun else unfinished)
        assert session.buffered <= session.unfinished_frame_bytes <= max(unfinished, body_bytes)
    assert received == messages


@pytest.mark.parametrize("end", ["fail", "forget_received"])
@pytest.mark.parametrize("length", [10, HEADER_BYTES + 5])
def test_a_session_that_is_over_holds_nothing_of_a_frame(end: str, length: int) -> None:
    session = _open_server()
    session.receive(encoded(mutate(3, 1, b"x" * 1000))[:length], 0.0)
    assert list(session.messages()) == []
    assert session.buffered
    if end == "fail":
        session.fail(Status.INTERNAL, "enough")
    else:
        session.forget_received()
    assert session.buffered == session.unfinished_frame_bytes == 0
    assert session.unfinished_body_bytes == len(session.receive_buffer()) == 0


def test_what_is_to_be_written_is_counted() -> None:
    pair = Pair()
    assert pair.server.outgoing_bytes == 0
    expected = len(encoded(hello()))
    assert pair.client.outgoing_bytes == len(taken(pair.client)) == expected
    assert pair.client.outgoing_bytes == 0


def test_silence_is_counted_from_the_moment_of_the_greeting() -> None:
    session = ServerSession("test:server", now=0.0)
    session.receive(encoded(hello(idle_interval_s=20)), 100.0)
    assert len(list(session.messages())) == 1
    assert session.keep_alive.next_check() == 120.0
    session.receive(encoded(Stats(opaque=1)), 110.0)
    assert session.tick(149.9)
    assert not session.tick(150.0)
