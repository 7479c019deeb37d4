"""Short scans of indexes that another process writes, without asking that process.

A worker's event loop shares its interpreter with the thread that writes, and on few cores its
process waits for a processor. To ask it takes 30 ms and more beside fast writers; to read a hundred
entries takes 0.2 ms. LMDB lets other processes read what was committed, so short scans that wait
for nothing are read here.

What there is, the worker says: an index is read here when the worker has answered a scan of it.
That answer names the opening of the file that it was read from, and the file names it, too. So a
file that the worker has removed, or opened again since, is not read.

A read waits for the disk if the pages are not in memory, and so does everything else in the event
loop: that is why only little is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import attrs

from upr_server.indexer.definitions import index_path
from upr_server.indexer.explanation import FreshnessLog
from upr_server.indexer.index_file import IndexFileError, IndexFileToRead
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.slice_scanner import read_answer
from upr_server.indexer.slices import SliceAnswer, SliceScan

OPEN_MAX: Final = 16
"""The most indexes of a slice that are open here. Each takes two file descriptors."""


@attrs.frozen
class _OpenIndex:
    """An index that is open to read.

    Attributes:
        definition: What the index is.
        opening: The worker's opening of the file.
        file: The file.
    """

    definition: IndexDefinition
    opening: str
    file: IndexFileToRead


class IndexReader:
    """Reads the indexes of a slice that another process writes.

    Args:
        folder: Where the slice is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._indexes: dict[IndexName, _OpenIndex] = {}
        """The one that was read last comes last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files. May be called again."""
        for name in list(self._indexes):
            self._forget(name)

    def _forget(self, name: IndexName) -> None:
        index = self._indexes.pop(name, None)
        if index is not None:
            index.file.close()

    def keep_only(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Closes the files of indexes that are defined otherwise, or no more. O(indexes)."""
        for name, index in list(self._indexes.items()):
            if definitions.get(name) != index.definition:
                self._forget(name)

    def add(self, scan: SliceScan, opening: str) -> None:
        """Opens an index of which the worker has answered a scan. Does nothing if the file cannot
        be read.

        Args:
            scan: The scan.
            opening: The opening that the answer names.
        """
        index = self._indexes.get(scan.name)
        if index is not None and (index.definition, index.opening) == (scan.definition, opening):
            # Scans that came together were all answered by the worker.
            return
        self._forget(scan.name)
        if len(self._indexes) == OPEN_MAX:
            self._forget(next(iter(self._indexes)))
        try:
            path = index_path(self._folder, scan.name, scan.definition)
            self._indexes[scan.name] = _OpenIndex(scan.definition, opening, IndexFileToRead(path))
        except IndexFileError:
            # The worker answers, or says what is wrong.
            return

    def answer(self, scan: SliceScan) -> SliceAnswer | None:
        """The answer to a short scan; None if the worker must be asked. O(entries)."""
        index = self._indexes.get(scan.name)
        if index is None or index.definition != scan.definition:
            return None
        selection = scan.query.selection(len(scan.definition.key))
        try:
            with index.file.open_view() as view:
                if view.opening() == index.opening and view.is_built() and not view.failure():
                    self._indexes[scan.name] = self._indexes.pop(scan.name)
                    return read_answer(view, scan, selection, FreshnessLog())
        except IndexFileError:
            # The worker answers, or says what is wrong.
            pass
        self._forget(scan.name)
        return None
