"""Failovers and handovers: the histories, data and answers of the next active node. Several servers
with sockets and simulated disks."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from random import Random

import attrs
import msgspec
import pytest
import trio

from tests.kit.answer_tokens import tokens_above
from tests.kit.cluster import TestCluster, cluster, enumerate_partitions
from tests.kit.effort import effort
from tests.kit.process import eventually
from tests.replication.written_cluster import (
    P,
    check_copies_are_equal,
    has_reached,
    is_indexed,
    key_in,
    states,
    write,
)
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.client import (
    Address,
    NodeClient,
    connect,
    publisher,
)
from upr_protocol.client.core.resume_state import ROLLBACK_PENDING
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.partition_map import Assignment, HistoryPoint
from upr_server.engine import Partition, WriterToken, batch_of
from upr_server.engine.publisher_answers import BATCHES_MAX
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.calls import Commit
from upr_server.storage.online.flusher import Flusher


async def test_an_active_that_was_failed_over_comes_back_as_replica() -> None:
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        await group.nodes["a"].kill()
        await group.fail_over("a", Random(1))
        actives = {assignment.active for assignment in group.map.partitions}
        assert "a" not in actives
        await group.start("a")
        await check_copies_are_equal(group)
        assert {p.state for p in group.nodes["a"].held} == {PartitionState.REPLICA}


@pytest.mark.parametrize("undo_mutations", [0, 64 * 1024])
async def test_a_replica_undoes_changes_that_the_new_active_never_had(
    undo_mutations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is ahead of the new active node undoes exactly these changes if they are not
    indexed. Otherwise it copies the partition from 0."""
    new_histories: list[HistoryId] = []
    run = Commit.run

    def record_histories(commit: Commit, bucket: BucketStorage) -> dict[int, str]:
        new_histories.extend(
            HistoryId(history)
            for write in commit.writes
            for history, _ in write.record.failover_log
        )
        return run(commit, bucket)

    monkeypatch.setattr(Commit, "run", record_histories)
    async with cluster(undo_mutations=undo_mutations) as group:
        await write(group, "a", 100)
        await group.quiet()
        # `c` receives nothing more: `a`, which it follows, is down when `c` starts again.
        await group.nodes["c"].kill()
        await write(group, "a", 50, "lost")
        for partition in range(P):
            a, b = group.nodes["a"].held[partition], group.nodes["b"].held[partition]
            await eventually(partial(has_reached, b, a.high_seq), "b has it too")
        if not undo_mutations:
            for replica in group.nodes["b"].held:
                await eventually(partial(is_indexed, replica), "b has indexed it")
        highs = [partition.high_seq for partition in group.nodes["b"].held]
        await group.nodes["a"].kill()
        await group.start("c")
        assignment = Assignment("c", {"a": "", "b": ""})
        new_map = group.map.with_assignments({PartitionId(n): assignment for n in range(P)})
        before = [partition.high_seq for partition in group.nodes["c"].held]
        await group.give(new_map, "c", "b")
        await group.start("a")
        await check_copies_are_equal(group)
        assert [p.high_seq for p in group.nodes["b"].held] == before
        assert all(high > low for high, low in zip(highs, before, strict=True))
    assert new_histories
    assert ROLLBACK_PENDING not in new_histories, (
        "what a client says of itself is not a partition's history"
    )


async def test_answers_to_publishers_survive_a_failover() -> None:
    async with cluster() as group:
        batches: list[tuple[PartitionId, Chunk]] = []
        deltas = CounterDelta(1, 1).encode()
        async with publisher(group.nodes["a"].url, follow_map=False) as sender:
            for _ in range(20):
                for partition in range(P):
                    row = Mutation(Operation.INCREMENT, key_in(partition), deltas)
                    chunk = Chunk.build((row,))
                    batches.append((PartitionId(partition), chunk))
                    await sender.publish_and_wait(PartitionId(partition), chunk)
        await group.quiet()
        known_answers = [
            p.repeated_batches.answers.answers_between(SeqNo(0), p.high_seq)
            for p in group.nodes["a"].held
        ]
        assert all(len(answers) == 20 for answers in known_answers)
        for name in "bc":
            assert [
                p.repeated_batches.answers.answers_between(SeqNo(0), p.high_seq)
                for p in group.nodes[name].held
            ] == known_answers
        await group.nodes["a"].kill()
        await group.fail_over("a", Random(1))
        for partition, answers in enumerate(known_answers):
            writer, counter, _, _ = answers[-1]
            active = group.nodes[group.map.partitions[partition].active].held[partition]
            token = WriterToken(writer, counter)
            again = active.mutate(batch_of(batches[-1][1], token), now=1e9)
            assert again.is_repeated, "it has no second effect"
            assert again.counters == [(0, 20)]


