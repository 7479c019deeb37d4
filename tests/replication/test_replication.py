"""Replicas, failovers, nodes that die and come back: several servers with sockets and simulated
disks."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from random import Random

import attrs
import pytest
import trio

from tests.kit.cluster import BUCKET, TestCluster, cluster, enumerate_partitions
from tests.kit.process import eventually
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.client import (
    Address,
    ChunkReceived,
    NodeClient,
    ResumeState,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    StreamEnded,
    connect,
    consume,
    publisher,
)
from upr_protocol.client.core.resume_state import ROLLBACK_PENDING
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    Cas,
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.partition_map import Assignment, HistoryPoint
from upr_protocol.transport import dial_tcp
from upr_server.engine import MutationBatch, Partition, WriterToken
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.calls import Commit
from upr_server.storage.simulated import SimulatedDirectory

P = 4


async def write(one: TestCluster, name: str, count: int, value: str = "value") -> None:
    async with connect(one.nodes[name].url, by_map=False) as client:
        for number in range(count):
            await client.set(f"key {number}", f"{value} {number}")


def unconfirmed(one: TestCluster, name: str) -> bool:
    """Whether a node still waits for a peer."""
    server = one.nodes[name].server
    assert server is not None
    return not server.service.cluster.statistics(BUCKET)["is_confirmed"]


def states(one: TestCluster, name: str) -> list[PartitionState]:
    """What a node is, by partition."""
    return [partition.state for partition in one.nodes[name].held]


def key_in(number: int) -> bytes:
    """A key of this partition."""
    return next(key for at in range(1000) if partition_of(key := b"%d" % at, P) == number)


def has_come_to(partition: Partition, seq: SeqNo) -> bool:
    return partition.high_seq >= seq


def is_indexed(partition: Partition) -> bool:
    return partition.eviction.indexed >= partition.high_seq


async def same(one: TestCluster) -> None:
    """All copies are equal, numbers, CAS values and all."""
    await one.quiet()
    contents = [await one.contents(name) for name, node in one.nodes.items() if node.server]
    for number in range(len(one.map.partitions)):
        held = [found[number] for found in contents if number in found]
        assert all(copy == held[0] for copy in held), f"partition {number} differs"
    for node in one.nodes.values():
        if node.server is not None:
            bucket = node.server.service.buckets.get(BUCKET)
            assert bucket is not None
            bucket.check_invariants()


async def test_replicas_have_what_their_active_has() -> None:
    async with cluster() as one:
        await write(one, "a", 200)
        await same(one)
        await write(one, "a", 100, "another")
        await same(one)


async def test_a_replica_of_a_replica() -> None:
    async with cluster() as one:
        await one.share([Assignment("a", {"b": "", "c": "b"})] * P)
        await write(one, "a", 200)
        await same(one)


async def test_consumers_follow_a_replica() -> None:
    """It hands on whole snapshots, as it has them on disk, and every change in the end."""
    async with cluster("ab") as one, trio.open_nursery() as nursery:
        nursery.start_soon(write, one, "a", 300)
        found: dict[bytes, bytes] = {}
        inside: set[PartitionId] = set()
        async with consume(one.nodes["b"].url, state=PartitionState.REPLICA) as consumer:
            async for event in consumer:
                if isinstance(event, SnapshotStart):
                    inside.add(event.partition)
                elif isinstance(event, SnapshotEnd):
                    inside.remove(event.partition)
                elif isinstance(event, ChunkReceived):
                    assert event.partition in inside
                    found |= {row.key: row.value for row in event.chunk}
                if len(found) == 300 and not inside:
                    break
        assert found == {b"key %d" % n: b"value %d" % n for n in range(300)}


async def test_an_end_of_now_covers_a_partition_that_came_to_a_node_after_it_greeted() -> None:
    """The greeting says that the partition is dead there: its numbers are nobody's end."""
    async with cluster("ab", partitions=2) as one, trio.open_nursery() as nursery:
        await one.share([Assignment("a"), Assignment("b", {"a": ""})])
        await eventually(
            lambda: states(one, "b") == [PartitionState.DEAD, PartitionState.ACTIVE], "b leads 1", 5
        )
        async with connect(one.nodes["a"].url) as client:
            keys = [key for at in range(200) if partition_of(key := b"%d" % at, 2) == 0][:50]
            for key in keys:
                await client.set(key, b"value")
        async with connect(one.nodes["b"].url, by_map=False) as client:
            for number in range(500):
                if partition_of(b"large %d" % number, 2) == 1:
                    await client.set(b"large %d" % number, bytes(1024))
        has_met_b, may_go_on = trio.Event(), trio.Event()
        received: set[bytes] = set()
        ended: set[PartitionId] = set()

        async def dial(address: Address) -> trio.abc.Stream:
            """Reaches b only."""
            if address.port != one.nodes["b"].port:
                raise OSError("no route to a")
            return await dial_tcp(address)

        async def read() -> None:
            async with consume(
                one.nodes["b"].url, end="now", dial=dial, window_bytes=WINDOW_BYTES_MIN
            ) as consumer:
                async for event in consumer:
                    if isinstance(event, StreamEnded):
                        ended.add(event.partition)
                    elif isinstance(event, ChunkReceived):
                        # As long as this one is not over b is connected to.
                        has_met_b.set()
                        await may_go_on.wait()
                        received.update(row.key for row in event.chunk)

        nursery.start_soon(read)
        await has_met_b.wait()
        await one.share([Assignment("a", {"b": ""}), Assignment("b", {"a": ""})])
        await one.quiet()
        await one.nodes["a"].kill()
        await one.fail_over("a", Random(0))
        await trio.sleep(1.0)  # the consumer hears of the map, and asks for the partition
        may_go_on.set()
        await eventually(lambda: ended == {0, 1}, "both streams have ended", 10)
        assert received >= set(keys)


