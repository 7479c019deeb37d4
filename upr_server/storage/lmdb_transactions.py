"""The transactions of an LMDB environment, as the ordered map hands them out.

A write transaction can keep a sum over the marks of all records: the number that the map's `verify`
compares with what it reads. Each change adds the mark of the new record, and takes away that of the
record that it replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final

import lmdb

from upr_kernel import record_mark
from upr_protocol.chunk import Buffer
from upr_server.storage.records import mark_before_damage

COMMIT: Final = b"\0"
"""The key under which every commit stores its own number.

LMDB finds the newest commit by its two meta pages, which carry no checksum. After one flipped bit
there it would serve the commit before the last, whole and in order. So a tree whose number differs
from its meta page's is refused. (So is a copy whose commits were renumbered: `mdb_copy -c`.)
"""

COMMIT_RECORD: Final = Struct("<QQ")
"""The commit's number, and the sum of the marks of all records; 0 if the map keeps none."""

SUM_END: Final = 1 << 64
"""What the sum is kept modulo."""


class LmdbReadTransaction:
    """A `ReadTransaction` over one of LMDB's.

    Args:
        transaction: LMDB's transaction; its owner ends it.

    Attributes:
        transaction: The same.
    """

    def __init__(self, transaction: lmdb.Transaction) -> None:
        self.transaction = transaction

    def get(self, key: bytes) -> Buffer | None:
        value: Buffer | None = self.transaction.get(key)
        return value

    def get_all(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Buffer]]:
        with self.transaction.cursor() as cursor:
            return [(bytes(key), value) for key, value in cursor.getmulti(keys)]

    def scan(self, first_key: bytes, last_key: bytes) -> Iterator[tuple[bytes, Buffer]]:
        with self.transaction.cursor() as cursor:
            if not cursor.set_range(first_key):
                return
            for key, value in cursor.iternext():
                key = bytes(key)
                if key > last_key:
                    return
                yield key, value

    def last(self, first_key: bytes, last_key: bytes) -> tuple[bytes, Buffer] | None:
        with self.transaction.cursor() as cursor:
            if not cursor.set_range(last_key):
                has_key = cursor.last()
            else:
                has_key = bytes(cursor.key()) == last_key or cursor.prev()
            if not has_key or bytes(cursor.key()) < first_key:
                return None
            return bytes(cursor.key()), cursor.value()


class LmdbWriteTransaction(LmdbReadTransaction):
    """A `WriteTransaction` over one of LMDB's.

    Args:
        transaction: LMDB's transaction; its owner commits it.
        is_summed: Whether to keep the sum.

    Attributes:
        is_changed: Whether anything was written.
        sum_change: By how much the sum of all marks has changed, without a modulus.
    """

    def __init__(self, transaction: lmdb.Transaction, is_summed: bool) -> None:
        super().__init__(transaction)
        self.is_changed = False
        self.sum_change = 0
        self._is_summed = is_summed
        self._cursor = transaction.cursor()

    def put(self, key: bytes, value: Buffer) -> None:
        self.is_changed = True
        if not self._is_summed or key == COMMIT:
            self.transaction.put(key, value)
            return
        # One search, where the key is new; none, where it is in the page of the one before.
        old_value = self._cursor.replace(key, value)
        if old_value is not None:
            self.sum_change -= _mark_in_sum(key, old_value)
        self.sum_change += record_mark(key, value, False)

    def put_all(self, items: Iterable[tuple[bytes, Buffer]]) -> None:
        if self._is_summed:
            for key, value in items:
                self.put(key, value)
            return
        self.is_changed = True
        with self.transaction.cursor() as cursor:
            cursor.putmulti(items)

    def put_new(self, items: Sequence[tuple[bytes, Buffer]]) -> int:
        if self._is_summed:
            new_items = [(key, value) for key, value in items if self.transaction.get(key) is None]
            self.put_all(new_items)
            return len(new_items)
        self.is_changed = True
        with self.transaction.cursor() as cursor:
            _, count = cursor.putmulti(items, overwrite=False)
            return int(count)

    def delete(self, key: bytes) -> None:
        self.is_changed = True
        if not self._cursor.set_key(key):
            return
        if self._is_summed:
            # Where it lies in the file: `pop` would copy it, and read all of a large value.
            self.sum_change -= _mark_in_sum(key, self._cursor.value())
        self._cursor.delete()


def _mark_in_sum(key: bytes, value: Buffer) -> int:
    """What the sum has for a record that was written before. If it has been damaged since, that is
    the mark that it had then: otherwise the sum would keep a mark of no record for ever."""
    mark = record_mark(key, value, True)
    return mark if mark >= 0 else mark_before_damage(key, value)
