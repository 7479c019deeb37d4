"""The SQLite database of a local copy: its schema, how to read it, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from upr_protocol.client.core.key_lookup import Item
from upr_protocol.client.core.resume_state import ResumeState, ResumeStateError
from upr_protocol.errors import UprError
from upr_protocol.ids import Cas, HistoryId, PartitionId, SeqNo

T = TypeVar("T")

FILE_NAME: Final = "map.sqlite"
"""The name that the first release gave it; there are copies that have it."""

_VERSION: Final = 1

_UINT64_BYTES: Final = 8

_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Kinds of errors that the next process meets as well."""

_DISK_FAILURES: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
"""Kinds of errors that say nothing about what is in the file."""

_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE partitions (
    partition INTEGER PRIMARY KEY,
    position BLOB,                     -- as in a resume file
    complete INTEGER NOT NULL DEFAULT 0, -- whether it is what the server had at last_complete
    last_complete INTEGER NOT NULL DEFAULT 0,
    floor INTEGER NOT NULL DEFAULT 0   -- deletions at or below may be forgotten
);
CREATE TABLE items (
    partition INTEGER NOT NULL,
    key BLOB NOT NULL,
    value BLOB,                        -- NULL: deleted
    seq INTEGER NOT NULL,
    history BLOB NOT NULL,             -- a history that has the change
    cas BLOB NOT NULL,
    flags INTEGER NOT NULL,
    expiry INTEGER NOT NULL,
    UNIQUE (partition, key)
);
CREATE INDEX by_history ON items (partition, history, seq);
CREATE INDEX deletions ON items (partition) WHERE value IS NULL;
"""

ITEM_COLUMNS: Final = "partition, key, value, seq, history, cas, flags, expiry"
ItemRow = tuple[int, bytes, bytes | None, int, bytes, bytes, int, int]
"""A row of `items` with these columns."""


class LocalCopyError(UprError, ValueError):
    """The directory does not hold a local copy, it is damaged, or another process is using it."""


class LocalCopyWriteError(UprError, sqlite3.Error):
    """The local copy cannot be read or written: the disk is full, or fails. What was not committed
    is lost; the next process goes on from the last commit."""


def connect_database(path: Path) -> sqlite3.Connection:
    """Opens the file. Transactions are begun and ended explicitly; threads may take turns."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


@contextmanager
def translated_errors(directory: Path) -> Iterator[None]:
    """Raises what SQLite says when it opens a file as an error of the local copy.

    Raises:
        LocalCopyError: The file is not a local copy.
        LocalCopyWriteError: The disk is full, or fails.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        if _kind(error) in _DISK_FAILURES:
            raise use_error(directory, error) from error
        raise _unreadable_error(directory, error) from error
    except UnicodeDecodeError as error:
        # SQLite's message quotes the damaged schema.
        raise _unreadable_error(directory, error) from error


def use_error(directory: Path, error: sqlite3.Error) -> LocalCopyError | LocalCopyWriteError:
    """The error for what SQLite says of a file that is open: it is damaged; or the disk is full, or
    fails."""
    if _kind(error) in _DAMAGE:
        return _unreadable_error(directory, error)
    return LocalCopyWriteError(
        f"{directory}: {error}; check that the disk has room and is writable, then start again: "
        "the copy continues from the last commit"
    )


def _unreadable_error(directory: Path, error: Exception) -> LocalCopyError:
    return LocalCopyError(
        f"{directory} does not hold a readable local copy: {error}; name another directory"
    )


def check_type(value: object, kind: type[T]) -> T:
    """A value of a column whose values are all of this type. SQLite does not compare bytes with a
    checksum, and damage may make one type another.

    Raises:
        sqlite3.DatabaseError: The value is damaged.
    """
    if isinstance(value, kind):
        return value
    raise _damage(f"a value is {value!r:.50}, not of type {kind.__name__}")


def parse_uint64_blob(blob: object) -> int:
    """The value of a column that `uint64_blob` made. Raises as `check_type`."""
    data = check_type(blob, bytes)
    if len(data) != _UINT64_BYTES:
        raise _damage(f"a number has {len(data)} bytes, and not {_UINT64_BYTES}")
    return int.from_bytes(data, "big")


def _damage(sentence: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(sentence)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _kind(error: sqlite3.Error) -> int:
    """SQLite's code without the details in its upper bits; 0 if it did not come from SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def create_if_missing(database: sqlite3.Connection, bucket: str) -> None:
    """Creates the tables of a new database."""
    query = "SELECT 1 FROM sqlite_master WHERE name = 'meta'"
    with closing(database.execute(query)) as cursor:
        if cursor.fetchone() is not None:
            return
    database.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA.split(";\n"):
        database.execute(statement)
    database.executemany(
        "INSERT INTO meta VALUES (?, ?)", [("version", str(_VERSION)), ("bucket", bucket)]
    )
    database.execute("COMMIT")


