"""The memory of a replica's broken connections is freed without Python's cycle collector."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Final

from tests.kit.cluster import TestCluster, cluster
from tests.kit.process import eventually
from tests.kit.reference_cycles import no_collections
from tests.replication.written_cluster import check_copies_are_equal, write

OF_A_REPLICATOR: Final = (
    *("Replicator", "SourceStreams", "ReplicaConsumer", "ConsumerStreams", "ConnectionPool"),
    *("NodeStreams", "MapRefresher"),
)


def alive() -> Counter[str]:
    names = [type(thing).__name__ for thing in gc.get_objects()]
    return Counter(name for name in names if name in OF_A_REPLICATOR)


async def restart(group: TestCluster, name: str) -> None:
    await group.nodes[name].stop()
    await group.start(name)
    await check_copies_are_equal(group)


async def test_connections_to_a_restarted_node_are_freed() -> None:
    async with cluster() as group:
        await write(group, "a", 20)
        await check_copies_are_equal(group)
        await restart(group, "a")
        with no_collections(shows_earlier=True):
            before = alive()
            assert before["ReplicaConsumer"]
            for _ in range(2):
                await restart(group, "a")
            await eventually(lambda: alive() <= before, f"no more than {before}", timeout_s=10)
