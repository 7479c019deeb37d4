"""Brings batches to one node, over one connection after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from upr_protocol.client.core.accumulator import Accumulator
from upr_protocol.client.core.results import status_of
from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.trio.connection import Connection
from upr_protocol.errors import BrokenError, Status, UprError
from upr_protocol.wire import Credit, MapReply, Message, Refusal

if TYPE_CHECKING:
    from upr_protocol.client.trio.publisher_router import PublisherRouter

WRONG_NODE: Final = frozenset({Status.NOT_MY_PARTITION, Status.WRONG_STATE})
"""What a node says when another one may be the right one."""


class NodePublisher:
    """A handler that lives through several connections to one node.

    Args:
        accumulator: What is to be brought there.
        patience: Told of progress.
        router: Whose it is.

    Attributes:
        accumulator: See above.
        patience: See above.
    """

    def __init__(
        self, accumulator: Accumulator, patience: RetryPolicy, router: PublisherRouter
    ) -> None:
        self.accumulator = accumulator
        self.patience = patience
        self._router = router
        self._connection: Connection | None = None

    # The connection's side.

    def connected(self, connection: Connection) -> None:
        """See `ConnectionHandler`."""
        router, count = self._router, connection.handshake.partition_count
        if router.partition_count not in (0, count):
            connection.fail(
                BrokenError(
                    f"the bucket was made anew, with {count} partitions instead of "
                    f"{router.partition_count}"
                )
            )
            router.stop(connection.failure)
            return
        router.partition_count = count
        router.connections += 1
        router.pool.connected(self, connection)
        self._connection = connection
        self.pump()
        router.notify()

    def received(self, message: Message) -> None:
        """See `ConnectionHandler`."""
        router = self._router
        if isinstance(message, MapReply):
            router.pool.told(self, message)
            return
        if isinstance(message, Refusal) and status_of(message.status) in WRONG_NODE:
            router.pool.doubt(message.map_revision)
        if not isinstance(message, Credit):
            batch = self.accumulator.take(message, trio.current_time())
            if batch is not None:
                self.patience.progress()
                router.answered(batch)
        self.pump()
        router.notify()

    def writable(self) -> None:
        """See `ConnectionHandler`."""
        self.pump()

    async def breathe(self) -> None:
        """See `ConnectionHandler`. Answers are bounded by the batches in flight."""

    def lost(self, error: UprError) -> None:  # noqa: ARG002  whoever connects again has it
        """See `ConnectionHandler`."""
        self._connection = None
        self.accumulator.disconnected()
        self._router.notify()

    # The router's side.

    async def drain(self) -> None:
        """See `NodeHandler`. What has no answer is sent again elsewhere, under its old number."""

    def pump(self) -> None:
        """Sends what may be sent now."""
        connection = self._connection
        if connection is not None and self.accumulator.pump(
            connection.session, trio.current_time()
        ):
            connection.poke()