async def test_a_replica_that_rolled_back_recognises_earlier_batches() -> None:
    """The replica undoes more batches of a writer than it remembers, and becomes active. Then a
    task of that writer runs again from its beginning."""
    async with cluster(undo_mutations=64 * 1024) as group:
        deltas, earlier_count = CounterDelta(1, 1).encode(), 10
        chunk = Chunk.build((Mutation(Operation.INCREMENT, key_in(0), deltas),))
        async with publisher(group.nodes["a"].url, follow_map=False) as sender:
            for index in range(earlier_count + BATCHES_MAX):
                await sender.publish_and_wait(PartitionId(0), chunk)
                if index + 1 == earlier_count:
                    # Another writer writes, so that this writer's answer is not the last one: the
                    # last answer is always sent.
                    await write(group, "a", 20)
                    await group.quiet()
                    await group.nodes["c"].kill()
        a, b = group.nodes["a"].held[0], group.nodes["b"].held[0]
        (writer, counter, _, _), *_ = a.repeated_batches.answers.answers_between(0, a.high_seq)
        await eventually(partial(has_reached, b, a.high_seq), "b has it too")
        await group.nodes["a"].kill()
        await group.start("c")
        for active, replica in (("c", "b"), ("b", "c")):
            assignment = Assignment(active, {"a": "", replica: ""})
            new_map = group.map.with_assignments({PartitionId(n): assignment for n in range(P)})
            await group.give(new_map, "c", "b")
            if active == "c":
                await group.start("a")
            async with connect(group.nodes[active].url, follow_map=False) as client:
                await client.set(key_in(0), "1")
            await group.quiet()
        newest, older = (batch_of(chunk, WriterToken(writer, counter - back)) for back in (1, 2))
        b = group.nodes["b"].held[0]
        assert b.mutate(older, now=1e9).status is Status.TOKEN_TOO_OLD
        again = b.mutate(newest, now=1e9)
        assert again.is_repeated
        assert again.counters == [(0, earlier_count)]


async def test_a_late_map_changes_nothing() -> None:
    async with cluster() as group:
        late = group.map.with_assignments({PartitionId(0): Assignment("b", {"a": "", "c": ""})})
        await group.share([Assignment("a", {"b": "", "c": ""})] * P)
        for name in "abc":
            node = NodeClient(Address.parse(group.nodes[name].url))
            with pytest.raises(ServerError) as refusal:
                await node.set_map(late.revision - 1, late)
            assert refusal.value.status is Status.REVISION_CONFLICT
            # A map with a high revision is refused, too, if its command has seen an older map.
            with pytest.raises(ServerError) as refusal:
                await node.set_map(late.revision - 1, msgspec.structs.replace(late, revision=100))
            assert refusal.value.status is Status.REVISION_CONFLICT
        assert group.nodes["a"].held[0].state is PartitionState.ACTIVE
        assert (await group.map_of("a")) == group.map


async def test_a_new_active_begins_a_history_that_is_on_disk_before_it_is_seen() -> None:
    async with cluster("ab") as group:
        await write(group, "a", 100)
        await group.quiet()
        before = [(p.failover_log, p.high_seq) for p in group.nodes["b"].held]
        await group.nodes["a"].kill()
        await group.fail_over("a", Random(1))
        logs = [p.failover_log for p in group.nodes["b"].held]
        for (old_log, high_seq), new_log in zip(before, logs, strict=True):
            assert new_log.entries[0].seq == high_seq
            assert new_log.entries[1:] == old_log.entries
        await group.nodes["b"].kill()
        await group.start("b")
        assert [p.failover_log for p in group.nodes["b"].held] == logs


