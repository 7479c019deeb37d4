"""Frames: cut out of any stream of bytes alike, refused early, and never held for long."""

from __future__ import annotations

import random
import sys
import tracemalloc
from itertools import cycle, pairwise
from struct import pack_into
from typing import Any, SupportsIndex

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.effort import effort
from tests.protocol.strategies import U8, U16, U32
from tests.protocol.wire.frames import admit, frame_of
from tests.protocol.wire.strategies import MESSAGES_OF_ANY_KIND
from upr_kernel import pack_header
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_protocol.wire import FrameBuffer, Header, Message, Noop, decode
from upr_protocol.wire.frame import (
    BODY_BUFFER_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PAGE_BYTES,
    TRUSTED_BYTES_MAX,
    VERSION,
    padding,
    unpack_header,
)


def drain(buffer: FrameBuffer) -> list[tuple[Header, bytes]]:
    frames = []
    while (frame := buffer.next_frame()) is not None:
        frames.append((frame[0], bytes(frame[1])))
    return frames


def feed(pieces: list[bytes]) -> list[tuple[Header, bytes]]:
    buffer = FrameBuffer(admit)
    frames = []
    for piece in pieces:
        buffer.receive(piece)
        frames += drain(buffer)
    assert not buffer.is_in_frame
    assert buffer.buffered == 0
    return frames


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise(sorted({0, len(data), *cuts}))]


# --- the header -----------------------------------------------------------------------------------

HEADERS = st.builds(Header, U8, U16, U16, U32, U32.map(lambda length: length & ~7), U32)


def packed(header: Header) -> bytes:
    return pack_header(
        header.opcode,
        header.status,
        header.partition,
        header.opaque,
        header.length,
        header.body_crc,
    )


@given(HEADERS)
def test_a_header_is_as_declared(header: Header) -> None:
    data = packed(header)
    assert len(data) == HEADER_BYTES == HEADER.sizeof()
    parsed = HEADER.parse(data)
    assert {name: value for name, value in parsed.items() if name != "_io"} == {
        "magic": MAGIC,
        "version": VERSION,
        "opcode": header.opcode,
        "status": header.status,
        "partition": header.partition,
        "opaque": header.opaque,
        "length": header.length,
        "body_crc": header.body_crc,
        "header_crc": crc32c(data[:20]),
    }
    assert HEADER.build(parsed) == data
    assert unpack_header(data) == header
    assert data[:2] == b"UP"


@given(HEADERS, st.integers(0, 8 * HEADER_BYTES - 1))
def test_any_flipped_bit_of_a_header_is_noticed(header: Header, bit: int) -> None:
    data = bytearray(packed(header))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_header(bytes(data))
    assert caught.value.status is (Status.BAD_MAGIC if bit < 16 else Status.BAD_CHECKSUM)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_header(data)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "status"),
    [
        (0, "<H", 0x5056, Status.BAD_MAGIC),
        (2, "<B", VERSION + 1, Status.BAD_VERSION),
        (2, "<B", 0, Status.BAD_VERSION),
        (12, "<I", 7, Status.MALFORMED),
        (12, "<I", 0xFFFF_FFFF, Status.MALFORMED),
    ],
)
def test_a_header_with_a_right_checksum_and_wrong_fields_is_refused_for_the_field(
    offset: int, layout: str, value: int, status: Status
) -> None:
    data = bytearray(pack_header(0x0E, 0, 0, 0, 0, 0))
    pack_into(layout, data, offset, value)
    pack_into("<I", data, 20, crc32c(data[:20]))
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_header(bytes(data))
    assert caught.value.status is status


# --- the buffer -----------------------------------------------------------------------------------

BODIES = st.lists(
    st.one_of(st.binary(max_size=60), st.integers(0, 300).map(bytes)), min_size=1, max_size=6
)


