"""The rollback of a replica: removes changes that the source no longer has, in memory and on disk.

It excludes the commits of the replica's writer, the bucket's maintenance, and the streams of this
node's own consumers, who have to roll back, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_server.engine import Partition
from upr_server.replication.local_server import LocalServer, streams_ended
from upr_server.replication.received_answers import forget_answers
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.replication.replica_writer import ReplicaWriter
from upr_server.replication.source_streams import SourceStreams
from upr_server.storage.calls import FindSnapshotEnd, RefusePartition
from upr_server.storage.errors import CorruptionError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.unsaved_answers import STEP_ANSWERS
from upr_server.storage.records import PartitionRecord

log = structlog.get_logger(__name__)


class ReplicaRollback:
    """Rolls back partitions of a replica.

    Args:
        server: The server that this runs in.
        disk: The bucket.
        received_snapshots: What was received of each partition.
        writer: Writes that to disk.
        streams: From which node the partitions are replicated.
        promotion_seq: Up to where a partition's active node had everything when it became active,
            by the map that holds now.
    """

    def __init__(
        self,
        server: LocalServer,
        disk: BucketDisk,
        received_snapshots: Mapping[PartitionId, ReceivedSnapshots],
        writer: ReplicaWriter,
        streams: SourceStreams,
        promotion_seq: Callable[[PartitionId], SeqNo],
    ) -> None:
        self._server = server
        self._disk = disk
        # A deleted bucket lets go of its partitions, and a rollback may still be under way.
        self._partitions = disk.bucket.partitions
        self._received_snapshots = received_snapshots
        self._writer = writer
        self._streams = streams
        self._promotion_seq = promotion_seq

    async def roll_back(self, partition_id: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        """Undoes everything above the last snapshot end at or below `ceiling`, in memory and on
        disk.

        What was received is on disk: the consumer saves that it is about to roll back, and
        `Replicator.write_logs` writes data first. Once it has begun, it cannot be cancelled.

        The copy is marked as incomplete in three cases, as it may lack what this node acknowledged.
        If the ceiling is 0, the source may have forgotten deletions of a history that both have. If
        the source is a replica, it may not have heard of the newest history. If the ceiling is
        above the map's promotion point, this node has an old map: a failover that asks it alone
        would not know what the active node had. An active node's ceiling up to that point needs no
        mark: a failover chooses no copy that ends before that.

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
            async with self._writer.commit_lock:
                await self._refuse(partition_id, damage)
        raise ServerError(Status.DAMAGED, damage)

    async def _refuse(self, partition_id: PartitionId, damage: str) -> None:
        # The call names the bucket, and another of its name may be there by now.
        self._disk.maintenance.check_not_deleted()
        # A commit may have met the damage, too.
        if not self._writer.writes(partition_id):
            return
        self._writer.refuse(partition_id, damage)
        await self._disk.ask(RefusePartition(self._disk.bucket.name, partition_id, damage))
        await self._writer.note_refused(partition_id)

    async def _truncate(self, partition_id: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        disk, partition = self._disk, self._partitions[partition_id]
        bucket = disk.bucket
        with trio.CancelScope(shield=True):
            # The order matters: a commit may wait for space, which compaction has to make.
            async with (
                self._writer.commit_lock,
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
                record = self._record_after(partition, seq, failover_log, ceiling)
                undone_answers = await _answers_above(partition, seq)
                if self._writer.is_deleted:
                    raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
                broken_leases = await disk.truncate(partition_id, record, undone_answers)
                disk.leases.mark_broken(broken_leases)
                await forget_answers(partition, seq)
                partition.truncate(seq)
                partition.is_incomplete = record.is_incomplete
                snapshots.truncate(seq, is_incomplete=record.is_incomplete)
                self._writer.note_truncated(partition_id, record)
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

    def _record_after(
        self, partition: Partition, seq: SeqNo, failover_log: FailoverLog, ceiling: SeqNo
    ) -> PartitionRecord:
        """What the disk has of a partition once everything above `seq` is undone. `roll_back` says
        when the copy is incomplete."""
        source_state = self._streams.source.partitions[partition.id]
        return PartitionRecord(
            PartitionState.REPLICA,
            tuple(failover_log.pairs()),
            seq,
            partition.last_cas,
            is_incomplete=(
                partition.is_incomplete
                or not ceiling
                or ceiling > self._promotion_seq(partition.id)
                or source_state is PartitionState.REPLICA
            ),
        )


async def _answers_above(partition: Partition, seq: SeqNo) -> list[bytes]:
    """The answers to publishers about changes above `seq`, as rows; collected in steps."""
    rows_of_steps: list[bytes] = []
    for rows in partition.repeated_batches.answers.rows_above(seq, STEP_ANSWERS):
        rows_of_steps.append(rows)
        await trio.lowlevel.checkpoint()
    return rows_of_steps
