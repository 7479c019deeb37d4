"""A materialised map's file: an SQLite database, in which data and resume state change together."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeVar

import trio

from upr_protocol.chunk import Chunk
from upr_protocol.client.keyvalue import Item
from upr_protocol.client.resume import ResumeState, ResumeStateError
from upr_protocol.client.rollback.planner import RollbackPlan
from upr_protocol.client.rollback.received_keys import ForeignKeys
from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, Cas, HistoryId, Operation, PartitionId, SeqNo

T = TypeVar("T")

_VERSION: Final = 1
_NAME: Final = "map.sqlite"

_DISK_FAILS: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
"""Kinds of errors that say nothing of what is in the file."""

DELETIONS_MAX: Final = 200_000
"""Deletions that are remembered, so that they can be undone."""

_FORGET_EVERY: Final = 64
"""Commits between two looks at what may be forgotten; counting takes a while."""

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
    history BLOB NOT NULL,             -- the branch in which seq was given
    cas BLOB NOT NULL,
    flags INTEGER NOT NULL,
    expiry INTEGER NOT NULL,
    UNIQUE (partition, key)
);
CREATE INDEX by_history ON items (partition, history, seq);
CREATE INDEX deletions ON items (partition) WHERE value IS NULL;
"""

_HISTORIES: Final = """
WITH RECURSIVE found(history) AS (
    SELECT min(history) FROM items WHERE partition = :partition
    UNION ALL
    SELECT (SELECT min(history) FROM items
            WHERE partition = :partition AND history > found.history)
    FROM found WHERE found.history IS NOT NULL)
SELECT history FROM found WHERE history IS NOT NULL
"""

_COLUMNS: Final = "partition, key, value, seq, history, cas, flags, expiry"
_PUT: Final = f"INSERT OR REPLACE INTO items ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_Row = tuple[int, bytes, bytes | None, int, bytes, bytes, int, int]


class MapError(UprError, ValueError):
    """The directory holds no map, or it is in use."""


class MapWriteError(UprError, sqlite3.Error):
    """The map could not be read or written: the disk is full, or it fails. What was not committed
    is gone; whoever follows next goes on from the last commit."""


def _octets(number: int) -> bytes:
    # SQLite's integers have a sign.
    return number.to_bytes(8, "big")


def _item(row: _Row) -> Item:
    partition, key, value, seq, history, cas, flags, expiry = row
    return Item(
        key,
        value or b"",
        Cas(int.from_bytes(cas, "big")),
        flags,
        expiry,
        SeqNo(seq),
        PartitionId(partition),
        HistoryId(int.from_bytes(history, "big")),
    )


