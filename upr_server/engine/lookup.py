"""The lookup: what a key holds, and what of it must be read from disk first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Final

import msgspec

from upr_protocol.chunk import Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Operation, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX
from upr_server.engine.eviction import KeyEviction
from upr_server.engine.expiry import ExpiryIndex
from upr_server.engine.hash_table import HashTable
from upr_server.engine.operations import READS
from upr_server.engine.snapshots import Cursor, SnapshotList

FetchedItems = Mapping[bytes, Mutation | None]
"""What was read from disk, by key: the newest mutation, or None for a key that is missing. Where
the request needed no value, the mutation has its number and expiry time and no CAS. A key whose
record is damaged has a `damaged_item`."""

NOTHING_FETCHED: Final[FetchedItems] = {}

ROW_BYTES_MAX: Final = 48
"""What a row takes in a chunk beside its key and value, with all padding."""


class FetchRequest(msgspec.Struct, frozen=True):
    """A key whose item must be read from disk.

    Attributes:
        key: The key.
        seq: The number of its newest mutation; 0 where memory does not know it.
        needs_value: Whether more is needed than whether the item exists and when it expires.
    """

    key: bytes
    seq: int
    needs_value: bool


def damaged_item(request: FetchRequest, damage: str) -> Mutation:
    """Stands for an item whose record on disk is damaged. Its value says what is damaged."""
    return Mutation(
        Operation.DELETE,
        request.key,
        damage.encode(),
        seq=SeqNo(request.seq),
        flags=Status.DAMAGED,
    )


def is_damaged(item: Mutation) -> bool:
    """Whether it is a `damaged_item`."""
    return item.op == Operation.DELETE and item.flags == Status.DAMAGED


class KeyLocation(Enum):
    """Where the newest mutation of a key is."""

    ABSENT = auto()
    """Nowhere: the key has no item, and memory knows that."""

    MEMORY = auto()
    """In memory: the item exists, unless it has expired."""

    DISK = auto()
    """On disk, at a number that memory knows: the item exists, unless it has expired."""

    UNKNOWN = auto()
    """Memory does not know the key: only the disk's index can tell whether there is an item."""


# An enum's attributes are slow to look up.
_ABSENT: Final = KeyLocation.ABSENT
_MEMORY: Final = KeyLocation.MEMORY
_DISK: Final = KeyLocation.DISK
_UNKNOWN: Final = KeyLocation.UNKNOWN

NOT_FETCHED: Final = Mutation(Operation.SET, b"")
"""Stands for an item that must be read from disk first."""

_EXISTING_ITEM: Final = Mutation(Operation.SET, b"")
"""Stands for an item of which an operation only needs to know that it exists."""


