"""Failover, with real servers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from tests.client.group_states import ACTIVE, REPLICA, highs, logs
from tests.kit.server_group import (
    BUCKET,
    PARTITIONS,
    CompetingCommands,
    MapInterrupter,
    ServerGroup,
    running_servers,
)
from tests.storage.record_damage import flip, records
from upr_protocol.client import NodeClient, connect
from upr_protocol.client.operator import (
    NotDoneError,
    OvertakenError,
    PartlyDoneError,
    add_replicas,
    fail_over,
    remove_replicas,
    take_over,
)
from upr_protocol.client.operator.plan import active_assignment, first_failover_revision
from upr_protocol.errors import ServerError
from upr_protocol.ids import Durability, PartitionId, PartitionState
from upr_protocol.partition_map import PartitionMap
from upr_server.replication import copy_completion
from upr_server.replication.bucket_replicators import BucketReplicators
from upr_server.replication.map_exchange import MapExchange
from upr_server.replication.partition_maps import PartitionMaps
from upr_server.replication.replicator import Replicator
from upr_server.storage.offline.mend import empty_damaged_replicas
from upr_server.storage.records import PARTITION, partition_key


async def filled(group: ServerGroup) -> None:
    async with connect(group.servers["a"].url("b")) as client:
        for index in range(20):
            await client.set(
                f"key {index}",
                "v",
                durability=Durability.REPLICATED,
                copies=len(group.servers) - 1,
            )


async def test_a_replica_becomes_active_and_the_old_active_follows() -> None:
    async with running_servers("abc") as group:
        await filled(group)
        before = logs(group, "a")
        await group.stop("a")
        operator = group.operator("c", draw_command=lambda: "1")
        await fail_over(operator, all_of="a", to="b")
        assert group.states("b") == ACTIVE
        assert all(
            len(log) == len(old_log) + 1
            for log, old_log in zip(logs(group, "b"), before, strict=True)
        )
        assert await group.get("b", "key 7") == "v"
        await group.set("b", {"after": "1"})
        await group.start("a")
        await group.until(lambda: group.states("a") == REPLICA)
        await group.until(lambda: highs(group, "a") == highs(group, "b") == highs(group, "c"))
        group.check()
        assert group.progress[0] == "b, c: revision 1048576, fenced for partitions 0-3"
        assert group.progress[1] == "b: revision 1253377, active for partitions 0-3"


async def test_without_a_target_the_partitions_are_shared_out() -> None:
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("a")
        await fail_over(group.operator("b"), all_of="a")
        assert [assignment.active for assignment in group.map("c").partitions] == [
            "b",
            "c",
            "b",
            "c",
        ]
        assert group.map("b") == group.map("c")
        group.check()


async def test_impossible_failovers_are_refused() -> None:
    async with running_servers("abc") as group:
        await filled(group)
        with pytest.raises(
            NotDoneError, match="a is running, and is active for partitions 0-3: use `upr take"
        ):
            await fail_over(group.operator("b"), all_of="a", to="b")
        await group.stop("a")
        await group.stop("c")
        operator = group.operator("b", apply_timeout_s=0.5, ask_timeout_s=0.5)
        with pytest.raises(NotDoneError, match=r"too few replicas of partitions 0-3 .*\(c\) may"):
            await fail_over(operator, all_of="a", to="b")
        with pytest.raises(NotDoneError, match="c is needed, but cannot be reached"):
            await fail_over(operator, all_of="a", to="c")
        with pytest.raises(NotDoneError, match="x has no copy of partition 0"):
            await fail_over(operator, partitions=[0], to="x")
        assert group.map("b").revision == 32
        await fail_over(operator, partitions=[0], acknowledged=2)
        assert group.progress[1] == (
            "c may take writes, too, for partition 0, if another failover reaches them: run no "
            "other one before they answer, or one of the two loses what it accepts"
        )
        group.progress.clear()
        await fail_over(operator, partitions=[1, 2, 3], lose_acknowledged=True)
        assert group.states("b") == ACTIVE
        assert group.progress[1] == (
            "c may take writes, too, for partitions 1-3, if another failover reaches them: run no "
            "other one before they answer, or one of the two loses what it accepts"
        )


async def test_a_replica_that_is_behind_is_not_promoted() -> None:
    async with running_servers("abc") as group:
        cluster = group.servers["b"].partition_maps
        await cluster.stop()
        async with connect(group.servers["a"].url("b")) as client:
            for index in range(20):
                await client.set(f"key {index}", "v", durability=Durability.REPLICATED, copies=1)
        await group.stop("a")
        operator = group.operator("c")
        with pytest.raises(
            NotDoneError, match=r"partition 0: b has less than c;.* and 1 more\. Choose"
        ):
            await fail_over(operator, all_of="a", to="b")
        # Everything is owned as before.
        assert {assignment.active for assignment in group.map("b").partitions} == {"a"}
        assert group.states("b") == group.states("c") == REPLICA
        await fail_over(operator, partitions=[0, 1])
        assert group.states("c")[:2] == ACTIVE[:2]
        await fail_over(operator, partitions=[2, 3], to="b", lose_acknowledged=True)
        assert group.states("b")[2:] == ACTIVE[2:]
        await group.until(lambda: highs(group, "b") == highs(group, "c"))
        group.check()


def damage_partition_0(data_dir: Path) -> None:
    """Damages the record of the partition 0 of a node that is stopped."""
    bucket = data_dir / "buckets" / "b"
    for key in records(bucket, partition_key(PARTITION, PartitionId(0))):
        flip(bucket, key, 100)


async def test_a_replica_that_refuses_its_copy_does_not_count_as_fenced(tmp_path: Path) -> None:
    """Its copy alone has what was acknowledged, and the other replica must not be chosen."""
    async with running_servers("abc", directory=tmp_path) as group:
        await group.servers["b"].partition_maps.stop()
        async with connect(group.servers["a"].url("b")) as client:
            for index in range(20):
                await client.set(f"key {index}", "v", durability=Durability.REPLICATED, copies=1)
        await group.stop("a")
        await group.stop("c")
        damage_partition_0(tmp_path / "c")
        await group.start("c")
        assert group.states("c")[0] is PartitionState.DEAD
        operator = group.operator("b")
        with pytest.raises(NotDoneError, match="too few replicas of partition 0 "):
            await fail_over(operator, partitions=[0])
        assert any(
            line.startswith("c is fenced, but does not serve its copies of partition 0")
            for line in group.progress
        )
        assert group.map("b").partitions[0].active == "a", "the assignment was put back"
        # The other partitions of the node are intact, and have more than b has.
        await fail_over(operator, partitions=[1, 2, 3])
        assert group.states("c")[1:] == ACTIVE[1:]


async def test_a_failover_that_finds_no_copy_puts_the_assignment_back(tmp_path: Path) -> None:
    """Also if it may lose what was acknowledged: the old active may come back."""
    async with running_servers("ab", directory=tmp_path) as group:
        await filled(group)
        await group.stop("a")
        await group.stop("b")
        damage_partition_0(tmp_path / "b")
        await group.start("b")
        with pytest.raises(NotDoneError, match="no node that answers has a copy of partition 0"):
            await fail_over(group.operator("b"), partitions=[0], lose_acknowledged=True)
        assert group.map("b").partitions[0].active == "a"
        await group.start("a")
        await group.until(lambda: group.states("a") == ACTIVE)


async def test_a_replica_that_has_lost_its_disk_does_not_count() -> None:
    """It alone had what was acknowledged. A fence would give it an empty copy, and the other
    replica would pass for the most complete one."""
    async with running_servers("abc") as group:
        await group.servers["c"].partition_maps.stop()
        async with connect(group.servers["a"].url("b")) as client:
            for index in range(20):
                await client.set(f"key {index}", "v", durability=Durability.REPLICATED, copies=1)
        await group.stop("a")
        await group.stop("b")
        await group.start("b", is_empty=True)
        operator = group.operator("c")
        for _ in range(2):
            with pytest.raises(NotDoneError, match=r"too few replicas of partitions 0-3 .*\(b\)"):
                await fail_over(operator, all_of="a")
        assert group.progress[0] == (
            "b answers, but has lost its copy of the bucket: it counts as missing"
        )
        with pytest.raises(NotDoneError, match="b has lost its copy of the bucket: choose another"):
            await fail_over(operator, all_of="a", to="b", lose_acknowledged=True)
        await group.start("a")
        await group.until(lambda: group.states("a") == ACTIVE)
        assert await group.get("a", "key 7") == "v"


async def added_it_is_not_chosen(
    group: ServerGroup, monkeypatch: pytest.MonkeyPatch, address: str = ""
) -> None:
    """Adds `b`, which then copies nothing. It is not chosen without `c`, which has everything."""
    with monkeypatch.context() as patch:
        patch.setattr(BucketReplicators, "start_missing", lambda *_arguments: None)
        await add_replicas(group.operator(), "b", address)
    await group.stop("a")
    await group.stop("c")
    operator = group.operator("b", ask_timeout_s=0.5)
    with pytest.raises(NotDoneError, match="partition 0: b lacks changes that the active"):
        await fail_over(operator, all_of="a", acknowledged=2)
    await group.start("c")
    await fail_over(group.operator("b"), all_of="a", acknowledged=2)
    assert group.states("c") == ACTIVE
    assert await group.get("c", "key 7") == "v"


async def test_a_replica_that_copies_the_bucket_again_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishers wait for two copies, so one of two replicas may be missing. The other one had lost
    its disk, and was added again."""
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("b")
        await group.start("b", is_empty=True)
        await added_it_is_not_chosen(group, monkeypatch)


