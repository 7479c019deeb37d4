"""Failover, with real servers."""

from __future__ import annotations

import pytest
import trio

from tests.client.test_takeover import ACTIVE, REPLICA, highs, logs
from tests.kit.fleet import PARTITIONS, Fleet, Gives, running_fleet
from upr_protocol.client import connect
from upr_protocol.client.operator import NotDoneError, PartlyDoneError, fail_over
from upr_protocol.ids import Durability, PartitionState


async def filled(fleet: Fleet) -> None:
    async with connect(fleet.servers["a"].url("b")) as client:
        for number in range(20):
            await client.set(
                f"key {number}",
                "v",
                durability=Durability.REPLICATED,
                copies=len(fleet.servers) - 1,
            )


async def test_a_replica_becomes_active_and_the_old_active_follows() -> None:
    async with running_fleet("abc") as fleet:
        await filled(fleet)
        before = logs(fleet, "a")
        await fleet.stop("a")
        await fail_over(fleet.operator("c"), all_of="a", to="b")
        assert fleet.states("b") == ACTIVE
        assert all(
            len(log) == len(old) + 1 for log, old in zip(logs(fleet, "b"), before, strict=True)
        )
        assert await fleet.get("b", "key 7") == "v"
        await fleet.set("b", {"after": "1"})
        await fleet.start("a")
        await fleet.until(lambda: fleet.states("a") == REPLICA)
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b") == highs(fleet, "c"))
        fleet.check()
        assert fleet.told[0] == "b, c: revision 48, fenced for partitions 0-3"
        assert fleet.told[1] == "b: revision 49, active for partitions 0-3"


async def test_without_a_target_the_partitions_are_shared_out() -> None:
    async with running_fleet("abc") as fleet:
        await filled(fleet)
        await fleet.stop("a")
        await fail_over(fleet.operator("b"), all_of="a")
        assert [one.active for one in fleet.map("c").partitions] == ["b", "c", "b", "c"]
        assert fleet.map("b") == fleet.map("c")
        fleet.check()


async def test_impossible_failovers_are_refused() -> None:
    async with running_fleet("abc") as fleet:
        await filled(fleet)
        with pytest.raises(
            NotDoneError, match="a is running, and is active for partitions 0-3: use `upr take"
        ):
            await fail_over(fleet.operator("b"), all_of="a", to="b")
        await fleet.stop("a")
        await fleet.stop("c")
        operator = fleet.operator("b", apply_timeout_s=0.5, ask_timeout_s=0.5)
        with pytest.raises(NotDoneError, match=r"too few replicas of partitions 0-3 .*\(c\) may"):
            await fail_over(operator, all_of="a", to="b")
        with pytest.raises(NotDoneError, match="c is needed, but cannot be reached"):
            await fail_over(operator, all_of="a", to="c")
        with pytest.raises(NotDoneError, match="x has no copy of partition 0"):
            await fail_over(operator, partitions=[0], to="x")
        assert fleet.map("b").revision == 32
        await fail_over(operator, partitions=[0], acknowledged=2)
        await fail_over(operator, partitions=[1, 2, 3], lose_acknowledged=True)
        assert fleet.states("b") == ACTIVE


async def test_a_replica_that_is_behind_is_not_promoted() -> None:
    async with running_fleet("abc") as fleet:
        cluster = fleet.servers["b"].service.cluster
        await cluster.stop()
        async with connect(fleet.servers["a"].url("b")) as client:
            for number in range(20):
                await client.set(f"key {number}", "v", durability=Durability.REPLICATED, copies=1)
        await fleet.stop("a")
        operator = fleet.operator("c")
        with pytest.raises(
            NotDoneError, match=r"partition 0: b has less than c;.* and 1 more\. Choose"
        ):
            await fail_over(operator, all_of="a", to="b")
        # Everything is owned as before.
        assert {one.active for one in fleet.map("b").partitions} == {"a"}
        assert fleet.states("b") == fleet.states("c") == REPLICA
        await fail_over(operator, partitions=[0, 1])
        assert fleet.states("c")[:2] == ACTIVE[:2]
        await fail_over(operator, partitions=[2, 3], to="b", lose_acknowledged=True)
        assert fleet.states("b")[2:] == ACTIVE[2:]
        await fleet.until(lambda: highs(fleet, "b") == highs(fleet, "c"))
        fleet.check()


