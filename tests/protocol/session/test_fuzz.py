"""Nonsense into a session in each state: `RemoteProtocolError`, and nothing else."""

from __future__ import annotations

from typing import Final

from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.protocol.session.kit import SAMPLES, Pair, encoded, frames, taken
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, HANDSHAKE_BODY_BYTES_MAX
from upr_protocol.session import Session, SessionState
from upr_protocol.wire import HEADER_BYTES, Error, HelloReply, Message, Sender
from upr_protocol.wire.frame import MAGIC, pack_header, unpack_header

# GREETED is no state of a server between two messages, and GREETING none of a client.
PLACES: Final = [
    (side, state)
    for side in ("client", "server")
    for state in SessionState
    if (side, state) not in (("client", SessionState.GREETING), ("server", SessionState.GREETED))
]
SAMPLE_MESSAGES: Final = list(SAMPLES.values())
U8: Final = st.integers(0, 0xFF)
U16: Final = st.integers(0, 0xFFFF)
U32: Final = st.integers(0, 0xFFFF_FFFF)


def _session(place: tuple[str, SessionState], kinds: list[type[Message]]) -> Session:
    """A session in that state, in the midst of what the samples of `kinds` need."""
    side, state = place
    pair = Pair.at(state)
    if state is SessionState.STREAMING:
        for kind in kinds:
            if not pair.client.streams and not pair.client._requests and not pair.client.barriers:
                pair.prepare(kind)
    session: Session = pair.client if side == "client" else pair.server
    taken(session)
    return session


def _feed(session: Session, pieces: list[bytes]) -> None:
    """Feeds `pieces`, and checks all that is promised about the answer."""
    stranger = session.state not in (SessionState.OPEN, SessionState.STREAMING)
    longest = HANDSHAKE_BODY_BYTES_MAX if stranger else FRAME_BODY_BYTES_MAX
    was_over = session.state is SessionState.CLOSED
    fed = session.buffered
    for piece in pieces:
        fed += len(piece)
        session.receive(piece, 0.0)
        heard: list[Message] = []
        status = None
        try:
            heard += session.events()
        except RemoteProtocolError as caught:
            status = caught.status
        if status is not None:
            said = frames(taken(session))
            assert [error.status for error in said if isinstance(error, Error)] == [status]
            assert isinstance(said[-1], Error)
            assert session.state is SessionState.CLOSED
        elif session.role is Sender.SERVER:
            assert session.buffered <= HEADER_BYTES + longest
        assert not (was_over and heard)
        assert session.buffered <= fed
        was_over = session.state is SessionState.CLOSED
    # Nothing that it is told makes a session say much by itself.
    assert sum(map(len, map(bytes, session.take(0.0)))) <= 200


# Bytes that get further than the first check now and then.
NONSENSE: Final = st.lists(
    st.one_of(
        st.binary(max_size=100),
        st.just(MAGIC.to_bytes(2, "little")),
        st.builds(pack_header, U8, U16, U16, U32, U32.map(lambda n: n & ~7), U32),
        st.sampled_from([encoded(message) for message in SAMPLE_MESSAGES]),
    ),
    max_size=6,
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(PLACES), NONSENSE)
def test_random_bytes(place: tuple[str, SessionState], pieces: list[bytes]) -> None:
    _feed(_session(place, []), pieces)


# One thing changed in a frame; `mend`: with its checksums put right again.
EDITS: Final = st.one_of(
    st.none(),
    st.tuples(st.just("body"), st.integers(0, 300), st.integers(1, 255)),
    st.tuples(st.just("header"), st.integers(2, HEADER_BYTES - 9), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(1, 40), st.just(8)),
    st.tuples(st.just("grow"), st.integers(1, 40), U8),
)


def _edited(frame: bytes, edit: tuple[str, int, int] | None, *, mend: bool) -> bytes:
    header = bytearray(frame[:HEADER_BYTES])
    body = bytearray(frame[HEADER_BYTES:])
    if edit is not None:
        what, at, by = edit
        if what == "body" and body:
            body[at % len(body)] ^= by
        elif what == "header":
            header[at] ^= by
        elif what == "cut":
            del body[max(0, len(body) - 8 * at) :]
        elif what == "grow":
            body += bytes([by]) * (8 * at)
        if mend:
            length = len(body) if what in ("cut", "grow") else None
            _mend(header, body, length)
    return bytes(header + body)


def _mend(header: bytearray, body: bytearray, length: int | None) -> None:
    if length is not None:
        header[12:16] = length.to_bytes(4, "little")
    header[16:20] = crc32c(bytes(body)).to_bytes(4, "little")
    header[20:24] = crc32c(bytes(header[:20])).to_bytes(4, "little")


@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from(PLACES),
    st.lists(
        st.tuples(st.sampled_from(SAMPLE_MESSAGES), EDITS, st.booleans()), min_size=1, max_size=5
    ),
    st.integers(1, 2000),
)
def test_messages_that_were_changed_dropped_or_put_out_of_order(
    place: tuple[str, SessionState],
    said: list[tuple[Message, tuple[str, int, int] | None, bool]],
    length: int,
) -> None:
    session = _session(place, [type(message) for message, _, _ in said])
    data = b"".join(_edited(encoded(message), edit, mend=mend) for message, edit, mend in said)
    _feed(session, [data[at : at + length] for at in range(0, len(data), length)])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), st.data())
def test_bodies_of_random_bytes(place: tuple[str, SessionState], data: st.DataObject) -> None:
    """Under a sound header, in a state that admits the message."""
    session = _session(place, [])
    for _ in range(3):
        message = data.draw(st.sampled_from(SAMPLE_MESSAGES))
        body = data.draw(st.binary(max_size=40)) * data.draw(st.integers(1, 8)) * 8
        header = pack_header(message.opcode, 0, 3, 9, len(body), crc32c(body))
        assert unpack_header(header).length == len(body)
        _feed(session, [header + body])


@settings(max_examples=15, deadline=None)
@example(length=0xFFFF_FFF8)
@given(length=U32.map(lambda number: number & ~7))
def test_a_length_costs_no_memory(length: int) -> None:
    for message in SAMPLE_MESSAGES:
        for state in (SessionState.READY, SessionState.STREAMING):
            pair = Pair.at(state)
            for session in (pair.client, pair.server):
                taken(session)
                _feed(session, [pack_header(message.opcode, 0, 3, 9, length, 0), bytes(100)])
                assert session.buffered <= HEADER_BYTES + 100


def test_an_answer_to_hello_is_all_that_a_server_says_by_itself() -> None:
    pair = Pair()
    pair.to_server()
    assert [type(message) for message in frames(taken(pair.server))] == [HelloReply]
