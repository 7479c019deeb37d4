"""Asking a node what it has."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.kit.fake_cluster import FakeCluster
from upr_protocol.client import Address
from upr_protocol.client.maps import NodeMap, look_at_node
from upr_protocol.errors import BrokenError
from upr_protocol.ids import PartitionState
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import GetMap

ADDRESS = Address.parse("upr://a/b")


@pytest.fixture
def cluster(nursery: trio.Nursery) -> FakeCluster:
    return FakeCluster(nursery, "ab", 2)


def actives(found: NodeMap) -> list[bool]:
    return [info.state is PartitionState.ACTIVE for info in found.partitions]


async def test_partitions_and_map_are_of_one_moment(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """`a` takes partition 1 over when it has told its partitions, and not yet its map."""
    a = cluster.server("a")
    a.held.add(GetMap)
    found: list[NodeMap] = []

    async def look() -> None:
        found.append(await look_at_node(ADDRESS, dial=cluster.dial))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await trio.sleep(1)
        cluster.move({1: Assignment(active="a")})
        a.release()
    assert found[0].map == cluster.map
    assert actives(found[0]) == [True, True]
    assert cluster.open == 0


async def test_a_node_that_does_not_answer(cluster: FakeCluster, autojump_clock: MockClock) -> None:
    cluster.server("a").held.add(GetMap)
    with pytest.raises(BrokenError, match="upr://a:12000/b did not answer in time"):
        await look_at_node(ADDRESS, dial=cluster.dial)
    assert trio.current_time() < 60
    assert cluster.open == 0
