"""The index of one bucket: each key's newest mutation, and what expires when.

The index is derived from the log and follows it in large sorted batches, partition by partition:
keys are sorted by partition first, so that a batch touches few pages. A watermark a partition says
how far the index has come; what is above it is in the hash table. A lost index is rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from upr_protocol.chunk import Mutation
from upr_protocol.errors import quoted_key
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_server.engine import FetchRequest, damaged_item, is_damaged
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.index_update import LogPart, put_entries
from upr_server.storage.ordered_map import OrderedMap, ReadTransaction, WriteTransaction
from upr_server.storage.records import (
    EXPIRY,
    EXPIRY_MAX,
    KEY,
    WATERMARK,
    KeyIndexEntry,
    Watermark,
    expiry_key,
    index_entry_key,
    pack_record,
    parse_expiry_key,
    parse_record,
    parse_seqs,
    partition_key,
    without_checksum,
)

READ_BYTES_MAX: Final = 8 * 1024 * 1024
"""What one step of `follow_logs` reads of the log at most, and one chunk."""

FIND_BYTES_MAX: Final = 2 * 1024 * 1024
"""About how large one answer of `find_items` may become. The server takes the items out of the
pipe's message in one step: 1.5 ms for so much of 8 KiB each, and 18 ms for 32 MiB of 128 KiB each.
A caller that needs more asks again; an answer to a `Get` has 1 MiB."""

FIND_KEYS: Final = 256
"""Keys that are looked up in the index at a time. Those that the answer has no room for are asked
for again, and need no look-up now."""


class ExpiredItem(msgspec.Struct, frozen=True):
    """An item that has expired, and is not deleted yet.

    Attributes:
        partition: The item's partition.
        seq: The sequence number of its newest mutation.
        key: The item's key.
        expiry: When it expired, in seconds since 1970.
    """

    partition: PartitionId
    seq: SeqNo
    key: bytes
    expiry: int


class KeyIndex:
    """One bucket's index.

    Args:
        ordered_map: Where the index is stored.
        log: The log that it follows.
    """

    def __init__(self, ordered_map: OrderedMap, log: ChunkLog) -> None:
        self.ordered_map = ordered_map
        self._log = log
        # Those of which most keys were known when some were last indexed.
        self._partitions_of_known_keys: set[int] = set()
        # About what the items of each partition take in the log, as far as the index has come.
        self._live_bytes: dict[int, int] = {}

    def watermark(self, partition: int) -> Watermark:
        """How far the index has followed the log of a partition.

        Raises:
            CorruptionError: The record is damaged.
        """
        with self.ordered_map.read() as transaction:
            return _watermark(transaction, partition)

    def set_live_bytes(self, partition: int, nbytes: int) -> None:
        """Tells about what the items of a partition take in the log, of which the index knows.
        Without it, those count that it takes in from now on."""
        self._live_bytes[partition] = nbytes

    # Following the log.

    def follow_log(
        self, partition: int, mutations_max: int, *, through: SeqNo | None = None
    ) -> Watermark:
        """Indexes about so many mutations of the log behind the watermark.

        Args:
            partition: The partition.
            mutations_max: How many.
            through: Where to stop, by default at the log's end. Only whole chunks are indexed, and
                at least one: compaction goes as far as the watermark, and rewrites whole chunks.

        Returns:
            The new watermark.

        Raises:
            CorruptionError: The log or the index is damaged.
        """
        if through is None:
            through = self._log.high_seq(partition)
        marks = self.follow_logs({partition: through}, mutations_max)
        return marks[partition] if partition in marks else self.watermark(partition)

    def follow_logs(
        self, stop_seqs: Mapping[int, SeqNo], mutations_max: int
    ) -> dict[int, Watermark]:
        """Indexes about so many mutations of the logs of partitions, in one commit. The arguments
        are those of `follow_log`.

        Args:
            stop_seqs: Where to stop, by partition, in the order in which they are indexed.
            mutations_max: How many, in all.

        Returns:
            The new watermarks, of the partitions that were indexed. Only of the first one a chunk
            is indexed that goes beyond where to stop.

        Raises:
            CorruptionError: The log or the index of a partition is damaged. Nothing was indexed.
        """
        parts: list[LogPart] = []
        bytes_max = READ_BYTES_MAX
        for partition, through in stop_seqs.items():
            if mutations_max <= 0 or bytes_max <= 0:
                break
            part = self._read_log(partition, mutations_max, bytes_max, through)
            if part is not None and (not parts or part.chunks[-1].end <= through):
                parts.append(part)
                mutations_max -= sum(chunk.count for chunk in part.chunks)
                bytes_max -= sum(chunk.nbytes for chunk in part.chunks)
        if not parts:
            return {}
        marks: dict[int, Watermark] = {}
        live_bytes: dict[int, int] = {}
        with self.ordered_map.write() as transaction:
            for part in parts:
                expects_new = part.partition not in self._partitions_of_known_keys
                mark, known_share, live_bytes[part.partition] = put_entries(
                    transaction,
                    part,
                    expects_new=expects_new,
                    live_bytes=self._live_bytes.get(part.partition, 0),
                )
                _put_watermark(transaction, part.partition, mark)
                marks[part.partition] = mark
                if known_share > 0.5:
                    self._partitions_of_known_keys.add(part.partition)
                else:
                    self._partitions_of_known_keys.discard(part.partition)
        self._live_bytes.update(live_bytes)
        return marks

    def _read_log(
        self, partition: int, mutations_max: int, bytes_max: int, through: SeqNo
    ) -> LogPart | None:
        """The next part of a partition's log to index; None if the index has come so far."""
        high = self._log.high_seq(partition)
        mark = self.watermark(partition)
        if mark.seq > high:
            raise CorruptionError(
                f"the index of partition {partition} is at {mark.seq}, beyond the log's end at "
                f"{high}"
            )
        if mark.seq >= through:
            return None
        chunks = self._log.read_chunks(
            partition, mark.seq, high, bytes_max=bytes_max, mutations_max=mutations_max
        )
        chunks = [chunk for chunk in chunks if chunk.end <= through] or chunks[:1]
        return LogPart(partition, mark, chunks)

    def skip_damage(self, partition: int) -> Watermark:
        """Moves the watermark past chunks of the log that are damaged or missing. Nobody knows
        which keys were in them. So from then on `find_items` refuses the keys of this partition
        that the index does not know from a later mutation.

        Returns:
            The new watermark.

        Raises:
            CorruptionError: The log is intact at the watermark, so the index is damaged.
        """
        mark = self.watermark(partition)
        intact_seq = self._log.find_intact(partition, mark.seq, self._log.high_seq(partition))
        if intact_seq <= mark.seq:
            raise CorruptionError(f"the index of partition {partition} is damaged, and not its log")
        mark = msgspec.structs.replace(mark, seq=intact_seq, damaged_through=intact_seq)
        with self.ordered_map.write() as transaction:
            _put_watermark(transaction, partition, mark)
        return mark

    def has_entries(self, partition: int) -> bool:
        """Whether the index has any key of a partition."""
        first_key, last_key = _entry_key_bounds(partition)
        with self.ordered_map.read() as transaction:
            return transaction.last(first_key, last_key) is not None

    def delete_entries(self, partition: int, keys_max: int) -> bool:
        """Deletes so many keys of a partition, and its watermark. The watermark goes with the first
        of them, so that after a crash the partition is indexed from the beginning. A damaged entry
        is deleted, too; what is left of it is its expiry, which `find_expired` leaves out.

        Returns:
            Whether there may be more.
        """
        first_key, last_key = _entry_key_bounds(partition)
        with self.ordered_map.write() as transaction:
            transaction.delete(partition_key(WATERMARK, partition))
            scanned_entries = islice(transaction.scan(first_key, last_key), keys_max)
            # A list: the scan must not see what is deleted meanwhile.
            items = [(bytes(key), bytes(value)) for key, value in scanned_entries]
            for key, value in items:
                transaction.delete(key)
                try:
                    entry = KeyIndexEntry.parse(key, value)
                except CorruptionError:
                    continue
                if entry.expiry:
                    transaction.delete(expiry_key(entry.expiry, partition, entry.seq))
        self._live_bytes.pop(partition, None)
        return len(items) == keys_max

    def apply_compaction(
        self, partition: int, purged_tombstones: Iterable[tuple[bytes, int]], garbage_bytes: int
    ) -> None:
        """Follows a compaction of the log.

        Args:
            partition: The partition.
            purged_tombstones: Key and sequence number of the tombstones that it dropped.
            garbage_bytes: About how many bytes of superseded mutations are left.
        """
        with self.ordered_map.write() as transaction:
            for key, seq in purged_tombstones:
                entry_key = index_entry_key(partition, key)
                value = transaction.get(entry_key)
                if value is not None:
                    entry = KeyIndexEntry.parse(entry_key, value)
                    # The key may have been set again since.
                    if entry.is_tombstone and entry.seq == seq:
                        transaction.delete(entry_key)
            mark = msgspec.structs.replace(
                _watermark(transaction, partition), garbage_bytes=garbage_bytes
            )
            _put_watermark(transaction, partition, mark)

    # Reading.

    def find_items(
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
        """What `find_items` does, for some of its keys."""
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
        with self.ordered_map.read() as transaction:
            mark = _watermark(transaction, partition)
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

    def newest_seqs(self, partition: int, after: bytes, limit: int) -> tuple[list[int], bytes]:
        """The sequence number of the newest mutation of each key, tombstones included, by key.

        Args:
            partition: The partition.
            after: The continuation of the previous call; empty to begin.
            limit: How many keys to look at.

        Returns:
            The numbers, and the continuation for the next call; empty when there are no more.

        Raises:
            CorruptionError: An entry is damaged.
        """
        first_key, last_key = _entry_key_bounds(partition)
        if after:
            first_key = after + b"\0"
        with self.ordered_map.read() as transaction:
            entries = list(islice(transaction.scan(first_key, last_key), limit))
            return parse_seqs(entries), entries[-1][0] if len(entries) == limit else b""

    def find_expired(self, now: int, after: bytes, limit: int) -> tuple[list[ExpiredItem], bytes]:
        """Items that expired at `now` or before, by time. Left out are items whose records are
        damaged, those that may have a newer version in a damaged part of the log, and what the
        index has no entry of any more: a damaged entry that was deleted leaves its expiry.

        Args:
            now: Seconds since 1970.
            after: The continuation of the previous call; empty to begin.
            limit: The most entries to look at, and so the most items to return.

        Returns:
            The items, perhaps none of them, and the continuation for the next call; empty when
            there are no more.
        """
        items: list[ExpiredItem] = []
        damaged_through: dict[int, SeqNo] = {}
        # The clock may be wrong.
        last_key = expiry_key(min(now, EXPIRY_MAX), 0xFFFF, (1 << 64) - 1)
        with self.ordered_map.read() as transaction:
            entries = transaction.scan(after + b"\0" if after else EXPIRY, last_key)
            # What is left out counts too: it stays in the index, and there may be much of it.
            for scanned_count, (key, value) in enumerate(entries, 1):
                try:
                    expiry, partition, seq = parse_expiry_key(key)
                    item_key = without_checksum(key, value)
                    if partition not in damaged_through:
                        mark = _watermark(transaction, partition)
                        damaged_through[partition] = mark.damaged_through
                    entry = KeyIndexEntry(seq, expiry)
                    is_newest = _has_entry(transaction, partition, item_key, entry)
                except CorruptionError:
                    pass
                else:
                    if is_newest and seq > damaged_through[partition]:
                        items.append(
                            ExpiredItem(PartitionId(partition), SeqNo(seq), item_key, expiry)
                        )
                if scanned_count == limit:
                    return items, key
        return items, b""


def _entry_key_bounds(partition: int) -> tuple[bytes, bytes]:
    """Keys between which the entries of a partition lie."""
    return index_entry_key(partition, b""), index_entry_key(partition, b"\xff" * 251)


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


def _has_entry(
    transaction: ReadTransaction, partition: int, key: bytes, entry: KeyIndexEntry
) -> bool:
    """Whether `entry` is that of the key.

    Raises:
        CorruptionError: The key's entry is damaged.
    """
    entry_key = index_entry_key(partition, key)
    value = transaction.get(entry_key)
    return value is not None and KeyIndexEntry.parse(entry_key, value) == entry


def _check_neighbours(transaction: ReadTransaction, key: bytes) -> None:
    """Raises `CorruptionError` if an entry next to the place of the missing `key` is damaged.

    One flipped bit in a key hides its entry, and leaves it where a search for the key ends. Without
    this check the key would be answered as missing, which it is not.
    """
    neighbours = [transaction.last(KEY, key), next(iter(transaction.scan(key, WATERMARK)), None)]
    for neighbour in neighbours:
        if neighbour is not None:
            KeyIndexEntry.parse(*neighbour)


def _watermark(transaction: ReadTransaction, partition: int) -> Watermark:
    key = partition_key(WATERMARK, partition)
    value = transaction.get(key)
    return Watermark() if value is None else parse_record(key, value, Watermark)


def _put_watermark(transaction: WriteTransaction, partition: int, mark: Watermark) -> None:
    key = partition_key(WATERMARK, partition)
    transaction.put(key, pack_record(key, mark))
