"""Takeover, with real servers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.fleet import PARTITIONS, Fleet, Gives, running_fleet
from upr_protocol.client import NodeClient
from upr_protocol.client.operator import (
    NotDoneError,
    TakeoverTimeouts,
    take_over,
)
from upr_protocol.client.operator.plan import active_assignment, partitions_text
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import HistoryId, PartitionState, SeqNo
from upr_protocol.partition_map import HistoryPoint

ACTIVE = [PartitionState.ACTIVE] * PARTITIONS
REPLICA = [PartitionState.REPLICA] * PARTITIONS
PENDING = [PartitionState.PENDING] * PARTITIONS


def logs(fleet: Fleet, name: str) -> list[FailoverLog]:
    return [fleet.partition(name, number).failover_log for number in range(PARTITIONS)]


def highs(fleet: Fleet, name: str) -> list[SeqNo]:
    return [fleet.partition(name, number).high_seq for number in range(PARTITIONS)]


async def test_a_takeover_continues_the_history() -> None:
    async with running_fleet("abc") as fleet:
        await fleet.set("a", {f"key {n}": "before" for n in range(50)})
        before = logs(fleet, "a")
        await take_over(fleet.operator("c"), to="b", all_of="a")
        assert fleet.states("b") == ACTIVE
        assert fleet.states("a") == fleet.states("c") == REPLICA
        assert logs(fleet, "b") == before
        await fleet.set("b", {"after": "1"})
        assert await fleet.get("b", "key 7") == "before"
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b") == highs(fleet, "c"))
        fleet.check()
        assert fleet.told == [
            "a: revision 48, hands over partitions 0-3",
            "b: revision 49, active for partitions 0-3",
            "a, c: revision 49",
        ]


async def test_a_takeover_of_some_partitions_and_then_from_two_nodes() -> None:
    async with running_fleet("abc") as fleet:
        await take_over(fleet.operator(), to="b", partitions=[1, 2])
        assert [p.active for p in fleet.map("c").partitions] == ["a", "b", "b", "a"]
        await take_over(fleet.operator(), to="c", partitions=range(PARTITIONS))
        assert fleet.states("c") == ACTIVE
        with pytest.raises(NotDoneError, match="c is already active for all of them"):
            await take_over(fleet.operator(), to="c", partitions=[0])
        fleet.check()


async def test_impossible_takeovers_are_refused() -> None:
    async with running_fleet("ab") as fleet:
        operator = fleet.operator()
        with pytest.raises(NotDoneError, match="x has no copy of partition 1: make it a replica"):
            await take_over(operator, to="x", partitions=[1])
        with pytest.raises(NotDoneError, match="partitions 0 to 3, not 4"):
            await take_over(operator, to="b", partitions=[4])
        with pytest.raises(NotDoneError, match="no node 'x'; the nodes are a, b"):
            await take_over(operator, to="b", all_of="x")
        with pytest.raises(NotDoneError, match="b is not active for any partition"):
            await take_over(operator, to="a", all_of="b")
        await fleet.stop("b")
        with pytest.raises(NotDoneError, match="node b is needed, but cannot be reached"):
            await take_over(operator, to="b", all_of="a")
        await fleet.start("b")
        await fleet.stop("a")
        with pytest.raises(NotDoneError, match="if it is gone, use `upr failover`"):
            await take_over(fleet.operator("b"), to="b", all_of="a")


async def test_an_interrupted_takeover_is_resumed_by_the_same_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gives = Gives(monkeypatch)
    async with running_fleet("ab") as fleet:
        await fleet.set("a", {f"key {n}": "0" for n in range(20)})
        nodes, interrupted = ["a", "b"], 0
        for stop_at in range(100):
            old, new = nodes
            gives.reset(stop_at)
            before = logs(fleet, old)
            with gives.scope:
                await take_over(fleet.operator(), to=new, all_of=old)
            fleet.check()
            if gives.scope.cancelled_caught:
                interrupted += 1
                gives.stop_at = -1
                if fleet.states(new) != ACTIVE or fleet.states(old) != REPLICA:
                    await _mend(fleet, old, new)
            fleet.check()
            assert fleet.states(new) == ACTIVE
            # Where it was handed over when it was interrupted, somebody may have been active since.
            more = int(gives.scope.cancelled_caught)
            for was, now in zip(before, logs(fleet, new), strict=True):
                assert now.entries[len(now) - len(was) :] == was.entries
                assert len(now) - len(was) in (0, more)
            await fleet.set(new, {"key": str(stop_at)})
            await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b"))
            nodes.reverse()
            if not gives.scope.cancelled_caught:
                break
        assert interrupted >= 5


async def _mend(fleet: Fleet, old: str, new: str) -> None:
    """What `upr partitions` shows says whether there is something left to do."""
    if all(assignment.active == new for assignment in fleet.map(new).partitions):
        await fleet.until(lambda: fleet.states(old) == REPLICA)
    else:
        await take_over(fleet.operator(), to=new, all_of=old)


def _lose_answers(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet, *, once: bool
) -> list[list[FailoverLog]]:
    """The cable to `b` is pulled when it has carried out the map that it was given; or breaks, and
    is whole again. Gives the logs with which `b` was active then."""
    cluster = fleet.servers["b"].service.cluster
    real = cluster.set_map
    found: list[list[FailoverLog]] = []

    async def set_map(expected_revision: int, document: str) -> object:
        given = await real(expected_revision, document)
        assert fleet.states("b") == ACTIVE
        found.append(logs(fleet, "b"))
        if not once:
            fleet.proxies["b"].half_open()
        fleet.proxies["b"].cut()
        monkeypatch.setattr(cluster, "set_map", real)
        return given

    monkeypatch.setattr(cluster, "set_map", set_map)
    return found


async def test_a_lost_answer_to_the_activation_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_fleet("ab") as fleet:
        before = logs(fleet, "a")

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                _lose_answers(monkeypatch, fleet, once=True)

        await take_over(fleet.operator(on_progress=on_progress), to="b", all_of="a")
        assert fleet.states("b") == ACTIVE
        assert logs(fleet, "b") == before
        fleet.check()


async def test_partitions_are_handed_back_if_the_target_stops_answering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_fleet("ab") as fleet:
        before = logs(fleet, "a")
        activated: list[list[list[FailoverLog]]] = []

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                activated.append(_lose_answers(monkeypatch, fleet, once=False))
            fleet.check()

        operator = fleet.operator(on_progress=on_progress, apply_timeout_s=0.3, ask_timeout_s=0.3)
        with pytest.raises(
            NotDoneError, match="it may or may not be active now; so a is active again"
        ):
            await take_over(operator, to="b", all_of="a")
        assert activated == [[before]]
        assert fleet.states("a") == ACTIVE
        assert all(len(log) == 2 for log in logs(fleet, "a"))
        fleet.check()
        await fleet.set("a", {"kept": "1"})
        # It finds out by itself.
        await fleet.until(lambda: fleet.states("b") == REPLICA)
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b"))
        await fleet.until(lambda: logs(fleet, "a") == logs(fleet, "b"))
        fleet.check()


async def test_partitions_are_handed_back_if_the_target_refuses() -> None:
    async with running_fleet("abc") as fleet:
        before = logs(fleet, "a")
        mine = fleet.partition("b").failover_log
        wrong = FailoverLog.of([(HistoryId(7), SeqNo(0))])

        def on_progress(sentence: str) -> None:
            if sentence.startswith("a: ") and "hands over" in sentence:
                # What it says after this is right, and what it has is not.
                fleet.before_map(
                    "b", lambda: fleet.partition("b").become(PartitionState.REPLICA, wrong)
                )

        with pytest.raises(NotDoneError, match=r"node b refuses.*so a is active again"):
            await take_over(fleet.operator(on_progress=on_progress), to="b", all_of="a")
        fleet.partition("b").become(PartitionState.REPLICA, mine)
        assert fleet.states("a") == ACTIVE
        assert logs(fleet, "a") == before
        # The target refuses the earlier map for ever: it has a later one.
        assert fleet.map("b") == fleet.map("a")


async def test_partitions_are_handed_back_if_the_target_does_not_catch_up() -> None:
    async with running_fleet("ab") as fleet:
        before = logs(fleet, "a")
        cluster: Any = fleet.servers["b"].service.cluster
        await cluster.stop()
        await fleet.set("a", {"k": "v"})
        operator = fleet.operator()
        # It would come back with the map that hands over.
        timeouts = TakeoverTimeouts(handover_s=0.1)
        with pytest.raises(NotDoneError, match=r"b did not catch up within 0.1 s; so a is"):
            await take_over(operator, to="b", all_of="a", timeouts=timeouts)
        assert fleet.states("a") == ACTIVE
        assert logs(fleet, "a") == before
        await fleet.set("a", {"k": "w"})
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b"))
        fleet.check()


async def test_an_interrupted_takeover_may_be_undone_or_redirected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gives = Gives(monkeypatch)
    async with running_fleet("abc") as fleet:
        before = logs(fleet, "a")
        for to in "ac":
            gives.reset(1)
            with gives.scope:
                await take_over(fleet.operator(), to="b", all_of="a")
            assert fleet.states("a") == PENDING
            gives.stop_at = -1
            await take_over(fleet.operator("b"), to=to, all_of="a")
            assert fleet.states(to) == ACTIVE
            # Nobody knows that `b` was not active meanwhile, and killed.
            assert [len(log) for log in logs(fleet, to)] == [len(log) + 1 for log in before]
            before = logs(fleet, to)
            fleet.check()


async def test_a_resumed_takeover_begins_new_histories_if_a_suspect_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gives = Gives(monkeypatch)
    async with running_fleet("abc") as fleet:
        before = logs(fleet, "a")
        gives.reset(1)
        with gives.scope:
            await take_over(fleet.operator(), to="b", all_of="a")
        gives.stop_at = -1
        # It was told, and nobody knows.
        fleet.proxies["b"].half_open()
        fleet.proxies["b"].cut()
        given = fleet.map("a")
        active = [
            active_assignment(assignment, "b", HistoryPoint(log.current, high))
            for assignment, log, high in zip(
                given.partitions, before, highs(fleet, "a"), strict=True
            )
        ]
        await fleet.give("b", given.revision + 1, dict(enumerate(active)), given)
        assert fleet.states("b") == ACTIVE
        operator = fleet.operator(ask_timeout_s=0.5, apply_timeout_s=0.5)
        await take_over(operator, to="c", all_of="a")
        assert fleet.states("c") == ACTIVE
        assert all(len(log) == 2 for log in logs(fleet, "c"))
        fleet.check()
        fleet.proxies["b"].heal()
        await fleet.until(lambda: fleet.states("b") == REPLICA)
        fleet.check()


@pytest.mark.parametrize("to", ["b", "c", "a"])
async def test_a_resumed_takeover_keeps_a_node_that_became_active_meanwhile(
    monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    gives = Gives(monkeypatch)
    async with running_fleet("abc") as fleet:
        await fleet.set("a", {f"key {n}": "0" for n in range(20)})
        before = logs(fleet, "a")
        gives.reset(1)
        with gives.scope:
            await take_over(fleet.operator(), to="b", all_of="a")
        gives.stop_at = -1
        handed = fleet.map("a")
        await fleet.until(lambda: highs(fleet, "b") == highs(fleet, "a"))

        set_map = NodeClient.set_map

        async def late(*args: Any) -> None:
            """What the first command said last is carried out once the second has looked."""
            monkeypatch.setattr(NodeClient, "set_map", set_map)
            active = [
                active_assignment(assignment, "b", HistoryPoint(log.current, high))
                for assignment, log, high in zip(
                    handed.partitions, before, highs(fleet, "a"), strict=True
                )
            ]
            await fleet.give("b", handed.revision + 1, dict(enumerate(active)), handed)
            await fleet.set("b", {"acknowledged": "1"})
            await set_map(*args)

        monkeypatch.setattr(NodeClient, "set_map", late)
        number = partition_of(b"acknowledged", PARTITIONS)
        rest = partitions_text(n for n in range(PARTITIONS) if n != number)
        with pytest.raises(
            NotDoneError,
            match=f"so (b is active for partition {number}|a is active again for {rest}) and ",
        ):
            await take_over(fleet.operator("c"), to=to, all_of="a")
        fleet.check()
        assert await fleet.get("b", "acknowledged") == "1"
        assert fleet.map("b").partitions[number].active == "b"
        assert all(fleet.map("a").partitions[n].active == "a" for n in range(4) if n != number)
        # The same command again finishes it, and nothing was lost.
        for old in {"a", "b"} - {to}:
            await take_over(fleet.operator("c"), to=to, all_of=old)
        assert fleet.states(to) == ACTIVE
        assert [len(log) for log in logs(fleet, to)] == [len(log) + 1 for log in before]
        assert await fleet.get(to, "acknowledged") == "1"
        await fleet.until(lambda: highs(fleet, "a") == highs(fleet, "b") == highs(fleet, "c"))
        fleet.check()


async def test_a_target_that_accepted_changes_stays_active_though_its_answer_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_fleet("ab", partitions=1) as fleet:
        before = fleet.partition("a").failover_log

        async def set_map(expected_revision: int, document: str) -> object:
            given = await real(expected_revision, document)
            monkeypatch.setattr(cluster, "set_map", real)
            await fleet.set("b", {"acknowledged": "1"})
            fleet.proxies["b"].half_open()
            fleet.proxies["b"].cut()
            return given

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                monkeypatch.setattr(cluster, "set_map", set_map)
            if "it may or may not be active now" in sentence:
                fleet.proxies["b"].heal()

        cluster = fleet.servers["b"].service.cluster
        real = cluster.set_map
        operator = fleet.operator(on_progress=on_progress, apply_timeout_s=0.3, ask_timeout_s=5)
        await take_over(operator, to="b", all_of="a")
        assert fleet.states("b") == [PartitionState.ACTIVE]
        assert len(fleet.partition("b").failover_log) == len(before) + 1
        assert await fleet.get("b", "acknowledged") == "1"
        await fleet.until(lambda: fleet.partition("a").high_seq == fleet.partition("b").high_seq)
        fleet.check()


async def test_a_takeover_from_a_node_that_stops_answering_says_what_to_do() -> None:
    async with running_fleet("ab") as fleet:

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                fleet.proxies["a"].half_open()
                fleet.proxies["a"].cut()

        operator = fleet.operator(on_progress=on_progress, ask_timeout_s=0.3, apply_timeout_s=0.3)
        await take_over(operator, to="b", all_of="a")
        # It has handed over, and learns of it later.
        assert fleet.states("b") == ACTIVE
        fleet.proxies["a"].heal()
        await fleet.until(lambda: fleet.states("a") == REPLICA)
