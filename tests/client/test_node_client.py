"""Asking one node about a bucket."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.kit.fake_cluster import FakeCluster
from upr_protocol.client import Address, NodeClient, NodeStatus
from upr_protocol.errors import BrokenError
from upr_protocol.ids import PartitionState
from upr_protocol.partition_map import STEP_PARTITIONS, Assignment
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


class OwnSteps(trio.abc.Instrument):
    """Counts the steps of the task that makes it."""

    def __init__(self) -> None:
        self.count = 0
        self._task = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


async def steps_of_status(nursery: trio.Nursery, partition_count: int) -> int:
    """How many steps it takes to ask a node for a map of so many partitions."""
    cluster = FakeCluster(nursery, "a", partition_count)
    steps = OwnSteps()
    trio.lowlevel.add_instrument(steps)
    status = await NodeClient(ADDRESS, dial=cluster.dial).status()
    trio.lowlevel.remove_instrument(steps)
    assert status.map == cluster.map
    return steps.count


async def test_a_large_map_is_read_in_steps(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """Servers ask each other every few seconds, in the loop in which they serve."""
    few, many = [await steps_of_status(nursery, count) for count in (1, 4 * STEP_PARTITIONS)]
    assert many >= few + 4
