"""Takeover, with real servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.client.group_states import ACTIVE, PENDING, REPLICA, highs, logs
from tests.client.resumed_takeover import ResumedTakeover
from tests.kit.server_group import (
    PARTITIONS,
    CompetingCommands,
    MapInterrupter,
    ServerGroup,
    running_servers,
)
from tests.storage.record_damage import flip
from upr_protocol.client import Address, NodeClient, connect
from upr_protocol.client.operator import (
    NotDoneError,
    Operator,
    OvertakenError,
    TakeoverTimeouts,
    fail_over,
    take_over,
)
from upr_protocol.client.operator.plan import active_assignment, partitions_text
from upr_protocol.client.operator.takeover import HANDOVER_LAG_CHANGES
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, HistoryId, PartitionState, SeqNo
from upr_protocol.partition_map import HistoryPoint, PartitionMap
from upr_protocol.transport import dial_tcp
from upr_server.storage.records import PARTITION, partition_key


async def test_a_takeover_continues_the_history() -> None:
    async with running_servers("abc") as group:
        await group.set("a", {f"key {n}": "before" for n in range(50)})
        before = logs(group, "a")
        await take_over(group.operator("c"), to="b", all_of="a")
        assert group.states("b") == ACTIVE
        assert group.states("a") == group.states("c") == REPLICA
        assert logs(group, "b") == before
        await group.set("b", {"after": "1"})
        assert await group.get("b", "key 7") == "before"
        await group.until(lambda: highs(group, "a") == highs(group, "b") == highs(group, "c"))
        group.check()
        assert group.progress == [
            "a: revision 48, hands over partitions 0-3",
            "b: revision 49, active for partitions 0-3",
            "a, c: revision 49",
        ]


async def test_a_takeover_of_some_partitions_and_then_from_two_nodes() -> None:
    async with running_servers("abc") as group:
        await take_over(group.operator(), to="b", partitions=[1, 2])
        assert [p.active for p in group.map("c").partitions] == ["a", "b", "b", "a"]
        await take_over(group.operator(), to="c", partitions=range(PARTITIONS))
        assert group.states("c") == ACTIVE
        with pytest.raises(NotDoneError, match="c is already active for all of them"):
            await take_over(group.operator(), to="c", partitions=[0])
        group.check()


async def test_impossible_takeovers_are_refused() -> None:
    async with running_servers("ab") as group:
        operator = group.operator()
        with pytest.raises(NotDoneError, match="x has no copy of partition 1: make it a replica"):
            await take_over(operator, to="x", partitions=[1])
        with pytest.raises(NotDoneError, match="partitions 0 to 3, not 4"):
            await take_over(operator, to="b", partitions=[4])
        with pytest.raises(NotDoneError, match="unknown node 'x'; the nodes are a, b"):
            await take_over(operator, to="b", all_of="x")
        with pytest.raises(NotDoneError, match="b is not active for any partition"):
            await take_over(operator, to="a", all_of="b")
        await group.stop("b")
        with pytest.raises(NotDoneError, match="node b is needed, but cannot be reached"):
            await take_over(operator, to="b", all_of="a")
        await group.start("b")
        await group.stop("a")
        with pytest.raises(NotDoneError, match="if it is gone, use `upr failover`"):
            await take_over(group.operator("b"), to="b", all_of="a")
        # No other node confirms its map.
        await group.stop("b")
        await group.start("a")
        with pytest.raises(NotDoneError, match="a is pending for partition 0, but active in the"):
            await take_over(operator, to="a", all_of="a")


async def test_a_takeover_of_a_partition_whose_record_was_damaged_meanwhile(
    tmp_path: Path,
) -> None:
    """The old active refused to hand over, and no partition could leave it."""
    async with running_servers("ab", directory=tmp_path) as group:
        await group.set("a", {f"key {n}": "value" for n in range(20)})
        disk = group.servers["a"].disk_of("b")
        assert disk is not None
        for partition in disk.bucket.partitions:
            await disk.flusher.wait_until_persisted(partition, partition.high_seq)
        flip(tmp_path / "a" / "buckets" / "b", partition_key(PARTITION, 0), 100)
        await take_over(group.operator(), to="b", all_of="a")
        assert group.states("b") == ACTIVE
        assert group.states("a") == [PartitionState.DEAD, *REPLICA[1:]]
        assert "mismatch" in group.partition("a").damage
        for number in range(20):
            assert await group.get("b", f"key {number}") == "value"


async def test_of_two_takeovers_at_the_same_time_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have looked at the nodes before either changes anything, and their maps have the same
    revisions. Both targets then have everything, and must not go on in one history."""
    commands = CompetingCommands(monkeypatch)
    async with running_servers("abc") as group:
        await group.set("a", {f"key {n}": "0" for n in range(20)})
        await commands.run(
            lambda: take_over(group.operator("b"), to="b", all_of="a"),
            lambda: take_over(group.operator("c"), to="c", all_of="a"),
        )
        group.check()
        (error,) = commands.errors
        assert isinstance(error, OvertakenError)
        assert "has revision 48 from another command" in str(error)
        assert (group.states("b") == ACTIVE) is not (group.states("c") == ACTIVE)


