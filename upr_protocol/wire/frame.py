"""Frames: 24 bytes of header, then a body padded to a multiple of 8.

The header is declared once with construct, which the protocol document and the tests read; what
runs is the kernel's code, and the tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NoReturn

import construct as cs
import msgspec
from crc32c import crc32c

from upr_kernel import read_header
from upr_protocol.chunk import Buffer
from upr_protocol.errors import RemoteProtocolError, Status

MAGIC: Final = 0x5055
"""`UP`, read as a little-endian u16."""

VERSION: Final = 1

HEADER: Final = cs.Struct(
    "magic" / cs.Int16ul * "0x5055, which reads `UP`",
    "version" / cs.Int8ul * "1",
    "opcode" / cs.Int8ul * "which message this is; answers have the high bit set",
    "status" / cs.Int16ul * "a status code, or 0",
    "partition" / cs.Int16ul * "the partition, or 0xFFFF",
    "opaque" / cs.Int32ul * "chosen by the asker and repeated in the answer",
    "length" / cs.Int32ul * "bytes of the body, a multiple of 8",
    "body_crc" / cs.Int32ul * "CRC32C of the body",
    "header_crc" / cs.Int32ul * "CRC32C of the 20 bytes before it",
)

HEADER_BYTES: Final = 24
_CHECKED_BYTES: Final = 20

_HEADER: Final = Struct("<HBBHHIIII")
_PADDING: Final = tuple(bytes(n) for n in range(8))


class Header(msgspec.Struct, frozen=True):
    """A frame's header, after its checksum was verified."""

    opcode: int
    status: int
    partition: int
    opaque: int
    length: int
    body_crc: int


def unpack_header(data: bytes, offset: int = 0) -> Header:
    """The header in the 24 bytes of `data` from `offset` on.

    Raises:
        RemoteProtocolError: The magic, version or CRC is wrong, or the length is not padded.
    """
    fields = read_header(data, offset)
    if fields is None:
        raise _header_error(data[offset : offset + HEADER_BYTES])
    return Header(*fields)


def _header_error(data: bytes) -> RemoteProtocolError:
    """What is wrong with a header."""
    magic, version, *_, length, _, header_crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        return RemoteProtocolError(
            "this is not a UPR frame: it does not begin with 0x55 0x50", Status.BAD_MAGIC
        )
    if crc32c(data[:_CHECKED_BYTES]) != header_crc:
        return RemoteProtocolError(
            "the checksum of a frame's header does not match", Status.BAD_CHECKSUM
        )
    if version != VERSION:
        return RemoteProtocolError(
            f"a frame has protocol version {version}; this side speaks {VERSION}",
            Status.BAD_VERSION,
        )
    return RemoteProtocolError(
        f"the body of a frame has {length} bytes, which is not a multiple of 8"
    )


def padding(length: int) -> bytes:
    """The zero bytes that pad `length` to a multiple of 8."""
    return _PADDING[-length & 7]


BODY_BUFFER_BYTES: Final = 64 * 1024
"""An unfinished body gets this much memory, or twice what has come of it, or as much as the largest
body that has come whole: a header that lies about its length costs next to no memory."""

TRUSTED_BYTES_MAX: Final = 1024 * 1024
"""A body up to this size is trusted to come whole because another one of its size has. A longer one
gets all its memory once half a MiB to a MiB of it is there: to copy 16 MiB of it into twice the
memory would take tens of milliseconds."""

PAGE_BYTES: Final = 2 * 1024 * 1024
"""The largest pages of a system. The memory of a large body is counted in these, as it fills."""

_NO_BUFFER: Final = memoryview(bytearray())


def _admit_nothing(_header: Header) -> NoReturn:
    raise RemoteProtocolError("the conversation is over", Status.OUT_OF_TURN)


