"""What a consumer's connections bring, in one row."""

from __future__ import annotations

from typing import Final

import trio

from upr_protocol.client.delivery import Delivery
from upr_protocol.client.follower import PROGRESS, Follower
from upr_protocol.client.link import Link
from upr_protocol.client.mailbox import Mailbox
from upr_protocol.client.retry import Patience
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.wire import Message, ReplicaAck

DELIVERIES_MAX: Final = 4096
"""What may wait for the application. Chunks are bounded by the window; this bounds the rest."""


class Feed:
    """Turns messages into deliveries; a handler that lives through several links.

    Attributes:
        mailbox: The deliveries that the application has not taken.
        opened: Set when the first connection is greeted.
        connections: Connections made.
        follower: What becomes of the messages.
        patience: Told of progress.
    """

    def __init__(self, follower: Follower, patience: Patience) -> None:
        self.mailbox: Mailbox[Delivery] = Mailbox(DELIVERIES_MAX)
        self.opened = trio.Event()
        self.connections = 0
        self.follower = follower
        self.patience = patience
        self._link: Link | None = None

    @property
    def finished(self) -> bool:
        """See `Persistent`."""
        return self.follower.done

    @property
    def connected_now(self) -> bool:
        """Whether there is a link."""
        return self._link is not None

    def connected(self, link: Link) -> None:
        """See `Handler`."""
        for delivery in self.follower.begin(link.session, link.greeting):
            self.mailbox.put(delivery)
        self._link = link
        self.connections += 1
        self.opened.set()
        link.poke()
        self._look(link)

    def received(self, message: Message) -> None:
        """See `Handler`."""
        link = self._link
        if link is None:
            return
        for delivery in self.follower.take(message):
            self.mailbox.put(delivery)
        if isinstance(message, PROGRESS):
            self.patience.progress()
        self._look(link)

    def _look(self, link: Link) -> None:
        if self.follower.trouble is not None:
            link.fail(self.follower.trouble)
        elif self.follower.done:
            link.finish()

    def writable(self) -> None:
        """See `Handler`."""

    async def breathe(self) -> None:
        """See `Handler`."""
        if self.mailbox.full:
            await self.mailbox.drained()

    def lost(self, error: UprError) -> None:  # noqa: ARG002  whoever connects again has it
        """See `Handler`."""
        self._link = None
        self.follower.disconnected()

    # The application's side.

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has dealt with a delivery: the server may send as much again."""
        if self.follower.acknowledge(delivery) and self._link is not None:
            self._link.poke()

    def rolled_back(self, partition: PartitionId, to: SeqNo) -> None:
        """The application has undone what it was asked to; `RolledBack` follows.

        Raises:
            ValueError: `to` is above the ceiling.
        """
        self.mailbox.put(self.follower.rolled_back(partition, to))
        if self._link is not None:
            self._link.poke()

    def report(self, report: ReplicaAck) -> None:
        """Sends what a replica has; dropped when there is no connection."""
        if self.follower.report(report) and self._link is not None:
            self._link.poke()

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier, now or as soon as there is a connection that streams."""
        self.follower.barrier(cookie)
        if self._link is not None:
            self._link.poke()
