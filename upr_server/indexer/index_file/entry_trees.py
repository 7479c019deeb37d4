"""The entries of an index: two trees that tell of the same ones, and how they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from struct import Struct
from typing import Final, Protocol

import lmdb

from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId
from upr_server.indexer.document_rows import (
    DocumentRows,
    NewestChanges,
    RoundChanges,
    back_prefix,
)
from upr_server.indexer.entry_reader import END_OF_KEYS
from upr_server.indexer.index_batch import DocumentChange, IndexBatch
from upr_server.indexer.index_file.tree import Tree, items_between

_PARTITION_BYTES: Final = 2
_LENGTH: Final = Struct(">H")


class EntrySource(Protocol):
    """Makes the entries of an index."""

    @property
    def failure(self) -> str:
        """Why it makes no entries any more; empty while it does."""

    @property
    def has_payloads(self) -> bool:
        """Whether entries have payloads."""

    @property
    def key_prefix(self) -> bytes:
        """What the keys of documents begin with that can have entries."""

    def attempt(self) -> AbstractContextManager[None]:
        """A context in which entries are made for one commit. If it ends with an error, what was
        noted of them meanwhile is forgotten: they will be made again."""

    def single_entries(self, rows: DocumentRows) -> Sequence[bytes] | None:
        """The entry of each document; empty when the index leaves the document out. None if one of
        them may have several entries, or a payload: then `entries` says what they are."""

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        """The entries of a document, in order, and the payload of each; no entries when the index
        leaves the document out."""


def write_changes(trees: EntryTrees, changes: RoundChanges, first_seqs: Sequence[int]) -> int:
    """Writes what an index lacks of a round's changes. Returns how many documents' entries differ.

    Args:
        trees: Where they are written.
        changes: The changes.
        first_seqs: By batch, from which number on its changes are new.
    """
    partitions_in_part = {
        batch.partition
        for batch, lowest, first_seq in zip(
            changes.batches, changes.first_seqs, first_seqs, strict=True
        )
        if batch.clears_partition or (lowest is not None and lowest < first_seq)
    }
    # Of most partitions an index takes everything, whatever the order. Their rows are made, and
    # their documents decoded, once for all indexes. While an index is being built, partition after
    # partition joins the running indexes' stream, mostly with batches of which it has a part.
    changes_in_whole = changes.of(lambda partition: partition not in partitions_in_part)
    changed = trees.write(changes_in_whole.rows) if changes_in_whole.batches else 0
    batches_in_part = [
        (batch, first_seq)
        for batch, first_seq in zip(changes.batches, first_seqs, strict=True)
        if batch.partition in partitions_in_part
    ]
    return changed + _write_in_part(trees, batches_in_part)


def _write_in_part(trees: EntryTrees, batches: Sequence[tuple[IndexBatch, int]]) -> int:
    """Writes what an index lacks of batches, each with the number from which on its changes are
    new. Returns how many documents' entries differ."""
    newest = NewestChanges()
    changed = 0
    for batch, first_seq in batches:
        if batch.clears_partition:
            changed += trees.write(newest.take())
            changed += trees.remove_partition(batch.partition, batch.clears_one_of)
        newest.add(batch, first_seq)
    return changed + trees.write(newest.take())


class EntryTrees:
    """The trees of entries in one transaction.

    It writes the entries in the order of the trees: neighbours share their pages.

    Args:
        transaction: A transaction that writes.
        main: The tree of entries.
        back: The tree of documents.
        source: Makes the entries.
    """

    def __init__(
        self,
        transaction: lmdb.Transaction[bytes],
        main: Tree,
        back: Tree,
        source: EntrySource,
    ) -> None:
        self._transaction = transaction
        self._main = main
        self._back = back
        self._source = source

    def write(self, rows: DocumentRows) -> int:
        """Puts the entries of documents in place of those that are there. O(n log n).

        Returns:
            How many documents' entries differ.
        """
        if self._source.key_prefix:
            rows = rows.with_prefix(self._source.key_prefix)
        if not rows:
            return 0
        entries = self._source.single_entries(rows)
        with self._transaction.cursor(self._back) as cursor:
            old_packed = dict(cursor.getmulti(rows.back_keys))
        difference = _Difference()
        if entries is not None:
            difference.add_single_entries(rows.back_keys, entries, old_packed)
        else:
            for back_key, change in zip(rows.back_keys, rows.changes(), strict=True):
                self._add_document(difference, back_key, change, old_packed.get(back_key, b""))
        difference.write(self._transaction, self._main, self._back)
        return difference.changed

    def _add_document(
        self, difference: _Difference, back_key: bytes, change: DocumentChange, old_packed: bytes
    ) -> None:
        """Notes how a document's entries differ from those that are there."""
        new_entries, payload = (
            self._source.entries(change) if change.value is not None else ((), b"")
        )
        new_packed = _pack_entries(new_entries)
        previous_entries = new_entries
        if new_packed != old_packed:
            previous_entries = _unpack_entries(old_packed)
            difference.put_back(back_key, new_packed)
            difference.removed_entries += set(previous_entries).difference(new_entries)
        elif not self._source.has_payloads:
            return
        # All entries of a document have the same payload.
        if (
            self._source.has_payloads
            and previous_entries
            and self._transaction.get(previous_entries[0], b"", db=self._main) != payload
        ):
            previous_entries = ()
        unchanged_entries = set(previous_entries)
        added_entries = [
            (entry, payload) for entry in new_entries if entry not in unchanged_entries
        ]
        difference.added_entries += added_entries
        difference.changed += bool(added_entries) or new_packed != old_packed

    def remove_partition(self, partition: PartitionId, partition_count: int) -> int:
        """Removes all entries of a partition. O(its entries).

        In a new bucket of the name, with another number of partitions, a document may be in another
        one, and may have come of that already. The entries that it has there stay.
        """
        prefix = back_prefix(partition)
        count = 0
        with self._transaction.cursor(self._back) as cursor:
            has_key = cursor.set_range(prefix)
            while has_key and cursor.key().startswith(prefix):
                key = cursor.key()[_PARTITION_BYTES:]
                present_partition = partition_of(key, partition_count)
                kept_entries: Sequence[bytes] = ()
                if present_partition != partition:
                    present_key = back_prefix(present_partition) + key
                    packed = self._transaction.get(present_key, b"", db=self._back)
                    kept_entries = _unpack_entries(packed)
                for entry in set(_unpack_entries(cursor.value())).difference(kept_entries):
                    self._transaction.delete(entry, db=self._main)
                count += 1
                # A deletion moves the cursor to the next key.
                has_key = cursor.delete() and bool(cursor.key())
        return count