def read_resume_state(database: sqlite3.Connection, directory: Path) -> ResumeState:
    """The resume state as it was committed last.

    Raises:
        LocalCopyError: The copy has another version, or is damaged.
    """
    meta = dict(database.execute("SELECT name, value FROM meta").fetchall())
    if meta.get("version") != str(_VERSION) or "bucket" not in meta:
        raise LocalCopyError(
            f"{directory} does not hold a local copy of version {_VERSION}; name another directory"
        )
    state = ResumeState(meta["bucket"])
    for (position,) in database.execute(
        "SELECT position FROM partitions WHERE position IS NOT NULL"
    ).fetchall():
        try:
            state.positions.update(ResumeState.decode(position).positions)
        except ResumeStateError as error:
            raise _unreadable_error(directory, error) from error
    return state


def get_item(database: sqlite3.Connection, partition: int, key: bytes) -> Item | None:
    """The item at `key` of a partition."""
    row = database.execute(
        f"SELECT {ITEM_COLUMNS} FROM items WHERE partition = ? AND key = ? AND value IS NOT NULL",
        (partition, key),
    ).fetchone()
    return None if row is None else _item(row)


def count_items(database: sqlite3.Connection) -> int:
    """How many items there are."""
    (count,) = database.execute("SELECT count(*) FROM items WHERE value IS NOT NULL").fetchone()
    return int(count)


def _item(row: ItemRow) -> Item:
    """The item of a row that is not a deletion. Raises as `check_type`."""
    partition, key, value, seq, history, cas, flags, expiry = row
    return Item(
        check_type(key, bytes),
        check_type(value, bytes),
        Cas(parse_uint64_blob(cas)),
        check_type(flags, int),
        check_type(expiry, int),
        SeqNo(check_type(seq, int)),
        PartitionId(check_type(partition, int)),
        HistoryId(parse_uint64_blob(history)),
    )


def uint64_blob(value: int) -> bytes:
    """A column's value for 64 bits without a sign; SQLite's integers have one."""
    return value.to_bytes(_UINT64_BYTES, "big")


class LocalCopyReader:
    """Reads a local copy as it was committed last, also while another process follows. Its `state`
    is the resume state when the copy was opened.

    Each method raises `LocalCopyError` if the directory does not hold a local copy, or a damaged
    one; and `LocalCopyWriteError` if the disk fails.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        path = Path(directory) / FILE_NAME
        if not path.is_file():
            raise LocalCopyError(
                f"{directory} does not hold a local copy; name the directory of `upr tail --state` "
                "or of keep_local_copy"
            )
        self._database = connect_database(path)
        try:
            with translated_errors(self._directory):
                self.state = read_resume_state(self._database, self._directory)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Closes the copy."""
        self._database.close()

    def __len__(self) -> int:
        with self._reading():
            return count_items(self._database)

    def get(self, partition: int, key: bytes) -> Item | None:
        """The item at `key` of a partition."""
        with self._reading():
            return get_item(self._database, partition, key)

    def items(self) -> Iterator[Item]:
        """Every item, by partition and key, in one consistent read."""
        with self._reading():
            rows = self._database.execute(
                f"SELECT {ITEM_COLUMNS} FROM items WHERE value IS NOT NULL ORDER BY partition, key"
            )
        return self._items(rows)

    def _items(self, rows: sqlite3.Cursor) -> Iterator[Item]:
        with self._reading():
            yield from map(_item, rows)

    def rollback_floors(self) -> dict[PartitionId, SeqNo]:
        """By partition the lowest rollback target; a rollback below it starts at 0."""
        return self._numbers("SELECT partition, floor FROM partitions")

    def consistent_ends(self) -> dict[PartitionId, SeqNo]:
        """By partition the snapshot end at which the copy equals what the server had. A partition
        inside a snapshot is missing."""
        return self._numbers("SELECT partition, last_complete FROM partitions WHERE complete")

    def _numbers(self, query: str) -> dict[PartitionId, SeqNo]:
        with self._reading():
            return {
                PartitionId(partition): SeqNo(check_type(number, int))
                for partition, number in self._database.execute(query)
            }

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake of the caller, who has closed it
        except sqlite3.DatabaseError as error:
            raise use_error(self._directory, error) from error
