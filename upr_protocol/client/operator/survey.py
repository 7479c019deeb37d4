"""Looking at all nodes of a bucket: what each says of itself, and which map counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.calls import PartitionInfo
from upr_protocol.client.core.options import IDENTITY_DEFAULT
from upr_protocol.client.operator.errors import NotDoneError
from upr_protocol.client.operator.plan import Copy
from upr_protocol.client.trio.client import Client, connect
from upr_protocol.client.trio.node_client import NodeClient, NodeStatus
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import PartitionMap, newest
from upr_protocol.transport import Dial, dial_tcp

TELL_TIMEOUT_S: Final = 2.0
"""How long a node may take to tell something, before it counts as unreachable."""


@attrs.frozen
class NodeReport:
    """What one node says.

    Attributes:
        name: What maps call it.
        address: Where it was asked.
        map: Its map; None when it has none.
        partitions: Its partitions; none when it does not have the bucket.
        trouble: Why it could not be asked; empty when it could.
    """

    name: str
    address: Address
    map: PartitionMap | None = None
    partitions: tuple[PartitionInfo, ...] = ()
    trouble: str = ""

    @property
    def revision(self) -> int:
        """That of its map; 0 for none."""
        return 0 if self.map is None else self.map.revision

    def state(self, partition: PartitionId) -> PartitionState:
        """What it says that it is for a partition; dead where it does not answer."""
        if partition >= len(self.partitions):
            return PartitionState.DEAD
        return self.partitions[partition].state

    def copy(self, partition: PartitionId) -> Copy:
        """What it has of a partition that it holds."""
        info = self.partitions[partition]
        return Copy(self.name, info.log, info.high_seq)


@attrs.frozen
class Survey:
    """What all nodes say.

    Attributes:
        bucket: The bucket.
        asked: The name of the node that the URL leads to.
        map: The newest map; None when no node has one.
        nodes: What each says, by its name; those too that do not answer.
    """

    bucket: str
    asked: str
    map: PartitionMap | None
    nodes: Mapping[str, NodeReport]

    def reaches(self, name: str) -> bool:
        """Whether a node answers."""
        return name in self.nodes and not self.nodes[name].trouble

    def mapped(self) -> PartitionMap:
        """The newest map.

        Raises:
            NotDoneError: There is none.
        """
        if self.map is None:
            raise NotDoneError(
                f"{self.asked} holds {self.bucket!r} alone: give it a replica first, with "
                "`upr replicas add`"
            )
        return self.map

    def check_reaches(self, name: str) -> None:
        """Raises `NotDoneError` when a node does not answer."""
        if not self.reaches(name):
            why = self.nodes[name].trouble if name in self.nodes else "no map names it"
            raise NotDoneError(f"node {name} is needed, and cannot be reached: {why}")


def _nothing(_: str) -> None:
    pass


@attrs.frozen
class Operator:
    """How nodes are asked.

    Attributes:
        address: A node, and the bucket.
        identity: `what:who`, for the servers' logs.
        tell: Is told what has been done, a sentence at a time.
        tell_timeout_s: How long a node may take to tell something.
        give_timeout_s: How long it may take to carry out a map.
        dial: How to reach an address, where that is not plain TCP.
    """

    address: Address
    identity: str = IDENTITY_DEFAULT
    tell: Callable[[str], None] = _nothing
    tell_timeout_s: float = TELL_TIMEOUT_S
    give_timeout_s: float = 5.0
    dial: Dial = dial_tcp

    def at(self, host_port: str) -> Address:
        """The bucket at another address, `HOST:PORT`."""
        return self.address.of_node(host_port)

    def talk(self, address: Address) -> AbstractAsyncContextManager[Client]:
        """A connection to just this node, whatever the map says."""
        return connect(
            address,
            identity=self.identity,
            connect_timeout_s=self.tell_timeout_s,
            patience_s=self.tell_timeout_s,
            by_map=False,
            dial=self.dial,
        )

    def node(self, address: Address, timeout_s: float | None = None) -> NodeClient:
        """The node at `address`; by default with `tell_timeout_s` for each call."""
        return NodeClient(
            address,
            identity=self.identity,
            timeout_s=self.tell_timeout_s if timeout_s is None else timeout_s,
            dial=self.dial,
        )

    async def ask(self, address: Address) -> NodeStatus:
        """A node's name and map; no map when it does not have the bucket.

        Raises:
            BrokenError: It cannot be asked.
            NotDoneError: It has no name.
        """
        try:
            found = await self.node(address).status()
        except ServerError as error:
            if error.status is not Status.NO_BUCKET:
                raise
            nowhere = attrs.evolve(address, bucket="")
            found = await self.node(nowhere).status()
        return _named(found, address)

    async def report(self, address: Address, name: str = "") -> NodeReport:
        """What the node at `address` says, which should be called `name`. Never raises for a node
        that cannot be asked."""
        try:
            found = await self._look(address)
            if name and found.node != name:
                raise BrokenError(f"{address} is where node {found.node!r} answers")
            return NodeReport(found.node, address, found.map, found.partitions)
        except UprError as error:
            return NodeReport(name, address, trouble=str(error))

    async def _look(self, address: Address) -> NodeStatus:
        try:
            found = await self.node(address).status_with_partitions()
        except ServerError as error:
            if error.status is not Status.NO_BUCKET:
                raise
            return await self.ask(address)
        return _named(found, address)

    async def reports(self, nodes: Mapping[str, Address]) -> dict[str, NodeReport]:
        """What several nodes say, asked at the same time."""
        found: dict[str, NodeReport] = {}

        async def one(name: str, address: Address) -> None:
            found[name] = await self.report(address, name)

        async with trio.open_nursery() as nursery:
            for name, address in nodes.items():
                nursery.start_soon(one, name, address)
        return {name: found[name] for name in nodes}

    async def _first(self) -> NodeReport:
        """What the first node says that the address names, answers, and has the bucket; or else
        the first that answers: one may have lost its disk."""
        troubles, bare = [], []
        for address in self.address.each():
            found = await self.report(address)
            if found.trouble:
                troubles.append(found.trouble)
            elif found.map is not None or found.partitions:
                return found
            else:
                bare.append(found)
        if bare:
            return bare[0]
        raise BrokenError("; ".join(troubles))

    async def survey(self, others: Mapping[str, str] | None = None) -> Survey:
        """Asks the node at `address`, and all that any map names.

        Args:
            others: More nodes to ask, `HOST:PORT` by name.

        Raises:
            BrokenError: The node at `address` cannot be asked.
            ServerError: It does not have the bucket, nor does any other.
        """
        first = await self._first()
        nodes = {first.name: first}
        wanted = {name: self.at(there) for name, there in (others or {}).items()}
        while True:
            counts = newest(_maps(nodes.values()))
            if counts is not None:
                wanted.update({name: self.at(there) for name, there in counts.nodes.items()})
            unasked = {name: there for name, there in wanted.items() if name not in nodes}
            if not unasked:
                break
            nodes.update(await self.reports(unasked))
        if not any(report.partitions for report in nodes.values()):
            raise ServerError(Status.NO_BUCKET, f"there is no bucket {self.address.bucket!r}")
        return Survey(self.address.bucket, first.name, counts, nodes)


def _named(found: NodeStatus, address: Address) -> NodeStatus:
    if not found.node:
        raise NotDoneError(f"the server at {address} is part of no cluster")
    return found


def _maps(reports: Iterable[NodeReport]) -> list[PartitionMap]:
    return [report.map for report in reports if report.map is not None]
