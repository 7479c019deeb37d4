"""Following a bucket and keeping a local copy of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Unpack

import trio

from upr_protocol.address import Address
from upr_protocol.client.core.delivery_tracker import SaveLimits, SavePriority, SaveSchedule
from upr_protocol.client.core.events import (
    BarrierReached,
    ChunkReceived,
    CycleCompleted,
    Event,
    SnapshotEnd,
    Undone,
)
from upr_protocol.client.core.key_lookup import Item, Text, to_bytes
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT
from upr_protocol.client.core.subscription import End
from upr_protocol.client.local_copy.file import DELETIONS_MAX, LocalCopyFile
from upr_protocol.client.rollback.iterator import RollbackIterator, consume_with_planner
from upr_protocol.client.rollback.planner import RollbackPlan, RollbackPlanner
from upr_protocol.client.trio.connection import ConnectOptions, TrioOptions
from upr_protocol.client.trio.consumer import Consumer
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of

_LAST_COMMIT_S: Final = 10.0
"""The longest that the commit on leaving may take."""


class LocalCopyFollower(RollbackIterator):
    """Follows a bucket, and keeps key -> item in a directory; `keep_local_copy` makes one.

    It is an async iterator of the events that it has processed, with `Undone` in place of
    `RolledBack`. Only iterating makes it follow. What the iterator gave is in the copy, though
    perhaps not on disk yet.
    """

    def __init__(
        self,
        consumer: Consumer,
        planner: RollbackPlanner,
        file: LocalCopyFile,
        limits: SaveLimits,
    ) -> None:
        super().__init__(consumer, planner)
        self._file = file
        self._schedule = SaveSchedule(limits, trio.current_time())

    async def __anext__(self) -> Event | Undone:
        """The next event, processed. Cancelled, no event is lost.

        Raises:
            StopAsyncIteration: Every stream has ended for good.
            UprError: See `Consumer.__anext__`.
            LocalCopyError: The copy is damaged.
            sqlite3.Error: The copy cannot be written. Every later call raises it again. What was
                committed is there, and a new `keep_local_copy` goes on from it.
        """
        return await self._next_processed()

    async def _next_event(self) -> Event:
        """The consumer's next event; commits in time if there is none."""
        while True:
            due_at = self._schedule.due_at
            if due_at <= trio.current_time():
                await self.save()
                continue
            with trio.move_on_at(due_at):
                return await anext(self._consumer)

    async def _process(self, event: Event) -> Event | Undone | None:
        result = await super()._process(event)
        if not isinstance(event, CycleCompleted | BarrierReached):
            position = self._consumer.position(event.partition)
            consistent_from = self._planner.consistent_from(event.partition)
            self._file.set_position(event.partition, position, consistent_from)
            is_complete = isinstance(result, SnapshotEnd)
            priority = SavePriority.COMPLETE if is_complete else SavePriority.PARTIAL
            nbytes = event.chunk.nbytes if isinstance(event, ChunkReceived) else 0
            self._schedule.add_unsaved(priority, nbytes)
        return result

    async def _keep_chunk(self, event: ChunkReceived, log: FailoverLog) -> None:
        await self._file.put_chunk(event.partition, log, event.chunk)

    async def _roll_back(self, plan: RollbackPlan) -> None:
        with trio.CancelScope(shield=True):
            await self._file.roll_back(plan)

    async def save(self) -> None:
        """Commits everything that the iterator gave, in the task that iterates; readers see it
        then."""
        moves = self._schedule.moves
        await self._file.commit()
        self._schedule.note_saved(trio.current_time(), moves)

    # What the copy holds.

    async def get(self, key: Text) -> Item | None:
        """The item at `key`, as of the last event."""
        data = to_bytes(key)
        return await self._file.get(partition_of(data, self._consumer.partition_count), data)

    async def count(self) -> int:
        """How many items there are, as of the last event."""
        return await self._file.count()


@asynccontextmanager
async def keep_local_copy(
    target: str | Address,
    directory: str | os.PathLike[str],
    *,
    partitions: Sequence[int] | None = None,
    end: End = None,
    deletions_max: int = DELETIONS_MAX,
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
    commit_limits: SaveLimits | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[LocalCopyFollower]:
    """A local copy of a bucket in `directory`, which goes on from its last commit.

    Items and resume state change in one transaction, so the process may be killed at any moment.
    One process at a time follows; `LocalCopyReader` reads the copy. Leaving the context commits
    what was processed, unless an earlier write failed.

    The directory is created if it is missing. Of each partition `deletions_max` deletions are
    remembered; a rollback below the newest forgotten one starts the partition at 0. `commit_limits`
    say how much may be read again after a crash. The other arguments are those of `consume`.

    Raises:
        LocalCopyError: The directory holds something else, or another process follows.
        ResumeStateError: It holds a copy of another bucket.
        UprError: See `consume`.
        OSError, sqlite3.Error: It cannot be read or written.
    """
    address = (Address.parse(target) if isinstance(target, str) else target).with_bucket()
    file = await trio.to_thread.run_sync(
        LocalCopyFile.open, Path(directory), address.bucket, deletions_max
    )
    try:
        async with consume_with_planner(
            address,
            file,
            TrioOptions(**options, retry_timeout_s=retry_timeout_s),
            partitions=partitions,
            resume=file.state,
            end=end,
        ) as (consumer, planner):
            copy = LocalCopyFollower(consumer, planner, file, commit_limits or SaveLimits())
            try:
                yield copy
            finally:
                deadline = trio.current_time() + _LAST_COMMIT_S
                with trio.CancelScope(shield=True, deadline=deadline):
                    if not file.has_failed:
                        await copy.save()
    finally:
        file.close()
