"""One moment of an index on disk, for reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Final, Self

import attrs
import lmdb

from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer.entry_reader import EntryReader, EntrySelection
from upr_server.indexer.index_file.errors import FILE_BYTES_MAX, errors_of_index
from upr_server.indexer.index_file.meta_tree import MetaTree
from upr_server.indexer.index_file.scan_result import (
    ENTRY_OVERHEAD_BYTES,
    EndedBy,
    EntrySummary,
    ReadCounts,
    ScanResult,
    Timestamps,
)
from upr_server.indexer.index_file.tree import Tree
from upr_server.indexer.pool import ANSWER_BYTES_MAX

COUNT_STEP: Final = 10_000
"""After so many entries a count looks whether anybody still waits for it: some 2 ms."""


class IndexView:
    """One moment of an index, whatever is written meanwhile. For one thread at a time.

    While it is open, the index writes to no page that it shows: the file may grow.

    Args:
        env: The index.
        main: Its tree of entries.
        meta: Its tree of marks.
    """

    def __init__(self, env: lmdb.Environment, main: Tree, meta: Tree) -> None:
        self._env = env
        self._main = main
        self._path = Path(env.path())
        self._pages = self._last_page()
        self._transaction = env.begin()
        self._meta = MetaTree(self._transaction, meta)

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
        with errors_of_index(self._path), transaction.cursor(self._main) as cursor:
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
        with errors_of_index(self._path), self._transaction.cursor(self._main) as cursor:
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
        with errors_of_index(self._path):
            return self._meta.failure()

    def opening(self) -> str:
        """The opening of the file whose changes it shows; empty if the file was removed. O(1)."""
        with errors_of_index(self._path):
            return self._meta.opening()

    def is_built(self) -> bool:
        """Whether the index is complete. O(1)."""
        with errors_of_index(self._path):
            return self._meta.is_built()

    def unsettled_count(self) -> int:
        """How many partitions are between two states that the server had. O(1)."""
        with errors_of_index(self._path):
            return self._meta.unsettled_count()

    def timestamp(self, partition: PartitionId) -> tuple[HistoryId, SeqNo]:
        """How far a partition is. O(log partitions)."""
        with errors_of_index(self._path):
            return self._meta.timestamp(partition)

    def timestamps(self) -> Timestamps:
        """How far each partition is. O(partitions)."""
        with errors_of_index(self._path):
            return self._meta.timestamps()


class IndexFileToRead:
    """An index that another process writes. Not for one that this process has open.

    Args:
        path: Its folder.

    Raises:
        IndexFileError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with errors_of_index(path), ExitStack() as undo:
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
        with errors_of_index(self._path):
            return IndexView(self._env, self._main, self._meta)

    def close(self) -> None:
        """Closes the file."""
        self._env.close()


def _count(entries: Iterator[bytes], check_cancelled: Callable[[], None]) -> int:
    """How many entries there are. O(entries)."""
    total = 0
    while count := sum(1 for _ in islice(entries, COUNT_STEP)):
        total += count
        check_cancelled()
    return total