async def test_a_history_is_continued_only_by_a_node_that_has_all_of_it() -> None:
    async with cluster("ab") as group:
        await write(group, "a", 100)
        await group.quiet()
        handing = Assignment(replicas={"b": ""}, handing_over="a")
        await group.share([handing] * P)
        with pytest.raises(ServerError):
            await write(group, "a", 1)
        assignments = []
        for partition in group.nodes["a"].held:
            keeps = HistoryPoint(partition.failover_log.current, partition.high_seq)
            assignments.append(Assignment("b", {"a": ""}, continues_from=keeps))
        end = assignments[1].continues_from
        assert end is not None
        for wrong_end in (
            HistoryPoint(HistoryId(1), end.seq),
            HistoryPoint(end.history_id, SeqNo(end.seq + 1)),
            HistoryPoint(end.history_id, SeqNo(end.seq - 1)),
        ):
            wrong = list(assignments)
            wrong[1] = Assignment("b", {"a": ""}, continues_from=wrong_end)
            with pytest.raises(ServerError) as refusal:
                await group.give(group.map.with_assignments(dict(enumerate_partitions(wrong))), "b")
            assert refusal.value.status is Status.WRONG_STATE
            assert {p.state for p in group.nodes["b"].held} == {PartitionState.REPLICA}
        logs = [p.failover_log for p in group.nodes["a"].held]
        await group.give(
            group.map.with_assignments(dict(enumerate_partitions(assignments))), "b", "a"
        )
        assert [p.failover_log for p in group.nodes["b"].held] == logs, "no history was added"
        await write(group, "b", 50, "another")
        await check_copies_are_equal(group)


async def test_a_map_that_is_refused_leaves_a_node_what_it_was() -> None:
    """When the map is refused, one partition is already fenced, and another one has stopped
    following its source."""
    async with cluster("ab", partitions=2) as group:
        await group.share([Assignment("a", {"b": ""}), Assignment("b", {"a": ""})])
        await group.quiet()
        nowhere = HistoryPoint(HistoryId(1), SeqNo(5))
        refused_map = group.map.with_assignments(
            {
                PartitionId(0): Assignment("b", {"a": ""}),
                PartitionId(1): Assignment("a", {"b": ""}, continues_from=nowhere),
            }
        )
        before = group.map
        with pytest.raises(ServerError) as refusal:
            await group.give(refused_map, "a")
        assert refusal.value.status is Status.WRONG_STATE
        assert group.map is before
        assert states(group, "a") == [PartitionState.ACTIVE, PartitionState.REPLICA]
        async with connect(group.nodes["a"].url) as client:
            for index in range(20):
                await client.set(f"key {index}", "value")
        await check_copies_are_equal(group)


