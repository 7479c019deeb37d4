"""Backfills: reading a range of one partition from disk, by a task that fills a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, unique
from typing import Final

import structlog
import trio

from upr_protocol.chunk import Chunk
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import SEQ_MAX, SeqNo, SnapshotKind
from upr_server.engine import Cursor, CursorItem, Partition, SnapshotEndItem, SnapshotStartItem
from upr_server.runtime import essential
from upr_server.storage.calls import FindFirstSnapshotEnd, ReadChunks
from upr_server.storage.errors import StorageError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.leases import BACKFILL_LEASE_S

READ_BYTES: Final = 1024 * 1024
"""Bytes that are read from the log in one transaction."""

QUEUE_BYTES: Final = 4 * 1024 * 1024
"""Bytes that one backfill reads ahead, if the budget allows."""

BUDGET_SHARE: Final = 1 / 16
"""The share of a bucket's quota that all its backfills may hold together."""

READ_BYTES_MIN: Final = 16 * 1024
"""About what a backfill that holds nothing reads even beyond the budget. Its partition may have its
connection's turn in the partition cycle: then nothing would move on the whole connection until
other backfills let go of their memory."""

log = structlog.get_logger(__name__)


@unique
class ReaderWait(Enum):
    """What a reader answers in place of an item."""

    FOR_DISK = "for disk"
    """The next item is being read from disk; the reader's `on_disk` is called when it is there."""


WAIT_FOR_DISK: Final = ReaderWait.FOR_DISK


class StreamBrokenError(UprError):
    """The stream cannot go on.

    Attributes:
        status: The status that its `StreamEnd` carries.
    """

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


