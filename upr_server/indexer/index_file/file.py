"""One index on disk: how it is opened, written and closed."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import lmdb

from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.entry_reader import END_OF_KEYS
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.index_file.entry_trees import (
    EntrySource,
    EntryTrees,
    check_trees_agree,
    write_changes,
)
from upr_server.indexer.index_file.errors import (
    FILE_BYTES_MAX,
    IndexFileError,
    NotSettledError,
    check_space,
    errors_of_index,
)
from upr_server.indexer.index_file.meta_tree import MetaTree
from upr_server.indexer.index_file.tree import items_between
from upr_server.indexer.index_file.view import IndexView
from upr_server.indexer.mark import NO_MARK, Mark


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
            with errors_of_index(path):
                path.mkdir(parents=True, exist_ok=True)
                if not (path / "lock.mdb").exists():
                    check_space(path)
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
            meta = MetaTree(transaction, self._meta)
            stored_bucket = meta.bucket()
            if stored_bucket and stored_bucket != bucket:
                raise IndexFileError(
                    f"{self.path} holds an index of the bucket {stored_bucket!r}, not of "
                    f"{bucket!r}; choose another --data-dir"
                )
            if not meta.has_format():
                for tree in (self._main, self._back, self._meta):
                    transaction.drop(tree, delete=False)
                meta.begin(bucket)
            meta.set_opening(self.opening)
            self._is_built = meta.is_built()
            self.failure = meta.failure()
            self.marks = meta.marks(bucket)

    @contextmanager
    def _write(self) -> Iterator[lmdb.Transaction[bytes]]:
        with errors_of_index(self.path), self._env.begin(write=True) as transaction:
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
            MetaTree(transaction, self._meta).set_built()
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
            trees = EntryTrees(transaction, self._main, self._back, source)
            changed = write_changes(trees, changes, first_seqs)
            meta = MetaTree(transaction, self._meta)
            self._put_marks(meta, marks)
            failure = source.failure
            if failure and not self.failure:
                meta.set_failure(failure)
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

    def _put_marks(self, meta: MetaTree, marks: Mapping[PartitionId, Mark]) -> None:
        unsettled_count = meta.unsettled_count()
        for partition, mark in marks.items():
            unsettled_count += self.mark(partition).is_settled - mark.is_settled
            meta.put_mark(self._bucket, partition, mark)
        meta.set_unsettled_count(unsettled_count)

    def sync(self) -> None:
        """Makes what was committed survive a crash of the machine."""
        if self._is_closed:
            return
        with errors_of_index(self.path):
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
        with errors_of_index(self.path):
            view = IndexView(self._env, self._main, self._meta)
        if settled and view.unsettled_count():
            view.close()
            raise NotSettledError
        return view

    def payloads(self) -> Iterator[tuple[bytes, bytes]]:
        """All entries with their payloads, in order. Take them all, in one thread."""
        with errors_of_index(self.path), self._env.begin() as transaction:
            yield from items_between(transaction, self._main, b"", END_OF_KEYS)

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
            MetaTree(transaction, self._meta).remove_opening()
        self.close()
        shutil.rmtree(self.path)

    def check_invariants(self) -> None:
        """For tests: the two trees tell of the same entries, and the marks are those on disk."""
        with self.open_view(settled=False) as view, self._env.begin() as transaction:
            check_trees_agree(transaction, self._main, self._back)
            unsettled_count = sum(not mark.is_settled for mark in self.marks.values())
            assert view.unsettled_count() == unsettled_count
            for partition, (history_id, seq) in view.timestamps().items():
                assert (self.mark(partition).history_id, self.mark(partition).seq) == (
                    history_id,
                    seq,
                )


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
