"""An index on disk: LMDB, three trees in one file that change in one transaction.

- **main**: the entry (encoded key, document's key) -> its payload: the included values.
- **back**: partition and document's key -> the document's entries, each behind its length, so that
  an update takes the old ones out, and a partition can be dropped.
- **meta**: by partition the mark, and how many partitions are not settled. It stands in the same
  transaction as the entries that it speaks of, so the two never disagree.

Whatever is in it can be had from the server again. So commits sync the entries, and not the page
that names the newest root: a crash of the machine may take the last commit back, whole. `sync`
makes sure of it where something elsewhere relies on it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import Any, Final, Literal, Protocol, Self

import attrs
import lmdb

from upr_protocol.durable_files import FULL_DISK_ERRORS
from upr_protocol.errors import UprError
from upr_protocol.failover import Position
from upr_protocol.hashing import partition_of
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer.document_rows import (
    DocumentRows,
    NewestChanges,
    RoundChanges,
    back_prefix,
)
from upr_server.indexer.entry_reader import END_OF_KEYS, EntryReader, EntrySelection
from upr_server.indexer.index_batch import DocumentChange, IndexBatch
from upr_server.indexer.mark import NO_MARK, Mark, decode_timestamp
from upr_server.indexer.pool import ANSWER_BYTES_MAX

FILE_BYTES_MAX: Final = 64 * 1024 * 1024 * 1024
"""How large an index may become: addresses, not disk. A process has some for 2,000 indexes. The
disk's own size is no bound here, as a disk may grow."""

ENTRY_OVERHEAD_BYTES: Final = 48
"""What an entry that was read takes in memory beside its own bytes."""

FREE_BYTES_MIN: Final = 1024 * 1024
"""Where less is free, a write that failed half-way has found no room, and no new index is made."""

COUNT_STEP: Final = 10_000
"""After so many entries a count looks whether anybody still waits for it: some 2 ms."""

_Tree = Any
"""lmdb does not tell what its trees are called."""

_PARTITION: Final = Struct(">H")
_COUNT: Final = Struct(">I")
_LENGTH: Final = Struct(">H")
_MARK: Final = b"m"
_MARKS_END: Final = b"n"
_UNSETTLED: Final = b"u"
_BUILT: Final = b"j"
_OPENING: Final = b"o"
_BUCKET: Final = b"b"
_FORMAT: Final = b"v"
_FORMAT_VERSION: Final = b"2"
"""An index in another format is emptied: the server has everything."""
_FAILURE: Final = b"f"


class IndexFileError(UprError):
    """The files of an index cannot be used."""


class DiskFullError(IndexFileError):
    """An index has found no room on the disk, or has no more addresses; nothing has changed."""


Timestamps = Mapping[PartitionId, tuple[HistoryId, SeqNo]]
"""By partition, the history and the highest sequence number that an index had."""


class NotSettledError(Exception):
    """The index is between two states that the server had: a snapshot is half applied."""


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


@attrs.frozen
class ReadCounts:
    """What it took to read.

    Attributes:
        searches: How often the tree of entries was searched for a place.
        entries_read: How many entries were looked at; among them the one behind the end of a range,
            which says that the range has ended.
        included_read: For how many of them the included values were read.
    """

    searches: int = 0
    entries_read: int = 0
    included_read: int = 0

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(
            self.searches + other.searches,
            self.entries_read + other.entries_read,
            self.included_read + other.included_read,
        )


EndedBy = Literal["ranges", "limit", "bytes"]
"""Why a scan has ended: its ranges have, its limit was reached, or its answer was full."""


@attrs.frozen
class ScanResult:
    """What a scan has read, all of one moment.

    Attributes:
        entries: The entries, or the distinct beginnings of their keys, in order.
        payloads: The entries' payloads; empty if not asked for.
        ended_by: Why there are no more of them here.
        reading: What it took.
    """

    entries: list[bytes]
    payloads: list[bytes]
    ended_by: EndedBy
    reading: ReadCounts

    @property
    def has_more(self) -> bool:
        """Whether there are more."""
        return self.ended_by != "ranges"


@attrs.frozen
class EntrySummary:
    """What a scan has found out about its entries, all of one moment.

    Attributes:
        count: How many there are; None if not asked for.
        lowest: The lowest one; None if not asked for, or if there are none.
        highest: The highest one, likewise.
        reading: What it took.
    """

    count: int | None
    lowest: bytes | None
    highest: bytes | None
    reading: ReadCounts