async def test_an_interrupted_failover_is_resumed_by_the_same_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gives = Gives(monkeypatch)
    async with running_fleet("abc") as fleet:
        await filled(fleet)
        up = "abc"
        interrupted = 0
        refused: list[str] = []
        for stop_at in range(14):
            old, new, other = list(up)
            await fleet.stop(old)
            gives.reset(stop_at)
            with gives.scope:
                await fail_over(fleet.operator(other), all_of=old, to=new)
            fleet.check()
            gives.stop_at = -1
            if gives.scope.cancelled_caught:
                interrupted += 1
                if any(assignment.active != new for assignment in fleet.map(other).partitions):
                    try:
                        await fail_over(fleet.operator(other), all_of=old, to=new)
                    except NotDoneError as error:
                        # Another node knew of the last map.
                        refused.append(str(error))
            await fleet.until(lambda new=new: fleet.states(new) == ACTIVE)  # type: ignore[misc]
            fleet.check()
            await fleet.set(new, {"key": str(stop_at)})
            await fleet.start(old)
            await fleet.until(lambda old=old: fleet.states(old) == REPLICA)  # type: ignore[misc]
            await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b") == highs(fleet, "c"))
            fleet.check()
            up = new + other + old
            if not gives.scope.cancelled_caught:
                break
        assert interrupted >= 5
        assert all("is not active for any partition" in one for one in refused)


async def test_a_restarted_node_without_its_peers_is_promoted_only_with_losses() -> None:
    async with running_fleet("ab") as fleet:
        await filled(fleet)
        await fleet.stop("b")
        await fleet.stop("a")
        await fleet.start("a")
        assert fleet.states("a") == [PartitionState.PENDING] * PARTITIONS
        operator = fleet.operator("a", apply_timeout_s=0.5, ask_timeout_s=0.5)
        with pytest.raises(NotDoneError, match="too few replicas"):
            await fail_over(operator, all_of="a", to="a")
        await fail_over(operator, all_of="a", to="a", lose_acknowledged=True)
        assert fleet.states("a") == ACTIVE
        assert await fleet.get("a", "key 3") == "v"
        await fleet.start("b")
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b"))
        fleet.check()


async def test_a_failover_whose_target_disappears_says_what_to_do() -> None:
    async with running_fleet("abc") as fleet:
        await filled(fleet)
        await fleet.stop("a")

        def on_progress(sentence: str) -> None:
            if "fenced for" in sentence:
                fleet.proxies["b"].half_open()
                fleet.proxies["b"].cut()

        operator = fleet.operator(
            "c", on_progress=on_progress, apply_timeout_s=0.5, ask_timeout_s=0.5
        )
        with pytest.raises(
            PartlyDoneError, match="until then no node is active for partitions 0-3"
        ):
            await fail_over(operator, all_of="a", to="b")
        with pytest.raises(NotDoneError, match="too few replicas"):
            await fail_over(operator, all_of="a", to="c")
        fleet.proxies["b"].heal()
        await fail_over(fleet.operator("c"), all_of="a")
        active = [one.active for one in fleet.map("b").partitions]
        assert active == ["b", "c", "b", "c"]
        fleet.check()


async def test_an_old_active_that_was_cut_off_becomes_a_replica() -> None:
    async with running_fleet("abc") as fleet:
        await filled(fleet)
        fleet.proxies["a"].half_open()
        fleet.proxies["a"].cut()
        operator = fleet.operator("b", apply_timeout_s=0.5, ask_timeout_s=0.5)
        await fail_over(operator, all_of="a", to="b")
        # It asks the others, and learns that it is active no more.
        with trio.fail_after(10):
            await fleet.until(lambda: fleet.states("a") == REPLICA)
        fleet.check()
