"""A local copy, open for writing: items and resume state change in one transaction.

The copy records its own received keys. It knows the sequence number of every key that it holds, and
of the deletions that it has not forgotten yet.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import trio

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.key_lookup import Item
from upr_protocol.client.core.resume_state import ResumeState, ResumeStateError
from upr_protocol.client.local_copy.database import (
    FILE_NAME,
    ITEM_COLUMNS,
    ItemRow,
    LocalCopyError,
    LocalCopyWriteError,
    check_type,
    connect_database,
    count_items,
    create_if_missing,
    get_item,
    parse_uint64_blob,
    read_resume_state,
    translated_errors,
    uint64_blob,
    use_error,
)
from upr_protocol.client.rollback.planner import RollbackPlan
from upr_protocol.client.rollback.received_keys import ForeignKeys
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, HistoryId, Operation, PartitionId, SeqNo

T = TypeVar("T")

DELETIONS_MAX: Final = 200_000
"""Deletions that are remembered in a partition, so that they can be undone."""

_COMMITS_PER_CLEANUP: Final = 64
"""Old deletions are looked for once in so many commits, because counting them takes a while."""

_HISTORIES: Final = """
WITH RECURSIVE histories(history) AS (
    SELECT min(history) FROM items WHERE partition = :partition
    UNION ALL
    SELECT (SELECT min(history) FROM items
            WHERE partition = :partition AND history > histories.history)
    FROM histories WHERE histories.history IS NOT NULL)
SELECT history FROM histories WHERE history IS NOT NULL
"""
"""The different histories of a partition's items: one search of the index for each of them."""