def entries_bytes(entries: Sequence[bytes]) -> int:
    """What entries take in memory. O(entries)."""
    return sum(map(len, entries)) + ENTRY_OVERHEAD_BYTES * len(entries)


class IndexFile:
    """One index. Writing is for one thread at a time, reading for any.

    After `close` a write does nothing: the round under way may still have it.

    Args:
        path: Its folder; made when there is none.
        bucket: The bucket whose documents are in it.

    Attributes:
        marks: By partition, how far it is: what was committed last. Another dictionary after each
            commit.
        failure: Why entries are missing in it, so that it answers no scans; empty if none are.
        opening: Names this opening of the file; the file has the name, too.

    Raises:
        DiskFullError: The disk has no room.
        IndexFileError: It cannot be opened otherwise, or is of another bucket.
    """

    def __init__(self, path: Path, bucket: str) -> None:
        self.path = path
        self._bucket = bucket
        self.marks: dict[PartitionId, Mark] = {}
        self.opening = secrets.token_hex(8)
        self._is_closed = False
        with ExitStack() as undo:
            with _errors_of_index(path):
                path.mkdir(parents=True, exist_ok=True)
                if not (path / "lock.mdb").exists():
                    _check_space(path)
                self._env = lmdb.open(
                    str(path),
                    map_size=FILE_BYTES_MAX,
                    max_dbs=3,
                    metasync=False,
                    # A scan ends in the thread in which it began, but a thread may serve many.
                    max_readers=1024,
                )
                # A process can open a file once: where the disk has no room, it will try again.
                undo.callback(self._env.close)
                self._env.reader_check()
                self._main = self._env.open_db(b"main")
                self._back = self._env.open_db(b"back")
                self._meta = self._env.open_db(b"meta")
            self._load()
            undo.pop_all()

    def _load(self) -> None:
        """Reads what the file has beside entries, and writes which opening this is."""
        bucket = self._bucket
        with self._write() as transaction:
            stored_bucket = transaction.get(_BUCKET, db=self._meta)
            if stored_bucket is None:
                transaction.put(_BUCKET, bucket.encode(), db=self._meta)
            elif stored_bucket != bucket.encode():
                raise IndexFileError(
                    f"{self.path} holds an index of the bucket {stored_bucket.decode()!r}, not of "
                    f"{bucket!r}; choose another --data-dir"
                )
            if transaction.get(_FORMAT, db=self._meta) != _FORMAT_VERSION:
                for tree in (self._main, self._back, self._meta):
                    transaction.drop(tree, delete=False)
                transaction.put(_BUCKET, bucket.encode(), db=self._meta)
                transaction.put(_FORMAT, _FORMAT_VERSION, db=self._meta)
            transaction.put(_OPENING, self.opening.encode(), db=self._meta)
            self._is_built = transaction.get(_BUILT, db=self._meta) is not None
            self.failure = transaction.get(_FAILURE, b"", db=self._meta).decode()
            for key, value in _between(transaction, self._meta, _MARK, _MARKS_END):
                partition = PartitionId(_PARTITION.unpack(key[1:])[0])
                self.marks[partition] = Mark.decode(bucket, partition, value)

    @contextmanager
    def _write(self) -> Iterator[lmdb.Transaction[bytes]]:
        with _errors_of_index(self.path), self._env.begin(write=True) as transaction:
            yield transaction

    def mark(self, partition: PartitionId) -> Mark:
        """How far the index is in a partition."""
        return self.marks.get(partition, NO_MARK)

    # Changes.

    @property
    def is_built(self) -> bool:
        """Whether the index is complete, and follows the running indexes' stream."""
        return self._is_built

    def mark_built(self) -> None:
        """Makes it one of the running indexes."""
        if self._is_closed:
            return
        with self._write() as transaction:
            transaction.put(_BUILT, b"", db=self._meta)
        self._is_built = True

    def apply_changes(self, changes: RoundChanges, source: EntrySource) -> int:
        """Brings the index as far as a round's batches reach, in one commit.

        Args:
            changes: The batches.
            source: Says what the entries are.

        Returns:
            How many documents' entries changed.

        Raises:
            DiskFullError: The disk has no room.
            IndexFileError: It cannot be written otherwise. In both cases nothing has changed.
        """
        if self._is_closed:
            return 0
        marks, first_seqs = self._marks_after(changes.batches)
        with source.attempt(), self._write() as transaction:
            trees = _Trees(transaction, self._main, self._back, source)
            changed = _write_changes(trees, changes, first_seqs)
            self._put_marks(transaction, marks)
            failure = source.failure
            if failure and not self.failure:
                transaction.put(_FAILURE, failure.encode(), db=self._meta)
        # In place of the one before: the event loop may be looking through that.
        self.marks = self.marks | marks
        self.failure = failure
        return changed

    def _marks_after(
        self, batches: Iterable[IndexBatch]
    ) -> tuple[dict[PartitionId, Mark], list[int]]:
        """The marks after `batches`, and by batch from which number on its changes are new.

        Indexes may be differently far: this one may have a part of a batch already. Of a snapshot
        that it has in part it may lack any change: the snapshot left out what was superseded at its
        end. The next may end before that, or have lost it.
        """
        marks: dict[PartitionId, Mark] = {}
        first_seqs: list[int] = []
        for batch in batches:
            previous = marks.get(batch.partition) or self.mark(batch.partition)
            first_seqs.append(0 if batch.is_rollback else previous.position.last_complete + 1)
            marks[batch.partition] = _mark_after(previous, batch)
        return marks, first_seqs

    def _put_marks(
        self, transaction: lmdb.Transaction[bytes], marks: Mapping[PartitionId, Mark]
    ) -> None:
        unsettled_count = _unsettled_count(transaction, self._meta)
        for partition, mark in marks.items():
            unsettled_count += self.mark(partition).is_settled - mark.is_settled
            data = mark.encode(self._bucket, partition)
            transaction.put(_MARK + _PARTITION.pack(partition), data, db=self._meta)
        transaction.put(_UNSETTLED, _COUNT.pack(unsettled_count), db=self._meta)

    def sync(self) -> None:
        """Makes what was committed survive a crash of the machine."""
        if self._is_closed:
            return
        with _errors_of_index(self.path):
            self._env.sync(True)

    # Reading.

    def open_view(self, *, settled: bool = True) -> IndexView:
        """This moment of the index. Close it.

        Args:
            settled: Whether every partition must be in a state that the server had.

        Raises:
            NotSettledError: A partition is not.
            IndexFileError: It cannot be read.
        """
        with _errors_of_index(self.path):
            view = IndexView(self._env, self._main, self._meta)
        if settled and view.unsettled_count():
            view.close()
            raise NotSettledError
        return view

    def payloads(self) -> Iterator[tuple[bytes, bytes]]:
        """All entries with their payloads, in order. Take them all, in one thread."""
        with _errors_of_index(self.path), self._env.begin() as transaction:
            yield from _between(transaction, self._main, b"", END_OF_KEYS)

    def entry_count(self) -> int:
        """How many entries there are. O(1)."""
        with self.open_view(settled=False) as view:
            return view.entry_count()

    def disk_bytes(self) -> int:
        """How large its file is."""
        return (self.path / "data.mdb").stat().st_size

    # The end.

    def close(self) -> None:
        """Closes the file. Nobody may read it any more."""
        self._is_closed = True
        self._env.close()

    def destroy(self) -> None:
        """Closes the file and removes it. It names no opening then: a process that has it open
        still sees it, and would go on reading it."""
        # Without room for that, the others hear that the index is defined no more.
        with suppress(lmdb.Error), self._env.begin(write=True) as transaction:
            transaction.delete(_OPENING, db=self._meta)
        self.close()
        shutil.rmtree(self.path)

    def check_invariants(self) -> None:
        """For tests: the two trees tell of the same entries, and the marks are those on disk."""
        with self.open_view(settled=False) as view, self._env.begin() as transaction:
            main = {entry for entry, _ in _between(transaction, self._main, b"", END_OF_KEYS)}
            back = dict(_between(transaction, self._back, b"", END_OF_KEYS))
            assert sorted(main) == sorted(
                entry for packed in back.values() for entry in _unpack_entries(packed)
            )
            for key, packed in back.items():
                assert all(
                    entry.endswith(key[_PARTITION.size :]) for entry in _unpack_entries(packed)
                )
            unsettled_count = sum(not mark.is_settled for mark in self.marks.values())
            assert view.unsettled_count() == unsettled_count
            for partition, (history_id, seq) in view.timestamps().items():
                assert (self.mark(partition).history_id, self.mark(partition).seq) == (
                    history_id,
                    seq,
                )