async def test_a_replica_that_was_removed_and_added_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the operations guide has a node copy a bucket again. By the map it is then a replica like
    the other one, which alone has what was acknowledged."""
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("b")
        await group.start("b", is_empty=True)
        await remove_replicas(group.operator(), "b")
        await added_it_is_not_chosen(group, monkeypatch, f"127.0.0.1:{group.proxies['b'].port}")


def is_incomplete(group: ServerGroup, node: str) -> bool:
    """Whether a node may lack what it once acknowledged of some partition."""
    return any(group.partition(node, number).is_incomplete for number in range(PARTITIONS))


async def lost_it_is_not_chosen(group: ServerGroup) -> None:
    """`b` becomes a replica again, and copies nothing. It is not chosen without `c`, which has
    everything; neither after another start."""
    await group.until(lambda: group.states("b") == REPLICA)
    await group.stop("a")
    await group.stop("c")
    for _ in range(2):
        operator = group.operator("b", ask_timeout_s=0.5)
        report = (await operator.survey()).nodes["b"]
        assert report.state_of(PartitionId(0)) is PartitionState.PENDING
        with pytest.raises(NotDoneError, match=r"too few replicas of partition 0 .* \(b, c\)"):
            await fail_over(operator, partitions=[0], acknowledged=2)
        assert (
            "b is fenced, but has lost its copy of partition 0, and has not yet copied all of it "
            "again: it counts as missing" in group.progress
        )
        group.progress.clear()
        assert group.map("b").partitions[0].active == "a", "the assignment was put back"
        await group.stop("b")
        await group.start("b", has_bucket=True)
        assert group.states("b") == REPLICA
    await group.start("c")
    # The other partitions of a node that was mended are complete.
    await fail_over(group.operator("b"), all_of="a", to="c", acknowledged=2)
    assert group.states("c") == ACTIVE
    assert await group.get("c", "key 7") == "v"


async def refilled_it_is_chosen(group: ServerGroup) -> None:
    """Starts `b`, which copies from `c` again what it lacks, and counts from then on."""
    await group.stop("b")
    await group.start("b", has_bucket=True)
    await group.until(lambda: not is_incomplete(group, "b"))
    # As a node that was complete when it stopped.
    await group.stop("b")
    await group.start("b", has_bucket=True)
    await group.stop("c")
    await fail_over(group.operator("b", ask_timeout_s=0.5), all_of="c", acknowledged=2)
    assert group.states("b") == ACTIVE
    assert await group.get("b", "key 7") == "v"


async def test_a_bucket_that_was_made_again_by_configuration_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk was replaced. Nobody has changed the map, which names the node as a replica."""
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("b")
        with monkeypatch.context() as patch:
            patch.setattr(BucketReplicators, "start_missing", lambda *_arguments: None)
            await group.start("b", has_bucket=True, is_empty=True)
            await lost_it_is_not_chosen(group)
        await refilled_it_is_chosen(group)


