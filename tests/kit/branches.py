"""The mutations of every history of a fake server, including histories that it has left."""

from __future__ import annotations

from tests.kit.fake_server import FakeServer
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation, PartitionId


class Branches:
    """Keeps the mutations that are lost when partitions fail over.

    Args:
        server: The server. Its failovers must be made with `fail_over`.
    """

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._left: dict[int, list[Mutation]] = {}
        self._ids: dict[int, list[int]] = {}
        """By partition, the IDs of its histories, oldest first."""
        self.failovers = 0

    def fail_over(self, partition_id: int, end: int) -> None:
        """A partition begins a new history after the sequence number `end`."""
        partition = self._server.partitions[partition_id]
        self._left[partition.log.current] = list(partition.history)
        self.failovers += 1
        ids = self._ids.setdefault(partition_id, [partition.log.current])
        ids.append(10_000 + self.failovers)
        partition.fail_over(ids[-1], end)

    def had_since(self, partition: PartitionId, history_id: int) -> set[tuple[bytes, int, bytes]]:
        """(key, sequence number, value) of every mutation of a history or of a later one."""
        ids = self._ids.get(partition, [history_id])
        return {
            (mutation.key, mutation.seq, mutation.value)
            for later_id in ids[ids.index(history_id) :]
            for mutation in self.history(partition, later_id)
        }

    def history(self, partition: PartitionId, history_id: int) -> list[Mutation]:
        """Every mutation of a history, to its present end, or to the end that it had when it was
        left."""
        fake = self._server.partitions[partition]
        return fake.history if fake.log.current == history_id else self._left[history_id]

    def contents(self, partition: PartitionId, history_id: int, through: int) -> dict[bytes, bytes]:
        """Key -> value in a history, as of the sequence number `through`."""
        items: dict[bytes, bytes] = {}
        for mutation in self.history(partition, history_id):
            if mutation.seq > through:
                break
            if mutation.op is Operation.SET:
                items[mutation.key] = mutation.value
            else:
                items.pop(mutation.key, None)
        return items