@given(BODIES, st.lists(st.integers(0, 2_000), max_size=12))
def test_however_the_bytes_come_the_frames_are_the_same(
    bodies: list[bytes], cuts: list[int]
) -> None:
    frames = [frame_of(body, opcode) for opcode, body in enumerate(bodies)]
    data = b"".join(frames)
    expected = [
        (unpack_header(frame), body + padding(len(body)))
        for frame, body in zip(frames, bodies, strict=True)
    ]
    assert feed([data]) == expected
    assert feed([bytes([byte]) for byte in data]) == expected
    assert feed(split(data, [cut % (len(data) + 1) for cut in cuts])) == expected
    assert feed(frames) == expected


@given(st.lists(MESSAGES_OF_ANY_KIND, min_size=1, max_size=4), st.data())
@settings(max_examples=effort(100, 200))
def test_messages_come_through_whole_bytewise_and_split(
    messages: list[Message], data: st.DataObject
) -> None:
    stream = b"".join(bytes(piece) for message in messages for piece in message.frame_buffers())
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    for pieces in ([stream], [bytes([byte]) for byte in stream], split(stream, cuts)):
        assert [decode(header, body) for header, body in feed(pieces)] == messages


@given(BODIES, st.data())
def test_a_damaged_body_is_noticed(bodies: list[bytes], data: st.DataObject) -> None:
    stream = bytearray(
        b"".join(frame_of(body) for body in bodies[:-1]) + frame_of(bodies[-1] + b"!")
    )
    offset = data.draw(st.integers(1, 8))
    stream[-offset] ^= data.draw(st.integers(1, 255))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=5))
    buffer = FrameBuffer(admit)
    whole = 0

    def receive_all() -> None:
        nonlocal whole
        for piece in split(bytes(stream), cuts):
            buffer.receive(piece)
            while buffer.next_frame() is not None:
                whole += 1

    with pytest.raises(
        RemoteProtocolError, match="checksum of a frame's body does not match"
    ) as caught:
        receive_all()
    assert caught.value.status is Status.BAD_CHECKSUM
    assert whole == len(bodies) - 1


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_random_bytes_are_refused_or_waited_for(data: bytes, cuts: list[int]) -> None:
    buffer = FrameBuffer(admit)
    try:
        for piece in split(data, [cut % (len(data) + 1) for cut in cuts]):
            buffer.receive(piece)
            assert drain(buffer) == []
    except RemoteProtocolError:
        pass
    else:
        assert len(data) < HEADER_BYTES


@pytest.mark.parametrize("arrives", ["whole", "bytewise", "header first"])
def test_a_frame_is_refused_before_its_body_is_kept(arrives: str) -> None:
    refused: list[Header] = []

    def refuse(header: Header) -> None:
        refused.append(header)
        raise RemoteProtocolError("too long", Status.FRAME_TOO_LONG)

    data = pack_header(0x11, 0, 0, 0, FRAME_BODY_BYTES_MAX, 0) + bytes(1_000)
    pieces = {
        "whole": [data],
        "bytewise": [bytes([byte]) for byte in data],
        "header first": [data[:HEADER_BYTES], data[HEADER_BYTES:]],
    }[arrives]
    buffer = FrameBuffer(refuse)
    taken_bytes = 0

    def receive_all() -> None:
        nonlocal taken_bytes
        for piece in pieces:
            buffer.receive(piece)
            taken_bytes += len(piece)
            buffer.next_frame()

    with pytest.raises(RemoteProtocolError, match="too long") as caught:
        receive_all()
    assert caught.value.status is Status.FRAME_TOO_LONG
    assert taken_bytes == (len(data) if arrives == "whole" else HEADER_BYTES)
    assert [header.length for header in refused] == [FRAME_BODY_BYTES_MAX]
    assert buffer._body is None


def test_the_judge_sees_each_header_once() -> None:
    opcodes: list[int] = []
    buffer = FrameBuffer(lambda header: opcodes.append(header.opcode))
    for byte in frame_of(b"one", 1) + frame_of(b"", 2) + frame_of(b"three" * 9, 3):
        buffer.receive(bytes([byte]))
        drain(buffer)
    assert opcodes == [1, 2, 3]


