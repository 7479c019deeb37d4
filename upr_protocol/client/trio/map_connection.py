"""A connection on which a node is asked for its partition map, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.trio.connection import Connection, TrioOptions, open_connection
from upr_protocol.client.trio.map_request import MapRequest
from upr_protocol.errors import UprError
from upr_protocol.wire import MapReply, Message

IDLE_S: Final = 2.0
"""A connection who is not asked for so long closes the connection: while a partition has no node,
rounds of asking follow each other faster."""

PATIENCE_S: Final = 2.0
"""How long an answer is waited for before the node is taken for gone."""


class MapConnection:
    """A connection's handler, and the connection.

    Args:
        address: The node, and the bucket whose map is of interest.
        options: How to connect.
        told: Called with each answer; what it raises ends the connection.

    Attributes:
        scope: Cancelled, it is over.
    """

    def __init__(
        self, address: Address, options: TrioOptions, told: Callable[[MapReply], None]
    ) -> None:
        self.scope = trio.CancelScope()
        self._address = address
        self._options = options
        self._told = told
        self._connection: Connection | None = None
        self._map_request = MapRequest(trio.current_time())
        self._is_over = False

    async def run(self) -> None:
        """Connects, asks, and stays for as long as it is asked again. There is no error: who does
        not answer is asked anew in the next round."""
        with suppress(UprError), self.scope:
            async with open_connection(
                attrs.evolve(self._address, bucket=""), self._options, self
            ) as connection:
                while connection.failure is None and trio.current_time() < self._idle_at:
                    with trio.move_on_at(self._idle_at):
                        await connection.ended.wait()
        self._is_over = True

    @property
    def _idle_at(self) -> float:
        return self._map_request.asked_at + IDLE_S

    def ask(self) -> bool:
        """Asks the node again, unless its answer is still waited for; whether it may yet come."""
        if self._is_over:
            return False
        if self._connection is None:
            return trio.current_time() < self._map_request.asked_at + PATIENCE_S
        return self._map_request.ask(self._connection, self._address.bucket, PATIENCE_S)

    # The connection's side.

    def connected(self, connection: Connection) -> None:
        """See `ConnectionHandler`."""
        self._connection = connection
        self.ask()

    def received(self, message: Message) -> None:
        """See `ConnectionHandler`. A refusal is an answer, too: there is no such bucket here."""
        self._map_request.waits = False
        if isinstance(message, MapReply):
            self._told(message)

    def writable(self) -> None:
        """See `ConnectionHandler`. One request does not crowd a connection."""

    async def breathe(self) -> None:
        """See `ConnectionHandler`. There is one answer to each question."""

    def lost(self, error: UprError) -> None:  # noqa: ARG002  the next round connects anew
        """See `ConnectionHandler`."""
        self._is_over = True
