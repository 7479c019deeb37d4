"""Reading a leased range of one partition from disk, with every version in it."""

from __future__ import annotations

from collections.abc import Callable

from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo
from upr_server.engine import CursorItem, Partition, SnapshotEndItem, SnapshotStartItem
from upr_server.storage.online.backfill import WAIT_FOR_DISK, Backfill, ReaderWait
from upr_server.storage.online.bucket_disk import BucketDisk


class LeasedReader:
    """A reader with the interface of `PartitionReader`, which reads one snapshot: the same each
    time for as long as the range is leased. It never reads from memory, where keys are deduplicated
    that the disk has more than once.

    Args:
        disk: The bucket's disk.
        partition: The partition.
        start: Where the range begins, exclusive.
        end: Where it ends.
        lease_id: The lease that holds it.
        on_disk: Called when there is something to read after `next` answered `WAIT_FOR_DISK`.

    Attributes:
        seq: Everything up to here was handed on.
        is_reading: Whether the start of the snapshot was handed on, and its end was not.
    """

    __slots__ = ("_backfill", "is_reading", "seq")

    def __init__(
        self,
        disk: BucketDisk,
        partition: Partition,
        start: SeqNo,
        end: SeqNo,
        lease_id: int,
        on_disk: Callable[[], None],
    ) -> None:
        self._backfill = Backfill(disk, partition, start, on_disk, end=end, lease_id=lease_id)
        self._backfill.start()
        self.seq = start
        self.is_reading = False

    def poll(self) -> bool:
        """True: there is always something to read, now or once the disk has answered."""
        return True

    def next_whole_snapshot(self) -> None:
        """None: memory has nothing of it."""

    def next(self) -> CursorItem | ReaderWait:
        """The next item; `WAIT_FOR_DISK` when it has yet to be read.

        Raises:
            StreamBrokenError: The stream cannot go on.
        """
        item = self._backfill.take_item()
        if item is None:
            return WAIT_FOR_DISK
        if isinstance(item, SnapshotStartItem):
            self.is_reading = True
        elif isinstance(item, Chunk):
            self.seq = item.end
        elif isinstance(item, SnapshotEndItem):
            self.is_reading = False
        return item

    def note_sent(self) -> None:
        """Tells that everything that was handed on so far has been sent."""
        self._backfill.note_sent()

    @property
    def reads_disk(self) -> bool:
        """True: everything that it hands on comes from disk."""
        return True

    def close(self) -> None:
        """Ends it, and gives back what it holds."""
        self._backfill.close()
