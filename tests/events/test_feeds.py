"""Events over a real server and real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.kit.fake_net import CuttableStream
from tests.kit.ports import free_port
from tests.kit.process import eventually
from tests.server.connected_peer import Peer
from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, BucketFate, EventKind
from upr_protocol.client import (
    Address,
    Client,
    EventFeed,
    LookAtEverything,
    connect,
    follow_events,
    publisher,
)
from upr_protocol.errors import BrokenError, ClosedError, ServerError, Status
from upr_protocol.limits import CONSUMERS_MAX, DESIGNS_MAX
from upr_protocol.wire import MESSAGES, EventsReply, HelloReply, Message, NextEvents, Refusal
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.events import EventBus
from upr_server.startup import started_server
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

CONFIG = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", 2),))

EVERYTHING = LookAtEverything()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server(CONFIG, SimulatedStore()) as server:
        yield server


def bus_of(server: Server) -> EventBus:
    bus = server.events
    assert isinstance(bus, EventBus)
    return bus


@asynccontextmanager
async def feed_of(server: Server, consumer: str = "c", **options: Any) -> AsyncIterator[EventFeed]:
    """A registered feed that has received "look at everything"."""
    async with follow_events(server.url(), consumer=consumer, **options) as feed:
        assert await next_told(feed) == EVERYTHING
        yield feed


async def next_told(feed: EventFeed) -> BucketEvent | LookAtEverything:
    with trio.fail_after(20):
        return await anext(feed)


async def event(feed: EventFeed) -> BucketEvent:
    bucket_event = await next_told(feed)
    assert isinstance(bucket_event, BucketEvent)
    return bucket_event


async def until(feed: EventFeed, bucket: str) -> BucketEvent:
    """The first event of a bucket."""
    while (bucket_event := await event(feed)).bucket != bucket:
        pass
    return bucket_event


async def check_no_event(feed: EventFeed, client: Client) -> None:
    """Checks that there is no event of earlier operations: the next event is that of a new
    bucket."""
    await client.create_bucket("mark")
    assert (await event(feed)).bucket == "mark"
    await client.delete_bucket("mark")
    assert (await event(feed)).fate is BucketFate.DELETED


async def test_creation_update_deletion_and_design_documents(server: Server) -> None:
    async with connect(server.url("b")) as client, feed_of(server) as feed:
        await client.set("k", "v")
        updated = await event(feed)
        assert (updated.bucket, updated.fate, updated.designs) == ("b", BucketFate.NONE, ())
        assert updated.updates == 1
        assert updated.incarnation != 0
        await client.set("_design/x", "{}")
        await client.delete("_design/x")
        await client.set("not_design/x", "{}")
        designs: set[bytes] = set()
        updates = 0
        while updates < 3:
            bucket_event = await event(feed)
            designs.update(bucket_event.designs)
            updates += bucket_event.updates
        assert designs == {b"_design/x"}
        await client.create_bucket("new")
        created = await event(feed)
        assert (created.bucket, created.fate) == ("new", BucketFate.CREATED)
        await client.delete_bucket("new")
        deleted = await event(feed)
        assert (deleted.fate, deleted.incarnation) == (BucketFate.DELETED, created.incarnation)
        await client.create_bucket("new")
        again = await event(feed)
        assert again.fate is BucketFate.CREATED
        assert again.incarnation != created.incarnation


async def test_a_node_is_asked_for_the_maps_of_its_buckets_together(server: Server) -> None:
    writes = 0

    class CountingStream(CuttableStream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            nonlocal writes
            writes += 1
            await super().send_all(data)

    async def dial(address: Address) -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(address.host, address.port)
        return CountingStream(stream, stream.socket.close)

    async with connect(server.url()) as client:
        for index in range(40):
            await client.create_bucket(f"of-many-{index}", 1)
    async with feed_of(server, dial=dial):
        assert 0 < writes < 20


async def test_a_failed_operation_is_not_an_update(server: Server) -> None:
    async with connect(server.url("b")) as client, feed_of(server) as feed:
        with pytest.raises(ServerError):
            await client.replace("_design/missing", "v")
        await check_no_event(feed, client)


async def test_a_filter_leaves_out_other_events(server: Server) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(server.url("b")))

        async def feed(name: str, **options: Any) -> EventFeed:
            return await stack.enter_async_context(feed_of(server, name, **options))

        created = await feed("created", kinds=EventKind.CREATED)
        designs = await feed("designs", kinds=EventKind.DESIGN | EventKind.DELETED)
        named_feed = await feed("named", pattern="order[s-]*")
        await client.set("_design/x", "{}")
        await client.create_bucket("orders")
        await client.create_bucket("other")
        async with connect(server.url("orders")) as orders:
            await orders.set("k", "v")
        creations = [await event(created), await event(created)]
        assert {creation.bucket for creation in creations} == {"orders", "other"}
        assert {(creation.fate, creation.updates) for creation in creations} == {
            (BucketFate.CREATED, 0)
        }
        change = await event(designs)
        assert (change.bucket, change.fate, change.updates, change.designs) == (
            "b",
            BucketFate.NONE,
            0,
            (b"_design/x",),
        )
        assert (await event(named_feed)).bucket == "orders"


async def test_a_consumer_that_returns_receives_what_it_missed(server: Server) -> None:
    async with connect(server.url("b")) as client:
        async with feed_of(server):
            pass
        await client.set("k", "v")
        await client.create_bucket("meanwhile")
        async with follow_events(server.url(), consumer="c") as feed:
            # It has not acknowledged the first "look at everything", so it receives that again.
            assert await next_told(feed) == EVERYTHING
            assert {(await event(feed)).bucket, (await event(feed)).bucket} == {"b", "meanwhile"}
            await check_no_event(feed, client)
        await client.delete_bucket("meanwhile")
        async with follow_events(server.url(), consumer="c") as feed:
            bucket_event = await until(feed, "meanwhile")
            assert bucket_event.fate is BucketFate.DELETED


async def test_a_batch_without_acknowledgement_is_delivered_again(server: Server) -> None:
    async with connect(server.url("b")) as client:
        async with feed_of(server) as feed:
            await client.set("k", "v")
            first = await event(feed)
        async with follow_events(server.url(), consumer="c") as feed:
            assert await event(feed) == first


async def test_a_second_follower_takes_over_the_name(server: Server) -> None:
    async with feed_of(server) as first, trio.open_nursery() as nursery:

        async def superseded() -> None:
            with pytest.raises(ServerError) as refusal:
                await anext(first)
            assert refusal.value.status is Status.SUPERSEDED

        nursery.start_soon(superseded)
        await eventually(lambda: bus_of(server).statistics()["asking"] == 1, "it waits for events")
        async with (
            follow_events(server.url(), consumer="c") as second,
            connect(server.url("b")) as client,
        ):
            await client.set("k", "v")
            assert (await event(second)).bucket == "b"


async def test_a_consumer_that_stops_asking_costs_one_batch(server: Server) -> None:
    async with connect(server.url("b")) as client, feed_of(server) as feed:
        bus = bus_of(server)
        await client.set("k", "v")
        first = await event(feed)
        for index in range(200):
            await client.set("k", str(index))
        # One batch and one counter are kept, and a counter for the server's own consumer.
        assert bus.statistics()["unacknowledged"] == 1
        counters = bus.statistics()["counters"]
        assert isinstance(counters, int)
        assert counters <= 2
        updates = first.updates
        while updates < 201:
            updates += (await event(feed)).updates
        assert updates == 201


async def test_too_many_changed_design_documents_are_reported_as_any(server: Server) -> None:
    async with publisher(server.url("b")) as publishing, feed_of(server) as feed:
        # The feed does not ask for events meanwhile, so all of them are reported at once.
        for index in range(DESIGNS_MAX + 50):
            await publishing.set(f"_design/{index}", "{}")
        await publishing.flush()
        assert (await event(feed)).designs == (ANY_DESIGN,)


async def test_a_clean_restart_loses_nothing_and_a_crash_says_so(tmp_path: Path) -> None:
    config = ServerConfig(listen="127.0.0.1:0", data_dir=str(tmp_path), buckets=CONFIG.buckets)
    async with started_server(config) as server, connect(server.url("b")) as client:
        async with feed_of(server) as feed:
            await client.set("k", "v")
            incarnation = (await event(feed)).incarnation
        await client.create_bucket("meanwhile")
    async with (
        started_server(config) as server,
        follow_events(server.url(), consumer="c") as feed,
        connect(server.url("b")) as client,
    ):
        # The event of `b` was not acknowledged.
        assert {(await event(feed)).bucket, (await event(feed)).bucket} == {"b", "meanwhile"}
        await client.set("k", "v")
        assert (await event(feed)).incarnation == incarnation
        assert not (tmp_path / "event-queues").exists()
    # Without the file it is as after a crash.
    (tmp_path / "event-queues").unlink()
    async with (
        started_server(config) as server,
        follow_events(server.url(), consumer="c") as feed,
    ):
        assert await next_told(feed) == EVERYTHING


async def test_a_run_without_a_bus_has_consumers_look_at_everything() -> None:
    """A run without an event bus counts nothing, so the queues of an earlier run are incomplete."""
    directory = SimulatedDirectory()
    for events, expected in ((True, EVERYTHING), (True, None), (False, None), (True, EVERYTHING)):
        config = ServerConfig(listen="127.0.0.1:0", events=events, buckets=CONFIG.buckets)
        async with running_server(config, SimulatedStore(directory)) as server:
            async with connect(server.url("b")) as client:
                await client.set("k", "v")
            if not events:
                continue
            async with follow_events(server.url(), consumer="c") as feed:
                first = await next_told(feed)
                assert (first == EVERYTHING) is (expected == EVERYTHING)
                with trio.move_on_after(0.2):
                    await next_told(feed)


async def test_a_feed_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    port = free_port()
    config = ServerConfig(
        listen=f"127.0.0.1:{port}", data_dir=str(tmp_path), buckets=CONFIG.buckets
    )
    async with follow_events(f"upr://127.0.0.1:{port}", consumer="c", draw=lambda: 0.0) as feed:
        for index in range(2):
            async with started_server(config) as server:
                if not index:
                    assert await next_told(feed) == EVERYTHING
                async with connect(server.url("b")) as client:
                    await client.set("k", "v")
                # The second server restores the queues of the first.
                while not (await event(feed)).updates:
                    pass


async def test_a_wrong_request_is_refused_and_the_connection_stays_open(server: Server) -> None:
    for options, message in (
        ({"consumer": "no name"}, "invalid consumer name"),
        ({"consumer": ".compaction"}, "invalid consumer name"),
        ({"consumer": "x" * 101}, "invalid consumer name"),
        ({"consumer": "c", "timeout_s": 3601}, "the timeout is"),
        ({"consumer": "c", "timeout_s": 0}, "the timeout is"),
        ({"consumer": "c", "pattern": "x" * 201}, "a pattern is"),
    ):
        async with follow_events(server.url(), **options) as feed:
            with pytest.raises(ServerError, match=message) as refusal:
                await next_told(feed)
            assert refusal.value.status is Status.BAD_ARGUMENT


async def test_a_consumer_above_the_limit_is_refused(server: Server) -> None:
    async with AsyncExitStack() as stack:
        for index in range(CONSUMERS_MAX):
            await stack.enter_async_context(feed_of(server, f"c{index}"))
        async with follow_events(server.url(), consumer="one-more") as feed:
            with pytest.raises(ServerError) as refusal:
                await next_told(feed)
            assert refusal.value.status is Status.LIMIT_REACHED
        # The refused consumer is not registered.
        assert bus_of(server).statistics()["consumers"] == CONSUMERS_MAX


@asynccontextmanager
async def asking_peer(server: Server) -> AsyncIterator[Peer]:
    """A peer that has greeted the server."""
    async with await trio.open_tcp_stream(server.host, server.port) as stream:
        peer = Peer(stream)
        await peer.send()
        await peer.receive(HelloReply)
        yield peer


async def test_a_connection_may_ask_again_after_another_one_took_its_consumer_over(
    server: Server,
) -> None:
    async with asking_peer(server) as first, asking_peer(server) as second:
        await first.send(NextEvents("c", opaque=first.opaque()))
        batch = (await first.receive(EventsReply)).batch
        await first.send(NextEvents("c", batch, wait_ms=30_000, opaque=first.opaque()))
        await eventually(lambda: bus_of(server).statistics()["asking"] == 1, "it waits")
        await second.send(NextEvents("c", batch, wait_ms=30_000, opaque=second.opaque()))
        assert (await first.receive(Refusal)).status == Status.SUPERSEDED
        await first.send(NextEvents("c", batch, opaque=first.opaque()))
        assert isinstance(await first.receive(Message), EventsReply)


async def test_a_server_without_a_bus_refuses_requests_for_events() -> None:
    config = ServerConfig(listen="127.0.0.1:0", events=False, buckets=CONFIG.buckets)
    async with running_server(config, SimulatedStore()) as server:
        async with connect(server.url("b")) as client:
            await client.set("_design/x", "v")
        async with follow_events(server.url(), consumer="c") as feed:
            with pytest.raises(ServerError) as refusal:
                await next_told(feed)
            assert refusal.value.status is Status.UNSUPPORTED


async def test_a_closed_feed_and_a_feed_without_a_server_raise_errors(server: Server) -> None:
    async with feed_of(server) as feed:
        pass
    with pytest.raises(ClosedError):
        await next_told(feed)
    async with follow_events("upr://127.0.0.1:1", consumer="c", retry_timeout_s=0) as feed:
        with pytest.raises(BrokenError):
            await next_told(feed)


def test_a_request_for_events_fits_into_a_small_frame() -> None:
    assert MESSAGES[NextEvents.opcode].body_bytes_max <= 4096


async def test_a_consumer_with_another_filter_looks_at_everything(
    server: Server,
) -> None:
    async with connect(server.url("b")) as client:
        for index in range(20):
            await client.create_bucket(f"other-{index}")
        async with feed_of(server, pattern="b") as feed:
            for index in range(20):
                await client.delete_bucket(f"other-{index}")
            await client.set("k", "v")
            assert (await event(feed)).bucket == "b"
        # Events that the old filter excluded were not counted, so a new filter begins with "look at
        # everything".
        async with follow_events(server.url(), consumer="c", pattern="new*") as feed:
            assert await next_told(feed) == EVERYTHING
            await client.create_bucket("new")
            assert (await event(feed)).bucket == "new"
