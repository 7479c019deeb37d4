"""Reading a range of one partition from disk: a task that fills a queue (seed 001)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, unique
from typing import Final

import structlog
import trio

from upr_protocol.chunk import Chunk
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import SeqNo, SnapshotKind
from upr_server.engine import Cursor, CursorItem, Partition, SnapshotEnd, SnapshotStart
from upr_server.storage.calls import ReadChunks
from upr_server.storage.errors import StorageError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.leases import BACKFILL_LEASE_S

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


@unique
class Wait(Enum):
    """What a reader answers in place of an item."""

    FOR_DISK = "for disk"
    """The next item is being read from disk; the reader's `on_disk` is called when it is there."""


WAIT_FOR_DISK: Final = Wait.FOR_DISK


class StreamBrokenError(UprError):
    """The stream cannot go on.

    Attributes:
        status: What its `StreamEnd` says.
    """

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


class Backfill:
    """One disk snapshot, being read.

    Args:
        disk: What readers of the bucket share.
        partition: The partition.
        start: What is there already.
        on_disk: Called when there is something to take after there was nothing.
        end: Where it ends; by default at the persisted snapshot end of the moment when it begins.
        lease_id: The lease under which it reads, which must be whole when it begins; 0 for none.
        end_at_least: That end must not be below this.
        register: Enters a memory cursor at the end, if the reader is to go on there.
    """

    def __init__(
        self,
        disk: BucketDisk,
        partition: Partition,
        start: SeqNo,
        on_disk: Callable[[], None],
        *,
        end: SeqNo | None = None,
        lease_id: int = 0,
        end_at_least: SeqNo = SeqNo(0),
        register: Callable[[SeqNo], Cursor] | None = None,
    ) -> None:
        self._disk = disk
        self._partition = partition
        self._start = start
        self._end = end
        self._lease_id = lease_id
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

    def start(self) -> None:
        """Begins to read."""
        self._disk.backfills += 1
        self._disk.nursery.start_soon(self._run)

    def take(self) -> CursorItem | None:
        """Takes the next item out of the queue; None while the queue is empty."""
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
        self._disk.leases.release_range(self)
        if self.cursor is not None:
            self.cursor.close()

    async def _run(self) -> None:
        """Reads it. Whatever goes wrong ends the stream, and nothing else."""
        with self._scope:
            try:
                with trio.move_on_after(BACKFILL_LEASE_S) as patience:
                    await self._read()
                if patience.cancelled_caught:
                    self._broken = Status.TOO_SLOW
            except ServerError as error:
                self._broken = error.status
            except StorageError as error:
                log.error(
                    "backfill failed",
                    bucket=self._disk.bucket.name,
                    partition=self._partition.id,
                    error=str(error),
                )
                self._broken = Status.BACKFILL_FAILED
        self._disk.leases.release_range(self)
        if not self._is_closed:
            self._on_disk()

    async def _read(self) -> None:
        disk, partition = self._disk, self._partition
        if self._end is None:
            await disk.flusher.wait_until_persisted(partition, self._end_at_least)
        async with disk.maintenance.paused():
            if self._is_closed:
                # It is not always cancelled here: the lock may have been there for the taking.
                return
            if self._lease_id:
                # From here on the range is held for as long as this reads, though the lease lapse.
                disk.leases.get_whole(self._lease_id)
            elif 0 < self._start < partition.purge_seq:
                self._broken = Status.ROLLBACK_NEEDED
                return
            end = partition.manager.persistence.committed if self._end is None else self._end
            disk.leases.hold_range(self, partition.id, self._start, end)
            if self._register is not None:
                self.cursor = self._register(end)
        self._put(SnapshotStart(self._start, end, SnapshotKind.DISK, may_repeat=True))
        after = self._start
        while after < end:
            after = await self._read_chunks(after, end)
            if self._is_closed:
                return
            await self._wait_for_room()
        self.is_done = True
        self._put(SnapshotEnd(end))

    async def _read_chunks(self, after: SeqNo, end: SeqNo) -> SeqNo:
        """Puts some into the queue, and keeps none of them; gives up to where."""
        disk = self._disk
        chunks = await self._chunks(after, end)
        if not self._is_closed:
            for chunk in chunks:
                self._queue_bytes += chunk.nbytes
                disk.memory.backfills += chunk.nbytes
                disk.backfill_bytes += chunk.nbytes
                self._put(chunk)
        return chunks[-1].end

    async def _chunks(self, after: SeqNo, end: SeqNo) -> list[Chunk]:
        """As much as the budget allows, which is taken from it meanwhile: many read at once."""
        disk = self._disk
        nbytes = max(PIECE_BYTES, min(READ_BYTES, self._budget_left()))
        disk.memory.backfills += nbytes
        try:
            return await disk.store.ask(
                ReadChunks(disk.bucket.name, self._partition.id, after, end, nbytes)
            )
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
        """Until it may read ahead, or holds nothing. No more than what is left for all: one from
        which nobody takes has half of the budget at most, and others go on in large pieces."""
        while (self._queue or self.unsent_bytes) and (
            self._queue_bytes >= QUEUE_BYTES
            or self._budget_left() < max(PIECE_BYTES, self._queue_bytes + self.unsent_bytes)
        ):
            self._taken = trio.Event()
            await self._taken.wait()