async def test_an_interrupted_takeover_is_resumed_by_the_same_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupter = MapInterrupter(monkeypatch)
    async with running_servers("ab") as group:
        await group.set("a", {f"key {n}": "0" for n in range(20)})
        nodes, interrupted = ["a", "b"], 0
        for stop_at in range(100):
            source, target = nodes
            interrupter.reset(stop_at)
            before = logs(group, source)
            with interrupter.scope:
                await take_over(group.operator(), to=target, all_of=source)
            group.check()
            if interrupter.scope.cancelled_caught:
                interrupted += 1
                interrupter.stop_at = -1
                if group.states(target) != ACTIVE or group.states(source) != REPLICA:
                    await _mend(group, source, target)
            group.check()
            assert group.states(target) == ACTIVE
            # Of a partition that was handed over, another node may have been active since.
            more = int(interrupter.scope.cancelled_caught)
            for was, now in zip(before, logs(group, target), strict=True):
                assert now.entries[len(now) - len(was) :] == was.entries
                assert len(now) - len(was) in (0, more)
            await group.set(target, {"key": str(stop_at)})
            await group.until(lambda: highs(group, "a") == highs(group, "b"))
            nodes.reverse()
            if not interrupter.scope.cancelled_caught:
                break
        assert interrupted >= 5


async def _mend(group: ServerGroup, source: str, target: str) -> None:
    """Repeats the command if the maps say that it is not finished."""
    if all(assignment.active == target for assignment in group.map(target).partitions):
        await group.until(lambda: group.states(source) == REPLICA)
    else:
        await take_over(group.operator(), to=target, all_of=source)


def _lose_answers(
    monkeypatch: pytest.MonkeyPatch, group: ServerGroup, *, once: bool
) -> list[list[FailoverLog]]:
    """Cuts the connection to `b` after it has applied the next map: for a moment, or for good.
    Returns the logs with which `b` was active then."""
    cluster = group.servers["b"].partition_maps
    real = cluster.set_map
    active_logs: list[list[FailoverLog]] = []

    async def set_map(expected_revision: int, document: str) -> object:
        applied = await real(expected_revision, document)
        assert group.states("b") == ACTIVE
        active_logs.append(logs(group, "b"))
        if not once:
            group.proxies["b"].half_open()
        group.proxies["b"].cut()
        monkeypatch.setattr(cluster, "set_map", real)
        return applied

    monkeypatch.setattr(cluster, "set_map", set_map)
    return active_logs


