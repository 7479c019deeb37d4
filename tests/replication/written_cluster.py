"""A cluster that is written to, and what its nodes have then."""

from __future__ import annotations

from tests.kit.cluster import BUCKET, TestCluster
from upr_protocol.client import (
    connect,
)
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    PartitionState,
    SeqNo,
)
from upr_server.engine import Partition

P = 4


async def write(group: TestCluster, name: str, count: int, value: str = "value") -> None:
    async with connect(group.nodes[name].url, follow_map=False) as client:
        for index in range(count):
            await client.set(f"key {index}", f"{value} {index}")


def unconfirmed(group: TestCluster, name: str) -> bool:
    """Whether a node waits for a peer to confirm its map, or has not applied the confirmed map
    yet."""
    server = group.nodes[name].server
    assert server is not None
    clustered_bucket = server.partition_maps._buckets[BUCKET]
    return not clustered_bucket.is_confirmed or clustered_bucket.lock.locked()


def has_confirmed(group: TestCluster, name: str) -> bool:
    """The opposite of `unconfirmed`."""
    return not unconfirmed(group, name)


def states(group: TestCluster, name: str) -> list[PartitionState]:
    """The states of a node's partitions."""
    return [partition.state for partition in group.nodes[name].held]


def key_in(partition: int) -> bytes:
    """A key that belongs to this partition."""
    return next(key for index in range(1000) if partition_of(key := b"%d" % index, P) == partition)


def has_reached(partition: Partition, seq: SeqNo) -> bool:
    return partition.high_seq >= seq


def is_indexed(partition: Partition) -> bool:
    return partition.eviction.indexed_seq >= partition.high_seq


async def check_copies_are_equal(group: TestCluster) -> None:
    """Checks that all copies are equal, including sequence numbers and CAS values."""
    await group.quiet()
    contents = [await group.contents(name) for name, node in group.nodes.items() if node.server]
    for partition in range(len(group.map.partitions)):
        partition_copies = [copies[partition] for copies in contents if partition in copies]
        assert all(copy == partition_copies[0] for copy in partition_copies), (
            f"partition {partition} differs"
        )
    for node in group.nodes.values():
        if node.server is not None:
            bucket = node.server.catalog.buckets.get(BUCKET)
            assert bucket is not None
            bucket.check_invariants()


def has_map(group: TestCluster, name: str) -> bool:
    server = group.nodes[name].server
    assert server is not None
    return server.partition_maps.revision(BUCKET) == group.map.revision
