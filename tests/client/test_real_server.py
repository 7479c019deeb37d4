"""The clients against a real server, over real sockets."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
import trio

from tests.kit.fake_net import ENDLESS, CuttableStream
from tests.kit.held_store import HeldStore
from tests.kit.mirror import Mirror
from tests.kit.threaded import trio_thread
from upr_protocol.chunk import CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.client import (
    Address,
    BlockingClient,
    ChunkReceived,
    Consumer,
    CycleCompleted,
    Failure,
    ResumeState,
    RolledBack,
    StreamEnded,
    connect,
    consume,
    publisher,
)
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.ids import Durability, Operation, PartitionId
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.users import RemoveUser, UserListing
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.storage.simulated import SimulatedStore

PARTITIONS = 8
CONFIG = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", PARTITIONS),))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server(CONFIG, SimulatedStore()) as server:
        yield server


async def contents_of(server: Server) -> dict[bytes, bytes]:
    """Everything in the bucket, by a stream of its own."""
    mirror = Mirror()
    async with consume(server.url("b"), end="now") as consumer:
        async for event in consumer:
            mirror.apply(event)
    return mirror.contents


async def follow(consumer: Consumer, mirror: Mirror) -> None:
    async for event in consumer:
        mirror.apply(event)


def cutting(
    rng: random.Random, times: int, out_bytes: int, back_bytes: int
) -> Callable[[Address], Awaitable[trio.abc.Stream]]:
    """Dials TCP connections. The first opens the bucket, some break soon, the rest last."""
    budgets: Iterator[tuple[int, int]] = iter(
        [
            (out_bytes, back_bytes),
            *(
                (rng.randrange(1000, out_bytes), rng.randrange(1000, back_bytes))
                for _ in range(times)
            ),
        ]
    )

    async def dial(address: Address) -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(address.host, address.port)
        out, back = next(budgets, (ENDLESS, ENDLESS))
        return CuttableStream(stream, stream.socket.close, out, back)

    return dial


async def test_every_operation_has_its_effect(server: Server) -> None:
    async with connect(server.url("b")) as client:
        first = await client.add("k", "1", flags=3)
        await client.append("k", "2")
        await client.prepend("k", "0")
        item = await client.get("k")
        assert item is not None
        assert (item.value, item.flags) == (b"012", 3)
        with pytest.raises(ServerError) as caught:
            await client.set("k", "x", cas=first.cas)
        assert caught.value.status is Status.CAS_MISMATCH
        await client.replace("k", "x", cas=item.cas)
        with pytest.raises(ServerError) as caught:
            await client.replace("missing", "x")
        assert caught.value.status is Status.NOT_FOUND
        assert (await client.decrement("n", 5)).count == 0
        assert (await client.increment("n", 7)).count == 7
        assert (await client.decrement("n", 5)).count == 2
        with pytest.raises(ServerError) as caught:
            await client.increment("missing", create=False)
        assert caught.value.status is Status.NOT_FOUND
        with pytest.raises(ServerError) as caught:
            await client.increment("k")
        assert caught.value.status is Status.NOT_A_NUMBER
        await client.touch("k", 1)
        assert await client.get("k") is None
        await client.delete("n")
        assert await client.get_many(["k", "n"]) == [None, None]


async def test_large_values_in_many_answers(server: Server) -> None:
    value = bytes(3 * 1024 * 1024)
    async with connect(server.url("b")) as client:
        keys = [b"%d" % index for index in range(12)]
        for key in keys:
            await client.set(key, key + value)
        items = await client.get_many(keys)
        assert [item and item.value for item in items] == [key + value for key in keys]


async def test_buckets_are_created_listed_and_deleted(server: Server) -> None:
    async with connect(server.url()) as admin:
        await admin.create_bucket("c", 16)
        assert [bucket.name for bucket in await admin.list_buckets()] == ["b", "c"]
        assert "server" in await admin.stats()
        async with connect(server.url("c")) as client:
            assert client.partition_count == 16
            assert len(client.partitions()) == len(await client.seqnos()) == 16
        await admin.delete_bucket("c")


async def test_a_server_without_users_lists_none_and_makes_none(server: Server) -> None:
    async with connect(server.url()) as admin:
        assert await admin.list_users() == UserListing(0, ())
        with pytest.raises(ServerError, match="upr-server init"):
            await admin.change_users(RemoveUser("bob"))


async def test_a_consumer_starts_at_a_time(server: Server) -> None:
    async with connect(server.url("b")) as client:
        cas_values = [
            (await client.set(b"key %d" % index, "v", durability=Durability.PERSISTED)).cas
            for index in range(60)
        ]
        # Two changes may have been numbered within the microsecond that a datetime can tell.
        time_us = cas_values[25] // 1000
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)
        rows = await client.seqnos_at_time(time)
        assert [row.partition for row in rows] == list(range(client.partition_count))
        assert {row.history_id for row in rows} == {p.log.current for p in client.partitions()}
        assert all(row.seq == 0 for row in await client.seqnos_at_time(0))
        numbers = {row.partition: row.high_seq for row in await client.seqnos()}
        later = await client.seqnos_at_time(datetime(2200, 1, 1, tzinfo=UTC))
        assert {row.partition: row.seq for row in later} == numbers
        state = await client.resume_state_at_time(time)
        with pytest.raises(ServerError, match="is named twice"):
            await client.seqnos_at_time(time, [1, 1])
    received: set[int] = set()
    async with consume(server.url("b"), resume=state, end="now") as consumer:
        async for event in consumer:
            assert not isinstance(event, RolledBack)
            if isinstance(event, ChunkReceived):
                received.update(row.cas for row in event.chunk)
    assert received == {cas for cas in cas_values if cas >= 1000 * time_us}


async def test_consumers_see_what_was_published_before_a_barrier(server: Server) -> None:
    rng = random.Random(1)
    written_items: dict[bytes, bytes] = {}
    mirrors = [Mirror(), Mirror()]
    async with (
        publisher(server.url("b"), batch_mutations=20) as sink,
        consume(server.url("b")) as fast,
        consume(server.url("b"), window_bytes=WINDOW_BYTES_MIN) as narrow,
        trio.open_nursery() as nursery,
    ):
        for consumer, mirror in zip((fast, narrow), mirrors, strict=True):
            nursery.start_soon(follow, consumer, mirror)
        for _ in range(30):
            for _ in range(200):
                key, value = b"key-%d" % rng.randrange(300), rng.randbytes(rng.randrange(400))
                if rng.randrange(5):
                    await sink.set(key, value)
                    written_items[key] = value
                elif key in written_items:
                    await sink.delete(key)
                    del written_items[key]
            await sink.flush()
            await fast.barrier()
            assert mirrors[0].contents == written_items
        await narrow.barrier()
        assert mirrors[1].contents == written_items
        nursery.cancel_scope.cancel()
    assert await contents_of(server) == written_items


async def test_increments_have_one_effect_though_connections_are_cut(server: Server) -> None:
    rng = random.Random(2)
    async with publisher(
        server.url("b"),
        dial=cutting(rng, 15, 60_000, 4000),
        batch_mutations=3,
        linger_s=0.001,
        draw=lambda: 0.0,
    ) as sink:
        for index in range(1500):
            await sink.increment(b"counter-%d" % (index % 11))
    assert sink.statistics().connections > 5
    assert sum(map(int, (await contents_of(server)).values())) == 1500


async def test_a_consumer_continues_though_connections_are_cut(server: Server) -> None:
    rng = random.Random(3)
    mirror = Mirror()
    written_items: dict[bytes, bytes] = {}
    async with (
        publisher(server.url("b"), batch_mutations=10) as sink,
        consume(
            server.url("b"), dial=cutting(rng, 15, 20_000, 20_000), draw=lambda: 0.0
        ) as consumer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(follow, consumer, mirror)
        for _ in range(40):
            for _ in range(50):
                key, value = b"key-%d" % rng.randrange(200), rng.randbytes(rng.randrange(100))
                await sink.set(key, value)
                written_items[key] = value
            await sink.flush()
            await consumer.barrier()
            assert mirror.contents == written_items
        assert consumer.statistics().connections > 5
        assert consumer.statistics().rollbacks == 0
        nursery.cancel_scope.cancel()


async def test_a_bucket_made_anew_rolls_back(server: Server) -> None:
    mirror = Mirror()
    async with connect(server.url("b")) as client:
        for index in range(50):
            await client.set(f"old-{index}", "v")
    async with consume(server.url("b"), end="now") as consumer:
        await follow(consumer, mirror)
        state = consumer.resume_state
    async with connect(server.url()) as admin:
        await admin.delete_bucket("b")
        await admin.create_bucket("b", PARTITIONS)
    async with connect(server.url("b")) as client:
        await client.set("new", "v")
    mirror = Mirror(mirror.items)
    rolled_back = []
    async with consume(server.url("b"), resume=state, end="now") as consumer:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, RolledBack):
                rolled_back.append(event.to)
    assert rolled_back == [0] * PARTITIONS
    assert mirror.contents == {b"new": b"v"}


async def test_a_bucket_that_is_deleted_ends_its_streams(server: Server) -> None:
    async with consume(server.url("b")) as consumer, connect(server.url()) as admin:
        assert await anext(consumer) == CycleCompleted(1)
        await admin.delete_bucket("b")
        events = [event async for event in consumer]
    assert [event.reason for event in events if isinstance(event, StreamEnded)] == [
        Status.BUCKET_DELETED
    ] * PARTITIONS


async def test_a_server_that_stops_is_looked_for_and_given_up(server: Server) -> None:
    async with trio.open_nursery() as nursery:

        async def serve(*, task_status: trio.TaskStatus[Server]) -> None:
            async with running_server(CONFIG, SimulatedStore()) as started:
                task_status.started(started)
                await stop.wait()

        stop = trio.Event()
        second_server = await nursery.start(serve)
        async with consume(second_server.url("b"), retry_timeout_s=0.2) as consumer:
            assert await anext(consumer) == CycleCompleted(1)
            stop.set()
            with pytest.raises(BrokenError, match="cannot connect"):
                async for _ in consumer:
                    pass


async def test_over_quota_is_said() -> None:
    # A disk that does not come through: nothing can leave memory.
    store = HeldStore()
    async with running_server(CONFIG, store) as server:
        async with connect(server.url()) as admin:
            await admin.create_bucket("small", 1, 1024 * 1024)
        with pytest.raises(ServerError, match="over its memory quota") as caught:  # noqa: PT012
            async with publisher(server.url("small"), credit_timeout_s=0.2) as sink:
                for index in range(1000):
                    chunk = chunk_of_plain_sets([b"%d" % index], [bytes(100_000)])
                    await sink.publish_and_wait(PartitionId(0), chunk)
        assert caught.value.status is Status.TEMPORARY_FAILURE
        store.released.set()


def test_the_blocking_client() -> None:
    with trio_thread() as thread:
        stop = trio.Event()

        async def serve(*, task_status: trio.TaskStatus[Server]) -> None:
            async with running_server(CONFIG, SimulatedStore()) as started:
                task_status.started(started)
                await stop.wait()

        async def start() -> Server:
            server: Server = await thread.nursery.start(serve)
            return server

        server = thread.run(start)
        with BlockingClient(server.url("b")) as client:
            results = client.apply(
                Mutation(Operation.INCREMENT, b"%d" % (index % 100), CounterDelta(1, 1).encode())
                for index in range(5000)
            )
            assert not any(isinstance(result, Failure) for result in results)
            assert client.get_many(["7"])[0] is not None
            assert not client.list_users().users
            with pytest.raises(ServerError, match="upr-server init"):
                client.change_users(RemoveUser("bob"))
            mirror = Mirror()
            with client.read_stream(end="now") as stream:
                for event in stream:
                    mirror.apply(event)
                state = ResumeState.decode(stream.resume_state.encode())
            assert mirror.contents == {b"%d" % index: b"50" for index in range(100)}
            with client.read_stream(resume=state, end="now") as stream:
                # A first cycle is complete if the server took up some partitions before the others.
                kinds = {type(event) for event in stream}
                assert kinds - {CycleCompleted} == {StreamEnded}
        thread.call(stop.set)
