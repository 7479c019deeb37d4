"""An event store in an LMDB environment beside the node's data.

Its work is done in a thread, in batches: all that was asked for while the last batch was under way
is the next one, and all commits of a batch are one of LMDB's. A range that was read is read again
when the transaction commits, and compared.

**It is not synced,** but at a clean stop. After anything else what it held is thrown away, whole:
events that were in memory only are lost with a crash, so every consumer must look at everything
then in any case, and finds that out by not being known. So an event costs no fsync, which would
stand in line with those of the data.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.client.background import background
from upr_server.events.store import (
    Change,
    Clear,
    EventStore,
    Put,
    RangeRead,
    Transaction,
    operate,
    range_read,
)
from upr_server.storage.data_directory import sync
from upr_server.storage.environment import Environment, Reader, Writer
from upr_server.storage.errors import StorageError, StoreFailedError
from upr_server.storage.lmdb_store import LmdbEnvironment
from upr_server.storage.records import seal, unseal

MAP_BYTES: Final = 1024 * 1024 * 1024
"""How large its file may become. A queue takes some hundred bytes a bucket and consumer."""

log = structlog.get_logger(__name__)


@attrs.define
class _Read:
    first: bytes
    end: bytes
    limit: int
    found: RangeRead | None = None
    error: StorageError | None = None
    done: trio.Event = attrs.field(factory=trio.Event)


@attrs.define
class _Commit:
    transaction: Transaction
    is_done: bool = False
    error: StorageError | None = None
    done: trio.Event = attrs.field(factory=trio.Event)


class DiskStore(EventStore):
    """See the module.

    Args:
        environment: Where it is kept. Touched by `run` only.
        mark: The mark of a clean stop, which goes before anything is written.
    """

    def __init__(self, environment: Environment, mark: Path) -> None:
        super().__init__()
        self._mark: Path | None = mark
        self._environment = environment
        self._asked: list[_Read | _Commit] = []
        self._under_way: list[_Read | _Commit] = []
        self._wakeup = trio.Event()
        self._is_closed = False

    async def _read(self, first: bytes, end: bytes, limit: int) -> RangeRead:
        asked = _Read(first, end, limit)
        await self._ask(asked)
        assert asked.found is not None
        return asked.found

    async def _commit(self, transaction: Transaction) -> bool:
        asked = _Commit(transaction)
        await self._ask(asked)
        return asked.is_done

    async def _ask(self, asked: _Read | _Commit) -> None:
        if self._is_closed:
            raise StoreFailedError("the event store is closed")
        self._asked.append(asked)
        self._wakeup.set()
        await asked.done.wait()
        if asked.error is not None:
            raise asked.error

    async def run(self) -> None:
        """Does what is asked for, until it is cancelled."""
        try:
            while True:
                while not self._asked:
                    self._wakeup = trio.Event()
                    await self._wakeup.wait()
                self._under_way, self._asked = self._asked, []
                await trio.to_thread.run_sync(self._do, self._under_way)
                for asked in self._under_way:
                    asked.done.set()
                self._under_way = []
        finally:
            self._is_closed = True
            for asked in (*self._under_way, *self._asked):
                asked.error = StoreFailedError("the event store is closed")
                asked.done.set()

    # In the thread.

    def _do(self, batch: Sequence[_Read | _Commit]) -> None:
        reads = [asked for asked in batch if isinstance(asked, _Read)]
        commits = [asked for asked in batch if isinstance(asked, _Commit)]
        try:
            if reads:
                with self._environment.read() as reader:
                    for asked in reads:
                        rows = _rows(reader, asked.first, asked.end, asked.limit)
                        asked.found = range_read(asked.first, asked.end, asked.limit, rows)
            if commits:
                self._remove_mark()
                with self._environment.write() as writer:
                    done = [_commit(writer, one.transaction) for one in commits]
                for one, is_done in zip(commits, done, strict=True):
                    one.is_done = is_done
        except StorageError as error:
            for failed in batch:
                failed.error = error

    def _remove_mark(self) -> None:
        if self._mark is None:
            return
        try:
            self._mark.unlink(missing_ok=True)
            sync(self._mark.parent)
        except OSError as error:
            # Out of descriptors, for instance.
            raise StorageError(f"{self._mark} cannot be removed: {error}") from error
        self._mark = None


def _rows(reader: Reader, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
    rows = []
    for key, sealed in reader.scan(first, end):
        if key >= end:
            break
        rows.append((key, unseal(key, sealed)))
        if len(rows) == limit:
            break
    return rows


def _commit(writer: Writer, transaction: Transaction) -> bool:
    for read in transaction.reads:
        if tuple(_rows(writer, read.first, read.end, 0)) != read.rows:
            return False
    for change in transaction.changes:
        _change(writer, change)
    return True


def _change(writer: Writer, change: Change) -> None:
    if isinstance(change, Put):
        writer.put(change.key, seal(change.key, change.value))
    elif isinstance(change, Clear):
        for key, _ in _rows(writer, change.first, change.end, 0):
            writer.delete(key)
    else:
        found = writer.get(change.key)
        before = None if found is None else unseal(change.key, found)
        writer.put(change.key, seal(change.key, operate(before, change)))


# Its folder.


@asynccontextmanager
async def open_disk_store(path: Path) -> AsyncIterator[DiskStore]:
    """The store in a folder, for as long as the context. What was there is there again if the
    context was left without an exception the last time; else the store is empty.

    Raises:
        StorageError: It cannot be used.
        OSError: The same.
    """
    environment = await trio.to_thread.run_sync(_open, path)
    store = DiskStore(environment, _mark(path))
    try:
        async with background() as nursery:
            nursery.start_soon(store.run)
            yield store
        if store.is_whole:
            try:
                await trio.to_thread.run_sync(_mark_clean, environment, path)
            except (StorageError, OSError) as error:
                log.warning("the events are lost: consumers will begin anew", error=str(error))
    finally:
        environment.close()


def _mark(path: Path) -> Path:
    return path / "clean"


def _open(path: Path) -> LmdbEnvironment:
    if _mark(path).exists():
        try:
            environment = _environment(path)
            with environment.read() as reader:
                _rows(reader, b"\1", b"\xff", 0)
        except StorageError as error:
            log.warning("the event store is damaged, and begins anew", error=str(error))
        else:
            return environment
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
    path.mkdir()
    sync(path.parent)
    return _environment(path)


def _environment(path: Path) -> LmdbEnvironment:
    # One thread at a time uses it, so it needs no table of readers. That would be a file that is
    # written through a map: on a full disk, that kills the process.
    return LmdbEnvironment(path, bytes_max=MAP_BYTES, is_alone=True, is_synced=False)


def _mark_clean(environment: LmdbEnvironment, path: Path) -> None:
    environment.sync()
    _mark(path).touch()
    sync(path)
