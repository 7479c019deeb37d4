"""A consumer's streams: those of each node, and the queue between them and the application."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import trio

from upr_protocol.address import Address
from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import RetryState
from upr_protocol.client.core.stream_follower import (
    PROGRESS_MESSAGES,
    ReplicaReport,
    StreamFollower,
)
from upr_protocol.client.core.subscription import SubscriptionState
from upr_protocol.client.trio.connection import TrioConnection, TrioOptions
from upr_protocol.client.trio.connection_pool import ConnectionPool, NodeHandler
from upr_protocol.concurrency import Notifier, without_traceback
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.session.states import SNAPSHOT_MESSAGES
from upr_protocol.wire import Message, StreamReply

DELIVERIES_MAX: Final = 4096
"""Deliveries that may wait for the application. The windows bound the chunks; this bounds the
rest."""


class EndOfStreamsError(UprError):
    """Every stream has ended for good."""


class DeliveryQueue:
    """The queue between the tasks that read connections and the task that consumes.

    `put` never waits; a reader asks `is_full` between two reads, and waits for room.

    Attributes:
        error: Why nothing more will come; None while something may.
    """

    __slots__ = ("_deliveries", "_has_arrived", "_has_room", "error")

    def __init__(self) -> None:
        self._deliveries: deque[Delivery] = deque()
        self.error: UprError | None = None
        self._has_arrived = Notifier()
        self._has_room = Notifier()

    def __len__(self) -> int:
        return len(self._deliveries)

    def put(self, delivery: Delivery) -> None:
        """Adds a delivery."""
        self._deliveries.append(delivery)
        self._has_arrived.notify()

    def end(self, error: UprError) -> None:
        """Nothing more will come: `wait` raises `error` once the queue is empty."""
        if self.error is None:
            self.error = error
        self._has_arrived.notify()

    @property
    def is_full(self) -> bool:
        """Whether a reader should wait for room."""
        return len(self._deliveries) >= DELIVERIES_MAX

    @property
    def _is_half_full(self) -> bool:
        return len(self._deliveries) <= DELIVERIES_MAX // 2

    async def wait_for_room(self) -> None:
        """Waits until the queue is at most half full."""
        await self._has_room.wait_until(lambda: self._is_half_full)

    def take(self) -> Delivery | None:
        """The oldest delivery, if there is one."""
        if not self._deliveries:
            return None
        delivery = self._deliveries.popleft()
        if self._is_half_full:
            self._has_room.notify()
        return delivery

    async def wait(self) -> None:
        """Waits until there is a delivery. Cancelled, nothing is lost.

        Raises:
            UprError: The queue is empty, and nothing more will come.
        """
        while not self._deliveries:
            if self.error is not None:
                raise self.error
            await self._has_arrived.wait()


class NodeStreams(NodeHandler):
    """The streams of one node; handles one connection after another to it."""

    def __init__(
        self,
        follower: StreamFollower,
        retry: RetryState,
        queue: DeliveryQueue,
        connections: ConnectionPool[NodeStreams],
    ) -> None:
        self.follower = follower
        self.retry = retry
        self._queue = queue
        self._connections = connections
        self._connection: TrioConnection | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def flush(self) -> None:
        """Has what the follower sent written."""
        if self._connection is not None:
            self._connection.flush()

    def act_on_follower(self) -> None:
        """Acts on what the follower has concluded, and has written what it sent."""
        connection, follower = self._connection, self.follower
        refused_streams, follower.refused_streams = follower.refused_streams, []
        for refused_stream in refused_streams:
            if (
                self._connections.metadata.is_single_node
                and connection is not None
                and not follower.has_streams_to_keep
            ):
                connection.fail(refused_stream.error)  # there is no other node to try meanwhile
                return
            self._connections.note_refused(
                refused_stream.partition, refused_stream.error, refused_stream.map_revision
            )
        if connection is None:
            return
        if follower.failure is not None:
            connection.fail(follower.failure)
        elif follower.is_finished:
            connection.request_close()
        else:
            connection.flush()

    def report(self, report: ReplicaReport) -> None:
        """Has a replica's report sent, with those that other partitions have before the writer's
        next turn. Drops it if there is no connection."""
        if self.follower.report(report) and self._connection is not None:
            self._connection.request_write()

    # What the connection calls; `ConnectionHandler` documents it.

    def ready_to_write(self) -> None:
        self.follower.send_reports()

    def connection_made(self, connection: TrioConnection) -> None:
        self.follower.connection_made(connection.session, connection.handshake)
        self._connection = connection
        self.act_on_follower()

    def message_received(self, message: Message) -> None:
        if self._connection is None:
            return
        for delivery in self.follower.receive(message):
            self._queue.put(delivery)
        if isinstance(message, PROGRESS_MESSAGES):
            self.retry.note_progress()
        if type(message) in SNAPSHOT_MESSAGES:
            return  # there are many, and none of them refuses or ends anything
        if isinstance(message, StreamReply) and not message.status:
            self._connections.router.note_succeeded(message.partition)
        self.act_on_follower()

    async def wait_for_room(self) -> None:
        if self._queue.is_full:
            await self._queue.wait_for_room()

    def connection_lost(self, error: UprError) -> None:  # noqa: ARG002  ConnectionPool reconnects
        self._connection = None
        self.follower.connection_lost()


class ConsumerStreams:
    """The streams of all nodes, with one queue of the deliveries that the application has not
    taken."""

    def __init__(self, address: Address, options: TrioOptions, state: SubscriptionState) -> None:
        self.queue = DeliveryQueue()
        self._has_opened = trio.Event()
        self.state = state
        self._new_retry_state = options.new_retry_state
        self.connections = ConnectionPool(
            address,
            options,
            self,
            state=state.subscription.state,
            opened_partitions=state.subscription.partitions,
        )

    async def run(self) -> None:
        """Keeps the streams going until they have ended for good, or going on is of no use. The
        queue is told why."""
        error: UprError = EndOfStreamsError("every stream has ended")
        try:
            await self.connections.run()
        except UprError as failure:
            error = failure.with_traceback(None)  # which would refer to it through this frame
        self.queue.end(error)
        self._has_opened.set()

    async def wait_opened(self) -> None:
        """Waits for the first connection.

        Raises:
            UprError: No node could be reached, or none has the bucket.
        """
        await self._has_opened.wait()
        if not self.state.connection_count:
            await self.queue.wait()  # raises why there was no connection

    def close(self) -> None:
        """Forgets the nodes, so that none of them is in a reference cycle. Call it when `run` has
        ended. A task that waits for deliveries learns the error."""
        self.connections.close()
        self.queue.end(ClosedError("the consumer was closed"))
        assert self.queue.error is not None
        self.queue.error = without_traceback(self.queue.error)

    # What the connections call; `PoolOwner` documents it.

    @property
    def is_finished(self) -> bool:
        return self.state.is_finished

    @property
    def partitions(self) -> Iterable[PartitionId]:
        return sorted(self.state.remaining_partitions)

    def bucket_opened(self, connection: TrioConnection) -> None:
        for delivery in self.state.learn_partitions(connection.handshake):
            self.queue.put(delivery)
        self._has_opened.set()

    def is_waiting_for(self, partition: PartitionId) -> bool:
        return partition in self.state.remaining_partitions

    def new_handler(self) -> NodeStreams:
        follower = StreamFollower(self.state)
        return NodeStreams(follower, self._new_retry_state(), self.queue, self.connections)

    def place(self, partition: PartitionId, handler: NodeStreams | None) -> None:
        for node in self.connections.handlers:
            if node is not handler and partition in node.follower.partitions:
                node.follower.remove_partition(partition)
                node.act_on_follower()
        if handler is not None:
            handler.follower.add_partition(partition)
            handler.act_on_follower()

    # What the consumer calls.

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to any node."""
        return any(node.is_connected for node in self.connections.handlers)

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has processed a delivery: its node may send as many bytes again."""
        if delivery.nbytes:
            for node in self.connections.handlers:
                if node.follower.acknowledge(delivery):
                    node.flush()

    def note_rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """The application has rolled back to `to`.

        Returns:
            `RolledBack`, for the application before anything else: it stands there now.

        Raises:
            ValueError: `to` is above the ceiling.
        """
        node = self._node_of(partition)
        delivery = node.follower.note_rolled_back(partition, to)
        node.act_on_follower()
        return delivery

    def report(self, report: ReplicaReport) -> None:
        """Has what a replica has sent, or drops the report if there is no connection."""
        if self.connections.handlers:  # there are none once the consumer is closed
            self._node_of(report[0]).report(report)

    def send_barrier(self, cookie: bytes) -> None:
        """Sends a barrier through all nodes, now or as soon as they stream.

        Raises:
            LocalProtocolError: Too many barriers are open, this one is, or the cookie is too long.
        """
        self.state.barriers.open_barrier(cookie)
        for node in self.connections.handlers:
            node.follower.send_barriers()
            node.act_on_follower()

    def _node_of(self, partition: PartitionId) -> NodeStreams:
        """The node that streams a partition; any node while the partition is with none."""
        nodes = self.connections.handlers
        return next((node for node in nodes if partition in node.follower.partitions), nodes[0])