async def test_a_partition_that_was_mended_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with running_servers("abc", directory=tmp_path) as group:
        await filled(group)
        await group.stop("b")
        damage_partition_0(tmp_path / "b")
        assert [damaged.is_emptied for damaged in empty_damaged_replicas(tmp_path / "b")] == [True]
        with monkeypatch.context() as patch:
            patch.setattr(BucketReplicators, "start_missing", lambda *_arguments: None)
            await group.start("b")
            await lost_it_is_not_chosen(group)
        await refilled_it_is_chosen(group)


async def test_a_replica_that_was_away_for_too_long_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The active node has forgotten deletions meanwhile, and has it begin again at 0."""
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("b")
        async with connect(group.servers["a"].url("b")) as client:
            for index in range(100):
                await client.set(f"later {index}", "v", durability=Durability.REPLICATED, copies=1)
        for number in range(PARTITIONS):
            partition = group.partition("a", number)
            partition.purge_seq = partition.high_seq
        with monkeypatch.context() as patch:
            patch.setattr(Replicator, "_receive", lambda *_arguments: None)
            await group.start("b")
            await group.until(lambda: highs(group, "b") == [0] * PARTITIONS)
            await group.stop("b")
            patch.setattr(BucketReplicators, "start_missing", lambda *_arguments: None)
            await group.start("b")
            await lost_it_is_not_chosen(group)
        await refilled_it_is_chosen(group)


async def index_all(group: ServerGroup, node: str) -> None:
    """Has a node index everything that it has: then it can undo nothing of it without copying the
    partition again."""
    server = group.servers[node]
    maintenance = server.catalog.disks[server.catalog.bucket(BUCKET)].maintenance
    maintenance.undo_mutations = 0
    maintenance.wake()
    await group.until(
        lambda: all(
            group.partition(node, number).eviction.indexed_seq == high
            for number, high in enumerate(highs(group, node))
        )
    )


async def test_a_replica_that_rolled_back_to_0_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new active node has it undo changes that its index contains, so it copies everything
    again. It stores no mark. The map has the point at which the history began: up to there it may
    have acknowledged changes. Above, it has acknowledged nothing that another replica lacks."""
    async with running_servers("abcd") as group:
        await filled(group)
        await group.stop("b")
        await group.stop("d")
        await group.set("a", {f"undone {index}": "v" for index in range(40)})
        await group.until(lambda: highs(group, "c") == highs(group, "a"))
        await index_all(group, "c")
        await group.stop("a")
        await group.stop("c")
        await group.start("b")
        await group.start("d")
        await fail_over(group.operator("b"), all_of="a", to="b", acknowledged=3)
        assert all(highs(group, "b")), "a rollback to 0 is one to less than the ceiling"
        async with connect(group.servers["b"].url("b")) as client:
            await client.set("later", "v", durability=Durability.REPLICATED, copies=1)
        with monkeypatch.context() as patch:
            patch.setattr(Replicator, "_receive", lambda *_arguments: None)
            await group.start("c")
            await group.until(lambda: highs(group, "c") == [0] * PARTITIONS)
            assert not is_incomplete(group, "c")
            await group.stop("b")
            await group.stop("d")
            operator = group.operator("c", ask_timeout_s=0.5)
            with pytest.raises(NotDoneError, match="partition 0: c lacks changes that the active"):
                await fail_over(operator, all_of="b", acknowledged=3)
            await group.start("d")
            await fail_over(group.operator("d"), all_of="b", acknowledged=2)
        assert group.states("d") == ACTIVE
        assert await group.get("d", "later") == "v"
        assert await group.get("d", "undone 7") is None


