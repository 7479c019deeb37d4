"""The index of one bucket: each key's newest mutation, and what expires when.

The index is derived from the log and follows it in large sorted batches, partition by partition:
keys are sorted by partition first, so that a batch touches few pages. A watermark a partition says
how far the index has come; what is above it is in the hash table. A lost index is rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

import msgspec

from upr_protocol.ids import PartitionId, SeqNo
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.index_update import LogPart, put_entries
from upr_server.storage.ordered_map import OrderedMap, ReadTransaction, WriteTransaction
from upr_server.storage.records import (
    EXPIRY,
    EXPIRY_MAX,
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
            return read_watermark(transaction, partition)

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
        which keys were in them. So from then on `ItemLookup` refuses the keys of this partition
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
                read_watermark(transaction, partition), garbage_bytes=garbage_bytes
            )
            _put_watermark(transaction, partition, mark)

    # Reading.

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
                        mark = read_watermark(transaction, partition)
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


def read_watermark(transaction: ReadTransaction, partition: int) -> Watermark:
    """How far the index has followed the log of a partition.

    Raises:
        CorruptionError: The record is damaged.
    """
    key = partition_key(WATERMARK, partition)
    value = transaction.get(key)
    return Watermark() if value is None else parse_record(key, value, Watermark)


def _put_watermark(transaction: WriteTransaction, partition: int, mark: Watermark) -> None:
    key = partition_key(WATERMARK, partition)
    transaction.put(key, pack_record(key, mark))
