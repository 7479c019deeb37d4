"""What one node of a consumer's brings."""

from __future__ import annotations

import trio

from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.follower import PROGRESS, Follower
from upr_protocol.client.mailbox import Mailbox
from upr_protocol.client.trio.connection import Connection
from upr_protocol.client.trio.connection_pool import ConnectionPool
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.session.states import SNAPSHOT_MESSAGES
from upr_protocol.wire import MapReply, Message, ReplicaAck, StreamReply


class Feed:
    """Turns messages into deliveries; a handler that lives through several links to one node.

    Args:
        follower: What becomes of the messages.
        patience: Told of progress.
        mailbox: Where deliveries go.
        opened: Set when a connection is greeted.
        fleet: Told of what concerns other nodes.
    """

    def __init__(
        self,
        follower: Follower,
        patience: RetryPolicy,
        mailbox: Mailbox[Delivery],
        opened: trio.Event,
        fleet: ConnectionPool[Feed],
    ) -> None:
        self.patience = patience
        self._follower = follower
        self._mailbox = mailbox
        self._opened = opened
        self._fleet = fleet
        self._link: Connection | None = None

    @property
    def connected_now(self) -> bool:
        """Whether there is a link."""
        return self._link is not None

    # The link's side.

    def connected(self, link: Connection) -> None:
        """See `ConnectionHandler`."""
        for delivery in self._follower.enter(link.handshake):
            self._mailbox.put(delivery)
        self._fleet.connected(self, link)
        self._follower.begin(link.session, link.handshake)
        self._link = link
        self._opened.set()
        self._look()

    def received(self, message: Message) -> None:
        """See `ConnectionHandler`."""
        if self._link is None:
            return
        if isinstance(message, MapReply):
            self._fleet.told(self, message)
            return
        for delivery in self._follower.take(message):
            self._mailbox.put(delivery)
        if isinstance(message, PROGRESS):
            self.patience.progress()
        if type(message) in SNAPSHOT_MESSAGES:
            return  # there are many, and nothing else comes of them
        if isinstance(message, StreamReply) and not message.status:
            self._fleet.works(message.partition)
        self._look()

    def _look(self) -> None:
        """Sees to what the follower came to."""
        link, follower = self._link, self._follower
        strays, follower.strays = follower.strays, []
        for stray in strays:
            if self._fleet.metadata.is_alone and link is not None:
                link.fail(stray.error)  # there is no other node to try meanwhile
                return
            self._fleet.refused(stray.partition, stray.error, stray.map_revision)
        if link is None:
            return
        if follower.trouble is not None:
            link.fail(follower.trouble)
        elif follower.done:
            link.finish()
        else:
            link.poke()

    def writable(self) -> None:
        """See `ConnectionHandler`."""

    async def breathe(self) -> None:
        """See `ConnectionHandler`."""
        if self._mailbox.full:
            await self._mailbox.drained()

    def lost(self, error: UprError) -> None:  # noqa: ARG002  whoever connects again has it
        """See `ConnectionHandler`."""
        self._link = None
        self._follower.disconnected()

    # The fleet's side.

    async def drain(self) -> None:
        """See `NodeHandler`. What had not come goes on elsewhere."""

    def take_on(self, partition: PartitionId) -> None:
        """Follows one more partition."""
        self._follower.take_on(partition)
        self._look()

    def let_go(self, partition: PartitionId) -> None:
        """Follows a partition no more."""
        if self.has(partition):
            self._follower.let_go(partition)
            self._look()

    def has(self, partition: PartitionId) -> bool:
        """Whether the partition is with this node."""
        return partition in self._follower.mine

    # The application's side.

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has dealt with a delivery: the server may send as much again."""
        if self._follower.acknowledge(delivery) and self._link is not None:
            self._link.poke()

    def rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """The application has undone what it was asked to; gives `RolledBack`, for the application
        before anything else: it stands there now.

        Raises:
            ValueError: `to` is above the ceiling.
        """
        delivery = self._follower.rolled_back(partition, to)
        self._look()
        return delivery

    def report(self, report: ReplicaAck) -> None:
        """Sends what a replica has; dropped when there is no connection."""
        if self._follower.report(report) and self._link is not None:
            self._link.poke()

    def send_barriers(self) -> None:
        """Sends the barriers that have yet to pass this node."""
        self._follower.send_barriers()
        self._look()
