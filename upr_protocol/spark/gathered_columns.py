"""Columns of the rows of several chunks, copied as each chunk comes.

A chunk lies in the memory that its frame was received into. Once its rows are copied, that memory
takes the next frame, and is still in the processor's cache then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from upr_protocol.chunk import Chunk

_Code = Literal["B", "I", "Q"]


class GatheredNumbers:
    """A column of numbers of one width.

    Args:
        kind: The type of the numbers; of unsigned ones, too, that of equal bytes.
        code: The same, as `struct` calls it: that of the chunk's column.
        column_of: Gives the column of a chunk.
        rows_max: How many rows it holds at most.
    """

    def __init__(
        self,
        kind: pa.DataType,
        code: _Code,
        column_of: Callable[[Chunk], memoryview],
        rows_max: int,
    ) -> None:
        self._kind = kind
        self._code = code
        self._column_of = column_of
        self._rows_max = rows_max
        self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._buffer = pa.allocate_buffer(self._rows_max * self._kind.bit_width // 8)
        self._memory = memoryview(self._buffer).cast("B").cast(self._code)

    def add(self, chunk: Chunk, low: int, high: int) -> None:
        """Copies the rows [`low`, `high`) of a chunk."""
        end = self._count + high - low
        self._memory[self._count : end] = self._column_of(chunk)[low:high]
        self._count = end

    def take(self) -> pa.Array:
        """All rows so far, with which it is empty again."""
        nbytes = self._count * self._kind.bit_width // 8
        array = pa.Array.from_buffers(
            self._kind, self._count, [None, self._buffer.slice(0, nbytes)]
        )
        self._begin()
        return array


class GatheredStrings:
    """A column of strings of bytes, none null.

    Args:
        offsets_of: Gives where the strings of a chunk begin, and where the last ends.
        bytes_of: Gives the bytes of the strings of a chunk.
        rows_max: How many rows it holds at most.
        bytes_max: How many bytes it holds at most, unless one row has more.

    Attributes:
        nbytes: How many bytes it has.
    """

    def __init__(
        self,
        offsets_of: Callable[[Chunk], memoryview],
        bytes_of: Callable[[Chunk], memoryview],
        rows_max: int,
        bytes_max: int,
    ) -> None:
        self._offsets_of = offsets_of
        self._bytes_of = bytes_of
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._begin()

    def _begin(self) -> None:
        self._count = self.nbytes = 0
        self._offsets_buffer = pa.allocate_buffer(4 * (self._rows_max + 1))
        self._offsets = np.frombuffer(self._offsets_buffer, np.int32)
        self._offsets[0] = 0
        self._buffer = pa.allocate_buffer(0)
        self._memory = memoryview(self._buffer).cast("B")

    def _make_room(self, nbytes: int) -> None:
        """Moves to memory of so many bytes."""
        old_memory = self._memory
        self._buffer = pa.allocate_buffer(nbytes)
        self._memory = memoryview(self._buffer).cast("B")
        self._memory[: self.nbytes] = old_memory[: self.nbytes]

    def add(self, chunk: Chunk, low: int, high: int) -> None:
        """Copies the rows [`low`, `high`) of a chunk."""
        offsets = self._offsets_of(chunk)
        data_begin, data_end = offsets[low], offsets[high]
        count, nbytes = self._count + high - low, self.nbytes + data_end - data_begin
        if nbytes > len(self._memory):
            likely_bytes = max(2 * nbytes, self._rows_max * -(-nbytes // count))
            self._make_room(max(nbytes, min(likely_bytes, self._bytes_max)))
        np.add(
            np.frombuffer(offsets, np.int32)[low + 1 : high + 1],
            self.nbytes - data_begin,
            out=self._offsets[self._count + 1 : count + 1],
        )
        self._memory[self.nbytes : nbytes] = self._bytes_of(chunk)[data_begin:data_end]
        self._count, self.nbytes = count, nbytes

    def take(self) -> pa.Array:
        """All rows so far, with which it is empty again."""
        offsets = self._offsets_buffer.slice(0, 4 * (self._count + 1))
        data = self._buffer.slice(0, self.nbytes)
        array = pa.Array.from_buffers(pa.binary(), self._count, [None, offsets, data])
        self._begin()
        return array


_NUMBERS: Final[dict[str, tuple[pa.DataType, _Code, Callable[[Chunk], memoryview]]]] = {
    "seq": (pa.int64(), "Q", lambda chunk: chunk.seqs),
    "cas": (pa.int64(), "Q", lambda chunk: chunk.cas),
    "flags": (pa.uint32(), "I", lambda chunk: chunk.flags),
    "expiry": (pa.uint32(), "I", lambda chunk: chunk.expiries),
    "operation": (pa.int8(), "B", lambda chunk: chunk.operations),
}
"""By column its type, the same as `struct` calls it, and what gives it of a chunk."""

GATHERED_COLUMNS: Final = ("key", "value", *_NUMBERS)
"""The names of the columns of a chunk. `operation` has the codes of the operations."""


class GatheredColumns:
    """Those columns of a chunk that are needed, of the rows of several chunks.

    Args:
        names: The columns, of `GATHERED_COLUMNS`.
        rows_max: How many rows it holds at most.
        bytes_max: How many bytes of keys and values it holds at most, unless one row has more.
    """

    def __init__(self, names: Iterable[str], rows_max: int, bytes_max: int) -> None:
        self._columns = {name: _new_column(name, rows_max, bytes_max) for name in names}

    @property
    def nbytes(self) -> int:
        """How many bytes of keys and values it has."""
        return sum(
            column.nbytes
            for column in self._columns.values()
            if isinstance(column, GatheredStrings)
        )

    def add(self, chunk: Chunk, low: int, high: int) -> None:
        """Copies the rows [`low`, `high`) of a chunk."""
        for column in self._columns.values():
            column.add(chunk, low, high)

    def take(self) -> dict[str, pa.Array]:
        """The columns of all rows so far, by name, with which it is empty again. Sequence numbers
        and CAS values that need 64 bits are negative."""
        return {name: column.take() for name, column in self._columns.items()}


def _new_column(name: str, rows_max: int, bytes_max: int) -> GatheredNumbers | GatheredStrings:
    if name == "key":
        return GatheredStrings(
            lambda chunk: chunk.key_offsets, lambda chunk: chunk.key_bytes, rows_max, bytes_max
        )
    if name == "value":
        return GatheredStrings(
            lambda chunk: chunk.value_offsets, lambda chunk: chunk.value_bytes, rows_max, bytes_max
        )
    kind, code, column_of = _NUMBERS[name]
    return GatheredNumbers(kind, code, column_of, rows_max)
