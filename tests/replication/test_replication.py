"""Replicas, failovers, nodes that crash and restart: several servers with sockets and simulated
disks."""

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
from tests.kit.cluster import BUCKET, TestCluster, cluster, enumerate_partitions
from tests.kit.effort import effort
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
from upr_protocol.client.operator import NotDoneError, Operator, fail_over
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
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.partition_map import Assignment, HistoryPoint
from upr_protocol.transport import dial_tcp
from upr_server.engine import Partition, WriterToken, batch_of
from upr_server.engine.publisher_answers import BATCHES_MAX
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.calls import Commit
from upr_server.storage.online.flusher import Flusher
from upr_server.storage.simulated import SimulatedDirectory

P = 4


async def write(group: TestCluster, name: str, count: int, value: str = "value") -> None:
    async with connect(group.nodes[name].url, follow_map=False) as client:
        for index in range(count):
            await client.set(f"key {index}", f"{value} {index}")


def unconfirmed(group: TestCluster, name: str) -> bool:
    """Whether a node waits for a peer to confirm its map, or has not applied the confirmed map
    yet."""
    server = group.nodes[name].server
    assert server is not None
    clustered_bucket = server.partition_maps._buckets[BUCKET]
    return not clustered_bucket.is_confirmed or clustered_bucket.lock.locked()


def has_confirmed(group: TestCluster, name: str) -> bool:
    """The opposite of `unconfirmed`."""
    return not unconfirmed(group, name)


def states(group: TestCluster, name: str) -> list[PartitionState]:
    """The states of a node's partitions."""
    return [partition.state for partition in group.nodes[name].held]


def key_in(partition: int) -> bytes:
    """A key that belongs to this partition."""
    return next(key for index in range(1000) if partition_of(key := b"%d" % index, P) == partition)


def has_reached(partition: Partition, seq: SeqNo) -> bool:
    return partition.high_seq >= seq


def is_indexed(partition: Partition) -> bool:
    return partition.eviction.indexed_seq >= partition.high_seq


async def check_copies_are_equal(group: TestCluster) -> None:
    """Checks that all copies are equal, including sequence numbers and CAS values."""
    await group.quiet()
    contents = [await group.contents(name) for name, node in group.nodes.items() if node.server]
    for partition in range(len(group.map.partitions)):
        partition_copies = [copies[partition] for copies in contents if partition in copies]
        assert all(copy == partition_copies[0] for copy in partition_copies), (
            f"partition {partition} differs"
        )
    for node in group.nodes.values():
        if node.server is not None:
            bucket = node.server.catalog.buckets.get(BUCKET)
            assert bucket is not None
            bucket.check_invariants()


async def test_replicas_have_what_their_active_has() -> None:
    async with cluster() as group:
        await write(group, "a", 200)
        await check_copies_are_equal(group)
        await write(group, "a", 100, "another")
        await check_copies_are_equal(group)


async def test_a_replica_of_a_replica() -> None:
    async with cluster() as group:
        await group.share([Assignment("a", {"b": "", "c": "b"})] * P)
        await write(group, "a", 200)
        await check_copies_are_equal(group)
        # `c` follows `b`, so it does not count as a copy of `a`.
        async with connect(group.nodes["a"].url, follow_map=False) as client:
            with pytest.raises(ServerError) as refusal:
                await client.set("k", "v", durability=Durability.REPLICATED, copies=2)
        assert refusal.value.status is Status.TOO_FEW_REPLICAS


async def test_consumers_follow_a_replica() -> None:
    """The replica sends snapshots as it has them on disk: each is complete, and no change is
    missing in the end."""
    async with cluster("ab") as group, trio.open_nursery() as nursery:
        nursery.start_soon(write, group, "a", 300)
        consumed: dict[bytes, bytes] = {}
        inside: set[PartitionId] = set()
        async with consume(group.nodes["b"].url, state=PartitionState.REPLICA) as consumer:
            async for event in consumer:
                if isinstance(event, SnapshotStart):
                    inside.add(event.partition)
                elif isinstance(event, SnapshotEnd):
                    inside.remove(event.partition)
                elif isinstance(event, ChunkReceived):
                    assert event.partition in inside
                    consumed |= {row.key: row.value for row in event.chunk}
                if len(consumed) == 300 and not inside:
                    break
        assert consumed == {b"key %d" % n: b"value %d" % n for n in range(300)}