async def test_a_node_takes_no_write_while_the_disk_catches_up_for_a_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next active node receives the last sequence number, so there must be no write after
    that."""
    states_meanwhile: list[PartitionState] = []
    wait_until_persisted = Flusher.wait_until_persisted

    async def record_state_and_wait(flusher: Flusher, partition: Partition, seq: SeqNo) -> None:
        states_meanwhile.append(partition.state)
        await wait_until_persisted(flusher, partition, seq)

    async with cluster("ab", partitions=1) as group:
        await write(group, "a", 5)
        await group.quiet()
        monkeypatch.setattr(Flusher, "wait_until_persisted", record_state_and_wait)
        await group.share([Assignment(replicas={"b": ""}, handing_over="a")])
        assert PartitionState.PENDING in states_meanwhile
        assert PartitionState.ACTIVE not in states_meanwhile


@attrs.define
class Load:
    """The values acknowledged as replicated, and how often each key was written."""

    acknowledged: dict[str, int] = attrs.field(factory=dict)
    operations_sent: Counter[str] = attrs.field(factory=Counter)


async def publish_for(
    group: TestCluster, load: Load, draw: Random, count: int, writer: str
) -> None:
    """Writes some keys that no other writer has, each with a rising number; ignores writes that
    fail."""
    for _ in range(count):
        key = f"{writer} {draw.randrange(20)}"
        partition = partition_of(key.encode(), P)
        active = group.map.partitions[partition].active
        node = group.nodes.get(active)
        if node is None or node.server is None:
            await trio.sleep(0.01)
            continue
        replicated = draw.random() < 0.5
        load.operations_sent[key] += 1
        value = load.operations_sent[key]
        try:
            with trio.move_on_after(1) as patience:
                async with connect(node.url, follow_map=False) as client:
                    await client.set(
                        key,
                        str(value),
                        durability=Durability.REPLICATED if replicated else Durability.MEMORY,
                        copies=1 if replicated else 0,
                    )
        except UprError:
            continue
        if replicated and not patience.cancelled_caught:
            load.acknowledged[key] = value


@pytest.mark.parametrize("seed", range(effort(1, 10)))
async def test_failovers_at_random(seed: int) -> None:
    draw = Random(seed)
    load = Load()
    async with cluster(delay=Random(seed)) as group:
        for _ in range(12):
            async with trio.open_nursery() as nursery:
                for writer in range(4):
                    nursery.start_soon(
                        publish_for, group, load, Random(draw.random()), 15, f"publisher {writer}"
                    )
                await trio.sleep(draw.random() * 0.05)
                victim = draw.choice("abc")
                await group.nodes[victim].kill()
                if draw.random() < 0.3:
                    await group.start(victim)
                    await trio.sleep(draw.random() * 0.05)
                    await group.nodes[victim].kill()
                await group.fail_over(victim, draw)
                await trio.sleep(draw.random() * 0.05)
                await group.start(victim)
            if draw.random() < 0.5:
                await check_copies_are_equal(group)
        await check_copies_are_equal(group)
        items: dict[str, int] = {}
        for contents in [await group.contents(name) for name in "abc"]:
            for rows in contents.values():
                items |= {key.decode(): int(row.value) for key, row in rows.items()}
        for key, value in load.acknowledged.items():
            assert items.get(key, 0) >= value, f"{key} was acknowledged as {value}"
        assert all(value <= load.operations_sent[key] for key, value in items.items())
        assert load.acknowledged


async def test_a_new_active_deletes_expired_items() -> None:
    async with cluster() as group:
        async with connect(group.nodes["a"].url, follow_map=False) as client:
            for index in range(20):
                await client.set(f"key {index}", "v", expiry=int(time.time()) + 2)
        await group.quiet()
        await group.nodes["a"].kill()
        await group.fail_over("a", Random(1))

        deadline = trio.current_time() + 20
        while trio.current_time() < deadline:
            names = {assignment.active for assignment in group.map.partitions}
            contents = [await group.contents(name) for name in names]
            if not any(items for by_partition in contents for items in by_partition.values()):
                return
            await trio.sleep(0.1)
        raise AssertionError("expired items still exist")


async def test_a_new_active_indexes_its_unindexed_changes_at_once() -> None:
    """The maintenance of a bucket without writes pauses for ten seconds at a time. A new active
    node does not wait for that."""
    async with cluster() as group:
        await write(group, "a", 50)
        await group.quiet()
        await trio.sleep(3.0)
        await group.nodes["a"].kill()
        await group.fail_over("a", Random(1))
        active = [
            group.nodes[assignment.active].held[partition]
            for partition, assignment in enumerate_partitions(group.map.partitions)
        ]
        await eventually(
            lambda: all(p.eviction.is_index_ready for p in active), "it is indexed", 4.0
        )


async def test_an_undo_forgets_only_the_restored_answers_above_it() -> None:
    async with cluster() as group:
        async with publisher(group.nodes["a"].url, follow_map=False) as sender:
            for index in range(20):
                row = Mutation(Operation.INCREMENT, key_in(0), CounterDelta(1, 1).encode())
                await sender.publish_and_wait(PartitionId(0), Chunk.build((row,)))
                assert index < 20
        await group.quiet()
        await group.nodes["c"].kill()
        await group.start("c")
        copy = group.nodes["c"].held[0]
        assert len(copy.repeated_batches.answers.answers_between(SeqNo(0), copy.high_seq)) == 20
        tokens = tokens_above(copy.repeated_batches.answers, 15)
        assert [token.counter for token in tokens] == [16, 17, 18, 19, 20]
