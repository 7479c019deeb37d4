"""A consumer's streams: those of each node, and the queue between them and the application."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import trio

from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.course import Course
from upr_protocol.client.follower import PROGRESS, Follower
from upr_protocol.client.trio.connection import Connection
from upr_protocol.client.trio.connection_pool import ConnectionPool
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.session.states import SNAPSHOT_MESSAGES
from upr_protocol.wire import MapReply, Message, ReplicaAck, StreamReply

DELIVERIES_MAX: Final = 4096
"""Deliveries that may wait for the application. The windows bound the chunks; this bounds the
rest."""


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


class NodeStreams:
    """The streams of one node, through any number of connections; a connection's handler.

    Args:
        follower: Turns messages into deliveries.
        retry: Notified of progress.
        queue: Where deliveries go.
        opened: Set when a connection is greeted.
        pool: Notified of what concerns other nodes.
    """

    def __init__(
        self,
        follower: Follower,
        retry: RetryPolicy,
        queue: DeliveryQueue,
        opened: trio.Event,
        pool: ConnectionPool[NodeStreams],
    ) -> None:
        self.retry = retry
        self._follower = follower
        self._queue = queue
        self._opened = opened
        self._pool = pool
        self._connection: Connection | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    # The connection's side; `ConnectionHandler` documents it.

    def connected(self, connection: Connection) -> None:
        for delivery in self._follower.enter(connection.handshake):
            self._queue.put(delivery)
        self._pool.connected(self, connection)
        self._follower.begin(connection.session, connection.handshake)
        self._connection = connection
        self._opened.set()
        self._react()

    def received(self, message: Message) -> None:
        if self._connection is None:
            return
        if isinstance(message, MapReply):
            self._pool.received_map(self, message)
            return
        for delivery in self._follower.take(message):
            self._queue.put(delivery)
        if isinstance(message, PROGRESS):
            self.retry.progress()
        if type(message) in SNAPSHOT_MESSAGES:
            return  # there are many, and none of them refuses or ends anything
        if isinstance(message, StreamReply) and not message.status:
            self._pool.works(message.partition)
        self._react()

    def _react(self) -> None:
        """Acts on what the follower has concluded, and has its messages written."""
        connection, follower = self._connection, self._follower
        strays, follower.strays = follower.strays, []
        for stray in strays:
            if self._pool.metadata.is_single_node and connection is not None:
                connection.fail(stray.error)  # there is no other node to try meanwhile
                return
            self._pool.refused(stray.partition, stray.error, stray.map_revision)
        if connection is None:
            return
        if follower.trouble is not None:
            connection.fail(follower.trouble)
        elif follower.done:
            connection.finish()
        else:
            connection.flush()

    def writable(self) -> None:
        pass

    async def wait_for_room(self) -> None:
        if self._queue.is_full:
            await self._queue.wait_for_room()

    def lost(self, error: UprError) -> None:  # noqa: ARG002  the pool has it, and connects again
        self._connection = None
        self._follower.disconnected()

    # The pool's side.

    async def drain(self) -> None:
        """Waits for nothing: what has not arrived comes from another node."""

    def take_on(self, partition: PartitionId) -> None:
        """Follows one more partition."""
        self._follower.take_on(partition)
        self._react()

    def let_go(self, partition: PartitionId) -> None:
        """Stops following a partition."""
        if self.follows(partition):
            self._follower.let_go(partition)
            self._react()

    def follows(self, partition: PartitionId) -> bool:
        """Whether this node is to stream the partition."""
        return partition in self._follower.mine

    # The application's side.

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has processed a delivery: the server may send as many bytes again."""
        if self._follower.acknowledge(delivery) and self._connection is not None:
            self._connection.flush()

    def rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """The application has rolled back to `to`.

        Returns:
            `RolledBack`, for the application before anything else: it stands there now.

        Raises:
            ValueError: `to` is above the ceiling.
        """
        delivery = self._follower.rolled_back(partition, to)
        self._react()
        return delivery

    def report(self, report: ReplicaAck) -> None:
        """Sends what a replica has, or drops the report if there is no connection."""
        if self._follower.report(report) and self._connection is not None:
            self._connection.flush()

    def send_barriers(self) -> None:
        """Sends the barriers that have yet to pass this node."""
        self._follower.send_barriers()
        self._react()


class ConsumerStreams:
    """The streams of all nodes, with one queue.

    Args:
        course: How far the subscription is.
        new_retry_policy: Gives each node's.
        new_pool: Gives the pool of connections whose client this is.

    Attributes:
        queue: The deliveries that the application has not taken.
        opened: Set when the first connection is greeted.
        course: See above.
        pool: The pool of connections.
    """

    def __init__(
        self,
        course: Course,
        new_retry_policy: Callable[[], RetryPolicy],
        new_pool: Callable[[ConsumerStreams], ConnectionPool[NodeStreams]],
    ) -> None:
        self.queue = DeliveryQueue()
        self.opened = trio.Event()
        self.course = course
        self._new_retry_policy = new_retry_policy
        self._nodes: list[NodeStreams] = []
        self.pool = new_pool(self)

    # The pool's side; `PoolClient` documents it.

    @property
    def is_finished(self) -> bool:
        return self.course.done

    @property
    def partitions(self) -> Iterable[PartitionId]:
        return sorted(self.course.left)

    def is_waiting_for(self, partition: PartitionId) -> bool:
        return partition in self.course.left

    def new_handler(self) -> NodeStreams:
        node = NodeStreams(
            Follower(self.course), self._new_retry_policy(), self.queue, self.opened, self.pool
        )
        self._nodes.append(node)
        return node

    def place(self, partition: PartitionId, handler: NodeStreams | None) -> None:
        for node in self._nodes:
            if node is not handler:
                node.let_go(partition)
        if handler is not None:
            handler.take_on(partition)

    def remove_handler(self, handler: NodeStreams) -> None:
        self._nodes.remove(handler)

    # The application's side.

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to any node."""
        return any(node.is_connected for node in self._nodes)

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has processed a delivery: its node may send as many bytes again."""
        if delivery.nbytes:
            for node in self._nodes:
                node.acknowledge(delivery)

    def node_of(self, partition: PartitionId) -> NodeStreams:
        """The node that streams a partition; any node while the partition is with none."""
        nodes = (node for node in self._nodes if node.follows(partition))
        return next(nodes, self._nodes[0])

    def send_barrier(self, cookie: bytes) -> None:
        """Sends a barrier through all nodes, now or as soon as they stream.

        Raises:
            LocalProtocolError: Too many barriers are open, this one is, or the cookie is too long.
        """
        self.course.rounds.open_barrier(cookie)
        for node in self._nodes:
            node.send_barriers()
