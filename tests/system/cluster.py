"""Three nodes as processes that share a bucket."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from tests.kit.ports import free_port
from tests.kit.process import ServerProcess, server_process
from upr_protocol.client import (
    Address,
    NodeClient,
    connect,
)
from upr_protocol.client.operator import (
    Operator,
)
from upr_protocol.ids import PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap

BUCKET: Final = "b"
PARTITIONS: Final = 8
NAMES: Final = ("a", "b", "c")


@attrs.define(eq=False)
class Node:
    """One node, through all its lives."""

    name: str
    folder: Path
    port: int = attrs.field(factory=free_port)
    server: ServerProcess | None = None
    _leave: trio.Event = attrs.field(factory=trio.Event)
    _left: trio.Event = attrs.field(factory=trio.Event)

    @property
    def address(self) -> Address:
        """Where its bucket is."""
        return Address.parse(f"upr://127.0.0.1:{self.port}/{BUCKET}")

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts it, with what is in its folder."""
        self._leave, self._left = trio.Event(), trio.Event()
        started = trio.Event()
        nursery.start_soon(self._run, started)
        await started.wait()

    async def _run(self, started: trio.Event) -> None:
        async with server_process(
            "--node", self.name, listen=f"127.0.0.1:{self.port}", data_dir=self.folder
        ) as server:
            self.server = server
            started.set()
            await self._leave.wait()
        self._left.set()

    def pause(self) -> None:
        """Has it do nothing any more, without an end to its connections."""
        assert self.server is not None
        self.server.process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """Ends it as a crash would."""
        assert self.server is not None
        self.server.kill()
        await self.server.wait()
        await self.stop()

    async def stop(self) -> None:
        """Ends it, cleanly if it is still there."""
        self.server = None
        self._leave.set()
        await self._left.wait()


@attrs.define(eq=False)
class Cluster:
    """The nodes, and who starts them."""

    nodes: dict[str, Node]
    nursery: trio.Nursery

    @property
    def url(self) -> str:
        """All nodes; any of them will do."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes.values())
        return f"upr://{hosts}/{BUCKET}"

    @property
    def up(self) -> list[Node]:
        """Those that are there."""
        return [node for node in self.nodes.values() if node.server is not None]

    def operator(self) -> Operator:
        """Somebody who gives commands at a node that is up."""
        return Operator(self.up[0].address)

    async def map(self) -> PartitionMap:
        """The newest map."""
        maps = [(await NodeClient(node.address).status()).map for node in self.up]
        return max(
            (partition_map for partition_map in maps if partition_map is not None),
            key=lambda partition_map: partition_map.revision,
        )

    async def quiet(self) -> None:
        """Waits until every node has what the actives have."""
        deadline = trio.current_time() + 60
        while not await self._is_quiet():
            assert trio.current_time() < deadline, "the nodes have not come to rest"
            await trio.sleep(0.05)

    async def _is_quiet(self) -> bool:
        newest = await self.map()
        rows: dict[int, set[tuple[object, ...]]] = {}
        for node in self.up:
            async with connect(node.address, follow_map=False) as client:
                for info in client.partitions():
                    state = newest.partitions[info.partition].state_of(node.name)
                    if info.state is not state:
                        return False
                    rows.setdefault(info.partition, set()).add((info.high_seq, info.log))
        return all(len(row) == 1 for row in rows.values())


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Three nodes, each active for a third of the partitions, each a replica of the others."""
    async with trio.open_nursery() as nursery:
        new_cluster = Cluster({name: Node(name, folder / name) for name in NAMES}, nursery)
        for node in new_cluster.nodes.values():
            await node.start(nursery)
        first = new_cluster.nodes["a"]
        async with connect(attrs.evolve(first.address, bucket="")) as client:
            await client.create_bucket(BUCKET, partition_count=PARTITIONS)
        assignments = []
        for partition in range(PARTITIONS):
            active = NAMES[partition % len(NAMES)]
            assignments.append(Assignment(active, {name: "" for name in NAMES if name != active}))
        first_map = PartitionMap(
            bucket=BUCKET,
            revision=1,
            nodes={name: f"127.0.0.1:{node.port}" for name, node in new_cluster.nodes.items()},
            partitions=tuple(assignments),
        )
        for node in new_cluster.nodes.values():
            await NodeClient(node.address).set_map(0, first_map)
        # "a" was active for all partitions: without their copies it counts for no failover.
        await new_cluster.quiet()
        yield new_cluster
        for node in new_cluster.up:
            await node.stop()


async def caught_up(running: Cluster) -> None:
    """Waits until every replica follows again: what is acknowledged from here on has two copies
    among any two nodes."""
    newest = await running.map()
    deadline = trio.current_time() + 60
    while True:
        behind = 0
        for node in running.up:
            async with connect(node.address, follow_map=False) as client:
                for info in client.partitions():
                    assignment = newest.partitions[info.partition]
                    if assignment.active == node.name:
                        rows = await client.seqnos([info.partition])
                        behind += rows[0].high_seq - rows[0].replicated_seq > 2000
                        behind += info.state is not PartitionState.ACTIVE
                    else:
                        behind += info.state is not PartitionState.REPLICA
        if not behind:
            return
        assert trio.current_time() < deadline, "the replicas do not catch up"
        await trio.sleep(0.05)
