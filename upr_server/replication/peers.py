"""Asks other nodes for their partition maps: one that was away learns so what it is now, and one
that has lost its map is told it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import structlog
import trio

from upr_protocol.client import Address, NodeClient
from upr_protocol.client.trio.node_client import node_options
from upr_protocol.errors import UprError
from upr_protocol.partition_map import PartitionMap
from upr_server.replication.membership import Membership
from upr_server.replication.neighbours import Neighbours

ASK_INTERVAL_S: Final = 2.0
"""How often one of the other nodes is asked, each in its turn."""

CONFIRM_INTERVAL_S: Final = 0.25
"""How often all are asked, while this node does not know whether it still is what it was."""

ASK_TIMEOUT_S: Final = 2.0

log = structlog.get_logger(__name__)


class Peers:
    """See the module.

    Args:
        membership: What this node is.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._neighbours: Neighbours | None = None
        self._next: dict[str, int] = defaultdict(int)
        self._told: set[str] = set()

    async def run(self) -> None:
        """Asks, for ever."""
        membership = self._membership
        async with trio.open_nursery() as links:
            self._neighbours = Neighbours(
                links,
                node_options(self._identity, ASK_TIMEOUT_S, membership.system.dial),
            )
            while True:
                await self._ask_around()
                self._neighbours.keep(self._all())
                await trio.sleep(CONFIRM_INTERVAL_S if membership.unconfirmed() else ASK_INTERVAL_S)

    @property
    def _identity(self) -> str:
        return f"node:{self._membership.node}"

    def _all(self) -> Iterator[Address]:
        """Where the other nodes are, of all maps."""
        for found in self._membership.maps():
            for there in self._membership.peers(found.bucket).values():
                yield _at(there, found.bucket)

    async def _ask_around(self) -> None:
        membership = self._membership
        unconfirmed = membership.unconfirmed()
        for bucket in unconfirmed:
            await self._confirm(bucket)
        for found in membership.maps():
            if found.bucket not in unconfirmed:
                await self._ask_one(found.bucket)

    async def _ask_one(self, bucket: str) -> None:
        peers = self._membership.peers(bucket)
        if peers:
            at = self._next[bucket] = (self._next[bucket] + 1) % len(peers)
            found = await self._fetch(*list(peers.items())[at], bucket)
            if found is not None:
                await self._adopt(found)

    async def _confirm(self, bucket: str) -> None:
        """Asks all: the newest map counts, and one that answers is enough."""
        membership = self._membership
        revision = membership.revision(bucket)
        answers: list[PartitionMap] = []
        if not membership.peers(bucket):
            await self._try(membership.confirm, bucket, revision)
            return

        async def ask(name: str, address: str) -> None:
            found = await self._fetch(name, address, bucket)
            if found is not None:
                answers.append(found)

        async with trio.open_nursery() as nursery:
            for name, address in membership.peers(bucket).items():
                nursery.start_soon(ask, name, address)
        if not answers:
            if bucket not in self._told:
                self._told.add(bucket)
                log.warning(
                    "no other node answers: what was active here waits until one confirms the "
                    "partition map; or name the actives with `upr failover`",
                    bucket=bucket,
                    revision=revision,
                )
            return
        newest = max(answers, key=lambda one: one.revision)
        if newest.revision > revision:
            await self._adopt(newest)
        elif newest.revision < revision or newest == membership.map_of(bucket):
            await self._try(membership.confirm, bucket, revision)

    async def _fetch(self, name: str, address: str, bucket: str) -> PartitionMap | None:
        """The map of the node `name`, if it is that which answers there."""
        try:
            with trio.move_on_after(ASK_TIMEOUT_S):
                assert self._neighbours is not None
                told = await self._neighbours.ask(_at(address, bucket))
                ours = self._membership.map_of(bucket)
                if told.node != name:
                    self._tell_once(f"{address} is {told.node}, and not {name} as the map says")
                elif told.map is None:
                    if ours is not None:
                        await self._remind(name, address, ours)
                elif ours is None or told.map == ours or told.map.revision != ours.revision:
                    return told.map
                else:
                    self._tell_once(
                        f"{name} has another map of revision {ours.revision}: two commands were "
                        "given at once; repeat the one that counts"
                    )
        except UprError as error:
            log.debug("a node does not tell its map", address=address, error=str(error))
        return None

    async def _remind(self, name: str, address: str, ours: PartitionMap) -> None:
        """A node has the bucket, and does not know that it is one of several: it has lost its disk,
        and the bucket was made anew. Until it knows it takes writes that nobody will keep."""
        log.warning(
            "a node holds the bucket alone, as if its disk was lost; it is told the partition map",
            bucket=ours.bucket,
            node=name,
        )
        source = ours.nodes[self._membership.node]
        node = NodeClient(
            _at(address, ours.bucket),
            identity=self._identity,
            dial=self._membership.system.dial,
        )
        await node.join(source)

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning(sentence)

    async def _adopt(self, found: PartitionMap) -> None:
        await self._try(self._membership.adopt, found)

    async def _try(self, call: Callable[..., Awaitable[object]], *args: object) -> None:
        try:
            await call(*args)
        except UprError as error:
            log.error("a partition map cannot be carried out", error=str(error))


def _at(host_port: str, bucket: str) -> Address:
    return Address.parse(f"upr://{host_port}/{bucket}")
