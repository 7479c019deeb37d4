"""Replicates some partitions from one node: receives, and writes to disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import structlog
import trio

from upr_protocol.client import (
    Address,
    AnswersReceived,
    ChunkReceived,
    Event,
    ReplicaConsumer,
    ResumeState,
    SaveLimits,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    consume_as_replica,
)
from upr_protocol.concurrency import Notifier, run_steps
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, PartitionId, PartitionState, SeqNo
from upr_server.engine import Partition
from upr_server.replication.joined_snapshots import join_snapshots
from upr_server.replication.local_server import LocalServer, streams_ended
from upr_server.replication.received_answers import add_answers, checked_answers, forget_answers
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.replication.roles import STEP_PARTITIONS, ReplicationSource
from upr_server.runtime import System, essential
from upr_server.storage.calls import Commit, FindSnapshotEnd, RefusePartition
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.flusher import STEP_ANSWERS, take_answers
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

RECONNECT_S: Final = 5.0
"""How long a consumer tries to reconnect by itself, before another one starts from the disk."""

REPLICATION_RETRY_S: Final = 0.5
"""The wait before that, and between attempts to write to a full disk."""

log = structlog.get_logger(__name__)


class Replicator:
    """Replicates from one node some partitions of one bucket, until it is stopped.

    Args:
        server: The server that this runs in.
        disk: The bucket.
        node: This node's name.
        source_name: The name of the node to replicate from.
        source: Where that is, and which partitions.
        received_snapshots: What was received of them; it outlives this object.
        system: How the node is reached.

    Attributes:
        source: Where it replicates from, and which partitions; without those that are refused since
            a damaged record of them was met.
        trouble: Why it does not replicate now; empty while it does.
        disk_full_reason: Why there is no room on disk for what was received; empty while there is.
        dropped_mutations: How many mutations it has dropped, as there was no room.
    """

    def __init__(
        self,
        server: LocalServer,
        disk: BucketDisk,
        node: str,
        source_name: str,
        source: ReplicationSource,
        received_snapshots: dict[PartitionId, ReceivedSnapshots],
        system: System,
    ) -> None:
        self.source = source
        self.trouble = ""
        self.disk_full_reason = ""
        self.dropped_mutations = 0
        self._source_name = source_name
        self._server = server
        self._disk = disk
        # A deleted bucket lets go of its partitions, and a last commit may still be under way.
        self._partitions = disk.bucket.partitions
        self._node = node
        self._received_snapshots = received_snapshots
        self._system = system
        # By each partition whose stream was accepted. A consumer asks for one state.
        self._consumers: dict[PartitionId, ReplicaConsumer] = {}
        # That of each state, while there is one.
        self._current_consumers: dict[PartitionState, ReplicaConsumer] = {}
        # In each a consumer runs. Cancelled, the next one runs, of the partitions that are left.
        self._consumer_scopes: dict[PartitionState, trio.CancelScope] = {}
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        # Partitions that have something to be written, in the order in which it came, each with the
        # bytes of its chunks. Of a partition that is not here, a last chunk may wait for the end of
        # its snapshot: nobody may wait until that is written.
        self._dirty: dict[PartitionId, int] = {}
        self._dirty_bytes = 0
        self._became_dirty = Notifier()
        # A commit has ended, or has found no room; or the replicator has ended, or goes on.
        self._written = Notifier()
        # Held by a commit, and by a rollback, which must not see half of one.
        self._commit_lock = trio.Lock()
        self._commits = 0
        # What the disk has; made by `run`.
        self._on_disk: dict[PartitionId, PartitionRecord] = {}
        # Whether a commit has what it took out of `_dirty`.
        self._is_committing = False
        self._is_deleted = self._is_stopping = self._is_paused = False
        self._drop_reason = ""

    @property
    def _address(self) -> Address:
        return Address.of_bucket(self.source.address, self._disk.bucket.name, self._system.security)

    def _partition(self, partition_id: PartitionId) -> Partition:
        return self._partitions[partition_id]

    # Start and stop.

    async def run(self) -> None:
        """Replicates until `stop`. What was received by then is on disk when this ends."""
        try:
            with self._scope:
                for count, partition in enumerate(self.source.partitions, 1):
                    self._on_disk[partition] = self._received_snapshots[partition].written_record
                    if count % STEP_PARTITIONS == 0:
                        await trio.lowlevel.checkpoint()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(essential(self._write))
                    for state in sorted(set(self.source.partitions.values())):
                        nursery.start_soon(essential(self._follow), state)
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await self._flush()
                finally:
                    # They refer to this object.
                    self._consumers.clear()
                    self._current_consumers.clear()
                    self._consumer_scopes.clear()
                    self._ended.set()
                    self._written.notify()

    def cancel(self) -> None:
        """Ends it at once: the bucket was deleted."""
        self._is_deleted = True
        self._dirty.clear()
        self._dirty_bytes = 0
        self._scope.cancel()

    def prepare_to_stop(self) -> None:
        """The replicator will be stopped soon, and no longer waits while the disk is full."""
        self._is_stopping = True

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._ended.is_set()

    def check_room(self) -> None:
        """Checks that nothing that was received waits for room on disk.

        Raises:
            DiskFullError: Something does.
        """
        if self.disk_full_reason:
            raise DiskFullError(
                f"what came from {self._source_name} waits for room on disk: "
                f"{self.disk_full_reason}"
            )

    async def stop(self, *, may_drop: bool) -> None:
        """Ends it, and waits until what was received is on disk.

        Args:
            may_drop: Whether what finds no room on disk may be dropped. Otherwise the replicator
                then goes on, and waits for room.

        Raises:
            DiskFullError: There is no room for all of it.
        """
        if not may_drop:
            await self._settle()
        self._is_stopping = True
        self._scope.cancel()
        await self._ended.wait()
        if self._drop_reason:
            raise DiskFullError(self._drop_reason)

    async def _settle(self) -> None:
        """Waits until what was received is on disk, and receives nothing meanwhile: that would be
        reported to the source, too. If there is no room, it receives again.

        Raises:
            DiskFullError: There is no room.
        """
        self._is_paused = True
        await self._written.wait_until(
            lambda: (
                bool(self.disk_full_reason)
                or self.has_ended
                or not (self._dirty or self._is_committing)
            )
        )
        if self.disk_full_reason:
            self._is_paused = False
            self._written.notify()
        self.check_room()

    # Receiving.

    async def _follow(self, state: PartitionState) -> None:
        """Receives, for ever, the partitions that are in `state` at the source: a consumer asks for
        one state."""
        logged_trouble = ""
        while partitions := sorted(
            partition
            for partition, source_state in self.source.partitions.items()
            if source_state is state
        ):
            with trio.CancelScope() as self._consumer_scopes[state]:
                try:
                    await self._consume(state, partitions)
                    self.trouble = "every stream has ended"
                except UprError as error:
                    # One that leaves a damaged partition is replaced at once.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    self._system.log_in_pauses.note_error(self._address, error)
                    self.trouble = str(error)
                finally:
                    self._current_consumers.pop(state, None)
                write_log = log.debug if self.trouble == logged_trouble else log.warning
                logged_trouble = self.trouble
                write_log(
                    "replication interrupted; retrying",
                    bucket=self._disk.bucket.name,
                    source=self._source_name,
                    error=self.trouble,
                )
                await trio.sleep(REPLICATION_RETRY_S)

    async def _consume(self, state: PartitionState, partitions: Sequence[PartitionId]) -> None:
        """Receives until every stream has ended.

        Raises:
            UprError: The streams broke.
        """
        self._system.log_in_pauses.check(self._address)
        async with consume_as_replica(
            self._address,
            partitions=partitions,
            state=state,
            resume=_DiskResume(self, partitions),
            undo=self._roll_back,
            identity=f"replica:{self._node}",
            retry_timeout_s=RECONNECT_S,
            # Only logs are saved, when the consumer has to: data itself says how far it is.
            save_limits=SaveLimits(math.inf, math.inf, 1 << 62),
            dial=self._system.dial,
            draw=self._system.draw,
        ) as consumer:
            self._current_consumers[state] = consumer
            async for event in consumer:
                await self._written.wait_until(lambda: not self._is_paused)
                self._receive(consumer, event)
                if isinstance(event, ChunkReceived):
                    await self._wait_for_room()

    def _receive(self, consumer: ReplicaConsumer, event: Event) -> None:
        partition_id = getattr(event, "partition", None)
        if partition_id not in self.source.partitions:
            # It is refused, and another consumer is about to follow the others.
            return
        if isinstance(event, ChunkReceived):
            # Received chunks may be views of what the connection reads into.
            self._received_snapshots[event.partition].add_chunk(event.chunk)
            self._mark_dirty(event.partition)
        elif isinstance(event, SnapshotStart):
            snapshots = self._received_snapshots[event.partition]
            snapshots.begin_snapshot(event.history_id, event.end, event.purge_seq)
        elif isinstance(event, AnswersReceived):
            self._received_snapshots[event.partition].add_answers(checked_answers(event.rows))
        elif isinstance(event, SnapshotEnd):
            self._received_snapshots[event.partition].end_snapshot(event.end)
            self._mark_dirty(event.partition)
            self._report(event.partition)
        elif isinstance(event, StreamAccepted):
            self.trouble = ""
            self._system.log_in_pauses.note_success(self._address)
            self._consumers[event.partition] = consumer
            snapshots = self._received_snapshots[event.partition]
            snapshots.begin_stream()
            # Another replica may itself lack what this node once acknowledged.
            is_active = self.source.partitions[event.partition] is PartitionState.ACTIVE
            if is_active and event.high_seq is not None:
                snapshots.note_active_seq(event.high_seq)
            if event.partition in self._dirty or snapshots.has_unwritten:
                self._mark_dirty(event.partition)
            self._report(event.partition)

    def note_active_number(
        self, partition_id: PartitionId, active_log: FailoverLog, high_seq: SeqNo
    ) -> None:
        """The active node, which this one does not follow, has everything up to `high_seq`. Once
        the copy has so much of the same history, it is complete. Nothing happens if this does not
        replicate the partition from another replica."""
        if (
            partition_id not in self._consumers
            or self.source.partitions[partition_id] is PartitionState.ACTIVE
        ):
            return
        snapshots = self._received_snapshots[partition_id]
        # The other replica may not have heard of a new history yet: its numbers prove nothing.
        if snapshots.log.current == active_log.current:
            snapshots.note_active_seq(high_seq)
            if snapshots.has_unwritten:
                self._mark_dirty(partition_id)

    def _report(self, partition_id: PartitionId) -> None:
        consumer = self._consumers.get(partition_id)
        if consumer is None:
            return
        snapshots = self._received_snapshots[partition_id]
        persisted = self._partition(partition_id).high_seq
        consumer.report(partition_id, snapshots.log.current, snapshots.high, persisted)

    def _mark_dirty(self, partition_id: PartitionId) -> None:
        nbytes = self._received_snapshots[partition_id].nbytes
        self._dirty_bytes += nbytes - self._dirty.get(partition_id, 0)
        self._dirty[partition_id] = nbytes
        self._became_dirty.notify()

    def _unmark_dirty(self, partition_id: PartitionId) -> None:
        self._dirty_bytes -= self._dirty.pop(partition_id, 0)

    async def _wait_for_room(self) -> None:
        await self._written.wait_until(lambda: self._dirty_bytes <= BUFFER_BYTES)

    # Where the streams start.

    def positions(self, partitions: Sequence[PartitionId]) -> ResumeState:
        """From where the streams of these partitions go on."""
        state = ResumeState(self._disk.bucket.name)
        for partition_id in partitions:
            if partition_id in self.source.partitions:
                state.positions[partition_id] = self._received_snapshots[partition_id].position
        return state

    async def write_logs(self, state: ResumeState, partitions: Sequence[PartitionId]) -> None:
        """Puts the failover logs that the source has told on disk, before any data: data of a
        history that the log does not name could not be rolled back."""
        for partition_id in partitions:
            if partition_id not in self.source.partitions:
                continue
            snapshots = self._received_snapshots[partition_id]
            position = state.positions.get(partition_id)
            # A rollback writes its log itself, in one commit with the truncation.
            if position is not None and not state.is_rollback_pending(partition_id):
                snapshots.set_log(position.log)
            if snapshots.has_unwritten:
                self._mark_dirty(partition_id)
        await self._flush()

    # Writing.

    async def _write(self) -> None:
        while True:
            await self._became_dirty.wait_until(lambda: bool(self._dirty))
            await self._commit()

    async def _flush(self) -> None:
        """Brings to disk what was received."""
        while self._dirty:
            await self._commit()
        # A commit that is under way has taken its partitions out of `_dirty` already.
        async with self._commit_lock:
            pass

    async def _commit(self) -> None:
        async with self._commit_lock:
            # `stop` waits for the commit: otherwise its data would be received again.
            with trio.CancelScope(shield=True):
                self._is_committing = True
                try:
                    writes = await self._collect()
                    if writes:
                        await self._write_to_disk(writes)
                        self._disk.note_committed()
                finally:
                    self._is_committing = False
                    self._written.notify()

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
        """Puts it on disk, and moves the partitions there. Waits for room on a full disk, until the
        replicator is to stop or the bucket is deleted; then it is dropped."""
        while not self._is_deleted:
            try:
                await self._write_once(writes)
            except DiskFullError as error:
                if not self.disk_full_reason:
                    log.error(
                        "disk full; retrying", bucket=self._disk.bucket.name, error=str(error)
                    )
                self.disk_full_reason = self.trouble = str(error)
                self._written.notify()
            else:
                if self.disk_full_reason and self.trouble == self.disk_full_reason:
                    self.trouble = ""
                self.disk_full_reason = ""
                return
            if self._is_stopping:
                self._drop_reason = self.disk_full_reason
                await self._drop_received()
                return
            await trio.sleep(REPLICATION_RETRY_S)

    async def _write_once(self, writes: list[PartitionWrite]) -> None:
        with self._disk.flusher.commit_under_way():
            name = self._disk.bucket.name
            damages = await self._disk.store.ask(Commit(name, tuple(writes)))
            # Before others have their turn: what they receive of them would be written.
            for partition_id, damage in damages.items():
                self._refuse(PartitionId(partition_id), damage)
            if damages:
                writes[:] = [write for write in writes if write.partition not in damages]
            self._commits += 1
            await self._move_partitions(writes)
        for partition_id in damages:
            await self._note_refused(PartitionId(partition_id))

    def _refuse(self, partition_id: PartitionId, damage: str) -> None:
        """Neither receives nor writes a partition any more: a damaged record of it was met."""
        partitions = dict(self.source.partitions)
        state = partitions.pop(partition_id)
        self.source = ReplicationSource(self.source.address, partitions)
        del self._received_snapshots[partition_id], self._on_disk[partition_id]
        self._unmark_dirty(partition_id)
        self._consumers.pop(partition_id, None)
        self._partition(partition_id).refuse(damage)
        # The stream ends with the connection of its consumer; the next one does not ask for it.
        self._consumer_scopes[state].cancel()

    async def _note_refused(self, partition_id: PartitionId) -> None:
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
        self._report(partition_id)

    # Rolling back.

    async def _roll_back(self, partition_id: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        """Undoes everything above the last snapshot end at or below `ceiling`, in memory and on
        disk.

        What was received is on disk: the consumer saves that it is about to roll back, and
        `write_logs` writes data first.

        Returns:
            That end; 0 when the disk knows none.

        Raises:
            ServerError: The bucket was deleted; or a damaged record of the partition was met, and
                it is refused from here on.
        """
        try:
            return await self._truncate(partition_id, ceiling, reason)
        except CorruptionError as error:
            damage = str(error)
        with trio.CancelScope(shield=True):
            async with self._commit_lock:
                await self._refuse_on_disk(partition_id, damage)
        raise ServerError(Status.DAMAGED, damage)

    async def _refuse_on_disk(self, partition_id: PartitionId, damage: str) -> None:
        # The call names the bucket, and another of its name may be there by now.
        self._disk.maintenance.check_not_deleted()
        if partition_id not in self.source.partitions:
            return
        self._refuse(partition_id, damage)
        await self._disk.ask(RefusePartition(self._disk.bucket.name, partition_id, damage))
        await self._note_refused(partition_id)

    async def _truncate(self, partition_id: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        disk, partition = self._disk, self._partition(partition_id)
        bucket = disk.bucket
        with trio.CancelScope(shield=True):
            # The order matters: a commit may wait for space, which compaction has to make.
            async with (
                self._commit_lock,
                disk.maintenance.paused(),
                streams_ended(self._server, bucket, [partition], Status.ROLLBACK_NEEDED),
            ):
                # The end is looked up only now: the commit that this waited for may have dropped
                # what was received; or may have met a damaged record.
                if partition.damage:
                    raise ServerError(Status.DAMAGED, partition.damage)
                snapshots = self._received_snapshots[partition_id]
                seq_before = snapshots.received_seq
                snapshot_end = await disk.store.ask(
                    FindSnapshotEnd(
                        bucket.name, partition_id, ceiling, partition.eviction.indexed_seq
                    )
                )
                seq = SeqNo(snapshot_end or 0)
                failover_log = snapshots.log.up_to(seq)
                pairs = tuple(failover_log.pairs())
                record = PartitionRecord(
                    PartitionState.REPLICA,
                    pairs,
                    seq,
                    partition.last_cas,
                    # Of a history that both have, the source may have forgotten deletions.
                    is_incomplete=partition.is_incomplete or not ceiling,
                )
                answers = partition.repeated_batches.answers
                undone_answers: list[bytes] = []
                for rows in answers.rows_above(seq, STEP_ANSWERS):
                    undone_answers.append(rows)
                    await trio.lowlevel.checkpoint()
                if self._is_deleted:
                    raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
                broken_leases = await disk.truncate(partition_id, record, undone_answers)
                disk.leases.mark_broken(broken_leases)
                await forget_answers(partition, seq)
                partition.truncate(seq)
                partition.is_incomplete = record.is_incomplete
                snapshots.truncate(seq, is_incomplete=record.is_incomplete)
                self._unmark_dirty(partition_id)
                self._written.notify()
                self._on_disk[partition_id] = record
                partition.change_state(partition.state, failover_log)
        log.warning(
            "replica rolled back",
            bucket=bucket.name,
            partition=partition_id,
            seq_before=seq_before,
            ceiling=ceiling,
            seq=seq,
            reason=reason,
        )
        return seq

    def statistics(self) -> dict[str, object]:
        """Figures; sizes in bytes."""
        return {
            "source": self._source_name,
            "partitions": len(self.source.partitions),
            "commits": self._commits,
            "waiting_bytes": self._dirty_bytes,
            "trouble": self.trouble or self._refusal(),
        }

    def _refusal(self) -> str:
        """Why the source does not give some of the partitions; empty while it gives all."""
        for consumer in self._current_consumers.values():
            figures = consumer.statistics()
            if figures.unplaced_partitions:
                count = len(figures.unplaced_partitions)
                return f"{count} of the partitions are refused: {figures.unplaced_reason}"
        return ""


class _DiskResume:
    """The consumer's resume state, which is what is on disk: only logs have to be saved, because
    each chunk on disk says itself how far it goes."""

    def __init__(self, replicator: Replicator, partitions: Sequence[PartitionId]) -> None:
        self._replicator = replicator
        self._partitions = partitions

    async def load(self) -> ResumeState:
        """From where the streams go on."""
        await trio.lowlevel.checkpoint()
        return self._replicator.positions(self._partitions)

    async def save(self, state: ResumeState) -> None:
        """Puts the failover logs on disk."""
        await self._replicator.write_logs(state, self._partitions)


def move_to_record(partition: Partition, record: PartitionRecord) -> None:
    """Moves a partition that keeps nothing in memory to where its disk stands."""
    if record.high != partition.high_seq:
        partition.restart_at(record.high, Cas(record.last_cas))
