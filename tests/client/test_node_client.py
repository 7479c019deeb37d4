"""Asking one node about a bucket."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.kit.fake_cluster import FakeCluster
from upr_protocol.client import Address, NodeClient, NodeStatus
from upr_protocol.errors import BrokenError
from upr_protocol.ids import PartitionState
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import GetMap

ADDRESS = Address.parse("upr://a/b")


@pytest.fixture
def cluster(nursery: trio.Nursery) -> FakeCluster:
    return FakeCluster(nursery, "ab", 2)


def actives(status: NodeStatus) -> list[bool]:
    return [info.state is PartitionState.ACTIVE for info in status.partitions]


async def test_partitions_and_map_are_of_the_same_revision(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """`a` takes over partition 1 after it sent its partitions, and before it sends its map."""
    a = cluster.server("a")
    a.held.add(GetMap)
    statuses: list[NodeStatus] = []

    async def ask() -> None:
        statuses.append(await NodeClient(ADDRESS, dial=cluster.dial).status_with_partitions())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1)
        cluster.move({1: Assignment(active="a")})
        a.release()
    assert statuses[0].map == cluster.map
    assert actives(statuses[0]) == [True, True]
    assert cluster.open == 0


async def test_a_node_that_does_not_answer_in_time_is_an_error(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    cluster.server("a").held.add(GetMap)
    with pytest.raises(BrokenError, match="upr://a:12000/b did not answer in time"):
        await NodeClient(ADDRESS, dial=cluster.dial).status_with_partitions()
    assert trio.current_time() < 60
    assert cluster.open == 0