class _Difference:
    """How the trees are to change.

    Attributes:
        changed: How many documents' entries differ.
        removed_entries: Entries to remove.
        added_entries: Entries to put, with their payloads.
    """

    def __init__(self) -> None:
        self.changed = 0
        self.removed_entries: list[bytes] = []
        self.added_entries: list[tuple[bytes, bytes]] = []
        self._removed_back_keys: list[bytes] = []
        self._new_back_entries: list[tuple[bytes, bytes]] = []

    def put_back(self, back_key: bytes, packed: bytes) -> None:
        """Notes a document's packed entries; empty if it has none any more."""
        if packed:
            self._new_back_entries.append((back_key, packed))
        else:
            self._removed_back_keys.append(back_key)

    def add_single_entries(
        self,
        back_keys: Sequence[bytes],
        entries: Sequence[bytes],
        old_packed: Mapping[bytes, bytes],
    ) -> None:
        """Notes how documents differ that have one entry or, where it is empty, none. O(n)."""
        pack = _LENGTH.pack
        packed_entries = [entry and pack(len(entry)) + entry for entry in entries]
        if not old_packed:
            changed_rows = [
                row for row in zip(back_keys, packed_entries, entries, strict=True) if row[2]
            ]
        else:
            get_old_packed = old_packed.get
            changed_rows = [
                row
                for row in zip(back_keys, packed_entries, entries, strict=True)
                if row[1] != get_old_packed(row[0], b"")
            ]
            removed = [old_packed[row[0]] for row in changed_rows if row[0] in old_packed]
            self.removed_entries += [packed[_LENGTH.size :] for packed in removed]
        self.changed += len(changed_rows)
        self._new_back_entries += [row[:2] for row in changed_rows if row[2]]
        self._removed_back_keys += [row[0] for row in changed_rows if not row[2]]
        self.added_entries += [(row[2], b"") for row in changed_rows if row[2]]

    def write(self, transaction: lmdb.Transaction[bytes], main: Tree, back: Tree) -> None:
        """Changes the trees. O(n log n)."""
        with transaction.cursor(main) as cursor:
            for entry in sorted(self.removed_entries):
                if cursor.set_key(entry):
                    cursor.delete()
            cursor.putmulti(sorted(self.added_entries))
        with transaction.cursor(back) as cursor:
            for back_key in self._removed_back_keys:
                if cursor.set_key(back_key):
                    cursor.delete()
            cursor.putmulti(self._new_back_entries)


def _pack_entries(entries: Sequence[bytes]) -> bytes:
    """A document's entries as the back tree has them."""
    return b"".join([_LENGTH.pack(len(entry)) + entry for entry in entries])


def _unpack_entries(data: bytes) -> Sequence[bytes]:
    """The reverse of `_pack_entries`."""
    entries = []
    offset = 0
    while offset < len(data):
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(data, offset)[0]
        entries.append(data[start:offset])
    return entries


def check_trees_agree(transaction: lmdb.Transaction[bytes], main: Tree, back: Tree) -> None:
    """For tests: the two trees tell of the same entries. O(entries)."""
    entries = [entry for entry, _ in items_between(transaction, main, b"", END_OF_KEYS)]
    packed_by_key = dict(items_between(transaction, back, b"", END_OF_KEYS))
    assert entries == sorted(
        entry for packed in packed_by_key.values() for entry in _unpack_entries(packed)
    )
    for key, packed in packed_by_key.items():
        assert all(entry.endswith(key[_PARTITION_BYTES:]) for entry in _unpack_entries(packed))
