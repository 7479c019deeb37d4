"""The limits of a session: window, credit, barriers, requests, opaques, lengths and time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from crc32c import crc32c

from tests.protocol.session.kit import (
    SAMPLES,
    Pair,
    assert_refused,
    chunk,
    encoded,
    end,
    frames,
    full_state,
    hello,
    hello_reply,
    mutate,
    published,
    start,
    stream,
    taken,
)
from upr_kernel import pack_header
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError, Status
from upr_protocol.ids import PartitionId, SeqNo
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
from upr_protocol.session import ClientSession, ServerSession, Session, SessionState
from upr_protocol.session.rules import CREDIT_MESSAGES, WINDOW_MESSAGES
from upr_protocol.session.states import SESSION
from upr_protocol.wire import (
    HEADER_BYTES,
    MESSAGES,
    Ack,
    AwaitReply,
    Barrier,
    BarrierReply,
    Credit,
    Get,
    GetReply,
    Go,
    Hello,
    HelloReply,
    ListBuckets,
    Message,
    Mutate,
    Noop,
    Open,
    Opened,
    PartitionChunk,
    PartitionSnapshot,
    Refusal,
    StartLogIn,
    Stats,
    StatsReply,
)


def check_refused_by_both(
    sender: Session, receiver: Session, message: Message, status: Status
) -> None:
    """Checks that `sender` does not send `message`, that `receiver` refuses it, and that it changes
    neither of them."""
    before = full_state(sender)
    with pytest.raises(LocalProtocolError) as caught:
        sender.send(message)
    assert caught.value.status is status
    assert full_state(sender) == before
    before = full_state(receiver)
    receiver.receive(encoded(message), 0.0)
    assert_refused(receiver, status)
    after = full_state(receiver)
    for part in ("hello", "agreed", "streams", "window", "credit", "barriers", "requests"):
        assert after[part] == before[part]


def test_chunks_count_against_the_window_and_mutations_against_credit() -> None:
    # The protocol document copies these lists.
    assert list(WINDOW_MESSAGES) == [PartitionChunk, PartitionSnapshot]
    assert list(CREDIT_MESSAGES) == [Mutate]


# The window.


def _inside_a_snapshot(window_bytes: int = WINDOW_BYTES_MIN) -> Pair:
    """A pair in which the server has announced the snapshot (0, 100] of partition 3."""
    pair = Pair.in_state(SessionState.STREAMING, window_bytes=window_bytes)
    pair.accept(3, 9)
    pair.turn(3)
    pair.server_sends(start(3, 9, 0, 100))
    return pair


def test_the_window_is_exceeded_by_one_frame_at_most() -> None:
    pair = _inside_a_snapshot()
    sent_bytes = 0
    for seq in range(3):
        assert pair.server.window.is_open
        message = chunk(3, 9, seq, seq + 1, b"x" * 30_000)
        pair.server_sends(message)
        sent_bytes += HEADER_BYTES + message.chunk.nbytes
        assert pair.client.window.used_bytes == pair.server.window.used_bytes == sent_bytes
        assert (
            pair.client.window.remaining_bytes
            == pair.server.window.remaining_bytes
            == WINDOW_BYTES_MIN - sent_bytes
        )
    assert sent_bytes > WINDOW_BYTES_MIN
    assert not pair.server.window.is_open
    check_refused_by_both(pair.server, pair.client, chunk(3, 9, 3, 4, b"x"), Status.FLOW_CONTROL)


def test_a_window_that_is_just_used_up_is_closed() -> None:
    pair = _inside_a_snapshot()
    pair.server.window.remaining_bytes = HEADER_BYTES + chunk(3, 9, 0, 1).chunk.nbytes
    pair.server.send(chunk(3, 9, 0, 1))
    assert pair.server.window.remaining_bytes == 0
    assert not pair.server.window.is_open
    with pytest.raises(LocalProtocolError):
        pair.server.send(chunk(3, 9, 1, 2))


def test_messages_other_than_chunks_are_sent_while_the_window_is_closed() -> None:
    pair = _inside_a_snapshot()
    pair.server_sends(chunk(3, 9, 0, 100, b"x" * 1000))
    assert not pair.server.window.is_open
    pair.server_sends(end(3, 9, 100), Noop())
    pair.client_sends(Barrier(b"b"))
    assert pair.server.next_partition() is None
    assert [type(message).__name__ for message in pair.to_client()] == ["CycleEnd", "BarrierReply"]


def test_an_acknowledgement_opens_the_window_again() -> None:
    pair = _inside_a_snapshot()
    pair.server_sends(chunk(3, 9, 0, 100, b"x" * 1000))
    used_bytes = pair.server.window.used_bytes
    pair.client_sends(Ack(used_bytes - 1))
    assert pair.server.window.used_bytes == pair.client.window.used_bytes == 1
    pair.client_sends(Ack(0))
    pair.client_sends(Ack(1))
    assert (
        pair.server.window.remaining_bytes == pair.client.window.remaining_bytes == WINDOW_BYTES_MIN
    )


def test_an_acknowledgement_of_more_than_was_sent_is_refused() -> None:
    pair = _inside_a_snapshot()
    pair.server_sends(chunk(3, 9, 0, 1))
    check_refused_by_both(
        pair.client, pair.server, Ack(pair.server.window.used_bytes + 1), Status.FLOW_CONTROL
    )


def test_the_client_sends_no_acknowledgement_of_less_than_a_quarter_of_the_window() -> None:
    pair = _inside_a_snapshot()
    pair.server_sends(*(chunk(3, 9, seq, seq + 1, b"x" * 10_000) for seq in range(6)))
    used_bytes = pair.client.window.used_bytes
    quarter = WINDOW_BYTES_MIN // 4
    pair.client.acknowledge(quarter - 1)
    assert not pair.client.outgoing_bytes
    pair.client.acknowledge(1)
    assert frames(taken(pair.client)) == [Ack(quarter)]
    before = full_state(pair.client)
    for count in (-1, used_bytes - quarter + 1):
        with pytest.raises(LocalProtocolError):
            pair.client.acknowledge(count)
    pair.client.acknowledge(0)
    assert full_state(pair.client) == before
    pair.client.acknowledge(used_bytes - quarter)
    assert frames(taken(pair.client)) == [Ack(used_bytes - quarter)]


def test_bytes_that_did_not_arrive_cannot_be_acknowledged() -> None:
    pair = _inside_a_snapshot()
    pair.server_sends(chunk(3, 9, 0, 1))
    received_bytes = pair.client.window.used_bytes
    pair.client.acknowledge(received_bytes - 1)
    with pytest.raises(LocalProtocolError):
        pair.client.acknowledge(2)
    pair.client.acknowledge(1)
    assert not pair.client.outgoing_bytes


def test_a_client_whose_session_has_failed_sends_no_acknowledgement() -> None:
    pair = _inside_a_snapshot()
    pair.server_sends(chunk(3, 9, 0, 100, b"x" * 1000))
    pair.client.fail(Status.INTERNAL, "enough")
    taken(pair.client)
    pair.client.acknowledge(pair.client.window.used_bytes)
    assert taken(pair.client) == b""


# Credit.


def test_credit_is_exceeded_by_one_frame_at_most() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    first = mutate(3, 1, b"x" * 1000)
    check_refused_by_both(
        pair.client, Pair.in_state(SessionState.OPEN).server, first, Status.FLOW_CONTROL
    )
    pair.server_sends(Credit(10), Credit(1))
    assert pair.client_sends(first) == [first]
    assert (
        pair.client.credit.remaining_bytes
        == pair.server.credit.remaining_bytes
        == 11 - len(encoded(first))
    )
    second = mutate(3, 2)
    check_refused_by_both(pair.client, pair.server, second, Status.FLOW_CONTROL)


def test_new_credit_is_first_used_for_what_exceeded_the_old() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.server_sends(Credit(1))
    first = mutate(3, 1)
    pair.client_sends(first)
    pair.server_sends(Credit(len(encoded(first)) - 1))
    assert pair.client.credit.remaining_bytes == 0
    assert not pair.client.credit.is_open
    with pytest.raises(LocalProtocolError):
        pair.client.send(mutate(3, 2))
    pair.server_sends(Credit(1))
    pair.client_sends(mutate(3, 2))


# Barriers.


def test_a_barrier_over_the_limit_is_refused() -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    for index in range(OPEN_BARRIERS_MAX):
        pair.client_sends(Barrier(b"%d" % index))
    check_refused_by_both(pair.client, pair.server, Barrier(b"more"), Status.TOO_MANY)


def test_a_cookie_may_be_used_again_after_its_barrier_is_answered() -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.client_sends(Barrier(b"cookie"))
    assert pair.server.next_partition() is None
    pair.to_client()
    assert not pair.client.barriers
    pair.client_sends(Barrier(b"cookie"))
    check_refused_by_both(pair.client, pair.server, Barrier(b"cookie"), Status.COOKIE_IN_USE)


@pytest.mark.parametrize("cookie", [b"", b"x" * (COOKIE_BYTES_MAX + 1)])
def test_an_empty_or_long_cookie_is_refused(cookie: bytes) -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.client_sends(Barrier(b"x" * COOKIE_BYTES_MAX), Barrier(b"\0"))
    check_refused_by_both(pair.client, pair.server, Barrier(cookie), Status.MALFORMED)


def test_barriers_that_are_answered_together_share_the_encoded_ends() -> None:
    """To encode the ends of 1,024 streams for each of 64 barriers took 6 ms of one step."""
    pair = Pair.in_state(SessionState.OPEN)
    partitions = range(200)
    for partition in partitions:
        pair.accept(partition, partition + 1)
    cookies = [b"%d" % index for index in range(OPEN_BARRIERS_MAX)]
    pair.client_sends(Go(), *map(Barrier, cookies))
    while pair.server.next_partition() is not None:
        pair.server.end_turn()
    buffers = pair.server.take_outgoing(0.0)
    ends = [buffer for buffer in buffers if len(buffer) > len(partitions)]
    assert len(ends) == len(cookies)
    assert len({id(buffer) for buffer in ends}) == 1
    pair.client.receive(b"".join(buffers), 0.0)
    replies = [reply for reply in pair.client.messages() if isinstance(reply, BarrierReply)]
    expected_ends = tuple((PartitionId(partition), SeqNo(0)) for partition in partitions)
    assert replies == [BarrierReply(cookie, expected_ends) for cookie in cookies]


@pytest.mark.parametrize("cookie", [b"second", b"third"])
def test_an_answer_to_a_barrier_other_than_the_oldest_is_refused(cookie: bytes) -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.client_sends(Barrier(b"first"), Barrier(b"second"))
    check_refused_by_both(pair.server, pair.client, BarrierReply(cookie, ()), Status.MALFORMED)


# Requests.


def test_an_opaque_in_use_is_refused() -> None:
    for first, second in ((SAMPLES[Get], SAMPLES[Stats]), (stream(3, 9), SAMPLES[Get])):
        pair = Pair.in_state(SessionState.OPEN)
        pair.client_sends(first)
        check_refused_by_both(pair.client, pair.server, second, Status.OPAQUE_IN_USE)


def test_a_streams_opaque_is_in_use_until_it_ends() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.accept(3, 9)
    with pytest.raises(LocalProtocolError):
        pair.client.send(SAMPLES[Get])
    assert pair.client.new_opaque() not in (0, 9)
    pair.server_sends(SAMPLES[MESSAGES[0x8F]])
    assert pair.client_sends(SAMPLES[Get]) == [SAMPLES[Get]]


def test_an_opaque_is_free_once_its_request_was_answered_or_refused() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    for answer in (SAMPLES[GetReply], SAMPLES[Refusal]):
        pair.client_sends(SAMPLES[Get])
        assert pair.server_sends(answer) == [answer]
        assert not pair.client._requests
        assert not pair.server._requests


@pytest.mark.parametrize(
    "answer",
    [
        AwaitReply(SeqNo(1), opaque=9),
        GetReply(SAMPLES[GetReply].history_id, 1, published(), opaque=8),  # type: ignore[attr-defined]
        Refusal("no", opaque=8, status=Status.BAD_ARGUMENT),
        Refusal("no", opaque=9, status=Status.OK),
        Refusal("no", opaque=9, status=999),
    ],
)
def test_an_answer_that_does_not_fit_an_open_request_is_refused(answer: Message) -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.client_sends(SAMPLES[Get])
    check_refused_by_both(pair.server, pair.client, answer, Status.MALFORMED)


def test_a_request_over_the_limit_is_refused() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    for opaque in range(REQUESTS_OPEN_MAX):
        pair.client.send(Stats(opaque=opaque))
    pair.to_server()
    check_refused_by_both(pair.client, pair.server, Stats(opaque=1 << 31), Status.TOO_MANY)


def test_new_opaques_wrap_around_and_are_not_in_use() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.client._next_opaque = 0xFFFF_FFFE
    opaques = []
    pair.client_sends(Stats(opaque=0xFFFF_FFFF), Stats(opaque=2))
    for _ in range(4):
        opaques.append(pair.client.new_opaque())
        pair.client_sends(Stats(opaque=opaques[-1]))
    assert opaques == [0xFFFF_FFFE, 1, 3, 4]
    # Two opaques may be drawn before the first of their requests is sent.
    assert (pair.client.new_opaque(), pair.client.new_opaque()) == (5, 6)


def test_a_bucket_cannot_be_opened_while_a_request_is_open() -> None:
    pair = Pair.in_state(SessionState.READY)
    pair.client_sends(Stats(opaque=1))
    check_refused_by_both(pair.client, pair.server, Open("bucket", opaque=2), Status.OUT_OF_TURN)


def test_a_bucket_may_be_opened_after_another_was_refused() -> None:
    pair = Pair.in_state(SessionState.OPENING)
    refusal = Refusal("no such bucket", opaque=9, status=Status.NO_BUCKET)
    assert pair.server_sends(refusal) == [refusal]
    pair.client_sends(Open("other", opaque=9))
    pair.server_sends(Opened(1, 1, opaque=9))
    assert pair.client.state is pair.server.state is SessionState.OPEN


# The handshake.


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"identity": ""}, Status.MALFORMED),
        ({"identity": "ä" * (IDENTITY_BYTES_MAX // 2) + "a"}, Status.MALFORMED),
        ({"identity": "a\x1b[2J"}, Status.MALFORMED),
        ({"identity": "a\nb"}, Status.MALFORMED),
        ({"identity": "a\u202eb"}, Status.MALFORMED),
        ({"window_bytes": WINDOW_BYTES_MIN - 1}, Status.MALFORMED),
        ({"idle_interval_s": IDLE_INTERVAL_S_MIN - 1}, Status.MALFORMED),
        ({"idle_interval_s": IDLE_INTERVAL_S_MAX + 1}, Status.MALFORMED),
        ({"versions": ()}, Status.BAD_VERSION),
        ({"versions": (2, 3)}, Status.BAD_VERSION),
    ],
)
def test_a_hello_with_a_wrong_value_is_refused(changes: dict[str, Any], status: Status) -> None:
    pair = Pair.in_state(SessionState.GREETING)
    check_refused_by_both(pair.client, pair.server, hello(**changes), status)
    assert pair.server.client_identity == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": "a"},
        {"identity": "ä" * (IDENTITY_BYTES_MAX // 2)},
        {"window_bytes": WINDOW_BYTES_MIN},
        {"window_bytes": 0xFFFF_FFFF},
        {"idle_interval_s": IDLE_INTERVAL_S_MIN},
        {"idle_interval_s": IDLE_INTERVAL_S_MAX},
        {"versions": (2, 1)},
        {"features": 0xFFFF_FFFF},
    ],
)
def test_a_hello_with_a_value_at_a_limit_is_answered(changes: dict[str, Any]) -> None:
    server = ServerSession("test:server", now=0.0)
    message = hello(**changes)
    server.receive(encoded(message), 0.0)
    assert list(server.messages()) == [message]
    reply = hello_reply(idle_interval_s=message.idle_interval_s)
    assert frames(taken(server)) == [reply]
    assert server.client_identity == message.identity
    assert server.window.remaining_bytes == message.window_bytes


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"version": 2}, Status.BAD_VERSION),
        ({"features": 1}, Status.MALFORMED),
        ({"idle_interval_s": 0}, Status.MALFORMED),
        ({"idle_interval_s": 21}, Status.MALFORMED),
        ({"idle_interval_s": IDLE_INTERVAL_S_MAX + 1}, Status.MALFORMED),
        ({"frame_body_bytes_max": HANDSHAKE_BODY_BYTES_MAX - 1}, Status.MALFORMED),
        ({"open_barriers_max": 0}, Status.MALFORMED),
        ({"requests_open_max": 0}, Status.MALFORMED),
        ({"identity": ""}, Status.MALFORMED),
        ({"identity": "\x9b31m"}, Status.MALFORMED),
    ],
)
def test_a_hello_reply_with_a_wrong_value_is_refused(
    changes: dict[str, Any], status: Status
) -> None:
    pair = Pair.in_state(SessionState.GREETED)
    check_refused_by_both(pair.server, pair.client, hello_reply(**changes), status)


def test_a_hello_reply_may_limit_frames_to_the_size_of_handshake_frames() -> None:
    pair = Pair.in_state(SessionState.GREETED)
    reply = hello_reply(frame_body_bytes_max=HANDSHAKE_BODY_BYTES_MAX)
    assert pair.server_sends(reply) == [reply]


def test_a_mechanism_that_was_not_offered_is_refused() -> None:
    pair = Pair(mechanisms=("SCRAM-SHA-256",))
    pair.deliver()
    check_refused_by_both(
        pair.client, pair.server, StartLogIn("PLAIN", b"password"), Status.LOG_IN_FAILED
    )


def test_the_client_sends_frames_up_to_the_limit_of_the_server() -> None:
    frame = encoded(mutate(3, 1, b"x" * 5000))
    limit = len(frame) - HEADER_BYTES
    for allowed in (limit, limit - 1):
        pair = Pair.in_state(SessionState.GREETED)
        pair.server_sends(hello_reply(frame_body_bytes_max=allowed))
        pair.client_sends(Open("bucket", opaque=1))
        pair.server_sends(Opened(64, 1, opaque=1), Credit(100_000))
        if allowed == limit:
            assert pair.client_sends(mutate(3, 1, b"x" * 5000))
        else:
            with pytest.raises(LocalProtocolError) as caught:
                pair.client.send(mutate(3, 1, b"x" * 5000))
            assert caught.value.status is Status.FRAME_TOO_LONG


def test_the_client_sends_nothing_above_the_limits_of_the_server() -> None:
    pair = Pair.in_state(SessionState.GREETED)
    pair.server_sends(
        hello_reply(frame_body_bytes_max=5000, open_barriers_max=1, requests_open_max=2)
    )
    pair.client_sends(Open("bucket", opaque=1))
    pair.server_sends(Opened(64, 1, opaque=1), Credit(100_000))
    pair.client_sends(SAMPLES[MESSAGES[0x07]], Barrier(b"one"))
    with pytest.raises(LocalProtocolError) as caught:
        pair.client.send(Barrier(b"two"))
    assert caught.value.status is Status.TOO_MANY
    check_refused_by_both(
        pair.client,
        pair.server,
        mutate(3, 1, b"x" * 5000),
        Status.FRAME_TOO_LONG,
    )
    pair.client.send(Stats(opaque=1))
    pair.client.send(Stats(opaque=2))
    with pytest.raises(LocalProtocolError) as caught:
        pair.client.send(Stats(opaque=3))
    assert caught.value.status is Status.TOO_MANY


def test_the_limit_for_frames_of_the_client_does_not_apply_to_the_server() -> None:
    pair = Pair.in_state(SessionState.GREETED)
    pair.server_sends(hello_reply(frame_body_bytes_max=5000))
    pair.client_sends(Stats(opaque=1))
    reply = StatsReply("x" * 100_000, opaque=1)
    assert pair.server_sends(reply) == [reply]


def test_a_frame_of_another_version_is_refused_with_bad_version() -> None:
    server = ServerSession("test:server", now=0.0)

    head = bytearray(encoded(hello())[:20])
    head[2] = 2
    server.receive(bytes(head) + crc32c(bytes(head)).to_bytes(4, "little"), 0.0)
    assert_refused(server, Status.BAD_VERSION)


# Lengths. A frame is refused from its header: nothing of its body is needed.


def _received_kinds() -> Iterator[tuple[Session, type[Message]]]:
    """Each kind of message with a session that may receive it, in each of two states."""
    for state in (SessionState.OPEN, SessionState.STREAMING):
        for kind in MESSAGES.values():
            pair = Pair.in_state(state)
            if kind.sender & 1 and kind not in (Hello, Open):
                yield pair.server, kind
            if kind.sender & 2 and kind not in (HelloReply, Opened):
                yield pair.client, kind


@pytest.mark.parametrize("length", [HANDSHAKE_BODY_BYTES_MAX + 8, 0xFFFF_FFF8])
@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (SessionState.GREETING, Hello),
        (SessionState.READY, Open),
        (SessionState.READY, ListBuckets),
        (SessionState.OPENING, Noop),
    ],
)
def test_a_long_frame_before_a_bucket_is_open_is_refused_from_its_header(
    state: SessionState, kind: type[Message], length: int
) -> None:
    pair = Pair.in_state(state)
    pair.server.receive(pack_header(kind.opcode, 0, 0xFFFF, 9, length, 0), 0.0)
    assert_refused(pair.server, Status.FRAME_TOO_LONG)


def test_a_frame_above_the_limit_of_its_kind_is_refused_from_its_header() -> None:
    for session, kind in _received_kinds():
        taken(session)
        limit = kind.body_bytes_max
        is_allowed = kind in SESSION[session.state]
        assert HANDSHAKE_BODY_BYTES_MAX <= limit <= FRAME_BODY_BYTES_MAX
        session.receive(pack_header(kind.opcode, 0, 3, 9, limit + 8, 0), 0.0)
        with pytest.raises(RemoteProtocolError) as caught:
            list(session.messages())
        assert caught.value.status is (Status.FRAME_TOO_LONG if is_allowed else Status.OUT_OF_TURN)


def test_a_frame_of_the_largest_size_is_received_in_parts() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    header = pack_header(Mutate.opcode, 0, 3, 9, FRAME_BODY_BYTES_MAX, 0)
    pair.server.receive(header, 0.0)
    assert list(pair.server.messages()) == []
    for _ in range(10):
        pair.server.receive(bytes(100), 0.0)
        assert list(pair.server.messages()) == []
    assert pair.server.buffered == 1000


def test_a_message_that_is_too_long_is_not_sent() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    before = full_state(pair.client)
    with pytest.raises(LocalProtocolError) as caught:
        pair.client.send(Stats(bucket="x" * HANDSHAKE_BODY_BYTES_MAX, opaque=1))
    assert caught.value.status is Status.FRAME_TOO_LONG
    assert full_state(pair.client) == before


# Time.

INTERVAL: Final = 20


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_side_that_has_sent_nothing_for_an_interval_sends_noop(side: str) -> None:
    pair = Pair.in_state(SessionState.OPEN, interval_s=INTERVAL)
    session: Session = pair.client if side == "client" else pair.server
    assert session.keep_alive.next_check() == INTERVAL
    session.receive(encoded(Noop()), 15.0)
    assert list(session.messages()) == [Noop()]
    assert session.tick(19.9)
    assert taken(session, 19.9) == b""
    assert session.tick(20.0)
    assert frames(taken(session, 20.0)) == [Noop()]
    assert session.keep_alive.next_check() == 40.0
    session.receive(encoded(Noop()), 30.0)
    list(session.messages())
    assert session.tick(39.9)
    assert taken(session, 39.9) == b""
    assert session.tick(40.0)
    assert frames(taken(session, 40.0)) == [Noop()]


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_side_that_has_sent_a_message_sends_no_noop(side: str) -> None:
    pair = Pair.in_state(SessionState.OPEN, interval_s=INTERVAL)
    session: Session = pair.client if side == "client" else pair.server
    session.send(Credit(1) if side == "server" else Stats(opaque=1))
    taken(session, 15.0)
    assert session.tick(34.9)
    assert taken(session, 34.9) == b""
    assert session.keep_alive.next_check() == 35.0


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_peer_that_sends_nothing_for_two_intervals_is_given_up(side: str) -> None:
    pair = Pair.in_state(SessionState.OPEN, interval_s=INTERVAL)
    session: Session = pair.client if side == "client" else pair.server
    for now in (20.0, 39.0):
        assert session.tick(now)
        taken(session, now)
    assert session.keep_alive.next_check() == 40.0
    assert session.tick(39.9)
    assert not session.tick(40.0)
    # One byte of the peer is enough, though it is only a part of a message.
    session.receive(encoded(Noop())[:1], 41.0)
    list(session.messages())
    assert session.tick(80.9)
    assert not session.tick(81.0)


def test_both_sides_use_the_interval_that_the_client_chose() -> None:
    pair = Pair.in_state(SessionState.READY, interval_s=3)
    assert pair.client.keep_alive.next_check() == pair.server.keep_alive.next_check() == 3


def test_no_second_noop_is_queued_while_the_first_is_unsent() -> None:
    pair = Pair.in_state(SessionState.OPEN, interval_s=INTERVAL)
    for now in range(0, 400, 10):
        pair.server.receive(encoded(Noop()), now)
        list(pair.server.messages())
        assert pair.server.tick(now)
        assert pair.server.keep_alive.next_check() > now
    assert frames(taken(pair.server, 400.0)) == [Noop()]


def test_no_noop_is_sent_before_the_handshake_is_complete() -> None:
    """The owner of the connection limits the time of the handshake."""
    client = ClientSession("test:client", now=0.0)
    taken(client)
    server = ServerSession("test:server", now=0.0)
    for session in (client, server):
        assert session.tick(1e6)
        assert taken(session) == b""


# Statistics.


def test_statistics_count_what_the_session_has_open() -> None:
    pair = _inside_a_snapshot()
    pair.server_sends(Credit(50), chunk(3, 9, 0, 1))
    pair.client_sends(Barrier(b"b"))
    statistics = pair.server.statistics()
    assert statistics.state is SessionState.STREAMING
    assert (statistics.streams, statistics.barriers, statistics.cycles, statistics.credit_left) == (
        1,
        1,
        1,
        50,
    )
    assert statistics.window_used == HEADER_BYTES + chunk(3, 9, 0, 1).chunk.nbytes
