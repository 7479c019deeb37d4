"""Replicates some partitions from one node: a consumer that has a writer put on disk what comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_server.replication.local_server import LocalServer
from upr_server.replication.received_answers import checked_answers
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.replication.replica_rollback import ReplicaRollback
from upr_server.replication.replica_writer import BUFFER_BYTES, ReplicaWriter
from upr_server.replication.roles import STEP_PARTITIONS, ReplicationSource
from upr_server.replication.source_streams import SourceStreams
from upr_server.runtime import System, essential
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk

RECONNECT_S: Final = 5.0
"""How long a consumer tries to reconnect by itself, before another one starts from the disk."""

REPLICATION_RETRY_S: Final = 0.5
"""The wait before that."""

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
        promotion_seq: Up to where a partition's active node had everything when it became active,
            by the map that holds now.
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
        promotion_seq: Callable[[PartitionId], SeqNo],
    ) -> None:
        self._source_name = source_name
        self._disk = disk
        self._node = node
        self._received_snapshots = received_snapshots
        self._system = system
        self._streams = SourceStreams(source, disk.bucket.partitions, received_snapshots)
        self._writer = ReplicaWriter(server, disk, received_snapshots, self._streams)
        self._rollback = ReplicaRollback(
            server, disk, received_snapshots, self._writer, self._streams, promotion_seq
        )
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        # Whether it receives nothing for now.
        self._is_paused = False
        self._went_on = Notifier()

    @property
    def source(self) -> ReplicationSource:
        """Where it replicates from, and which partitions; without those that are refused since a
        damaged record of them was met."""
        return self._streams.source

    @property
    def dropped_mutations(self) -> int:
        """How many mutations it has dropped, as there was no room."""
        return self._writer.dropped_mutations

    @property
    def _address(self) -> Address:
        return Address.of_bucket(self.source.address, self._disk.bucket.name, self._system.security)

    # Start and stop.

    async def run(self) -> None:
        """Replicates until `stop`. What was received by then is on disk when this ends."""
        try:
            with self._scope:
                for count, partition in enumerate(self.source.partitions, 1):
                    self._writer.add(partition)
                    if count % STEP_PARTITIONS == 0:
                        await trio.lowlevel.checkpoint()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(essential(self._writer.run))
                    for state in sorted(set(self.source.partitions.values())):
                        nursery.start_soon(essential(self._follow), state)
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await self._writer.flush()
                finally:
                    # The consumers refer to this object.
                    self._streams.clear()
                    self._ended.set()
                    self._writer.close()

    def cancel(self) -> None:
        """Ends it at once: the bucket was deleted."""
        self._writer.discard()
        self._scope.cancel()

    def prepare_to_stop(self) -> None:
        """The replicator will be stopped soon, and no longer waits while the disk is full."""
        self._writer.drop_if_full()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._ended.is_set()

    def check_room(self) -> None:
        """Checks that nothing that was received waits for room on disk.

        Raises:
            DiskFullError: Something does.
        """
        if self._writer.disk_full_reason:
            raise DiskFullError(
                f"what came from {self._source_name} waits for room on disk: "
                f"{self._writer.disk_full_reason}"
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
        self._writer.drop_if_full()
        self._scope.cancel()
        await self._ended.wait()
        if self._writer.drop_reason:
            raise DiskFullError(self._writer.drop_reason)

    async def _settle(self) -> None:
        """Waits until what was received is on disk, and receives nothing meanwhile: that would be
        reported to the source, too. If there is no room, it receives again.

        Raises:
            DiskFullError: There is no room.
        """
        self._is_paused = True
        await self._writer.written.wait_until(lambda: self._writer.is_settled)
        if self._writer.disk_full_reason:
            self._is_paused = False
            self._went_on.notify()
        self.check_room()

    # Receiving.

    async def _follow(self, state: PartitionState) -> None:
        """Receives, for ever, the partitions that are in `state` at the source: a consumer asks for
        one state."""
        logged_trouble = ""
        streams = self._streams
        while partitions := streams.partitions_in(state):
            with streams.new_scope(state):
                try:
                    await self._consume(state, partitions)
                    streams.trouble = "every stream has ended"
                except UprError as error:
                    # One that leaves a damaged partition is replaced at once.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    self._system.log_in_pauses.note_error(self._address, error)
                    streams.trouble = str(error)
                finally:
                    streams.note_ended(state)
                write_log = log.debug if streams.trouble == logged_trouble else log.warning
                logged_trouble = streams.trouble
                write_log(
                    "replication interrupted; retrying",
                    bucket=self._disk.bucket.name,
                    source=self._source_name,
                    error=streams.trouble,
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
            undo=self._rollback.roll_back,
            identity=f"replica:{self._node}",
            retry_timeout_s=RECONNECT_S,
            # Only logs are saved, when the consumer has to: data itself says how far it is.
            save_limits=SaveLimits(math.inf, math.inf, 1 << 62),
            dial=self._system.dial,
            draw=self._system.draw,
        ) as consumer:
            self._streams.note_begun(state, consumer)
            async for event in consumer:
                await self._went_on.wait_until(lambda: not self._is_paused)
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
            self._writer.mark_dirty(event.partition)
        elif isinstance(event, SnapshotStart):
            snapshots = self._received_snapshots[event.partition]
            snapshots.begin_snapshot(event.history_id, event.end, event.purge_seq)
        elif isinstance(event, AnswersReceived):
            self._received_snapshots[event.partition].add_answers(checked_answers(event.rows))
        elif isinstance(event, SnapshotEnd):
            self._received_snapshots[event.partition].end_snapshot(event.end)
            self._writer.mark_dirty(event.partition)
            self._streams.report(event.partition)
        elif isinstance(event, StreamAccepted):
            self._streams.trouble = ""
            self._system.log_in_pauses.note_success(self._address)
            self._streams.note_accepted(event.partition, consumer)
            snapshots = self._received_snapshots[event.partition]
            snapshots.begin_stream()
            # Another replica may itself lack what this node once acknowledged.
            is_active = self.source.partitions[event.partition] is PartitionState.ACTIVE
            if is_active and event.high_seq is not None:
                snapshots.note_active_seq(event.high_seq)
            if self._writer.is_dirty(event.partition) or snapshots.has_unwritten:
                self._writer.mark_dirty(event.partition)
            self._streams.report(event.partition)

    def note_active_number(
        self, partition_id: PartitionId, active_log: FailoverLog, high_seq: SeqNo
    ) -> None:
        """The active node, which this one does not follow, has everything up to `high_seq`. Once
        the copy has so much of the same history, it is complete. Nothing happens if this does not
        replicate the partition from another replica."""
        if (
            not self._streams.is_accepted(partition_id)
            or self.source.partitions[partition_id] is PartitionState.ACTIVE
        ):
            return
        snapshots = self._received_snapshots[partition_id]
        # The other replica may not have heard of a new history yet: its numbers prove nothing.
        if snapshots.log.current == active_log.current:
            snapshots.note_active_seq(high_seq)
            if snapshots.has_unwritten:
                self._writer.mark_dirty(partition_id)

    async def _wait_for_room(self) -> None:
        writer = self._writer
        await writer.written.wait_until(lambda: writer.dirty_bytes <= BUFFER_BYTES)

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
                self._writer.mark_dirty(partition_id)
        await self._writer.flush()

    def statistics(self) -> dict[str, object]:
        """Figures; sizes in bytes."""
        return {
            "source": self._source_name,
            "partitions": len(self.source.partitions),
            "commits": self._writer.commits,
            "waiting_bytes": self._writer.dirty_bytes,
            "trouble": self._streams.trouble or self._streams.refusal(),
        }


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
