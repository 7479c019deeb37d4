"""The streams of a consumer that blocks, of all nodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import attrs

from upr_protocol.address import Address
from upr_protocol.client.blocking.cluster_connections import BlockingClusterConnections
from upr_protocol.client.blocking.connection import BlockingConnection, step_any
from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import MAP_WAIT_S_MAX, RetryState
from upr_protocol.client.core.routing import PartitionRouter
from upr_protocol.client.core.stream_follower import PROGRESS_MESSAGES, StreamFollower
from upr_protocol.client.core.subscription_state import SubscriptionState
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId
from upr_protocol.session.states import SNAPSHOT_MESSAGES
from upr_protocol.wire import StreamReply


@attrs.define(eq=False)
class _Node:
    """The streams of one node.

    Attributes:
        address: Where the node is.
        follower: Turns messages into deliveries.
        connection: The connection that the follower uses; None while there is none.
        waits_until: When to connect again after a failure; None when there was none.
    """

    address: Address
    follower: StreamFollower
    connection: BlockingConnection | None = None
    waits_until: float | None = None


class BlockingStreams:
    """The streams of all nodes.

    Args:
        state: How far the subscription is.
        connections: The connections to all nodes.
        retry: Says how long to go on without anything from any node.
        router: Chooses the node of each partition.

    Attributes:
        deliveries: The deliveries that the application has not taken.
    """

    def __init__(
        self,
        state: SubscriptionState,
        connections: BlockingClusterConnections,
        retry: RetryState,
        router: PartitionRouter,
    ) -> None:
        self.deliveries: deque[Delivery] = deque()
        self._state = state
        self._connections = connections
        self._retry = retry
        self._router = router
        # The first node is at the user's address, wherever partitions turn out to be.
        first = connections.metadata.address
        self._nodes = {first: _Node(first, StreamFollower(state))}
        self._idle_until = 0.0
        """When the idle time that `receive` gave last is over."""
        self._revision = 0
        """The revision of the map that the router used last."""

    def connect(self) -> None:
        """Connects to any node, if there is no connection.

        Raises:
            UprError: No node can be reached; the reason of the last attempt.
        """
        self._connections.to_any_node()

    def close(self) -> None:
        """Closes all connections."""
        self._connections.close()

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has processed a delivery."""
        for node in self._nodes.values():
            node.follower.acknowledge(delivery)

    def send_barrier(self, cookie: bytes) -> None:
        """Sends a barrier through all nodes."""
        self._state.barriers.open_barrier(cookie)
        for node in self._nodes.values():
            node.follower.send_barriers()

    # Receiving.

    def receive(self, deadline: float) -> float:
        """Receives from all nodes, until something came or the deadline is over.

        Returns:
            For how many seconds no node can be listened to; call `idle_time_over` after them.

        Raises:
            UprError: Going on is of no use.
        """
        self._route()
        now = time.monotonic()
        connected: list[_Node] = []
        for node in list(self._nodes.values()):
            if node.waits_until is None or node.waits_until <= now:
                self._guard(node, partial(self._connect, node, connected))
        if self._state.is_finished:
            self._connections.close()
            return 0.0
        wakes_at = self._next_wake_up(now)
        if not connected and not self.deliveries:
            if any(node.waits_until is None for node in self._nodes.values()):
                return 0.0  # a node was added just now
            self._idle_until = max(now + 0.001, min(deadline, wakes_at))
            return self._idle_until - now
        if not self.deliveries:
            connections = [node.connection for node in connected if node.connection is not None]
            step_any(connections, min(deadline, wakes_at))
        for node in connected:
            if self._nodes.get(node.address) is node and node.connection is not None:
                self._guard(node, partial(self._take_messages, node, node.connection))
        if self._state.is_finished:
            self._connections.close()
        return 0.0

    def _next_wake_up(self, now: float) -> float:
        """When something has to be tried again, although no node sends anything."""
        waits = [node.waits_until for node in self._nodes.values() if node.waits_until is not None]
        wakes_at = min((*waits, self._router.next_retry_at(now)))
        return min(wakes_at, now + MAP_WAIT_S_MAX) if self._router.has_unplaced else wakes_at

    def idle_time_over(self) -> None:
        """The idle time that `receive` gave is over. A node may have to wait for longer: the
        caller's deadline ends no wait."""
        for node in self._nodes.values():
            if node.waits_until is not None and node.waits_until <= self._idle_until:
                node.waits_until = None

    def _guard(self, node: _Node, function: Callable[[], None]) -> None:
        """Does something with a node. After a failure it is done again in a while."""
        try:
            function()
            return
        except UprError as failure:
            error = failure
        node.follower.disconnected()
        node.connection = None
        self._connections.lost(node.address)
        if not self._connections.was_connected:
            raise error
        now = time.monotonic()
        node.waits_until = now + self._retry.wait_s(error, now)
        self._connections.refresh()

    def _connect(self, node: _Node, connected: list[_Node]) -> None:
        """Makes sure that a node is connected, and adds it to `connected`."""
        node.waits_until = None
        connection = self._connections.to_node(node.address)
        if node.connection is not connection:
            node.follower.disconnected()
            self.deliveries.extend(node.follower.learn_partitions(connection.handshake))
            self._route()
            if self._nodes.get(node.address) is not node:
                return  # the bucket is on several nodes, as it turned out, and not on this one
            node.connection = connection
            node.follower.connected(connection.session, connection.handshake)
        # A partition that was added since may have met a failure without any message.
        self._react(node.follower)
        connected.append(node)

    def _take_messages(self, node: _Node, connection: BlockingConnection) -> None:
        while (message := connection.take()) is not None:
            self.deliveries.extend(node.follower.receive(message))
            if isinstance(message, PROGRESS_MESSAGES):
                self._retry.progress()
            elif isinstance(message, StreamReply) and not message.status:
                self._router.succeeded(message.partition)
            if type(message) not in SNAPSHOT_MESSAGES:
                self._react(node.follower)
        if connection.failure is not None:
            raise connection.failure

    def _react(self, follower: StreamFollower) -> None:
        """Acts on what a follower has concluded."""
        refused_streams, follower.refused_streams = follower.refused_streams, []
        for refused in refused_streams:
            if self._connections.metadata.is_single_node:
                raise refused.error  # there is no other node to try meanwhile
            self._router.refused(refused.partition, refused.error, time.monotonic())
            self._connections.refresh(refused.map_revision)
        if follower.failure is not None:
            raise follower.failure

    # Where partitions are.

    def _route(self) -> None:
        """Places each partition with the node that the map names, and drops nodes without one."""
        if self._state.partitions is None:
            return
        now, metadata = time.monotonic(), self._connections.metadata
        placements = self._place(now)
        if self._router.has_unplaced or metadata.is_stale:
            self._connections.refresh()
            if metadata.revision != self._revision:
                placements = self._place(now)
        error = self._router.timed_out(self._state.remaining.__contains__, now)
        if error is not None:
            raise error
        for partition, address in placements.items():
            if address is not None and address not in self._nodes:
                self._nodes[address] = _Node(address, StreamFollower(self._state))
            for node in self._nodes.values():
                if node.address != address:
                    node.follower.remove_partition(partition)
            if address is not None:
                self._nodes[address].follower.add_partition(partition)
        needed = set(placements.values())
        for address in [address for address in self._nodes if address not in needed]:
            self._nodes.pop(address).follower.disconnected()
            self._connections.drop(address)

    def _place(self, now: float) -> Mapping[PartitionId, Address | None]:
        revision = self._connections.metadata.revision
        if revision != self._revision:
            self._revision = revision
            self._router.map_changed()
        remaining = self._state.remaining
        return self._router.route(
            sorted(remaining), self._connections.down, remaining.__contains__, now
        )
