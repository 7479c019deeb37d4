"""Asking nodes for their partition map, and not too often.

A failover makes every client ask, and each connection is work for the nodes that are left. So a
node is asked on the connection that is there already, has one question at a time, and a connection
made only for that question stays while there is a reason to ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Final

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.metadata import ClusterMetadata
from upr_protocol.client.core.retry import MAP_WAIT_S_MAX, Backoff
from upr_protocol.client.trio.connection import (
    ConnectionHandler,
    TrioConnection,
    TrioOptions,
    open_connection,
)
from upr_protocol.errors import Status, UprError
from upr_protocol.wire import GetMap, MapReply, Message, Refusal

ROUNDS_RESET_S: Final = 2.0
"""How long after the last round was due the waits between rounds are short again."""

MAP_CONNECTION_IDLE_S: Final = 2.0
"""How long a connection made only for the map stays open after a question: while a partition has no
node, rounds of asking follow each other faster."""

MAP_ANSWER_TIMEOUT_S: Final = 2.0
"""How long an answer may take before the node counts as gone."""

MapReceiver = Callable[[Address, MapReply | None, int], None]
"""Is given a node's answer, None if the node does not have the bucket; and the newest revision that
was known when it was asked."""


@attrs.define
class MapRequest:
    """A question for a node's map, one at a time: a node that owes an answer is not asked again.

    Attributes:
        asked_at: When the node was asked last; `-inf` for never.
        is_open: Whether it still owes an answer.
        revision: The newest revision that was known when it was asked last.
    """

    asked_at: float = -math.inf
    is_open: bool = False
    revision: int = 0

    def send(self, connection: TrioConnection, metadata: ClusterMetadata, timeout_s: float) -> bool:
        """Asks, unless the node owes an answer.

        Returns:
            Whether an answer may still arrive.
        """
        now = trio.current_time()
        if self.is_open:
            return now < self.asked_at + timeout_s
        try:
            opaque = connection.session.new_opaque()
            connection.send(GetMap(metadata.address.bucket, opaque=opaque))
        except UprError:
            return False
        self.asked_at, self.is_open, self.revision = now, True, metadata.newest_revision
        return True


class MapConnection(ConnectionHandler):
    """A connection to one node, only to ask for its map.

    Args:
        on_map: Called with each answer, None for a refusal because the node has no such bucket;
            what it raises ends the connection.

    Attributes:
        scope: Cancel it to close the connection.
    """

    def __init__(
        self,
        address: Address,
        metadata: ClusterMetadata,
        options: TrioOptions,
        on_map: MapReceiver,
    ) -> None:
        self.scope = trio.CancelScope()
        self._address = address
        self._metadata = metadata
        self._options = options
        self._on_map = on_map
        self._connection: TrioConnection | None = None
        self._request = MapRequest(trio.current_time())
        self._is_over = False

    async def run(self) -> None:
        """Connects, asks, and stays while it is asked again. Raises nothing: a node that does not
        answer is asked on a new connection in the next round."""
        node_address = attrs.evolve(self._address, bucket="")
        with suppress(UprError), self.scope:
            async with open_connection(node_address, self._options, self) as connection:
                while connection.failure is None and trio.current_time() < self._idle_at:
                    with trio.move_on_at(self._idle_at):
                        await connection.ended.wait()
        self._is_over, self._connection = True, None

    @property
    def _idle_at(self) -> float:
        return self._request.asked_at + MAP_CONNECTION_IDLE_S

    def ask(self) -> bool:
        """Asks the node again, unless it owes an answer; whether an answer may still arrive."""
        if self._is_over:
            return False
        if self._connection is None:
            return trio.current_time() < self._request.asked_at + MAP_ANSWER_TIMEOUT_S
        return self._request.send(self._connection, self._metadata, MAP_ANSWER_TIMEOUT_S)

    def connection_made(self, connection: TrioConnection) -> None:
        self._connection = connection
        self.ask()

    def message_received(self, message: Message) -> None:
        # A refusal is an answer, too.
        self._request.is_open = False
        if isinstance(message, MapReply):
            self._on_map(self._address, message, self._request.revision)
        elif isinstance(message, Refusal) and message.status == Status.NO_BUCKET:
            self._on_map(self._address, None, self._request.revision)

    def connection_lost(self, error: UprError) -> None:  # noqa: ARG002  the next round connects anew
        self._is_over = True


class MapRefresher:
    """Asks all known nodes for the map, in rounds that follow each other less and less often.

    Attributes:
        next_round_at: When the next round may begin.
        is_requested: Whether the map was asked for since the last round: it may be stale.
    """

    def __init__(self, metadata: ClusterMetadata, options: TrioOptions) -> None:
        self.next_round_at = -math.inf
        self.is_requested = False
        self._metadata = metadata
        self._options = options
        self._waits = Backoff(options.draw, cap_s=MAP_WAIT_S_MAX)
        self._connections: dict[Address, MapConnection] = {}

    def begin_round(self, now: float) -> bool:
        """Begins a round of asking when it is time for one; whether it is."""
        if now < self.next_round_at:
            return False
        if now >= self.next_round_at + ROUNDS_RESET_S:
            self._waits.reset()
            self._metadata.forget_answers()
        self.is_requested = False
        self.next_round_at = now + self._waits.next_wait_s()
        return True

    def note_map_changed(self) -> None:
        """There is a newer map: the next round is a first one, and may begin at once."""
        self._waits.reset()
        self.next_round_at = -math.inf

    def close(self) -> None:
        """Refers to no connection any more. They have ended."""
        self._connections.clear()

    def ask_others(
        self,
        asked_nodes: Container[Address],
        on_map: MapReceiver,
        nursery: trio.Nursery,
    ) -> None:
        """Asks every known node that was not asked, each on a connection of its own. Calls `on_map`
        with each answer."""
        for address in self._metadata.known_nodes():
            connection = self._connections.get(address)
            if address in asked_nodes or (connection is not None and connection.ask()):
                continue
            if connection is not None:
                connection.scope.cancel()
            connection = MapConnection(address, self._metadata, self._options, on_map)
            self._connections[address] = connection
            nursery.start_soon(connection.run)
