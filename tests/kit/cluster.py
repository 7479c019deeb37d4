"""Several nodes in one process that are killed and come back, and an operator for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import attrs
import trio

from tests.kit.ports import free_port
from tests.kit.process import eventually
from upr_protocol.chunk import Mutation
from upr_protocol.client import Address, ChunkReceived, NodeClient, consume
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.engine import Partition
from upr_server.storage.calls import StoreCall
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

BUCKET = "b"


@attrs.define(eq=False)
class Node:
    """One node.

    Attributes:
        name: Its name.
        directory: Its disk, which survives it.
        port: Where it listens, also when it is back.
        server: The server; None while it is down.
    """

    name: str
    partitions: int
    undo_mutations: int
    delay: Random | None
    directory: SimulatedDirectory = attrs.field(factory=SimulatedDirectory)
    port: int = attrs.field(factory=free_port)
    server: Server | None = None
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _stopping: trio.Event = attrs.field(factory=trio.Event)
    _ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The bucket's URL."""
        return f"upr://{self.address}/{BUCKET}"

    @property
    def held(self) -> tuple[Partition, ...]:
        """The bucket's partitions."""
        assert self.server is not None
        bucket = self.server.catalog.buckets.get(BUCKET)
        assert bucket is not None
        return bucket.partitions

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts it, with what its disk has."""
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        self._stopping = trio.Event()
        started = trio.Event()
        nursery.start_soon(self._run, started)
        await started.wait()

    async def _run(self, started: trio.Event) -> None:
        buckets = (BucketConfig(BUCKET, self.partitions),) if self.partitions else ()
        config = ServerConfig(
            listen=self.address,
            node=self.name,
            buckets=buckets,
            undo_mutations=self.undo_mutations,
            replication_timeout_s=5.0,
        )
        store = SimulatedStore(self.directory, self._delay if self.delay else None)
        try:
            with self._scope:
                async with running_server(config, store) as server:
                    self.server = server
                    started.set()
                    await self._stopping.wait()
        finally:
            self.server = None
            self._ended.set()

    def _delay(self, _call: StoreCall[Any]) -> float:
        assert self.delay is not None
        return self.delay.random() * 0.01

    async def stop(self) -> None:
        """Ends it cleanly."""
        self._stopping.set()
        await self._ended.wait()

    async def kill(self) -> None:
        """Ends it: what is in memory only is gone."""
        self._scope.cancel()
        await self._ended.wait()


class TestCluster:
    """Some nodes of one bucket. The first of them has it from the beginning.

    Attributes:
        nodes: By name.
        map: The map that the operator gave last.
    """

    __test__ = False

    def __init__(self, nodes: dict[str, Node], nursery: trio.Nursery) -> None:
        self.nodes = nodes
        self.map = PartitionMap.of_one_node(BUCKET, 1, "a", "127.0.0.1:1")
        self._nursery = nursery

    async def start(self, name: str) -> None:
        """Starts a node."""
        await self.nodes[name].start(self._nursery)

    async def give(self, new_map: PartitionMap, *names: str) -> None:
        """Gives a map to nodes, one after the other."""
        for name in names:
            node = NodeClient(Address.parse(self.nodes[name].url))
            while True:
                server = self.nodes[name].server
                assert server is not None
                revision = server.partition_maps.revision(BUCKET)
                try:
                    await node.set_map(revision, new_map)
                    break
                except ServerError as error:
                    # A peer may have told it of an earlier one in between.
                    if error.status is not Status.REVISION_CONFLICT:
                        raise
        self.map = new_map

    async def share(self, assignments: Iterable[Assignment]) -> None:
        """Makes the next map, and gives it to all nodes that are up."""
        up = [name for name, node in self.nodes.items() if node.server is not None]
        await self.give(self.map.with_assignments(dict(enumerate_partitions(assignments))), *up)

    async def fail_over(self, victim: str, draw: Random) -> None:
        """Fences those that are left, and lets the furthest of them be active where the victim was;
        the victim is to be a replica when it comes back."""
        up = [name for name, node in self.nodes.items() if node.server is not None]
        lost_partitions = {
            PartitionId(partition): assignment
            for partition, assignment in enumerate(self.map.partitions)
            if assignment.active == victim
        }
        fenced = self.map.with_assignments(
            {
                partition: Assignment(
                    replicas={name: "" for name in assignment.replicas if name in up}
                )
                for partition, assignment in lost_partitions.items()
            }
        )
        draw.shuffle(up)
        await self.give(fenced, *up)
        changes: dict[PartitionId, Assignment] = {}
        for number, assignment in lost_partitions.items():
            there = [name for name in assignment.replicas if name in up]
            best = max(there, key=lambda name: self._rank(name, number))
            replicas = {name: "" for name in (*there, victim) if name != best}
            changes[number] = Assignment(best, replicas)
        new_map = self.map.with_assignments(changes)
        first = next(iter(changes.values())).active if changes else up[0]
        await self.give(new_map, first, *(name for name in up if name != first))

    def _rank(self, name: str, partition_id: PartitionId) -> tuple[int, SeqNo]:
        partition = self.nodes[name].held[partition_id]
        log = partition.failover_log
        return (log.entries[0].seq if log.entries else 0, partition.high_seq)

    async def quiet(self) -> None:
        """Waits until every replica has what its active has."""
        for partition, assignment in enumerate(self.map.partitions):
            active = self.nodes[assignment.active].held[partition]
            for name in assignment.replicas:
                node = self.nodes[name]

                def follows(
                    node: Node = node,
                    partition: int = partition,
                    active_partition: Partition = active,
                ) -> bool:
                    here = node.held[partition]
                    return (
                        here.high_seq == active_partition.high_seq
                        and here.failover_log == active_partition.failover_log
                        and here.state is PartitionState.REPLICA
                        and active_partition.state is PartitionState.ACTIVE
                    )

                await eventually(
                    follows, f"{name} follows {active!r} as {node.held[partition]!r}", 20
                )

    async def contents(self, name: str) -> dict[int, dict[bytes, Mutation]]:
        """Each partition's items, as a consumer of that node alone sees them."""
        node = self.nodes[name]
        items_of: dict[int, dict[bytes, Mutation]] = {}
        for state in (PartitionState.ACTIVE, PartitionState.REPLICA):
            numbers = [partition.id for partition in node.held if partition.state is state]
            if not numbers:
                continue
            items_of |= {partition: {} for partition in numbers}
            async with consume(
                node.url,
                partitions=numbers,
                state=state,
                end="now",
                identity="replica:test",
                follow_map=False,
            ) as consumer:
                async for event in consumer:
                    if isinstance(event, ChunkReceived):
                        for row in event.chunk:
                            items = items_of[event.partition]
                            items.pop(row.key, None)
                            if row.op is Operation.SET:
                                items[row.key] = row
        return items_of

    async def map_of(self, name: str) -> PartitionMap | None:
        """The map that a node has."""
        return (await NodeClient(Address.parse(self.nodes[name].url)).status()).map


def enumerate_partitions(
    assignments: Iterable[Assignment],
) -> Iterable[tuple[PartitionId, Assignment]]:
    """Assignment by partition."""
    return (
        (PartitionId(partition), assignment) for partition, assignment in enumerate(assignments)
    )


@asynccontextmanager
async def cluster(
    names: str = "abc",
    *,
    partitions: int = 4,
    undo_mutations: int = 64 * 1024,
    delay: Random | None = None,
) -> AsyncIterator[TestCluster]:
    """Nodes that run for as long as the context; the first is active, the others its replicas."""
    async with trio.open_nursery() as nursery:
        nodes = {
            name: Node(name, partitions if name == names[0] else 0, undo_mutations, delay)
            for name in names
        }
        test_cluster = TestCluster(nodes, nursery)
        for name in names:
            await test_cluster.start(name)
        first, other_names = names[0], names[1:]
        test_cluster.map = PartitionMap(
            bucket=BUCKET,
            revision=1,
            nodes={name: node.address for name, node in nodes.items()},
            partitions=(Assignment(first, dict.fromkeys(other_names, "")),) * partitions,
        )
        await test_cluster.give(test_cluster.map, *names)
        yield test_cluster
        nursery.cancel_scope.cancel()
