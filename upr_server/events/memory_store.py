"""An event store in memory: for tests, and for servers that keep nothing.

It finds conflicts in another way than the one on disk does: as FoundationDB, by what was written
since, and not by what is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final

import trio
from sortedcontainers import SortedDict

from upr_server.events.store import EventStore, RangeRead, Transaction, range_read
from upr_server.storage.ledger import Change, Clear, Put, operate

COMMITS_KEPT: Final = 256
"""A transaction that began so many commits ago is taken to have met a conflict."""


class MemoryStore(EventStore):
    """See the module. What it holds outlives any run of the loop.

    Args:
        pause: Waits a moment before each step, so that others come between; by default it is a
            checkpoint.
    """

    def __init__(self, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__()
        self._pause = trio.lowlevel.checkpoint if pause is None else pause
        self._rows: SortedDict[bytes, bytes] = SortedDict()
        self._version = 0
        self._commits: deque[tuple[int, Sequence[Change]]] = deque(maxlen=COMMITS_KEPT)

    def __len__(self) -> int:
        return len(self._rows)

    async def read(self, first: bytes, end: bytes, limit: int) -> RangeRead:
        """See `EventStore`."""
        await self._pause()
        keys = self._rows.irange(first, end, inclusive=(True, False))
        rows = [(key, self._rows[key]) for key in islice(keys, limit or None)]
        return range_read(first, end, limit, rows, self._version)

    async def commit(self, transaction: Transaction) -> bool:
        """See `EventStore`."""
        await self._pause()
        if any(self._has_changed(read) for read in transaction.reads):
            return False
        self._version += 1
        self._commits.append((self._version, transaction.changes))
        for change in transaction.changes:
            self._do(change)
        return True

    def _has_changed(self, read: RangeRead) -> bool:
        if self._version - read.version > len(self._commits):
            return True
        return any(
            version > read.version and _overlaps(change, read)
            for version, changes in self._commits
            for change in changes
        )

    def _do(self, change: Change) -> None:
        if isinstance(change, Put):
            self._rows[change.key] = change.value
        elif isinstance(change, Clear):
            span = self._rows.irange(change.first, change.end, inclusive=(True, False))
            for key in list(span):
                del self._rows[key]
        else:
            self._rows[change.key] = operate(self._rows.get(change.key), change)


def _overlaps(change: Change, read: RangeRead) -> bool:
    if isinstance(change, Clear):
        return change.first < read.end and read.first < change.end
    return read.first <= change.key < read.end
