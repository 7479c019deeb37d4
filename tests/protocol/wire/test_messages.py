"""Every message: its declaration, the faster `struct` code, and bodies that are no message."""

from __future__ import annotations

import gc
import inspect
import tracemalloc
from struct import pack
from typing import Any, cast

import construct as cs
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.effort import effort
from tests.protocol.wire.strategies import FIELDS, MESSAGES_OF_ANY_KIND, messages_of
from upr_protocol.chunk import (
    Buffer,
    Bundle,
    BundleRun,
    Chunk,
    Mutation,
    chunk_of_plain_sets,
    columns,
)
from upr_protocol.errors import ChunkError, RemoteProtocolError, Status
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import (
    NO_PARTITION,
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import (
    BUCKET_NAME_BYTES_MAX,
    BUNDLE_RUNS_MAX,
    COOKIE_BYTES_MAX,
    FRAME_BODY_BYTES_MAX,
    GET_KEYS_MAX,
    HANDSHAKE_BODY_BYTES_MAX,
    IDENTITY_BYTES_MAX,
    KEY_BYTES_MAX,
    PARTITIONS_MAX,
    VALUE_BYTES_MAX,
)
from upr_protocol.wire import (
    MESSAGES,
    Barrier,
    BarrierReply,
    CycleEnd,
    Get,
    GetReply,
    Header,
    Hello,
    Lease,
    LeaseAction,
    Message,
    Mutate,
    MutateReply,
    Open,
    PartitionAnswers,
    PartitionChunk,
    PartitionStart,
    Role,
    SeqnosAtReply,
    SeqnosReply,
    Stream,
    cycle_end_frame,
    decode,
)
from upr_protocol.wire.frame import HEADER_BYTES, padding, unpack_header
from upr_protocol.wire.message import layout_fields

KINDS = sorted(MESSAGES.values(), key=lambda kind: kind.opcode)
# Those that have `struct` code of their own.
STRUCT_KINDS = [
    kind
    for kind in KINDS
    if kind.body_buffers is not Message.body_buffers
    or cast("Any", kind.unpack_body).__func__ is not cast("Any", Message.unpack_body).__func__
]

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
struct_kinds = pytest.mark.parametrize("kind", STRUCT_KINDS, ids=lambda kind: kind.__name__)


def body_of(message: Message) -> bytes:
    return b"".join(map(bytes, message.body_buffers()))


def padded_body_of(message: Message) -> bytes:
    body = body_of(message)
    return body + padding(len(body))


def parse(kind: type[Message], body: Buffer) -> Message | None:
    """The message, or None when it is refused; any other exception fails the test."""
    try:
        return kind.parse(body, PartitionId(3), 5, 7)
    except RemoteProtocolError as refused:
        error = refused
    assert error.status is Status.MALFORMED
    assert str(error).startswith(kind.__name__)
    return None


def parse_as_declared(kind: type[Message], body: bytes) -> Message | None:
    """What the declaration alone makes of a padded body."""
    layout = cs.Struct(*kind.layout.subcons, "rest" / cs.GreedyBytes)
    try:
        parsed = layout.parse(body)
    except (cs.ConstructError, ValueError, ChunkError):
        return None
    if len(parsed.rest) > 7 or any(parsed.rest):
        return None
    fields = {name: parsed[name] for name in layout_fields(kind)}
    return kind(**fields, partition=PartitionId(3), opaque=5, status=7)


# --- the table ------------------------------------------------------------------------------------


def test_every_message_has_a_strategy() -> None:
    assert set(FIELDS) == set(MESSAGES.values())


def test_every_declared_message_is_in_the_table() -> None:
    declared = [kind for kind in descendants(Message) if "opcode" in vars(kind)]
    assert sorted(kind.__name__ for kind in declared) == sorted(kind.__name__ for kind in KINDS)
    assert len({kind.opcode for kind in declared}) == len(declared)


def descendants(kind: type[Message]) -> list[type[Message]]:
    kinds_below = []
    for child in kind.__subclasses__():
        kinds_below += [child, *descendants(child)]
    return kinds_below


@kinds
def test_a_declaration_is_complete(kind: type[Message]) -> None:
    assert MESSAGES[kind.opcode] is kind
    assert 0 < kind.opcode <= 0xFF
    assert inspect.getdoc(kind), "what the message is for"
    declared = {sub.name for sub in kind.layout.subcons} - {"padding"}
    assert declared == set(layout_fields(kind)) == set(FIELDS[kind])
    for sub in kind.layout.subcons:
        assert sub.name == "padding" or sub.docs, f"{sub.name} has no meaning"
    assert kind.body_bytes_max % 8 == 0
    assert kind.body_bytes_max <= FRAME_BODY_BYTES_MAX


@kinds
def test_answers_come_from_the_other_side_with_the_high_bit_set(kind: type[Message]) -> None:
    # Either side may send ERROR, which is no answer.
    assert (kind.sender is Role.SERVER) == (kind.opcode >= 0x80)
    for answer in kind.answers:
        assert kind.sender is Role.CLIENT
        assert answer.sender is Role.SERVER


def test_frequent_and_long_messages_have_struct_code() -> None:
    names = {kind.__name__ for kind in STRUCT_KINDS}
    assert {"PartitionStart", "PartitionChunk", "PartitionEnd", "Mutate", "MutateReply"} <= names
    # Those with a row for each of thousands of buckets, too: otherwise one takes the loop 40 ms.
    assert {"EventsReply", "ListBucketsReply"} <= names


# --- encoding and decoding ------------------------------------------------------------------------


@given(MESSAGES_OF_ANY_KIND)
@settings(max_examples=effort(250, 1_000))
def test_a_message_is_equal_after_encoding_and_decoding(message: Message) -> None:
    header = Header(message.opcode, message.status, message.partition, message.opaque, 0, 0)
    assert decode(header, padded_body_of(message)) == message
    # Also from a buffer of the network.
    assert decode(header, bytearray(padded_body_of(message))) == message
    assert decode(header, memoryview(padded_body_of(message))) == message


@given(MESSAGES_OF_ANY_KIND)
@settings(max_examples=effort(125, 500))
def test_a_frame_is_its_header_its_body_and_padding(message: Message) -> None:
    frame = message.frame_buffers()
    whole = b"".join(map(bytes, frame))
    assert unpack_header(whole[:HEADER_BYTES]).length == len(whole) - HEADER_BYTES
    assert whole[HEADER_BYTES:] == padded_body_of(message)
    # A small frame is one piece. Otherwise each piece starts aligned, so that the receiver has an
    # aligned chunk.
    assert len(frame) == 1 or all(len(piece) % 8 == 0 for piece in frame[:-2])


@struct_kinds
@given(data=st.data())
def test_the_struct_code_builds_the_declared_layout(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(messages_of(kind))
    fields = {name: getattr(message, name) for name in layout_fields(kind)}
    assert body_of(message) == kind.layout.build(fields)


@struct_kinds
@given(data=st.data())
def test_the_struct_code_reads_the_declared_layout(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(messages_of(kind))
    body = padded_body_of(message)
    assert parse(kind, body) == parse_as_declared(kind, body)


# --- bodies that are no message -------------------------------------------------------------------


def whole_words(most: int = 12) -> st.SearchStrategy[bytes]:
    """Random bodies as a frame may have them: padded to 8 bytes."""
    return st.integers(0, most).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n))


@kinds
@given(data=st.data())
@settings(max_examples=effort(8, 200))
def test_random_bodies_are_read_or_refused_as_declared(
    kind: type[Message], data: st.DataObject
) -> None:
    few = st.lists(st.sampled_from(b"\0\0\0\0\1\2\x80\xff"), max_size=10).map(
        lambda items: bytes(byte for item in items for byte in (item, 0, 0, 0, 0, 0, 0, 0))
    )
    body = data.draw(st.one_of(whole_words(), few))
    message = parse(kind, body)
    assert message == parse_as_declared(kind, body)
    if message is not None:
        assert parse(kind, padded_body_of(message)) == message


@kinds
@given(data=st.data())
@settings(max_examples=effort(8, 200))
def test_altered_bodies_are_read_or_refused_as_declared(
    kind: type[Message], data: st.DataObject
) -> None:
    body = bytearray(padded_body_of(data.draw(messages_of(kind))))
    for offset in data.draw(st.lists(st.integers(0, max(len(body) - 1, 0)), max_size=3)):
        if body:
            body[offset] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]))
    assert parse(kind, bytes(body)) == parse_as_declared(kind, bytes(body))