async def test_a_replica_with_an_old_map_that_rolled_back_to_0_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The active node is the one that its map names, and has been replaced and come back meanwhile:
    the map does not have the point at which the new history began. Its index contains what it has
    to undo, so it copies everything again. It alone can be asked then."""
    exchange_maps = MapExchange.run

    async def exchange_unless_c(exchange: MapExchange) -> None:
        if exchange._partition_maps.node == "c":
            await trio.sleep_forever()
        await exchange_maps(exchange)

    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("b")
        await group.set("a", {f"undone {index}": "v" for index in range(40)})
        await group.until(lambda: highs(group, "c") == highs(group, "a"))
        await index_all(group, "c")
        await group.stop("a")
        await group.stop("c")
        await group.start("b")
        await fail_over(group.operator("b", ask_timeout_s=0.5), all_of="a", acknowledged=2)
        await group.start("a")
        await group.until(lambda: highs(group, "a") == highs(group, "b"))
        await take_over(group.operator("b", ask_timeout_s=0.5), all_of="b", to="a")
        with monkeypatch.context() as patch:
            patch.setattr(MapExchange, "run", exchange_unless_c)
            patch.setattr(Replicator, "_receive", lambda *_arguments: None)
            await group.start("c")
            await group.until(lambda: highs(group, "c") == [0] * PARTITIONS)
            assert group.map("c").revision < group.map("a").revision
            await group.stop("a")
            await group.stop("b")
            with pytest.raises(NotDoneError, match=r"too few replicas of partitions 0-3 .*c\)"):
                await fail_over(group.operator("c", ask_timeout_s=0.5), all_of="a", acknowledged=2)
        await group.stop("c")
        await group.start("a")
        await group.start("c")
        await group.until(lambda: not is_incomplete(group, "c"))
        assert highs(group, "c") == highs(group, "a")
        assert await group.get("a", "key 7") == "v"


@pytest.mark.parametrize("has_changes", [True, False])
async def test_an_old_copy_does_not_replace_a_bucket_that_was_created_anew(
    monkeypatch: pytest.MonkeyPatch, has_changes: bool
) -> None:
    """`a` was away while the bucket was deleted at `b`, and created again by a command. It finds a
    node without the map that it has, as if the node's disk was lost."""
    adopt_map_from = PartitionMaps.adopt_map_from
    refusals: list[ServerError] = []

    async def noted_adoption(maps: PartitionMaps, *arguments: Any) -> Any:
        try:
            return await adopt_map_from(maps, *arguments)
        except ServerError as error:
            refusals.append(error)
            raise

    monkeypatch.setattr(PartitionMaps, "adopt_map_from", noted_adoption)
    async with running_servers("ab") as group:
        await filled(group)
        await take_over(group.operator("b"), all_of="a", to="b")
        await group.stop("a")
        async with connect(group.servers["b"].url()) as client:
            await client.delete_bucket(BUCKET)
            await client.create_bucket(BUCKET, PARTITIONS)
        async with connect(group.servers["b"].url(BUCKET), follow_map=False) as client:
            if has_changes:
                await client.set("new", "v", durability=Durability.PERSISTED)
        await group.start("a")
        await group.until(lambda: bool(refusals))
        assert "is another one than that of node b, which was created anew" in refusals[0].sentence
        assert group.servers["b"].partition_maps.map_of(BUCKET) is None
        assert group.states("b") == ACTIVE
        assert await group.get("b", "new") == ("v" if has_changes else None)
        assert await group.get("b", "key 7") is None
        async with connect(group.servers["a"].url()) as client:
            await client.delete_bucket(BUCKET)
        assert BUCKET not in group.servers["a"].catalog.buckets


