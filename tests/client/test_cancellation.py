"""Cancelled at any moment, clients leave nothing behind."""

from __future__ import annotations

import trio
import trio.testing
from trio.testing import MockClock

from tests.kit.cancellation import cancelled_at_each_step
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from tests.kit.mirror import Mirror
from upr_protocol.client import MemoryStore, ResumeState, consume, publisher

URL = "upr://fake/b"


async def test_a_cancelled_publisher_leaves_no_connection_open(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def work() -> None:
        async with publisher(URL, dial=net.dial, batch_mutations=2, buffer_bytes=1000) as sink:
            for index in range(12):
                await sink.set(b"%d" % (index % 5), bytes(100))
            net.cut()
            await sink.set("k", "v")
            await sink.flush()
            await sink.set("l", "v")

    def look() -> None:
        assert net.open == 0
        assert not server.connections

    assert (await cancelled_at_each_step(work, look)).times > 10
    assert server.contents().keys() == {b"0", b"1", b"2", b"3", b"4", b"k", b"l"}


async def test_a_cancelled_consumer_leaves_no_connection_open_and_continues(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    for index in range(20):
        server.put(b"%d" % index, b"v")
    store = MemoryStore()
    items: dict[int, dict[bytes, tuple[int, bytes]]] = {}

    async def work() -> None:
        async with consume(URL, dial=net.dial, resume=store) as consumer:
            mirror = Mirror()
            mirror.items = items
            async with trio.open_nursery() as nursery:

                async def iterate() -> None:
                    async for event in consumer:
                        mirror.apply(event)

                nursery.start_soon(iterate)
                await consumer.barrier()
                net.cut()
                await consumer.barrier()
                nursery.cancel_scope.cancel()

    def look() -> None:
        assert net.open == 0
        assert not server.connections
        if store.state is not None:
            # What is saved is never ahead of what was processed.
            for partition, position in store.state.positions.items():
                processed = [seq for seq, _ in items.get(partition, {}).values()]
                assert position.highest_received <= max(processed, default=0)
            ResumeState.decode(store.state.encode())

    assert (await cancelled_at_each_step(work, look)).times > 10
    assert {key for keys in items.values() for key in keys} == {b"%d" % n for n in range(20)}


async def test_a_consumer_of_much_that_waits_gives_way(
    net: FakeNet, server: FakeServer, mock_clock: MockClock
) -> None:
    for index in range(100):
        server.put(b"%d" % index, b"v")
    async with consume(URL, dial=net.dial) as consumer:
        await consumer.__anext__()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        with trio.CancelScope() as scope:
            scope.cancel()
            await consumer.__anext__()
        assert scope.cancelled_caught
        # Within the turn nobody is waited for.
        await consumer.__anext__()
        with trio.CancelScope() as scope:
            scope.cancel()
            await consumer.__anext__()
        assert not scope.cancelled_caught
