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
    """See the module.

    Args:
        ask: Asks the ledger, which is open.
    """

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask
        self._is_closed = False

    async def _read(self, first: bytes, end: bytes, limit: int) -> RangeRead:
        rows = await self._answer(ReadLedger(first, end, limit))
        return range_read(first, end, limit, rows)

    async def _commit(self, transaction: Transaction) -> bool:
        reads = [(read.first, read.end, read.rows) for read in transaction.reads]
        return bool(await self._answer(CommitLedger(reads, transaction.changes)))

    async def _answer(self, call: LedgerCall) -> Any:
        if self._is_closed:
            raise StoreFailedError("the event store is closed")
        return await self._ask(call)

    def close(self) -> None:
        """Asks no more."""
        self._is_closed = True


@asynccontextmanager
async def open_disk_store(ask: Ask) -> AsyncIterator[DiskStore]:
    """The store in a ledger, for as long as the context. What was there is there again if the
    context was left without an exception the last time; else the store is empty.

    Raises:
        StorageError: It cannot be used.
    """
    await ask(OpenLedger())
    store = DiskStore(ask)
    try:
        yield store
        if store.is_whole:
            try:
                await ask(FinishLedger())
            except StorageError as error:
                log.warning("the events are lost: consumers will begin anew", error=str(error))
    finally:
        store.close()
