"""Writes that are answered once replicas have them: several servers with sockets and simulated
disks."""

from __future__ import annotations

import pytest
import trio

from tests.kit.cluster import BUCKET, cluster
from tests.kit.process import eventually
from tests.replication.written_cluster import P
from upr_protocol.client import (
    connect,
)
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    Durability,
    SeqNo,
)
from upr_protocol.partition_map import Assignment, HistoryPoint


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
