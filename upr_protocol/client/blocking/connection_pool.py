"""Connections to the nodes of a bucket, for programs that block.

No task runs in the background: a connection is made when a caller asks for it, and the nodes are
asked for the partition map when a caller says that it may be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import attrs

from upr_protocol.address import Address
from upr_protocol.client.blocking.connection import BlockingConnection, SocketOptions
from upr_protocol.client.core.metadata import ClusterMetadata, partition_map_of
from upr_protocol.client.core.retry import MAP_WAIT_S_MAX, Backoff
from upr_protocol.client.fork_check import ForkCheck
from upr_protocol.errors import BrokenError, Status, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import GetMap, MapReply

_MAP_TIMEOUT_S: Final = 1.0
"""How long one node may take to tell its map."""


class BlockingConnectionPool:
    """Connections to the nodes of a bucket."""

    def __init__(self, address: Address, options: SocketOptions, draw: Callable[[], float]) -> None:
        self.metadata = ClusterMetadata(address)
        # By address; a lost one stays until it is replaced.
        self._connections: dict[Address, BlockingConnection] = {}
        self._options = options
        self._fork_check = ForkCheck()
        # The nodes that could not be reached.
        self._unreachable_nodes: set[Address] = set()
        self._waits = Backoff(draw, cap_s=MAP_WAIT_S_MAX)
        self._next_round_at = 0.0

    def close(self) -> None:
        """Closes all connections."""
        self._leave_to_parent()
        # Another thread may be in the middle of a call, and connect to a node meanwhile.
        for connection in list(self._connections.values()):
            connection.close()
        self._connections.clear()

    def _leave_to_parent(self) -> None:
        """In a forked process, gives up the connections of its parent, which goes on with them."""
        if self._fork_check.was_forked():
            for connection in self._connections.values():
                connection.abandon()

    # Connections.

    @property
    def was_connected(self) -> bool:
        """Whether a node was ever reached."""
        return bool(self._connections)

    def to_any_node(self) -> BlockingConnection:
        """A connection to any node. The map is known then, if there is one.

        Raises:
            UprError: No node could be reached; why the last attempt failed.
        """
        self._leave_to_parent()
        live = (c for c in self._connections.values() if not c.is_over())
        return next(live, None) or self._connect_first(self.metadata.known_nodes())

    def to_node(self, address: Address) -> BlockingConnection:
        """The connection to the node at `address`, which may name several hosts.

        Raises:
            UprError: It could not be reached; why the last attempt failed.
        """
        self._leave_to_parent()
        for host in address.each_node():
            connection = self._connections.get(host)
            if connection is not None and not connection.is_over():
                return connection
        return self._connect_first(address.each_node())

    def _connect_first(self, hosts: Sequence[Address]) -> BlockingConnection:
        """Connects to the first host that answers. The last one has the whole time, and the others
        have it in a second round."""
        error: UprError = BrokenError("no node is known")
        slow_hosts: list[Address] = []
        for host in hosts[:-1]:
            began_at, options = self._options.clock(), self._options.for_first_attempt()
            try:
                return self._connect(host, options)
            except UprError as failure:
                error = failure
                if self._options.clock() >= began_at + options.connect_timeout_s:
                    slow_hosts.append(host)
        for host in [*hosts[-1:], *slow_hosts]:
            try:
                return self._connect(host, self._options)
            except UprError as failure:
                error = failure
        raise error

    def _connect(self, host: Address, options: SocketOptions) -> BlockingConnection:
        try:
            connection = BlockingConnection(host, options)
        except UprError:
            self._unreachable_nodes.add(host)
            raise
        self._unreachable_nodes.discard(host)
        self._connections[host] = connection
        self.metadata.note_revision(connection.handshake.map_revision)
        if self.metadata.is_stale:
            self._ask_map(host, connection)
        return connection

    def holder(self, partition: PartitionId) -> Address | None:
        """The node to use for a partition; None while the map names none."""
        return self.metadata.choose_holder(
            partition, PartitionState.ACTIVE, down=self._unreachable_nodes
        )

    def explain_no_holder(self, partition: PartitionId) -> str:
        """A sentence for a partition that no node holds; empty when one does."""
        return self.metadata.explain_no_holder(partition, PartitionState.ACTIVE)

    # The map.

    def _ask_map(self, node: Address, connection: BlockingConnection) -> None:
        opaque, asked_revision = connection.session.new_opaque(), self.metadata.newest_revision
        connection.session.send(GetMap(self.metadata.address.bucket, opaque=opaque))
        deadline = self._options.clock() + _MAP_TIMEOUT_S
        while (message := connection.receive(deadline)) is not None:
            if message.opaque == opaque:
                if isinstance(message, MapReply):
                    partition_map = partition_map_of(message, self.metadata.address.bucket)
                    self.metadata.learn(node, partition_map, asked_revision)
                elif message.status == Status.NO_BUCKET:
                    self.metadata.learn(node, None, asked_revision)
                return

    def refresh(self) -> float:
        """Asks every node for its map, unless that was done just now. The newest map counts. A
        single node has none to ask for. Gives when to call it again, if it did not help."""
        metadata, clock = self.metadata, self._options.clock
        if metadata.is_single_node or clock() < self._next_round_at:
            return self._next_round_at
        map_before = metadata.map
        metadata.forget_answers()
        timeout_s = min(_MAP_TIMEOUT_S, self._options.connect_timeout_s)
        options = attrs.evolve(self._options, connect_timeout_s=timeout_s)
        for address in metadata.known_nodes():
            with suppress(UprError):
                connection = BlockingConnection(attrs.evolve(address, bucket=""), options)
                try:
                    self._ask_map(address, connection)
                finally:
                    connection.close()
            # The newest that anybody told of: what the others have is no newer.
            if metadata.map is not map_before and not metadata.is_stale:
                break
        if metadata.map is not map_before:
            self._waits.reset()
            self._unreachable_nodes.clear()
        self._next_round_at = clock() + self._waits.next_wait_s()
        return self._next_round_at
