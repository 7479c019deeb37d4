"""The design documents that the stream has brought."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, takewhile
from typing import Final

import attrs
import trio

from upr_server.indexer.document_rows import DocumentRows
from upr_server.indexer.index_batch import DocumentChange
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.pipeline import PipelineMember
from upr_server.indexer.pure.definition import DESIGN_PREFIX, design_name, readable_text

CATALOG_BYTES_MAX: Final = 4 * 1024 * 1024
"""How long the design documents of a slice are together. Processes and nodes report them in one
message each time that one of them changes, and to parse so much takes up to a minute."""

DESIGN_OVERHEAD_BYTES: Final = 64
"""What a document counts for beside its name and its text."""

LEFT_OUT_MAX: Final = 100
"""How many documents are named at most that were left out."""


@attrs.frozen
class CatalogDesigns:
    """The design documents that a catalog has.

    Attributes:
        texts: Their texts, by name.
        left_out: The names of some that were left out, as all together were too long.
    """

    texts: Mapping[str, bytes]
    left_out: Sequence[str]


def shortest_designs(read: Callable[[], Iterable[tuple[bytes, bytes]]]) -> CatalogDesigns:
    """Of design documents the shortest that are `CATALOG_BYTES_MAX` together. O(n log n), and no
    more memory than these take.

    Args:
        read: Gives the keys and texts; called twice.
    """
    sizes = [
        (len(key) + len(readable_text(document)) + DESIGN_OVERHEAD_BYTES, key)
        for key, document in read()
    ]
    sizes.sort()
    totals = accumulate(size for size, _ in sizes)
    count = sum(1 for _ in takewhile(lambda total: total <= CATALOG_BYTES_MAX, totals))
    keys = {key for _, key in sizes[:count]}
    texts = {design_name(key): readable_text(document) for key, document in read() if key in keys}
    left_out = [design_name(key) for _, key in sizes[count : count + LEFT_OUT_MAX]]
    return CatalogDesigns(texts, left_out)


class DesignCatalog:
    """Finds design documents in the stream that the indexes are fed from anyway.

    They are kept as one more index of the running ones, so that a start knows them before the
    stream has begun, and a rollback takes them back like everything else.

    Args:
        file: Where they are kept.

    Attributes:
        file: Where they are kept.
        on_change: Called when they have changed; the owner of the indexes sets it.
        failure: Empty: it always makes entries.
        has_payloads: True: a design document's text belongs to its entry.
        key_prefix: What the keys of design documents begin with.
    """

    failure = ""
    has_payloads = True
    key_prefix = DESIGN_PREFIX

    def __init__(self, file: IndexFile) -> None:
        self.file = file
        self.on_change: Callable[[], None] = lambda: None

    def pipeline_member(self) -> PipelineMember:
        """The catalog as a member of the running indexes' pipeline."""
        return PipelineMember(self.file, self, on_change=self._note_change)

    def _note_change(self) -> None:
        self.on_change()

    def attempt(self) -> AbstractContextManager[None]:
        """Nothing is noted of documents here."""
        return nullcontext()

    def single_entries(self, rows: DocumentRows) -> None:
        """None: a design document's entry has a payload."""

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        """A design document's entry is its key; its text belongs to the entry."""
        if change.value is None:
            return (), b""
        return (change.key,), readable_text(change.value)

    async def current_designs(self) -> CatalogDesigns:
        """The design documents."""
        return await trio.to_thread.run_sync(shortest_designs, self.file.payloads)
