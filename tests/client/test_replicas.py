"""Adding and removing replicas, with real servers."""

from __future__ import annotations

import pytest
import trio

from tests.client.test_takeover import ACTIVE, REPLICA, highs
from tests.kit.fleet import PARTITIONS, Fleet, running_fleet
from upr_protocol.client import Address, NodeClient, connect
from upr_protocol.client.operator import (
    NotDoneError,
    Operator,
    PartlyDoneError,
    add_replicas,
    fail_over,
    remove_replicas,
)
from upr_protocol.errors import BrokenError, ServerError
from upr_protocol.ids import Durability, PartitionState


def place(fleet: Fleet, name: str) -> str:
    return f"127.0.0.1:{fleet.proxies[name].port}"


async def test_a_node_tells_its_name() -> None:
    async with running_fleet("a") as fleet:
        found = await NodeClient(fleet.address("a")).status()
        assert (found.node, found.map) == ("a", None)
        found = await NodeClient(Address.parse(fleet.proxies["a"].url())).status()
        assert (found.node, found.map) == ("a", None)
        with pytest.raises(ServerError, match="create the bucket first"):
            await NodeClient(Address.parse(fleet.proxies["a"].url("nowhere"))).status()


async def test_a_survey_asks_other_nodes_if_the_first_has_lost_its_disk() -> None:
    async with running_fleet("ab") as fleet:
        await fleet.start_apart("c")
        operator = Operator(Address.parse(f"upr://{place(fleet, 'c')},{place(fleet, 'a')}/b"))
        assert (await operator.survey()).map == fleet.map("a")


async def test_a_replica_may_follow_a_replica() -> None:
    async with running_fleet("ab") as fleet:
        await fleet.set("a", {f"key {n}": "v" for n in range(30)})
        await fleet.start_apart("c")
        await fleet.add("c", source="b")
        assert fleet.map("a") == fleet.map("b") == fleet.map("c")
        assert fleet.map("a").partitions[0].replicas == {"b": "", "c": "b"}
        assert fleet.states("a") == ACTIVE
        assert fleet.states("b") == fleet.states("c") == REPLICA
        async with connect(fleet.servers["a"].url("b")) as client:
            await client.set("k", "w", durability=Durability.REPLICATED, copies=1)
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "c"))
        fleet.check()
        # The one that follows another one is no witness of what was acknowledged, but a copy.
        await fleet.stop("a")
        await fail_over(fleet.operator("c"), all_of="a", to="c")
        assert fleet.map("b").partitions[0].replicas == {"b": "", "a": ""}
        await fleet.set("c", {"k": "x"})
        await fleet.until(lambda: highs(fleet, "b") == highs(fleet, "c"))


async def test_replicas_of_some_partitions_are_added_and_removed() -> None:
    async with running_fleet("ab") as fleet:
        await fleet.start_apart("c")
        operator = fleet.operator()
        await add_replicas(operator, "c", place(fleet, "c"), partitions=[1, 2])
        assert [s is PartitionState.REPLICA for s in fleet.states("c")] == [
            False,
            True,
            True,
            False,
        ]
        assert await add_replicas(operator, "c", partitions=[0]) == [0]
        assert await remove_replicas(operator, "c", partitions=[0, 1]) == [0, 1]
        assert [sorted(o.replicas) for o in fleet.map("a").partitions] == [
            ["b"], ["b"], ["b", "c"], ["b"],
        ]  # fmt: skip
        assert fleet.states("c")[:2] == [PartitionState.DEAD] * 2
        assert await remove_replicas(operator, "c") == [2]
        assert sorted(fleet.map("a").nodes) == ["a", "b"]
        assert fleet.map("c") == fleet.map("a")
        fleet.check()
        with pytest.raises(NotDoneError, match="there is no node 'c'; the nodes are a, b"):
            await remove_replicas(operator, "c")
        # It may come back, with what it had.
        await fleet.add("c")
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "c"))


async def test_a_replica_on_a_node_that_is_gone_can_be_removed() -> None:
    async with running_fleet("abc") as fleet:
        await fleet.stop("b")
        assert await remove_replicas(fleet.operator("c"), "b") == list(range(PARTITIONS))
        assert fleet.map("a") == fleet.map("c")
        await fleet.start("b")
        await fleet.until(lambda: fleet.states("b") == [PartitionState.DEAD] * PARTITIONS)


async def test_impossible_changes_of_replicas_are_refused() -> None:
    async with running_fleet("ab") as fleet:
        operator = fleet.operator()
        for node, address, said in (
            ("a b", "", "not a node's name: write NODE=HOST:PORT"),
            ("c", "", "the map does not name c: write c=HOST:PORT"),
            ("c", "here", "here' is not HOST:PORT"),
            ("c", place(fleet, "b"), "node 'b' answers at"),
            ("a", "", "a is already active for all of them"),
        ):
            with pytest.raises(NotDoneError, match=said):
                await add_replicas(operator, node, address)
        with pytest.raises(NotDoneError, match="there is no node 'x' to follow"):
            await add_replicas(operator, "b", source="x")
        with pytest.raises(NotDoneError, match="partitions 0 to 3, not 9"):
            await add_replicas(operator, "b", partitions=[9])
        with pytest.raises(NotDoneError, match="a is active for partitions 0-3: let another"):
            await remove_replicas(operator, "a")
        await fleet.start_apart("c", has_bucket=True)
        with pytest.raises(
            NotDoneError, match="c has a bucket 'b' of its own, which it would lose"
        ):
            await add_replicas(operator, "c", place(fleet, "c"))
        with pytest.raises(NotDoneError, match="say --address HOST:PORT"):
            await add_replicas(fleet.operator("c"), "d", "10.1.2.3:12000")
        with pytest.raises(NotDoneError, match="c holds 'b' alone: give it a replica first"):
            await remove_replicas(fleet.operator("c"), "d")
        nowhere = Operator(Address.parse(fleet.proxies["a"].url("nowhere")))
        with pytest.raises(ServerError, match="there is no bucket 'nowhere'"):
            await remove_replicas(nowhere, "d")
        await fleet.stop("a")
        with pytest.raises(BrokenError):
            await remove_replicas(operator, "b")


async def test_an_interrupted_addition_is_resumed() -> None:
    async with running_fleet("a") as fleet:
        await fleet.set("a", {"k": "v"})
        await fleet.start_apart("b")
        there = place(fleet, "b")
        with trio.CancelScope() as scope:
            operator = fleet.operator(on_progress=lambda _: scope.cancel())
            await add_replicas(operator, "b", there)
        assert fleet.map("a").nodes.keys() == {"a", "b"}
        assert fleet.states("a") == ACTIVE
        await fleet.add("b")
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b"))
        assert fleet.map("a") == fleet.map("b")
        fleet.check()


async def test_a_replica_is_not_added_if_the_active_does_not_answer() -> None:
    async with running_fleet("ab") as fleet:
        await fleet.start_apart("c")
        fleet.proxies["a"].half_open()
        fleet.proxies["a"].cut()
        operator = fleet.operator("b", apply_timeout_s=0.3, ask_timeout_s=0.3)
        with pytest.raises(
            PartlyDoneError, match=r"a does not confirm that it has the map with c .*: repeat"
        ):
            await add_replicas(operator, "c", place(fleet, "c"))
        fleet.proxies["a"].heal()
        await fleet.add("c")
        assert "c" in fleet.map("a").nodes
