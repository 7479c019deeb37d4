"""The ledger: rows and numbers of one node that all of its buckets have in common.

It is an LMDB environment of its own in the data directory, and keeps the queues of the event bus. A
commit says what it read before: when that is not so any more, nothing of it is done.

**It is not synced,** but at a clean stop. After anything else what it held is thrown away, whole:
who uses it must be able to begin anew. So a commit costs no fsync, which would stand in line with
those of the data.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, unique
from pathlib import Path
from struct import Struct
from typing import Any, Final

import msgspec

from upr_server.storage.calls import Call
from upr_server.storage.data_directory import sync
from upr_server.storage.environment import Reader, Writer
from upr_server.storage.errors import DataDirectoryError, StorageError, StoreFailedError
from upr_server.storage.lmdb_store import LmdbEnvironment
from upr_server.storage.records import seal, unseal

MAP_BYTES: Final = 1024 * 1024 * 1024
"""How large its file may become."""

NUMBER: Final = Struct("<Q")

_NUMBER_END: Final = 1 << 64

Row = tuple[bytes, bytes]
"""A key and its value."""


# What a commit does.


@unique
class Atomic(Enum):
    """An operation on a number."""

    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    ADD = "add"


class Put(msgspec.Struct, frozen=True, tag=True):
    """A key gets a value."""

    key: bytes
    value: bytes


class Clear(msgspec.Struct, frozen=True, tag=True):
    """The keys from `first` on, and below `end`, go."""

    first: bytes
    end: bytes


class Operate(msgspec.Struct, frozen=True, tag=True):
    """A number changes."""

    key: bytes
    atomic: Atomic
    operand: int


Change = Put | Clear | Operate


def operate(before: bytes | None, operation: Operate) -> bytes:
    """The number that an atomic operation leaves where `before` stood; None for nothing."""
    operand = operation.operand
    if before is None:
        return NUMBER.pack(operand)
    (value,) = NUMBER.unpack(before)
    if operation.atomic is Atomic.MINIMUM:
        value = min(value, operand)
    elif operation.atomic is Atomic.MAXIMUM:
        value = max(value, operand)
    else:
        value = (value + operand) % _NUMBER_END
    return NUMBER.pack(value)


# What is asked of it.


class OpenLedger(Call[str], frozen=True):
    """Before anything else: finds what a clean stop has left, or begins anew. It is answered with
    the damage for which that was, if there is any."""


class ReadLedger(Call[list[Row]], frozen=True):
    """The keys from `first` on, and below `end`, with their values, by rising key: `limit` of them
    at most, or all when it is 0."""

    first: bytes
    end: bytes
    limit: int


class CommitLedger(Call[bool], frozen=True):
    """Changes, in this order, all or none. Of each range in `reads` stands there what was found:
    where that has changed none is done, and it is answered so."""

    reads: Sequence[tuple[bytes, bytes, Sequence[Row]]]
    changes: Sequence[Change]


class FinishLedger(Call[None], frozen=True):
    """The server stops: what there is survives."""


LedgerCall = OpenLedger | ReadLedger | CommitLedger | FinishLedger

LEDGER_CALLS: Final = (OpenLedger, ReadLedger, CommitLedger, FinishLedger)


class Ledger:
    """See the module. To be used by one thread.

    Args:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = path / "clean"
        self._is_marked = False
        self._environment: LmdbEnvironment | None = None

    def answer(self, call: LedgerCall) -> Any:
        """Does what is asked.

        Raises:
            StorageError: It could not be done.
        """
        try:
            if isinstance(call, OpenLedger):
                return self._open()
            if isinstance(call, ReadLedger):
                return self._read(call)
            if isinstance(call, CommitLedger):
                return self._commit(call)
            return self._finish()
        except OSError as error:
            # Out of descriptors, for instance.
            raise DataDirectoryError(f"{self._path} cannot be used: {error}") from error

    def close(self) -> None:
        """Lets go of it."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    @property
    def _opened(self) -> LmdbEnvironment:
        if self._environment is None:
            raise StoreFailedError("the ledger is closed")
        return self._environment

    def _open(self) -> str:
        self.close()
        damage = ""
        if self._mark.exists():
            try:
                self._environment = self._left_by_a_clean_stop()
            except StorageError as error:
                damage = str(error)
        if self._environment is None:
            self._environment = self._new()
        self._is_marked = self._mark.exists()
        return damage

    def _left_by_a_clean_stop(self) -> LmdbEnvironment:
        environment = _environment(self._path)
        try:
            with environment.read() as reader:
                _rows(reader, b"\1", b"\xff", 0)
        except StorageError:
            environment.close()
            raise
        return environment

    def _new(self) -> LmdbEnvironment:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._path)
        self._path.mkdir()
        sync(self._path.parent)
        return _environment(self._path)

    def _read(self, call: ReadLedger) -> list[Row]:
        with self._opened.read() as reader:
            return _rows(reader, call.first, call.end, call.limit)

    def _commit(self, call: CommitLedger) -> bool:
        self._remove_mark()
        with self._opened.write() as writer:
            for first, end, rows in call.reads:
                if _rows(writer, first, end, 0) != list(rows):
                    return False
            for change in call.changes:
                _change(writer, change)
        return True

    def _remove_mark(self) -> None:
        if self._is_marked:
            self._mark.unlink(missing_ok=True)
            sync(self._path)
            self._is_marked = False

    def _finish(self) -> None:
        self._opened.sync()
        self._mark.touch()
        self._is_marked = True
        sync(self._path)


def _environment(path: Path) -> LmdbEnvironment:
    # One process uses it, so it needs no table of readers. That would be a file that is written
    # through a map: on a full disk, that kills the process.
    return LmdbEnvironment(path, bytes_max=MAP_BYTES, is_alone=True, is_synced=False)


def _rows(reader: Reader, first: bytes, end: bytes, limit: int) -> list[Row]:
    rows = []
    for key, sealed in reader.scan(first, end):
        if key >= end:
            break
        rows.append((key, unseal(key, sealed)))
        if len(rows) == limit:
            break
    return rows


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
