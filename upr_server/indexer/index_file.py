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

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Any, Final, Protocol

import attrs
import lmdb

from upr_protocol.errors import UprError
from upr_protocol.failover import Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer.index_batch import DocumentChange, IndexBatch
from upr_server.indexer.mark import NO_MARK, Mark, timestamp
from upr_server.indexer.pool import ANSWER_BYTES_MAX
from upr_server.indexer.pure.keys import end_of_parts, end_of_prefix

FILE_BYTES_MAX: Final = 64 * 1024 * 1024 * 1024
"""How large an index may become: addresses, not disk. A process has some for 2,000 indexes. The
disk's own size is no bound here, as a disk may grow."""

ENTRY_OVERHEAD_BYTES: Final = 48
"""What an entry that was read takes in memory beside its own bytes."""

_Tree = Any
_Cursor = Any
"""lmdb does not tell what its trees and cursors are called."""

_PARTITION: Final = Struct(">H")
_COUNT: Final = Struct(">I")
_LENGTH: Final = Struct(">H")
_MARK: Final = b"m"
_MARKS_END: Final = b"n"
_UNSETTLED: Final = b"u"
_JOINED: Final = b"j"
_BUCKET: Final = b"b"
_FORMAT: Final = b"v"
_FORMAT_VERSION: Final = b"2"
"""An index in another format is emptied: the server has everything."""
_FAILURE: Final = b"f"
_END_OF_KEYS: Final = b"\xff" * 64
"""Above every entry: parts begin with less."""


class IndexFileError(UprError):
    """The files of an index cannot be used."""


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

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        """The entries of a document, in order, and the payload of each; no entries when the index
        leaves the document out."""


@attrs.frozen
class KeyRange:
    """A range [low, high) of entries.

    Attributes:
        low: The lowest bytes in the range.
        high: The lowest bytes above it.
    """

    low: bytes = b""
    high: bytes = _END_OF_KEYS


@attrs.frozen
class Selection:
    """Which entries a scan is about, and their order.

    Attributes:
        ranges: Where they are; disjoint, the lowest first.
        descending: Whether the highest entry comes first.
        distinct_parts: If not 0, only the first so many parts of the keys count: each different
            beginning stands once, in place of the entries that begin so.
    """

    ranges: tuple[KeyRange, ...] = (KeyRange(),)
    descending: bool = False
    distinct_parts: int = 0


@attrs.frozen
class ScanResult:
    """What a scan has read, all of one moment.

    Attributes:
        entries: The entries, or the distinct beginnings of their keys, in order.
        more: Whether there are more.
        timestamps: How far each partition was; empty if not asked for.
        payloads: The entries' payloads; empty if not asked for.
    """

    entries: list[bytes]
    more: bool
    timestamps: Timestamps
    payloads: list[bytes] = attrs.field(factory=list)


