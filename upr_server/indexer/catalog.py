"""The design documents that the stream has brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from upr_server.indexer.definition import DESIGN_PREFIX, design_name
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.piece import Row
from upr_server.indexer.pipeline import Member


class Catalog:
    """Finds design documents in the stream that the indexes are fed from anyway.

    They are kept as one more index of the running ones, so that a start knows them before the
    stream has begun, and a rollback takes them back like everything else.

    Args:
        file: Where they are kept.
        on_change: Called when they have changed.
    """

    def __init__(self, file: IndexFile, on_change: Callable[[], None]) -> None:
        self.file = file
        self._on_change = on_change

    def member(self) -> Member:
        """It, for the running indexes' pipeline."""
        return Member(self.file, self, on_change=self._on_change)

    def entry(self, row: Row) -> tuple[bytes, bytes] | None:
        """See `Source`: a design document's entry is its key, and all of it belongs to that."""
        if row.value is None or not row.key.startswith(DESIGN_PREFIX):
            return None
        return row.key, row.value

    async def current(self) -> Mapping[str, bytes]:
        """The design documents, by name."""
        found = await trio.to_thread.run_sync(self.file.payloads)
        return {design_name(key): text for key, text in found.items()}
