"""Requests to one node, over one connection after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.trio.connection import Connection
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.errors import UprError
from upr_protocol.wire import MapReply, Message

if TYPE_CHECKING:
    from upr_protocol.client.trio.dispatcher import RequestDispatcher


class NodeChannel(RequestChannel):
    """An asker that lives through several connections to one node.

    Args:
        router: Whose it is.
        credit_timeout_s: How long a change waits for a server that grants no credit.

    Attributes:
        patience: Endless: each request has its own.
    """

    def __init__(self, router: RequestDispatcher, credit_timeout_s: float) -> None:
        super().__init__(router.address, credit_timeout_s)
        self.patience = RetryPolicy(float("inf"))
        self._router = router

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and self._connection.failure is None

    def connected(self, connection: Connection) -> None:
        """See `ConnectionHandler`."""
        super().connected(connection)
        self._router.connected(self, connection)

    def received(self, message: Message) -> None:
        """See `ConnectionHandler`."""
        if isinstance(message, MapReply):
            self._router.pool.told(self, message)
        else:
            super().received(message)

    def lost(self, error: UprError) -> None:
        """See `ConnectionHandler`."""
        super().lost(error)
        self._router.lost(error)
