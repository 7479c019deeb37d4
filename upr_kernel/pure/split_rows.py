"""Rows of columns as Arrow has them, split into a published chunk for each partition."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from upr_kernel.defects import ChunkDefectError, Defect
from upr_kernel.pure.chunks import OFFSET_MAX
from upr_kernel.pure.columns import HEAD, Buffer, padded
from upr_kernel.pure.partition import partition_of

PARTITIONS_END: Final = (1 << 15) + 1

RowColumns = tuple[
    Buffer, Buffer, Buffer, Buffer, Buffer, Buffer | None, Buffer | None, Buffer | None
]
"""Rows as columns: key offsets (i64, one more than rows), the keys' bytes, value offsets, the
values' bytes, operations (u8), and the expected CAS values (u64), flags (u32) and expiry times
(u32), each of which is None where all are 0."""

_Row = tuple[bytes, bytes, int, int, int, int]


def split_rows(parts: Sequence[RowColumns], partition_count: int, /) -> list[tuple[int, bytes]]:
    """A published chunk for each partition that has any of some rows. O(bytes).

    Args:
        parts: A list of columns. The rows of each part follow those of the part before.
        partition_count: How many partitions there are.

    Returns:
        Partitions, rising, and their chunks, encoded. The rows of a partition stay in their order.

    Raises:
        ChunkDefectError: The offsets of a part do not rise, or leave the bytes.
        ValueError: A column has another number of items than the others, or there is no such number
            of partitions.
        OverflowError: The rows of a partition have more than 2 GiB of keys, or of values.
    """
    if not isinstance(parts, list):
        raise TypeError("the parts are a list")
    if not 1 <= partition_count < PARTITIONS_END:
        raise ValueError("a bucket has 1 to 32,768 partitions")
    rows_of: dict[int, list[_Row]] = {}
    # All parts are read first: an exporter of buffers may run Python, which may change the list or
    # a buffer.
    for columns in [_columns(part) for part in parts]:
        for row in _rows(columns):
            rows_of.setdefault(partition_of(row[0], partition_count), []).append(row)
    return [(partition, _encoded(rows_of[partition])) for partition in sorted(rows_of)]


def _columns(part: RowColumns) -> tuple[memoryview, ...]:
    if type(part) is not tuple or len(part) != 8:
        raise TypeError("the columns are tuples of 8 items")
    key_offsets, keys, value_offsets, values, operations = (
        memoryview(column).cast("B") for column in part[:5]
    )
    count = len(operations)
    cas, flags, expiries = (
        memoryview(bytes(width * count) if column is None else column).cast("B")
        for column, width in zip(part[5:], (8, 4, 4), strict=True)
    )
    columns = (key_offsets, value_offsets, cas, flags, expiries)
    if list(map(len, columns)) != [8 * count + 8, 8 * count + 8, 8 * count, 4 * count, 4 * count]:
        raise ValueError("the columns have not as many items as operations")
    return key_offsets, keys, value_offsets, values, operations, cas, flags, expiries


def _rows(columns: tuple[memoryview, ...]) -> list[_Row]:
    key_offsets, keys, value_offsets, values, operations, cas, flags, expiries = columns
    return list(
        zip(
            _strings(key_offsets, keys),
            _strings(value_offsets, values),
            operations.tolist(),
            cas.cast("Q").tolist(),
            flags.cast("I").tolist(),
            expiries.cast("I").tolist(),
            strict=True,
        )
    )


def _strings(offsets: memoryview, data: memoryview) -> list[bytes]:
    # As unsigned numbers, so that a negative one is beyond every length.
    bounds = offsets.cast("Q").tolist()
    if bounds[-1] > len(data) or sorted(bounds) != bounds:
        raise ChunkDefectError(Defect.OFFSETS)
    return [bytes(data[begin:end]) for begin, end in pairwise(bounds)]


def _encoded(rows: list[_Row]) -> bytes:
    keys, values, operations, cas, flags, expiries = zip(*rows, strict=True)
    key_length, value_length = sum(map(len, keys)), sum(map(len, values))
    if key_length > OFFSET_MAX or value_length > OFFSET_MAX:
        raise OverflowError("a chunk holds 2 GiB of keys, and of values, at most")
    count = len(rows)
    columns = [
        HEAD.pack(count, key_length, value_length, 0, 0, 0),
        bytes(8 * count),
        array("Q", cas).tobytes(),
        array("I", expiries).tobytes(),
        array("I", flags).tobytes(),
        array("i", accumulate(map(len, keys), initial=0)).tobytes(),
        array("i", accumulate(map(len, values), initial=0)).tobytes(),
        bytes(operations),
        b"".join(keys),
        b"".join(values),
    ]
    return b"".join(column.ljust(padded(len(column)), b"\0") for column in columns)
