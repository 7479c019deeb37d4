"""An encoded chunk, read for the pure kernel: where its columns begin. Checks O(1) only."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from struct import Struct
from typing import Final

from upr_kernel.defects import ChunkDefectError, Defect

Buffer = bytes | bytearray | memoryview

U64_END: Final = 1 << 64

HEAD: Final = Struct("<IIIIQQ")
HEAD_BYTES: Final = HEAD.size

EVEN_MAX: Final = 4096
"""Keys of one length are recognised, and cut in one call, up to so many and so long."""


def padded(length: int) -> int:
    """The next multiple of 8."""
    return (length + 7) & ~7


class Columns:
    """The head and the columns of an encoded chunk; no copy.

    Raises:
        ChunkDefectError: The lengths do not add up.
    """

    __slots__ = (
        "cas_at",
        "count",
        "end",
        "expiries_at",
        "flags_at",
        "key_length",
        "key_offsets_at",
        "keys_at",
        "operations_at",
        "seqs_at",
        "start",
        "value_length",
        "value_offsets_at",
        "values_at",
        "view",
    )

    def __init__(self, buffer: Buffer) -> None:
        view = memoryview(buffer).cast("B")
        if len(view) < HEAD_BYTES:
            raise ChunkDefectError(Defect.LAYOUT)
        count, key_length, value_length, _, self.start, self.end = HEAD.unpack_from(view)
        self.view = view
        self.count: int = count
        self.key_length: int = key_length
        self.value_length: int = value_length
        self.seqs_at = HEAD_BYTES
        self.cas_at: int = self.seqs_at + 8 * count
        self.expiries_at: int = self.cas_at + 8 * count
        self.flags_at: int = self.expiries_at + padded(4 * count)
        self.key_offsets_at: int = self.flags_at + padded(4 * count)
        self.value_offsets_at: int = self.key_offsets_at + padded(4 * count + 4)
        self.operations_at: int = self.value_offsets_at + padded(4 * count + 4)
        self.keys_at: int = self.operations_at + padded(count)
        self.values_at: int = self.keys_at + padded(key_length)
        if self.values_at + padded(value_length) != len(view):
            raise ChunkDefectError(Defect.LAYOUT)

    def column(self, offset: int, width: int, low: int, high: int) -> memoryview:
        """The bytes of the rows [`low`, `high`) of a column that begins at `offset`."""
        return self.view[offset + width * low : offset + width * high]

    def offsets(self, offset: int, low: int, high: int) -> list[int]:
        """Where the strings of the rows [`low`, `high`) begin, and where the last ends."""
        offsets: list[int] = self.column(offset, 4, low, high + 1).cast("i").tolist()
        return offsets

    def keys(self, low: int, high: int) -> list[bytes]:
        """The keys of the rows [`low`, `high`).

        Raises:
            IndexError: There are no such rows.
            ChunkDefectError: The offsets are damaged, or a key is not 1 to 255 bytes.
        """
        self.check_rows(low, high)
        if low == high:
            self.rows(self.key_offsets_at, self.key_length, low, high)
            return []
        length = self._one_length(low, high)
        if length:
            data = self.column(self.keys_at, length, low, high)
            return list(_cutter(length, high - low)(data))
        offsets = self.rows(self.key_offsets_at, self.key_length, low, high)
        base = offsets[0]
        between = self.view[self.keys_at + base : self.keys_at + offsets[-1]].tobytes()
        keys = [between[begin - base : end - base] for begin, end in pairwise(offsets)]
        lengths = set(map(len, keys))
        if 0 in lengths or max(lengths) > 255:
            raise ChunkDefectError(Defect.KEY_LENGTH)
        return keys

    def check_rows(self, low: int, high: int) -> None:
        """Raises `IndexError` where the chunk does not have the rows [`low`, `high`)."""
        if not 0 <= low <= high <= self.count:
            raise IndexError("the chunk does not have these rows")

    def rows(self, offset: int, length: int, low: int, high: int) -> list[int]:
        """`offsets`, checked against the length of all strings.

        Raises:
            ChunkDefectError: They decrease, or leave the bytes.
        """
        offsets = self.offsets(offset, low, high)
        # Once the order is right, the first and the last offset tell whether any is below 0 or
        # beyond the end.
        if sorted(offsets) != offsets or offsets[0] < 0 or offsets[-1] > length:
            raise ChunkDefectError(Defect.OFFSETS)
        return offsets

    def _one_length(self, low: int, high: int) -> int:
        """The length of every key of these rows, if the keys before them have it too; otherwise
        0."""
        count = high - low
        offset = self.key_offsets_at + 4 * low
        offsets = self.view[offset : offset + 4 * count + 4]
        begin, end = offsets[:8].cast("i").tolist()
        length: int = end - begin
        if not 0 < length <= 255 or begin != length * low or count > EVEN_MAX:
            return 0
        if length * high > self.key_length:
            return 0
        even = array("i", range(begin, begin + length * count + 1, length)).tobytes()
        # As bytes: views are compared item by item.
        return length if offsets.tobytes() == even else 0


@lru_cache(maxsize=16)
def _cutter(length: int, count: int) -> Callable[[Buffer], tuple[bytes, ...]]:
    return Struct(f"{length}s" * count).unpack
