"""Chunks: checking one, numbering its rows in place, selecting its rows by key, gathering rows of
several into a new one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from operator import lt
from typing import Final

from upr_kernel.defects import ChunkDefectError, Defect
from upr_kernel.flags import HAS_PREFIX, HAS_SEQS, MAY_EXPIRE, SEQS_RISE, UNCONDITIONAL
from upr_kernel.pure.columns import EVEN_MAX, HEAD, U64_END, Buffer, Columns, padded

Part = tuple[Buffer, int, int, Buffer | None, int | None, int]
"""Rows of a chunk: the encoded chunk, the first row, the row behind the last, a byte for each of
these rows that is not 0 where the row is left out (None where none is), the sequence number and the
CAS that the first of the rows gets (None and 0 where the rows keep the chunk's)."""

OFFSET_MAX: Final = (1 << 31) - 1

_SET: Final = b"\x01"


def check(
    chunk: Buffer,
    operations: bytes,
    key_bytes_max: int,
    value_bytes_max: int,
    prefix: bytes,
    /,
) -> int:
    """Checks offsets, lengths and operations of a chunk, and says what it holds. O(rows).

    Args:
        chunk: An encoded chunk.
        operations: The operations that are allowed.
        key_bytes_max: The length of the longest key.
        value_bytes_max: The length of the longest value.
        prefix: What `HAS_PREFIX` asks for.

    Returns:
        The flags of `upr_kernel.flags`, together.

    Raises:
        ChunkDefectError: The chunk breaks a rule.
    """
    columns = Columns(chunk)
    count = columns.count
    _check_strings(
        columns.column(columns.key_offsets_at, 4, 0, count + 1),
        columns.key_length,
        range(1, key_bytes_max + 1),
        (Defect.KEY_SPAN, Defect.KEY_ORDER, Defect.KEY_LENGTH),
    )
    _check_strings(
        columns.column(columns.value_offsets_at, 4, 0, count + 1),
        columns.value_length,
        range(value_bytes_max + 1),
        (Defect.VALUE_SPAN, Defect.VALUE_ORDER, Defect.VALUE_LENGTH),
    )
    present = columns.column(columns.operations_at, 1, 0, count).tobytes()
    if present.translate(None, operations):
        raise ChunkDefectError(Defect.OPERATION)
    flags = 0
    if present == _SET * count and _is_zero(columns.column(columns.cas_at, 8, 0, count)):
        flags |= UNCONDITIONAL
    if not _is_zero(columns.column(columns.expiries_at, 4, 0, count)):
        flags |= MAY_EXPIRE
    if _has_prefix(columns, prefix):
        flags |= HAS_PREFIX
    seqs = columns.column(columns.seqs_at, 8, 0, count)
    if _is_zero(seqs):
        return flags if count or columns.start > columns.end else flags | SEQS_RISE
    flags |= HAS_SEQS
    numbers = seqs.cast("Q").tolist()
    starts = [columns.start, *numbers]
    if starts[-1] <= columns.end and all(map(lt, starts, numbers)):
        flags |= SEQS_RISE
    return flags


def _check_strings(
    column: memoryview, length: int, lengths: range, defects: tuple[Defect, Defect, Defect]
) -> None:
    span, order, size = defects
    count = len(column) // 4 - 1
    # As bytes, at memory speed.
    if 0 < count <= EVEN_MAX and column.tobytes() == _even_offsets(*divmod(length, count), count):
        if length // count not in lengths:
            raise ChunkDefectError(size)
        return  # strings of one length, as most are
    offsets = column.cast("i").tolist()
    if offsets[0] != 0 or offsets[-1] != length:
        raise ChunkDefectError(span)
    if sorted(offsets) != offsets:  # linear when they are in order
        raise ChunkDefectError(order)
    if 0 in lengths and length in lengths:
        return  # none can be longer than all together
    if any(end - begin not in lengths for begin, end in pairwise(offsets)):
        raise ChunkDefectError(size)


@lru_cache(maxsize=64)
def _even_offsets(length: int, remainder: int, count: int) -> bytes:
    """The offsets of `count` strings of one length; of no use if there is a rest."""
    if not 0 < length <= EVEN_MAX or remainder:
        return b""
    return array("i", range(0, length * count + 1, length)).tobytes()


def _is_zero(column: memoryview) -> bool:
    # As bytes: views are compared item by item.
    return column.tobytes() == bytes(len(column))


def _has_prefix(columns: Columns, prefix: bytes) -> bool:
    keys = columns.column(columns.keys_at, 1, 0, columns.key_length).tobytes()
    # The search for one byte is thirty times as fast, and mostly finds nothing.
    if prefix and (prefix[:1] not in keys or prefix not in keys):
        return False
    return any(
        end - begin >= len(prefix) and keys.startswith(prefix, begin)
        for begin, end in pairwise(columns.offsets(columns.key_offsets_at, 0, columns.count))
    )


class _Gathered:
    """Columns that grow."""

    def __init__(self) -> None:
        self.seqs: list[Buffer] = []
        self.cas: list[Buffer] = []
        self.expiries: list[Buffer] = []
        self.flags: list[Buffer] = []
        self.operations: list[Buffer] = []
        self.keys: list[Buffer] = []
        self.values: list[Buffer] = []
        self.key_lengths: list[int] = []
        self.value_lengths: list[int] = []

    def add(self, columns: Columns, part: Part) -> None:
        _, low, high, skip, first_seq, first_cas = part
        key_offsets = columns.rows(columns.key_offsets_at, columns.key_length, low, high)
        value_offsets = columns.rows(columns.value_offsets_at, columns.value_length, low, high)
        for begin, end in _kept(skip, high - low):
            self._add_rows(columns, low + begin, low + end)
            self._add_numbers(columns, low + begin, low + end, first_seq, first_cas, begin)
            self._add_strings(self.keys, columns.keys_at, columns, key_offsets, begin, end)
            self._add_strings(self.values, columns.values_at, columns, value_offsets, begin, end)
        for lengths, offsets in (
            (self.key_lengths, key_offsets),
            (self.value_lengths, value_offsets),
        ):
            sizes = [end - begin for begin, end in pairwise(offsets)]
            lengths += sizes if skip is None else compress(sizes, map(_NOT, skip))

    def _add_rows(self, columns: Columns, low: int, high: int) -> None:
        self.expiries.append(columns.column(columns.expiries_at, 4, low, high))
        self.flags.append(columns.column(columns.flags_at, 4, low, high))
        self.operations.append(columns.column(columns.operations_at, 1, low, high))

    def _add_numbers(
        self,
        columns: Columns,
        low: int,
        high: int,
        first_seq: int | None,
        first_cas: int,
        skipped_rows: int,
    ) -> None:
        if first_seq is None:
            self.seqs.append(columns.column(columns.seqs_at, 8, low, high))
            self.cas.append(columns.column(columns.cas_at, 8, low, high))
            return
        seq, cas, count = first_seq + skipped_rows, first_cas + skipped_rows, high - low
        self.seqs.append(array("Q", range(seq, seq + count)).tobytes())
        self.cas.append(array("Q", range(cas, cas + count)).tobytes())

    @staticmethod
    def _add_strings(
        target: list[Buffer], start: int, columns: Columns, offsets: list[int], low: int, high: int
    ) -> None:
        target.append(columns.view[start + offsets[low] : start + offsets[high]])

    def encoded(self, start: int, end: int) -> bytes:
        key_length, value_length = sum(self.key_lengths), sum(self.value_lengths)
        if key_length > OFFSET_MAX or value_length > OFFSET_MAX:
            raise OverflowError("a chunk holds 2 GiB of keys, and of values, at most")
        pieces: list[Buffer] = [
            HEAD.pack(len(self.key_lengths), key_length, value_length, 0, start, end)
        ]
        for column in (
            self.seqs,
            self.cas,
            self.expiries,
            self.flags,
            [array("i", accumulate(self.key_lengths, initial=0)).tobytes()],
            [array("i", accumulate(self.value_lengths, initial=0)).tobytes()],
            self.operations,
            self.keys,
            self.values,
        ):
            pieces += column
            length = sum(map(len, column))
            pieces.append(bytes(padded(length) - length))
        return b"".join(pieces)


def _kept(skip: Buffer | None, count: int) -> Sequence[tuple[int, int]]:
    """The rows [first, last) of a part that are neighbours and kept."""
    if skip is None:
        return [(0, count)]
    omitted = list(compress(range(count), skip))
    bounds = zip([0, *[row + 1 for row in omitted]], [*omitted, count], strict=True)
    return [(begin, end) for begin, end in bounds if begin < end]


_NOT: Final = (0).__eq__


def _read(part: Part) -> Columns:
    """A part's chunk, once it is known to have the part's rows."""
    buffer, low, high, skip, first_seq, first_cas = part
    if min(low, high, first_seq or 0, first_cas) < 0:
        raise OverflowError("rows and numbers are not negative")
    columns = Columns(buffer)
    columns.check_rows(low, high)
    if skip is not None and memoryview(skip).nbytes != high - low:
        raise ValueError("there is not one flag for each row")
    return columns


def gather(parts: list[Part], start: int, end: int, /) -> bytes:
    """One encoded chunk of the parts' rows, in their order. O(rows), and one copy of the bytes.

    Args:
        parts: The rows.
        start: The range that the new chunk covers, exclusive.
        end: The same, inclusive.

    Raises:
        ChunkDefectError: A chunk is damaged.
        IndexError: A chunk does not have the rows.
        OverflowError: There are more than 2 GiB of keys, or of values.
    """
    gathered = _Gathered()
    # All parts are read first: an exporter of buffers may run Python, which may change the list or
    # a buffer.
    for columns, part in [(_read(part), part) for part in parts]:
        gathered.add(columns, part)
    return gathered.encoded(start, end)


def number_rows(
    chunk: bytearray | memoryview, first_seq: int, first_cas: int, start: int, end: int, /
) -> None:
    """Gives the rows of an encoded chunk consecutive numbers and CAS values, in its own memory.
    O(rows), and no copy of the bytes.

    Args:
        chunk: The chunk; it can be written.
        first_seq: The sequence number of the first row.
        first_cas: The CAS of the first row.
        start: The range that the chunk covers from now on, exclusive.
        end: The same, inclusive.

    Raises:
        BufferError: The chunk cannot be written.
        ChunkDefectError: The chunk is damaged.
        OverflowError: A number is out of range.
    """
    if min(first_seq, first_cas, start, end) < 0 or max(start, end) >= U64_END:
        raise OverflowError("a number is out of range")
    columns = Columns(chunk)
    if columns.view.readonly:
        raise BufferError("the chunk cannot be written")
    count = columns.count
    if max(first_seq, first_cas) + count >= U64_END:
        raise OverflowError("a number is out of range")
    HEAD.pack_into(columns.view, 0, count, columns.key_length, columns.value_length, 0, start, end)
    for offset, first in ((columns.seqs_at, first_seq), (columns.cas_at, first_cas)):
        numbers = array("Q", range(first, first + count)).tobytes()
        columns.view[offset : offset + 8 * count] = numbers


def select_prefix(chunk: Buffer, prefix: bytes, /) -> bytes | None:
    """The rows whose keys begin with `prefix`, as an encoded chunk of the same range. O(rows), and
    one copy of the bytes of those rows.

    Args:
        chunk: An encoded chunk.
        prefix: What the keys begin with.

    Returns:
        The new chunk, which may have no row; None where the chunk has no other rows.

    Raises:
        ChunkDefectError: The chunk is damaged.
    """
    columns = Columns(chunk)
    offsets = columns.rows(columns.key_offsets_at, columns.key_length, 0, columns.count)
    keys = columns.column(columns.keys_at, 1, 0, columns.key_length).tobytes()
    skip = bytes(not keys.startswith(prefix, begin, end) for begin, end in pairwise(offsets))
    if not any(skip):
        return None
    return gather([(chunk, 0, columns.count, skip, None, 0)], columns.start, columns.end)