async def test_a_lost_answer_to_the_activation_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_servers("ab") as group:
        before = logs(group, "a")

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                _lose_answers(monkeypatch, group, once=True)

        await take_over(group.operator(on_progress=on_progress), to="b", all_of="a")
        assert group.states("b") == ACTIVE
        assert logs(group, "b") == before
        group.check()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_partitions_are_handed_back_if_the_target_stops_answering(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """Also if the target can be fenced in the end: it was active in the history until then."""
    async with running_servers("ab") as group:
        before = logs(group, "a")
        activated: list[list[list[FailoverLog]]] = []

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                activated.append(_lose_answers(monkeypatch, group, once=False))
            elif comes_back and "may or may not be active" in sentence:
                group.proxies["b"].heal()
            group.check()

        operator = group.operator(on_progress=on_progress, apply_timeout_s=0.3, ask_timeout_s=0.3)
        with pytest.raises(
            NotDoneError, match="it may or may not be active now; so a is active again"
        ):
            await take_over(operator, to="b", all_of="a")
        assert activated == [[before]]
        assert group.states("a") == ACTIVE
        assert all(len(log) == 2 for log in logs(group, "a"))
        group.check()
        await group.set("a", {"kept": "1"})
        # `b` finds out by itself.
        await group.until(lambda: group.states("b") == REPLICA)
        await group.until(lambda: highs(group, "a") == highs(group, "b"))
        await group.until(lambda: logs(group, "a") == logs(group, "b"))
        group.check()


async def test_partitions_are_handed_back_if_the_target_refuses() -> None:
    async with running_servers("abc") as group:
        before = logs(group, "a")
        own_log = group.partition("b").failover_log
        wrong = FailoverLog.of_pairs([(HistoryId(7), SeqNo(0))])

        def on_progress(sentence: str) -> None:
            if sentence.startswith("a: ") and "hands over" in sentence:
                # What it says after this is right, and what it has is not.
                group.before_map(
                    "b", lambda: group.partition("b").change_state(PartitionState.REPLICA, wrong)
                )

        with pytest.raises(NotDoneError, match=r"node b refuses.*so a is active again"):
            await take_over(group.operator(on_progress=on_progress), to="b", all_of="a")
        group.partition("b").change_state(PartitionState.REPLICA, own_log)
        assert group.states("a") == ACTIVE
        assert logs(group, "a") == before
        # The target refuses the earlier map for ever: it has a later one.
        assert group.map("b") == group.map("a")


async def test_a_target_that_refuses_and_cannot_be_fenced_makes_the_histories_new() -> None:
    """The earlier map may still be on its way to it."""
    async with running_servers("ab") as group:
        wrong = FailoverLog.of_pairs([(HistoryId(7), SeqNo(0))])

        def on_progress(sentence: str) -> None:
            if sentence.startswith("a: ") and "hands over" in sentence:
                group.before_map(
                    "b", lambda: group.partition("b").change_state(PartitionState.REPLICA, wrong)
                )
            elif "node b refuses" in sentence:
                group.proxies["b"].half_open()
                group.proxies["b"].cut()

        operator = group.operator(on_progress=on_progress, apply_timeout_s=0.3, ask_timeout_s=0.3)
        with pytest.raises(NotDoneError, match=r"node b refuses.*so a is active again"):
            await take_over(operator, to="b", all_of="a")
        assert group.states("a") == ACTIVE
        assert all(len(log) == 2 for log in logs(group, "a"))


async def test_partitions_are_handed_back_if_the_target_does_not_catch_up() -> None:
    async with running_servers("ab") as group:
        before = logs(group, "a")
        cluster: Any = group.servers["b"].partition_maps
        await cluster.stop()
        await group.set("a", {"k": "v"})
        operator = group.operator()
        # It would come back with the map that hands over.
        timeouts = TakeoverTimeouts(handover_s=0.1)
        with pytest.raises(NotDoneError, match=r"b did not catch up within 0.1 s; so a is"):
            await take_over(operator, to="b", all_of="a", timeouts=timeouts)
        assert group.states("a") == ACTIVE
        assert logs(group, "a") == before
        await group.set("a", {"k": "w"})
        await group.until(lambda: highs(group, "a") == highs(group, "b"))
        group.check()


@pytest.mark.parametrize(
    ("revision", "reason"), [(32, "b did not catch up"), (33, "it may or may not be active now")]
)
async def test_partitions_are_handed_back_if_another_program_answers_for_the_target(
    monkeypatch: pytest.MonkeyPatch, revision: int, reason: str
) -> None:
    """It may be another version. It answers once a map of `revision` is to be sent."""

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    set_map = NodeClient.set_map
    async with running_servers("ab") as group, trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        other_port = listeners[0].socket.getsockname()[1]

        async def set_map_once(node: NodeClient, expected: int, new_map: PartitionMap) -> None:
            if new_map.revision == revision:
                group.proxies["b"]._target = ("127.0.0.1", other_port)
                group.proxies["b"].cut()
            await set_map(node, expected, new_map)

        monkeypatch.setattr(NodeClient, "set_map", set_map_once)
        operator = group.operator(apply_timeout_s=0.3, ask_timeout_s=0.3)
        timeouts = TakeoverTimeouts(handover_s=0.3)
        with pytest.raises(NotDoneError, match=rf"{reason}.*; so a is active again"):
            await take_over(operator, to="b", all_of="a", timeouts=timeouts)
        assert group.states("a") == ACTIVE
        nursery.cancel_scope.cancel()


async def test_a_takeover_between_nodes_that_both_lose_the_bucket_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_servers("ab") as group:
        before = group.map("a")
        cluster: Any = group.servers["b"].partition_maps
        await cluster.stop()
        await group.set("a", {f"key {n}": "v" for n in range(HANDOVER_LAG_CHANGES + 1)})
        real = Operator.node_reports

        async def node_reports(operator: Operator, addresses: Any) -> Any:
            reports = await real(operator, addresses)
            if not group.progress:  # The takeover has not begun to wait.
                return reports
            return {n: attrs.evolve(report, partitions=()) for n, report in reports.items()}

        monkeypatch.setattr(Operator, "node_reports", node_reports)
        timeouts = TakeoverTimeouts(approach_s=0.3)
        with pytest.raises(NotDoneError, match="lacks an unknown number of changes"):
            await take_over(group.operator(), to="b", all_of="a", timeouts=timeouts)
        assert group.map("a") == before


async def test_a_takeover_by_a_replica_that_stays_far_behind_changes_nothing() -> None:
    async with running_servers("ab") as group:
        before = group.map("a")
        cluster: Any = group.servers["b"].partition_maps
        await cluster.stop()
        await group.set("a", {f"key {n}": "v" for n in range(HANDOVER_LAG_CHANGES + 1)})
        timeouts = TakeoverTimeouts(approach_s=0.3)
        with pytest.raises(NotDoneError, match="b does not come close to a: it lacks 257 changes"):
            await take_over(group.operator(), to="b", all_of="a", timeouts=timeouts)
        assert group.progress == ["b is behind a; waiting until it is close"]
        assert group.states("a") == ACTIVE
        assert group.map("a") == before
        group.check()


async def test_an_interrupted_takeover_may_be_undone_or_redirected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupter = MapInterrupter(monkeypatch)
    async with running_servers("abc") as group:
        before = logs(group, "a")
        for to in "ac":
            interrupter.reset(1)
            with interrupter.scope:
                await take_over(group.operator(), to="b", all_of="a")
            assert group.states("a") == PENDING
            interrupter.stop_at = -1
            await take_over(group.operator("b"), to=to, all_of="a")
            assert group.states(to) == ACTIVE
            # Nobody knows that `b` was not active meanwhile, and killed.
            assert [len(log) for log in logs(group, to)] == [len(log) + 1 for log in before]
            before = logs(group, to)
            group.check()


async def test_a_resumed_takeover_begins_new_histories_if_a_suspect_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupter = MapInterrupter(monkeypatch)
    async with running_servers("abc") as group:
        before = logs(group, "a")
        interrupter.reset(1)
        with interrupter.scope:
            await take_over(group.operator(), to="b", all_of="a")
        interrupter.stop_at = -1
        # It was told, and nobody knows.
        group.proxies["b"].half_open()
        group.proxies["b"].cut()
        handover_map = group.map("a")
        active = [
            active_assignment(assignment, "b", HistoryPoint(log.current, high))
            for assignment, log, high in zip(
                handover_map.partitions, before, highs(group, "a"), strict=True
            )
        ]
        await group.set_map("b", handover_map.revision + 1, dict(enumerate(active)), handover_map)
        assert group.states("b") == ACTIVE
        operator = group.operator(ask_timeout_s=0.5, apply_timeout_s=0.5)
        await take_over(operator, to="c", all_of="a")
        assert group.states("c") == ACTIVE
        assert all(len(log) == 2 for log in logs(group, "c"))
        group.check()
        group.proxies["b"].heal()
        await group.until(lambda: group.states("b") == REPLICA)
        group.check()


@pytest.mark.parametrize("to", ["b", "c", "a"])
async def test_a_resumed_takeover_keeps_a_node_that_became_active_meanwhile(
    monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    async with running_servers("abc") as group:
        scenario = ResumedTakeover(group, monkeypatch, to)
        refusal = await scenario.resume()
        partition = scenario.partition
        other_partitions = partitions_text(n for n in range(PARTITIONS) if n != partition)
        assert (
            f"so b is active for partition {partition} and " in refusal
            or f"so a is active again for {other_partitions} and " in refusal
        )
        group.check()
        assert await group.get("b", "acknowledged") == "1"
        assert group.map("b").partitions[partition].active == "b"
        assert all(group.map("a").partitions[n].active == "a" for n in range(4) if n != partition)
        await scenario.finish()
        assert group.states(to) == ACTIVE
        assert scenario.histories_begun() == [1] * PARTITIONS
        assert await group.get(to, "acknowledged") == "1"
        await group.until(lambda: highs(group, "a") == highs(group, "b") == highs(group, "c"))
        group.check()


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_target_that_accepted_changes_stays_active_though_its_answer_was_lost(
    monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    """Also for partitions that an interrupted command, which this one resumes, was not about."""
    count = PARTITIONS if is_resumed else 1
    partition = partition_of(b"acknowledged", count)
    async with running_servers("ab", partitions=count) as group:
        before = group.partition("a", partition).failover_log

        async def set_map(expected_revision: int, document: str) -> object:
            applied = await real(expected_revision, document)
            if group.states("b")[partition] is PartitionState.ACTIVE:
                monkeypatch.setattr(cluster, "set_map", real)
                await group.set("b", {"acknowledged": "1"})
                group.proxies["b"].half_open()
                group.proxies["b"].cut()
            return applied

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                monkeypatch.setattr(cluster, "set_map", set_map)
            if "it may or may not be active now" in sentence:
                group.proxies["b"].heal()

        if is_resumed:
            interrupter = MapInterrupter(monkeypatch)
            interrupter.reset(1)
            with interrupter.scope:
                other_partitions = set(range(PARTITIONS)) - {partition}
                await take_over(group.operator(), to="b", partitions=other_partitions)
            interrupter.stop_at = -1
        cluster = group.servers["b"].partition_maps
        real = cluster.set_map
        operator = group.operator(on_progress=on_progress, apply_timeout_s=0.3, ask_timeout_s=5)
        if is_resumed:
            with pytest.raises(NotDoneError, match=r"so a is active .* and b is active for partit"):
                await take_over(operator, to="b", all_of="a")
        else:
            await take_over(operator, to="b", all_of="a")
        assert group.states("b")[partition] is PartitionState.ACTIVE
        assert len(group.partition("b", partition).failover_log) == len(before) + 1
        assert await group.get("b", "acknowledged") == "1"
        await group.until(
            lambda: (
                group.partition("a", partition).high_seq == group.partition("b", partition).high_seq
            )
        )
        group.check()


async def test_a_takeover_from_a_node_that_stops_answering_says_what_to_do() -> None:
    async with running_servers("ab") as group:

        def on_progress(sentence: str) -> None:
            if "hands over" in sentence:
                group.proxies["a"].half_open()
                group.proxies["a"].cut()

        operator = group.operator(on_progress=on_progress, ask_timeout_s=0.3, apply_timeout_s=0.3)
        await take_over(operator, to="b", all_of="a")
        # It has handed over, and learns of it later.
        assert group.states("b") == ACTIVE
        group.proxies["a"].heal()
        await group.until(lambda: group.states("a") == REPLICA)


def operator_that_cannot_reach(group: ServerGroup, unreached: str, name: str) -> Operator:
    """An operator in another part of the network than a node, who asks the node `name` first."""

    async def dial(address: Address) -> trio.abc.Stream:
        if address.port == group.proxies[unreached].port:
            raise OSError("no route to host")
        return await dial_tcp(address)

    return group.operator(name, dial=dial)


async def test_a_takeover_that_gives_back_does_not_undo_a_failover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failover does not reach the old active, and so does not know the map that hands over. The
    map that gives back had a higher revision than the failover's, and the nodes gave up what they
    had acknowledged since."""
    set_map = NodeClient.set_map
    async with running_servers("abc") as group:
        await group.servers["b"].partition_maps.stop()
        await group.set("a", {"k": "v"})
        await group.until(lambda: highs(group, "c") == highs(group, "a"))

        async def set_map_after_failover(
            node: NodeClient, expected: int, new_map: PartitionMap
        ) -> None:
            if new_map.partitions[0].active == "a":
                monkeypatch.setattr(NodeClient, "set_map", set_map)
                await fail_over(operator_that_cannot_reach(group, "a", "c"), to="c", all_of="a")
                async with connect(group.servers["c"].url("b"), follow_map=False) as client:
                    await client.set(
                        "acknowledged", "1", durability=Durability.REPLICATED, copies=1
                    )
            await set_map(node, expected, new_map)

        monkeypatch.setattr(NodeClient, "set_map", set_map_after_failover)
        timeouts = TakeoverTimeouts(handover_s=0.1)
        with pytest.raises((NotDoneError, OvertakenError)) as refusal:
            await take_over(group.operator(), to="b", all_of="a", timeouts=timeouts)
        await group.until(lambda: group.map("a") == group.map("b") == group.map("c"))
        assert group.states("c") == ACTIVE
        assert await group.get("c", "acknowledged") == "1"
        await group.until(lambda: group.states("a") == REPLICA)
        group.check()
        assert isinstance(refusal.value, OvertakenError)


async def test_a_takeover_gives_nothing_back_once_a_failover_has_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target refuses. Before it is fenced, a failover that does not reach the old active makes
    another node active: two nodes accepted writes until the old active heard of it."""
    set_map = NodeClient.set_map
    wrong = FailoverLog.of_pairs([(HistoryId(7), SeqNo(0))])
    async with running_servers("abc") as group:
        await group.set("a", {"k": "v"})
        await group.until(lambda: highs(group, "a") == highs(group, "b") == highs(group, "c"))
        own_log = group.partition("b").failover_log

        async def set_map_after_failover(
            node: NodeClient, expected: int, new_map: PartitionMap
        ) -> None:
            if new_map.partitions[0].lost_active:
                monkeypatch.setattr(NodeClient, "set_map", set_map)
                group.partition("b").change_state(PartitionState.REPLICA, own_log)
                await fail_over(operator_that_cannot_reach(group, "a", "c"), to="c", all_of="a")
            await set_map(node, expected, new_map)

        def on_progress(sentence: str) -> None:
            if sentence.startswith("a: ") and "hands over" in sentence:
                group.before_map(
                    "b", lambda: group.partition("b").change_state(PartitionState.REPLICA, wrong)
                )

        monkeypatch.setattr(NodeClient, "set_map", set_map_after_failover)
        with pytest.raises(OvertakenError, match=r"b has revision \d{7} from another command"):
            await take_over(group.operator(on_progress=on_progress), to="b", all_of="a")
        assert not any("active again" in sentence for sentence in group.progress)
        assert group.states("a") != ACTIVE
        await group.until(lambda: group.states("a") == REPLICA)
        assert group.states("c") == ACTIVE
        group.check()