async def test_of_two_failovers_that_reach_different_nodes_each_names_the_other_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishers wait for both replicas, so one replica is enough for each of the two. By chance
    their maps have the same revision. The node that was restarted meanwhile becomes active no
    more."""
    confirm = MapExchange._confirm
    confirming_nodes: list[str] = []

    async def noted_confirm(exchange: MapExchange, *arguments: Any) -> None:
        await confirm(exchange, *arguments)
        confirming_nodes.append(exchange._partition_maps.node)

    async with running_servers("abc") as group:
        await filled(group)
        for node in "abc":
            await group.stop(node)
        for node, other, name in ("b", "c", "15"), ("c", "b", "17"):
            group.progress.clear()
            await group.start(node)
            operator = group.operator(node, ask_timeout_s=0.5, draw_command=lambda n=name: n)
            await fail_over(operator, all_of="a", acknowledged=2)
            assert group.progress[1].startswith(f"{other} may take writes, too, for partitions 0-3")
            assert group.states(node) == ACTIVE
            async with connect(group.servers[node].url("b"), follow_map=False) as client:
                await client.set(f"by {node}", "v", durability=Durability.PERSISTED)
            if node == "b":
                await group.stop("b")
        monkeypatch.setattr(MapExchange, "_confirm", noted_confirm)
        await group.start("b")
        await group.until(lambda: confirming_nodes.count("b") >= 2)
        assert group.states("b") == [PartitionState.PENDING] * PARTITIONS
        assert group.states("c") == ACTIVE
        assert group.map("b").revision == group.map("c").revision
        assert await group.get("c", "by c") == "v"


async def test_an_incomplete_copy_is_chosen_if_acknowledged_changes_may_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_servers("ab") as group:
        await filled(group)
        await group.stop("b")
        monkeypatch.setattr(BucketReplicators, "start_missing", lambda *_arguments: None)
        await group.start("b", has_bucket=True, is_empty=True)
        await group.until(lambda: group.states("b") == REPLICA)
        await group.stop("a")
        operator = group.operator("b", ask_timeout_s=0.5)
        with pytest.raises(NotDoneError, match=r"too few replicas of partitions 0-3 .* \(b\)"):
            await fail_over(operator, all_of="a")
        await fail_over(operator, all_of="a", lose_acknowledged=True)
        assert group.states("b") == ACTIVE
        assert not any("may take writes, too" in line for line in group.progress)
        await group.set("b", {"after": "1"})


async def test_a_copy_that_follows_a_replica_is_complete_with_what_the_active_node_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the other replica has proves nothing: it may itself lack what this one had
    acknowledged. The mark stayed until the copy followed the active node."""
    receive = Replicator._receive

    def receive_unless_c(replicator: Replicator, *arguments: Any) -> None:
        if replicator._node != "c":
            receive(replicator, *arguments)

    monkeypatch.setattr(copy_completion, "ASK_INTERVAL_S", 0.05)
    note_active_numbers, asked_counts = PartitionMaps.note_active_numbers, Counter[str]()

    def count_answers(partition_maps: PartitionMaps, *arguments: Any) -> None:
        asked_counts[partition_maps.node] += 1
        note_active_numbers(partition_maps, *arguments)

    monkeypatch.setattr(PartitionMaps, "note_active_numbers", count_answers)
    async with running_servers("abc") as group:
        await filled(group)
        with monkeypatch.context() as patch:
            patch.setattr(Replicator, "_receive", receive_unless_c)
            async with connect(group.servers["a"].url("b")) as client:
                for index in range(20):
                    await client.set(
                        f"later {index}", "v", durability=Durability.REPLICATED, copies=1
                    )
            await group.stop("b")
            base = group.map("a")
            following_c = {
                number: msgspec.structs.replace(assignment, replicas={"b": "c", "c": ""})
                for number, assignment in enumerate(base.partitions)
            }
            for node in "ac":
                await group.set_map(node, base.revision + 16, following_c, base)
            await group.start("b", has_bucket=True, is_empty=True)
            await group.until(lambda: group.states("b") == REPLICA)
            await group.until(lambda: highs(group, "b") == highs(group, "c"))
            answers_before = asked_counts["b"]
            await group.until(lambda: asked_counts["b"] > answers_before + 2)
            assert highs(group, "b") == highs(group, "c") != highs(group, "a")
            assert all(group.partition("b", number).is_incomplete for number in range(PARTITIONS))
            await group.stop("c")
        await group.start("c")
        await group.until(lambda: highs(group, "b") == highs(group, "a"))
        await group.until(lambda: not is_incomplete(group, "b"))
        assert group.states("b") == REPLICA
        assert set(asked_counts) == {"b"}
        # It is so on disk, too.
        await group.stop("b")
        await group.start("b", has_bucket=True)
        assert not is_incomplete(group, "b")


