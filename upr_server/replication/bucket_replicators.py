"""The replicators of one bucket: one for each node that this node replicates from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping

import trio

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.engine import Partition
from upr_server.replication.local_server import LocalServer
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.replication.replicator import Replicator
from upr_server.replication.roles import STEP_PARTITIONS, ReplicationSource
from upr_server.runtime import System, essential
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.records import PartialRecord


class BucketReplicators:
    """Starts and stops a bucket's replicators, and keeps what they have received.

    Args:
        server: The server that this runs in.
        disk: The bucket.
        node: This node's name.
        system: How other nodes are reached.
        promotion_seq: Up to where a partition's active node had everything when it became active,
            by the map that holds now.
    """

    def __init__(
        self,
        server: LocalServer,
        disk: BucketDisk,
        node: str,
        system: System,
        promotion_seq: Callable[[PartitionId], SeqNo],
    ) -> None:
        self._server = server
        self._disk = disk
        self._node = node
        self._system = system
        self._promotion_seq = promotion_seq
        # What was received outlives the replicator that received it: another node may go on.
        self._received_snapshots: dict[PartitionId, ReceivedSnapshots] = {}
        self._replicators: dict[str, Replicator] = {}
        self._dropped_mutations = 0

    def restore(self, partition: Partition, partial: PartialRecord) -> None:
        """The disk has the front of a snapshot of `partition`, which goes on from there."""
        self._received_snapshots[partition.id] = _new_received_snapshots(partition, partial)

    def discard_received(self, partition: PartitionId) -> None:
        """This node does not replicate the partition any more."""
        self._received_snapshots.pop(partition, None)

    def note_active_number(
        self, partition: PartitionId, active_log: FailoverLog, high_seq: SeqNo
    ) -> None:
        """The active node has everything up to `high_seq`; see `Replicator.note_active_number`."""
        for replicator in self._replicators.values():
            replicator.note_active_number(partition, active_log, high_seq)

    async def stop_all_but(
        self,
        sources: Mapping[str, ReplicationSource],
        held_partitions: Collection[PartitionId] = (),
    ) -> None:
        """Stops the replicators that are not of `sources`, or replicate other partitions. What they
        received is on disk then.

        Raises:
            DiskFullError: There was no room for all of it. Replicators of `held_partitions` go on
                then, and wait for room. What others have received is dropped, and they are stopped.
        """
        ending = {
            name: replicator
            for name, replicator in self._replicators.items()
            if sources.get(name) != replicator.source
        }
        given_up = {
            name
            for name, replicator in ending.items()
            if replicator.source.partitions.keys().isdisjoint(held_partitions)
        }
        for name, replicator in ending.items():
            if name not in given_up:
                replicator.check_room()
        failure: DiskFullError | None = None
        for name, replicator in ending.items():
            try:
                await replicator.stop(may_drop=name in given_up)
            except DiskFullError as error:
                failure = error
            if replicator.has_ended:
                self._dropped_mutations += replicator.dropped_mutations
                del self._replicators[name]
        if failure is not None:
            raise failure

    def prepare(self, sources: Mapping[str, ReplicationSource]) -> Generator[None, None, None]:
        """Prepares for replication from `sources`, in steps between which others may have their
        turn."""
        partitions = self._disk.bucket.partitions
        if not partitions:
            # The bucket was deleted.
            return
        for source in sources.values():
            for count, partition in enumerate(source.partitions, 1):
                if count % STEP_PARTITIONS == 0:
                    yield
                if partition not in self._received_snapshots:
                    self._received_snapshots[partition] = _new_received_snapshots(
                        partitions[partition]
                    )

    def start_missing(
        self, sources: Mapping[str, ReplicationSource], nursery: trio.Nursery
    ) -> None:
        """Starts the replicators of `sources`, for which it was prepared, that do not run yet."""
        # What was dropped before comes again.
        self._dropped_mutations = 0
        for name, source in sources.items():
            if name in self._replicators:
                continue
            replicator = self._replicators[name] = Replicator(
                self._server,
                self._disk,
                self._node,
                name,
                source,
                self._received_snapshots,
                self._system,
                self._promotion_seq,
            )
            nursery.start_soon(essential(replicator.run))

    def cancel(self) -> None:
        """Ends all at once: the bucket was deleted."""
        for replicator in self._replicators.values():
            replicator.cancel()

    def prepare_to_stop(self) -> None:
        """All are about to be stopped: none waits for a full disk any more."""
        for replicator in self._replicators.values():
            replicator.prepare_to_stop()

    @property
    def dropped_mutations(self) -> int:
        """How many mutations were dropped at the end, as the disk was full."""
        return self._dropped_mutations + sum(
            replicator.dropped_mutations for replicator in self._replicators.values()
        )

    def statistics(self) -> list[dict[str, object]]:
        """Figures of each replicator."""
        return [replicator.statistics() for replicator in self._replicators.values()]


def _new_received_snapshots(
    partition: Partition, partial: PartialRecord | None = None
) -> ReceivedSnapshots:
    return ReceivedSnapshots(
        partition.failover_log,
        partition.high_seq,
        partition.last_cas,
        partial,
        is_incomplete=partition.is_incomplete,
    )
