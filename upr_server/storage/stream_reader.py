"""Reading one partition's mutations from wherever they are: disk first, then memory (seed 001).

A reader whose start is no longer in memory gets one snapshot from disk. Its end is the persisted
snapshot end of the moment when it begins, a lease holds the range, and a memory cursor is entered
there at the same time. A task reads the log in short transactions into a queue that is bounded in
bytes; when the queue has come to its end, the cursor goes on. If that was dropped meanwhile, the
same happens again, from where the reader stands.

Whoever reads notices the kind of the next snapshot, and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import structlog
import trio

from upr_protocol.chunk import Chunk
from upr_protocol.errors import Status, UprError
from upr_protocol.ids import SeqNo, SnapshotKind
from upr_server.engine import (
    BackfillNeeded,
    Cursor,
    CursorItem,
    Partition,
    SnapshotEnd,
    SnapshotStart,
)
from upr_server.storage.bucket_disk import BucketDisk
from upr_server.storage.errors import StorageError
from upr_server.storage.leases import BACKFILL_LEASE_S

READ_BYTES: Final = 1024 * 1024
"""What is read from the log in one transaction."""

QUEUE_BYTES: Final = 4 * 1024 * 1024
"""What one backfill reads ahead, as far as the budget allows."""

BUDGET_SHARE: Final = 1 / 16
"""The part of a bucket's quota that all its backfills may hold together."""

PIECE_BYTES: Final = 16 * 1024
"""One backfill that holds nothing reads so much, about, even beyond the budget: its partition has
its connection's turn, and else nothing would move there while others stand still."""

log = structlog.get_logger(__name__)


class StreamBrokenError(UprError):
    """The stream cannot go on.

    Attributes:
        status: What its `StreamEnd` says.
    """

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


