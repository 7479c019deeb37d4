"""The writer of a replica: puts on disk what was received, by commits of many partitions.

A commit is under way while more is received. When the disk has it, the partitions in memory, which
keep nothing else, move to where their disk stands, and the source is told.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from upr_protocol.concurrency import Notifier, run_steps
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, PartitionId
from upr_server.engine import Partition
from upr_server.replication.joined_snapshots import join_snapshots
from upr_server.replication.local_server import LocalServer, streams_ended
from upr_server.replication.received_answers import add_answers, forget_answers
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.replication.roles import STEP_PARTITIONS
from upr_server.replication.source_streams import SourceStreams
from upr_server.storage.calls import Commit
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.unsaved_answers import take_answers
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import PartitionRecord

BUFFER_BYTES: Final = 32 * 1024 * 1024
"""How much may wait for the disk: four commits."""

COLLECTED_PARTITIONS: Final = 8
"""Partitions whose changes one step takes for a commit, or drops, each perhaps with hundreds of
answers to publishers."""

COLLECTED_ANSWER_BYTES: Final = 8 * 1024
"""A step ends with a partition of which it takes more answers to publishers than so many bytes: 200
small ones take 0.3 ms, and a replica that begins gets thousands of each partition."""

NOTIFIED_BYTES: Final = 16 * 1024
"""Bytes of chunks whose keys are searched for design documents in the time that it takes to move a
partition to where its disk stands: a step searches 1 MiB."""

NOTIFIED_CHUNK_BYTES: Final = 2 * 1024
"""What it costs to look at a chunk at all, in the same unit: 4 µs. A snapshot from the source's
disk may have ten thousands of one small mutation each."""

RECEIVED_COMMIT_BYTES: Final = 8 * 1024 * 1024
"""A commit takes no further partition once it has come to this; see the flusher's."""

FULL_DISK_RETRY_S: Final = 0.5
"""The wait between attempts to write to a full disk."""

log = structlog.get_logger(__name__)