class Backfill:
    """One disk snapshot that is being read.

    Args:
        disk: The bucket's disk.
        partition: The partition.
        start: Where the reader stands.
        on_disk: Called when there is something to take after `take_item` found nothing.
        end: Where the snapshot ends. By default at the first snapshot end on disk at or above
            `stream_end`; where the disk is not so far, at the persisted snapshot end when it
            begins.
        lease_id: The lease that it reads under, which must be whole when it begins; 0 for none.
        end_at_least: A default end must not be below this: the backfill waits for the disk first.
        stream_end: The reader goes on until a snapshot ends here or above.
        register: Registers a memory cursor at the end, if the reader goes on from there.

    Attributes:
        cursor: The memory cursor that was registered.
        is_done: Whether all was read. The queue may still hold some of it.
        unsent_bytes: Bytes that were taken and not sent yet. They count as the backfill's memory.
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
        stream_end: SeqNo = SEQ_MAX,
        register: Callable[[SeqNo], Cursor] | None = None,
    ) -> None:
        self._disk = disk
        self._partition = partition
        self._start = start
        self._end = end
        self._lease_id = lease_id
        self._end_at_least = end_at_least
        self._stream_end = stream_end
        self._register = register
        self._on_disk = on_disk
        self._queue: deque[CursorItem] = deque()
        self._queue_bytes = 0
        self._room_made = Notifier()
        self._end_status: Status | None = None
        self._scope = trio.CancelScope()
        self._is_closed = False
        self.cursor: Cursor | None = None
        self.is_done = False
        self.unsent_bytes = 0

    def start(self) -> None:
        """Starts the task that reads."""
        self._disk.backfills += 1
        self._disk.nursery.start_soon(essential(self._run))

    def take_item(self) -> CursorItem | None:
        """Takes the next item out of the queue; None while the queue is empty."""
        if not self._queue:
            if self._end_status is not None:
                raise StreamBrokenError(self._end_status)
            self._room_made.notify()
            return None
        item = self._queue.popleft()
        if isinstance(item, Chunk):
            self._queue_bytes -= item.nbytes
            self.unsent_bytes += item.nbytes
            self._room_made.notify()
        return item

    def note_sent(self) -> None:
        """Tells that what was taken has been sent: it takes no memory here any more."""
        self._disk.memory.backfills -= self.unsent_bytes
        self.unsent_bytes = 0
        self._room_made.notify()

    def close(self) -> None:
        """Ends the backfill, however far it has come, and gives back what it holds."""
        self._is_closed = True
        self._scope.cancel()
        self._disk.memory.backfills -= self._queue_bytes
        self._queue_bytes = 0
        self._queue.clear()
        self.note_sent()
        self._disk.leases.release_range(self)
        if self.cursor is not None:
            self.cursor.close()

    async def _run(self) -> None:
        """Reads. Whatever goes wrong ends this stream, and nothing else."""
        with self._scope:
            try:
                with trio.move_on_after(BACKFILL_LEASE_S) as deadline:
                    await self._read()
                if deadline.cancelled_caught:
                    self._end_status = Status.TOO_SLOW
            except ServerError as error:
                # The bucket was deleted; or the lease is gone, and whoever asks for the stream
                # again is told so.
                is_deleted = error.status is Status.NO_BUCKET
                self._end_status = Status.BUCKET_DELETED if is_deleted else Status.ROLLBACK_NEEDED
            except StorageError as error:
                log.error(
                    "backfill failed",
                    bucket=self._disk.bucket.name,
                    partition=self._partition.id,
                    error=str(error),
                )
                self._end_status = Status.BACKFILL_FAILED
        self._disk.leases.release_range(self)
        if not self._is_closed:
            self._on_disk()

    async def _read(self) -> None:
        disk, partition = self._disk, self._partition
        if self._end is None:
            await disk.flusher.wait_until_persisted(partition, self._end_at_least)
        async with disk.maintenance.paused():
            bounded_end = await self._bounded_end()
            if self._is_closed:
                # The lock may have been free, so that no checkpoint has raised `Cancelled`.
                return
            # From here on this block has no checkpoint. So the end, the range that is held up to
            # it, and the memory cursor that goes on there are of one moment: nothing is lost in
            # between.
            if self._lease_id:
                # From here on the backfill itself holds the range, even if the lease lapses.
                disk.leases.get_whole(self._lease_id)
            elif 0 < self._start < partition.purge_seq:
                self._end_status = Status.ROLLBACK_NEEDED
                return
            end = (
                partition.manager.persistence.committed_seq if bounded_end is None else bounded_end
            )
            disk.leases.hold_range(self, partition.id, self._start, end)
            if self._register is not None and end < self._stream_end:
                self.cursor = self._register(end)
        self._put(SnapshotStartItem(self._start, end, SnapshotKind.DISK, may_repeat=True))
        read_seq = self._start
        while read_seq < end:
            read_seq = await self._read_chunks(read_seq, end)
            if self._is_closed:
                return
            await self._room_made.wait_until(self._may_read_ahead)
        self.is_done = True
        self._put(SnapshotEndItem(end))

    async def _bounded_end(self) -> SeqNo | None:
        """Where the snapshot ends, if that is known before it begins; otherwise None. Maintenance
        must be paused: a compaction may remove the state at this end, before the range is held."""
        if self._end is not None:
            return self._end
        persistence = self._partition.manager.persistence
        floor = max(self._stream_end, self._end_at_least)
        if floor > persistence.committed_seq:
            return None
        first_end = await self._disk.store.ask(
            FindFirstSnapshotEnd(self._disk.bucket.name, self._partition.id, floor)
        )
        # The disk may have a commit of which the server has not heard yet.
        return min(first_end, persistence.committed_seq)

    async def _read_chunks(self, after: SeqNo, end: SeqNo) -> SeqNo:
        """Puts the next chunks into the queue. Returns where they end. It keeps no reference to
        them: the slot of shared memory that they lie in is lent again once the last is sent."""
        disk = self._disk
        chunks = await self._chunks(after, end)
        if not self._is_closed:
            nbytes = sum(chunk.nbytes for chunk in chunks)
            self._queue_bytes += nbytes
            disk.memory.backfills += nbytes
            disk.backfill_bytes += nbytes
            self._put(*chunks)
        return chunks[-1].end

    async def _chunks(self, after: SeqNo, end: SeqNo) -> list[Chunk]:
        """As much as the budget allows. It counts while the read is under way, as many backfills
        read at once."""
        disk = self._disk
        nbytes = max(READ_BYTES_MIN, min(READ_BYTES, self._budget_left()))
        disk.memory.backfills += nbytes
        try:
            return await disk.store.ask(
                ReadChunks(disk.bucket.name, self._partition.id, after, end, nbytes)
            )
        finally:
            disk.memory.backfills -= nbytes

    def _budget_left(self) -> int:
        budget = int(self._disk.bucket.memory_policy.limit_bytes * BUDGET_SHARE)
        return budget - self._disk.memory.backfills

    def _put(self, *items: CursorItem) -> None:
        was_empty = not self._queue
        self._queue.extend(items)
        if was_empty:
            self._on_disk()

    def _may_read_ahead(self) -> bool:
        """Whether it holds nothing, or little enough.

        It may hold no more than is left for all others. So one from which nobody takes ends with
        half of the budget at most, and the others go on in large reads.
        """
        if not self._queue and not self.unsent_bytes:
            return True
        held_bytes = self._queue_bytes + self.unsent_bytes
        return self._queue_bytes < QUEUE_BYTES and self._budget_left() >= max(
            READ_BYTES_MIN, held_bytes
        )
