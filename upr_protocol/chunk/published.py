"""Published chunks made from whole columns, with no work a mutation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from upr_protocol.chunk.chunk import Chunk
from upr_protocol.chunk.layout import Buffer, encode_columns, offsets_of
from upr_protocol.ids import Operation, SeqNo

_SET: Final = bytes((Operation.SET,))


def chunk_of_plain_sets(keys: Sequence[bytes], values: Sequence[bytes]) -> Chunk:
    """A published chunk of plain sets: each a `SET` without flags, expiry or expected CAS.

    Args:
        keys: The keys.
        values: As many values.

    Raises:
        ValueError: There are not as many values as keys.
    """
    count = len(keys)
    # `Chunk` would not notice: columns of different lengths may still add up, as they are padded.
    if count != len(values):
        raise ValueError(f"{count} keys need as many values, not {len(values)}")
    zeros = bytes(8 * count)
    return Chunk(
        encode_columns(
            SeqNo(0),
            SeqNo(0),
            zeros,
            zeros,
            zeros[: 4 * count],
            zeros[: 4 * count],
            offsets_of(keys),
            offsets_of(values),
            _SET * count,
            b"".join(keys),
            b"".join(values),
        )
    )


def published_chunk(
    key_offsets: Buffer,
    key_bytes: Buffer,
    value_offsets: Buffer,
    value_bytes: Buffer,
    operations: Buffer,
    *,
    cas: Buffer | None = None,
    flags: Buffer | None = None,
    expiries: Buffer | None = None,
) -> Chunk:
    """A published chunk from columns as they lie in it: one copy, and no work a mutation.

    Args:
        key_offsets: Where each key begins, from 0, and where the last ends; i32.
        key_bytes: All keys.
        value_offsets: The same of the values.
        value_bytes: All values.
        operations: The operations, u8.
        cas: The expected CAS values, u64; None for all 0.
        flags: The flags, u32; None for all 0.
        expiries: The expiry times, u32; None for all 0.

    Raises:
        ValueError: A column has not as many items as there are operations.
        ChunkError: There are more of them than a chunk may hold.
    """
    count = memoryview(operations).nbytes
    zeros = bytes(8 * count)
    columns = (
        cas or zeros,
        expiries or zeros[: 4 * count],
        flags or zeros[: 4 * count],
        key_offsets,
        value_offsets,
    )
    lengths = [memoryview(column).nbytes for column in columns]
    if lengths != [8 * count, 4 * count, 4 * count, 4 * count + 4, 4 * count + 4]:
        raise ValueError(f"columns of {lengths} bytes do not belong to {count} operations")
    return Chunk(
        encode_columns(SeqNo(0), SeqNo(0), zeros, *columns, operations, key_bytes, value_bytes)
    )
