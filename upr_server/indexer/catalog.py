"""The design documents that the stream has brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import trio

from upr_server.indexer.document_rows import DocumentRows
from upr_server.indexer.index_batch import DocumentChange
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.pipeline import PipelineMember
from upr_server.indexer.pure.definition import DESIGN_PREFIX, design_name


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

    def single_entries(self, rows: DocumentRows) -> None:
        """None: a design document's entry has a payload."""

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        """A design document's entry is its key; its text belongs to the entry."""
        if change.value is None:
            return (), b""
        return (change.key,), change.value

    async def current_designs(self) -> Mapping[str, bytes]:
        """The design documents, by name."""
        texts = await trio.to_thread.run_sync(self.file.payloads)
        return {design_name(key): text for key, text in texts.items()}
