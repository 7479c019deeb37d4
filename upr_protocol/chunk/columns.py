"""The columns of an encoded chunk."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from crc32c import crc32c

from upr_protocol.chunk.layout import (
    CHUNK_HEAD,
    CHUNK_HEAD_BYTES,
    EVEN_MAX,
    Buffer,
    even_offsets,
    padded,
)
from upr_protocol.errors import ChunkError
from upr_protocol.ids import SeqNo
from upr_protocol.limits import CHUNK_MUTATIONS_MAX

_TWO_OFFSETS: Final = Struct("<ii")


class Columns:
    """An encoded chunk: its head, a view of each column, its checksum. Making one copies nothing.

    The constructor checks what costs O(1): the head, the limits on counts, and that the lengths
    agree with the buffer's.

    Args:
        buffer: The encoded chunk, whole. It must not change afterwards.
        crc: Its CRC32C, where that is known already.

    Attributes:
        count: How many mutations there are.
        key_length: The bytes of all keys together.
        value_length: The bytes of all values together.
        start: The covered range, exclusive.
        end: The covered range, inclusive.
        nbytes: The encoded length.

    Raises:
        ChunkError: The buffer does not hold a chunk.
    """

    __slots__ = (
        "_crc",
        "_key_offsets_at",
        "_keys_at",
        "_operations_at",
        "_value_offsets_at",
        "_view",
        "count",
        "end",
        "key_length",
        "nbytes",
        "start",
        "value_length",
    )

    def __init__(self, buffer: Buffer, crc: int | None = None) -> None:
        view = memoryview(buffer)
        nbytes = len(view)
        if nbytes < CHUNK_HEAD_BYTES:
            raise ChunkError(f"a chunk has at least {CHUNK_HEAD_BYTES} bytes, not {nbytes}")
        count, key_length, value_length, reserved, start, end = CHUNK_HEAD.unpack_from(view)
        if count > CHUNK_MUTATIONS_MAX:
            raise ChunkError(f"{count} mutations in a chunk; at most {CHUNK_MUTATIONS_MAX}")
        if reserved:
            raise ChunkError("the reserved field of a chunk is not 0")
        # The sum of `encoded_bytes`, kept at four places from which every column is found. The
        # calls of `padded` are written out, since this runs for every message with a chunk.
        key_offsets_at = CHUNK_HEAD_BYTES + 16 * count + 2 * ((4 * count + 7) & ~7)
        offsets_bytes = (4 * count + 11) & ~7
        value_offsets_at = key_offsets_at + offsets_bytes
        operations_at = value_offsets_at + offsets_bytes
        keys_at = operations_at + ((count + 7) & ~7)
        if keys_at + ((key_length + 7) & ~7) + ((value_length + 7) & ~7) != nbytes:
            raise ChunkError(f"a chunk's lengths do not add up to its {nbytes} bytes")
        if end < start:
            raise ChunkError(f"a chunk cannot end at {end}, before its start at {start}")
        self._view = view
        self._crc = crc
        self._key_offsets_at: int = key_offsets_at
        self._value_offsets_at: int = value_offsets_at
        self._operations_at = operations_at
        self._keys_at = keys_at
        self.nbytes = nbytes
        self.count: int = count
        self.key_length: int = key_length
        self.value_length: int = value_length
        self.start: SeqNo = start
        self.end: SeqNo = end

    @property
    def seqs(self) -> memoryview:
        """The sequence numbers, u64."""
        return self._view[CHUNK_HEAD_BYTES : CHUNK_HEAD_BYTES + 8 * self.count].cast("Q")

    @property
    def cas(self) -> memoryview:
        """The CAS values, u64; what the publisher expects, in a published chunk."""
        offset = CHUNK_HEAD_BYTES + 8 * self.count
        return self._view[offset : offset + 8 * self.count].cast("Q")

    @property
    def expiries(self) -> memoryview:
        """The expiry times, u32, seconds since 1970, 0 for never."""
        offset = CHUNK_HEAD_BYTES + 16 * self.count
        return self._view[offset : offset + 4 * self.count].cast("I")

    @property
    def flags(self) -> memoryview:
        """The application's flags, u32."""
        offset = CHUNK_HEAD_BYTES + 16 * self.count + padded(4 * self.count)
        return self._view[offset : offset + 4 * self.count].cast("I")

    @property
    def key_offsets(self) -> memoryview:
        """Where each key begins, and where the last ends; i32, count + 1 of them."""
        offset = self._key_offsets_at
        return self._view[offset : offset + 4 * self.count + 4].cast("i")

    @property
    def value_offsets(self) -> memoryview:
        """Where each value begins, and where the last ends; i32, count + 1 of them."""
        offset = self._value_offsets_at
        return self._view[offset : offset + 4 * self.count + 4].cast("i")

    @property
    def operations(self) -> memoryview:
        """The operations, u8; see `Operation`."""
        offset = self._operations_at
        return self._view[offset : offset + self.count]

    @property
    def key_bytes(self) -> memoryview:
        """All keys, one after another."""
        offset = self._keys_at
        return self._view[offset : offset + self.key_length]

    @property
    def value_bytes(self) -> memoryview:
        """All values, one after another."""
        offset = self._keys_at + ((self.key_length + 7) & ~7)
        return self._view[offset : offset + self.value_length]

    # Keys, or values, of one length.

    def _one_length(self, offsets_at: int, total: int) -> int:
        """The length of every key, or of every value; 0 where they differ or are too long or many.

        At memory speed. A length other than 0 says that the offsets are right, too.
        """
        count = self.count
        if count == 1:
            return total if _TWO_OFFSETS.unpack_from(self._view, offsets_at) == (0, total) else 0
        if not 0 < count <= EVEN_MAX:
            return 0
        length, remainder = divmod(total, count)
        if remainder or not 0 < length <= EVEN_MAX:
            return 0
        if _TWO_OFFSETS.unpack_from(self._view, offsets_at) != (0, length):
            return 0
        offsets = self._view[offsets_at + 4 : offsets_at + 4 * count + 4].tobytes()
        return length if offsets == even_offsets(0, length, count) else 0

    def uniform_lengths(self) -> tuple[int, int]:
        """The length of every key, and of every value; 0 where they differ, or are too many or too
        long to tell. At memory speed."""
        return (
            self._one_length(self._key_offsets_at, self.key_length),
            self._one_length(self._value_offsets_at, self.value_length),
        )

    # The whole.

    @property
    def crc(self) -> int:
        """CRC32C of the encoded chunk; computed once."""
        if self._crc is None:
            self._crc = crc32c(self._view)
        return self._crc

    def chained_crc(self, previous: int) -> int:
        """CRC32C over this chunk's CRC, continued from that over the chunks before it: one number
        that vouches for all of them, in their order. Never 0, which stands for no chain."""
        return crc32c(self.crc.to_bytes(4, "little"), previous) or 1

    def pieces(self) -> Sequence[Buffer]:
        """What the encoded chunk consists of, one behind the other."""
        return (self._view,)

    def encode(self) -> memoryview:
        """The encoded chunk, without a copy."""
        return self._view

    def __bytes__(self) -> bytes:
        return self._view.tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return bytes(self) == bytes(other)

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __repr__(self) -> str:
        return f"<Chunk of {self.count} in ({self.start}, {self.end}], {self.nbytes} bytes>"