async def test_a_node_tells_nobody_what_is_left_of_a_partition_that_it_gave_up() -> None:
    async with cluster("ab", partitions=1) as one:
        await write(one, "a", 20)
        await one.quiet()
        await one.share([Assignment("a")])
        await eventually(lambda: states(one, "b") == [PartitionState.DEAD], "b gave it up", 5)
        async with connect(one.nodes["b"].url, by_map=False) as client:
            (info,) = client.partitions()
            assert not info.owned
            assert (info.state, info.high_seq) == (PartitionState.DEAD, 0)
            with pytest.raises(ServerError, match="dead here, not active") as refused:
                await client.seqnos()
            assert refused.value.status is Status.NOT_MY_PARTITION


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        (PartitionState.DEAD, "a dead partition is not streamed"),
        (PartitionState.PENDING, "streamed to replicas only"),
    ],
)
async def test_no_client_is_streamed_a_dead_or_a_pending_partition(
    state: PartitionState, refusal: str
) -> None:
    """What a node has of it may be stale, and comes to nobody as if it were whole."""
    async with cluster("ab", partitions=1) as one:
        await write(one, "a", 20)
        await one.quiet()
        await one.share([Assignment("a")])
        await eventually(lambda: states(one, "b") == [PartitionState.DEAD], "b gave it up", 5)
        async with consume(one.nodes["b"].url, state=state, by_map=False) as consumer:
            with pytest.raises(ServerError, match=refusal) as refused:
                await anext(consumer)
        assert refused.value.status is Status.BAD_ARGUMENT


async def test_numbers_are_those_of_the_active_though_a_replica_is_asked_first() -> None:
    """A client that has an old map asks a replica, which lags."""
    async with cluster("ab", partitions=1) as one, connect(one.nodes["a"].url) as client:
        await client.set("key", "value")
        await one.share([Assignment("b", {"a": ""})])
        async with connect(one.nodes["b"].url) as other:
            written = await other.set("key", "another")
        (row,) = await client.seqnos()
        assert row.high_seq >= written.seq


