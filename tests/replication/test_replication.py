"""Replicas and their consumers: several servers with sockets and simulated disks."""

from __future__ import annotations

from random import Random

import pytest
import trio

from tests.kit.cluster import cluster
from tests.kit.process import eventually
from tests.replication.written_cluster import P, check_copies_are_equal, states, write
from upr_protocol.client import (
    Address,
    ChunkReceived,
    ResumeState,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    StreamEnded,
    connect,
    consume,
)
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    Durability,
    HistoryId,
    PartitionId,
    PartitionState,
)
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.partition_map import Assignment
from upr_protocol.transport import dial_tcp
from upr_server.storage.simulated import SimulatedDirectory


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
