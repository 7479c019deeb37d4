"""The frame buffer, and the codec: what makes messages of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from crc32c import crc32c

from tests.fuzz.mending import framed, mended_frames
from upr_kernel import pack_header
from upr_protocol.chunk import Buffer
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.ids import PartitionId
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_protocol.transport import FrameMemory
from upr_protocol.wire import MESSAGES, FrameBuffer, Header, Message, decode

MENDED: Final = 0x80
"""In a first byte: the checksums are put right."""


def pieces(data: bytes, first: int) -> Iterator[bytes]:
    """`data` as it may arrive: at most 1, 4, 16, 64, 256 or 1,024 bytes at a time, or whole; the
    low bits of `first` say which."""
    length = (1, 4, 16, 64, 256, 1024, len(data), len(data))[first & 7] or 1
    return (data[offset : offset + length] for offset in range(0, len(data), length))


def _admit(header: Header) -> None:
    if header.length > FRAME_BODY_BYTES_MAX:
        raise RemoteProtocolError("too long", Status.FRAME_TOO_LONG)


def _cut(data: Iterator[bytes], *, in_place: bool) -> tuple[list[tuple[Header, bytes]], str]:
    """The frames in `data`, and why there are no more of them."""
    buffer, parsed_frames = FrameBuffer(_admit, FrameMemory().allocate), []
    try:
        for piece in data:
            room = buffer.receive_buffer() if in_place else memoryview(bytearray())
            filled = min(len(room), len(piece))
            room[:filled] = piece[:filled]
            buffer.receive(piece[filled:], filled)
            while (frame := buffer.next_frame()) is not None:
                parsed_frames.append((frame[0], bytes(frame[1])))
            assert buffer.is_in_frame or not buffer.buffered
    except RemoteProtocolError as error:
        return parsed_frames, str(error)
    return parsed_frames, "more is needed" if buffer.is_in_frame else ""


def _written(header: Header, body: bytes) -> bytes:
    fields = (header.opcode, header.status, header.partition, header.opaque)
    assert not len(body) & 7
    return pack_header(*fields, len(body), crc32c(body)) + body


def frames(data: bytes) -> None:
    """The frame buffer: a first byte that says how the rest arrives, then the rest.

    However it arrives, the same frames come out, and the same error.
    """
    first, data = data[0] if data else 0, data[1:]
    if first & MENDED:
        data = mended_frames(data)
    parsed_frames, why = _cut(iter([data]), in_place=False)
    assert data.startswith(b"".join(_written(header, body) for header, body in parsed_frames))
    assert _cut(pieces(data, first), in_place=False) == (parsed_frames, why)
    assert _cut(pieces(data, first), in_place=True) == (parsed_frames, why)


def messages(data: bytes) -> None:
    """The codec: frames, whose bodies are read.

    What is read can be written and is read again as the same. Where there is `struct` code beside a
    layout, the two refuse the same bodies and read the same from the others.
    """
    for opcode, status, partition, opaque, body in framed(data):
        kind = MESSAGES.get(opcode)
        if kind is None:
            continue
        header = Header(opcode, status, partition, opaque, len(body), 0)
        message = _decoded(header, body)
        assert message == _decoded(header, memoryview(bytearray(body)))
        if "parse" in vars(kind):
            assert message == _by_layout(kind, header, body)
        if message is not None:
            written = b"".join(map(bytes, message.frame_buffers()))
            (again,) = framed(written)
            assert again[:4] == (opcode, status, partition, opaque)
            assert _decoded(header, again[4]) == message


def _decoded(header: Header, body: Buffer) -> Message | None:
    try:
        return decode(header, body)
    except RemoteProtocolError:
        return None


def _by_layout(kind: type[Message], header: Header, body: bytes) -> Message | None:
    """As `Message.parse` reads it, whatever `kind` has of its own."""
    slow: Any = vars(Message)["parse"].__func__
    try:
        message: Message = slow(
            kind, body, PartitionId(header.partition), header.opaque, header.status
        )
    except RemoteProtocolError:
        return None
    return message
