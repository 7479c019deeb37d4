"""One bucket's log and index together, and the upkeep that is due between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo
from upr_server.storage.chunk_log import (
    STORED_OVERHEAD_BYTES,
    ChunkLog,
    PartitionWrite,
    StoredBucket,
    Token,
)
from upr_server.storage.compaction import Compaction
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.records import LeaseRecord, PartitionRecord

INDEX_MUTATIONS: Final = 16 * 1024
"""Mutations that one step of indexing takes in: 20 to 40 ms, for which a commit may wait."""

INDEX_LAG_MUTATIONS: Final = 128 * 1024
"""A bucket's index follows when it is so far behind, or when it is urgent: large batches touch each
page of the tree once for many keys, and of a key that changes often they see only the last."""

FORGET_KEYS: Final = 64 * 1024
"""Keys that one step takes out of the index: some 50 ms, for which a commit may wait."""

SWEEP_BYTES: Final = 4 * 1024 * 1024
"""Bytes of chunks that one step of a compaction goes over."""

GARBAGE_SHARE: Final = 0.35
"""A partition is compacted when what is superseded comes to this share of what is not"""

GARBAGE_BYTES: Final = 192 * 1024 * 1024
"""and to its part of this: so much a bucket may waste however little it holds."""

GARBAGE_SHARE_FULL: Final = 0.05
"""When the disk is full this share is enough."""

STEPS: Final = (1, 1)
STEPS_URGENT: Final = (3, 1)
STEPS_WASTEFUL: Final = (1, 3)
"""Steps of indexing, and of compaction, in turn when both have something to do. As memory cannot be
freed before it is indexed, that goes first when it is urgent; but not while more and more of the
disk is wasted."""

WASTEFUL_SHARE: Final = 0.7
"""More of the bucket than this, beside twice `GARBAGE_BYTES`, is wasteful."""


class MaintenanceStep(msgspec.Struct, frozen=True):
    """What one step of a bucket's upkeep did.

    Attributes:
        partition: The partition that it was about; -1 when there was nothing to do.
        indexed: Up to which number the index knows it now.
        items: Keys that exist in it, as of there.
        purge_seq: Its purge number.
        compacted: Whether the step belonged to a compaction, and not to indexing.
        more: Whether there is more to do at once.
        broken: Leases that are not whole any more.
    """

    partition: int = -1
    indexed: SeqNo = SeqNo(0)
    items: int = 0
    purge_seq: SeqNo = SeqNo(0)
    compacted: bool = False
    more: bool = False
    broken: Sequence[int] = ()


class BucketStorage:
    """The disk of one bucket, as the one process that writes it sees it.

    Args:
        log: Where the log is kept.
        index: Where the index is kept.
        copied: Copies a chunk that was read to where its reader takes it from.
    """

    def __init__(
        self,
        log: OrderedMap,
        index: OrderedMap,
        copied: Callable[[Chunk], Chunk] = Chunk.copied,
    ) -> None:
        self.log = ChunkLog(log)
        self.index = KeyIndex(index, self.log)
        self.copied = copied
        self._sweep: Compaction | None = None
        self._turn = 0
        self._count = 0
        self._highs: list[int] = []
        self._marks: list[int] = []
        self._items: list[int] = []
        self._purges: list[SeqNo] = []
        self._bytes: list[int] = []
        self._garbage: list[int] = []
        self._garbage_before = 0
        self._is_full = False
        self._keep = 0
        self._damage: CorruptionError | None = None
        self._commits = 0
        self._sweeps = 0

    def open(self) -> StoredBucket:
        """Takes stock of what is there. O(chunks).

        Returns:
            It.
        """
        stored = self.log.load()
        self._count = count = stored.record.partition_count
        sizes = self.log.sizes()
        marks = [self.index.watermark(number) for number in range(count)]
        for number, mark in enumerate(marks):
            # Whoever wanted to truncate it to 0 may have come no further than that.
            while not mark.seq and self.index.has_entries(number):
                self.index.delete_entries(number, FORGET_KEYS)
        self._highs = [partition.record.high for partition in stored.partitions]
        self._purges = [partition.purge_seq for partition in stored.partitions]
        self._marks = [mark.seq for mark in marks]
        self._items = [mark.items for mark in marks]
        self._garbage = [mark.garbage_bytes for mark in marks]
        self._bytes = [sizes.get(number, 0) for number in range(count)]
        return msgspec.structs.replace(
            stored,
            partitions=[
                msgspec.structs.replace(partition, indexed=mark.seq, items=mark.items)
                for partition, mark in zip(stored.partitions, marks, strict=True)
            ],
        )

    def commit(self, writes: Sequence[PartitionWrite]) -> None:
        """See `ChunkLog.commit`."""
        try:
            self.log.commit(writes)
        except DiskFullError:
            self._is_full = True
            raise
        self._is_full = False
        self._commits += 1
        for write in writes:
            number = write.partition
            self._highs[number] = write.record.high
            self._purges[number] = max(self._purges[number], write.purge_seq)
            self._bytes[number] += sum(
                chunk.nbytes + STORED_OVERHEAD_BYTES for chunk in write.chunks
            )

    def put_partition_map(
        self, document: str, records: Sequence[tuple[int, PartitionRecord]]
    ) -> None:
        """See `ChunkLog.put_partition_map`. No record may end below the index's watermark."""
        self.log.put_partition_map(document, records)
        self._sweep = None
        for number, record in records:
            self._highs[number] = record.high

    def truncate(
        self, partition: int, record: PartitionRecord, tokens: Sequence[Token]
    ) -> list[int]:
        """See `ChunkLog.truncate`. Below the index's watermark there is 0 only, once all that the
        index knows was forgotten: see `forget`."""
        if record.high < self._marks[partition]:
            raise ValueError(f"the index knows {self._marks[partition]} of partition {partition}")
        broken = self.log.truncate(partition, record, tokens)
        self._sweep = None
        self._highs[partition] = record.high
        if not record.high:
            self._purges[partition] = SeqNo(0)
            self._bytes[partition] = 0
        return broken

    def forget(self, partition: int) -> bool:
        """Takes some of what the index knows of a partition out of it, all in the end. O(1).

        Returns:
            Whether there is more.
        """
        self._sweep = None
        more = self.index.delete_entries(partition, FORGET_KEYS)
        self._marks[partition] = self._items[partition] = self._garbage[partition] = 0
        return more

    # Upkeep.

    def upkeep(
        self,
        *,
        urgent: bool,
        leases: Sequence[tuple[int, int, int]],
        lapsed: Sequence[LeaseRecord] = (),
        purge_before_cas: int,
        keep: int = 0,
    ) -> MaintenanceStep:
        """One bounded step of indexing or compaction: they take turns when both have something to
        do. The call `Maintain` describes the arguments."""
        if self._damage is not None:
            raise self._damage
        self._keep = keep
        behind = self._furthest_behind(urgent)
        sweep = self._sweep_due()
        if sweep is not None and (behind is None or self._is_turn_to_compact(urgent)):
            broken = self._compact(sweep, leases, lapsed, purge_before_cas)
            done = self._report(sweep.partition, compacted=True, urgent=urgent)
            return msgspec.structs.replace(done, broken=broken)
        if behind is None:
            return MaintenanceStep()
        mark = self.index.follow(behind, INDEX_MUTATIONS, through=self._goal(behind))
        self._marks[behind], self._items[behind] = mark.seq, mark.items
        self._garbage[behind] = mark.garbage_bytes
        return self._report(behind, compacted=False, urgent=urgent)

    def _is_turn_to_compact(self, urgent: bool) -> bool:
        garbage = sum(self._garbage)
        live = sum(self._bytes) - garbage
        if garbage > WASTEFUL_SHARE * live + 2 * GARBAGE_BYTES:
            indexing, compacting = STEPS_WASTEFUL
        else:
            indexing, compacting = STEPS_URGENT if urgent else STEPS
        self._turn = (self._turn + 1) % (indexing + compacting)
        return self._turn >= indexing

    def _furthest_behind(self, urgent: bool) -> int | None:
        lags = self._lags()
        behind = sum(lags) - self._keep
        if behind <= 0 or (not urgent and behind < INDEX_LAG_MUTATIONS):
            return None
        return max(range(self._count), key=lags.__getitem__)

    def _lags(self) -> list[int]:
        return [high - mark for high, mark in zip(self._highs, self._marks, strict=True)]

    def _goal(self, number: int) -> SeqNo:
        """How far the index is to come in a partition that is furthest behind: what is to be left
        is left in all of them alike, by what they have."""
        lags = self._lags()
        return SeqNo(self._highs[number] - self._keep * lags[number] // sum(lags))

    def _sweep_due(self) -> Compaction | None:
        if self._sweep is None:
            share = GARBAGE_SHARE_FULL if self._is_full else GARBAGE_SHARE
            allowed = 0 if self._is_full else GARBAGE_BYTES // self._count
            for number, (nbytes, garbage) in enumerate(
                zip(self._bytes, self._garbage, strict=True)
            ):
                if garbage > share * (nbytes - garbage) + allowed:
                    through = SeqNo(self._marks[number])
                    self._sweep = Compaction(self.log, self.index, number, through)
                    self._garbage_before = garbage
                    break
        return self._sweep

    def _compact(
        self,
        sweep: Compaction,
        leases: Sequence[tuple[int, int, int]],
        lapsed: Sequence[LeaseRecord],
        purge_before_cas: int,
    ) -> Sequence[int]:
        number = sweep.partition
        held = [(start, end) for partition, start, end in leases if partition == number]
        swept = sweep.step(SWEEP_BYTES, held, purge_before_cas, lapsed)
        self._bytes[number] += swept.grown_bytes
        self._purges[number] = swept.purge_seq
        if swept.is_done:
            # What was superseded meanwhile may be left. So may what a lease held: it is looked at
            # again when as much has come anew.
            self._garbage[number] = max(0, self._garbage[number] - self._garbage_before)
            self._sweep = None
            self._sweeps += 1
        if swept.is_done or swept.purged:
            # The log has been compacted, and the purge number must be known whatever becomes of
            # this: what the index keeps of a tombstone that was purged says that nothing is there.
            try:
                self.index.apply_compaction(number, swept.purged, self._garbage[number])
            except DiskFullError:
                pass
            except CorruptionError as error:
                self._damage = error
        return swept.broken

    def _report(self, number: int, *, compacted: bool, urgent: bool) -> MaintenanceStep:
        more = self._furthest_behind(urgent) is not None or self._sweep_due() is not None
        return MaintenanceStep(
            number,
            SeqNo(self._marks[number]),
            self._items[number],
            self._purges[number],
            compacted,
            more,
        )

    def statistics(self) -> dict[str, object]:
        """Figures."""
        return {
            "log": self.log.ordered_map.statistics(),
            "index": self.index.ordered_map.statistics(),
            "chunk_bytes": sum(self._bytes),
            "commits": self._commits,
            "compactions": self._sweeps,
        }

    def close(self) -> None:
        """Lets go of both."""
        self.log.ordered_map.close()
        self.index.ordered_map.close()