_PUT: Final = f"INSERT OR REPLACE INTO items ({ITEM_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class LocalCopyFile:
    """The database, open for the one process that follows. One task uses it.

    After any failure all that is left to do is `close`. SQLite may have rolled back the whole
    transaction, and positions must not outlive the items that they stand for.

    Attributes:
        state: The resume state when the file was opened.
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
        self.has_failed = False
        self._deletions_max = deletions_max
        self._uncommitted_positions: dict[PartitionId, tuple[Position, SeqNo]] = {}
        """By partition the position to be committed, and from where the partition is consistent."""
        self._commits = 0
        # The iterating task and tasks that call `get` or `count` take turns.
        self._limiter = trio.CapacityLimiter(1)

    @classmethod
    def open(
        cls, directory: Path, bucket: str, deletions_max: int = DELETIONS_MAX
    ) -> LocalCopyFile:
        """Opens the copy in `directory`, or creates it.

        Raises:
            LocalCopyError: It is not a local copy, has another version, or is in use.
            LocalCopyWriteError: The disk is full, or fails.
            ResumeStateError: It is a copy of another bucket.
            OSError: It cannot be read or written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LocalCopyError(
                    f"{directory} is in use by another process; stop it, or name another directory"
                ) from error
            database = connect_database(directory / FILE_NAME)
            try:
                state = _prepare(database, directory, bucket)
                return cls(directory, database, lock, state, deletions_max)
            except BaseException:
                database.close()
                raise
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Closes the file; what was not committed is lost."""
        self._database.close()
        os.close(self._lock)

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Runs a function of the database in a thread.

        Raises:
            LocalCopyError: The file is damaged.
            LocalCopyWriteError: It failed otherwise, or something before it did.
        """
        return await trio.to_thread.run_sync(self._guard, function, *args, limiter=self._limiter)

    def _guard(self, function: Callable[..., T], *args: object) -> T:
        if self.has_failed:
            raise LocalCopyWriteError(
                f"{self._directory} could not be written before; start again to continue from "
                "the last commit"
            )
        try:
            # SQLite ends the transaction after some failures. Without one every statement would
            # commit on its own, and items would be apart from their positions.
            if not self._database.in_transaction:
                raise sqlite3.OperationalError("the transaction has ended")
            return function(*args)
        except sqlite3.Error as error:
            self._fail()
            raise use_error(self._directory, error) from error
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        self.has_failed = True
        self._uncommitted_positions.clear()
        if self._database.in_transaction:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    # Changes. Readers see them, and they survive, once they are committed.

    async def put_chunk(self, partition: PartitionId, log: FailoverLog, chunk: Chunk) -> None:
        """Applies a chunk that came in the history of `log`."""
        rows = [
            (
                partition,
                mutation.key,
                mutation.value if mutation.op is Operation.SET else None,
                mutation.seq,
                uint64_blob(log.history_with(mutation.seq)),
                uint64_blob(mutation.cas),
                mutation.flags,
                mutation.expiry,
            )
            for mutation in chunk
        ]
        await self._run(self._database.executemany, _PUT, rows)

    async def roll_back(self, plan: RollbackPlan) -> None:
        """Carries out a plan: replaces its keys, or drops the partition."""
        event, versions = plan.event, plan.versions
        if versions is None:
            await self._run(self._drop, event.partition)
            return
        rows: list[ItemRow] = []
        for key, version in versions.items():
            item = event.documents[key]
            history = uint64_blob(version.history_id)
            if item is None:
                rows.append((event.partition, key, None, version.seq, history, bytes(8), 0, 0))
            else:
                cas = uint64_blob(item.cas)
                rows.append(
                    (event.partition, key, item.value, version.seq, history, cas, item.flags,
                     item.expiry)
                )  # fmt: skip
        await self._run(self._database.executemany, _PUT, rows)

    def _drop(self, partition: PartitionId) -> None:
        self._database.execute("DELETE FROM items WHERE partition = ?", (partition,))
        self._database.execute("DELETE FROM partitions WHERE partition = ?", (partition,))

    def set_position(
        self, partition: PartitionId, position: Position, consistent_from: SeqNo
    ) -> None:
        """Sets a partition's position, and where the copy equals the server's state again; see
        `RollbackPlanner.consistent_from`."""
        self._uncommitted_positions[partition] = (position, consistent_from)

    async def commit(self) -> None:
        """Commits all changes."""
        await self._run(self._commit)

    def _commit(self) -> None:
        database = self._database
        for partition, (position, consistent_from) in self._uncommitted_positions.items():
            state = ResumeState(self.state.bucket, {partition: position})
            complete = position.partial is None and position.last_complete >= consistent_from
            database.execute(
                "INSERT INTO partitions (partition, position, complete, last_complete)"
                " VALUES (?, ?, ?, ?) ON CONFLICT (partition)"
                " DO UPDATE SET position = excluded.position, complete = excluded.complete,"
                " last_complete = excluded.last_complete",
                (partition, state.encode(), complete, position.last_complete),
            )
        self._commits += 1
        if not self._commits % _COMMITS_PER_CLEANUP:
            self._forget_deletions()
        database.execute("COMMIT")
        self._uncommitted_positions.clear()
        database.execute("BEGIN IMMEDIATE")

    def _forget_deletions(self) -> None:
        """Forgets the oldest deletions that are too many, in partitions without a foreign key."""
        database = self._database
        for partition, (position, consistent_from) in self._uncommitted_positions.items():
            if consistent_from == SEQ_MAX:
                continue  # some deletions may have to be undone
            is_deleted = "partition = ? AND value IS NULL"
            (count,) = database.execute(
                f"SELECT count(*) FROM items WHERE {is_deleted}", (partition,)
            ).fetchone()  # fmt: skip
            if count <= self._deletions_max:
                continue
            oldest = database.execute(
                f"SELECT rowid, seq FROM items WHERE {is_deleted} AND seq <= ? "
                "ORDER BY rowid LIMIT ?",
                (partition, position.last_complete, count - self._deletions_max * 7 // 8),
            ).fetchall()
            if oldest:
                database.executemany(
                    "DELETE FROM items WHERE rowid = ?", [(rowid,) for rowid, _ in oldest]
                )
                database.execute(
                    "UPDATE partitions SET floor = max(floor, ?) WHERE partition = ?",
                    (max(seq for _, seq in oldest), partition),
                )

    # Questions. Their answers include what is not committed yet.

    async def floor(self, partition: PartitionId) -> SeqNo:
        """The sequence number above which every received key is known."""
        return await self._run(self._floor, partition)

    def _floor(self, partition: PartitionId) -> SeqNo:
        row = self._database.execute(
            "SELECT floor FROM partitions WHERE partition = ?", (partition,)
        ).fetchone()
        return SeqNo(check_type(row[0], int) if row else 0)

    async def foreign_keys(
        self, partition: PartitionId, log: FailoverLog, seq: SeqNo
    ) -> ForeignKeys:
        """The received keys, compared with a stream. O(histories + foreign keys)."""
        return await self._run(self._foreign_keys, partition, log, seq)

    def _foreign_keys(self, partition: PartitionId, log: FailoverLog, seq: SeqNo) -> ForeignKeys:
        database = self._database
        keys: list[bytes] = []
        highest_seq = seq
        for (history,) in database.execute(_HISTORIES, {"partition": partition}).fetchall():
            branch_end = log.end_of(HistoryId(parse_uint64_blob(history)))
            arguments = (partition, history, min(branch_end, (1 << 63) - 1))
            rows = database.execute(
                "SELECT key FROM items WHERE partition = ? AND history = ? AND seq > ?", arguments
            )
            keys += [check_type(key, bytes) for (key,) in rows]
            (highest,) = database.execute(
                "SELECT max(seq) FROM items WHERE partition = ? AND history = ? AND seq <= ?",
                arguments,
            ).fetchone()
            if highest is not None:
                highest_seq = SeqNo(max(highest_seq, check_type(highest, int)))
        return ForeignKeys(keys, highest_seq)

    async def get(self, partition: PartitionId, key: bytes) -> Item | None:
        """The item at `key` of a partition."""
        return await self._run(get_item, self._database, partition, key)

    async def count(self) -> int:
        """How many items there are."""
        return await self._run(count_items, self._database)


def _prepare(database: sqlite3.Connection, directory: Path, bucket: str) -> ResumeState:
    """Makes the database ready, with a transaction begun; gives its resume state."""
    with translated_errors(directory):
        database.execute("PRAGMA journal_mode = WAL")
        # A power cut may take the last transactions. Their positions go with them, so the same
        # changes are read again.
        database.execute("PRAGMA synchronous = NORMAL")
        create_if_missing(database, bucket)
        state = read_resume_state(database, directory)
        database.execute("BEGIN IMMEDIATE")
    try:
        state.check_bucket(bucket)
    except ResumeStateError as error:
        raise ResumeStateError(f"{directory}: {error}") from error
    return state
