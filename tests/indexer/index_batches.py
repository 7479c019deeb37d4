"""Batches of changes for an index file, and its entries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_server.indexer.document_rows import DocumentRows, RoundChanges
from upr_server.indexer.entry_reader import EntrySelection, KeyRange
from upr_server.indexer.index_batch import DocumentChange, IndexBatch
from upr_server.indexer.index_file import (
    IndexFile,
    ScanResult,
)
from upr_server.indexer.mark import Mark

EVERYTHING = EntrySelection()
LOG = FailoverLog.of_pairs([(7, 0)])


class ByValue:
    """The entry of a document is its value; a document whose value begins with a minus has none."""

    failure = ""
    has_payloads = False
    key_prefix = b""

    def __init__(self, *, is_single: bool = True) -> None:
        self._is_single = is_single

    def attempt(self) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    def single_entries(self, rows: DocumentRows) -> list[bytes] | None:
        """Each document's entry; empty bytes if it has none."""
        if not self._is_single:
            return None
        return [b"".join(self.entries(change)[0]) for change in rows.changes()]

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        if change.value is None or change.value.startswith(b"-"):
            return (), b""
        return (b"\x09" + change.value + change.key,), b""


def whole(seq: int) -> Mark:
    """The mark at the end of a snapshot."""
    return Mark(Position(LOG, SeqNo(seq), SeqNo(seq)))


def batch(
    partition: int, mark: Mark, items: Sequence[tuple[int, bytes, bytes | None]]
) -> IndexBatch:
    """A batch that sets items, and deletes those without a value: (number, key, value)."""
    chunks = []
    if items:
        mutations = [
            Mutation(
                Operation.DELETE if value is None else Operation.SET, key, value or b"", SeqNo(seq)
            )
            for seq, key, value in items
        ]
        chunks = [Chunk.build(mutations)]
    return IndexBatch(PartitionId(partition), mark, chunks)


def apply(file: IndexFile, *batches: IndexBatch, is_single: bool = True) -> int:
    """Applies batches in one round, with `ByValue`; how many documents' entries changed."""
    return file.apply_changes(RoundChanges(batches), ByValue(is_single=is_single))


def entries(file: IndexFile, low: bytes = b"", high: bytes = b"\xff") -> list[bytes]:
    """All entries of a range."""
    return scan(file, EntrySelection((KeyRange(low, high),)), 10**6).entries


def scan(
    file: IndexFile,
    selection: EntrySelection = EVERYTHING,
    limit: int = 9,
    bytes_max: int = 10**6,
    *,
    settled: bool = True,
) -> ScanResult:
    with file.open_view(settled=settled) as view:
        return view.scan(selection, limit, bytes_max=bytes_max)