async def test_an_end_of_now_covers_a_partition_that_came_to_a_node_after_it_greeted() -> None:
    """When the node greets the client, the partition is dead there. So the sequence numbers in the
    greeting are not the partition's end."""
    async with cluster("ab", partitions=2) as group, trio.open_nursery() as nursery:
        await group.share([Assignment("a"), Assignment("b", {"a": ""})])
        await eventually(
            lambda: states(group, "b") == [PartitionState.DEAD, PartitionState.ACTIVE],
            "b leads 1",
            5,
        )
        async with connect(group.nodes["a"].url) as client:
            keys = [key for index in range(200) if partition_of(key := b"%d" % index, 2) == 0][:50]
            for key in keys:
                await client.set(key, b"value")
        async with connect(group.nodes["b"].url, follow_map=False) as client:
            for index in range(500):
                if partition_of(b"large %d" % index, 2) == 1:
                    await client.set(b"large %d" % index, bytes(1024))
        has_met_b, may_go_on = trio.Event(), trio.Event()
        received: set[bytes] = set()
        ended_names: set[PartitionId] = set()

        async def dial(address: Address) -> trio.abc.Stream:
            """Connects to b only."""
            if address.port != group.nodes["b"].port:
                raise OSError("no route to a")
            return await dial_tcp(address)

        async def read() -> None:
            async with consume(
                group.nodes["b"].url, end="now", dial=dial, window_bytes=WINDOW_BYTES_MIN
            ) as consumer:
                async for event in consumer:
                    if isinstance(event, StreamEnded):
                        ended_names.add(event.partition)
                    elif isinstance(event, ChunkReceived):
                        # While this stream has not ended, the client stays connected to b.
                        has_met_b.set()
                        await may_go_on.wait()
                        received.update(row.key for row in event.chunk)

        nursery.start_soon(read)
        await has_met_b.wait()
        await group.share([Assignment("a", {"b": ""}), Assignment("b", {"a": ""})])
        await group.quiet()
        await group.nodes["a"].kill()
        await group.fail_over("a", Random(0))
        await trio.sleep(1.0)  # the consumer receives the map, and asks for the partition
        may_go_on.set()
        await eventually(lambda: ended_names == {0, 1}, "both streams have ended", 10)
        assert received >= set(keys)


async def test_a_node_streams_nothing_of_a_partition_that_it_gave_up() -> None:
    async with cluster("ab", partitions=1) as group:
        await write(group, "a", 20)
        await group.quiet()
        await group.share([Assignment("a")])
        await eventually(lambda: states(group, "b") == [PartitionState.DEAD], "b gave it up", 5)
        async with connect(group.nodes["b"].url, follow_map=False) as client:
            (info,) = client.partitions()
            assert not info.is_held
            assert (info.state, info.high_seq) == (PartitionState.DEAD, 0)
            with pytest.raises(ServerError, match="dead here, not active") as refusal:
                await client.seqnos()
            assert refusal.value.status is Status.NOT_MY_PARTITION
        for state in (PartitionState.ACTIVE, PartitionState.REPLICA):
            async with consume(
                group.nodes["b"].url, state=state, follow_map=False, retry_timeout_s=0.0
            ) as consumer:
                with pytest.raises(ServerError) as refusal:
                    await anext(consumer)
            assert refusal.value.status is Status.NOT_MY_PARTITION


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
    """The node's copy may be old, and a client would take it for complete."""
    async with cluster("ab", partitions=1) as group:
        await write(group, "a", 20)
        await group.quiet()
        await group.share([Assignment("a")])
        await eventually(lambda: states(group, "b") == [PartitionState.DEAD], "b gave it up", 5)
        async with consume(group.nodes["b"].url, state=state, follow_map=False) as consumer:
            with pytest.raises(ServerError, match=refusal) as error_info:
                await anext(consumer)
        assert error_info.value.status is Status.BAD_ARGUMENT


async def test_seqnos_come_from_the_active_though_a_replica_is_asked_first() -> None:
    """A client with an old map asks a node that is only a replica now, and may be behind."""
    async with cluster("ab", partitions=1) as group, connect(group.nodes["a"].url) as client:
        await client.set("key", "value")
        await group.share([Assignment("b", {"a": ""})])
        async with connect(group.nodes["b"].url) as replica_client:
            write_result = await replica_client.set("key", "another")
        (row,) = await client.seqnos()
        assert row.high_seq >= write_result.seq


async def test_a_replica_that_becomes_active_ends_its_streams() -> None:
    """Otherwise a consumer would receive changes of a history that is not in the failover log it
    has."""
    async with cluster("ab", partitions=1) as group:
        await write(group, "a", 5)
        await check_copies_are_equal(group)
        accepted_histories: list[HistoryId] = []
        new_histories: list[HistoryId] = []
        async with (
            consume(
                group.nodes["b"].url, state=PartitionState.REPLICA, follow_map=False, with_logs=True
            ) as consumer,
            trio.open_nursery() as nursery,
        ):

            async def follow() -> None:
                async for event in consumer:
                    if isinstance(event, StreamAccepted):
                        accepted_histories.append(event.log.current)
                    elif isinstance(event, SnapshotStart):
                        new_histories.append(event.history_id)

            nursery.start_soon(follow)
            await consumer.barrier()
            await group.nodes["a"].kill()
            await group.fail_over("a", Random(1))
            await write(group, "b", 5, "later")
            async with consume(group.nodes["b"].url, follow_map=False, end="now") as other_consumer:
                async for _ in other_consumer:
                    pass
            nursery.cancel_scope.cancel()
        (partition,) = group.nodes["b"].held
        assert partition.failover_log.current not in new_histories
        assert set(new_histories) == set(accepted_histories)


