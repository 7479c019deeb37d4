"""What the nodes of a consumer's that blocks bring, in one row; see `feeds`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from upr_protocol.address import Address
from upr_protocol.client.blocking.connection import BlockingConnection, step_any
from upr_protocol.client.blocking.connection_pool import BlockingConnectionPool
from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import MAP_WAIT_S_MAX, RetryPolicy
from upr_protocol.client.course import Course
from upr_protocol.client.follower import PROGRESS, Follower
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.ids import PartitionId
from upr_protocol.session.states import SNAPSHOT_MESSAGES
from upr_protocol.wire import StreamReply


class BlockingFeeds:
    """A follower for each node.

    Args:
        course: What the streams are to come to.
        fleet: The links.
        patience: How long to go on without anything of any node;
        retry_timeout_s: and without a node for some partition.

    Attributes:
        inbox: The deliveries that the application has not taken.
    """

    def __init__(
        self,
        course: Course,
        fleet: BlockingConnectionPool,
        patience: RetryPolicy,
        retry_timeout_s: float,
    ) -> None:
        self.inbox: deque[Delivery] = deque()
        self._course = course
        self._fleet = fleet
        self._patience = patience
        self._patience_s = retry_timeout_s
        # The first node is at the user's address, wherever partitions turn out to be.
        self._followers = {fleet.metadata.address: Follower(course)}
        self._links: dict[Follower, BlockingConnection] = {}
        self._rests: dict[Follower, float] = {}
        self._listens_at = 0.0
        """When the rest that `receive` told of last is over."""
        self._strays: dict[PartitionId, float] = {}
        self._homeless_since: dict[PartitionId, float] = {}

    def connect(self) -> None:
        """Makes a link to any node, if there is none.

        Raises:
            UprError: There is none to be had; why the last attempt failed.
        """
        self._fleet.any()

    def close(self) -> None:
        """Closes all links."""
        self._fleet.close()

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has dealt with a delivery."""
        for follower in self._followers.values():
            follower.acknowledge(delivery)

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier through all nodes."""
        self._course.rounds.open_barrier(cookie)
        for follower in self._followers.values():
            follower.send_barriers()

    # Receiving.

    def receive(self, deadline: float) -> float:
        """Takes in what comes, from whichever node, until something did or the deadline.

        Returns:
            For how many seconds there is nothing to listen to, and `rested` is to be called then.

        Raises:
            UprError: There is no use in going on.
        """
        self._route()
        links: dict[Follower, BlockingConnection] = {}
        now = time.monotonic()
        for address, follower in list(self._followers.items()):
            if self._rests.get(follower, now) <= now:
                self._guard(follower, address, partial(self._begin, follower, address, links))
        if self._course.done:
            self._fleet.close()
            return 0.0
        wakes_at = min((*self._rests.values(), *self._strays.values()), default=float("inf"))
        if self._homeless_since:
            wakes_at = min(wakes_at, now + MAP_WAIT_S_MAX)
        if not links and not self.inbox:
            if any(follower not in self._rests for follower in self._followers.values()):
                return 0.0  # one of them came just now
            self._listens_at = max(now + 0.001, min(deadline, wakes_at))
            return self._listens_at - now
        if not self.inbox:
            step_any(list(links.values()), min(deadline, wakes_at))
        for address, follower in list(self._followers.items()):
            if follower in links:
                self._guard(follower, address, partial(self._take, follower, links[follower]))
        if self._course.done:
            self._fleet.close()
        return 0.0

    def rested(self) -> None:
        """So many seconds as `receive` said are over. A node may have to rest for longer: the
        caller's deadline ends no rest."""
        at = self._listens_at
        self._rests = {follower: until for follower, until in self._rests.items() if until > at}
        self._strays = {partition: until for partition, until in self._strays.items() if until > at}

    def _guard(self, follower: Follower, address: Address, do: Callable[[], None]) -> None:
        """Does something with a node; what fails is tried again after a while."""
        try:
            do()
            return
        except UprError as failure:
            error = failure
        follower.disconnected()
        self._links.pop(follower, None)
        self._fleet.lost(address)
        if not self._fleet.was_connected:
            raise error
        now = time.monotonic()
        self._rests[follower] = now + self._patience.wait_s(error, now)
        self._fleet.refresh()

    def _begin(
        self, follower: Follower, address: Address, links: dict[Follower, BlockingConnection]
    ) -> None:
        self._rests.pop(follower, None)
        link = self._fleet.at(address)
        if self._links.get(follower) is not link:
            follower.disconnected()
            self.inbox.extend(follower.enter(link.handshake))
            self._route()
            if self._followers.get(address) is not follower:
                return  # there are several nodes, and it turned out just now
            self._links[follower] = link
            follower.begin(link.session, link.handshake)
        # A partition that was taken on since may have met trouble, of which no message tells.
        self._look(follower)
        links[follower] = link

    def _take(self, follower: Follower, link: BlockingConnection) -> None:
        while (message := link.take()) is not None:
            self.inbox.extend(follower.take(message))
            if isinstance(message, PROGRESS):
                self._patience.progress()
            elif isinstance(message, StreamReply) and not message.status:
                self._homeless_since.pop(message.partition, None)
            if type(message) not in SNAPSHOT_MESSAGES:
                self._look(follower)
        if link.failure is not None:
            raise link.failure

    def _look(self, follower: Follower) -> None:
        strays, follower.strays = follower.strays, []
        for stray in strays:
            if self._fleet.metadata.is_single_node:
                raise stray.error  # there is no other node to try meanwhile
            now = time.monotonic()
            self._homeless_since.setdefault(stray.partition, now)
            self._strays[stray.partition] = now + 0.05
            self._fleet.refresh(stray.map_revision)
        if follower.trouble is not None:
            raise follower.trouble

    # Where partitions are.

    def _route(self) -> None:
        if self._course.wanted is None:
            return
        now = time.monotonic()
        homes: dict[PartitionId, Address | None] = {}
        for partition in sorted(self._course.left):
            resting = self._strays.get(partition, now) > now
            homes[partition] = None if resting else self._fleet.holder(partition)
            if not resting:
                self._strays.pop(partition, None)
        if None in homes.values() or self._fleet.metadata.is_stale:
            self._fleet.refresh()
        for partition, home in homes.items():
            if home is not None and home not in self._followers:
                self._followers[home] = Follower(self._course)
            for address, follower in self._followers.items():
                if address != home:
                    follower.let_go(partition)
            if home is not None:
                self._followers[home].take_on(partition)
            else:
                self._give_up_on(partition, now)
        needed = set(homes.values())
        for address in [address for address in self._followers if address not in needed]:
            follower = self._followers.pop(address)
            follower.disconnected()
            self._links.pop(follower, None)
            self._rests.pop(follower, None)
            self._fleet.drop(address)

    def _give_up_on(self, partition: PartitionId, now: float) -> None:
        since = self._homeless_since.setdefault(partition, now)
        if now - since >= self._patience_s:
            nobody = (
                self._fleet.explain_no_holder(partition) or f"no node takes partition {partition}"
            )
            error = BrokenError(nobody)
            error.add_note(f"gave up after {now - since:.0f} s")
            raise error