def test_it_knows_whether_a_frame_has_begun() -> None:
    frame = frame_of(b"12345678")
    buffer = FrameBuffer(admit)
    assert not buffer.is_in_frame
    for count, byte in enumerate(frame, 1):
        buffer.receive(bytes([byte]))
        next_frame = buffer.next_frame()
        assert (next_frame is None) == (count < len(frame)) == buffer.is_in_frame
        # The header's 24 bytes are read and done with.
        buffered_bytes = count if count < HEADER_BYTES else count - HEADER_BYTES
        assert buffer.buffered == (buffered_bytes if next_frame is None else 0)


def test_a_frame_without_a_body_needs_no_byte_more() -> None:
    buffer = FrameBuffer(admit)
    buffer.receive(b"".join(map(bytes, Noop().frame_buffers())))
    assert buffer.next_frame() is not None
    assert buffer.next_frame() is None


# --- what it costs --------------------------------------------------------------------------------


def test_an_unfinished_body_takes_at_most_twice_the_memory_of_what_came() -> None:
    """A peer that claims 32 MiB and sends little costs little."""
    buffer = FrameBuffer(admit)
    bodies = set()
    tracemalloc.start()
    try:
        buffer.receive(pack_header(0x11, 0, 0, 0, FRAME_BODY_BYTES_MAX, 0))
        assert buffer.next_frame() is None
        for received in range(100, 400_001, 100):
            buffer.receive(bytes(100))
            assert buffer.next_frame() is None
            bodies.add(id(buffer._body))
            if received % 20_000 == 0:
                buffered_bytes, _ = tracemalloc.get_traced_memory()
                assert received <= buffered_bytes <= max(BODY_BUFFER_BYTES, 2 * received) + 4_096
                assert buffer.buffered == received
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(bodies) <= 4  # a new one for each piece would cost the square
    assert peak < 4 * 400_000  # while it grows there are two of it


@pytest.mark.parametrize("damaged_byte", [None, 0, 700_000, 5_000_000])
def test_a_large_body_is_copied_only_while_it_is_small(damaged_byte: int | None) -> None:
    """Each step of the loop copies and checks what has just come, and not the whole body."""
    body = random.Random(1).randbytes(5_000_008)
    frame = bytearray(frame_of(body))
    if damaged_byte is not None:
        frame[HEADER_BYTES + damaged_byte] ^= 1
    buffer = FrameBuffer(admit)
    buffer.receive(bytes(frame[:HEADER_BYTES]))
    assert buffer.next_frame() is None
    rooms: list[memoryview] = []
    offset = HEADER_BYTES
    while offset < len(frame):
        room = buffer.receive_buffer()
        if not rooms or rooms[-1].obj is not room.obj:
            rooms.append(room)
        count = min(len(room), 50_000)
        room[:count] = frame[offset : offset + count]
        offset += count
        buffer.receive(b"", count)
        assert buffer.buffered <= buffer.held_bytes <= buffer.buffered + PAGE_BYTES
        if offset < len(frame):
            assert buffer.next_frame() is None
    # Half of each is full at once, as the memory doubles.
    sizes = [memoryview(room.obj).nbytes for room in rooms]
    assert sizes == [65_536, 131_072, 262_144, 524_288, 1_048_576, len(body)]
    if damaged_byte is None:
        next_frame = buffer.next_frame()
        assert next_frame is not None
        assert next_frame[1] == body
    else:
        with pytest.raises(RemoteProtocolError, match="checksum"):
            buffer.next_frame()