class ReplicaWriter:
    """Writes to disk what a replicator has received of its partitions.

    Args:
        server: The server that this runs in.
        disk: The bucket.
        received_snapshots: What was received of each partition.
        streams: Over which the source is told what is on disk.

    Attributes:
        commit_lock: Held by a commit, and by a rollback, which must not see half of one.
        commits: How many there were.
        dirty_bytes: Bytes of chunks that wait for a commit.
        disk_full_reason: Why there is no room on disk for what was received; empty while there is.
        drop_reason: Why what was received was dropped; empty if nothing was.
        dropped_mutations: How many mutations were dropped, as there was no room.
        is_deleted: Whether the bucket was deleted.
        written: Notified when a commit has ended, or has found no room; and at the end.
    """

    def __init__(
        self,
        server: LocalServer,
        disk: BucketDisk,
        received_snapshots: dict[PartitionId, ReceivedSnapshots],
        streams: SourceStreams,
    ) -> None:
        self.commit_lock = trio.Lock()
        self.commits = 0
        self.dirty_bytes = 0
        self.disk_full_reason = ""
        self.drop_reason = ""
        self.dropped_mutations = 0
        self.is_deleted = False
        self.written = Notifier()
        self._server = server
        self._disk = disk
        # A deleted bucket lets go of its partitions, and a last commit may still be under way.
        self._partitions = disk.bucket.partitions
        self._received_snapshots = received_snapshots
        self._streams = streams
        # Partitions that have something to be written, in the order in which it came, each with the
        # bytes of its chunks. Of a partition that is not here, a last chunk may wait for the end of
        # its snapshot: nobody may wait until that is written.
        self._dirty: dict[PartitionId, int] = {}
        self._became_dirty = Notifier()
        # What the disk has.
        self._on_disk: dict[PartitionId, PartitionRecord] = {}
        # Whether a commit has what it took out of `_dirty`.
        self._is_committing = False
        self._may_drop = self._is_closed = False

    def _partition(self, partition_id: PartitionId) -> Partition:
        return self._partitions[partition_id]

    # What is to be written.

    def mark_dirty(self, partition_id: PartitionId) -> None:
        """Something was received of a partition that is to be written."""
        nbytes = self._received_snapshots[partition_id].nbytes
        self.dirty_bytes += nbytes - self._dirty.get(partition_id, 0)
        self._dirty[partition_id] = nbytes
        self._became_dirty.notify()

    def is_dirty(self, partition_id: PartitionId) -> bool:
        """Whether something of a partition waits for a commit."""
        return partition_id in self._dirty

    def _unmark_dirty(self, partition_id: PartitionId) -> None:
        self.dirty_bytes -= self._dirty.pop(partition_id, 0)

    @property
    def is_settled(self) -> bool:
        """Whether what was received is on disk, or has found no room there."""
        return (
            bool(self.disk_full_reason)
            or self._is_closed
            or not (self._dirty or self._is_committing)
        )

    # Start and end.

    def add(self, partition_id: PartitionId) -> None:
        """A partition is written from now on."""
        self._on_disk[partition_id] = self._received_snapshots[partition_id].written_record

    def writes(self, partition_id: PartitionId) -> bool:
        """Whether a partition is written. It is no more once it is refused."""
        return partition_id in self._on_disk

    async def run(self) -> None:
        """Writes what is received, until it is cancelled."""
        while True:
            await self._became_dirty.wait_until(lambda: bool(self._dirty))
            await self._commit()

    async def flush(self) -> None:
        """Brings to disk what was received."""
        while self._dirty:
            await self._commit()
        # A commit that is under way has taken its partitions out of `_dirty` already.
        async with self.commit_lock:
            pass

    def close(self) -> None:
        """Nothing is written any more. Nobody waits for that."""
        self._is_closed = True
        self.written.notify()

    def discard(self) -> None:
        """The bucket was deleted: nothing is written any more."""
        self.is_deleted = True
        self._dirty.clear()
        self.dirty_bytes = 0

    def drop_if_full(self) -> None:
        """From now on nothing waits while the disk is full: what finds no room is dropped."""
        self._may_drop = True

    # Commits.

    async def _commit(self) -> None:
        async with self.commit_lock:
            # The end waits for the commit: otherwise its data would be received again.
            with trio.CancelScope(shield=True):
                self._is_committing = True
                try:
                    writes = await self._collect()
                    if writes:
                        await self._write_to_disk(writes)
                        self._disk.note_committed()
                finally:
                    self._is_committing = False
                    self.written.notify()

    async def _collect(self) -> list[PartitionWrite]:
        """Takes what is to be written next, in steps. If this were cancelled, that would be lost.
        What comes meanwhile for another partition is written, too."""
        writes: list[PartitionWrite] = []
        total = 0
        for count, partition_id in enumerate(list(self._dirty), 1):
            snapshots = self._received_snapshots[partition_id]
            total += snapshots.nbytes
            # Taken out before it is written: what is received meanwhile marks it again.
            self._unmark_dirty(partition_id)
            if snapshots.has_unwritten:
                writes.append(await self._partition_write(partition_id, snapshots))
                if writes[-1].answer_bytes > COLLECTED_ANSWER_BYTES:
                    await trio.lowlevel.checkpoint()
            if total > RECEIVED_COMMIT_BYTES:
                break
            if count % COLLECTED_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        return writes

    async def _partition_write(
        self, partition_id: PartitionId, snapshots: ReceivedSnapshots
    ) -> PartitionWrite:
        partition = self._partition(partition_id)
        write = snapshots.take_write()
        await add_answers(partition, write.answers)
        answers = await take_answers(partition, write.record.high)
        chunks, ends = await run_steps(
            join_snapshots(write.chunks, write.ends, is_continued=write.is_continuation)
        )
        return PartitionWrite(partition_id, write.record, chunks, answers, ends, write.purge_seq)

    async def _write_to_disk(self, writes: list[PartitionWrite]) -> None:
        """Puts it on disk, and moves the partitions there. Waits for room on a full disk, until
        `drop_if_full` or the bucket is deleted; then it is dropped."""
        while not self.is_deleted:
            try:
                await self._write_once(writes)
            except DiskFullError as error:
                if not self.disk_full_reason:
                    log.error(
                        "disk full; retrying", bucket=self._disk.bucket.name, error=str(error)
                    )
                self.disk_full_reason = self._streams.trouble = str(error)
                self.written.notify()
            else:
                if self.disk_full_reason and self._streams.trouble == self.disk_full_reason:
                    self._streams.trouble = ""
                self.disk_full_reason = ""
                return
            if self._may_drop:
                self.drop_reason = self.disk_full_reason
                await self._drop_received()
                return
            await trio.sleep(FULL_DISK_RETRY_S)

    async def _write_once(self, writes: list[PartitionWrite]) -> None:
        with self._disk.flusher.commit_under_way():
            name = self._disk.bucket.name
            damages = await self._disk.store.ask(Commit(name, tuple(writes)))
            # Before others have their turn: what they receive of them would be written.
            for partition_id, damage in damages.items():
                self.refuse(PartitionId(partition_id), damage)
            if damages:
                writes[:] = [write for write in writes if write.partition not in damages]
            self.commits += 1
            await self._move_partitions(writes)
        for partition_id in damages:
            await self.note_refused(PartitionId(partition_id))

    def refuse(self, partition_id: PartitionId, damage: str) -> None:
        """Neither receives nor writes a partition any more: a damaged record of it was met."""
        del self._received_snapshots[partition_id], self._on_disk[partition_id]
        self._unmark_dirty(partition_id)
        self._partition(partition_id).refuse(damage)
        self._streams.leave(partition_id)

    async def note_refused(self, partition_id: PartitionId) -> None:
        """Tells those who wait for a partition that it is refused, in steps."""
        await self._disk.flusher.refuse_callbacks(partition_id)
        # What was received and not written is not lost: the source has it.
        for _ in self._disk.note_refused(self._partition(partition_id), is_on_disk=True):
            await trio.lowlevel.checkpoint()

    async def _drop_received(self) -> None:
        """Forgets what was received and is not on disk, in steps. O(partitions + answers)."""
        for count, (partition_id, record) in enumerate(list(self._on_disk.items()), 1):
            received_seq = self._received_snapshots[partition_id].received_seq
            self.dropped_mutations += received_seq - record.received_seq
            # In one step: what a stream that begins again brings meanwhile is to be written.
            self._received_snapshots[partition_id] = ReceivedSnapshots.from_record(record)
            self._unmark_dirty(partition_id)
            # If this node becomes active, a batch that is dropped here must count as new.
            await forget_answers(self._partition(partition_id), record.high)
            if count % COLLECTED_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()

    # Where the partitions stand.

    async def _move_partitions(self, writes: list[PartitionWrite]) -> None:
        """Moves the partitions in memory to where the disk stands now, in steps."""
        # Logs that came since are for the next commit: who is told of a
        # history must find it here after a crash.
        logs: list[FailoverLog] = []
        changing_partitions: list[Partition] = []
        for count, write in enumerate(writes, 1):
            partition = self._partition(PartitionId(write.partition))
            logs.append(FailoverLog.of_pairs(write.record.failover_log))
            if partition.failover_log != logs[-1]:
                changing_partitions.append(partition)
            if count % STEP_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()
        # A consumer of this node must hear of the new log before any data of it.
        async with streams_ended(
            self._server, self._disk.bucket, changing_partitions, Status.ROLLBACK_NEEDED
        ):
            step_cost = 0.0
            while writes:
                write = writes.pop()
                partition = self._partition(PartitionId(write.partition))
                # Each reader of a partition is sent on to the disk by it.
                step_cost += partition.manager.cursor_count
                # What was written is freed in these steps, too.
                self._note_committed(write, logs.pop())
                for chunk in write.chunks:
                    step_cost += (NOTIFIED_CHUNK_BYTES + chunk.nbytes) / NOTIFIED_BYTES
                    if step_cost >= STEP_PARTITIONS:
                        step_cost = 0.0
                        await trio.lowlevel.checkpoint()
                    partition.updates.notify_chunks((chunk,))
                if step_cost >= STEP_PARTITIONS:
                    step_cost = 0.0
                    await trio.lowlevel.checkpoint()

    def _note_committed(self, write: PartitionWrite, failover_log: FailoverLog) -> None:
        partition_id = PartitionId(write.partition)
        partition = self._partition(partition_id)
        self._on_disk[partition_id] = write.record
        move_to_record(partition, write.record)
        partition.is_incomplete = write.record.is_incomplete
        partition.purge_seq = max(partition.purge_seq, write.purge_seq)
        if partition.failover_log != failover_log:
            partition.change_state(partition.state, failover_log)
        self._streams.report(partition_id)

    def note_truncated(self, partition_id: PartitionId, record: PartitionRecord) -> None:
        """The disk has only what `record` says of a partition, and nothing of it waits for a
        commit. `commit_lock` is held."""
        self._unmark_dirty(partition_id)
        self.written.notify()
        self._on_disk[partition_id] = record


def move_to_record(partition: Partition, record: PartitionRecord) -> None:
    """Moves a partition that keeps nothing in memory to where its disk stands."""
    if record.high != partition.high_seq:
        partition.restart_at(record.high, Cas(record.last_cas))