async def test_an_empty_replica_does_not_make_a_consumer_roll_back() -> None:
    async with cluster() as group:
        await write(group, "a", 100)
        await group.quiet()
        async with consume(group.nodes["a"].url, end="now") as consumer:
            async for _ in consumer:
                pass
            state = consumer.resume_state
        for name in "bc":
            await group.nodes[name].kill()
        group.nodes["b"].directory = SimulatedDirectory()
        await group.start("b")
        # `b` follows `c`, which is down, so `b` stays empty.
        await group.share([Assignment("a", {"b": "c", "c": ""})] * P)
        with pytest.raises(ServerError, match="has not heard of its active yet"):
            await follow(group.nodes["b"].url, state)


async def follow(url: str, state: ResumeState) -> None:
    async with consume(
        url, state=PartitionState.REPLICA, resume=state, retry_timeout_s=0.5
    ) as consumer:
        async for event in consumer:
            assert not isinstance(event, RolledBack)


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


async def test_an_answer_waits_for_the_copies_that_its_level_asks_for() -> None:
    async with cluster() as group, connect(group.nodes["a"].url, follow_map=False) as client:
        for level in (Durability.REPLICATED, Durability.REPLICATED_AND_PERSISTED):
            for copies in (1, 2):
                write_result = await client.set(
                    "k", f"{level} {copies}", durability=level, copies=copies
                )
                have_it = [
                    group.nodes[name].held[write_result.partition].high_seq >= write_result.seq
                    for name in "bc"
                ]
                if level is Durability.REPLICATED_AND_PERSISTED:
                    assert sum(have_it) >= copies
        with pytest.raises(ServerError) as refusal:
            await client.set("k", "v", durability=Durability.REPLICATED, copies=3)
        assert refusal.value.status is Status.TOO_FEW_REPLICAS
        await group.nodes["b"].kill()
        await client.set("k", "v", durability=Durability.REPLICATED, copies=1)
        with pytest.raises(ServerError) as late:
            await client.set("k", "last", durability=Durability.REPLICATED, copies=2)
        assert late.value.status is Status.NOT_DURABLE_YET
        item = await client.get("k")
        assert item is not None
        assert item.value == b"last", "it was taken in"


async def test_who_waits_for_copies_hears_that_the_bucket_was_deleted() -> None:
    async with cluster() as group, connect(group.nodes["a"].url, follow_map=False) as client:
        for name in "bc":
            await group.nodes[name].kill()
        active = group.nodes["a"].held[partition_of(b"k", P)]

        async def delete_while_it_waits() -> None:
            await eventually(lambda: active.replicas.waiting_count == 1, "the write waits", 20)
            async with connect(group.nodes["a"].url, follow_map=False) as other:
                await other.delete_bucket(BUCKET)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(delete_while_it_waits)
            with pytest.raises(ServerError) as refusal, trio.fail_after(60):
                await client.set("k", "v", durability=Durability.REPLICATED, copies=1)
        assert refusal.value.status is Status.NO_BUCKET


async def test_who_waits_for_copies_goes_on_at_the_next_active_node() -> None:
    """It must not receive `TIMED_OUT` while most of its time is left."""
    async with cluster(partitions=1) as group, connect(group.nodes["a"].url) as client:
        await group.nodes["c"].kill()
        write_result = await client.set("k", "v", durability=Durability.REPLICATED, copies=1)
        server = group.nodes["a"].server
        assert server is not None
        answers: list[SeqNo] = []

        async def wait_for_two_copies() -> None:
            answers.append(await client.await_durable(write_result, Durability.REPLICATED, 2))

        def is_waiting() -> bool:
            return any(
                connection.context.bucket is not None and len(connection.context.durability_waits)
                for connection in server.connections.connections
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_two_copies)
            await eventually(is_waiting, "the client waits", 20)
            point = HistoryPoint(write_result.history_id, write_result.seq)
            await group.share([Assignment("b", {"a": "", "c": ""}, continues_from=point)])
            await eventually(lambda: not is_waiting(), "the old node answers", 20)
            assert not answers
            await group.start("c")
        assert answers == [write_result.seq]


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


def has_map(group: TestCluster, name: str) -> bool:
    server = group.nodes[name].server
    assert server is not None
    return server.partition_maps.revision(BUCKET) == group.map.revision


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
