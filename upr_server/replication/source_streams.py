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
        consumers: By each partition whose stream was accepted.
        current_consumers: That of each state, while there is one.
        consumer_scopes: In each a consumer runs. Cancelled, the next one runs, of the partitions
            that are left.
    """

    def __init__(
        self,
        source: ReplicationSource,
        partitions: Sequence[Partition],
        received_snapshots: Mapping[PartitionId, ReceivedSnapshots],
    ) -> None:
        self.source = source
        self.trouble = ""
        self.consumers: dict[PartitionId, ReplicaConsumer] = {}
        self.current_consumers: dict[PartitionState, ReplicaConsumer] = {}
        self.consumer_scopes: dict[PartitionState, trio.CancelScope] = {}
        self._partitions = partitions
        self._received_snapshots = received_snapshots

    def partitions_in(self, state: PartitionState) -> list[PartitionId]:
        """The partitions that are in `state` at the source, by number."""
        return sorted(
            partition
            for partition, source_state in self.source.partitions.items()
            if source_state is state
        )

    def report(self, partition_id: PartitionId) -> None:
        """Tells the source what was received of a partition, and what of that is on disk, if its
        stream was accepted."""
        consumer = self.consumers.get(partition_id)
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
        self.consumers.pop(partition_id, None)
        # The stream ends with the connection of its consumer; the next one does not ask for it.
        self.consumer_scopes[state].cancel()

    def refusal(self) -> str:
        """Why the source does not give some of the partitions; empty while it gives all."""
        for consumer in self.current_consumers.values():
            figures = consumer.statistics()
            if figures.unplaced_partitions:
                count = len(figures.unplaced_partitions)
                return f"{count} of the partitions are refused: {figures.unplaced_reason}"
        return ""

    def clear(self) -> None:
        """Lets go of the consumers, which refer to the replicator."""
        self.consumers.clear()
        self.current_consumers.clear()
        self.consumer_scopes.clear()
