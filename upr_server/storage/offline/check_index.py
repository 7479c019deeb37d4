"""Checking a bucket's index: its records from end to end, and its entries against the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from upr_protocol.chunk import Buffer
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.lmdb_transactions import COMMIT
from upr_server.storage.offline.findings import Damage, Progress, Report
from upr_server.storage.offline.map_walk import KEYS_END, walk_map
from upr_server.storage.ordered_map import ReadTransaction
from upr_server.storage.records import (
    EXPIRY,
    INDEX_ENTRY_KEY_PREFIX,
    KEY,
    WATERMARK,
    KeyIndexEntry,
    Watermark,
    expiry_key,
    index_entry_key,
    parse_expiry_key,
    parse_record,
    partition_key,
    without_checksum,
)


def check_index(index: LmdbOrderedMap, partition_count: int) -> Iterator[Report]:
    """Checks every record of an index by itself, and that entries and expiry records agree.

    Args:
        index: The index.
        partition_count: How many partitions the bucket has.
    """
    with index.read() as transaction:
        check = _RecordCheck(transaction, partition_count)
        yield from walk_map(transaction, index.count(), "index", check)


class _RecordCheck:
    def __init__(self, transaction: ReadTransaction, partition_count: int) -> None:
        self._transaction = transaction
        self._partition_count = partition_count

    def __call__(self, key: bytes, value: Buffer) -> None:
        """Raises an exception if the record is wrong."""
        kind = key[:1]
        if kind == KEY:
            self._check_entry(key, value)
        elif kind == EXPIRY:
            self._check_expiry(key, value)
        elif kind == WATERMARK:
            parse_record(key, value, Watermark)
            if len(key) != len(partition_key(WATERMARK, 0)):
                raise ValueError("its key has a wrong length")
            self._check_partition(int.from_bytes(key[1:]))
        elif key != COMMIT:
            raise ValueError("no record has this kind of key")

    def _check_partition(self, partition: int) -> None:
        if partition >= self._partition_count:
            raise ValueError(f"it belongs to partition {partition}, which does not exist")

    def _check_entry(self, key: bytes, value: Buffer) -> None:
        entry = KeyIndexEntry.parse(key, value)
        partition = int.from_bytes(key[1:3])
        self._check_partition(partition)
        if len(key) == INDEX_ENTRY_KEY_PREFIX:
            raise ValueError("it is the entry of an empty key")
        if entry.expiry:
            by_time = expiry_key(entry.expiry, partition, entry.seq)
            stored_value = self._transaction.get(by_time)
            if (
                stored_value is None
                or without_checksum(by_time, stored_value) != key[INDEX_ENTRY_KEY_PREFIX:]
            ):
                raise ValueError(f"it expires at {entry.expiry}, but has no expiry record")

    def _check_expiry(self, key: bytes, value: Buffer) -> None:
        expiry, partition, seq = parse_expiry_key(key)
        entry_key = index_entry_key(partition, without_checksum(key, value))
        entry = self._transaction.get(entry_key)
        if entry is None or KeyIndexEntry.parse(entry_key, entry) != KeyIndexEntry(seq, expiry):
            raise ValueError("it is the expiry record of an item that does not exist")


def read_watermark(index: LmdbOrderedMap, partition: int) -> Watermark:
    """How far the index has followed the log of a partition.

    Raises:
        CorruptionError: The record is damaged.
    """
    key = partition_key(WATERMARK, partition)
    with index.read() as transaction:
        stored_value = transaction.get(key)
        return Watermark() if stored_value is None else parse_record(key, stored_value, Watermark)


def check_entries(
    index: LmdbOrderedMap,
    partition: int,
    newest: Mapping[bytes, KeyIndexEntry],
    watermark: Watermark,
    purge_seq: int,
) -> Iterator[Report]:
    """Compares the index of one partition with its log, up to the watermark.

    Args:
        index: The index.
        partition: The partition.
        newest: The newest mutation of each key in the log.
        watermark: How far the index has followed the log.
        purge_seq: Tombstones up to here may have been dropped from the log.
    """
    if not watermark.seq:
        # A crash may have interrupted a rollback to the beginning: the next start deletes the rest.
        yield Progress()
        return
    items = 0
    with index.read() as transaction:
        for key, expected_entry in newest.items():
            entry_key = index_entry_key(partition, key)
            value = transaction.get(entry_key)
            if value is None:
                text = f"the index does not find the key {_shown(key)}"
                yield Damage(text, partition, is_in_index=True)
                continue
            entry = KeyIndexEntry.parse(entry_key, value)
            if entry != expected_entry:
                text = f"the newest mutation of the key {_shown(key)} is {expected_entry}"
                yield Damage(f"{text}, not {entry}", partition, is_in_index=True)
        for entry_key, value in transaction.scan(
            index_entry_key(partition, b""), index_entry_key(partition, KEYS_END)
        ):
            entry = KeyIndexEntry.parse(entry_key, value)
            items += not entry.is_tombstone
            key = entry_key[INDEX_ENTRY_KEY_PREFIX:]
            is_purged = entry.is_tombstone and entry.seq <= purge_seq
            if key not in newest and not is_purged:
                text = f"the log has no mutation of the key {_shown(key)}"
                yield Damage(text, partition, is_in_index=True)
    yield Progress()
    if items != watermark.item_count:
        text = f"the index has {items} items, and should have {watermark.item_count}"
        yield Damage(text, partition, is_in_index=True)


def _shown(key: bytes) -> str:
    return repr(key[:80])[1:]