# --- receiving in place ---------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=5),
    st.lists(
        st.tuples(st.integers(1_000, 400_000), st.integers(1, 100_000)), min_size=1, max_size=12
    ),
)
def test_bytes_put_into_the_receive_buffer_count_like_bytes_received(
    lengths: list[int], steps: list[tuple[int, int]]
) -> None:
    bodies = [bytes([index]) * length for index, length in enumerate(lengths, 1)]
    stream = memoryview(b"".join(frame_of(body) for body in bodies))
    buffer, frames, offset = FrameBuffer(admit), [], 0
    for filled, more in cycle(steps):
        if offset == len(stream):
            break
        room = buffer.receive_buffer()
        filled = min(filled, len(room), len(stream) - offset)
        room[:filled] = stream[offset : offset + filled]
        # What lies behind is only there when the room was filled, as with a scattering read.
        behind = more if filled == len(room) else 0
        buffer.receive(bytes(stream[offset + filled : offset + filled + behind]), filled)
        offset += filled + min(behind, len(stream) - offset - filled)
        frames += drain(buffer)
        assert buffer.buffered <= offset
    assert [body for _, body in frames] == [body + padding(len(body)) for body in bodies]
    assert not buffer.is_in_frame


def test_the_receive_buffer_is_empty_between_frames() -> None:
    buffer = FrameBuffer(admit)
    frame = frame_of(bytes(100))
    for offset in range(0, len(frame) + 1, 4):
        in_body = HEADER_BYTES <= offset < len(frame)
        assert len(buffer.receive_buffer()) == (len(frame) - offset if in_body else 0)
        buffer.receive(frame[offset : offset + 4])
        drain(buffer)


def test_a_peer_that_sent_a_large_body_gets_as_large_a_buffer_for_the_next() -> None:
    buffer = FrameBuffer(admit)
    begun = pack_header(0x11, 0, 0, 0, FRAME_BODY_BYTES_MAX, 0)

    def room() -> int:
        buffer.receive(begun)
        drain(buffer)
        return len(buffer.receive_buffer())

    assert room() == BODY_BUFFER_BYTES
    for length in (300_000, 100_000, 3 * TRUSTED_BYTES_MAX):
        buffer = FrameBuffer(admit)
        buffer.receive(frame_of(bytes(length)))
        drain(buffer)
        assert room() == min(length, TRUSTED_BYTES_MAX)


def test_a_small_body_does_not_hold_the_bytes_it_came_with() -> None:
    small, large = frame_of(bytes(64)), frame_of(bytes(1 << 20))
    buffer = FrameBuffer(admit)
    buffer.receive(small + large)
    frame = buffer.next_frame()
    assert frame is not None
    assert isinstance(frame[1], bytes)
    assert sys.getsizeof(frame[1]) < 200


class Counted(bytes):
    """Bytes that count how many of them are copied by slicing and joining."""

    copied = 0

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        item = super().__getitem__(key)
        if isinstance(item, int):
            return item
        Counted.copied += len(item)
        return Counted(item)

    def __add__(self, other: Any) -> Counted:
        Counted.copied += len(self) + len(other)
        return Counted(super().__add__(other))


@pytest.mark.parametrize("piece", [1, 7, 23, 24, 25, 33, 1_000, 65_536, 10_000_000])
@pytest.mark.parametrize("body", [0, 8, 1_000, 100_000])
def test_time_is_linear_however_the_bytes_are_split(piece: int, body: int) -> None:
    """Each byte is copied a few times at most, whether frames and pieces are small or large."""
    frames = max(1, 300_000 // (body + HEADER_BYTES))
    data = frame_of(bytes(body)) * frames
    Counted.copied = 0
    buffer = FrameBuffer(admit)
    calls = count = 0
    for offset in range(0, len(data), piece):
        buffer.receive(Counted(data[offset : offset + piece]))
        while True:
            calls += 1
            if buffer.next_frame() is None:
                break
            count += 1
    assert count == frames
    assert calls <= frames + len(data) / piece + 1
    # A header that comes byte by byte is joined 24 times; nothing else is copied more than thrice.
    assert Counted.copied <= 3 * len(data) + 24 * HEADER_BYTES * frames