class FrameBuffer:
    """Cuts a stream of bytes into frames.

    A frame is judged by its header alone: `admit` is called with it before any further byte of the
    body is kept, and raises to refuse it. Time is linear in the bytes received, however they are
    split; memory is at most one body and what `receive` was given last.

    A body that does not arrive in one piece may be received right where it will stay: see
    `receive_buffer`.

    Args:
        admit: Called with each header; raises `RemoteProtocolError` to refuse the frame.
        allocate: Gives so many writable bytes for a body, of any content. Of more than
            `TRUSTED_BYTES_MAX` it should make the pages when bytes are put into them.
    """

    __slots__ = (
        "_admit",
        "_allocate",
        "_body",
        "_body_crc",
        "_body_crc_end",
        "_body_filled",
        "_data",
        "_header",
        "_largest",
        "_offset",
    )

    def __init__(
        self, admit: Callable[[Header], None], allocate: Callable[[int], Buffer] = bytearray
    ) -> None:
        self._admit = admit
        self._allocate = allocate
        self._data = b""
        self._offset = 0
        self._header: Header | None = None
        # A body that did not arrive in one piece, of which so many bytes are there. It becomes the
        # frame's body itself.
        self._body: Buffer | None = None
        self._body_filled = 0
        # The checksum of the body's first bytes. It grows as they come: a body of 32 MiB takes
        # some milliseconds.
        self._body_crc = 0
        self._body_crc_end = 0
        self._largest = BODY_BUFFER_BYTES

    @property
    def buffered(self) -> int:
        """Bytes received that are not yet a frame."""
        return len(self._data) - self._offset + self._body_filled

    @property
    def held_bytes(self) -> int:
        """The memory that holds what is not yet a frame, in bytes: more than `buffered`, because a
        body's memory is made before all of it has arrived."""
        body_bytes = 0 if self._body is None else len(self._body)
        if body_bytes > TRUSTED_BYTES_MAX:
            pages = -(-self._body_filled // PAGE_BYTES)
            body_bytes = min(body_bytes, pages * PAGE_BYTES)
        return len(self._data) - self._offset + body_bytes

    @property
    def unfinished_body_bytes(self) -> int:
        """The length of the body that has begun and not ended; 0 between bodies."""
        return self._header.length if self._header is not None else 0

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._header is not None or len(self._data) > self._offset

    def receive_buffer(self) -> memoryview:
        """Where the next bytes may be put: in the unfinished body. Empty between bodies.

        Tell `receive` how many were put there.
        """
        header, body, filled = self._header, self._body, self._body_filled
        if header is None:
            return _NO_BUFFER
        if body is None or filled == len(body):
            body_start: Buffer = memoryview(self._data)[self._offset :] if body is None else body
            self._body_filled = filled = len(body_start)
            size = min(header.length, max(self._largest, 2 * filled))
            # Not made longer in its place: somebody may still hold a view upon it.
            is_large = size > TRUSTED_BYTES_MAX
            self._body = body = self._allocate(header.length if is_large else size)
            # Put into a bytearray itself it would be copied twice.
            memoryview(body)[:filled] = body_start
            self._data, self._offset = b"", 0
        return memoryview(body)[filled:]

    def receive(self, data: bytes, filled: int = 0) -> None:
        """Takes in what arrived: `filled` bytes that were put into `receive_buffer`, and `data`
        after them. Call `next_frame` until it returns None before calling this again."""
        header = self._header
        if header is None:
            self._data = (
                self._data[self._offset :] + data if self._offset < len(self._data) else data
            )
            self._offset = 0
            return
        self._body_filled += filled
        offset, length = 0, header.length
        while offset < len(data) and (self._body is None or self._body_filled < length):
            free = self.receive_buffer()
            count = min(len(free), len(data) - offset)
            free[:count] = data[offset : offset + count]
            self._body_filled += count
            offset += count
        if self._body is not None:
            self._data, self._offset = data, offset
            new_bytes = memoryview(self._body)[self._body_crc_end : self._body_filled]
            self._body_crc = crc32c(new_bytes, self._body_crc)
            self._body_crc_end = self._body_filled

    def received_bytes(self) -> tuple[bytes, int]:
        """What has come of the next frames, and where the first of them begins. It is at the end
        when nothing has come, or the next frame's header was taken already."""
        return self._data, len(self._data) if self._header is not None else self._offset

    def skip_frames(self, nbytes: int) -> None:
        """Takes whole frames of so many bytes, which the caller has read in `received_bytes`."""
        self._offset += nbytes

    def clear(self) -> None:
        """Forgets what has arrived, and `admit`. Nothing is to be received after that."""
        self._admit = _admit_nothing
        self._header = None
        self._forget_body()
        self._data, self._offset = b"", 0

    def _forget_body(self) -> None:
        self._body = None
        self._body_filled = self._body_crc = self._body_crc_end = 0

    def next_frame(self) -> tuple[Header, Buffer] | None:
        """The next frame, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: The header was refused, or the body's CRC32C is wrong.
        """
        header = self._header
        if header is None:
            if len(self._data) - self._offset < HEADER_BYTES:
                return None
            header = unpack_header(self._data, self._offset)
            # Before anything of the body is stored: a header may announce gigabytes.
            self._admit(header)
            self._header = header
            self._offset += HEADER_BYTES
        length = header.length
        body: Buffer
        if self._body is not None:
            # A long body has memory of its own; its checksum was computed as it arrived.
            if self._body_filled < length:
                return None
            body, crc = self._body, self._body_crc
            self._forget_body()
        elif len(self._data) - self._offset >= length:
            body = self._data[self._offset : self._offset + length]
            self._offset += length
            crc = crc32c(body)
        else:
            return None
        if crc != header.body_crc:
            raise RemoteProtocolError(
                "the checksum of a frame's body does not match", Status.BAD_CHECKSUM
            )
        self._header = None
        if length > self._largest:
            self._largest = min(length, TRUSTED_BYTES_MAX)
        return header, body
