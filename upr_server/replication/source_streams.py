"""The streams of a replicator: which partitions it follows at its source, and by which consumer.

What is received and what is on disk are reported to the source over these streams, and a partition
that is refused leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio

from upr_protocol.client import ReplicaConsumer
from upr_protocol.ids import PartitionId, PartitionState
from upr_server.engine import Partition
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.replication.roles import ReplicationSource


class SourceStreams:
    """The streams from one source. A consumer asks for the partitions of one state there.

    Args:
        source: Where the source is, and which partitions are replicated from it.
        partitions: The bucket's partitions.
        received_snapshots: What was received of them.

    Attributes:
        source: As given; without those partitions that are refused since a damaged record of them
            was met.
        trouble: Why it does not replicate now; empty while it does.
    """

    def __init__(
        self,
        source: ReplicationSource,
        partitions: Sequence[Partition],
        received_snapshots: Mapping[PartitionId, ReceivedSnapshots],
    ) -> None:
        self.source = source
        self.trouble = ""
        self._partitions = partitions
        self._received_snapshots = received_snapshots
        # By state the consumer that asks for its partitions now.
        self._current_consumers: dict[PartitionState, ReplicaConsumer] = {}
        # By partition the consumer whose stream of it was accepted last.
        self._consumers: dict[PartitionId, ReplicaConsumer] = {}
        # By state the scope in which its consumer runs.
        self._scopes: dict[PartitionState, trio.CancelScope] = {}

    def partitions_in(self, state: PartitionState) -> list[PartitionId]:
        """The partitions that are in `state` at the source, by number."""
        return sorted(
            partition
            for partition, source_state in self.source.partitions.items()
            if source_state is state
        )

    def new_scope(self, state: PartitionState) -> trio.CancelScope:
        """Where the next consumer of the partitions in `state` is to run. Once one of them is
        refused, this is cancelled: another consumer is to ask for those that are left."""
        scope = self._scopes[state] = trio.CancelScope()
        return scope

    def note_begun(self, state: PartitionState, consumer: ReplicaConsumer) -> None:
        """A consumer asks for the partitions in `state` now."""
        self._current_consumers[state] = consumer

    def note_ended(self, state: PartitionState) -> None:
        """No consumer asks for the partitions in `state` now."""
        self._current_consumers.pop(state, None)

    def note_accepted(self, partition_id: PartitionId, consumer: ReplicaConsumer) -> None:
        """The source has accepted the stream of a partition, for which `consumer` has asked."""
        self._consumers[partition_id] = consumer

    def is_accepted(self, partition_id: PartitionId) -> bool:
        """Whether the stream of a partition was ever accepted, and the partition is followed."""
        return partition_id in self._consumers

    def report(self, partition_id: PartitionId) -> None:
        """Tells the source what was received of a partition, and what of that is on disk, if its
        stream was accepted."""
        consumer = self._consumers.get(partition_id)
        if consumer is None:
            return
        snapshots = self._received_snapshots[partition_id]
        persisted = self._partitions[partition_id].high_seq
        consumer.report(partition_id, snapshots.log.current, snapshots.high, persisted)

    def leave(self, partition_id: PartitionId) -> None:
        """Follows a partition no more."""
        partitions = dict(self.source.partitions)
        state = partitions.pop(partition_id)
        self.source = ReplicationSource(self.source.address, partitions)
        self._consumers.pop(partition_id, None)
        # The stream ends with the connection of its consumer; the next one does not ask for it.
        self._scopes[state].cancel()

    def refusal(self) -> str:
        """Why the source does not give some of the partitions; empty while it gives all."""
        for consumer in self._current_consumers.values():
            figures = consumer.statistics()
            if figures.unplaced_partitions:
                count = len(figures.unplaced_partitions)
                return f"{count} of the partitions are refused: {figures.unplaced_reason}"
        return ""

    def clear(self) -> None:
        """Lets go of the consumers, which refer to the replicator."""
        self._current_consumers.clear()
        self._consumers.clear()
        self._scopes.clear()
