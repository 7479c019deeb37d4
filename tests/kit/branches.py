"""What every history of a fake server had, also of those that it left."""

from __future__ import annotations

from tests.kit.fake_server import FakeServer
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation, PartitionId


class Branches:
    """Remembers what is lost when partitions fail over.

    Args:
        server: The server; it fails over through this.
    """

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._left: dict[int, list[Mutation]] = {}
        self.failovers = 0

    def fail_over(self, partition_id: int, end: int) -> None:
        """A partition begins a new history at the number `end`."""
        partition = self._server.partitions[partition_id]
        self._left[partition.log.current] = list(partition.history)
        self.failovers += 1
        partition.fail_over(10_000 + self.failovers, end)

    def is_current(self, partition: PartitionId, history_id: int) -> bool:
        """Whether the server is in that history."""
        return self._server.partitions[partition].log.current == history_id

    def history(self, partition: PartitionId, history_id: int) -> list[Mutation]:
        """Every mutation that led to where the history is, or was when it was left."""
        fake = self._server.partitions[partition]
        return fake.history if fake.log.current == history_id else self._left[history_id]

    def contents(self, partition: PartitionId, history_id: int, through: int) -> dict[bytes, bytes]:
        """Key -> value of the history through the number `through`."""
        items: dict[bytes, bytes] = {}
        for mutation in self.history(partition, history_id):
            if mutation.seq > through:
                break
            if mutation.op is Operation.SET:
                items[mutation.key] = mutation.value
            else:
                items.pop(mutation.key, None)
        return items
