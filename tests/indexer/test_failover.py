"""Every scan at `now` equals a scan by brute force of what the active nodes have.

Replicas take over, with or without the newest changes, and indexers crash. `UPR_INDEXER_ROUNDS` is
the number of runs; the name of each contains its seed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.indexer.kit import an_indexer
from tests.indexer.oracle import Oracle
from tests.kit.cluster import BUCKET, TestCluster, cluster
from upr_protocol.client import connect
from upr_protocol.errors import UprError

ROUNDS: Final = int(os.environ.get("UPR_INDEXER_ROUNDS", "4"))
STEPS: Final = 5
PARTITIONS: Final = 4


def url_of(nodes: TestCluster) -> str:
    """All nodes of the bucket."""
    return f"upr://{','.join(node.address for node in nodes.nodes.values())}/{BUCKET}"


class World(Oracle):
    """Three nodes, of which at most one is down at a time, and an indexer that crashes.

    Attributes:
        rollbacks: How many times an indexer rolled back a partition.
    """

    def __init__(self, seed: int, nodes: TestCluster, data_dir: Path) -> None:
        super().__init__(seed)
        self.nodes = nodes
        self.rollbacks = 0
        self._data_dir = data_dir
        self._undo_mutations = self.rng.choice([5, 50, 1000])

    @asynccontextmanager
    async def indexing(self) -> AsyncIterator[None]:
        """A running indexer. Half of the times it crashes at the end, and saves nothing."""
        with trio.CancelScope() as self._scope:
            async with an_indexer(
                url_of(self.nodes), self._data_dir, undo_mutations=self._undo_mutations
            ) as indexer:
                self.indexer = indexer
                yield
                self.rollbacks += indexer.slices[0].stream.rollbacks
                if self.rng.random() < 0.5:
                    self._scope.cancel()
                    await trio.lowlevel.checkpoint()

    async def lose_a_node(self) -> None:
        """Kills a node during writes and fails over to others; then the node returns as a
        replica."""
        victim = self.rng.choice(
            sorted({assignment.active for assignment in self.nodes.map.partitions})
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_ignoring_errors, 10)
            for _ in range(self.rng.randrange(60)):
                await trio.lowlevel.checkpoint()
            await self.nodes.nodes[victim].kill()
            await self.nodes.fail_over(victim, self.rng)
        await self.nodes.start(victim)
        await self.nodes.share(self.nodes.map.partitions)
        await retry_until_answered(self.read_designs)

    async def _write_ignoring_errors(self, count: int) -> None:
        for _ in range(count):
            # The answer may be lost, so whether the write was applied is unknown.
            with suppress(UprError):
                await self.write(1)


async def retry_until_answered(ask: Callable[[], Awaitable[None]]) -> None:
    """Calls `ask` again while it fails because the connection to a killed node breaks."""
    with trio.fail_after(20):
        while True:
            try:
                return await ask()
            except UprError:
                await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_scan_at_now_equals_what_the_active_nodes_have(seed: int, tmp_path: Path) -> None:
    async with cluster(partitions=PARTITIONS) as nodes, connect(url_of(nodes)) as client:
        world = World(seed, nodes, tmp_path)
        world.client = client
        await world.redefine()
        for _ in range(STEPS):
            async with world.indexing():
                await world.write(world.rng.randrange(40))
                if world.rng.random() < 0.7:
                    await world.lose_a_node()
                await world.write(world.rng.randrange(20))
                await world.check()
            if world.rng.random() < 0.5:
                await world.lose_a_node()