class MapFile:
    """The file, open for the one who follows. All but `open` and `close` is for one task.

    Once anything failed, all that is left to do is to close it: SQLite may have taken back the
    whole transaction, and positions must not outlive the items that they stand for.

    Attributes:
        state: The resume state as it was when the file was opened.
        broken: Whether something failed.
    """

    def __init__(
        self,
        directory: Path,
        database: sqlite3.Connection,
        lock: int,
        state: ResumeState,
        deletions_max: int,
    ) -> None:
        self._directory = directory
        self._database = database
        self._lock = lock
        self.state = state
        self.broken = False
        self._deletions_max = deletions_max
        self._moved: dict[PartitionId, tuple[Position, SeqNo]] = {}
        self._commits = 0
        # Whoever follows and whoever reads take turns.
        self._turn = trio.CapacityLimiter(1)

    @classmethod
    def open(cls, directory: Path, bucket: str, deletions_max: int = DELETIONS_MAX) -> MapFile:
        """The map in `directory`, made when there is none.

        Raises:
            MapError: It is no map, in use, or of another version.
            MapWriteError: The disk is full, or it fails.
            ResumeStateError: It is of another bucket.
            OSError: It cannot be read or written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise MapError(f"{directory} is in use by another process") from error
            database = _connect(directory / _NAME)
            try:
                with _as_map_error(directory):
                    database.execute("PRAGMA journal_mode = WAL")
                    # What a power cut takes is read again: the resume state goes with it.
                    database.execute("PRAGMA synchronous = NORMAL")
                    if not _is_made(database):
                        _make(database, bucket)
                    state = _read_state(database, directory)
                    database.execute("BEGIN IMMEDIATE")
                try:
                    state.check_bucket(bucket)
                except ResumeStateError as error:
                    raise ResumeStateError(f"{directory}: {error}") from error
                return cls(directory, database, lock, state, deletions_max)
            except BaseException:
                database.close()
                raise
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Closes the file; what was not committed is gone."""
        self._database.close()
        os.close(self._lock)

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Does something with the database.

        Raises:
            MapWriteError: It failed, now or before.
        """
        return await trio.to_thread.run_sync(self._guard, function, *args, limiter=self._turn)

    def _guard(self, function: Callable[..., T], *args: object) -> T:
        if self.broken:
            raise MapWriteError(
                f"{self._directory} could not be written before; start again, to go on from what "
                "was committed last"
            )
        try:
            # A failure may end the transaction; what is written after it would last on its own.
            if not self._database.in_transaction:
                raise sqlite3.OperationalError("the transaction is gone")
            return function(*args)
        except sqlite3.Error as error:
            self._break()
            raise _write_error(self._directory, error) from error
        except BaseException:
            self._break()
            raise

    def _break(self) -> None:
        self.broken = True
        self._moved.clear()
        if self._database.in_transaction:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    # Changes. They are seen by others, and last, once they are committed.

    async def put(self, partition: PartitionId, log: FailoverLog, chunk: Chunk) -> None:
        """What a chunk does to the map."""
        rows = [
            (
                partition,
                mutation.key,
                mutation.value if mutation.op is Operation.SET else None,
                mutation.seq,
                _octets(log.branch_of(mutation.seq)),
                _octets(mutation.cas),
                mutation.flags,
                mutation.expiry,
            )
            for mutation in chunk
        ]
        await self._run(self._database.executemany, _PUT, rows)

    async def undo(self, plan: RollbackPlan) -> None:
        """Puts what was read again in the place of what the server never had."""
        event, versions = plan.event, plan.versions
        if versions is None:
            await self._run(self._drop, event.partition)
            return
        rows: list[_Row] = []
        for key, version in versions.items():
            item = event.documents[key]
            history = _octets(version.history_id)
            if item is None:
                rows.append((event.partition, key, None, version.seq, history, bytes(8), 0, 0))
            else:
                cas = _octets(item.cas)
                rows.append(
                    (event.partition, key, item.value, version.seq, history, cas, item.flags,
                     item.expiry)
                )  # fmt: skip
        await self._run(self._database.executemany, _PUT, rows)

    def _drop(self, partition: PartitionId) -> None:
        self._database.execute("DELETE FROM items WHERE partition = ?", (partition,))
        self._database.execute("DELETE FROM partitions WHERE partition = ?", (partition,))

    def move(self, partition: PartitionId, position: Position, settled: SeqNo) -> None:
        """A partition has come to `position`; it is settled from `settled` on."""
        self._moved[partition] = (position, settled)

    async def commit(self) -> None:
        """Makes everything so far last."""
        await self._run(self._commit)

    def _commit(self) -> None:
        database = self._database
        for partition, (position, settled) in self._moved.items():
            state = ResumeState(self.state.bucket, {partition: position})
            complete = position.partial is None and position.last_complete >= settled
            database.execute(
                "INSERT INTO partitions (partition, position, complete, last_complete)"
                " VALUES (?1, ?2, ?3, ?4) ON CONFLICT (partition)"
                " DO UPDATE SET position = ?2, complete = ?3, last_complete = ?4",
                (partition, state.encode(), complete, position.last_complete),
            )
        self._commits += 1
        if not self._commits % _FORGET_EVERY:
            self._forget_deletions()
        database.execute("COMMIT")
        self._moved.clear()
        database.execute("BEGIN IMMEDIATE")

    def _forget_deletions(self) -> None:
        """Lets go of the oldest deletions that are too many, where everything is the server's."""
        database = self._database
        settled = [p for p, (_, settled) in self._moved.items() if settled != SEQ_MAX]
        for partition in settled:
            where = "partition = ? AND value IS NULL"
            (count,) = database.execute(
                f"SELECT count(*) FROM items WHERE {where}", (partition,)
            ).fetchone()  # fmt: skip
            if count <= self._deletions_max:
                continue
            position = self._moved[partition][0]
            gone = database.execute(
                f"SELECT rowid, seq FROM items WHERE {where} AND seq <= ? ORDER BY rowid LIMIT ?",
                (partition, position.last_complete, count - self._deletions_max * 7 // 8),
            ).fetchall()
            if gone:
                database.executemany("DELETE FROM items WHERE rowid = ?", [(r,) for r, _ in gone])
                database.execute(
                    "UPDATE partitions SET floor = max(floor, ?) WHERE partition = ?",
                    (max(seq for _, seq in gone), partition),
                )

    # What it is asked. Nobody has to wait for a commit for it.

    async def floor(self, partition: PartitionId) -> SeqNo:
        """The sequence number above which every received key is known."""
        return await self._run(self._floor, partition)

    def _floor(self, partition: PartitionId) -> SeqNo:
        row = self._database.execute(
            "SELECT floor FROM partitions WHERE partition = ?", (partition,)
        ).fetchone()
        return SeqNo(row[0] if row else 0)

    async def foreign_keys(
        self, partition: PartitionId, log: FailoverLog, seq: SeqNo
    ) -> ForeignKeys:
        """The received keys, compared with a stream. O(histories + foreign keys)."""
        return await self._run(self._foreign_keys, partition, log, seq)

    def _foreign_keys(self, partition: PartitionId, log: FailoverLog, seq: SeqNo) -> ForeignKeys:
        database = self._database
        foreign: list[bytes] = []
        ahead = seq
        for (history,) in database.execute(_HISTORIES, {"partition": partition}).fetchall():
            left = log.left(HistoryId(int.from_bytes(history, "big")))
            rows = database.execute(
                "SELECT key FROM items WHERE partition = ? AND history = ? AND seq > ?",
                (partition, history, min(left, (1 << 63) - 1)),
            )
            foreign += [key for (key,) in rows]
            (highest,) = database.execute(
                "SELECT max(seq) FROM items WHERE partition = ? AND history = ? AND seq <= ?",
                (partition, history, min(left, (1 << 63) - 1)),
            ).fetchone()
            ahead = SeqNo(max(ahead, highest or 0))
        return ForeignKeys(foreign, ahead)

    async def get(self, partition: PartitionId, key: bytes) -> Item | None:
        """The item at `key`, what is not committed yet included."""
        return await self._run(_get, self._database, partition, key)

    async def count(self) -> int:
        """How many items there are."""
        return await self._run(_count, self._database)


class MapReader:
    """Reads the map in a directory, as it was committed last, also while somebody follows.

    Args:
        directory: The directory.

    Raises:
        MapError: There is no map.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = Path(directory) / _NAME
        if not path.is_file():
            raise MapError(f"{directory} holds no map")
        self._database = _connect(path)
        try:
            with _as_map_error(Path(directory)):
                self.state = _read_state(self._database, Path(directory))
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Closes it."""
        self._database.close()

    def __len__(self) -> int:
        return _count(self._database)

    def get(self, partition: int, key: bytes) -> Item | None:
        """The item at `key` of a partition."""
        return _get(self._database, partition, key)

    def items(self) -> Iterator[Item]:
        """Every item, by partition and key, all of one moment."""
        rows = self._database.execute(
            f"SELECT {_COLUMNS} FROM items WHERE value IS NOT NULL ORDER BY partition, key"
        )
        return map(_item, rows)

    def floors(self) -> dict[PartitionId, SeqNo]:
        """By partition the number down to which it can undo; a rollback below begins at 0."""
        rows = self._database.execute("SELECT partition, floor FROM partitions")
        return {PartitionId(partition): SeqNo(floor) for partition, floor in rows}

    def ends(self) -> dict[PartitionId, SeqNo]:
        """By partition the snapshot's end at which the map is what the server had; partitions in
        the middle of a snapshot are missing."""
        rows = self._database.execute(
            "SELECT partition, last_complete FROM partitions WHERE complete"
        )
        return {PartitionId(partition): SeqNo(end) for partition, end in rows}


def _connect(path: Path) -> sqlite3.Connection:
    # Transactions are begun and ended here, and calls come from threads, one at a time.
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


def _write_error(directory: Path, error: sqlite3.Error) -> MapWriteError:
    return MapWriteError(
        f"{directory}: {error}; see that its disk has room and can be written, then start again: "
        "it goes on from what was committed last"
    )


class _as_map_error:  # noqa: N801  it reads as a function
    """Turns what SQLite says of a file that is none of ours into a `MapError`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, sqlite3.DatabaseError):
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK_FAILS:
                raise _write_error(self._directory, error) from error
            raise MapError(f"{self._directory} holds no map that can be read: {error}") from error


def _is_made(database: sqlite3.Connection) -> bool:
    with closing(database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'")) as found:
        return found.fetchone() is not None


def _make(database: sqlite3.Connection, bucket: str) -> None:
    database.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA.split(";\n"):
        database.execute(statement)
    database.executemany(
        "INSERT INTO meta VALUES (?, ?)", [("version", str(_VERSION)), ("bucket", bucket)]
    )
    database.execute("COMMIT")


def _read_state(database: sqlite3.Connection, directory: Path) -> ResumeState:
    meta = dict(database.execute("SELECT name, value FROM meta").fetchall())
    if meta.get("version") != str(_VERSION) or "bucket" not in meta:
        raise MapError(f"{directory} holds no map that this program reads")
    state = ResumeState(meta["bucket"])
    for (position,) in database.execute(
        "SELECT position FROM partitions WHERE position IS NOT NULL"
    ).fetchall():
        state.positions.update(ResumeState.decode(position).positions)
    return state


def _get(database: sqlite3.Connection, partition: int, key: bytes) -> Item | None:
    row = database.execute(
        f"SELECT {_COLUMNS} FROM items WHERE partition = ? AND key = ? AND value IS NOT NULL",
        (partition, key),
    ).fetchone()
    return None if row is None else _item(row)


def _count(database: sqlite3.Connection) -> int:
    (count,) = database.execute("SELECT count(*) FROM items WHERE value IS NOT NULL").fetchone()
    return int(count)