async def test_a_replica_that_becomes_active_ends_its_streams() -> None:
    """Who follows it is given nothing of a history that it has not heard of."""
    async with cluster("ab", partitions=1) as one:
        await write(one, "a", 5)
        await same(one)
        told: list[HistoryId] = []
        begun: list[HistoryId] = []
        async with (
            consume(
                one.nodes["b"].url, state=PartitionState.REPLICA, by_map=False, with_logs=True
            ) as consumer,
            trio.open_nursery() as nursery,
        ):

            async def follow() -> None:
                async for event in consumer:
                    if isinstance(event, StreamAccepted):
                        told.append(event.log.current)
                    elif isinstance(event, SnapshotStart):
                        begun.append(event.history_id)

            nursery.start_soon(follow)
            await consumer.barrier()
            await one.nodes["a"].kill()
            await one.fail_over("a", Random(1))
            await write(one, "b", 5, "later")
            async with consume(one.nodes["b"].url, by_map=False, end="now") as other:
                async for _ in other:
                    pass
            nursery.cancel_scope.cancel()
        (partition,) = one.nodes["b"].held
        assert partition.failover_log.current not in begun
        assert set(begun) == set(told)


async def test_a_replica_that_has_nothing_yet_sends_nobody_back() -> None:
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        async with consume(one.nodes["a"].url, end="now") as consumer:
            async for _ in consumer:
                pass
            state = consumer.resume_state
        for name in "bc":
            await one.nodes[name].kill()
        one.nodes["b"].directory = SimulatedDirectory()
        await one.start("b")
        # It is to follow one that is down.
        await one.share([Assignment("a", {"b": "c", "c": ""})] * P)
        with pytest.raises(ServerError, match="has not heard of its master yet"):
            await follow(one.nodes["b"].url, state)


async def follow(url: str, state: ResumeState) -> None:
    async with consume(
        url, state=PartitionState.REPLICA, resume=state, retry_timeout_s=0.5
    ) as consumer:
        async for event in consumer:
            assert not isinstance(event, RolledBack)


async def test_a_node_that_comes_back_goes_on_from_its_disk() -> None:
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        await one.nodes["b"].kill()
        await write(one, "a", 100, "another")
        await one.start("b")
        await same(one)


async def test_an_active_that_was_killed_does_not_come_back_by_itself() -> None:
    """A replica may have what it had in memory only, and acknowledged."""
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        await one.nodes["a"].kill()
        await one.start("a")
        await eventually(lambda: not unconfirmed(one, "a"), "a peer confirms the map")
        assert {p.state for p in one.nodes["a"].held} == {PartitionState.PENDING}
        async with connect(one.nodes["a"].url, by_map=False) as client:
            with pytest.raises(ServerError) as refused:
                await client.set("key", "value")
        assert refused.value.status is Status.NOT_MY_PARTITION
        await one.fail_over("a", Random(1))
        await same(one)


@pytest.mark.parametrize("is_killed_again", [False, True])
async def test_a_failover_that_is_taken_back_trusts_nobody_who_has_lost_its_memory(
    is_killed_again: bool,
) -> None:
    """Its replicas may have what it acknowledged: it waits until a failover has chosen it."""
    async with cluster("ab", partitions=1) as one:
        await write(one, "a", 5)
        await same(one)
        (before,) = one.map.partitions
        await one.nodes["a"].kill()
        await one.start("a")
        everybody = {"a": "", "b": ""}
        await one.share([Assignment(replicas=everybody, lost="a")])
        if is_killed_again:
            await one.nodes["a"].kill()
            await one.start("a")
        await one.share([before])
        assert states(one, "a") == [PartitionState.PENDING]
        await one.share([Assignment(replicas=everybody, lost="a")])
        await one.share([Assignment("a", {"b": ""}, chosen=one.map.revision + 1)])
        assert states(one, "a") == [PartitionState.ACTIVE]
        await write(one, "a", 5, "later")
        await same(one)


async def test_an_active_that_was_stopped_waits_until_a_peer_confirms_it() -> None:
    async with cluster("ab") as one:
        await write(one, "a", 100)
        await one.quiet()
        logs = [p.failover_log for p in one.nodes["a"].held]
        await one.nodes["b"].kill()
        await one.nodes["a"].stop()
        await one.start("a")
        await trio.sleep(0.5)
        assert unconfirmed(one, "a")
        assert {p.state for p in one.nodes["a"].held} == {PartitionState.PENDING}
        await one.start("b")
        await one.quiet()
        assert [p.failover_log for p in one.nodes["a"].held] == logs, "it lost nothing"
        await write(one, "a", 100, "another")
        await same(one)


