"""The port to a transactional store of ordered keys: what the event bus asks, and no more.

It is written so that FoundationDB or etcd fit behind it as they are; `tests/events/conformance.py`
says what such a store must pass.

- Keys and values are bytes; a number is 8 bytes, little-endian, without a sign.
- A transaction reads first and then changes: it does not see its own changes (etcd could not), and
  a read after a change is refused.
- No two changes of one transaction concern the same key (etcd refuses that), but for operations on
  one number, which are done in their order.
- Each read sees a commit, and two may see different ones; but when a transaction that changes
  something has committed, all that it read was so at one moment.
- **Conflicts.** When the transaction commits, every range that it read must still hold what it
  read; else nothing of it is done, and it is run again, from its beginning. So its body has no
  effect beside the transaction. A snapshot read is left out of this.
- **Atomic operations** conflict with nobody, but with those who read. A number that is not there is
  0 for `add` and `maximum`; `minimum` puts its operand there. A store that has no such operations
  reads, computes and compares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import attrs
import trio

from upr_server.storage.errors import StorageError
from upr_server.storage.ledger import Atomic, Change, Clear, Operate, Put, Row

T = TypeVar("T")

ATTEMPTS_MAX: Final = 1000
"""So often in a row nobody loses to those who write every 25 ms; who does has met a fault."""


class ConflictError(StorageError):
    """A transaction met conflicts only."""


@attrs.frozen
class RangeRead:
    """What a transaction read, and found.

    Attributes:
        first: From this key on.
        end: Below this key. Of a read that was cut short by its limit, just behind its last row.
        rows: What was there, by rising key.
        version: The commit that it saw, where the store counts them.
    """

    first: bytes
    end: bytes
    rows: tuple[Row, ...]
    version: int = 0


def range_read(
    first: bytes, end: bytes, limit: int, rows: list[Row], version: int = 0
) -> RangeRead:
    """What was read, where `rows` are all that there are, or the first `limit` of them and more."""
    if limit and len(rows) >= limit:
        rows = rows[:limit]
        end = rows[-1][0] + b"\0"
    return RangeRead(first, end, tuple(rows), version)


class Transaction:
    """One attempt: what was read, and what is to change.

    Args:
        read: Reads a range: first key, end, and how many rows at most.

    Attributes:
        reads: What must still be so when it commits.
        changes: What it does then, in this order.
    """

    def __init__(self, read: Callable[[bytes, bytes, int], Awaitable[RangeRead]]) -> None:
        self.reads: list[RangeRead] = []
        self.changes: list[Change] = []
        self._read = read

    async def read(
        self, first: bytes, end: bytes, *, limit: int = 0, snapshot: bool = False
    ) -> tuple[Row, ...]:
        """The keys from `first` on, and below `end`, with their values, by rising key.

        Args:
            first: The first key.
            end: Below which key.
            limit: How many at most; 0 for all.
            snapshot: Whether others may change what was read before this commits.

        Raises:
            StorageError: The store cannot tell.
        """
        assert not self.changes, "a transaction reads first"
        found = await self._read(first, end, limit)
        if not snapshot:
            self.reads.append(found)
        return found.rows

    def put(self, key: bytes, value: bytes) -> None:
        """Sets a key."""
        self.changes.append(Put(key, value))

    def clear(self, first: bytes, end: bytes) -> None:
        """Takes away the keys from `first` on, and below `end`."""
        self.changes.append(Clear(first, end))

    def minimum(self, key: bytes, operand: int) -> None:
        """Lowers a number to `operand`, if it is above."""
        self.changes.append(Operate(key, Atomic.MINIMUM, operand))

    def maximum(self, key: bytes, operand: int) -> None:
        """Raises a number to `operand`, if it is below."""
        self.changes.append(Operate(key, Atomic.MAXIMUM, operand))

    def add(self, key: bytes, operand: int) -> None:
        """Adds to a number."""
        self.changes.append(Operate(key, Atomic.ADD, operand))


class EventStore(ABC):
    """A store: two methods, and what makes transactions of them.

    Attributes:
        is_whole: Whether what it holds may be used after a restart.
    """

    def __init__(self) -> None:
        self.is_whole = True

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """It can be used for as long as the context.

        Raises:
            StorageError: It cannot.
        """
        await trio.lowlevel.checkpoint()
        yield

    async def transact(self, body: Callable[[Transaction], Awaitable[T]]) -> T:
        """Runs `body` until it meets no conflict; gives what it gave last.

        Cancelled, all of the transaction was done or nothing.

        Raises:
            StorageError: The store failed, or was full; nobody knows whether it was done.
            ConflictError: There were conflicts every time.
        """
        for _ in range(ATTEMPTS_MAX):
            transaction = Transaction(self.read)
            result = await body(transaction)
            if not transaction.changes or await self.commit(transaction):
                return result
            await trio.lowlevel.checkpoint()
        raise ConflictError(f"a transaction met {ATTEMPTS_MAX} conflicts in a row")

    @abstractmethod
    async def read(self, first: bytes, end: bytes, limit: int) -> RangeRead:
        """Reads the newest commit; `limit` rows at most, or all when it is 0."""

    @abstractmethod
    async def commit(self, transaction: Transaction) -> bool:
        """Does the changes, all or none: none when a range does not hold what was read."""
