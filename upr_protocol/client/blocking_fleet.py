"""Links to the nodes of a bucket, for programs that block; see `fleet`.

Nothing happens by itself: a link is made when it is asked for, and the map is asked for when the
caller says that it may be old.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import attrs

from upr_protocol.address import Address
from upr_protocol.client.atlas import Atlas
from upr_protocol.client.backoff import Backoff
from upr_protocol.client.blocking_link import BlockingLink, SocketOptions
from upr_protocol.client.fleet import PAUSE_MAX_S
from upr_protocol.client.maps import map_of
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import GetMap, MapReply, Message

_ASK_S: Final = 1.0
"""How long one node may take to tell its map."""


class BlockingFleet:
    """Links to the nodes of a bucket.

    Args:
        address: Where to begin.
        options: How to connect.
        draw: Gives numbers in [0, 1), for the waits between rounds of asking.
        state: What a node must be for a partition to be of use for it.
        by_map: Whether to go by the map at all, and not to stay with the address.
        opened: The partitions whose histories are of interest; none for all.

    Attributes:
        atlas: What is known of the map.
        links: The links that there are, by address; of one that was lost, the rest.
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
        self.atlas = Atlas(address, by_map=by_map)
        self.links: dict[Address, BlockingLink] = {}
        self.was_connected = False
        self._options = options
        self._state = state
        self._opened = opened
        self._away: dict[Address, float] = {}
        self._pauses = Backoff(draw, cap_s=PAUSE_MAX_S)
        self._asked_again_at = 0.0

    def close(self) -> None:
        """Closes all links."""
        for link in self.links.values():
            link.close()
        self.links.clear()

    # Links.

    def any(self) -> BlockingLink:
        """A link to any node; the map is known then, if there is one.

        Raises:
            UprError: There is none to be had; why the last attempt failed.
        """
        live = (link for link in self.links.values() if link.failure is None)
        return next(live, None) or self._link_to(self.atlas.everywhere())

    def at(self, address: Address) -> BlockingLink:
        """The link to the node at `address`, which may name several places.

        Raises:
            UprError: There is none to be had; why the last attempt failed.
        """
        return self._link_to(address.each())

    def _link_to(self, places: list[Address]) -> BlockingLink:
        for place in places:
            link = self.links.get(place)
            if link is not None and link.failure is None:
                return link
        error: UprError = BrokenError("no node is known")
        for place in places:
            try:
                return self._connect(place)
            except UprError as failure:
                error = failure
        raise error

    def _connect(self, address: Address) -> BlockingLink:
        now = self._options.clock()
        try:
            link = BlockingLink(address, self._options, self._opened)
        except UprError:
            self._away[address] = now
            raise
        self._away.pop(address, None)
        self.links[address] = link
        self.was_connected = True
        self.atlas.heard_of(link.greeting.map_revision)
        if self.atlas.is_old:
            self._ask(link)
        return link

    def home_of(self, partition: PartitionId) -> Address | None:
        """The node of a partition: the first that is not known to be away; None while there is
        none."""
        holders = self.atlas.holders(partition, self._state)
        good = [address for address in holders if address not in self._away]
        return next(iter(good or holders), None)

    def nobody_for(self, partition: PartitionId) -> str:
        """See `Atlas.nobody_for`."""
        return self.atlas.nobody_for(partition, self._state)

    def drop(self, address: Address) -> None:
        """A node is not needed any more."""
        for place in address.each():
            link = self.links.pop(place, None)
            if link is not None:
                link.close()

    def lost(self, address: Address) -> None:
        """The link to a node is over."""
        self.drop(address)
        self._away[address] = self._options.clock()

    # The map.

    def _ask(self, link: BlockingLink) -> None:
        opaque = link.session.new_opaque()
        link.session.send(GetMap(self.atlas.address.bucket, opaque=opaque))
        deadline = self._options.clock() + _ASK_S
        others: list[Message] = []
        while (message := link.receive(deadline)) is not None:
            if message.opaque == opaque:
                found = map_of(message) if isinstance(message, MapReply) else None
                if found is not None:
                    self.atlas.take(found)
                break
            others.append(message)
        link.put_back(others)

    def refresh(self, map_revision: int = 0) -> float:
        """Asks every node for its map, unless that was done just now; the newest counts. A node
        that is alone has none.

        Args:
            map_revision: The revision that some node has, as far as was heard.

        Returns:
            When it is to be called again, if it did not help.
        """
        self.atlas.heard_of(map_revision)
        clock = self._options.clock
        if self.atlas.is_alone or clock() < self._asked_again_at:
            return self._asked_again_at
        revision = self.atlas.revision
        options = attrs.evolve(
            self._options, connect_timeout_s=min(_ASK_S, self._options.connect_timeout_s)
        )
        for address in self.atlas.everywhere():
            with suppress(UprError):
                link = BlockingLink(Address(address.host, address.port), options)
                try:
                    self._ask(link)
                finally:
                    link.close()
            if self.atlas.revision > revision and not self.atlas.is_old:
                break
        if self.atlas.revision > revision:
            self._pauses.reset()
            self._away.clear()
        self._asked_again_at = clock() + self._pauses.next_wait_s()
        return self._asked_again_at
