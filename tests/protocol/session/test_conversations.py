"""Whole conversations. Both sides receive the same messages however the bytes are split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.session.kit import (
    HISTORY,
    LOG,
    SAMPLES,
    Cut,
    Pair,
    byte_by_byte,
    chunk,
    close_stream,
    end,
    full_state,
    mutate,
    mutate_reply,
    partition_log,
    start,
    stream,
    stream_end,
    stream_reply,
    whole,
)
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.failover import PartialSnapshot, Position
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.session import SessionState
from upr_protocol.wire import (
    HEADER_BYTES,
    Ack,
    Barrier,
    BarrierReply,
    BucketDone,
    Close,
    CreateBucket,
    Credit,
    CycleEnd,
    Get,
    GetReply,
    Go,
    HelloReply,
    ListBuckets,
    ListBucketsReply,
    Message,
    Noop,
    Open,
    Opened,
    PartitionChunk,
    Refusal,
    Seqnos,
    SeqnosReply,
)


def _sends(pair: Pair, partition: int, *ends: int, value: bytes = b"v") -> None:
    """The server sends a snapshot of the partition whose turn it is: one chunk up to each of
    `ends`."""
    opaque = pair.server.opaque_of(PartitionId(partition))
    seq = pair.server.streams[PartitionId(partition)].seq
    pair.server.send(start(partition, opaque, seq, ends[-1]))
    for chunk_end in ends:
        pair.server.send(chunk(partition, opaque, seq, chunk_end, value))
        seq = SeqNo(chunk_end)
    pair.server.send(end(partition, opaque, seq))
    pair.server.end_turn()


def _next(pair: Pair) -> int | None:
    return pair.server.next_partition()


def buckets(pair: Pair) -> None:
    """Buckets are created and listed. The connection stays open when one cannot be opened."""
    pair.deliver()
    pair.client_sends(CreateBucket("b", 4, opaque=1), ListBuckets(opaque=2), Noop())
    pair.server_sends(BucketDone(opaque=1), ListBucketsReply((("b", 4, 0),), opaque=2), Noop())
    pair.client_sends(CreateBucket("b", 4, opaque=1))
    pair.server_sends(Refusal("it is there", opaque=1, status=Status.BUCKET_EXISTS))
    pair.client_sends(Open("c", opaque=1))
    pair.server_sends(Refusal("it is not there", opaque=1, status=Status.NO_BUCKET))
    pair.client_sends(Close())
    assert pair.client.state is pair.server.state is SessionState.CLOSED


def streaming(pair: Pair) -> None:
    """Streams are accepted, refused and rolled back; cycles, barriers, acknowledgements; streams
    are closed, and end."""
    pair.deliver()
    pair.client_sends(Open("b", (0, 1, 2, 9), opaque=1))
    pair.server_sends(*(partition_log(partition, 1) for partition in range(3)))
    pair.server_sends(partition_log(9, 1, Status.NOT_MY_PARTITION), Opened(4, 1, opaque=1))
    partial = Position(LOG, SeqNo(10), SeqNo(15), PartialSnapshot(HISTORY, SeqNo(10), SeqNo(20)))
    # All at once, and answered in another order.
    pair.client_sends(stream(0, 10), stream(1, 11, partial), stream(2, 12, partial), stream(9, 19))
    pair.server_sends(
        stream_reply(9, 19, status=Status.NOT_MY_PARTITION),
        stream_reply(2, 12, 10, Status.ROLLBACK),
        stream_reply(1, 11, 15),
        stream_reply(0, 10),
    )
    pair.client_sends(stream(2, 13, Position(LOG, SeqNo(10), SeqNo(10))), Go(), Barrier(b"one"))
    pair.server_sends(stream_reply(2, 13, 10))
    for partition in (1, 0):
        pair.server.mark_ready(PartitionId(partition))
    assert _next(pair) == 0
    _sends(pair, 0, 3, 7)
    assert _next(pair) == 1
    # The server drops its cursor inside the snapshot, and replaces it.
    pair.server.send(start(1, 11, 15, 20))
    pair.server.send(chunk(1, 11, 15, 17))
    _sends(pair, 1, 25)
    pair.to_client()
    pair.client_sends(Ack(pair.client.window.used_bytes), Barrier(b"two"), Noop())
    pair.server.mark_ready(PartitionId(2))
    assert _next(pair) == 2
    _sends(pair, 2, 11)
    assert _next(pair) is None
    pair.to_client()
    # Two streams end: the client closes one inside a snapshot, and the server ends the other.
    pair.server.mark_ready(PartitionId(0))
    assert _next(pair) == 0
    pair.server.send(start(0, 10, 7, 9))
    pair.client.send(close_stream(0, 10))
    pair.client.send(close_stream(1, 11))
    pair.server.send(chunk(0, 10, 7, 8))
    pair.server.send(stream_end(1, 11, Status.STATE_CHANGED))
    pair.to_client()
    pair.to_server()
    pair.server_sends(stream_end(0, 10))
    pair.client_sends(Barrier(b"three"))
    assert _next(pair) is None
    pair.to_client()
    pair.client_sends(stream(0, 10, Position(LOG, SeqNo(7), SeqNo(7))))
    pair.server_sends(stream_reply(0, 10, 7))
    pair.server.mark_ready(PartitionId(0))
    assert _next(pair) == 0
    _sends(pair, 0, 9)
    assert _next(pair) is None
    pair.server_sends(stream_end(0, 10, Status.END_REACHED))
    pair.client_sends(Close())


def publishing(pair: Pair) -> None:
    """Batches within the credit, with key-value requests in between, and many at the same time."""
    pair.deliver()
    pair.client_sends(Open("b", opaque=1))
    pair.server_sends(Opened(4, 1, opaque=1), Credit(100))
    about = PartitionId(2)
    pair.client_sends(
        mutate(about, 1, b"x" * 1000),
        Get((b"key",), partition=about, opaque=2),
        Seqnos(opaque=3),
    )
    assert not pair.client.credit.is_open
    pair.server_sends(
        SeqnosReply(((2, 7, 1, 0, 0),), opaque=3),
        mutate_reply(about, 1),
        GetReply(HISTORY, 1, chunk(2, 0, 0, 1).chunk, partition=about, opaque=2),
        Credit(50_000),
    )
    for opaque in range(10, 20):
        pair.client.send(mutate(about, opaque, b"y" * 100))
    pair.to_server()
    for opaque in range(10, 20):
        seq = SeqNo(opaque)
        pair.server.send(mutate_reply(about, opaque, seq))
    pair.to_client()
    pair.client_sends(mutate(about, 1))
    pair.server_sends(Refusal("later", opaque=1, status=Status.TEMPORARY_FAILURE))
    pair.client_sends(Close())


def a_fault_of_the_server(pair: Pair) -> None:
    """The server fails inside a snapshot."""
    pair.deliver()
    pair.client_sends(Open("b", opaque=1))
    pair.server_sends(Opened(4, 1, opaque=1))
    pair.accept(3, 9)
    pair.client_sends(Go())
    pair.turn(3)
    pair.server.send(start(3, 9, 0, 10))
    pair.server.send(chunk(3, 9, 0, 5))
    pair.server.fail(Status.INTERNAL, "it has no more memory")
    pair.to_client()
    assert pair.client.state is pair.server.state is SessionState.CLOSED


CONVERSATIONS: Final[dict[str, Callable[[Pair], None]]] = {
    talk.__name__: talk for talk in (buckets, streaming, publishing, a_fault_of_the_server)
}


def _play(talk: Callable[[Pair], None], cut: Cut) -> Pair:
    pair = Pair(window_bytes=WINDOW_BYTES_MIN, cut=cut)
    talk(pair)
    assert not pair.client.buffered
    assert not pair.server.buffered
    return pair


@pytest.mark.parametrize("talk", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_both_sides_receive_what_was_sent(talk: Callable[[Pair], None]) -> None:
    """In order and once, except messages of a stream that was closed or has ended: these are
    dropped."""
    pair = _play(talk, whole)
    for side, droppable in (
        ("client", {"PartitionStart", "PartitionChunk", "PartitionAnswers", "PartitionEnd"}),
        ("server", {"CloseStream"}),
    ):
        messages = iter([message for to, message in pair.sent if to == side])
        dropped_messages: list[Message] = []
        for to, message in pair.received:
            if to == side:
                while (sent_message := next(messages)) != message:
                    dropped_messages.append(sent_message)
        dropped_messages += messages
        assert {type(message).__name__ for message in dropped_messages} <= droppable


@pytest.mark.parametrize("talk", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_that_arrives_byte_by_byte_is_the_same(talk: Callable[[Pair], None]) -> None:
    once, again = _play(talk, whole), _play(talk, byte_by_byte)
    assert again.received == once.received
    assert full_state(again.client) == full_state(once.client)
    assert full_state(again.server) == full_state(once.server)


def _cut_by(lengths: list[int]) -> Cut:
    """Splits bytes into pieces of these lengths, which repeat."""

    def cut(data: bytes) -> Iterable[bytes]:
        offset = cut_count = 0
        while offset < len(data):
            length = lengths[cut_count % len(lengths)]
            yield data[offset : offset + length]
            offset += length
            cut_count += 1

    return cut


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(CONVERSATIONS.values())),
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 2000)), min_size=1, max_size=20),
)
def test_a_conversation_that_arrives_in_random_pieces_is_the_same(
    talk: Callable[[Pair], None], lengths: list[int]
) -> None:
    once, again = _play(talk, whole), _play(talk, _cut_by(lengths))
    assert again.received == once.received
    assert full_state(again.client) == full_state(once.client)
    assert full_state(again.server) == full_state(once.server)


def test_the_client_receives_the_streaming_conversation_in_this_order() -> None:
    """The order shows what the protocol guarantees."""
    pair = _play(streaming, whole)
    assert [_brief(message) for name, message in pair.received if name == "client"] == [
        "HelloReply",
        *["PartitionLog"] * 4,
        "Opened",
        *["StreamReply"] * 5,
        "PartitionStart 0: 0 to 7",
        "PartitionChunk 0: 0 to 3",
        "PartitionChunk 0: 3 to 7",
        "PartitionEnd 0",
        "PartitionStart 1: 15 to 20",
        "PartitionChunk 1: 15 to 17",
        "PartitionStart 1: 17 to 25",
        "PartitionChunk 1: 17 to 25",
        "PartitionEnd 1",
        "PartitionStart 2: 10 to 11",
        "PartitionChunk 2: 10 to 11",
        "PartitionEnd 2",
        "CycleEnd 1",
        "BarrierReply one ((0, 7), (1, 25), (2, 11))",
        "BarrierReply two ((0, 7), (1, 25), (2, 11))",
        # The client has closed stream 0, so its chunk is dropped. The server had ended stream 1
        # before the client's request to close it came.
        "StreamEnd 1",
        "StreamEnd 0",
        "CycleEnd 2",
        "BarrierReply three ((2, 11),)",
        "StreamReply",
        "PartitionStart 0: 7 to 9",
        "PartitionChunk 0: 7 to 9",
        "PartitionEnd 0",
        "CycleEnd 3",
        "StreamEnd 0",
    ]


def _brief(message: Message) -> str:
    text = type(message).__name__
    if isinstance(message, PartitionChunk):
        return f"{text} {message.partition}: {message.chunk.start} to {message.chunk.end}"
    if isinstance(message, BarrierReply):
        return f"{text} {message.cookie.decode()} {message.ends}"
    if isinstance(message, CycleEnd):
        return f"{text} {message.cycle}"
    if text == "PartitionStart":
        return f"{text} {message.partition}: {message.start} to {message.end}"  # type: ignore[attr-defined]
    if text in ("PartitionEnd", "StreamEnd"):
        return f"{text} {message.partition}"
    return text


def test_messages_after_a_refused_one_are_not_received() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.client.send(Noop())
    data = b"".join(map(bytes, pair.client.take_outgoing(0.0)))
    bad = b"".join(map(bytes, SAMPLES[HelloReply].frame_buffers()))
    pair.server.receive(data + bad + data, 0.0)
    events = pair.server.messages()
    assert next(events) == Noop()
    with pytest.raises(RemoteProtocolError):
        next(events)
    assert list(pair.server.messages()) == []


def test_a_client_that_never_acknowledges_stops_its_stream_and_nothing_else() -> None:
    pair = Pair.in_state(SessionState.STREAMING, window_bytes=WINDOW_BYTES_MIN)
    pair.accept(3, 9)
    pair.turn(3)
    pair.server.send(start(3, 9, 0, 1000))
    seq = sent_bytes = 0
    while pair.server.window.is_open:
        message = chunk(3, 9, seq, seq + 10, b"x" * 100)
        pair.server.send(message)
        seq += 10
        sent_bytes += HEADER_BYTES + message.chunk.nbytes
    assert WINDOW_BYTES_MIN <= sent_bytes < WINDOW_BYTES_MIN + 3000
    pair.client_sends(Get((b"key",), opaque=1))
    pair.server.send(GetReply(HISTORY, 1, chunk(3, 0, 0, 1).chunk, opaque=1))
    assert type(pair.to_client()[-1]) is GetReply
