"""An update of the index: the entries of a part of a partition's log, and what they supersede.

The log is not read for what is superseded, so how many bytes of it become garbage is an estimate:
compaction needs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from upr_kernel import ChunkDefectError, index_entries
from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.ids import Operation
from upr_server.storage.errors import CorruptionError
from upr_server.storage.ordered_map import WriteTransaction
from upr_server.storage.records import (
    INDEX_ENTRY_KEY_PREFIX,
    KeyIndexEntry,
    Watermark,
    expiry_key,
    index_entry_key,
    parse_index_entry,
    with_checksum,
)

CHUNK_BYTES: Final = 128
"""About what a chunk takes on disk beside its mutations. It counts as garbage, so that partitions
of many small chunks are compacted, too."""

TOMBSTONE_BYTES: Final = 64
"""About what a deletion takes on disk."""


class LogPart(NamedTuple):
    """Chunks of a partition's log that are to be indexed, and how far its index is.

    Attributes:
        partition: The partition.
        mark: Its watermark.
        chunks: At least one, the first behind the watermark.
    """

    partition: int
    mark: Watermark
    chunks: Sequence[Chunk]


def put_entries(
    transaction: WriteTransaction, part: LogPart, *, expects_new: bool, live_bytes: int
) -> tuple[Watermark, float, int]:
    """Puts the entries of a part of a partition's log in the index, and when they expire. The
    caller stores the watermark.

    Args:
        transaction: Where to put the entries.
        part: The part.
        expects_new: Whether most of its keys are likely to be new to the index.
        live_bytes: About what the items at the watermark take in the log.

    Returns:
        The new watermark, the share of the keys that the index knew, and about what the items take
        in the log then.

    Raises:
        CorruptionError: The part is damaged, or an entry that it supersedes.
    """
    partition, mark, chunks = part
    entries, new_items, may_expire = _entries(partition, chunks)
    replaced = _replaced_entries(transaction, entries, expects_new=expects_new)
    replaced_items = 0
    for key, old_value in replaced:
        old_entry = KeyIndexEntry.parse(key, old_value)
        replaced_items += not old_entry.is_tombstone
        if old_entry.expiry:
            transaction.delete(expiry_key(old_entry.expiry, partition, old_entry.seq))
    if may_expire:
        transaction.put_all(_expiring(partition, entries))
    item_bytes = _item_bytes(chunks)
    # What is superseded may be much larger than what supersedes it, as a deletion is small. So it
    # has the mean of all items; but an item that is stored again is mostly as large as before, and
    # a few large ones may change again and again among many small ones.
    overwritten_items = replaced_items * new_items // max(len(entries), 1)
    replaced_bytes = max(
        replaced_items * live_bytes // max(mark.item_count, 1), overwritten_items * item_bytes
    )
    replaced_bytes = min(live_bytes, replaced_bytes)
    garbage_bytes = mark.garbage_bytes + replaced_bytes
    garbage_bytes += TOMBSTONE_BYTES * (len(replaced) - replaced_items)
    # Some are superseded by others of this part.
    newest_bytes = new_items * item_bytes + TOMBSTONE_BYTES * (len(entries) - new_items)
    garbage_bytes += max(0, sum(chunk.nbytes for chunk in chunks) - newest_bytes)
    garbage_bytes += CHUNK_BYTES * len(chunks)
    live_bytes += new_items * item_bytes - replaced_bytes
    items = mark.item_count + new_items - replaced_items
    mark = Watermark(chunks[-1].end, items, garbage_bytes, mark.damaged_through)
    return mark, len(replaced) / max(len(entries), 1), live_bytes


def _replaced_entries(
    transaction: WriteTransaction, entries: Sequence[tuple[bytes, bytes]], *, expects_new: bool
) -> list[tuple[bytes, bytes]]:
    """Puts entries, by rising key. Returns those that they have replaced."""
    # The keys of a bulk load are all new: to look them up before would be a third of the work.
    if expects_new and transaction.put_new(entries) == len(entries):
        return []
    # Copies: what is put next may move them.
    known = [(key, bytes(old)) for key, old in transaction.get_all([key for key, _ in entries])]
    if not expects_new:
        transaction.put_all(entries)
        return known
    values = dict(entries)
    # No number comes twice, so what was put just now differs from all that was there before.
    replaced = [(key, old) for key, old in known if old != values[key]]
    transaction.put_all([(key, values[key]) for key, _ in replaced])
    return replaced


def _entries(
    partition: int, chunks: Sequence[Chunk]
) -> tuple[list[tuple[bytes, bytes]], int, bool]:
    """What `index_entries` returns for chunks of a partition.

    Raises:
        CorruptionError: The keys of a chunk are damaged, or its numbers.
    """
    try:
        return index_entries([chunk.encode() for chunk in chunks], index_entry_key(partition, b""))
    except (ChunkDefectError, OverflowError) as error:
        raise CorruptionError(
            f"keys or numbers of partition {partition} cannot be read: {error}"
        ) from error


def _expiring(partition: int, entries: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, Buffer]]:
    """The expiry records of index entries."""
    records: list[tuple[bytes, Buffer]] = []
    for key, value in entries:
        seq, expiry = parse_index_entry(value)
        if expiry:
            by_time = expiry_key(expiry, partition, seq)
            records.append((by_time, with_checksum(by_time, key[INDEX_ENTRY_KEY_PREFIX:])))
    return sorted(records)


def _item_bytes(chunks: Sequence[Chunk]) -> int:
    """About what a mutation in these chunks takes that sets an item."""
    count = sum(chunk.count for chunk in chunks)
    set_count = sum(chunk.operations.tobytes().count(Operation.SET) for chunk in chunks)
    set_bytes = sum(chunk.nbytes for chunk in chunks) - TOMBSTONE_BYTES * (count - set_count)
    return max(0, set_bytes) // max(set_count, 1)
