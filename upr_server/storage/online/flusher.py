"""The flusher: writes snapshots of a bucket's partitions to disk, by group commit.

**Group commit.** One transaction writes what all partitions have, and serves all clients that wait
for the disk. One commit is under way at a time, and what arrives meanwhile goes into the next. When
a client waits for durability the next commit begins at once. So it does if a full one had no room
for all that there was. Otherwise it waits a moment, and what is overwritten in that time need not
be written.

**Large snapshots.** A commit takes whole snapshots. While the disk is slow a snapshot grows, up to
the bucket's quota. A large one goes to disk in several commits, so that the process that writes
needs little memory, and others have their turn in between. Only the last one says that the
partition is on disk up to the snapshot's end. Those before say how far the snapshot is there; if
the rest never comes, the next start deletes what there is. Large ones of like size go one after the
other: by turns, none would be on disk, and give its memory back, before nearly all were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec
import structlog
import trio

from upr_protocol.chunk import Chunk
from upr_protocol.concurrency import Notifier
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.engine import Bucket, Partition, SnapshotEndItem
from upr_server.storage.api import Store
from upr_server.storage.calls import Commit
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.index_lag import IndexLag
from upr_server.storage.online.unsaved_answers import take_answers
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import PartialRecord, PartitionRecord

FLUSH_INTERVAL_S: Final = 0.1
"""How long changes may stay in memory only if nobody waits for their durability."""

COMMIT_BYTES: Final = 8 * 1024 * 1024
"""A commit takes no further snapshot once it has so many bytes. So it stays within 100 ms on a
plain disk, and takes little memory on both sides of the pipe."""

COMMIT_BYTES_MAX: Final = 2 * COMMIT_BYTES
"""A commit with so many bytes ends even inside a snapshot. It is longer by one chunk at most, and
by answers to publishers."""

FULL_DISK_RETRY_S: Final = 1.0
"""How long to wait before a retry while the disk is full."""

STEP_BYTES: Final = 1024 * 1024
"""Bytes that are encoded before other tasks run: a millisecond or so."""

SNAPSHOT_BYTES: Final = 16 * 1024
"""What closing and encoding a snapshot of one mutation costs, in the same unit; or to put one
together with others."""

STEP_WAITING: Final = 8
"""Partitions with large snapshots that a step passes over. To close one of 1,000 arrays takes some
0.2 ms (estimated)."""

STEP_PARTITIONS: Final = 8
"""Partitions whose snapshots are noted as committed before other tasks run."""

STEP_CALLS: Final = 64
"""Waiting calls that are made before other tasks run: each sends a reply, at some 15 µs. A
connection may wait for 4,096."""

TURN_CALLS: Final = 16
"""Waiting calls of one partition that are made before those of the next."""

log = structlog.get_logger(__name__)

OnPersisted = Callable[[bool], None]
"""Called with True once a sequence number is on disk, or with False if that cannot be promised."""


class _Turn:
    """What this task has done since others had their turn.

    Attributes:
        nbytes: The bytes that it has encoded, and other work in the same unit.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    async def end_if_long(self) -> None:
        """Lets others have their turn after more than `STEP_BYTES`."""
        if self.nbytes > STEP_BYTES:
            self.nbytes = 0
            await trio.lowlevel.checkpoint()