class IndexFileToRead:
    """An index that another process writes. Not for one that this process has open.

    Args:
        path: Its folder.

    Raises:
        IndexFileError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _errors_of_index(path), ExitStack() as undo:
            self._env = lmdb.open(
                str(path), map_size=FILE_BYTES_MAX, max_dbs=3, readonly=True, create=False
            )
            undo.callback(self._env.close)
            self._main = self._env.open_db(b"main", create=False)
            self._meta = self._env.open_db(b"meta", create=False)
            undo.pop_all()

    def open_view(self) -> IndexView:
        """This moment of the index. Close it.

        Raises:
            IndexFileError: It cannot be read.
        """
        with _errors_of_index(self._path):
            return IndexView(self._env, self._main, self._meta)

    def close(self) -> None:
        """Closes the file."""
        self._env.close()


class IndexView:
    """One moment of an index, whatever is written meanwhile. For one thread at a time.

    While it is open, the index writes to no page that it shows: the file may grow.

    Args:
        env: The index.
        main: Its tree of entries.
        meta: Its tree of marks.
    """

    def __init__(self, env: lmdb.Environment, main: _Tree, meta: _Tree) -> None:
        self._env = env
        self._main = main
        self._meta = meta
        self._path = Path(env.path())
        self._pages = self._last_page()
        self._transaction = env.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it. May be called again."""
        self._transaction.abort()

    def _last_page(self) -> int:
        return int(self._env.info()["last_pgno"])

    def grown_bytes(self) -> int:
        """How much more of its file the index uses than at this moment. O(1)."""
        return (self._last_page() - self._pages) * int(self._env.stat()["psize"])

    def scan(
        self,
        selection: EntrySelection,
        limit: int,
        *,
        bytes_max: int = ANSWER_BYTES_MAX,
        with_payloads: bool = False,
    ) -> ScanResult:
        """Reads up to `limit` entries.

        Args:
            selection: Which entries.
            limit: How many at most.
            bytes_max: The result ends before the entry that would exceed so many bytes in all, as
                `entries_bytes` counts them; it has one entry at least.
            with_payloads: Whether to give the entries' payloads.

        Raises:
            IndexFileError: It cannot be read.
        """
        transaction = self._transaction
        entries: list[bytes] = []
        payloads: list[bytes] = []
        ended_by: EndedBy = "ranges"
        nbytes = included_read = 0
        with _errors_of_index(self._path), transaction.cursor(self._main) as cursor:
            reader = EntryReader(cursor)
            for entry in reader.select(selection):
                if len(entries) == limit:
                    ended_by = "limit"
                    break
                nbytes += len(entry) + ENTRY_OVERHEAD_BYTES
                payload = None
                if with_payloads:
                    payload = transaction.get(entry, b"", db=self._main)
                    nbytes += len(payload) + ENTRY_OVERHEAD_BYTES
                    included_read += 1
                if entries and nbytes > bytes_max:
                    ended_by = "bytes"
                    break
                entries.append(entry)
                if payload is not None:
                    payloads.append(payload)
        reading = ReadCounts(reader.searches, reader.entries_read, included_read)
        return ScanResult(entries, payloads, ended_by, reading)

    def summarize(
        self,
        selection: EntrySelection,
        *,
        count: bool = False,
        lowest: bool = False,
        highest: bool = False,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> EntrySummary:
        """Finds out about entries without keeping them; see `scan`. To count takes O(entries), of
        distinct beginnings O(beginnings * log), of the whole index O(1); the rest O(log). A count
        calls `check_cancelled` now and then, which raises if nobody waits for it any more."""
        ascending = attrs.evolve(selection, descending=False)
        descending = attrs.evolve(selection, descending=True)
        with _errors_of_index(self._path), self._transaction.cursor(self._main) as cursor:
            reader = EntryReader(cursor)
            entry_count = None
            if count and ascending == EntrySelection():
                entry_count = self.entry_count()
            elif count:
                entry_count = _count(reader.select(ascending), check_cancelled)
            lowest_entry = next(reader.select(ascending), None) if lowest else None
            highest_entry = next(reader.select(descending), None) if highest else None
        reading = ReadCounts(reader.searches, reader.entries_read)
        return EntrySummary(entry_count, lowest_entry, highest_entry, reading)

    def entry_count(self) -> int:
        """How many entries there are. O(1)."""
        return int(self._transaction.stat(self._main)["entries"])

    def failure(self) -> str:
        """Why entries are missing in it; empty if none are. O(1)."""
        return self._value(_FAILURE).decode()

    def opening(self) -> str:
        """The opening of the file whose changes it shows; empty if the file was removed. O(1)."""
        return self._value(_OPENING).decode()

    def is_built(self) -> bool:
        """Whether the index is complete. O(1)."""
        with _errors_of_index(self._path):
            return self._transaction.get(_BUILT, db=self._meta) is not None

    def unsettled_count(self) -> int:
        """How many partitions are between two states that the server had. O(1)."""
        with _errors_of_index(self._path):
            return _unsettled_count(self._transaction, self._meta)

    def _value(self, key: bytes) -> bytes:
        with _errors_of_index(self._path):
            return self._transaction.get(key, b"", db=self._meta)

    def timestamp(self, partition: PartitionId) -> tuple[HistoryId, SeqNo]:
        """How far a partition is. O(log partitions)."""
        data = self._value(_MARK + _PARTITION.pack(partition))
        return decode_timestamp(data) if data else (HistoryId(0), SeqNo(0))

    def timestamps(self) -> Timestamps:
        """How far each partition is. O(partitions)."""
        with _errors_of_index(self._path):
            return {
                PartitionId(_PARTITION.unpack(key[1:])[0]): decode_timestamp(value)
                for key, value in _between(self._transaction, self._meta, _MARK, _MARKS_END)
            }


def _count(entries: Iterator[bytes], check_cancelled: Callable[[], None]) -> int:
    """How many entries there are. O(entries)."""
    total = 0
    while count := sum(1 for _ in islice(entries, COUNT_STEP)):
        total += count
        check_cancelled()
    return total


def _unsettled_count(transaction: lmdb.Transaction[bytes], meta: _Tree) -> int:
    data = transaction.get(_UNSETTLED, db=meta)
    return 0 if data is None else int(_COUNT.unpack(data)[0])


def _write_changes(trees: _Trees, changes: RoundChanges, first_seqs: Sequence[int]) -> int:
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


def _write_in_part(trees: _Trees, batches: Sequence[tuple[IndexBatch, int]]) -> int:
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


class _Trees:
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
        main: _Tree,
        back: _Tree,
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
                key = cursor.key()[_PARTITION.size :]
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

    def write(self, transaction: lmdb.Transaction[bytes], main: _Tree, back: _Tree) -> None:
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
    """The reverse of `_packed`."""
    entries = []
    offset = 0
    while offset < len(data):
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(data, offset)[0]
        entries.append(data[start:offset])
    return entries


def _mark_after(previous: Mark, batch: IndexBatch) -> Mark:
    """The mark of a partition after a batch."""
    mark = batch.mark
    if batch.is_rollback:
        return mark
    if mark.seq >= previous.seq:
        return Mark(mark.position, previous.settles_at)
    if previous.position.partial is not None:
        # What it had of that snapshot came again, up to the stream's number: it goes back there.
        return Mark(mark.position, max(previous.settles_at, previous.seq))
    # The index is still ahead of the stream, in the history that the stream is in now.
    index_position = previous.position
    position = Position(
        mark.position.log,
        index_position.last_complete,
        index_position.highest_received,
        index_position.partial,
    )
    return Mark(position, previous.settles_at)


def _between(
    transaction: lmdb.Transaction[bytes], tree: _Tree, low: bytes, high: bytes
) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(tree) as cursor:
        has_key = cursor.set_range(low) if low else cursor.first()
        while has_key and cursor.key() < high:
            yield cursor.item()
            has_key = cursor.next()


@contextmanager
def _errors_of_index(path: Path) -> Iterator[None]:
    """Turns LMDB's errors into ours."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        if isinstance(error, lmdb.MapFullError):
            raise DiskFullError(
                f"the index in {path} has {FILE_BYTES_MAX} bytes, the most it may: drop it, or "
                "divide the indexes among more workers or slices"
            ) from error
        if _is_disk_full(error, path):
            raise DiskFullError(
                f"the disk is full: the index in {path} cannot be written: {error}"
            ) from error
        raise IndexFileError(f"the index in {path} cannot be used: {error}") from error


def _is_disk_full(error: Exception, path: Path) -> bool:
    """Whether a write has failed for want of room. Where the first of some pages find room, LMDB
    calls it an error of input and output."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if code != errno.EIO:
        return code in FULL_DISK_ERRORS
    with suppress(OSError):
        return _free_bytes(path) < FREE_BYTES_MIN
    return False


def _check_space(path: Path) -> None:
    """Makes sure that there is room for a new index. Without any, LMDB's new lock file, which is
    written through a memory map, would kill this process with SIGBUS.

    Raises:
        OSError: There is none.
    """
    free_bytes = _free_bytes(path)
    if free_bytes < FREE_BYTES_MIN:
        reason = f"{free_bytes} bytes are left, and a new index needs {FREE_BYTES_MIN}"
        raise OSError(errno.ENOSPC, reason)


def _free_bytes(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize
