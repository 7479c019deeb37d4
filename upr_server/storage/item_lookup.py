"""Items by key: the index knows the number of each key's newest mutation, and the log has that.

What is damaged is answered as damaged, and never as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from upr_protocol.chunk import Mutation
from upr_protocol.errors import quoted_key
from upr_protocol.ids import Operation, SeqNo
from upr_server.engine import FetchRequest, damaged_item, is_damaged
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.key_index import read_watermark
from upr_server.storage.ordered_map import OrderedMap, ReadTransaction
from upr_server.storage.records import KEY, WATERMARK, KeyIndexEntry, Watermark, index_entry_key

FIND_BYTES_MAX: Final = 2 * 1024 * 1024
"""About how large one answer of `ItemLookup.find` may become. The server takes the items out of the
pipe's message in one step: 1.5 ms for so much of 8 KiB each, and 18 ms for 32 MiB of 128 KiB each.
A caller that needs more asks again; an answer to a `Get` has 1 MiB."""

FIND_KEYS: Final = 256
"""Keys that are looked up in the index at a time. Those that the answer has no room for are asked
for again, and need no look-up now."""


class ItemLookup:
    """Finds the items of one bucket by key.

    Args:
        index: Where the bucket's key index is stored.
        log: Its log.
    """

    def __init__(self, index: OrderedMap, log: ChunkLog) -> None:
        self._index = index
        self._log = log

    def find(
        self,
        partition: int,
        requests: Sequence[FetchRequest],
        *,
        indexed_seq: int = 0,
        bytes_max: int = FIND_BYTES_MAX,
    ) -> list[Mutation | None]:
        """The items of these keys, as of the watermark; None for a key that is missing or deleted.
        An item that is damaged, or may have a newer version in a damaged part of the log, is a
        `damaged_item`.

        If the value of a key is not asked for, only its sequence number and expiry are filled in.

        Args:
            partition: The partition.
            requests: The keys.
            indexed_seq: A watermark that the index is known to have reached.
            bytes_max: The answer ends with the item that comes to this: ask again for the others.

        Raises:
            CorruptionError: The index is that of an earlier commit, as one flipped bit in a meta
                page of LMDB makes it; or the watermark is damaged.
        """
        items: list[Mutation | None] = []
        for begin in range(0, len(requests), FIND_KEYS):
            block = requests[begin : begin + FIND_KEYS]
            block_items = self._find_block(partition, block, indexed_seq, bytes_max)
            items += block_items
            bytes_max -= sum(
                [len(item.key) + len(item.value) for item in block_items if item is not None]
            )
            if len(block_items) < len(block) or bytes_max <= 0:
                break
        return items

    def _find_block(
        self, partition: int, requests: Sequence[FetchRequest], indexed_seq: int, bytes_max: int
    ) -> list[Mutation | None]:
        """What `find` does, for some of its keys."""
        entries = self._entries_of(partition, requests, indexed_seq)
        while True:
            items = self._items_of(partition, requests, entries, bytes_max)
            if not any(item is not None and is_damaged(item) for item in items):
                return items
            # The log is read in a transaction of its own. In between, the mutation that the index
            # named may have been superseded, and compacted away.
            newer_entries = self._entries_of(partition, requests, indexed_seq, is_retry=True)
            if newer_entries == entries:
                return items
            entries = newer_entries

    def _entries_of(
        self,
        partition: int,
        requests: Sequence[FetchRequest],
        indexed_seq: int,
        *,
        is_retry: bool = False,
    ) -> list[KeyIndexEntry | str | None]:
        """The entry of each key, None for one that does not exist, and what is damaged, in words,
        where nobody can tell. Where the caller names the sequence number it is taken as it is,
        except in a retry: it may be superseded, too."""
        entries: list[KeyIndexEntry | str | None] = []
        with self._index.read() as transaction:
            mark = read_watermark(transaction, partition)
            if mark.seq < indexed_seq:
                raise CorruptionError(
                    f"the index of partition {partition} is at {mark.seq}, though it was at "
                    f"{indexed_seq} before"
                )
            for request in requests:
                if request.seq and not is_retry:
                    entries.append(KeyIndexEntry(request.seq, 0))
                    continue
                try:
                    entries.append(_entry_of(transaction, partition, request, mark))
                except CorruptionError as error:
                    entries.append(str(error))
        return entries

    def _items_of(
        self,
        partition: int,
        requests: Sequence[FetchRequest],
        entries: Sequence[KeyIndexEntry | str | None],
        bytes_max: int,
    ) -> list[Mutation | None]:
        seqs = [
            entry.seq
            for request, entry in zip(requests, entries, strict=True)
            if isinstance(entry, KeyIndexEntry) and request.needs_value
        ]
        rows = iter(self._log.find_mutations(partition, seqs, bytes_max) if seqs else ())
        items: list[Mutation | None] = []
        for request, entry in zip(requests, entries, strict=True):
            if entry is None:
                items.append(None)
            elif isinstance(entry, str):
                items.append(damaged_item(request, entry))
            elif request.needs_value:
                row = next(rows, None)
                if row is None:
                    break  # `bytes_max` is reached: the rest is asked for again
                if isinstance(row, str):
                    items.append(damaged_item(request, row))
                elif row.key != request.key or row.op != Operation.SET:
                    damage = (
                        f"mutation {entry.seq} of partition {partition} is not of the key "
                        f"{quoted_key(request.key)} but of {quoted_key(row.key)}"
                    )
                    items.append(damaged_item(request, damage))
                else:
                    items.append(row)
            else:
                items.append(
                    Mutation(Operation.SET, request.key, seq=SeqNo(entry.seq), expiry=entry.expiry)
                )
        return items


def _entry_of(
    transaction: ReadTransaction, partition: int, request: FetchRequest, mark: Watermark
) -> KeyIndexEntry | None:
    """The entry of a key; None for one that does not exist.

    Raises:
        CorruptionError: The entry is damaged, or a newer change may be in a damaged part of the
            log.
    """
    key = index_entry_key(partition, request.key)
    value = transaction.get(key)
    if value is None:
        _check_neighbours(transaction, key)
    entry = None if value is None else KeyIndexEntry.parse(key, value)
    if request.seq and (entry is None or entry.seq < request.seq):
        # The index has not come so far.
        return KeyIndexEntry(request.seq, 0)
    if mark.damaged_through and (entry is None or entry.seq <= mark.damaged_through):
        raise CorruptionError(
            f"the newest change of the key {quoted_key(request.key)} may be among the changes of "
            f"partition {partition} up to {mark.damaged_through} that are damaged"
        )
    return None if entry is None or entry.is_tombstone else entry


def _check_neighbours(transaction: ReadTransaction, key: bytes) -> None:
    """Raises `CorruptionError` if an entry next to the place of the missing `key` is damaged.

    One flipped bit in a key hides its entry, and leaves it where a search for the key ends. Without
    this check the key would be answered as missing, which it is not.
    """
    neighbours = [transaction.last(KEY, key), next(iter(transaction.scan(key, WATERMARK)), None)]
    for neighbour in neighbours:
        if neighbour is not None:
            KeyIndexEntry.parse(*neighbour)