async def test_a_partition_without_replicas_comes_back_by_itself() -> None:
    async with cluster("ab") as one:
        await one.share([Assignment("a", {"b": ""})] + [Assignment("a")] * (P - 1))
        await write(one, "a", 100)
        await one.quiet()
        await one.nodes["a"].kill()
        await one.start("a")
        await eventually(lambda: not unconfirmed(one, "a"), "a peer confirms the map")
        states = [p.state for p in one.nodes["a"].held]
        assert states == [PartitionState.PENDING] + [PartitionState.ACTIVE] * (P - 1)
        assert [len(p.failover_log) for p in one.nodes["a"].held] == [1] + [2] * (P - 1)


async def test_a_clean_stop_does_not_make_good_what_a_crash_has_lost() -> None:
    """It was killed, and stopped before it had begun another history: it begins one after that."""
    async with cluster("ab", partitions=1) as one:
        await one.share([Assignment("a")])
        await write(one, "a", 100)
        await one.nodes["a"].kill()
        await one.nodes["b"].stop()
        await one.start("a")
        assert unconfirmed(one, "a")
        await one.nodes["a"].stop()
        await one.start("b")
        await one.start("a")
        await eventually(lambda: not unconfirmed(one, "a"), "a peer confirms the map")
        (partition,) = one.nodes["a"].held
        assert partition.state is PartitionState.ACTIVE
        assert len(partition.failover_log) == 2


async def test_an_active_that_was_failed_over_comes_back_as_replica() -> None:
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        await one.nodes["a"].kill()
        await one.fail_over("a", Random(1))
        actives = {assignment.active for assignment in one.map.partitions}
        assert "a" not in actives
        await one.start("a")
        await same(one)
        assert {p.state for p in one.nodes["a"].held} == {PartitionState.REPLICA}


