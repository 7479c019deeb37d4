"""Nodes that crash, stop, lose their disks and come back: several servers with sockets and
simulated disks."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import trio

from tests.kit.cluster import BUCKET, cluster
from tests.kit.process import eventually
from tests.replication.written_cluster import (
    P,
    check_copies_are_equal,
    has_confirmed,
    has_map,
    states,
    unconfirmed,
    write,
)
from upr_protocol.client import (
    Address,
    connect,
)
from upr_protocol.client.operator import NotDoneError, Operator, fail_over
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import (
    PartitionId,
    PartitionState,
)
from upr_protocol.partition_map import Assignment, HistoryPoint
from upr_server.storage.simulated import SimulatedDirectory


async def test_a_node_that_restarts_continues_from_its_disk() -> None:
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        await group.nodes["b"].kill()
        await write(group, "a", 100, "another")
        await group.start("b")
        await check_copies_are_equal(group)


async def test_an_active_that_was_killed_does_not_come_back_by_itself() -> None:
    """A replica may have changes that the active node acknowledged and had in memory only."""
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        await group.nodes["a"].kill()
        await group.start("a")
        await eventually(lambda: not unconfirmed(group, "a"), "a peer confirms the map")
        assert {p.state for p in group.nodes["a"].held} == {PartitionState.PENDING}
        async with connect(group.nodes["a"].url, follow_map=False) as client:
            with pytest.raises(ServerError) as refusal:
                await client.set("key", "value")
        assert refusal.value.status is Status.NOT_MY_PARTITION
        await group.fail_over("a", Random(1))
        await check_copies_are_equal(group)


@pytest.mark.parametrize("is_killed_again", [False, True])
async def test_a_failover_that_is_undone_trusts_no_node_that_lost_its_memory(
    is_killed_again: bool,
) -> None:
    """Replicas may have changes that the killed node acknowledged and lost. So it stays pending
    until a failover chooses it."""
    async with cluster("ab", partitions=1) as group:
        await write(group, "a", 5)
        await check_copies_are_equal(group)
        (before,) = group.map.partitions
        await group.nodes["a"].kill()
        await group.start("a")
        both_nodes = {"a": "", "b": ""}
        await group.share([Assignment(replicas=both_nodes, lost_active="a")])
        if is_killed_again:
            await group.nodes["a"].kill()
            await group.start("a")
        await group.share([before])
        assert states(group, "a") == [PartitionState.PENDING]
        await group.share([Assignment(replicas=both_nodes, lost_active="a")])
        await group.share([Assignment("a", {"b": ""}, failover_revision=group.map.revision + 1)])
        assert states(group, "a") == [PartitionState.ACTIVE]
        await write(group, "a", 5, "later")
        await check_copies_are_equal(group)


async def test_an_active_that_was_stopped_waits_until_a_peer_confirms_it() -> None:
    async with cluster("ab") as group:
        await write(group, "a", 100)
        await group.quiet()
        logs = [p.failover_log for p in group.nodes["a"].held]
        await group.nodes["b"].kill()
        await group.nodes["a"].stop()
        await group.start("a")
        await trio.sleep(0.5)
        assert unconfirmed(group, "a")
        assert {p.state for p in group.nodes["a"].held} == {PartitionState.PENDING}
        await group.start("b")
        await group.quiet()
        assert [p.failover_log for p in group.nodes["a"].held] == logs, "it lost nothing"
        await write(group, "a", 100, "another")
        await check_copies_are_equal(group)


async def test_a_partition_without_replicas_comes_back_by_itself() -> None:
    async with cluster("ab") as group:
        await group.share([Assignment("a", {"b": ""})] + [Assignment("a")] * (P - 1))
        await write(group, "a", 100)
        await group.quiet()
        await group.nodes["a"].kill()
        await group.start("a")
        await eventually(lambda: not unconfirmed(group, "a"), "a peer confirms the map")
        states = [p.state for p in group.nodes["a"].held]
        assert states == [PartitionState.PENDING] + [PartitionState.ACTIVE] * (P - 1)
        assert [len(p.failover_log) for p in group.nodes["a"].held] == [1] + [2] * (P - 1)


async def test_a_clean_stop_does_not_make_good_what_a_crash_has_lost() -> None:
    """The node was killed, and stopped cleanly before it began another history. It must still begin
    one at the next start."""
    async with cluster("ab", partitions=1) as group:
        await group.share([Assignment("a")])
        await write(group, "a", 100)
        await group.nodes["a"].kill()
        await group.nodes["b"].stop()
        await group.start("a")
        assert unconfirmed(group, "a")
        await group.nodes["a"].stop()
        await group.start("b")
        await group.start("a")
        await eventually(lambda: not unconfirmed(group, "a"), "a peer confirms the map")
        (partition,) = group.nodes["a"].held
        assert partition.state is PartitionState.ACTIVE
        assert len(partition.failover_log) == 2


async def test_after_a_crash_of_all_nodes_each_is_failed_over_by_its_name() -> None:
    """The failover of the first makes another active for some of its partitions. That node keeps
    these when it is failed over itself."""
    async with cluster("ab") as group:
        await write(group, "a", 100)
        await group.quiet()
        await group.share(
            [Assignment("a", {"b": ""})] * (P // 2) + [Assignment("b", {"a": ""})] * (P // 2)
        )
        await group.quiet()
        for name in "ab":
            await group.nodes[name].kill()
        for name in "ab":
            await group.start(name)
        for name in "ab":
            await eventually(partial(has_confirmed, group, name), "a peer confirms the map")
        waits, serves, follows = (
            PartitionState.PENDING,
            PartitionState.ACTIVE,
            PartitionState.REPLICA,
        )
        sentences: list[str] = []
        operator = Operator(Address.parse(group.nodes["a"].url), on_progress=sentences.append)
        await fail_over(operator, all_of="a")
        assert states(group, "b") == [follows, serves, waits, waits]
        logs = [partition.failover_log for partition in group.nodes["b"].held]
        sentences.clear()
        await fail_over(operator, all_of="b")
        assert sentences[0] == "b is running, and stays active for partition 1"
        assert states(group, "a") == [serves, follows, serves, follows]
        assert states(group, "b") == [follows, serves, follows, serves]
        assert group.nodes["b"].held[1].failover_log == logs[1]
        with pytest.raises(NotDoneError, match="is active for partitions 1, 3: use `upr takeover`"):
            await fail_over(operator, all_of="b")


async def test_a_node_that_took_over_comes_back_to_a_map_that_was_changed_meanwhile() -> None:
    """The map still names the position at which the node took over, and the node has accepted
    writes since."""
    async with cluster("ab", partitions=2) as group:
        await write(group, "a", 50)
        await group.quiet()
        taken_id, kept_id = PartitionId(0), PartitionId(1)
        handing_over = Assignment(replicas={"b": ""}, handing_over="a")
        await group.give(group.map.with_assignments({taken_id: handing_over}), "a", "b")
        partition = group.nodes["a"].held[taken_id]
        end = HistoryPoint(partition.failover_log.current, partition.high_seq)
        taken_over = Assignment("b", {"a": ""}, continues_from=end)
        await group.give(group.map.with_assignments({taken_id: taken_over}), "b", "a")
        async with connect(group.nodes["b"].url) as client:
            for index in range(20):
                await client.set(f"later key {index}", "value")
        await group.quiet()
        assert group.nodes["b"].held[taken_id].high_seq > end.seq
        await group.nodes["b"].stop()
        # A command changes the map of another partition only.
        await group.give(group.map.with_assignments({kept_id: Assignment("a")}), "a")
        await group.start("b")
        await eventually(
            lambda: states(group, "b") == [PartitionState.ACTIVE, PartitionState.DEAD],
            "it is what the map says",
        )
        await group.share([group.map.partitions[taken_id], Assignment("a", {"b": ""})])
        async with connect(group.nodes["b"].url) as client:
            for index in range(20):
                await client.set(f"last key {index}", "value")
        await check_copies_are_equal(group)


async def test_a_node_that_lost_its_disk_makes_no_other_node_give_up_data() -> None:
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        highs = [partition.high_seq for partition in group.nodes["b"].held]
        await group.nodes["a"].kill()
        group.nodes["a"].directory = SimulatedDirectory()
        await group.start("a")
        # The node does not know yet that it lost data.
        assert [p.state for p in group.nodes["a"].held] == [PartitionState.ACTIVE] * P
        await eventually(lambda: has_map(group, "a"), "another node sends it the map")
        assert [p.state for p in group.nodes["a"].held] == [PartitionState.PENDING] * P
        for name in "bc":
            assert [partition.high_seq for partition in group.nodes[name].held] == highs
        # After a clean stop it still knows that it lacks data.
        await group.nodes["a"].stop()
        await group.start("a")
        await eventually(lambda: not unconfirmed(group, "a"), "a peer confirms the map")
        assert [p.state for p in group.nodes["a"].held] == [PartitionState.PENDING] * P
        await group.fail_over("a", Random(1))
        await check_copies_are_equal(group)
        assert [partition.high_seq for partition in group.nodes["a"].held] == highs


async def test_a_node_that_lost_its_disk_and_the_bucket_is_not_made_active_by_a_map() -> None:
    async with cluster("ab") as group:
        await group.share([Assignment("b", {"a": ""})] * P)
        await write(group, "b", 100)
        await group.quiet()
        highs = [partition.high_seq for partition in group.nodes["a"].held]
        await group.nodes["b"].kill()
        group.nodes["b"].directory = SimulatedDirectory()
        await group.start("b")
        await group.share([Assignment("b", {"a": ""})] * P)
        assert states(group, "b") == [PartitionState.PENDING] * P
        await group.fail_over("b", Random(1))
        await check_copies_are_equal(group)
        assert [partition.high_seq for partition in group.nodes["b"].held] == highs


async def test_a_failover_that_is_undone_does_not_undo_a_takeover_elsewhere() -> None:
    """The undone failover reached only `c`, and its maps have higher revisions than those of the
    takeover from `a` by `b`. When `a` receives them, it lacks what `b` has accepted since, and must
    not become active by itself."""
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        before = group.map
        await group.nodes["c"].stop()
        await group.share([Assignment("b", {"a": "", "c": ""})] * P)
        await eventually(lambda: states(group, "b") == [PartitionState.ACTIVE] * P, "b is active")
        await group.nodes["a"].stop()
        await write(group, "b", 100, "later")
        highs = [partition.high_seq for partition in group.nodes["b"].held]
        await group.start("c")
        await group.give(before.with_assignments({}, before.revision + 100), "c")
        await group.start("a")
        await eventually(
            lambda: all(
                node.server is not None
                and node.server.partition_maps.settled_revision(BUCKET) == group.map.revision
                for node in group.nodes.values()
            ),
            "all have the map",
        )
        assert states(group, "a") == [PartitionState.PENDING] * P
        # A clean stop in between does not make its copy complete.
        await group.nodes["a"].stop()
        await group.start("a")
        await eventually(lambda: not unconfirmed(group, "a"), "a peer confirms the map")
        assert states(group, "a") == [PartitionState.PENDING] * P
        await group.fail_over("a", Random(1))
        await check_copies_are_equal(group)
        assert [partition.high_seq for partition in group.nodes["a"].held] == highs


@pytest.mark.parametrize("is_up", [False, True])
async def test_no_newer_map_makes_a_node_active_that_was_killed(is_up: bool) -> None:
    """The node may have lost changes that a replica has. Only after a map has named another active
    node may it become active again."""
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        await group.nodes["a"].kill()
        if is_up:
            await group.start("a")
        await group.give(group.map.with_assignments({}), "b", "c")
        if not is_up:
            await group.start("a")
        await eventually(lambda: has_map(group, "a"), "it takes the newer map over")
        assert {p.state for p in group.nodes["a"].held} == {PartitionState.PENDING}
        # A stop in between must not be taken for a clean one.
        await group.nodes["a"].stop()
        await group.start("a")
        await eventually(lambda: not unconfirmed(group, "a"), "a peer confirms the map")
        assert {p.state for p in group.nodes["a"].held} == {PartitionState.PENDING}
        await group.fail_over("a", Random(1))
        await check_copies_are_equal(group)


async def test_a_node_that_was_killed_does_not_hand_over() -> None:
    """The takeover command has seen the node active, before the kill. The numbers of lost changes
    would be assigned again in the same history. Found by the simulation."""
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        await group.nodes["a"].kill()
        await group.start("a")
        handing_over = Assignment("", {"b": "", "c": ""}, handing_over="a")
        new_map = group.map.with_assignments({PartitionId(n): handing_over for n in range(P)})
        with pytest.raises(ServerError, match="use `upr failover`"):
            await group.give(new_map, "a")
        await group.fail_over("a", Random(1))
        await check_copies_are_equal(group)


async def test_a_node_that_was_killed_after_it_handed_over_may_do_so_again() -> None:
    """It had everything on disk before it handed over."""
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        handing_over = Assignment("", {"b": "", "c": ""}, handing_over="a")
        for _ in range(2):
            new_map = group.map.with_assignments({PartitionId(n): handing_over for n in range(P)})
            await group.give(new_map, "a")
            await group.nodes["a"].kill()
            await group.start("a")
        await group.give(group.map, "b", "c")
        await group.share([Assignment("b", {"a": "", "c": ""})] * P)
        await check_copies_are_equal(group)
