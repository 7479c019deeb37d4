"""Entries of the key index: the newest mutation of each key of some chunks, as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from crc32c import crc32c

from upr_kernel.pure.columns import Buffer, Columns

_BODY: Final = Struct("<qI")
_CRC: Final = Struct("<I")
_SET: Final = 1
_SEQ_MAX: Final = (1 << 63) - 1


def index_entries(
    chunks: Sequence[Buffer], prefix: bytes, /
) -> tuple[list[tuple[bytes, bytes]], int, bool]:
    """The index entries of stored chunks. O(rows log rows), O(rows) if the keys come in order.

    Args:
        chunks: A list of encoded chunks of one partition, oldest first.
        prefix: What stands before each key in the index.

    Returns:
        Key and value of the entry of each key, in the order of the keys; how many of them are of
        items, and not of tombstones; and whether any of them expires. A value has the sequence
        number of the key's newest mutation, negative for a tombstone, its expiry time, and the
        CRC32C of all that and of the entry's key.

    Raises:
        ChunkDefectError: The lengths or offsets of a chunk do not add up, or a key is not 1 to 255
            bytes long.
        OverflowError: A sequence number has more than 63 bits.
    """
    if not isinstance(chunks, list) or not isinstance(prefix, bytes):
        raise TypeError("the chunks are a list, and the prefix is bytes")
    newest: dict[bytes, tuple[int, int, bool]] = {}
    for columns in [Columns(chunk) for chunk in chunks]:
        count = columns.count
        seqs = columns.column(columns.seqs_at, 8, 0, count).cast("Q").tolist()
        expiries = columns.column(columns.expiries_at, 4, 0, count).cast("I").tolist()
        operations = columns.column(columns.operations_at, 1, 0, count).tobytes()
        keys = columns.keys(0, count)
        if max(seqs, default=0) > _SEQ_MAX:
            raise OverflowError("an entry holds a number of 63 bits")
        for key, seq, expiry, operation in zip(keys, seqs, expiries, operations, strict=True):
            # A tombstone does not expire, even if the node that it came from says so.
            newest[key] = (seq, expiry, True) if operation == _SET else (-seq, 0, False)
    entries: list[tuple[bytes, bytes]] = []
    items, may_expire = 0, False
    for item_key in sorted(newest):
        signed_seq, expiry, is_item = newest[item_key]
        key, body = prefix + item_key, _BODY.pack(signed_seq, expiry)
        entries.append((key, body + _CRC.pack(crc32c(key + body))))
        items += is_item
        may_expire |= expiry > 0
    return entries, items, may_expire
