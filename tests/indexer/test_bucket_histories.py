"""Two servers have buckets of the same name: nodes that follow different ones do not merge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.indexer.kit import BUCKET, ask, define
from tests.indexer.node_kit import Nodes, until_ready, urls
from tests.indexer.threads import in_the_loop
from tests.kit.memory_network import MemoryNetwork, node
from upr_protocol.client import Address, connect
from upr_protocol.errors import BrokenError
from upr_protocol.ids import PartitionId
from upr_server.app import Server
from upr_server.indexer.bucket_histories import MAX_AGE_S, BucketHistories, OtherBucketError
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.query import Query
from upr_server.indexer.slices import SliceMissingError
from upr_server.storage.simulated import SimulatedStore

CITY = IndexDefinition(("city",))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> MemoryNetwork:
    monkeypatch.setattr(trio.to_thread, "run_sync", in_the_loop)
    monkeypatch.setattr(trio.from_thread, "check_cancelled", lambda: None)
    return MemoryNetwork(monkeypatch)


@asynccontextmanager
async def a_bucket(name: str, city: str) -> AsyncIterator[Server]:
    """A server whose bucket has one city in every partition."""
    async with node(name, BUCKET) as server, connect(server.url(BUCKET)) as client:
        await define(client, "d", {"city": CITY})
        for n in range(20):
            await client.set(f"k{n}", f'{{"city": "{city}"}}')
        yield server


async def test_nodes_of_two_buckets_of_one_name_do_not_merge(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    async with (
        a_bucket("a", "Bonn") as bonn,
        a_bucket("b", "Köln") as cologne,
        trio.open_nursery() as nursery,
    ):
        nodes = Nodes(bonn.url(BUCKET), tmp_path, NodeMap(urls(2), 2, 0), nursery)
        nodes.buckets[1] = cologne.url(BUCKET)
        asking = await nodes.start(0)
        await nodes.start(1)
        await trio.sleep(20)
        with pytest.raises(SliceMissingError, match=r"slice 1 of 2.*http://n1:1"):
            await ask(asking, "d/city", Query())
        # Asking the slice itself gives the reason.
        with pytest.raises(SliceMissingError, match="http://n1:1 follows another bucket of the na"):
            await asking.holders[1].ping()
        # With the bucket corrected, they merge.
        del nodes.buckets[1]
        await nodes.kill(1)
        await nodes.start(1)
        await until_ready(asking)
        page = await ask(asking, "d/city", Query(consistency="now"))
        assert [entry.key for entry in page.entries] == [["Bonn"]] * 20
        nursery.cancel_scope.cancel()


async def test_a_bucket_is_recognised_by_any_history_that_both_nodes_know(
    network: MemoryNetwork,
) -> None:
    async with node("a", BUCKET) as server:
        histories = BucketHistories(Address.parse(server.url(BUCKET)))
        statement = await histories.statement()
        partition, history = statement.split(".")
        assert partition == "0"
        async with connect(server.url(BUCKET)) as client:
            (first, _) = client.partitions()
        assert int(history, 16) == first.log.current
        await histories.check(statement, "n")
        # The other node knows of a later failover, of which this node does not know yet.
        await histories.check(f"0.5.{history}", "n")
        await histories.check(f"1.{(await statement_of(histories, 1))}", "n")
        for other in (f"1.{history}", "0.5", "0"):
            with pytest.raises(OtherBucketError, match="n follows another bucket of the name b"):
                await histories.check(other, "n")
        with pytest.raises(OtherBucketError, match="no histories of partition 7"):
            await histories.check(f"7.{history}", "n")
        for nonsense in ("", "0.x", "x.1", "."):
            with pytest.raises(OtherBucketError, match="say which bucket they follow"):
                await histories.check(nonsense, "n")


async def statement_of(histories: BucketHistories, partition: int) -> str:
    logs = await histories._known_logs()
    return f"{logs[PartitionId(partition)].current:x}"


async def test_a_known_bucket_is_recognised_while_the_server_is_unreachable(
    network: MemoryNetwork,
) -> None:
    async with node("a", BUCKET) as server:
        histories = BucketHistories(Address.parse(server.url(BUCKET)))
        statement = await histories.statement()
        url = server.url(BUCKET)
    await trio.sleep(2 * MAX_AGE_S)
    assert await histories.statement() == statement
    await histories.check(statement, "n")
    unknown = BucketHistories(Address.parse(url))
    for _ in range(2):
        with pytest.raises(BrokenError, match=r"cannot be told before the server .*listens"):
            await unknown.check(statement, "n")


async def test_a_bucket_that_was_created_again_is_another_bucket(network: MemoryNetwork) -> None:
    store = SimulatedStore()
    async with node("a", BUCKET, store=store) as server, connect(server.url()) as client:
        histories = BucketHistories(Address.parse(server.url(BUCKET)))
        earlier = await histories.statement()
        await client.delete_bucket(BUCKET)
        await client.create_bucket(BUCKET, 2)
        await histories.check(earlier, "n")
        await trio.sleep(MAX_AGE_S)
        with pytest.raises(OtherBucketError):
            await histories.check(earlier, "n")