class Flusher:
    """Writes one bucket's changes to disk.

    Args:
        store: The disk.
        bucket: The bucket.
        on_commit: Called after each commit.
        on_damage: Called with each partition that is refused since a commit has met a damaged
            record of it, and its steps made; others have their turn between them.

    Attributes:
        index_lag: How far the index is behind; commits wait for it.
        disk_full_reason: Why nothing can be written now; empty when it can.
    """

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        on_commit: Callable[[], None],
        on_damage: Callable[[Partition], Iterator[None]],
    ) -> None:
        self._store = store
        self._bucket = bucket
        self._on_commit = on_commit
        self._on_damage = on_damage
        # Partitions with something to persist; a dict, so that they take turns.
        self._dirty_partitions: dict[PartitionId, None] = {}
        self._dirty_since = 0.0
        # Those of whose large snapshots the disk has the front. The last will be done first.
        self._unfinished_partitions: dict[PartitionId, None] = {}
        # There is something to write, somebody waits for it, or `stop` was called.
        self._wakeup = Notifier()
        self._callbacks: dict[PartitionId, deque[tuple[SeqNo, OnPersisted]]] = {}
        # Tasks in `wait_until_persisted`.
        self._waiters = 0
        self._commit_made = Notifier()
        self._is_stopping = False
        self._commits_under_way: dict[trio.Event, None] = {}
        self._commits = self._committed_bytes = self._committed_mutations = 0
        self._last_commit_s = self._longest_commit_s = 0.0
        self.index_lag = IndexLag(bucket)
        self.disk_full_reason = ""
        self._last_commit_at = trio.current_time()
        for partition in bucket.partitions:
            partition.repeated_batches.answers.track_unsaved()
            cursor = partition.manager.persistence
            cursor.subscribe(partial(self._mark_dirty, partition.id))
            if cursor.poll():
                self._mark_dirty(partition.id)

    def _mark_dirty(self, partition: PartitionId) -> None:
        if self._bucket.partitions[partition].damage:
            return
        if not self._dirty_partitions:
            self._dirty_since = trio.current_time()
            self._wakeup.notify()
        self._dirty_partitions[partition] = None

    def stop_notifying(self) -> None:
        """The bucket was deleted: nobody is told of commits or damage any more."""
        self._on_commit = lambda: None
        self._on_damage = lambda _: iter(())

    # Waiting for the disk.

    def call_when_persisted(self, partition: Partition, seq: SeqNo, call: OnPersisted) -> None:
        """Calls `call` when everything up to `seq` is on disk; perhaps at once."""
        if partition.damage:
            call(False)
        elif partition.manager.persistence.committed_seq >= seq:
            call(True)
        elif self.disk_full_reason:
            call(False)
        else:
            self._callbacks.setdefault(partition.id, deque()).append((seq, call))
            self._wakeup.notify()

    async def wait_until_persisted(self, partition: Partition, seq: SeqNo) -> None:
        """Waits until everything up to `seq` is on disk, however long the disk is full. It can be
        cancelled at any time, even while a commit never ends, and leaves nothing behind."""
        self._waiters += 1
        self._wakeup.notify()
        # It may wait for a partition that hands over.
        self.index_lag.check_again()
        try:
            await self._commit_made.wait_until(
                lambda: partition.manager.persistence.committed_seq >= seq
            )
        finally:
            self._waiters -= 1

    async def _call_reached(self) -> None:
        """Makes the calls whose numbers are on disk. Others have their turn in between, and
        partitions take turns. After a cancellation, the rest waits still."""
        partitions, count = deque(self._callbacks), 0
        while partitions:
            partition_id = partitions.popleft()
            count += 1
            callbacks = self._callbacks.get(partition_id)
            committed_seq = self._bucket.partitions[partition_id].manager.persistence.committed_seq
            # They are in the order of their numbers, except that a late one may stand behind higher
            # numbers. It is then answered with these, which is not too early.
            calls_left = TURN_CALLS
            while callbacks and callbacks[0][0] <= committed_seq and calls_left:
                callbacks.popleft()[1](True)
                calls_left -= 1
            count += TURN_CALLS - calls_left
            if not callbacks:
                self._callbacks.pop(partition_id, None)
            elif not calls_left:
                partitions.append(partition_id)
            if count >= STEP_CALLS:
                count = 0
                await trio.lowlevel.checkpoint()

    async def refuse_callbacks(self, partition_id: PartitionId | None = None) -> None:
        """Answers the callbacks of a partition, or all, that durability cannot be promised now.
        Others have their turn in between."""
        count = 0
        while self._callbacks if partition_id is None else partition_id in self._callbacks:
            next_id = next(iter(self._callbacks)) if partition_id is None else partition_id
            callbacks = self._callbacks[next_id]
            # None is lost to a cancellation: those that are left are answered by the next call.
            callbacks.popleft()[1](False)
            if not callbacks:
                del self._callbacks[next_id]
            count += 1
            if count % STEP_CALLS == 0:
                await trio.lowlevel.checkpoint()

    # Flushing.

    async def run(self) -> None:
        """Flushes until it is cancelled; after `stop`, until everything is on disk.

        Raises:
            DiskFullError: The disk is full, and `stop` was called.
            StoreFailedError: The disk has failed.
        """
        while True:
            await self._wakeup.wait_until(lambda: bool(self._dirty_partitions) or self._is_stopping)
            if not self._dirty_partitions:
                return
            await self._linger()
            await self.index_lag.wait(lambda: self._is_stopping)
            await self._commit_group(await self._collect_group())

    def stop(self) -> None:
        """Makes `run` write what there is to disk, and end. No more mutations may come."""
        self._is_stopping = True
        self._wakeup.notify()
        self.index_lag.check_again()

    async def _linger(self) -> None:
        """Lets more changes gather, unless somebody waits for durability."""
        with trio.move_on_at(self._dirty_since + FLUSH_INTERVAL_S):
            await self._wakeup.wait_until(
                lambda: bool(self._callbacks or self._waiters) or self._is_stopping
            )

    async def _collect_group(self) -> list[PartitionWrite]:
        """Collects the next group commit: the whole snapshots that partitions have now, until they
        fill it."""
        writes: list[PartitionWrite] = []
        dirty_since, self._dirty_since = self._dirty_since, trio.current_time()
        total_bytes, turn = 0, _Turn()
        found_no_room = False
        partition_ids = list(self._dirty_partitions)
        for partition_id in partition_ids:
            partition = self._bucket.partitions[partition_id]
            high_seq = partition.high_seq
            chunks, ends = await self._collect_partition(partition, total_bytes, turn)
            if chunks:
                total_bytes += sum(chunk.nbytes for chunk in chunks)
                writes.append(await self._write(partition, chunks, ends))
                turn.nbytes += min(writes[-1].answer_bytes, STEP_BYTES)
            else:
                # It waits for others. Its own snapshot, a large one, may have been closed just now.
                turn.nbytes += STEP_BYTES // STEP_WAITING
                await turn.end_if_long()
            found_no_room = self._note_collected(partition, high_seq) or found_no_room
            if total_bytes >= COMMIT_BYTES:
                found_no_room = found_no_room or partition_id != partition_ids[-1]
                break
        if found_no_room:
            # What found no room has waited already, and waits no longer.
            self._dirty_since = dirty_since
        return writes

    async def _collect_partition(
        self, partition: Partition, commit_bytes: int, turn: _Turn
    ) -> tuple[list[Chunk], list[SeqNo]]:
        """The chunks and the snapshots' ends of a partition that go into a commit, which has
        `commit_bytes` already."""
        chunks: list[Chunk] = []
        ends: list[SeqNo] = []
        for item, joined_count in self._snapshots(partition, commit_bytes):
            if isinstance(item, SnapshotEndItem):
                ends.append(item.end)
                continue
            chunks.append(item)
            # The disk needs its checksum. To compute those of all in one step, when they are
            # sent, takes 7 ms for 63 MiB; the chunk keeps it.
            _ = item.crc
            turn.nbytes += item.nbytes + SNAPSHOT_BYTES * (1 + joined_count)
            await turn.end_if_long()
        return chunks, ends

    def _note_collected(self, partition: Partition, high_seq: SeqNo) -> bool:
        """Takes a partition off the list, unless more has come meanwhile. Returns whether some of
        what it had up to `high_seq` found no room in the commit."""
        partition_id, cursor = partition.id, partition.manager.persistence
        del self._dirty_partitions[partition_id]
        if cursor.poll():
            # It goes to the end: partitions take turns.
            self._dirty_partitions[partition_id] = None
        if cursor.is_reading:
            self._unfinished_partitions[partition_id] = None
        else:
            self._unfinished_partitions.pop(partition_id, None)
        return cursor.seq < high_seq or cursor.is_reading

    def _snapshots(
        self, partition: Partition, nbytes: int
    ) -> Iterator[tuple[Chunk | SnapshotEndItem, int]]:
        """The snapshots that a partition has now, for a commit that has `nbytes` already, until it
        is full. Inside a snapshot it is full with `COMMIT_BYTES_MAX`: the next call then begins
        with the rest. One that may not fit waits, perhaps, for those of others. Each item with how
        many snapshots were put together before it could be read."""
        cursor = partition.manager.persistence
        high_seq = partition.high_seq
        # To the end of the snapshot that holds `high_seq`. That may be higher: at a checkpoint of
        # `_collect_partition` others may write more, and close the snapshot.
        while cursor.seq < high_seq or cursor.is_reading:
            joined_count = partition.manager.join_unwritten()
            snapshot = cursor.next_whole_snapshot()
            if snapshot is not None:
                nbytes += snapshot.nbytes
                yield snapshot, joined_count
                yield SnapshotEndItem(snapshot.end), 0
                if nbytes >= COMMIT_BYTES:
                    return
                continue
            if not cursor.is_reading and not self._may_begin(cursor.entry.snapshot.nbytes, nbytes):
                return
            item = cursor.next()
            if isinstance(item, Chunk):
                nbytes += item.nbytes
                yield item, 0
                # Behind its last chunk the end comes at once. The disk notes it with that chunk.
                if nbytes >= COMMIT_BYTES_MAX and cursor.seq < cursor.entry.end:
                    return
            elif isinstance(item, SnapshotEndItem):
                yield item, 0
                if nbytes >= COMMIT_BYTES:
                    return

    def _may_begin(self, snapshot_bytes: int, commit_bytes: int) -> bool:
        """Whether a commit with `commit_bytes` takes a snapshot of so many bytes. Unless it fits,
        it must be much smaller than what is left of the others: then it is done before them."""
        if snapshot_bytes + commit_bytes <= COMMIT_BYTES_MAX:
            return True
        while self._unfinished_partitions:
            partition_id = next(reversed(self._unfinished_partitions))
            cursor = self._bucket.partitions[partition_id].manager.persistence
            if cursor.is_reading:
                entry = cursor.entry
                share_left = (entry.end - cursor.seq) / (entry.end - entry.start)
                return 2 * snapshot_bytes <= share_left * entry.snapshot.nbytes
            # It has come to its end just now, or has begun again: nobody waits for it.
            del self._unfinished_partitions[partition_id]
        return True

    async def _write(
        self, partition: Partition, chunks: list[Chunk], ends: list[SeqNo]
    ) -> PartitionWrite:
        cursor, last_seq = partition.manager.persistence, chunks[-1].end
        high = ends[-1] if ends else cursor.committed_seq
        record = record_of(partition, high)
        if high < last_seq:
            history_id, snapshot_end = partition.failover_log.current, cursor.entry.end
            front = PartialRecord(history_id, high, snapshot_end, last_seq)
            record = msgspec.structs.replace(record, partial=front)
        # Those that belong to a snapshot come with its end.
        answers = await take_answers(partition, high)
        return PartitionWrite(partition.id, record, chunks, answers, ends)

    async def _commit_group(self, writes: list[PartitionWrite]) -> None:
        """Group commit: writes all of it in one transaction, and calls what waited for it. Tries
        again while the disk is full."""
        if not writes:
            return
        began_at = trio.current_time()
        while full_disk := await self._try_commit(writes):
            if not self.disk_full_reason:
                log.error("disk full", bucket=self._bucket.name, error=full_disk)
            self.disk_full_reason = full_disk
            # Publishers hear of it now: it may be long until there is room.
            await self.refuse_callbacks()
            if self._is_stopping:
                raise DiskFullError(full_disk)
            await trio.sleep(FULL_DISK_RETRY_S)
        self._last_commit_s = self._last_commit_at - began_at
        self._longest_commit_s = max(self._longest_commit_s, self._last_commit_s)
        self._commits += 1
        await self._call_reached()
        self._commit_made.notify()
        self._on_commit()

    async def _try_commit(self, writes: list[PartitionWrite]) -> str:
        """Writes to disk, and notes that; returns why the disk has no room, or nothing if it
        has."""
        with self.commit_under_way():
            try:
                damages = await self._store.ask(Commit(self._bucket.name, tuple(writes)))
            except DiskFullError as error:
                return str(error) or "the disk is full"
            # Before others have their turn: what they write there would be lost.
            for partition_id, damage in damages.items():
                self._refuse(PartitionId(partition_id), damage)
            await self._note_committed(writes)
        for partition_id in damages:
            await self._give_up(self._bucket.partitions[partition_id])
        return ""

    def _refuse(self, partition_id: PartitionId, damage: str) -> None:
        """Writes nothing of a partition any more: one of its records is damaged."""
        partition = self._bucket.partitions[partition_id]
        partition.refuse(damage)
        self._dirty_partitions.pop(partition_id, None)
        self._unfinished_partitions.pop(partition_id, None)
        log.error(
            "mutations in memory are lost",
            bucket=self._bucket.name,
            partition=partition_id,
            reason=damage,
            mutations=partition.high_seq - partition.manager.persistence.committed_seq,
        )

    async def _give_up(self, partition: Partition) -> None:
        """Answers those who wait for a partition that is refused now. Then passes over what it has
        in memory, as if that were on disk: otherwise it could never be freed."""
        await self.refuse_callbacks(partition.id)
        for _ in self._on_damage(partition):
            await trio.lowlevel.checkpoint()
        cursor = partition.manager.persistence
        while (item := cursor.next()) is not None:
            if isinstance(item, SnapshotEndItem):
                cursor.commit(item.end)
            await trio.lowlevel.checkpoint()

    async def _note_committed(self, writes: list[PartitionWrite]) -> None:
        if self.disk_full_reason:
            log.info("disk has space again", bucket=self._bucket.name)
            self.disk_full_reason = ""
        self._last_commit_at = trio.current_time()
        while writes:
            # What was written is freed in these steps: all in one took 12 ms, with 100,000 answers.
            write = writes.pop()
            self._committed_bytes += sum(chunk.nbytes for chunk in write.chunks)
            self._committed_mutations += sum(chunk.count for chunk in write.chunks)
            partition = self._bucket.partitions[write.partition]
            if write.ends:
                # Only after the commit: memory may free what this cursor has passed.
                partition.manager.persistence.commit(write.record.high)
            if len(writes) % STEP_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()

    @contextmanager
    def commit_under_way(self) -> Iterator[None]:
        """Marks the time from asking the disk for a commit, of this flusher or of a replicator,
        until the partitions say where they end on disk: for so long the disk may be further."""
        commit_noted = trio.Event()
        self._commits_under_way[commit_noted] = None
        try:
            yield
        finally:
            del self._commits_under_way[commit_noted]
            commit_noted.set()

    def commits_under_way(self) -> list[trio.Event]:
        """For each commit under way an event that is set when it is noted, or has failed."""
        return list(self._commits_under_way)

    @property
    def lag_mutations(self) -> int:
        """How many mutations are not on disk. O(partitions)."""
        return sum(
            partition.high_seq - partition.manager.persistence.committed_seq
            for partition in self._bucket.partitions
        )

    def statistics(self) -> dict[str, object]:
        """Figures; times in seconds."""
        return {
            "lag_mutations": self.lag_mutations,
            "commits": self._commits,
            "mutations_per_commit": self._committed_mutations // max(self._commits, 1),
            "bytes_per_commit": self._committed_bytes // max(self._commits, 1),
            "last_commit_s": round(self._last_commit_s, 6),
            "longest_commit_s": round(self._longest_commit_s, 6),
            "full": self.disk_full_reason,
        }


def record_of(partition: Partition, high: SeqNo) -> PartitionRecord:
    """The record of a partition that is on disk up to `high`."""
    log_pairs = tuple(partition.failover_log.pairs())
    return PartitionRecord(
        partition.state,
        log_pairs,
        high,
        partition.last_cas,
        is_incomplete=partition.is_incomplete,
    )
