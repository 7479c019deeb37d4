"""What a consumer's nodes bring, in one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.course import Course
from upr_protocol.client.feed import Feed
from upr_protocol.client.follower import Follower
from upr_protocol.client.mailbox import Mailbox
from upr_protocol.client.trio.connection_pool import ConnectionPool
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.wire import ReplicaAck

DELIVERIES_MAX: Final = 4096
"""What may wait for the application. Chunks are bounded by the windows; this bounds the rest."""


class Feeds:
    """A feed for each node, one mailbox for all; the crew of a consumer's fleet.

    Args:
        course: What the streams are to come to.
        new_patience: Gives each node's.

    Attributes:
        mailbox: The deliveries that the application has not taken.
        opened: Set when the first connection is greeted.
        course: See above.
        fleet: Who keeps the links; set by whoever makes it.
    """

    fleet: ConnectionPool[Feed]

    def __init__(self, course: Course, new_patience: Callable[[], RetryPolicy]) -> None:
        self.mailbox: Mailbox[Delivery] = Mailbox(DELIVERIES_MAX)
        self.opened = trio.Event()
        self.course = course
        self._new_patience = new_patience
        self._feeds: list[Feed] = []

    # The fleet's side.

    @property
    def finished(self) -> bool:
        """See `PoolClient`."""
        return self.course.done

    @property
    def partitions(self) -> Iterable[PartitionId]:
        """See `PoolClient`."""
        return sorted(self.course.left)

    def is_waiting_for(self, partition: PartitionId) -> bool:
        """See `PoolClient`."""
        return partition in self.course.left

    def new_handler(self) -> Feed:
        """See `PoolClient`."""
        feed = Feed(
            Follower(self.course), self._new_patience(), self.mailbox, self.opened, self.fleet
        )
        self._feeds.append(feed)
        return feed

    def place(self, partition: PartitionId, member: Feed | None) -> None:
        """See `PoolClient`."""
        for feed in self._feeds:
            if feed is not member:
                feed.let_go(partition)
        if member is not None:
            member.take_on(partition)

    def remove_handler(self, member: Feed) -> None:
        """See `PoolClient`."""
        self._feeds.remove(member)

    # The application's side.

    @property
    def connected_now(self) -> bool:
        """Whether there is a link to any node."""
        return any(feed.connected_now for feed in self._feeds)

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has dealt with a delivery: its node may send as much again."""
        if delivery.nbytes:
            for feed in self._feeds:
                feed.acknowledge(delivery)

    def rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """See `Feed.rolled_back`."""
        return self._feed_of(partition).rolled_back(partition, to)

    def report(self, report: ReplicaAck) -> None:
        """Sends what a replica has; dropped when there is no connection."""
        self._feed_of(report.partition).report(report)

    def _feed_of(self, partition: PartitionId) -> Feed:
        """The feed that a partition is with, or any while it is with none."""
        with_it = (feed for feed in self._feeds if feed.has(partition))
        return next(with_it, self._feeds[0])

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier through all nodes, now or as soon as there are connections that stream.

        Raises:
            LocalProtocolError: Too many are open, or this one is, or it is too long.
        """
        self.course.rounds.open_barrier(cookie)
        for feed in self._feeds:
            feed.send_barriers()