@kinds
@given(data=st.data())
@settings(max_examples=effort(8, 200))
def test_a_body_that_is_cut_is_refused(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    body = body_of(message)
    if body:
        assert parse(kind, body[: data.draw(st.integers(0, len(body) - 1))]) is None


@kinds
@given(data=st.data())
@settings(max_examples=effort(8, 200))
def test_a_body_that_is_too_long_is_refused(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    body = padded_body_of(message)
    assert parse(kind, body + bytes(8)) is None
    assert parse(kind, body + data.draw(whole_words(3).filter(bool))) is None


@kinds
@given(data=st.data())
@settings(max_examples=20)
def test_padding_other_than_zeros_is_refused(kind: type[Message], data: st.DataObject) -> None:
    body = body_of(data.draw(messages_of(kind)))
    if len(padding(len(body))) > 0:
        assert parse(kind, body + b"\1" * len(padding(len(body)))) is None


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Mutate, pack("<16sQBB2xI", b"", 0, 0, 0, 0xFFFF_FFFF)),
        (Mutate, pack("<16sQBB2xI", b"", 0, 0, 0, 1024)),
        (MutateReply, pack("<QQ", 1, 1 << 63)),
        (MutateReply, pack("<QQQ", 1, 0, 0x0100_0000)),
        (MutateReply, pack("<QQQ", 1, 0, 1 << 60)),
        (MutateReply, pack("<QQQQ", 1, 0, 0, 0x0100_0000)),
        (MutateReply, pack("<QQQQ", 1, 0, 0, 1 << 60)),
        (PartitionAnswers, pack("<I", 0xFFFF_FFFF)),
        (PartitionAnswers, pack("<I16sQQI", 1, b"", 1, 1, 0xFFFF_FFFF)),
        (PartitionAnswers, pack("<I16sQQI", 0x0100_0000, b"", 1, 1, 0)),
        (BarrierReply, pack("<HH", 0, 0xFFFF)),
        (Get, pack("<QH", 0, 0xFFFF)),
        (Hello, pack("<B", 0xFF)),
        (PartitionChunk, pack("<IIIIQQ", 1 << 20, 0xFFFF_FFFF, 0xFFFF_FFFF, 0, 0, 0)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(len(value)),
)
def test_a_count_of_more_items_than_came_allocates_no_memory_for_them(
    kind: type[Message], body: bytes
) -> None:
    tracemalloc.start()
    try:
        assert parse(kind, body + padding(len(body))) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


# --- positions ------------------------------------------------------------------------------------


def stream_body(
    last_complete: int, highest: int, partial: tuple[int, int, int], log: bytes = b"\0\0"
) -> bytes:
    body = (
        pack("<BQQBQQQQQ", PartitionState.ACTIVE, 9, 0, 0, last_complete, highest, *partial) + log
    )
    return body + padding(len(body))


def test_a_position_is_read() -> None:
    log = pack("<HQQQQ", 2, 8, 6, 7, 0)
    message = parse(Stream, stream_body(6, 7, (8, 5, 9), log))
    assert isinstance(message, Stream)
    assert message.position == Position(
        FailoverLog.of_pairs([(8, 6), (7, 0)]),
        SeqNo(6),
        SeqNo(7),
        PartialSnapshot(HistoryId(8), SeqNo(5), SeqNo(9)),
    )


@pytest.mark.parametrize(
    ("last_complete", "highest", "partial"),
    [
        (6, 7, (0, 0, 0)),  # more than complete, of no snapshot
        (7, 6, (0, 0, 0)),  # less than complete
        (7, 6, (8, 5, 9)),
        (6, 10, (8, 5, 9)),  # above its snapshot
        (3, 4, (8, 5, 9)),  # below its snapshot
        (5, 7, (8, 9, 5)),  # a snapshot that ends before it starts
    ],
)
def test_a_position_that_contradicts_itself_is_refused(
    last_complete: int, highest: int, partial: tuple[int, int, int]
) -> None:
    assert parse(Stream, stream_body(last_complete, highest, partial)) is None


@pytest.mark.parametrize(
    "log",
    [
        pack("<HQQ", 1, 0, 5),  # 0 is no history
        pack("<HQQQQ", 2, 8, 5, 8, 0),  # twice
        pack("<HQQQQ", 2, 8, 5, 7, 6),  # rises towards the older
        pack("<H", 26) + b"".join(pack("<QQ", n, 0) for n in range(1, 27)),  # too many
    ],
)
def test_a_malformed_failover_log_is_refused(log: bytes) -> None:
    assert parse(Stream, stream_body(0, 0, (0, 0, 0), log)) is None


# --- the largest message of each kind -------------------------------------------------------------

KEY = b"k" * KEY_BYTES_MAX
LARGEST_CHUNK = chunk_of_plain_sets([KEY], [bytes(VALUE_BYTES_MAX)])
ALL_PARTITIONS = [PartitionId(partition) for partition in range(PARTITIONS_MAX)]


@pytest.mark.parametrize(
    "message",
    [
        Hello("i" * IDENTITY_BYTES_MAX, tuple(range(255)), 0, 0, 0),
        Barrier(b"c" * COOKIE_BYTES_MAX),
        BarrierReply(b"c" * COOKIE_BYTES_MAX, tuple((p, SeqNo(1)) for p in ALL_PARTITIONS)),
        Get((KEY,) * GET_KEYS_MAX),
        GetReply(HistoryId(1), 1, LARGEST_CHUNK),
        Mutate(
            Bundle(
                chunk_of_plain_sets(
                    [KEY] * BUNDLE_RUNS_MAX,
                    [bytes(28 * 1024)] * BUNDLE_RUNS_MAX,
                ),
                [BundleRun(partition, 1) for partition in ALL_PARTITIONS],
            )
        ),
        Mutate(Bundle.of_one_run(PartitionId(3), LARGEST_CHUNK)),
        PartitionChunk(
            Chunk.build([Mutation(Operation.SET, KEY, bytes(VALUE_BYTES_MAX), SeqNo(1), Cas(1))])
        ),
        SeqnosReply(tuple((p, 1, 1, 1, 1) for p in ALL_PARTITIONS)),
        SeqnosAtReply(tuple((p, 1, 1) for p in ALL_PARTITIONS)),
        Lease(LeaseAction.ACQUIRE, 0, 1, "owner", tuple((p, 1, 1) for p in ALL_PARTITIONS)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_largest_of_its_kind_fits(message: Message) -> None:
    assert len(padded_body_of(message)) <= message.body_bytes_max


def test_of_too_many_keys_only_one_above_the_limit_is_read() -> None:
    """To read 65,535 keys took the server's loop 5 to 8 ms."""
    request = parse(Get, padded_body_of(Get((b"k",) * 65_535)))
    assert isinstance(request, Get)
    assert request.keys == (b"k",) * (GET_KEYS_MAX + 1)
    assert parse(Get, padded_body_of(Get((b"k",) * GET_KEYS_MAX)) + bytes(8)) is None


def test_an_open_for_every_partition_of_a_bucket_fits_a_handshake_frame() -> None:
    message = Open("b" * BUCKET_NAME_BYTES_MAX, tuple(ALL_PARTITIONS))
    assert len(padded_body_of(message)) <= HANDSHAKE_BODY_BYTES_MAX


def test_a_message_about_no_partition_has_the_number_for_none() -> None:
    assert Hello("i", (1,), 0, 0, 0).partition == NO_PARTITION


@given(st.integers(0, (1 << 64) - 1))
def test_the_frame_of_a_cycle_end_is_the_same_without_a_message(cycle: int) -> None:
    assert cycle_end_frame(cycle) == b"".join(map(bytes, CycleEnd(cycle).frame_buffers()))


def test_the_checksum_of_a_chunk_is_computed_once_for_all_consumers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = Chunk.build([Mutation(Operation.SET, b"k", b"v", SeqNo(1))])
    summed: list[Buffer] = []

    def counted_crc32c(data: Buffer) -> int:
        summed.append(data)
        return crc32c(data)

    monkeypatch.setattr(columns, "crc32c", counted_crc32c)
    first_frame = PartitionChunk(chunk, partition=PartitionId(1), opaque=1).frame_buffers()
    second_frame = PartitionChunk(chunk, partition=PartitionId(1), opaque=2).frame_buffers()
    assert len(summed) == 1
    assert first_frame[1] is second_frame[1]
    assert first_frame[0] != second_frame[0]


@pytest.mark.parametrize("flag", [2, 0x80, 0xFF])
def test_a_flag_is_set_by_any_byte_but_zero(flag: int) -> None:
    body = pack("<QQQQBB6x", 1, 2, 3, 4, 1, flag)
    message = parse(PartitionStart, body)
    assert isinstance(message, PartitionStart)
    assert message.may_repeat is True
    assert message == parse_as_declared(PartitionStart, body)


def test_the_memory_of_a_parsed_frame_needs_no_garbage_collection() -> None:
    """Otherwise many large frames would pile up before a collection."""
    body = b"".join(Lease(LeaseAction.ACQUIRE, 1, 60, "owner", ((0, 1, 2),)).frame_buffers())[
        HEADER_BYTES:
    ]
    gc.collect()
    gc.disable()
    try:
        before = sum(type(thing).__name__ == "BytesIO" for thing in gc.get_objects())
        for _ in range(10):
            Lease.parse(body, PartitionId(0), 1, 0)
        after = sum(type(thing).__name__ == "BytesIO" for thing in gc.get_objects())
    finally:
        gc.enable()
    assert after == before
