"""Reading one partition's mutations from wherever they are: disk first, then memory.

A reader whose start is no longer in memory gets one snapshot from disk. In one synchronous step the
backfill's end is fixed at the persisted snapshot end, the range up to there is protected from
compaction, and a memory cursor is registered there. A task reads the log in short transactions into
a queue that is bounded in bytes. When the queue has come to its end the cursor goes on. If the
cursor was dropped meanwhile, the same happens again from where the reader stands.

A stream that has an end, and whose end the disk has, reads only up to the first snapshot end that
is not below it. It needs no memory cursor. Where collapsing has put many snapshots in memory into
one, it reads from disk although memory has everything.

A consumer notices nothing of this except the kind of its next snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo
from upr_server.engine import (
    BackfillNeeded,
    Cursor,
    CursorItem,
    Partition,
    SnapshotEndItem,
    SnapshotStartItem,
)
from upr_server.storage.online.backfill import WAIT_FOR_DISK, Backfill, ReaderWait
from upr_server.storage.online.bucket_disk import BucketDisk

EXCESS_MUTATIONS_MAX: Final = 4096
"""A stream with an end is read from memory, if memory has it, unless that would hand on so many
mutations behind the end, and more than before it. A read from disk costs about as much."""


class PartitionReader:
    """A reader of one partition.

    It has the interface of the engine's `Cursor`, and one answer more: `WAIT_FOR_DISK`.

    Args:
        disk: The bucket's disk.
        partition: The partition.
        name: The name of the cursor's owner, for statistics.
        start: Where the consumer stands.
        end_at_least: The first snapshot must not end below this; `MutationManager.register` says
            why.
        stream_end: The reader is closed once a snapshot has ended here or above.
        on_ready: Called when there is something to read again after `next` or `poll` found nothing.
        on_disk: Called when there is something to read after `next` answered `WAIT_FOR_DISK`.

    Attributes:
        seq: Everything up to here was handed on.
        is_reading: Whether the start of a snapshot was handed on, and its end was not.
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
        "_stream_end",
        "is_reading",
        "seq",
    )

    def __init__(
        self,
        disk: BucketDisk,
        partition: Partition,
        name: str,
        start: SeqNo,
        *,
        end_at_least: SeqNo,
        stream_end: SeqNo,
        on_ready: Callable[[], None],
        on_disk: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._partition = partition
        self._name = name
        self._on_ready = on_ready
        self._on_disk = on_disk
        self._end = self._end_at_least = end_at_least
        self._stream_end = stream_end
        self._backfill: Backfill | None = None
        self._cursor: Cursor | None = None
        self.seq = start
        self.is_reading = False
        self._register_in_memory()

    def _register_in_memory(self) -> None:
        """Registers a memory cursor where the reader stands, if memory reaches back so far.

        If not, a backfill is needed, which begins with the first `next`. `MutationManager.register`
        would say so too, and register a cursor at the disk's end at once. Here that must wait: the
        end is fixed when the disk is read, in one step with the lease on the range.
        """
        if self.seq >= self._partition.snapshots.oldest_start and not self._ends_earlier_on_disk():
            self._cursor = self._register(self.seq, self._end_at_least)

    def _ends_earlier_on_disk(self) -> bool:
        """Whether memory would hand on much more than the stream asks for, where the disk need not:
        collapsing makes one snapshot of many, and the log keeps the end of each."""
        snapshots = self._partition.snapshots
        end = max(self._stream_end, self._end_at_least)
        if not self.seq < end <= snapshots.persisted_seq:
            return False
        excess = snapshots.entry_at(SeqNo(end - 1)).end - end
        return excess > end - self.seq + EXCESS_MUTATIONS_MAX

    def _register(self, start: SeqNo, end_at_least: SeqNo = SeqNo(0)) -> Cursor:
        registration = self._partition.manager.register(
            self._name, start, end_at_least=end_at_least, on_ready=self._on_ready
        )
        assert registration.backfill is None, "memory begins after the persisted snapshot end"
        return registration.cursor

    def poll(self) -> bool:
        """Whether there is something to read, now or once the disk has answered. If not, `on_ready`
        is called when there is."""
        return self._cursor is None or self._backfill is not None or self._cursor.poll()

    def next(self) -> CursorItem | ReaderWait | None:
        """The next item; `WAIT_FOR_DISK` when it has yet to be read, None when there is nothing
        more.

        Raises:
            StreamBrokenError: The stream cannot go on.
        """
        item: CursorItem | ReaderWait | None = None
        if self._backfill is not None:
            item = self._backfill.take_item()
            if item is None:
                if not self._backfill.is_done:
                    return WAIT_FOR_DISK
                self.note_sent()
                self._cursor, self._backfill = self._backfill.cursor, None
        if item is None:
            item = self._from_memory()
        self._note_item(item)
        return item

    def next_whole_snapshot(self) -> Chunk | None:
        """The next snapshot at once, if memory has it as one chunk. None if not; ask `next` then.
        See `Cursor.next_whole_snapshot`."""
        cursor = self._cursor
        if cursor is None or self._backfill is not None or self.is_reading:
            return None
        chunk = cursor.next_whole_snapshot()
        if chunk is not None:
            self.seq = chunk.end
            self._end_at_least = SeqNo(0)
        return chunk

    def _from_memory(self) -> CursorItem | ReaderWait | None:
        if self._cursor is not None:
            item = self._cursor.next()
            if not isinstance(item, BackfillNeeded):
                return item
            # The cursor was dropped. The snapshot that it was in must still be finished, by an end
            # that is not below its own.
            self._cursor.close()
            self._cursor = None
            if self.is_reading and self.seq == self._end:
                # All its chunks were handed on. A backfill might wait for ever for more to read.
                self._register_in_memory()
                return SnapshotEndItem(self._end)
            if self.is_reading:
                self._end_at_least = self._end
            self._register_in_memory()
            if self._cursor is not None:
                return self._from_memory()
        self._begin_backfill()
        return WAIT_FOR_DISK

    def _begin_backfill(self) -> None:
        self._backfill = Backfill(
            self._disk,
            self._partition,
            self.seq,
            self._on_disk,
            end_at_least=self._end_at_least,
            stream_end=self._stream_end,
            register=self._register,
        )
        self._backfill.start()

    def _note_item(self, item: CursorItem | ReaderWait | None) -> None:
        if isinstance(item, Chunk):
            self.seq = item.end
        elif isinstance(item, SnapshotStartItem):
            self.is_reading = True
            self._end = item.end
            self._end_at_least = SeqNo(0)
        elif isinstance(item, SnapshotEndItem):
            self.is_reading = False

    def note_sent(self) -> None:
        """Tells that everything that was handed on so far has been sent."""
        if self._backfill is not None:
            self._backfill.note_sent()

    @property
    def reads_disk(self) -> bool:
        """Whether what it hands on now comes from disk."""
        return self._backfill is not None

    def close(self) -> None:
        """Ends it, and gives back what it holds."""
        if self._backfill is not None:
            self._backfill.close()
            # It refers to this object.
            self._backfill = None
        if self._cursor is not None:
            self._cursor.close()