@attrs.frozen
class Summary:
    """What a scan has found out about its entries, all of one moment.

    Attributes:
        count: How many there are; None if not asked for.
        lowest: The lowest one; None if not asked for, or if there are none.
        highest: The highest one, likewise.
        timestamps: How far each partition was; empty if not asked for.
    """

    count: int | None = None
    lowest: bytes | None = None
    highest: bytes | None = None
    timestamps: Timestamps = attrs.field(factory=dict)


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
        marks: By partition, how far it is: what was committed last.
        failure: Why entries are missing in it, so that it answers no scans; empty if none are.

    Raises:
        IndexFileError: It cannot be opened, or is of another bucket.
    """

    def __init__(self, path: Path, bucket: str) -> None:
        self.path = path
        self._bucket = bucket
        self.marks: dict[PartitionId, Mark] = {}
        self._is_closed = False
        with _translated(path):
            path.mkdir(parents=True, exist_ok=True)
            self._env = lmdb.open(
                str(path),
                map_size=FILE_BYTES_MAX,
                max_dbs=3,
                metasync=False,
                # A scan ends in the thread in which it began, but a thread may serve many.
                max_readers=1024,
            )
            self._env.reader_check()
            self._main = self._env.open_db(b"main")
            self._back = self._env.open_db(b"back")
            self._meta = self._env.open_db(b"meta")
        with self._write() as transaction:
            stored_bucket = transaction.get(_BUCKET, db=self._meta)
            if stored_bucket is None:
                transaction.put(_BUCKET, bucket.encode(), db=self._meta)
            elif stored_bucket != bucket.encode():
                raise IndexFileError(
                    f"{path} holds an index of the bucket {stored_bucket.decode()!r}, not of "
                    f"{bucket!r}; choose another --data-dir"
                )
            if transaction.get(_FORMAT, db=self._meta) != _FORMAT_VERSION:
                for tree in (self._main, self._back, self._meta):
                    transaction.drop(tree, delete=False)
                transaction.put(_BUCKET, bucket.encode(), db=self._meta)
                transaction.put(_FORMAT, _FORMAT_VERSION, db=self._meta)
            self._joined = transaction.get(_JOINED, db=self._meta) is not None
            self.failure = transaction.get(_FAILURE, b"", db=self._meta).decode()
            for key, value in _between(transaction, self._meta, _MARK, _MARKS_END):
                partition = PartitionId(_PARTITION.unpack(key[1:])[0])
                self.marks[partition] = Mark.decode(bucket, partition, value)

    @contextmanager
    def _write(self) -> Iterator[lmdb.Transaction[bytes]]:
        with _translated(self.path), self._env.begin(write=True) as transaction:
            yield transaction

    def mark(self, partition: PartitionId) -> Mark:
        """How far the index is in a partition."""
        return self.marks.get(partition, NO_MARK)

    # Changes.

    @property
    def is_built(self) -> bool:
        """Whether the index is complete, and follows the running indexes' stream."""
        return self._joined

    def mark_built(self) -> None:
        """Makes it one of the running indexes."""
        if self._is_closed:
            return
        with self._write() as transaction:
            transaction.put(_JOINED, b"", db=self._meta)
        self._joined = True

    def apply(
        self, batches: Iterable[tuple[IndexBatch, Sequence[DocumentChange]]], source: EntrySource
    ) -> int:
        """Brings the index as far as `batches` reach, in one commit.

        Args:
            batches: Batches and their changes, each partition's in order.
            source: Says what the entries are.

        Returns:
            How many documents' entries changed.

        Raises:
            IndexFileError: It cannot be written; nothing has changed.
        """
        marks: dict[PartitionId, Mark] = {}
        changed = 0
        if self._is_closed:
            return 0
        with self._write() as transaction:
            trees = _Trees(transaction, self._main, self._back, source)
            for batch, changes in batches:
                partition = batch.partition
                previous = marks.get(partition) or self.mark(partition)
                prefix = _PARTITION.pack(partition)
                if batch.clears_partition:
                    changed += trees.forget(prefix)
                # Indexes may be differently far: this one may have a part of the batch already.
                first_seq = 0 if batch.is_rollback else previous.seq + 1
                trees.add(prefix, (each for each in changes if each.seq >= first_seq))
                marks[partition] = _mark_after(previous, batch)
            changed += trees.write()
            self._put_marks(transaction, marks)
            failure = source.failure
            if failure and not self.failure:
                transaction.put(_FAILURE, failure.encode(), db=self._meta)
        self.marks.update(marks)
        self.failure = failure
        return changed

    def _put_marks(
        self, transaction: lmdb.Transaction[bytes], marks: Mapping[PartitionId, Mark]
    ) -> None:
        unsettled = self._unsettled_count(transaction)
        for partition, mark in marks.items():
            unsettled += self.mark(partition).is_settled - mark.is_settled
            data = mark.encode(self._bucket, partition)
            transaction.put(_MARK + _PARTITION.pack(partition), data, db=self._meta)
        transaction.put(_UNSETTLED, _COUNT.pack(unsettled), db=self._meta)

    def sync(self) -> None:
        """Makes what was committed survive a crash of the machine."""
        if self._is_closed:
            return
        with _translated(self.path):
            self._env.sync(True)

    # Reading.

    def scan(
        self,
        selection: Selection,
        limit: int,
        *,
        bytes_max: int = ANSWER_BYTES_MAX,
        settled: bool = True,
        with_timestamps: bool = False,
        with_payloads: bool = False,
    ) -> ScanResult:
        """Reads up to `limit` entries, all of one moment.

        Args:
            selection: Which ones.
            limit: How many at most.
            bytes_max: The result ends before the entry that would exceed so many bytes in all, as
                `entries_bytes` counts them; it has one entry at least.
            settled: Whether every partition must be in a state that the server had.
            with_timestamps: Whether to tell how far each partition was.
            with_payloads: Whether to give the entries' payloads.

        Raises:
            NotSettledError: A partition is not.
            IndexFileError: It cannot be read.
        """
        with self._read(settled) as transaction:
            entries: list[bytes] = []
            payloads: list[bytes] = []
            more, nbytes = False, 0
            for entry in _selected(transaction, self._main, selection):
                nbytes += len(entry) + ENTRY_OVERHEAD_BYTES
                payload = transaction.get(entry, b"", db=self._main) if with_payloads else None
                if payload is not None:
                    nbytes += len(payload) + ENTRY_OVERHEAD_BYTES
                if len(entries) == limit or (entries and nbytes > bytes_max):
                    more = True
                    break
                entries.append(entry)
                if payload is not None:
                    payloads.append(payload)
            timestamps = self._timestamps(transaction) if with_timestamps else {}
            return ScanResult(entries, more, timestamps, payloads)

    def summarize(
        self,
        selection: Selection,
        *,
        count: bool = False,
        lowest: bool = False,
        highest: bool = False,
        settled: bool = True,
        with_timestamps: bool = False,
    ) -> Summary:
        """Finds out about entries without keeping them; see `scan`. To count takes O(entries), of
        distinct beginnings O(beginnings * log), of the whole index O(1); the rest O(log)."""
        with self._read(settled) as transaction:
            ascending = attrs.evolve(selection, descending=False)
            descending = attrs.evolve(selection, descending=True)
            entry_count = None
            if count and selection == Selection(descending=selection.descending):
                entry_count = int(transaction.stat(self._main)["entries"])
            elif count:
                entry_count = sum(1 for _ in _selected(transaction, self._main, ascending))
            return Summary(
                entry_count,
                next(_selected(transaction, self._main, ascending), None) if lowest else None,
                next(_selected(transaction, self._main, descending), None) if highest else None,
                self._timestamps(transaction) if with_timestamps else {},
            )

    def payloads(self) -> dict[bytes, bytes]:
        """All entries with their payloads."""
        with self._read(settled=False) as transaction:
            return dict(_between(transaction, self._main, b"", _END_OF_KEYS))

    def entry_count(self) -> int:
        """How many entries there are. O(1)."""
        with self._read(settled=False) as transaction:
            return int(transaction.stat(self._main)["entries"])

    @contextmanager
    def _read(self, settled: bool) -> Iterator[lmdb.Transaction[bytes]]:
        with _translated(self.path), self._env.begin() as transaction:
            if settled and self._unsettled_count(transaction):
                raise NotSettledError
            yield transaction

    def _unsettled_count(self, transaction: lmdb.Transaction[bytes]) -> int:
        data = transaction.get(_UNSETTLED, db=self._meta)
        return 0 if data is None else int(_COUNT.unpack(data)[0])

    def _timestamps(self, transaction: lmdb.Transaction[bytes]) -> Timestamps:
        return {
            PartitionId(_PARTITION.unpack(key[1:])[0]): timestamp(value)
            for key, value in _between(transaction, self._meta, _MARK, _MARKS_END)
        }

    def disk_bytes(self) -> int:
        """How large its file is."""
        return (self.path / "data.mdb").stat().st_size

    # The end.

    def close(self) -> None:
        """Closes the file. Nobody may read it any more."""
        self._is_closed = True
        self._env.close()

    def destroy(self) -> None:
        """Closes the file and removes it."""
        self.close()
        shutil.rmtree(self.path)

    def check_invariants(self) -> None:
        """For tests: the two trees tell of the same entries, and the marks are those on disk."""
        with self._read(settled=False) as transaction:
            main = set(_selected(transaction, self._main, Selection()))
            back = dict(_between(transaction, self._back, b"", _END_OF_KEYS))
            assert sorted(main) == sorted(
                entry for packed in back.values() for entry in _unpacked(packed)
            )
            for key, packed in back.items():
                assert all(entry.endswith(key[_PARTITION.size :]) for entry in _unpacked(packed))
            unsettled = sum(not mark.is_settled for mark in self.marks.values())
            assert self._unsettled_count(transaction) == unsettled
            for partition, (history_id, seq) in self._timestamps(transaction).items():
                assert (self.mark(partition).history_id, self.mark(partition).seq) == (
                    history_id,
                    seq,
                )


