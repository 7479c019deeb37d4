"""Publishing in programs that block: each batch to the node that holds its partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from upr_protocol.address import Address
from upr_protocol.chunk import Chunk
from upr_protocol.client.blocking.cluster_connections import BlockingClusterConnections
from upr_protocol.client.blocking.connection import BlockingConnection, step_any
from upr_protocol.client.core.batcher import BATCH_BYTES, BATCH_MUTATIONS
from upr_protocol.client.core.results import is_wrong_node
from upr_protocol.client.core.retry import MAP_WAIT_S_MAX, RetryState
from upr_protocol.client.core.unanswered_batches import Batch, NodeBatches, UnansweredBatches
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Message, MutateReply, Refusal


class PublishRun:
    """One run of publishing: it takes batches from a source as there is room.

    Args:
        connections: The connections to all nodes.
        unanswered: Holds the batches.
        retry: How long to go on without any answer.
        on_done: Called with each batch that is answered, or refused for good.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        connections: BlockingClusterConnections,
        unanswered: UnansweredBatches,
        retry: RetryState,
        on_done: Callable[[Batch], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._connections = connections
        self._unanswered = unanswered
        self._retry = retry
        self._on_done = on_done
        self._sleep = sleep
        self._nodes: dict[Address, NodeBatches] = {}
        self._partitions: set[PartitionId] = set()
        self._retry_at: dict[NodeBatches, float] = {}
        """When a node that failed is tried again."""
        self._map_at = float("inf")
        """When the map is to be asked for again."""

    def run(
        self,
        source: Iterator[tuple[PartitionId, Chunk]],
        timeout_s: float,
        credit_timeout_s: float,
    ) -> bool:
        """Sends and receives until every batch is answered.

        Returns:
            Whether it ended because no credit arrived in time.

        Raises:
            UprError: No node could be reached for too long.
        """
        unanswered = self._unanswered
        if not self._connections.was_connected:
            self._connections.to_any_node()
        while True:
            has_more = self._take(source)
            if not (has_more or unanswered.count):
                return False
            self._place_partitions()
            connections = self._send()
            now = time.monotonic()
            # Queued batches go out while the source makes the next one, which may take a while.
            deadline = min(now if has_more else now + timeout_s, self._wakes_at())
            if not has_more:
                out_of_credit_since = self._out_of_credit_since()
                if now >= out_of_credit_since + credit_timeout_s:
                    return True
                deadline = min(deadline, out_of_credit_since + credit_timeout_s)
            if connections:
                step_any(list(connections.values()), deadline)
            else:
                self._sleep(max(0.0, deadline - now))
                # Waits up to the deadline are over, however long `sleep` really took.
                self._retry_at = {n: t for n, t in self._retry_at.items() if t > deadline}
            self._receive(connections)

    def _take(self, source: Iterator[tuple[PartitionId, Chunk]]) -> bool:
        """Takes as many batches as fill a bundle, if there is room; whether there are more."""
        rows = nbytes = 0
        while rows < BATCH_MUTATIONS and nbytes < BATCH_BYTES:
            batch = None if self._unanswered.is_full else next(source, None)
            if batch is None:
                return False
            partition, chunk = batch
            self._partitions.add(partition)
            self._unanswered.add(partition, chunk)
            rows += chunk.count
            nbytes += chunk.nbytes
        return True

    def _out_of_credit_since(self) -> float:
        times = (node.out_of_credit_since for node in self._nodes.values())
        return min((time for time in times if time is not None), default=float("inf"))

    def _wakes_at(self) -> float:
        resend = (node.send_at for node in self._nodes.values())
        retry = (retry_at for node, retry_at in self._retry_at.items() if node.count)
        return min((self._map_at, *(time for time in resend if time is not None), *retry))

    def _place_partitions(self) -> None:
        unanswered, connections = self._unanswered, self._connections
        unplaced = unanswered.unplaced
        self._map_at = float("inf")
        if unplaced.count or connections.metadata.is_stale:
            self._map_at = connections.refresh()
        for partition in self._partitions:
            address = connections.holder(partition)
            if address is None:
                node = unplaced
            elif address in self._nodes:
                node = self._nodes[address]
            else:
                node = self._nodes[address] = unanswered.new_node()
            unanswered.place(partition, node)

    def _send(self) -> dict[Address, BlockingConnection]:
        """Sends as much as may be sent now; gives the connections on which answers are due."""
        now = time.monotonic()
        self._retry_at = {n: t for n, t in self._retry_at.items() if t > now}
        connections: dict[Address, BlockingConnection] = {}
        for address, node in self._nodes.items():
            if not node.count or node in self._retry_at:
                continue
            try:
                connections[address] = self._connections.to_node(address)
            except UprError as error:
                self._failed(address, error)
            else:
                node.send(connections[address].session, time.monotonic(), is_due=True)
        unplaced = self._unanswered.unplaced
        if not connections and unplaced.count and unplaced not in self._retry_at:
            no_node = BrokenError("no node is active for a partition that has batches to send")
            wait_s = self._retry.wait_s(no_node, now)
            self._retry_at[unplaced] = now + min(wait_s, MAP_WAIT_S_MAX)
        return connections

    def _failed(self, address: Address, error: UprError) -> None:
        """A node cannot be reached, or its connection is lost."""
        node = self._nodes[address]
        node.disconnected()
        self._connections.lost(address)
        now = time.monotonic()
        self._retry_at[node] = now + self._retry.wait_s(error, now)
        self._connections.refresh()

    def _receive(self, connections: dict[Address, BlockingConnection]) -> None:
        for address, connection in connections.items():
            while (message := connection.take()) is not None:
                self._received(self._nodes[address], message)
            if connection.failure is not None:
                self._failed(address, connection.failure)

    def _received(self, node: NodeBatches, message: Message) -> None:
        if isinstance(message, MutateReply | Refusal) and is_wrong_node(message):
            self._connections.refresh(message.map_revision)
        for batch in node.receive(message, time.monotonic()):
            self._retry.progress()
            self._on_done(batch)
