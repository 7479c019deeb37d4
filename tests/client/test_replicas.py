"""Adding and removing replicas, with real servers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.client.group_states import ACTIVE, REPLICA, highs
from tests.kit.memory_network import HOST, MemoryNetwork, node
from tests.kit.server_group import PARTITIONS, ServerGroup, running_servers
from upr_protocol.client import Address, NodeClient, connect
from upr_protocol.client.operator import (
    NotDoneError,
    Operator,
    PartlyDoneError,
    ReplicaLag,
    add_replicas,
    fail_over,
    remove_replicas,
    wait_caught_up,
)
from upr_protocol.client.operator.survey import MAP_APPLY_TIMEOUT_S
from upr_protocol.errors import BrokenError, ServerError
from upr_protocol.ids import Durability, PartitionId, PartitionState
from upr_protocol.partition_map import Assignment
from upr_protocol.transport import dial_tcp
from upr_server.storage.calls import Commit, StoreCall
from upr_server.storage.simulated import SimulatedStore


def place(group: ServerGroup, name: str) -> str:
    return f"127.0.0.1:{group.proxies[name].port}"


async def test_a_node_tells_its_name() -> None:
    async with running_servers("a") as group:
        status = await NodeClient(group.address("a")).status()
        assert (status.node, status.map) == ("a", None)
        status = await NodeClient(Address.parse(group.proxies["a"].url())).status()
        assert (status.node, status.map) == ("a", None)
        with pytest.raises(ServerError, match="nowhere"):
            await NodeClient(Address.parse(group.proxies["a"].url("nowhere"))).status()


async def test_a_survey_asks_other_nodes_if_the_first_has_lost_its_disk() -> None:
    async with running_servers("ab") as group:
        await group.start_apart("c")
        operator = Operator(Address.parse(f"upr://{place(group, 'c')},{place(group, 'a')}/b"))
        assert (await operator.survey()).map == group.map("a")


async def test_a_survey_tells_partitions_as_they_are_under_its_map() -> None:
    """A command that runs at the same time changes the map when a node has been asked already."""
    async with running_servers("ab") as group:
        base = group.map("a")

        async def dial(address: Address) -> trio.abc.Stream:
            if address.port == group.proxies["a"].port and group.map("a") == base:
                # b is asked first.
                for name in "ab":
                    await group.set_map(name, base.revision + 1, {0: Assignment("a")}, base)
            return await dial_tcp(address)

        survey = await group.operator("b", dial=dial).survey()
        assert survey.map == group.map("a") == group.map("b") != base
        for name in "ab":
            assert survey.nodes[name].map == survey.map
            states = [survey.nodes[name].state_of(PartitionId(p)) for p in range(PARTITIONS)]
            assert states == group.states(name)
        # A node that still has the older map is shown with it.
        await group.set_map("a", base.revision + 2, {1: Assignment("a")}, group.map("a"))
        survey = await group.operator("b").survey()
        assert [survey.nodes[name].revision for name in "ab"] == [
            base.revision + 2,
            base.revision + 1,
        ]


async def test_a_survey_reports_different_maps_of_one_revision() -> None:
    """Nodes do not agree by themselves then: a command has to say which map counts."""
    async with running_servers("abc") as group:
        base = group.map("a")
        alone = Assignment("a")
        for partition, name in enumerate("abc"):
            changed_map = base.with_assignments({PartitionId(partition // 2): alone})
            maps = group.servers[name].partition_maps
            await maps.set_map(base.revision, changed_map.encode())
        sentence = (
            f"{{}} have different maps of revision {base.revision + 1}, as two commands ran at the "
            "same time, or a node was restored from a backup. This command continues from the map "
            "of {}: name another node first if its map counts"
        )
        for name, nodes in (("b", "b, a and c"), ("c", "c and a, b")):
            group.progress.clear()
            assert (await group.operator(name).survey()).map == group.map(name)
            assert group.progress == [sentence.format(nodes, name)]
        await remove_replicas(group.operator("c"), "b", partitions=[2])
        assert group.map("a") == group.map("b") == group.map("c")
        assert group.map("a").partitions[0].replicas == {"b": "", "c": ""}
        group.progress.clear()
        await group.operator("a").survey()
        assert group.progress == []


async def test_a_replica_may_follow_a_replica() -> None:
    async with running_servers("ab") as group:
        await group.set("a", {f"key {n}": "v" for n in range(30)})
        await group.start_apart("c")
        await group.add_replica("c", source="b")
        assert group.map("a") == group.map("b") == group.map("c")
        assert group.map("a").partitions[0].replicas == {"b": "", "c": "b"}
        assert group.states("a") == ACTIVE
        assert group.states("b") == group.states("c") == REPLICA
        async with connect(group.servers["a"].url("b")) as client:
            await client.set("k", "w", durability=Durability.REPLICATED, copies=1)
        await group.until(lambda: highs(group, "a") == highs(group, "c"))
        group.check()
        # A replica that follows a replica is a copy, though it acknowledges nothing to the active.
        await group.stop("a")
        await fail_over(group.operator("c"), all_of="a", to="c")
        assert group.map("b").partitions[0].replicas == {"b": "", "a": ""}
        await group.set("c", {"k": "x"})
        await group.until(lambda: highs(group, "b") == highs(group, "c"))


async def test_replicas_of_some_partitions_are_added_and_removed() -> None:
    async with running_servers("ab") as group:
        await group.start_apart("c")
        operator = group.operator()
        await add_replicas(operator, "c", place(group, "c"), partitions=[1, 2])
        assert [s is PartitionState.REPLICA for s in group.states("c")] == [
            False,
            True,
            True,
            False,
        ]
        assert await add_replicas(operator, "c", partitions=[0]) == [0]
        assert await remove_replicas(operator, "c", partitions=[0, 1]) == [0, 1]
        assert [sorted(o.replicas) for o in group.map("a").partitions] == [
            ["b"], ["b"], ["b", "c"], ["b"],
        ]  # fmt: skip
        assert group.states("c")[:2] == [PartitionState.DEAD] * 2
        assert await remove_replicas(operator, "c") == [2]
        assert sorted(group.map("a").nodes) == ["a", "b"]
        assert group.map("c") == group.map("a")
        group.check()
        with pytest.raises(NotDoneError, match="unknown node 'c'; the nodes are a, b"):
            await remove_replicas(operator, "c")
        # It may come back, with what it had.
        await group.add_replica("c")
        await group.until(lambda: highs(group, "a") == highs(group, "c"))


async def test_a_replica_on_a_node_that_is_gone_can_be_removed() -> None:
    async with running_servers("abc") as group:
        await group.stop("b")
        assert await remove_replicas(group.operator("c"), "b") == list(range(PARTITIONS))
        assert group.map("a") == group.map("c")
        revision = group.map("a").revision
        assert group.progress[-3:] == [
            f"a: revision {revision}",
            "b: unreachable; will ask for the map when back",
            f"c: revision {revision}",
        ]
        await group.start("b")
        await group.until(lambda: group.states("b") == [PartitionState.DEAD] * PARTITIONS)


@pytest.mark.parametrize(
    ("commit_s", "sentence"),
    [
        (0.8 * MAP_APPLY_TIMEOUT_S, "c: revision {}"),
        (
            2.0 * MAP_APPLY_TIMEOUT_S,
            (
                "c: not yet at revision {}; may be about to apply it, else will ask for it (node c "
                "has not applied the map: upr://127.0.0.1:72/b did not answer in time)"
            ),
        ),
    ],
)
async def test_a_replica_on_a_node_with_a_slow_disk_is_removed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, commit_s: float, sentence: str
) -> None:
    """It first saves what it has received."""
    MemoryNetwork(monkeypatch)
    is_slow = False

    def delay(call: StoreCall[Any]) -> float:
        return commit_s if is_slow and isinstance(call, Commit) else 0.0

    slow_store = SimulatedStore(delay=delay)
    async with node("a", "b", port=71), node("c", port=72, store=slow_store) as slow_server:
        address, progress = Address(HOST, 71, "b"), list[str]()
        operator = Operator(address, on_progress=progress.append)
        added = await add_replicas(operator, "c", f"{HOST}:72")
        await wait_caught_up(operator, "c", added, ReplicaLag())
        is_slow = True
        async with connect(address, follow_map=False) as client:
            await client.set("k", "v")
        await trio.sleep(0.1)
        assert await remove_replicas(operator, "c") == added
        assert progress[-1] == sentence.format((await operator.survey()).map.revision)
        await trio.sleep(10 * commit_s)
        assert slow_server.partition_maps.map_of("b") == (await operator.survey()).map


async def test_impossible_changes_of_replicas_are_refused() -> None:
    async with running_servers("ab") as group:
        operator = group.operator()
        for node, address, message in (
            ("a b", "", "not a node's name: write NODE=HOST:PORT"),
            ("c", "", "the map does not name c: write c=HOST:PORT"),
            ("c", "here", "here' is not HOST:PORT"),
            ("c", place(group, "b"), "node 'b' answers at"),
            ("a", "", "a is already active for all of them"),
        ):
            with pytest.raises(NotDoneError, match=message):
                await add_replicas(operator, node, address)
        with pytest.raises(
            NotDoneError, match="unknown node 'x' cannot be followed; the nodes are"
        ):
            await add_replicas(operator, "b", source="x")
        with pytest.raises(NotDoneError, match="partitions 0 to 3, not 9"):
            await add_replicas(operator, "b", partitions=[9])
        with pytest.raises(NotDoneError, match="a is active for partitions 0-3: let another"):
            await remove_replicas(operator, "a")
        await group.start_apart("c", has_bucket=True)
        with pytest.raises(
            NotDoneError, match="c has a bucket 'b' of its own, which it would lose"
        ):
            await add_replicas(operator, "c", place(group, "c"))
        # The advice to delete the bucket there would lose it.
        with pytest.raises(NotDoneError, match=r"c holds 'b' already, .* name another node"):
            await add_replicas(group.operator("c"), "c", place(group, "c"))
        with pytest.raises(NotDoneError, match="say --address HOST:PORT"):
            await add_replicas(group.operator("c"), "d", "10.1.2.3:12000")
        with pytest.raises(NotDoneError, match="c holds 'b' alone: give it a replica first"):
            await remove_replicas(group.operator("c"), "d")
        nowhere = Operator(Address.parse(group.proxies["a"].url("nowhere")))
        with pytest.raises(ServerError, match="there is no bucket 'nowhere'"):
            await remove_replicas(nowhere, "d")
        await group.stop("a")
        with pytest.raises(BrokenError):
            await remove_replicas(operator, "b")


async def test_a_replica_gets_another_address_only_if_it_answers_there() -> None:
    async with running_servers("abc") as group:
        operator = group.operator("a", ask_timeout_s=0.3)
        await group.start_apart("x")
        for address, message in (
            (place(group, "x"), "b is needed, but cannot be reached: node 'x' answers at"),
            ("127.0.0.1:1", "b is needed, but cannot be reached: .*refused"),
        ):
            with pytest.raises(NotDoneError, match=message):
                await add_replicas(operator, "b", address)
        # The node that is asked first, too.
        with pytest.raises(NotDoneError, match="b is needed, but cannot be reached"):
            await add_replicas(group.operator("b"), "b", "127.0.0.1:1")
        old_map = group.map("a")
        assert old_map == group.map("b")
        group.proxies["b"].half_open()
        group.proxies["b"].cut()
        new_address = f"127.0.0.1:{group.servers['b'].port}"
        await add_replicas(operator, "b", new_address)
        assert group.map("a").nodes == {**old_map.nodes, "b": new_address}
        assert group.map("a") == group.map("b") == group.map("c")
        group.proxies["b"].heal()


async def test_two_servers_of_one_name_are_refused(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    MemoryNetwork(monkeypatch)
    async with (
        node("a", "b", port=71),
        node("b", port=72),
        node("a", port=73),
        node("b", port=74),
    ):
        operator = Operator(Address(HOST, 71, "b"))
        await add_replicas(operator, "b", f"{HOST}:72")
        for name, port in (("a", 73), ("b", 74)):
            with pytest.raises(NotDoneError, match=f"two servers are called {name}: .*:{port};"):
                await add_replicas(operator, name, f"{HOST}:{port}")
        assert (await operator.survey()).map.nodes == {"a": f"{HOST}:71", "b": f"{HOST}:72"}


async def test_an_interrupted_addition_is_resumed() -> None:
    async with running_servers("a") as group:
        await group.set("a", {"k": "v"})
        await group.start_apart("b")
        there = place(group, "b")
        with trio.CancelScope() as scope:
            operator = group.operator(on_progress=lambda _: scope.cancel())
            await add_replicas(operator, "b", there)
        assert group.map("a").nodes.keys() == {"a", "b"}
        assert group.states("a") == ACTIVE
        await group.add_replica("b")
        await group.until(lambda: highs(group, "a") == highs(group, "b"))
        assert group.map("a") == group.map("b")
        group.check()


async def test_a_replica_is_not_added_if_the_active_does_not_answer() -> None:
    async with running_servers("ab") as group:
        await group.start_apart("c")
        group.proxies["a"].half_open()
        group.proxies["a"].cut()
        operator = group.operator("b", apply_timeout_s=0.3, ask_timeout_s=0.3)
        with pytest.raises(
            PartlyDoneError, match=r"a does not confirm that it has the map with c .*: repeat"
        ):
            await add_replicas(operator, "c", place(group, "c"))
        group.proxies["a"].heal()
        await group.add_replica("c")
        assert "c" in group.map("a").nodes


async def test_waiting_for_a_replica_ends_if_it_is_removed() -> None:
    partitions = [PartitionId(1), PartitionId(2)]
    async with running_servers("abc") as group:
        await group.stop("b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(remove_replicas, group.operator(), "b", partitions=[2]))
            with (
                trio.fail_after(20),
                pytest.raises(NotDoneError, match="b is no longer a replica of partition 2: ano"),
            ):
                await wait_caught_up(group.operator("c"), "b", partitions, ReplicaLag())


async def test_waiting_for_a_replica_goes_on_with_another_active() -> None:
    async with running_servers("abc") as group:
        await group.stop("c")
        await group.set("a", {"k": "v"})
        async with trio.open_nursery() as nursery:
            lag = ReplicaLag()
            nursery.start_soon(wait_caught_up, group.operator("b"), "c", [PartitionId(0)], lag)
            await group.until(lambda: bool(lag.failure))
            await group.stop("a")
            await fail_over(group.operator("b"), all_of="a", acknowledged=2)
            await group.start("c")
            nursery.cancel_scope.deadline = trio.current_time() + 20
        assert not nursery.cancel_scope.cancelled_caught
        assert not lag.failure
        assert highs(group, "b") == highs(group, "c")


async def test_waiting_for_a_replica_says_that_its_active_has_lost_the_bucket() -> None:
    class Lag(ReplicaLag):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "failure" and value:
                scope.cancel()

    scope = trio.CancelScope()
    lag = Lag()
    async with running_servers("ab") as group:
        async with connect(group.address("a"), follow_map=False) as client:
            await client.delete_bucket("b")
        with scope:
            await wait_caught_up(group.operator("b"), "b", [PartitionId(0)], lag)
    assert lag.failure == "node a does not have the bucket"
