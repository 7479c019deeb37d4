"""The stream of one partition: each input in each state on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.protocol.session.kit import (
    BEGINNING,
    HISTORY,
    Pair,
    assert_refused,
    chunk,
    close_stream,
    encoded,
    end,
    full_state,
    snapshot,
    start,
    stored,
    stream,
    stream_end,
    stream_reply,
    taken,
)
from upr_protocol.chunk import Chunk
from upr_protocol.errors import LocalProtocolError, Status
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.session import ServerSession, Session, SessionState
from upr_protocol.session.stream import StreamRecord
from upr_protocol.wire import (
    HEADER_BYTES,
    Barrier,
    BarrierReply,
    Message,
    Noop,
    PartitionAnswers,
    PartitionChunk,
    Refusal,
    StreamEnd,
)

# The inputs of a stream, and the state after each; `.` where the input is not allowed. Written from
# the protocol, and not from the code. In brackets: the server may not send it any more, but it may
# have sent it before, and the client drops it.
TABLE: Final = """
                     ABSENT     REQUESTED  BETWEEN   INSIDE    CLOSING

client Stream        REQUESTED  .          .         .         .
server accepts       .          BETWEEN    .         .         .
server refuses       .          ABSENT     .         .         .
server PartitionStart .         .          INSIDE    INSIDE    [CLOSING]
server PartitionChunk .         .          .         INSIDE    [CLOSING]
server PartitionSnapshot .      .          BETWEEN   .         [CLOSING]
server PartitionAnswers .       .          BETWEEN   INSIDE    [CLOSING]
server PartitionEnd  .          .          .         BETWEEN   [CLOSING]
client CloseStream   .          .          CLOSING   CLOSING   .
server StreamEnd     .          .          ABSENT    ABSENT    ABSENT
"""

# The stream is at 10, inside the snapshot (0, 10]: a chunk without mutations, the end, and a start
# that replaces the snapshot are all allowed.
INPUTS: Final[dict[str, Message]] = {
    "Stream": stream(3, 9),
    "accepts": stream_reply(3, 9),
    "refuses": stream_reply(3, 9, status=Status.ROLLBACK),
    "PartitionStart": start(3, 9, 10, 12),
    "PartitionChunk": PartitionChunk(stored(10, 10), partition=PartitionId(3), opaque=9),
    "PartitionSnapshot": snapshot(3, 9, 10, 12),
    "PartitionAnswers": PartitionAnswers(
        ((bytes(16), 1, 10, b"answer"),), partition=PartitionId(3), opaque=9
    ),
    "PartitionEnd": end(3, 9, 10),
    "CloseStream": close_stream(3, 9),
    "StreamEnd": stream_end(3, 9),
}


def _read_table() -> list[tuple[str, str, str, str]]:
    head, *rows = [line.split() for line in TABLE.splitlines() if line.strip()]
    return [
        (side, input_name, state, cell)
        for side, input_name, *cells in rows
        for state, cell in zip(head, cells, strict=True)
    ]


CELLS: Final = [pytest.param(*row, id="-".join(row[1:3])) for row in _read_table()]


def _pair(state: str, *, crossing: bool) -> Pair:
    """A pair whose stream of partition 3 is in `state`, with opaque 9.

    In CLOSING, `crossing` says whether the client's message is still on its way to the server.
    """
    pair = Pair.in_state(SessionState.STREAMING)
    if state == "ABSENT":
        return pair
    pair.client_sends(stream(3, 9))
    if state == "REQUESTED":
        return pair
    pair.server_sends(stream_reply(3, 9))
    pair.turn(3)
    pair.server_sends(start(3, 9, 0, 10), chunk(3, 9, 0, 10))
    if state == "BETWEEN":
        pair.server_sends(end(3, 9, 10))
        pair.turn(3)
    if state == "CLOSING":
        pair.client.send(close_stream(3, 9))
        if not crossing:
            pair.to_server()
    taken(pair.client)
    taken(pair.server)
    return pair


def _state_of(session: Session) -> str:
    record = session.streams.get(PartitionId(3))
    return record.state.name if record else "ABSENT"


def test_the_table_covers_every_state_and_input() -> None:
    assert len(CELLS) == 5 * 10


@pytest.mark.parametrize(("side", "input_name", "state", "cell"), CELLS)
def test_an_input_is_sent_only_as_in_the_table(
    side: str, input_name: str, state: str, cell: str
) -> None:
    pair = _pair(state, crossing=False)
    session: Session = pair.client if side == "client" else pair.server
    assert _state_of(session) == state
    before = full_state(session)
    if cell.isalpha():
        session.send(INPUTS[input_name])
        assert _state_of(session) == cell
        return
    with pytest.raises(LocalProtocolError):
        session.send(INPUTS[input_name])
    assert full_state(session) == before


@pytest.mark.parametrize(("side", "input_name", "state", "cell"), CELLS)
def test_an_input_is_received_only_as_in_the_table(
    side: str, input_name: str, state: str, cell: str
) -> None:
    pair = _pair(state, crossing=True)
    session: Session = pair.server if side == "client" else pair.client
    if state == "CLOSING" and session is pair.server:
        pair = _pair(state, crossing=False)
        session = pair.server
    message = INPUTS[input_name]
    session.receive(encoded(message), 0.0)
    if (state, input_name) == ("ABSENT", "CloseStream"):
        # The client may have sent it before it received StreamEnd.
        before = full_state(session)
        assert list(session.messages()) == []
        assert full_state(session) == before
    elif cell == "[CLOSING]":
        assert list(session.messages()) == []
        assert _state_of(session) == "CLOSING"
    elif cell != ".":
        assert list(session.messages()) == [message]
        assert _state_of(session) == cell
    else:
        # An answer without an open request is malformed; anything else is out of turn.
        malformed = input_name in ("accepts", "refuses") and state == "ABSENT"
        if input_name == "Stream":
            # The open stream has the same opaque.
            status = Status.OPAQUE_IN_USE
        else:
            status = Status.MALFORMED if malformed else Status.OUT_OF_TURN
        assert_refused(session, status)


def test_each_close_of_a_missing_stream_is_a_step_of_its_own() -> None:
    """It yields no message. But a peer may send thousands, and other tasks must run in between."""
    pair = Pair.in_state(SessionState.STREAMING)
    pair.server.receive(encoded(*[close_stream(3, 9)] * 3, Noop()), 0.0)
    assert list(pair.server.message_steps()) == [None, None, None, Noop()]


def test_a_second_stream_of_a_partition_is_refused_with_any_opaque() -> None:
    for state in ("REQUESTED", "BETWEEN", "INSIDE", "CLOSING"):
        pair = _pair(state, crossing=False)
        before = full_state(pair.client)
        with pytest.raises(LocalProtocolError):
            pair.client.send(stream(3, 10))
        assert full_state(pair.client) == before
        pair.server.receive(encoded(stream(3, 10)), 0.0)
        assert_refused(pair.server, Status.OUT_OF_TURN)


# Messages that are wrong inside a snapshot: how much of it was sent before, and the message.
WRONG: Final = {
    "a start above the stream's position": ("BETWEEN", start(3, 9, 11, 20)),
    "a start below the stream's position": ("BETWEEN", start(3, 9, 9, 20)),
    "a start that ends before it begins": ("BETWEEN", start(3, 9, 10, 9)),
    "a start for another stream of the partition": ("BETWEEN", start(3, 8, 10, 20)),
    "a whole snapshot that leaves something out": ("BETWEEN", snapshot(3, 9, 11, 20)),
    "a whole snapshot that repeats something": ("BETWEEN", snapshot(3, 9, 9, 20)),
    "a whole snapshot for another stream": ("BETWEEN", snapshot(3, 8, 10, 20)),
    "a chunk that leaves something out": ("INSIDE", chunk(3, 9, 11, 15)),
    "a chunk that repeats something": ("INSIDE", chunk(3, 9, 9, 15)),
    "a chunk beyond the end": ("INSIDE", chunk(3, 9, 10, 21)),
    "a chunk for another stream of the partition": ("INSIDE", chunk(3, 8, 10, 15)),
    "an end before everything came": ("INSIDE", end(3, 9, 20)),
    "an end at the last chunk, which is not the last": ("INSIDE", end(3, 9, 10)),
    "an end for another stream of the partition": ("ALL", end(3, 8, 20)),
    "an end beyond the end": ("ALL", end(3, 9, 21)),
    "an end before the end": ("ALL", end(3, 9, 19)),
    "a chunk beyond an end that was reached": ("ALL", chunk(3, 9, 20, 21)),
    "another start that leaves something out": ("SOME", start(3, 9, 16, 20)),
    "another start that repeats something": ("SOME", start(3, 9, 10, 20)),
    "another start that ends sooner": ("SOME", start(3, 9, 15, 19)),
}


def _pair_at_10(state: str) -> Pair:
    """A pair whose stream is complete at 10. Unless `state` is BETWEEN, the snapshot (10, 20] has
    begun: INSIDE, with nothing of it sent; or SOME or ALL of it."""
    pair = _pair("BETWEEN", crossing=False)
    if state != "BETWEEN":
        pair.server_sends(start(3, 9, 10, 20))
    if state in ("SOME", "ALL"):
        pair.server_sends(chunk(3, 9, 10, 15))
    if state == "ALL":
        pair.server_sends(chunk(3, 9, 15, 20))
    return pair


@pytest.mark.parametrize(("state", "message"), WRONG.values(), ids=WRONG)
def test_chunks_that_leave_out_or_repeat_something_are_refused(
    state: str, message: Message
) -> None:
    pair = _pair_at_10(state)
    before = full_state(pair.server)
    with pytest.raises(LocalProtocolError) as caught:
        pair.server.send(message)
    assert caught.value.status is Status.MALFORMED
    assert full_state(pair.server) == before
    before = full_state(pair.client)
    pair.client.receive(encoded(message), 0.0)
    assert_refused(pair.client, Status.MALFORMED)
    after = full_state(pair.client)
    for same in ("streams", "window", "requests"):
        assert after[same] == before[same]


def test_a_snapshot_in_one_frame_equals_a_start_a_chunk_and_an_end() -> None:
    long, short = _pair_at_10("BETWEEN"), _pair_at_10("BETWEEN")
    long.server_sends(start(3, 9, 10, 20), chunk(3, 9, 10, 20), end(3, 9, 20))
    short.server_sends(snapshot(3, 9, 10, 20))
    assert full_state(long.server) == full_state(short.server)
    assert full_state(long.client) == full_state(short.client)
    short.client.acknowledge(HEADER_BYTES + snapshot(3, 9, 10, 20).chunk.nbytes)


def _no_history() -> Pair:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.accept(3, 9)
    pair.turn(3)
    return pair


def _interrupted() -> Pair:
    pair = _pair_at_10("SOME")
    pair.server_sends(stream_end(3, 9, Status.STATE_CHANGED))
    pair.client_sends(stream(3, 9, _position(10, 15, begin=10, until=20)))
    pair.server_sends(stream_reply(3, 9, 15))
    pair.turn(3)
    return pair


def _without_turn() -> Pair:
    pair = _pair_at_10("BETWEEN")
    pair.server.end_turn()
    return pair


def _window_used_up() -> Pair:
    pair = _pair_at_10("BETWEEN")
    pair.server.window.note_sent(pair.server.window.remaining_bytes)
    return pair


def _closing() -> Pair:
    pair = _pair_at_10("BETWEEN")
    pair.client_sends(close_stream(3, 9))
    return pair


def _inside_without_window() -> Pair:
    pair = _pair_at_10("INSIDE")
    pair.server.window.note_sent(pair.server.window.remaining_bytes)
    return pair


def _closing_inside() -> Pair:
    pair = _pair_at_10("INSIDE")
    pair.client_sends(close_stream(3, 9))
    return pair


NewPair = Callable[[], Pair]


def _check_same_outcome(
    new_pair: NewPair, message: PartitionChunk, send_directly: Callable[[ServerSession], None]
) -> bool:
    """Sends `message` with `send`, and with `send_directly`, from equal sessions, and checks that
    both do the same; returns whether it was sent."""
    general, direct = new_pair(), new_pair()
    errors: list[LocalProtocolError | None] = []
    sends: tuple[Callable[[], None], ...] = (
        lambda: general.server.send(message),
        lambda: send_directly(direct.server),
    )
    for send in sends:
        try:
            send()
        except LocalProtocolError as error:
            errors.append(error)
        else:
            errors.append(None)
    assert str(errors[0]) == str(errors[1])
    assert full_state(general.server) == full_state(direct.server)
    assert taken(general.server) == taken(direct.server)
    return errors[0] is None


@pytest.mark.parametrize(
    ("new_pair", "after", "until", "is_sent"),
    [
        (lambda: _pair_at_10("BETWEEN"), 10, 20, True),
        (lambda: _pair_at_10("BETWEEN"), 11, 20, False),
        (lambda: _pair_at_10("BETWEEN"), 9, 20, False),
        (lambda: _pair_at_10("SOME"), 15, 20, False),
        (_no_history, 0, 10, False),
        (_interrupted, 15, 19, False),
        (_without_turn, 10, 20, False),
        (_window_used_up, 10, 20, False),
        (_closing, 10, 20, False),
    ],
)
def test_a_snapshot_that_is_sent_without_a_message_is_checked_like_a_message(
    new_pair: NewPair, after: int, until: int, is_sent: bool
) -> None:
    message = snapshot(3, 9, after, until)
    assert is_sent == _check_same_outcome(
        new_pair, message, lambda server: server.send_snapshot(message.partition, message.chunk)
    )


@pytest.mark.parametrize(
    ("new_pair", "after", "until", "is_sent"),
    [
        (lambda: _pair_at_10("INSIDE"), 10, 15, True),
        (lambda: _pair_at_10("INSIDE"), 10, 20, True),
        (lambda: _pair_at_10("SOME"), 15, 20, True),
        (lambda: _pair_at_10("SOME"), 15, 21, False),
        (lambda: _pair_at_10("SOME"), 14, 20, False),
        (lambda: _pair_at_10("SOME"), 16, 20, False),
        (lambda: _pair_at_10("ALL"), 20, 21, False),
        (lambda: _pair_at_10("BETWEEN"), 10, 20, False),
        (_no_history, 0, 10, False),
        (_interrupted, 15, 20, False),
        (_without_turn, 10, 20, False),
        (_inside_without_window, 10, 20, False),
        (_closing_inside, 10, 20, False),
    ],
)
def test_a_chunk_that_is_sent_without_a_message_is_checked_like_a_message(
    new_pair: NewPair, after: int, until: int, is_sent: bool
) -> None:
    message = chunk(3, 9, after, until)
    assert is_sent == _check_same_outcome(
        new_pair, message, lambda server: server.send_chunk(message.partition, message.chunk)
    )


def _check_refused_by_both(pair: Pair, message: Message) -> None:
    with pytest.raises(LocalProtocolError):
        pair.server.send(message)
    pair.client.receive(encoded(message), 0.0)
    assert_refused(pair.client, Status.MALFORMED)


def test_a_snapshot_in_one_frame_needs_an_earlier_start_that_names_its_history() -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.accept(3, 9)
    pair.turn(3)
    _check_refused_by_both(pair, snapshot(3, 9, 0, 10))


def test_a_snapshot_in_one_frame_must_reach_the_end_of_an_interrupted_one() -> None:
    pair = _pair_at_10("SOME")
    pair.server_sends(stream_end(3, 9, Status.STATE_CHANGED))
    pair.client_sends(stream(3, 9, _position(10, 15, begin=10, until=20)))
    pair.server_sends(stream_reply(3, 9, 15))
    pair.turn(3)
    _check_refused_by_both(pair, snapshot(3, 9, 15, 19))


def test_a_snapshot_whose_cursor_was_dropped_is_replaced() -> None:
    pair = _pair_at_10("SOME")
    pair.server_sends(start(3, 9, 15, 30), chunk(3, 9, 15, 30), end(3, 9, 30))
    for session in (pair.client, pair.server):
        record = session.streams[PartitionId(3)]
        assert (record.seq, record.end, record.complete) == (30, 30, 30)


def test_the_snapshot_that_replaces_another_may_end_where_it_did() -> None:
    pair = _pair_at_10("SOME")
    pair.server_sends(start(3, 9, 15, 20), chunk(3, 9, 15, 20), end(3, 9, 20))
    assert pair.server.snapshot_ends == ((3, 20),)


def test_a_chunk_may_end_before_the_next_number_and_hold_nothing() -> None:
    """What was deduplicated leaves gaps in the numbers, but none in what chunks cover."""
    pair = _pair_at_10("INSIDE")
    empty_chunk = Chunk.build([], SeqNo(13), SeqNo(16))
    pair.server_sends(
        chunk(3, 9, 10, 13),
        PartitionChunk(stored(13, 13), partition=PartitionId(3), opaque=9),
        PartitionChunk(empty_chunk, partition=PartitionId(3), opaque=9),
        chunk(3, 9, 16, 20),
        end(3, 9, 20),
    )
    assert pair.client.streams[PartitionId(3)].complete == 20


# The position at which a stream continues.


def _position(complete: int, received: int, *, begin: int = 0, until: int = 0) -> Position:
    partial = PartialSnapshot(HISTORY, SeqNo(begin), SeqNo(until)) if until else None
    return Position(FailoverLog.of_pairs([(7, 0)]), SeqNo(complete), SeqNo(received), partial)


def _resume(position: Position, seq: int) -> Pair:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.client_sends(stream(3, 9, position))
    pair.server_sends(stream_reply(3, 9, seq))
    pair.turn(3)
    return pair


@pytest.mark.parametrize(("received", "seq"), [(15, 16), (12, 13), (15, 14), (15, 10), (15, 4)])
def test_a_stream_reply_with_another_position_than_the_clients_is_refused(
    received: int, seq: int
) -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.client_sends(stream(3, 9, _position(10, received, begin=10, until=20)))
    message = stream_reply(3, 9, seq)
    before = full_state(pair.server)
    with pytest.raises(LocalProtocolError):
        pair.server.send(message)
    assert full_state(pair.server) == before
    pair.client.receive(encoded(message), 0.0)
    assert_refused(pair.client, Status.MALFORMED)


def test_an_interrupted_snapshot_is_completed_before_its_end_is_sent() -> None:
    """The part that the client has may lack older values of keys whose newer values are in the
    rest."""
    pair = _resume(_position(10, 15, begin=10, until=20), 15)
    assert pair.server.snapshot_ends == ((3, 10),)
    message = start(3, 9, 15, 19)
    with pytest.raises(LocalProtocolError):
        pair.server.send(message)
    pair.server_sends(start(3, 9, 15, 20), chunk(3, 9, 15, 20))
    assert pair.server.snapshot_ends == ((3, 10),)
    pair.server_sends(end(3, 9, 20))
    assert pair.server.snapshot_ends == ((3, 20),)


def test_a_client_refuses_a_snapshot_that_ends_before_the_interrupted_one() -> None:
    pair = _resume(_position(10, 15, begin=10, until=20), 15)
    pair.client.receive(encoded(start(3, 9, 15, 19)), 0.0)
    assert_refused(pair.client, Status.MALFORMED)


def test_a_snapshot_of_which_the_client_has_nothing_need_not_be_completed() -> None:
    pair = _resume(_position(10, 10, begin=10, until=20), 10)
    pair.server_sends(start(3, 9, 10, 12), chunk(3, 9, 10, 12), end(3, 9, 12))
    assert pair.server.snapshot_ends == ((3, 12),)


def test_a_client_that_lacks_only_the_end_message_is_complete() -> None:
    pair = _resume(_position(10, 20, begin=10, until=20), 20)
    assert pair.server.snapshot_ends == ((3, 20),)


def test_a_client_sends_no_position_that_contradicts_itself() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    before = full_state(pair.client)
    for position in (
        _position(10, 11),
        _position(10, 9),
        _position(10, 21, begin=10, until=20),
        _position(10, 15, begin=16, until=20),
        _position(16, 15, begin=10, until=20),
    ):
        with pytest.raises(LocalProtocolError):
            pair.client.send(stream(3, 9, position))
    assert full_state(pair.client) == before
    # The snapshot was announced, but nothing of it has come: that is possible.
    pair.client_sends(stream(3, 9, _position(10, 10, begin=10, until=20)))


# Streams that end.


def test_frames_that_arrive_after_a_stream_is_closed_are_dropped_and_acknowledged() -> None:
    pair = Pair.in_state(SessionState.STREAMING, window_bytes=64 * 1024)
    pair.accept(3, 9)
    pair.turn(3)
    first, second = chunk(3, 9, 0, 5, b"x" * 1000), chunk(3, 9, 5, 10, b"x" * 10_000)
    pair.server.send(start(3, 9, 0, 10))
    pair.server.send(first)
    assert [type(message).__name__ for message in pair.to_client()] == [
        "PartitionStart",
        "PartitionChunk",
    ]
    pair.client.acknowledge(HEADER_BYTES + first.chunk.nbytes)
    pair.client.send(close_stream(3, 9))
    pair.server.send(second)
    pair.server.send(end(3, 9, 10))
    pair.server.end_turn()
    pair.turn(3)
    pair.server.send(start(3, 9, 10, 20))
    assert pair.to_client() == []
    # Both chunks together are enough for an acknowledgement.
    pair.to_server()
    assert pair.server.window.used_bytes == pair.client.window.used_bytes == 0
    assert pair.server.window.remaining_bytes == 64 * 1024
    pair.server.send(stream_end(3, 9, Status.STREAM_CLOSED))
    assert pair.to_client() == [stream_end(3, 9, Status.STREAM_CLOSED)]
    assert pair.client.streams == pair.server.streams == {}


def test_frames_of_a_closed_stream_must_still_be_in_order() -> None:
    pair = _pair("CLOSING", crossing=True)
    pair.client.receive(encoded(chunk(3, 9, 11, 12)), 0.0)
    assert_refused(pair.client, Status.MALFORMED)


@pytest.mark.parametrize(("until", "is_refused"), [(19, True), (20, False)])
def test_a_snapshot_in_one_frame_for_a_closed_stream_must_reach_the_announced_end(
    until: int, is_refused: bool
) -> None:
    pair = _pair_at_10("SOME")
    pair.client.send(close_stream(3, 9))
    taken(pair.client)
    pair.client.receive(encoded(snapshot(3, 9, 15, until)), 0.0)
    if is_refused:
        assert_refused(pair.client, Status.MALFORMED)
    else:
        assert list(pair.client.messages()) == []


def test_a_close_and_an_end_of_a_stream_may_cross() -> None:
    pair = _pair("BETWEEN", crossing=False)
    pair.server.send(stream_end(3, 9, Status.STATE_CHANGED))
    pair.client.send(close_stream(3, 9))
    assert pair.to_server() == []
    assert pair.to_client() == [stream_end(3, 9, Status.STATE_CHANGED)]
    assert pair.client.streams == pair.server.streams == {}
    # The partition can be streamed again, even with the same opaque.
    pair.accept(3, 9)
    assert _state_of(pair.client) == _state_of(pair.server) == "BETWEEN"


def test_a_late_close_of_a_stream_does_not_close_the_next_stream() -> None:
    pair = _pair("BETWEEN", crossing=False)
    pair.server_sends(stream_end(3, 9))
    pair.accept(3, 10)
    pair.server.receive(encoded(close_stream(3, 9)), 0.0)
    assert_refused(pair.server, Status.MALFORMED)


def test_a_refused_stream_changes_neither_side() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    before = full_state(pair.client), full_state(pair.server)
    for status in (Status.NOT_MY_PARTITION, Status.ROLLBACK, Status.SEQ_TOO_HIGH):
        pair.client_sends(stream(3, 9))
        pair.server_sends(stream_reply(3, 9, status=status))
        assert (full_state(pair.client), full_state(pair.server)) == before


@pytest.mark.parametrize(("ceiling", "is_refused"), [(9, False), (10, True), (11, True)])
def test_a_rollback_must_end_below_the_clients_position(ceiling: int, is_refused: bool) -> None:
    """Otherwise a client that undoes nothing and continues above it would lack changes."""
    pair = Pair.in_state(SessionState.OPEN)
    pair.client_sends(stream(3, 9, _position(10, 10)))
    reply = stream_reply(3, 9, ceiling, Status.ROLLBACK)
    if is_refused:
        with pytest.raises(LocalProtocolError):
            pair.server.send(reply)
        pair.client.receive(encoded(reply), 0.0)
        assert "roll back" in assert_refused(pair.client, Status.MALFORMED)
    else:
        pair.server_sends(reply)


def test_a_stream_is_refused_by_a_stream_reply_and_not_by_a_refusal() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.client_sends(stream(3, 9))
    refusal = Refusal("no", partition=PartitionId(3), opaque=9, status=Status.TEMPORARY_FAILURE)
    with pytest.raises(LocalProtocolError):
        pair.server.send(refusal)
    pair.client.receive(encoded(refusal), 0.0)
    assert_refused(pair.client, Status.MALFORMED)


@pytest.mark.parametrize("status", [0, 63, 73, 128, 999])
def test_the_end_of_a_stream_must_have_a_known_reason(status: int) -> None:
    pair = _pair("BETWEEN", crossing=False)
    message = StreamEnd(partition=PartitionId(3), opaque=9, status=status)
    with pytest.raises(LocalProtocolError):
        pair.server.send(message)
    pair.client.receive(encoded(message), 0.0)
    assert_refused(pair.client, Status.MALFORMED)


def test_a_stream_reply_for_another_partition_is_refused() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.client_sends(stream(3, 9), stream(4, 10))
    for message, status in (
        (stream_reply(4, 9), Status.MALFORMED),
        (stream_reply(5, 9), Status.OUT_OF_TURN),
    ):
        with pytest.raises(LocalProtocolError) as caught:
            pair.server.send(message)
        assert caught.value.status is status
    pair.client.receive(encoded(stream_reply(4, 9)), 0.0)
    assert_refused(pair.client, Status.MALFORMED)


def test_a_stream_record_begins_at_the_clients_position() -> None:
    record = StreamRecord(stream(3, 9, BEGINNING))
    assert (record.seq, record.end, record.complete, record.opaque) == (0, 0, 0, 9)


# Turns.


def test_barriers_are_answered_when_a_stream_ends_in_its_turn() -> None:
    for ends_it in ("client", "server"):
        pair = _pair("BETWEEN", crossing=False)
        pair.client_sends(Barrier(b"now"))
        pair.server.mark_ready(PartitionId(3))
        pair.server.end_turn()
        assert pair.server.next_partition() == 3
        message = close_stream(3, 9)
        messages = pair.client_sends(message) if ends_it == "client" else []
        assert messages == ([message] if ends_it == "client" else [])
        if ends_it == "server":
            pair.server.send(stream_end(3, 9))
        assert [m.cookie for m in pair.to_client() if isinstance(m, BarrierReply)] == [b"now"]


def test_only_the_partition_whose_turn_it_is_sends_a_snapshot() -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.accept(3, 9)
    pair.accept(4, 10)
    with pytest.raises(LocalProtocolError, match="turn"):
        pair.server.send(start(3, 9, 0, 10))
    pair.turn(3)
    before = full_state(pair.server)
    with pytest.raises(LocalProtocolError, match="turn"):
        pair.server.send(start(4, 10, 0, 10))
    assert full_state(pair.server) == before
    pair.server_sends(start(3, 9, 0, 10))
    for message in (chunk(4, 10, 0, 10), end(4, 10, 0)):
        with pytest.raises(LocalProtocolError, match="turn"):
            pair.server.send(message)


def test_a_turn_does_not_end_inside_a_snapshot() -> None:
    pair = _pair_at_10("SOME")
    with pytest.raises(LocalProtocolError):
        pair.server.end_turn()
    pair.server_sends(chunk(3, 9, 15, 20), end(3, 9, 20))
    pair.server.end_turn()  # no partition has a turn now, so this does nothing
    assert pair.server.next_partition() is None


def test_a_turn_ends_with_its_stream() -> None:
    for ends_it in ("client", "server"):
        pair = _pair_at_10("SOME")
        pair.accept(4, 10)
        pair.server.mark_ready(PartitionId(4))
        if ends_it == "client":
            pair.client_sends(close_stream(3, 9))
            pair.server.end_turn()
        pair.server_sends(stream_end(3, 9))
        assert pair.server.next_partition() == 4


def test_a_partition_that_is_not_streamed_is_never_ready() -> None:
    for state in ("ABSENT", "REQUESTED", "CLOSING"):
        pair = _pair(state, crossing=False)
        pair.server.mark_ready(PartitionId(3))
        assert pair.server.next_partition() is None


def test_barriers_are_answered_after_all_snapshots_of_a_turn() -> None:
    """After the first of them, a consumer that lacks several snapshots is not up to date."""
    pair = _pair("BETWEEN", crossing=False)
    pair.server.end_turn()
    pair.turn(3)
    pair.server.mark_ready(PartitionId(3))
    pair.client_sends(Barrier(b"now"))
    pair.server.end_turn()
    assert pair.server.next_partition() == 3
    seq = pair.server.streams[PartitionId(3)].seq
    for after in (seq, seq + 1):
        pair.server.send(start(3, 9, after, after + 1))
        pair.server.send(chunk(3, 9, after, after + 1))
        pair.server.send(end(3, 9, after + 1))
        assert not [m for m in pair.to_client() if isinstance(m, BarrierReply)]
    pair.server.end_turn()
    (reply,) = [m for m in pair.to_client() if isinstance(m, BarrierReply)]
    assert reply.ends == ((3, seq + 2),)
