"""Links to the nodes of a bucket, for programs that block; see `pool`.

Nothing happens by itself: a connection is made when it is asked for, and the map is asked for when
the caller says that it may be old.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import attrs

from upr_protocol.address import Address
from upr_protocol.client.blocking.connection import BlockingConnection, SocketOptions
from upr_protocol.client.core.backoff import Backoff
from upr_protocol.client.core.metadata import ClusterMetadata
from upr_protocol.client.trio.connection_pool import PAUSE_MAX_S
from upr_protocol.client.trio.node_client import partition_map_of
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import GetMap, MapReply, Message

_ASK_S: Final = 1.0
"""How long one node may take to tell its map."""


class BlockingConnectionPool:
    """Links to the nodes of a bucket.

    Args:
        address: Where to begin.
        options: How to connect.
        draw: Gives numbers in [0, 1), for the waits between rounds of asking.
        state: What a node must be for a partition to be of use for it.
        by_map: Whether to go by the map at all, and not to stay with the address.
        opened: The partitions whose histories are of interest; none for all.

    Attributes:
        metadata: What is known of the map.
        connections: The connections that there are, by address; of one that was lost, the rest.
        was_connected: Whether any node was ever reached.
    """

    def __init__(
        self,
        address: Address,
        options: SocketOptions,
        draw: Callable[[], float],
        *,
        state: PartitionState = PartitionState.ACTIVE,
        by_map: bool = True,
        opened: tuple[PartitionId, ...] = (),
    ) -> None:
        self.metadata = ClusterMetadata(address, by_map=by_map)
        self.connections: dict[Address, BlockingConnection] = {}
        self.was_connected = False
        self._options = options
        self._state = state
        self._opened = opened
        self._away: dict[Address, float] = {}
        self._pauses = Backoff(draw, cap_s=PAUSE_MAX_S)
        self._asked_again_at = 0.0

    def close(self) -> None:
        """Closes all connections."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    # Links.

    def any(self) -> BlockingConnection:
        """A connection to any node; the map is known then, if there is one.

        Raises:
            UprError: There is none to be had; why the last attempt failed.
        """
        live = (
            connection for connection in self.connections.values() if connection.failure is None
        )
        return next(live, None) or self._connection_to(self.metadata.known_nodes())

    def at(self, address: Address) -> BlockingConnection:
        """The connection to the node at `address`, which may name several places.

        Raises:
            UprError: There is none to be had; why the last attempt failed.
        """
        return self._connection_to(address.each())

    def _connection_to(self, places: list[Address]) -> BlockingConnection:
        for place in places:
            connection = self.connections.get(place)
            if connection is not None and connection.failure is None:
                return connection
        error: UprError = BrokenError("no node is known")
        for place in places:
            try:
                return self._connect(place)
            except UprError as failure:
                error = failure
        raise error

    def _connect(self, address: Address) -> BlockingConnection:
        now = self._options.clock()
        try:
            connection = BlockingConnection(address, self._options, self._opened)
        except UprError:
            self._away[address] = now
            raise
        self._away.pop(address, None)
        self.connections[address] = connection
        self.was_connected = True
        self.metadata.note_revision(connection.handshake.map_revision)
        if self.metadata.is_stale:
            self._ask(connection)
        return connection

    def home_of(self, partition: PartitionId) -> Address | None:
        """The node of a partition: the first that is not known to be away; None while there is
        none."""
        holders = self.metadata.holders(partition, self._state)
        good = [address for address in holders if address not in self._away]
        return next(iter(good or holders), None)

    def no_holder_text(self, partition: PartitionId) -> str:
        """See `ClusterMetadata.no_holder_text`."""
        return self.metadata.no_holder_text(partition, self._state)

    def drop(self, address: Address) -> None:
        """A node is not needed any more."""
        for place in address.each():
            connection = self.connections.pop(place, None)
            if connection is not None:
                connection.close()

    def lost(self, address: Address) -> None:
        """The connection to a node is over."""
        self.drop(address)
        self._away[address] = self._options.clock()

    # The map.

    def _ask(self, connection: BlockingConnection) -> None:
        opaque = connection.session.new_opaque()
        connection.session.send(GetMap(self.metadata.address.bucket, opaque=opaque))
        deadline = self._options.clock() + _ASK_S
        others: list[Message] = []
        while (message := connection.receive(deadline)) is not None:
            if message.opaque == opaque:
                found = partition_map_of(message) if isinstance(message, MapReply) else None
                if found is not None:
                    self.metadata.take(found)
                break
            others.append(message)
        connection.put_back(others)

    def refresh(self, map_revision: int = 0) -> float:
        """Asks every node for its map, unless that was done just now; the newest counts. A node
        that is alone has none.

        Args:
            map_revision: The revision that some node has, as far as was heard.

        Returns:
            When it is to be called again, if it did not help.
        """
        self.metadata.note_revision(map_revision)
        clock = self._options.clock
        if self.metadata.is_alone or clock() < self._asked_again_at:
            return self._asked_again_at
        revision = self.metadata.revision
        options = attrs.evolve(
            self._options, connect_timeout_s=min(_ASK_S, self._options.connect_timeout_s)
        )
        for address in self.metadata.known_nodes():
            with suppress(UprError):
                connection = BlockingConnection(Address(address.host, address.port), options)
                try:
                    self._ask(connection)
                finally:
                    connection.close()
            if self.metadata.revision > revision and not self.metadata.is_stale:
                break
        if self.metadata.revision > revision:
            self._pauses.reset()
            self._away.clear()
        self._asked_again_at = clock() + self._pauses.next_wait_s()
        return self._asked_again_at