class StreamReader:
    """A reader of one partition.

    It has the face of the engine's `Cursor`, and one answer more: with `waits_for_disk` true, None
    does not mean that there is nothing more, but that it has not been read yet.

    Args:
        disk: What readers of the bucket share.
        partition: The partition.
        name: Whose it is, for statistics.
        start: What is there already.
        end_at_least: The first snapshot must not end below this; see `MutationManager.register`.
        on_ready: Called when there is something to read again after `next` or `poll` found nothing.
        on_disk: Called when there is something to read after `waits_for_disk`.
    """

    __slots__ = (
        "_backfill",
        "_cursor",
        "_disk",
        "_end",
        "_end_at_least",
        "_name",
        "_on_disk",
        "_on_ready",
        "_partition",
        "is_reading",
        "seq",
        "waits_for_disk",
    )

    def __init__(
        self,
        disk: BucketDisk,
        partition: Partition,
        name: str,
        start: SeqNo,
        *,
        end_at_least: SeqNo,
        on_ready: Callable[[], None],
        on_disk: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._partition = partition
        self._name = name
        self._on_ready = on_ready
        self._on_disk = on_disk
        self._end = self._end_at_least = end_at_least
        self._backfill: _Backfill | None = None
        self._cursor: Cursor | None = None
        self.seq = start
        """Everything up to here was handed on."""
        self.is_reading = False
        """Whether a start was handed on and its end was not."""
        self.waits_for_disk = False
        """Whether the next item is being read from disk."""
        self._enter()

    def _enter(self) -> None:
        """Enters a memory cursor where the reader stands, if what is there is in memory."""
        if self.seq >= self._partition.manager.oldest:
            self._cursor = self._register(self.seq, self._end_at_least)

    def _register(self, start: SeqNo, end_at_least: SeqNo = SeqNo(0)) -> Cursor:
        registration = self._partition.manager.register(
            self._name, start, end_at_least=end_at_least, on_ready=self._on_ready
        )
        assert registration.backfill is None, "what the disk ends with is in memory"
        return registration.cursor

    def poll(self) -> bool:
        """Whether there is something to read, or will be when the disk has answered; if not,
        `on_ready` is called when there is."""
        return self._cursor is None or self._backfill is not None or self._cursor.poll()

    def next(self) -> CursorItem | None:
        """The next item; None when there is none, or none yet: see the class.

        Raises:
            StreamBrokenError: It cannot go on.
        """
        self.waits_for_disk = False
        item: CursorItem | None = None
        if self._backfill is not None:
            item = self._backfill.take()
            if item is None and self._backfill.is_done:
                self.sent()
                self._cursor, self._backfill = self._backfill.cursor, None
        if item is None and self._backfill is None:
            item = self._from_memory()
        if item is None and self._backfill is not None:
            self.waits_for_disk = True
            return None
        self._follow(item)
        return item

    def _from_memory(self) -> CursorItem | None:
        if self._cursor is not None:
            item = self._cursor.next()
            if not isinstance(item, BackfillNeeded):
                return item
            # It was dropped. What it was in the middle of must be finished, by a later end.
            self._cursor.close()
            self._cursor = None
            if self.is_reading and self.seq == self._end:
                # Only the end is missing, and there may be nothing behind it to read.
                self._enter()
                return SnapshotEnd(self._end)
            if self.is_reading:
                self._end_at_least = self._end
            self._enter()
            if self._cursor is not None:
                return self._from_memory()
        self._begin_backfill()
        return None

    def _begin_backfill(self) -> None:
        self._backfill = _Backfill(
            self._disk, self._partition, self.seq, self._end_at_least, self._register, self._on_disk
        )
        self._disk.backfills += 1
        self._disk.nursery.start_soon(self._backfill.run)

    def _follow(self, item: CursorItem | None) -> None:
        if isinstance(item, SnapshotStart):
            self.is_reading = True
            self._end = item.end
            self._end_at_least = SeqNo(0)
        elif isinstance(item, Chunk):
            self.seq = item.end
        elif isinstance(item, SnapshotEnd):
            self.is_reading = False

    def sent(self) -> None:
        """Everything that was handed on so far has left this process."""
        if self._backfill is not None:
            self._backfill.sent()

    @property
    def reads_disk(self) -> bool:
        """Whether what it hands on now comes from disk."""
        return self._backfill is not None

    def close(self) -> None:
        """Gives up everything that it holds."""
        if self._backfill is not None:
            self._backfill.close()
        if self._cursor is not None:
            self._cursor.close()


class _Backfill:
    """One disk snapshot, being read."""

    def __init__(
        self,
        disk: BucketDisk,
        partition: Partition,
        start: SeqNo,
        end_at_least: SeqNo,
        register: Callable[[SeqNo], Cursor],
        on_disk: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._partition = partition
        self._start = start
        self._end_at_least = end_at_least
        self._register = register
        self._on_disk = on_disk
        self._queue: deque[CursorItem] = deque()
        self._queue_bytes = 0
        self._taken = trio.Event()
        self._broken: Status | None = None
        self._scope = trio.CancelScope()
        self._is_closed = False
        self.cursor: Cursor | None = None
        self.is_done = False
        """Whether all was read; the queue may still hold some of it."""
        self.unsent_bytes = 0
        """Bytes that were taken, and still count as this one's."""

    def take(self) -> CursorItem | None:
        """The next item, if it was read already."""
        if not self._queue:
            if self._broken is not None:
                raise StreamBrokenError(self._broken)
            self._taken.set()
            return None
        item = self._queue.popleft()
        if isinstance(item, Chunk):
            self._queue_bytes -= item.nbytes
            self.unsent_bytes += item.nbytes
            self._taken.set()
        return item

    def sent(self) -> None:
        """What was taken is on its way to the consumer, and takes no memory here any more."""
        self._disk.memory.backfills -= self.unsent_bytes
        self.unsent_bytes = 0
        self._taken.set()

    def close(self) -> None:
        """Ends it, wherever it is."""
        self._is_closed = True
        self._scope.cancel()
        self._disk.memory.backfills -= self._queue_bytes
        self._queue_bytes = 0
        self._queue.clear()
        self.sent()
        self._disk.leases.let_go(self)
        if self.cursor is not None:
            self.cursor.close()

    async def run(self) -> None:
        """Reads it. Whatever goes wrong ends the stream, and nothing else."""
        with self._scope:
            try:
                with trio.move_on_after(BACKFILL_LEASE_S) as patience:
                    await self._read()
                if patience.cancelled_caught:
                    self._broken = Status.TOO_SLOW
            except StorageError as error:
                log.error(
                    "a backfill failed",
                    bucket=self._disk.bucket.name,
                    partition=self._partition.id,
                    error=str(error),
                )
                self._broken = Status.BACKFILL_FAILED
        self._disk.leases.let_go(self)
        if not self._is_closed:
            self._on_disk()

    async def _read(self) -> None:
        disk, partition = self._disk, self._partition
        await disk.flusher.persisted(partition, self._end_at_least)
        async with disk.upkeeper.quiet():
            if self._is_closed:
                # It is not always cancelled here: the lock may have been there for the taking.
                return
            if 0 < self._start < partition.purge_seq:
                self._broken = Status.ROLLBACK_NEEDED
                return
            end = partition.manager.persistence.committed
            disk.leases.hold(self, partition.id, self._start, end)
            self.cursor = self._register(end)
        self._put(SnapshotStart(self._start, end, SnapshotKind.DISK, may_repeat=True))
        after = self._start
        while after < end:
            chunks = await self._chunks(after, end)
            if self._is_closed:
                return
            for chunk in chunks:
                self._queue_bytes += chunk.nbytes
                disk.memory.backfills += chunk.nbytes
                disk.backfill_bytes += chunk.nbytes
                self._put(chunk)
                after = chunk.end
            await self._wait_for_room()
        self.is_done = True
        self._put(SnapshotEnd(end))

    async def _chunks(self, after: SeqNo, end: SeqNo) -> list[Chunk]:
        """As much as the budget allows, which is taken from it meanwhile: many read at once."""
        disk = self._disk
        nbytes = max(PIECE_BYTES, min(READ_BYTES, self._budget_left()))
        disk.memory.backfills += nbytes
        try:
            return await disk.store.read(disk.bucket.name, self._partition.id, after, end, nbytes)
        finally:
            disk.memory.backfills -= nbytes

    def _budget_left(self) -> int:
        budget = int(self._disk.bucket.quota.limit_bytes * BUDGET_SHARE)
        return budget - self._disk.memory.backfills

    def _put(self, item: CursorItem) -> None:
        self._queue.append(item)
        if len(self._queue) == 1:
            self._on_disk()

    async def _wait_for_room(self) -> None:
        """Until it may read ahead, or holds nothing."""
        while (self._queue or self.unsent_bytes) and (
            self._queue_bytes >= QUEUE_BYTES or self._budget_left() < PIECE_BYTES
        ):
            self._taken = trio.Event()
            await self._taken.wait()
