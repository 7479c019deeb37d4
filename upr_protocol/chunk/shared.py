"""Chunks of large values: in pieces that refer to the values, and made of pieces of a value."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from upr_protocol.chunk.chunk import Chunk
from upr_protocol.chunk.layout import CHUNK_HEAD, LARGE_BYTES, Buffer, column_parts, offsets_of
from upr_protocol.chunk.mutation import Mutation
from upr_protocol.ids import Operation, SeqNo


class ChunkPieces:
    """An encoded chunk whose values are not copied, to be sent. A value of 20 MiB takes 13 ms to
    copy into new memory.

    Args:
        rows: The mutations; their values must stay as they are.
        start: The chunk's start.
        end: Its end.

    Attributes:
        count: How many mutations it has.
    """

    __slots__ = ("_pieces", "count")

    def __init__(self, rows: Sequence[Mutation], start: SeqNo, end: SeqNo) -> None:
        keys, values = [row.key for row in rows], [row.value for row in rows]
        self.count = len(rows)
        parts = column_parts(
            start,
            end,
            array("Q", [row.seq for row in rows]),
            array("Q", [row.cas for row in rows]),
            array("I", [row.expiry for row in rows]),
            array("I", [row.flags for row in rows]),
            offsets_of(keys),
            offsets_of(values),
            bytes([row.op for row in rows]),
            b"".join(keys),
            values,
        )
        self._pieces = _with_small_ones_joined(parts)

    def pieces(self) -> Sequence[Buffer]:
        """What it consists of, one behind the other."""
        return self._pieces


def _with_small_ones_joined(parts: Sequence[array[int] | Buffer]) -> list[Buffer]:
    """Buffers with the same contents, of which only the large ones are not copied: an answer that
    waits to be sent counts by its bytes, and a dozen small objects take ten times as many."""
    pieces: list[Buffer] = []
    small: list[array[int] | Buffer] = []
    for part in parts:
        if isinstance(part, array) or len(part) < LARGE_BYTES:
            small.append(part)
            continue
        pieces += [b"".join(small), part]
        small.clear()
    pieces.append(b"".join(small))
    return pieces


class LargeRow:
    """A published chunk of one `SET`, whose value comes in pieces.

    Args:
        key: The key.
        value_bytes: The length of the value.
        flags: The flags.
        expiry: The expiry time.
    """

    __slots__ = ("_bytes",)

    def __init__(self, key: bytes, value_bytes: int, flags: int, expiry: int) -> None:
        columns = column_parts(
            SeqNo(0),
            SeqNo(0),
            bytes(8),
            bytes(8),
            array("I", (expiry,)),
            array("I", (flags,)),
            offsets_of((key,)),
            array("i", (0, value_bytes)),
            bytes((Operation.SET,)),
            key,
            (),
        )
        columns[0] = CHUNK_HEAD.pack(1, len(key), value_bytes, 0, 0, 0)
        self._bytes = bytearray(b"".join(columns))

    def add(self, piece: Buffer) -> None:
        """Adds the next piece of the value. O(its bytes): memory that grows is not copied, where
        the system can move it."""
        self._bytes += piece

    def chunk(self) -> Chunk:
        """The chunk, once the value is there; it can be written."""
        self._bytes += bytes(-len(self._bytes) & 7)
        return Chunk(self._bytes)


class WidenedChunk:
    """A copy of a stored chunk that begins earlier, made piece by piece.

    Args:
        chunk: The chunk.
        start: Where the copy begins.
    """

    __slots__ = ("_bytes", "_chunk")

    def __init__(self, chunk: Chunk, start: SeqNo) -> None:
        self._chunk = chunk
        head = (chunk.count, chunk.key_length, chunk.value_length, 0, start, chunk.end)
        self._bytes = bytearray(CHUNK_HEAD.pack(*head))

    def copy(self, nbytes_max: int) -> bool:
        """Copies so many bytes at most; returns whether it is done."""
        offset = len(self._bytes)
        self._bytes += self._chunk.encode()[offset : offset + nbytes_max]
        return len(self._bytes) == self._chunk.nbytes

    def chunk(self) -> Chunk:
        """The copy, once it is done."""
        return Chunk(memoryview(self._bytes).toreadonly())