class _Trees:
    """The trees of entries in one transaction.

    It gathers the newest change of each document, and writes their entries in the order of the
    trees: neighbours share their pages.

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
        self._changes: dict[bytes, DocumentChange] = {}

    def add(self, prefix: bytes, changes: Iterable[DocumentChange]) -> None:
        """Notes documents' changes, in place of earlier ones of the same documents."""
        for change in changes:
            self._changes[prefix + change.key] = change

    def write(self) -> int:
        """Puts the entries of the noted changes in place of those that are there. O(n log n).

        Returns:
            How many documents' entries differ.
        """
        changes, self._changes = self._changes, {}
        back_keys = sorted(changes)
        with self._transaction.cursor(self._back) as cursor:
            old_entries = dict(cursor.getmulti(back_keys))
        removed: list[bytes] = []
        added: list[tuple[bytes, bytes]] = []
        moved: list[tuple[bytes, bytes]] = []
        changed = 0
        for back_key in back_keys:
            change, old_packed = changes[back_key], old_entries.get(back_key, b"")
            new: Sequence[bytes] = ()
            payload = b""
            if change.value is not None:
                new, payload = self._source.entries(change)
            new_packed = _packed(new)
            if not old_packed:
                # Most documents are new; the comparisons below would cost each of them 0.3 µs.
                if new:
                    moved.append((back_key, new_packed))
                    added += [(entry, payload) for entry in new]
                    changed += 1
                continue
            if new_packed != old_packed:
                if new:
                    moved.append((back_key, new_packed))
                else:
                    self._transaction.delete(back_key, db=self._back)
                old = _unpacked(old_packed)
                removed += set(old).difference(new)
            elif not self._source.has_payloads:
                continue
            else:
                old = new
            # All entries of a document have the same payload.
            if self._source.has_payloads and old and self._payload(old[0]) != payload:
                old = ()
            same = set(old)
            differing = [(entry, payload) for entry in new if entry not in same]
            added += differing
            changed += 1 if differing or new_packed != old_packed else 0
        for entry in sorted(removed):
            self._transaction.delete(entry, db=self._main)
        with self._transaction.cursor(self._back) as cursor:
            cursor.putmulti(moved)
        with self._transaction.cursor(self._main) as cursor:
            cursor.putmulti(sorted(added))
        return changed

    def _payload(self, entry: bytes) -> bytes:
        return self._transaction.get(entry, b"", db=self._main)

    def forget(self, prefix: bytes) -> int:
        """Removes all entries of a partition, those that were noted, too. O(its entries)."""
        count = self.write()
        with self._transaction.cursor(self._back) as cursor:
            has_key = cursor.set_range(prefix)
            while has_key and cursor.key().startswith(prefix):
                for entry in _unpacked(cursor.value()):
                    self._transaction.delete(entry, db=self._main)
                count += 1
                # A deletion moves the cursor to the next key.
                has_key = cursor.delete() and bool(cursor.key())
        return count


