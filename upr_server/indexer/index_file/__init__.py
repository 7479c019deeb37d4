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

from upr_server.indexer.index_file.entry_trees import EntrySource
from upr_server.indexer.index_file.errors import DiskFullError, IndexFileError, NotSettledError
from upr_server.indexer.index_file.file import IndexFile
from upr_server.indexer.index_file.scan_result import (
    ENTRY_OVERHEAD_BYTES,
    EndedBy,
    EntrySummary,
    ReadCounts,
    ScanResult,
    Timestamps,
    entries_bytes,
)
from upr_server.indexer.index_file.view import IndexFileToRead, IndexView

__all__ = [
    "ENTRY_OVERHEAD_BYTES",
    "DiskFullError",
    "EndedBy",
    "EntrySource",
    "EntrySummary",
    "IndexFile",
    "IndexFileError",
    "IndexFileToRead",
    "IndexView",
    "NotSettledError",
    "ReadCounts",
    "ScanResult",
    "Timestamps",
    "entries_bytes",
]