class ItemLookup:
    """Finds what keys hold, in memory and in what was fetched from disk.

    What was fetched stays right as long as the partition's eviction is pinned: a key that changed
    since is then in the table, with a higher number.

    Args:
        table: The partition's hash table.
        snapshots: Its mutations in memory.
        expiries: When its items expire.
        eviction: What the table has forgotten.
    """

    __slots__ = ("_eviction", "_expiries", "_snapshots", "_table")

    def __init__(
        self,
        table: HashTable,
        snapshots: SnapshotList[Cursor],
        expiries: ExpiryIndex,
        eviction: KeyEviction,
    ) -> None:
        self._table = table
        self._snapshots = snapshots
        self._expiries = expiries
        self._eviction = eviction

    # What is missing.

    def collect_missing(
        self,
        operation: Mutation,
        now: float,
        fetched_items: FetchedItems,
        requests: dict[bytes, FetchRequest],
    ) -> None:
        """Adds to `requests` what must be read from disk before an operation can be applied.

        Args:
            operation: A mutation of a published chunk.
            now: Seconds since 1970.
            fetched_items: What was read already.
            requests: What other operations need, by key.
        """
        if is_plain_set(operation):
            return
        key, needs_value = operation.key, _needs_value(operation)
        request = self._fetch_request(key, now, fetched_items, needs_value=needs_value)
        # Of two operations on one key, the one that needs the value decides.
        if request is not None and (needs_value or key not in requests):
            requests[key] = request

    def missing_for_get(
        self, keys: Sequence[bytes], now: float, fetched_items: FetchedItems
    ) -> list[FetchRequest]:
        """What must be read from disk before `rows_for_get` of `keys` has a row. O(keys).

        A fetch reads a bounded number of bytes, perhaps not all that was asked for. Then the answer
        holds the keys before the first that is still missing: so nothing is missing once the first
        key is there.
        """
        keys = list(filter(_is_key, keys))
        if fetched_items and keys and self.find(keys[0], now, fetched_items) is not NOT_FETCHED:
            return []
        requests = (
            self._fetch_request(key, now, fetched_items, needs_value=True)
            for key in dict.fromkeys(keys)
        )
        return [request for request in requests if request is not None]

    def _fetch_request(
        self, key: bytes, now: float, fetched_items: FetchedItems, *, needs_value: bool
    ) -> FetchRequest | None:
        location, seq = self._locate(key)
        if location is _ABSENT or location is _MEMORY:
            return None
        # An item at a known number exists. Whether it has expired matters only if anything has.
        if location is _DISK and not needs_value and not self._expiries.is_due(now):
            return None
        if self._fetched_item(key, seq, fetched_items, needs_value=needs_value) is not NOT_FETCHED:
            return None
        # A known number is read from the log, which gives the whole mutation anyway.
        return FetchRequest(key, seq, needs_value or location is _DISK)

    # What is there.

    def rows_for_get(
        self, keys: Sequence[bytes], now: float, bytes_max: int, fetched_items: FetchedItems
    ) -> list[Mutation]:
        """The rows of a reply to a `GET`; see `Partition.get`. O(keys * log mutations)."""
        rows: list[Mutation] = []
        bytes_left = bytes_max
        for key in keys:
            if not _is_key(key):
                rows.append(Mutation(Operation.DELETE, key, flags=Status.BAD_KEY))
                continue
            row = self.find(key, now, fetched_items)
            if row is NOT_FETCHED:
                assert rows, "the caller must first ask which keys are missing"
                break
            if row is not None and is_damaged(row):
                rows.append(Mutation(Operation.DELETE, key, flags=Status.DAMAGED))
                continue
            bytes_left -= ROW_BYTES_MAX + len(key) + (0 if row is None else len(row.value))
            if bytes_left < 0 and rows:
                break
            rows.append(Mutation(Operation.DELETE, key) if row is None else row)
        return rows

    def find(self, key: bytes, now: float, fetched_items: FetchedItems) -> Mutation | None:
        """What the key holds; None when it is missing or has expired. O(log mutations).

        Returns:
            The mutation; a `damaged_item`; or `NOT_FETCHED` when it must be read from disk first.
        """
        location, seq = self._locate(key)
        if location is _ABSENT:
            return None
        if location is _MEMORY:
            item: Mutation | None = self._snapshots.find(seq)
        else:
            item = self._fetched_item(key, seq, fetched_items, needs_value=True)
        return None if item is None or 0 < item.expiry <= now else item

    def item_for(
        self, operation: Mutation, now: float, fetched_items: FetchedItems
    ) -> Mutation | None:
        """What the operation's key holds, as far as the operation needs to know; None when it is
        missing or has expired; a `damaged_item` when nobody can tell; `NOT_FETCHED` when it must be
        read from disk first."""
        location, seq = self._locate(operation.key)
        if location is _ABSENT:
            return None
        needs_value = _needs_value(operation)
        # Finding a mutation costs more than the rest of this function. When nothing has expired, an
        # item that need only exist exists.
        needs_item = needs_value or self._expiries.is_due(now)
        if location is _MEMORY:
            item: Mutation | None = self._snapshots.find(seq) if needs_item else _EXISTING_ITEM
        elif location is _DISK and not needs_item:
            # The table knows that there is one, though its record may be damaged.
            item = _EXISTING_ITEM
        else:
            item = self._fetched_item(operation.key, seq, fetched_items, needs_value=needs_value)
        return None if item is None or 0 < item.expiry <= now else item

    def _locate(self, key: bytes) -> tuple[KeyLocation, int]:
        """Where the newest mutation of `key` is, and its number, where it is known. O(1)."""
        seq, is_tombstone = self._table.newest(key)
        if not seq:
            return (_UNKNOWN if self._eviction.has_evicted else _ABSENT), 0
        if is_tombstone:
            return _ABSENT, seq
        return (_MEMORY if seq > self._snapshots.oldest_start else _DISK), seq

    @staticmethod
    def _fetched_item(
        key: bytes, seq: int, fetched_items: FetchedItems, *, needs_value: bool
    ) -> Mutation | None:
        """What was fetched for `key`, if it can be used; otherwise `NOT_FETCHED`.

        Args:
            key: The key.
            seq: The number that the item must have; 0 where memory does not know it.
            fetched_items: What was read.
            needs_value: Whether the value must be there, which it is not without a CAS.
        """
        item = fetched_items.get(key, NOT_FETCHED)
        if item is None:
            # It was missing on disk. If memory has known a number since, that answer is old.
            return NOT_FETCHED if seq else None
        if seq and item.seq != seq:
            return NOT_FETCHED
        if needs_value and not item.cas and not is_damaged(item):
            return NOT_FETCHED
        return item


def _is_key(key: bytes) -> bool:
    """Whether an item can have this key."""
    return 1 <= len(key) <= KEY_BYTES_MAX


def is_plain_set(operation: Mutation) -> bool:
    """Whether the operation stores its value whatever the key holds."""
    return operation.op == Operation.SET and not operation.cas


def _needs_value(operation: Mutation) -> bool:
    """Whether the operation needs the item itself, not only whether there is one."""
    return bool(operation.cas) or operation.op in READS