def _packed(entries: Sequence[bytes]) -> bytes:
    """A document's entries as the back tree has them."""
    return b"".join([_LENGTH.pack(len(entry)) + entry for entry in entries])


def _unpacked(data: bytes) -> Sequence[bytes]:
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
    # The index is still ahead of the stream, in the history that the stream is in now.
    ahead = previous.position
    position = Position(
        mark.position.log, ahead.last_complete, ahead.highest_received, ahead.partial
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


def _selected(
    transaction: lmdb.Transaction[bytes], tree: _Tree, selection: Selection
) -> Iterator[bytes]:
    """The entries of a selection, or the distinct beginnings of their keys, in its order."""
    ranges = selection.ranges[::-1] if selection.descending else selection.ranges
    parts = selection.distinct_parts
    with transaction.cursor(tree) as cursor:
        if not parts:
            read = _descending if selection.descending else _ascending
            for key_range in ranges:
                yield from read(cursor, key_range)
            return
        previous = None
        for key_range in ranges:
            for prefix in _prefixes(cursor, key_range, parts, descending=selection.descending):
                # Two ranges may have the ends of what begins the same.
                if prefix != previous:
                    yield prefix
                previous = prefix


def _ascending(cursor: _Cursor, key_range: KeyRange) -> Iterator[bytes]:
    has_key = cursor.set_range(key_range.low) if key_range.low else cursor.first()
    for key in cursor.iternext(keys=True, values=False) if has_key else iter(()):
        if key >= key_range.high:
            return
        yield key


def _descending(cursor: _Cursor, key_range: KeyRange) -> Iterator[bytes]:
    has_key = cursor.prev() if cursor.set_range(key_range.high) else cursor.last()
    for key in cursor.iterprev(keys=True, values=False) if has_key else iter(()):
        if key < key_range.low:
            return
        yield key


def _prefixes(
    cursor: _Cursor, key_range: KeyRange, parts: int, *, descending: bool
) -> Iterator[bytes]:
    """The different first `parts` parts in a range. Each costs a search for the next one, however
    many entries begin with it."""
    read = _descending if descending else _ascending
    while (entry := next(read(cursor, key_range), None)) is not None:
        prefix = entry[: end_of_parts(entry, parts)]
        yield prefix
        if descending:
            key_range = attrs.evolve(key_range, high=prefix)
        else:
            key_range = attrs.evolve(key_range, low=end_of_prefix(prefix))


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turns LMDB's errors into ours."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise IndexFileError(f"the index in {path} cannot be used: {error}") from error