async def test_a_copy_that_another_replica_had_undo_changes_is_not_chosen_before_it_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`a` alone had acknowledged a change in a new history. Then it followed `c`, which had not
    heard of that history, and was made to follow the active node again."""
    start_missing = BucketReplicators.start_missing

    def start_unless_c(replicators: BucketReplicators, *arguments: Any) -> None:
        if replicators._node != "c":
            start_missing(replicators, *arguments)

    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("c")
        await group.stop("a")
        await fail_over(group.operator("b", ask_timeout_s=0.5), all_of="a", acknowledged=2)
        await group.start("a")
        async with connect(group.servers["b"].url("b")) as client:
            for index in range(20):
                await client.set(f"later {index}", "v", durability=Durability.REPLICATED, copies=1)
        with monkeypatch.context() as patch:
            patch.setattr(BucketReplicators, "start_missing", start_unless_c)
            await group.start("c")
            await add_replicas(group.operator("b"), "a", source="c")
            await group.until(lambda: highs(group, "a") == highs(group, "c"))
            patch.setattr(Replicator, "_receive", lambda *_arguments: None)
            await add_replicas(group.operator("b"), "a")
            await group.stop("b")
            with pytest.raises(NotDoneError, match=r"too few replicas of partitions 0-3 .*a\)"):
                await fail_over(group.operator("a", ask_timeout_s=0.5), all_of="b")
        await group.start("b")
        await group.until(lambda: group.states("b") == ACTIVE)
        await group.stop("a")
        await group.start("a")
        await group.until(lambda: not is_incomplete(group, "a"))
        await group.stop("b")
        await fail_over(group.operator("a", ask_timeout_s=0.5), all_of="b")
        assert await group.get("a", "later 7") == "v"


async def test_a_new_replica_that_still_copies_does_not_keep_another_from_being_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has acknowledged nothing that the other one lacks."""
    async with running_servers("ab") as group:
        await filled(group)
        await group.start_apart("c")
        monkeypatch.setattr(BucketReplicators, "start_missing", lambda *_arguments: None)
        await add_replicas(group.operator(), "c", f"127.0.0.1:{group.proxies['c'].port}")
        await group.stop("a")
        await fail_over(group.operator("b"), all_of="a")
        assert group.states("b") == ACTIVE
        assert await group.get("b", "key 7") == "v"