@pytest.mark.parametrize("undo_mutations", [0, 64 * 1024])
async def test_what_the_new_active_never_had_is_undone(
    undo_mutations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that ran ahead: exactly, as long as it is not indexed; else from nothing."""
    put: list[HistoryId] = []
    run = Commit.run

    def noted(commit: Commit, bucket: BucketStorage) -> None:
        put.extend(
            HistoryId(one) for write in commit.writes for one, _ in write.record.failover_log
        )
        run(commit, bucket)

    monkeypatch.setattr(Commit, "run", noted)
    async with cluster(undo_mutations=undo_mutations) as one:
        await write(one, "a", 100)
        await one.quiet()
        # `c` hears of nothing more.
        await one.give(
            one.map.with_assignments(
                {PartitionId(n): Assignment("a", {"b": "", "c": "b"}) for n in range(P)}
            ),
            "a",
        )
        await one.nodes["c"].kill()
        await write(one, "a", 50, "lost")
        for number in range(P):
            a, b = one.nodes["a"].held[number], one.nodes["b"].held[number]
            await eventually(partial(has_come_to, b, a.high_seq), "b has it too")
        if not undo_mutations:
            for partition in one.nodes["b"].held:
                await eventually(partial(is_indexed, partition), "b has indexed it")
        highs = [partition.high_seq for partition in one.nodes["b"].held]
        await one.nodes["a"].kill()
        await one.start("c")
        assignment = Assignment("c", {"a": "", "b": ""})
        given = one.map.with_assignments({PartitionId(n): assignment for n in range(P)})
        before = [partition.high_seq for partition in one.nodes["c"].held]
        await one.give(given, "c", "b")
        await one.start("a")
        await same(one)
        assert [p.high_seq for p in one.nodes["b"].held] == before
        assert all(high > low for high, low in zip(highs, before, strict=True))
    assert put
    assert ROLLBACK_PENDING not in put, "what a client says of itself is not a partition's history"


async def test_answers_to_publishers_survive_a_failover() -> None:
    async with cluster() as one:
        batches: list[tuple[PartitionId, Chunk]] = []
        deltas = CounterDelta(1, 1).encode()
        async with publisher(one.nodes["a"].url, by_map=False) as sender:
            for _ in range(20):
                for number in range(P):
                    row = Mutation(Operation.INCREMENT, key_in(number), deltas)
                    chunk = Chunk.build((row,))
                    batches.append((PartitionId(number), chunk))
                    await sender.publish_and_wait(PartitionId(number), chunk)
        await one.quiet()
        known = [p.deduplicator.between(SeqNo(0), p.high_seq) for p in one.nodes["a"].held]
        assert all(len(answers) == 20 for answers in known)
        for name in "bc":
            assert [
                p.deduplicator.between(SeqNo(0), p.high_seq) for p in one.nodes[name].held
            ] == known
        await one.nodes["a"].kill()
        await one.fail_over("a", Random(1))
        for number, answers in enumerate(known):
            writer, counter, _, _ = answers[-1]
            active = one.nodes[one.map.partitions[number].active].held[number]
            token = WriterToken(writer, counter)
            again = active.mutate(MutationBatch(batches[-1][1], token), now=1e9)
            assert again.repeated, "it has no second effect"
            assert again.counters == [(0, 20)]


async def test_levels() -> None:
    async with cluster() as one, connect(one.nodes["a"].url, by_map=False) as client:
        for level in (Durability.REPLICATED, Durability.REPLICATED_AND_PERSISTED):
            for copies in (1, 2):
                written = await client.set(
                    "k", f"{level} {copies}", durability=level, copies=copies
                )
                at = [
                    one.nodes[name].held[written.partition].high_seq >= written.seq for name in "bc"
                ]
                if level is Durability.REPLICATED_AND_PERSISTED:
                    assert sum(at) >= copies
        with pytest.raises(ServerError, match="has 2 replicas that follow this node, not 3"):
            await client.set("k", "v", durability=Durability.REPLICATED, copies=3)
        await one.nodes["b"].kill()
        await client.set("k", "v", durability=Durability.REPLICATED, copies=1)
        with pytest.raises(ServerError) as late:
            await client.set("k", "last", durability=Durability.REPLICATED, copies=2)
        assert late.value.status is Status.NOT_DURABLE_YET
        item = await client.get("k")
        assert item is not None
        assert item.value == b"last", "it was taken in"


async def test_a_late_map_changes_nothing() -> None:
    async with cluster() as one:
        late = one.map.with_assignments({PartitionId(0): Assignment("b", {"a": "", "c": ""})})
        await one.share([Assignment("a", {"b": "", "c": ""})] * P)
        for name in "abc":
            node = NodeClient(Address.parse(one.nodes[name].url))
            with pytest.raises(ServerError) as refused:
                await node.set_map(late.revision - 1, late)
            assert refused.value.status is Status.REVISION_CONFLICT
        assert one.nodes["a"].held[0].state is PartitionState.ACTIVE
        assert (await one.map_of("a")) == one.map


async def test_a_history_is_kept_only_by_who_has_all_of_it() -> None:
    async with cluster("ab") as one:
        await write(one, "a", 100)
        await one.quiet()
        handing = Assignment(replicas={"b": ""}, handing_over="a")
        await one.share([handing] * P)
        with pytest.raises(ServerError):
            await write(one, "a", 1)
        kept = []
        for partition in one.nodes["a"].held:
            keeps = HistoryPoint(partition.failover_log.current, partition.high_seq)
            kept.append(Assignment("b", {"a": ""}, keeps=keeps))
        wrong = list(kept)
        wrong[1] = Assignment("b", {"a": ""}, keeps=HistoryPoint(HistoryId(1), SeqNo(5)))
        with pytest.raises(ServerError) as refused:
            await one.give(one.map.with_assignments(dict(enumerate_partitions(wrong))), "b")
        assert refused.value.status is Status.WRONG_STATE
        assert {p.state for p in one.nodes["b"].held} == {PartitionState.REPLICA}
        logs = [p.failover_log for p in one.nodes["a"].held]
        await one.give(one.map.with_assignments(dict(enumerate_partitions(kept))), "b", "a")
        assert [p.failover_log for p in one.nodes["b"].held] == logs, "no history was added"
        await write(one, "b", 50, "another")
        await same(one)


@attrs.define
class Load:
    """What was acknowledged as replicated, and what was ever written."""

    acknowledged: dict[str, int] = attrs.field(factory=dict)
    sent: Counter[str] = attrs.field(factory=Counter)


async def publish_for(one: TestCluster, load: Load, draw: Random, count: int, who: str) -> None:
    """Writes keys of its own, each with a number that rises; whatever goes wrong is left."""
    for _ in range(count):
        key = f"{who} {draw.randrange(20)}"
        number = partition_of(key.encode(), P)
        active = one.map.partitions[number].active
        node = one.nodes.get(active)
        if node is None or node.server is None:
            await trio.sleep(0.01)
            continue
        replicated = draw.random() < 0.5
        load.sent[key] += 1
        value = load.sent[key]
        try:
            with trio.move_on_after(1) as patience:
                async with connect(node.url, by_map=False) as client:
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


@pytest.mark.parametrize("seed", range(3))
async def test_failovers_at_random(seed: int) -> None:
    draw = Random(seed)
    load = Load()
    async with cluster(delay=Random(seed)) as one:
        for _ in range(12):
            async with trio.open_nursery() as nursery:
                for who in range(4):
                    nursery.start_soon(
                        publish_for, one, load, Random(draw.random()), 15, f"publisher {who}"
                    )
                await trio.sleep(draw.random() * 0.05)
                victim = draw.choice("abc")
                await one.nodes[victim].kill()
                if draw.random() < 0.3:
                    await one.start(victim)
                    await trio.sleep(draw.random() * 0.05)
                    await one.nodes[victim].kill()
                await one.fail_over(victim, draw)
                await trio.sleep(draw.random() * 0.05)
                await one.start(victim)
            if draw.random() < 0.5:
                await same(one)
        await same(one)
        items: dict[str, int] = {}
        for found in [await one.contents(name) for name in "abc"]:
            for rows in found.values():
                items |= {key.decode(): int(row.value) for key, row in rows.items()}
        for key, value in load.acknowledged.items():
            assert items.get(key, 0) >= value, f"{key} was acknowledged as {value}"
        assert all(value <= load.sent[key] for key, value in items.items())
        assert load.acknowledged


async def test_a_node_that_lost_its_disk_has_nobody_give_up_anything() -> None:
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        highs = [partition.high_seq for partition in one.nodes["b"].held]
        await one.nodes["a"].kill()
        one.nodes["a"].directory = SimulatedDirectory()
        await one.start("a")
        assert [p.state for p in one.nodes["a"].held] == [PartitionState.ACTIVE] * P, "it is new"
        await eventually(lambda: has_map(one, "a"), "another node tells it what it was")
        assert [p.state for p in one.nodes["a"].held] == [PartitionState.PENDING] * P
        for name in "bc":
            assert [partition.high_seq for partition in one.nodes[name].held] == highs
        # Stopped cleanly it still knows that it has not everything.
        await one.nodes["a"].stop()
        await one.start("a")
        await eventually(lambda: not unconfirmed(one, "a"), "a peer confirms the map")
        assert [p.state for p in one.nodes["a"].held] == [PartitionState.PENDING] * P
        await one.fail_over("a", Random(1))
        await same(one)
        assert [partition.high_seq for partition in one.nodes["a"].held] == highs


@pytest.mark.parametrize("is_up", [False, True])
async def test_no_newer_map_makes_a_node_active_that_was_killed(is_up: bool) -> None:
    """It may have lost what a replica has; only a map that names another makes it sure."""
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        await one.nodes["a"].kill()
        if is_up:
            await one.start("a")
        await one.give(one.map.with_assignments({}), "b", "c")
        if not is_up:
            await one.start("a")
        await eventually(lambda: has_map(one, "a"), "it takes the newer map over")
        assert {p.state for p in one.nodes["a"].held} == {PartitionState.PENDING}
        # A stop in between must not be taken for a clean one.
        await one.nodes["a"].stop()
        await one.start("a")
        await eventually(lambda: not unconfirmed(one, "a"), "a peer confirms the map")
        assert {p.state for p in one.nodes["a"].held} == {PartitionState.PENDING}
        await one.fail_over("a", Random(1))
        await same(one)


async def test_a_node_that_was_killed_does_not_hand_over() -> None:
    """The takeover has seen it active, before; what it lost would be numbered again in the same
    history. Found by the simulation."""
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        await one.nodes["a"].kill()
        await one.start("a")
        handing_over = Assignment("", {"b": "", "c": ""}, handing_over="a")
        given = one.map.with_assignments({PartitionId(n): handing_over for n in range(P)})
        with pytest.raises(ServerError, match="use `upr failover`"):
            await one.give(given, "a")
        await one.fail_over("a", Random(1))
        await same(one)


async def test_a_node_that_was_killed_after_it_handed_over_may_do_so_again() -> None:
    """It had everything on disk before it did."""
    async with cluster() as one:
        await write(one, "a", 100)
        await one.quiet()
        handing_over = Assignment("", {"b": "", "c": ""}, handing_over="a")
        for _ in range(2):
            given = one.map.with_assignments({PartitionId(n): handing_over for n in range(P)})
            await one.give(given, "a")
            await one.nodes["a"].kill()
            await one.start("a")
        await one.give(one.map, "b", "c")
        await one.share([Assignment("b", {"a": "", "c": ""})] * P)
        await same(one)


def has_map(one: TestCluster, name: str) -> bool:
    server = one.nodes[name].server
    assert server is not None
    return server.service.cluster.revision(BUCKET) == one.map.revision


async def test_what_expires_is_deleted_by_a_new_active() -> None:
    async with cluster() as one:
        async with connect(one.nodes["a"].url, by_map=False) as client:
            for number in range(20):
                await client.set(f"key {number}", "v", expiry=int(time.time()) + 2)
        await one.quiet()
        await one.nodes["a"].kill()
        await one.fail_over("a", Random(1))

        deadline = trio.current_time() + 20
        while trio.current_time() < deadline:
            names = {assignment.active for assignment in one.map.partitions}
            found = [await one.contents(name) for name in names]
            if not any(items for by_partition in found for items in by_partition.values()):
                return
            await trio.sleep(0.1)
        raise AssertionError("items that expired are still there")


async def test_a_new_active_indexes_what_it_had_left_out_without_being_asked() -> None:
    """A bucket that nobody writes to rests for ten seconds at a time."""
    async with cluster() as one:
        await write(one, "a", 50)
        await one.quiet()
        await trio.sleep(3.0)
        await one.nodes["a"].kill()
        await one.fail_over("a", Random(1))
        active = [
            one.nodes[assignment.active].held[number]
            for number, assignment in enumerate_partitions(one.map.partitions)
        ]
        await eventually(
            lambda: all(p.eviction.is_index_ready for p in active), "it is indexed", 4.0
        )


async def test_answers_that_were_restored_are_not_all_forgotten_by_an_undo() -> None:
    async with cluster() as one:
        async with publisher(one.nodes["a"].url, by_map=False) as sender:
            for number in range(20):
                row = Mutation(Operation.INCREMENT, key_in(0), CounterDelta(1, 1).encode())
                await sender.publish_and_wait(PartitionId(0), Chunk.build((row,)))
                assert number < 20
        await one.quiet()
        await one.nodes["c"].kill()
        await one.start("c")
        held = one.nodes["c"].held[0]
        assert len(held.deduplicator.between(SeqNo(0), held.high_seq)) == 20
        assert [token.counter for token in held.deduplicator.above(SeqNo(15))] == [
            16,
            17,
            18,
            19,
            20,
        ]


def test_a_replica_that_goes_back_lets_go_of_what_waits_for_its_end() -> None:
    """The last chunk of a snapshot has come, and its end has not."""
    received = ReceivedSnapshots(FailoverLog.of([(7, 0)]), SeqNo(0), Cas(0))
    received.begin_snapshot(HistoryId(7), SeqNo(1), SeqNo(0))
    received.add_chunk(Chunk.build((Mutation(Operation.SET, b"k", b"v", SeqNo(1), Cas(1)),)))
    assert received.take_write().chunks == [], "it is written with its end"
    assert received.nbytes
    received.truncate(SeqNo(0))
    assert (received.nbytes, received.received, received.take_write().chunks) == (0, 0, [])
