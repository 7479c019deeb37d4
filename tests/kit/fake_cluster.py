"""Several fake servers with one bucket; a partition map says which of them serves which
partition."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import trio

from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import BUCKET, FakeServer
from upr_protocol.client import Address
from upr_protocol.ids import PartitionId
from upr_protocol.partition_map import Assignment, PartitionMap


class FakeCluster:
    """Nodes whose hosts are their names; clients connect with `dial`.

    The nodes share the partitions, as if replicas were never behind: these tests are about the
    nodes to which clients connect.

    Attributes:
        nets: The network of each node, by its name.
        map: The newest map.
        silent: Nodes that neither accept nor refuse connections.
    """

    def __init__(self, nursery: trio.Nursery, names: str, partition_count: int = 4) -> None:
        self.nets: dict[str, FakeNet] = {}
        self.silent: set[str] = set()
        servers = [FakeServer(partition_count) for _ in names]
        for name, server in zip(names, servers, strict=True):
            server.name = name
            server.partitions = servers[0].partitions
            server.peers = servers
            self.nets[name] = FakeNet(nursery, server)
        assignments = tuple(
            Assignment(active=names[partition % len(names)]) for partition in range(partition_count)
        )
        self.map = PartitionMap(
            bucket=BUCKET,
            revision=1,
            nodes={name: f"{name}:12000" for name in names},
            partitions=assignments,
        )
        self.tell(names)

    def server(self, name: str) -> FakeServer:
        return self.nets[name].server

    @property
    def any(self) -> FakeServer:
        """One of the servers, for what is the same at all."""
        return next(iter(self.nets.values())).server

    async def dial(self, address: Address) -> trio.abc.Stream:
        if address.host in self.silent:
            await trio.sleep_forever()
        net = self.nets.get(address.host)
        if net is None or address.port != 12000:
            await trio.lowlevel.checkpoint()
            raise ConnectionRefusedError(f"there is nothing at {address}")
        return await net.dial(address)

    def move(
        self, changed: dict[int, Assignment], *, tell: Iterable[str] | None = None
    ) -> PartitionMap:
        """Makes the next map and gives it to some nodes; by default to all."""
        self.map = self.map.with_assignments(
            {PartitionId(partition): assignment for partition, assignment in changed.items()}
        )
        self.tell(self.nets if tell is None else tell)
        return self.map

    def create_again(
        self, active: str, *, revision: int, names: Iterable[str] | None = None
    ) -> None:
        """At some nodes, by default at all, deletes the bucket and creates it again, with all
        partitions active at one node."""
        assignments = (Assignment(active=active),) * len(self.map.partitions)
        self.map = msgspec.structs.replace(self.map, revision=revision, partitions=assignments)
        for name in self.nets if names is None else names:
            self.server(name).map = self.map
            self.nets[name].cut()

    def tell(self, names: Iterable[str]) -> None:
        """Gives nodes the newest map."""
        for name in names:
            self.server(name).set_map(self.map)

    def kill(self, name: str) -> None:
        """Makes a node unreachable, and breaks its connections."""
        self.nets[name].down = True
        self.nets[name].cut()

    @property
    def open(self) -> int:
        """How many connections the clients have not closed."""
        return sum(net.open for net in self.nets.values())