async def test_a_replica_of_an_empty_bucket_that_lost_its_disk_lacks_nothing() -> None:
    async with running_servers("ab") as group:
        await group.stop("b")
        await group.start("b", has_bucket=True, is_empty=True)
        await group.until(lambda: group.states("b") == REPLICA)
        await group.until(lambda: not is_incomplete(group, "b"))
        await group.stop("a")
        await fail_over(group.operator("b"), all_of="a")
        assert group.states("b") == ACTIVE


@pytest.mark.parametrize("names", [("1", "2"), ("2", "1")])
async def test_of_two_active_nodes_one_steps_down_when_they_meet(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """Two failovers on the two sides of a broken network have both made a node active. The higher
    revision counts, and the commands' names say which that is."""
    fetch, is_cut = MapExchange._fetch, True

    async def fetch_unless_cut(exchange: MapExchange, *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return None if is_cut else await fetch(exchange, *arguments)

    monkeypatch.setattr(MapExchange, "_fetch", fetch_unless_cut)
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("a")
        for node, other, name in ("b", "c", names[0]), ("c", "b", names[1]):
            target = group.proxies[other]._target
            group.proxies[other]._target = ("127.0.0.1", 1)
            group.proxies[other].cut()
            operator = group.operator(node, ask_timeout_s=0.5, draw_command=lambda n=name: n)
            await fail_over(operator, all_of="a", acknowledged=2)
            await group.set(node, {f"by {node}": "v"})
            group.proxies[other]._target = target
        assert group.states("b") == group.states("c") == ACTIVE
        revisions = {node: group.map(node).revision for node in "bc"}
        assert revisions["b"] != revisions["c"]
        winner, loser = sorted("bc", key=revisions.__getitem__, reverse=True)
        is_cut = False
        await group.until(lambda: group.states(loser) == REPLICA)
        assert group.states(winner) == ACTIVE
        for key, value in (f"by {winner}", "v"), (f"by {loser}", None), ("key 7", "v"):
            assert await group.get(winner, key) == value
        await group.until(lambda: highs(group, loser) == highs(group, winner))
        assert logs(group, loser) == logs(group, winner)
        group.check()


async def test_a_failover_ends_if_a_fenced_node_has_followed_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What that node has acknowledged since for the other one's active node may be nowhere else
    among the nodes that this failover has fenced."""
    set_map = NodeClient.set_map
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("a")

        async def set_map_after_adoption(
            node: NodeClient, expected: int, new_map: PartitionMap
        ) -> None:
            if new_map.revision > first_failover_revision(0):
                monkeypatch.setattr(NodeClient, "set_map", set_map)
                base = group.map("c")
                assignments = {
                    PartitionId(partition): active_assignment(base.partitions[partition], "c")
                    for partition in range(PARTITIONS)
                }
                other_map = base.with_assignments(assignments, base.revision + 1, "other")
                await group.servers["c"].partition_maps.adopt_map(other_map)
            await set_map(node, expected, new_map)

        monkeypatch.setattr(NodeClient, "set_map", set_map_after_adoption)
        with pytest.raises(OvertakenError, match="c has revision 1048577 from another command"):
            await fail_over(group.operator("b"), to="b", all_of="a")
        assert group.states("b") == REPLICA


@pytest.mark.parametrize("order_of_tasks", range(4))
async def test_of_two_failovers_at_the_same_time_one_at_most_makes_a_node_active(
    monkeypatch: pytest.MonkeyPatch, order_of_tasks: int
) -> None:
    """Both have looked at the nodes before either changes anything, and their maps have the same
    revisions. If each has fenced one of the nodes, both end."""
    commands = CompetingCommands(monkeypatch)
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("a")
        await commands.run(
            lambda: fail_over(group.operator("b"), to="b", all_of="a"),
            lambda: fail_over(group.operator("c"), to="c", all_of="a"),
        )
        group.check()
        assert commands.errors
        for error in commands.errors:
            assert isinstance(error, OvertakenError)
            assert "has revision 1048576 from another command" in str(error)
        active_nodes = [node for node in "bc" if PartitionState.ACTIVE in group.states(node)]
        assert len(active_nodes) == 2 - len(commands.errors)
        if not active_nodes:
            await fail_over(group.operator("b"), to="b", all_of="a")
            active_nodes = ["b"]
        (active_node,) = active_nodes
        assert group.states(active_node) == ACTIVE
        assert await group.get(active_node, "key 7") == "v"


async def test_an_interrupted_failover_is_resumed_by_the_same_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupter = MapInterrupter(monkeypatch)
    async with running_servers("abc") as group:
        await filled(group)
        up = "abc"
        interrupted = 0
        refusals: list[str] = []
        for stop_at in range(14):
            old_active, new_active, replica = list(up)
            await group.stop(old_active)
            interrupter.reset(stop_at)
            with interrupter.scope:
                await fail_over(group.operator(replica), all_of=old_active, to=new_active)
            group.check()
            interrupter.stop_at = -1
            if interrupter.scope.cancelled_caught:
                interrupted += 1
                if any(
                    assignment.active != new_active for assignment in group.map(replica).partitions
                ):
                    try:
                        await fail_over(group.operator(replica), all_of=old_active, to=new_active)
                    except NotDoneError as error:
                        # Another node knew of the last map.
                        refusals.append(str(error))
            await group.until(lambda new_active=new_active: group.states(new_active) == ACTIVE)  # type: ignore[misc]
            group.check()
            await group.set(new_active, {"key": str(stop_at)})
            await group.start(old_active)
            await group.until(lambda old_active=old_active: group.states(old_active) == REPLICA)  # type: ignore[misc]
            await group.until(lambda: highs(group, "a") == highs(group, "b") == highs(group, "c"))
            group.check()
            up = new_active + replica + old_active
            if not interrupter.scope.cancelled_caught:
                break
        assert interrupted >= 5
        assert all("is not active for any partition" in reason for reason in refusals)


async def test_a_restarted_node_without_its_peers_is_promoted_only_with_losses() -> None:
    async with running_servers("ab") as group:
        await filled(group)
        await group.stop("b")
        await group.stop("a")
        await group.start("a")
        assert group.states("a") == [PartitionState.PENDING] * PARTITIONS
        operator = group.operator("a", apply_timeout_s=0.5, ask_timeout_s=0.5)
        with pytest.raises(NotDoneError, match="too few replicas"):
            await fail_over(operator, all_of="a", to="a")
        await fail_over(operator, all_of="a", to="a", lose_acknowledged=True)
        assert group.states("a") == ACTIVE
        assert await group.get("a", "key 3") == "v"
        await group.start("b")
        await group.until(lambda: highs(group, "a") == highs(group, "b"))
        group.check()


async def test_a_failover_whose_target_disappears_says_what_to_do() -> None:
    async with running_servers("abc") as group:
        await filled(group)
        await group.stop("a")

        def on_progress(sentence: str) -> None:
            if "fenced for" in sentence:
                group.proxies["b"].half_open()
                group.proxies["b"].cut()

        operator = group.operator(
            "c", on_progress=on_progress, apply_timeout_s=0.5, ask_timeout_s=0.5
        )
        with pytest.raises(
            PartlyDoneError, match="until then no node is active for partitions 0-3"
        ):
            await fail_over(operator, all_of="a", to="b")
        with pytest.raises(NotDoneError, match="too few replicas"):
            await fail_over(operator, all_of="a", to="c")
        group.proxies["b"].heal()
        await fail_over(group.operator("c"), all_of="a")
        active = [assignment.active for assignment in group.map("b").partitions]
        assert active == ["b", "c", "b", "c"]
        group.check()


async def test_an_old_active_that_was_cut_off_becomes_a_replica() -> None:
    async with running_servers("abc") as group:
        await filled(group)
        group.proxies["a"].half_open()
        group.proxies["a"].cut()
        operator = group.operator("b", apply_timeout_s=0.5, ask_timeout_s=0.5)
        await fail_over(operator, all_of="a", to="b")
        # It asks the others, and learns that it is active no more.
        with trio.fail_after(10):
            await group.until(lambda: group.states("a") == REPLICA)
        group.check()
