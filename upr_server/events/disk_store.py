"""An event store in the ledger of the node's disk, beside its data.

Each read and each commit is a call to the process that has the ledger open. In a thread of this
process it would wait, beside a busy loop, for Python's global lock after every call of LMDB; and
while it waits, the loop wakes it whenever it lets go of the lock for a moment. That made ingest a
tenth slower.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from upr_server.events.memory_store import MemoryStore
from upr_server.events.store import EventStore, RangeRead, Transaction, range_read
from upr_server.storage.errors import StorageError, StoreFailedError
from upr_server.storage.ledger import (
    CommitLedger,
    FinishLedger,
    LedgerCall,
    OpenLedger,
    ReadLedger,
)

log = structlog.get_logger(__name__)

Ask = Callable[[LedgerCall], Awaitable[Any]]
"""Has the ledger answer."""


class DiskStore(EventStore):
    """See the module. Where the ledger cannot be had, as on a full disk, it is in memory: nobody's
    data depends on it.

    Args:
        ask: Asks the ledger.
    """

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask
        self._instead: MemoryStore | None = None
        self._is_open = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """See `EventStore`. What was there is there again if the context was left without an
        exception the last time; else the store is empty."""
        try:
            damage = await self._ask(OpenLedger())
            if damage:
                log.warning("the ledger is damaged, and begins anew", error=damage)
        except StorageError as error:
            log.warning("events are kept in memory only", error=str(error))
            self._instead = MemoryStore()
        self._is_open = True
        try:
            yield
            if self.is_whole and self._instead is None:
                await self._finish()
        finally:
            self._is_open = False

    async def _finish(self) -> None:
        try:
            await self._ask(FinishLedger())
        except StorageError as error:
            log.warning("the events are lost: consumers will begin anew", error=str(error))

    async def read(self, first: bytes, end: bytes, limit: int) -> RangeRead:
        """See `EventStore`."""
        if self._instead is not None:
            return await self._instead.read(first, end, limit)
        rows = await self._answer(ReadLedger(first, end, limit))
        return range_read(first, end, limit, rows)

    async def commit(self, transaction: Transaction) -> bool:
        """See `EventStore`."""
        if self._instead is not None:
            return await self._instead.commit(transaction)
        reads = [(read.first, read.end, read.rows) for read in transaction.reads]
        return bool(await self._answer(CommitLedger(reads, transaction.changes)))

    async def _answer(self, call: LedgerCall) -> Any:
        if not self._is_open:
            raise StoreFailedError("the event store is closed")
        return await self._ask(call)
