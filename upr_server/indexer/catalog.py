"""How the indexer hears of design documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import trio

from upr_server.indexer.bell import Bell
from upr_server.indexer.definition import DESIGN_PREFIX
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.piece import Row
from upr_server.indexer.pipeline import Member


class Definitions(Protocol):
    """Tells which design documents there are, and that they have changed."""

    async def current(self) -> Mapping[str, bytes]:
        """The design documents, by name."""

    async def changed(self) -> None:
        """Waits until they may differ from what `current` gave last."""


class Catalog:
    """Finds design documents in the stream that the indexes are fed from anyway.

    They are kept as one more index of the running ones, so that a start knows them before the
    stream has begun, and a rollback takes them back like everything else.

    Args:
        file: Where they are kept.
    """

    def __init__(self, file: IndexFile) -> None:
        self.file = file
        self._bell = Bell()
        self._version = self._told = 0

    def member(self) -> Member:
        """It, for the running indexes' pipeline."""
        return Member(self.file, self, on_change=self._on_change)

    def entry(self, row: Row) -> tuple[bytes, bytes] | None:
        """See `Source`: a design document's entry is its key, and all of it belongs to that."""
        if row.value is None or not row.key.startswith(DESIGN_PREFIX):
            return None
        return row.key, row.value

    def _on_change(self) -> None:
        self._version += 1
        self._bell.ring()

    async def current(self) -> Mapping[str, bytes]:
        """See `Definitions`."""
        self._told = self._version
        found = await trio.to_thread.run_sync(self.file.payloads)
        cut = len(DESIGN_PREFIX)
        return {key[cut:].decode(errors="replace"): text for key, text in found.items()}

    async def changed(self) -> None:
        """See `Definitions`."""
        await self._bell.until(lambda: self._version != self._told)
