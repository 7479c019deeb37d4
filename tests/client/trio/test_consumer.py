"""Consuming: what events come, and what the application's pace does to them."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.kit.consuming import follow, until
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from tests.kit.mirror import Mirror
from tests.kit.steps import counted_steps
from upr_protocol.client import (
    BarrierReached,
    ChunkReceived,
    Consumer,
    CycleCompleted,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    consume,
)
from upr_protocol.errors import BrokenError, ClosedError, LocalProtocolError, ServerError, Status
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.wire import Stream

URL = "upr://fake/b"


def fill(server: FakeServer, count: int, value: bytes = b"v", keys: int = 50) -> None:
    for index in range(count):
        server.put(b"key-%d" % (index % keys), value + b"-%d" % index)


async def test_a_consumer_gets_a_snapshot_of_each_partition_and_then_the_changes(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 100)
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer:
        events = await until(consumer, CycleCompleted)
        for event in events:
            mirror.apply(event)
        assert mirror.contents == server.contents()
        starts = [event.partition for event in events if isinstance(event, SnapshotStart)]
        assert starts == [0, 1, 2, 3]
        assert events[-1] == CycleCompleted(1)
        server.put(b"key-1", b"new")
        partition = server.partition_of(b"key-1").id
        later = await until(consumer, CycleCompleted)
        for event in later:
            mirror.apply(event)
        assert [type(event) for event in later] == [
            SnapshotStart,
            ChunkReceived,
            SnapshotEnd,
            CycleCompleted,
        ]
        assert later[2] == SnapshotEnd(partition, server.partitions[partition].high)
        assert mirror.contents == server.contents()
        statistics = consumer.statistics()
        assert statistics.events == len(events) + 4
        assert statistics.mutations == mirror.mutations
        assert statistics.connections == 1


async def test_only_the_partitions_asked_for_are_streamed(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 100)
    async with consume(URL, dial=net.dial, partitions=[1, 3]) as consumer:
        events = await until(consumer, CycleCompleted)
    assert {event.partition for event in events if isinstance(event, SnapshotStart)} == {1, 3}


async def test_a_start_from_now_leaves_out_what_was_there(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 100)
    async with consume(URL, dial=net.dial, start="now") as consumer:
        assert await until(consumer, CycleCompleted) == [CycleCompleted(1)]
        server.put(b"key-1", b"new")
        events = await until(consumer, CycleCompleted)
        (chunk,) = [event.chunk for event in events if isinstance(event, ChunkReceived)]
        assert [mutation.value for mutation in chunk] == [b"new"]
        # "Now" was then: what came meanwhile is not skipped after a lost connection.
        server.put(b"key-2", b"newer")
        net.cut()
        server.put(b"key-3", b"newest")
        mirror = Mirror()
        while len(mirror.contents) < 2:
            mirror.apply(await anext(consumer))
        assert mirror.contents == {b"key-2": b"newer", b"key-3": b"newest"}


async def test_an_end_of_now_ends_with_what_was_there(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 100)
    expected = server.contents()
    mirror = Mirror()
    async with consume(URL, dial=net.dial, end="now") as consumer:
        ended_names = []
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, StreamEnded):
                ended_names.append(event)
        assert mirror.contents == expected
        assert sorted(event.partition for event in ended_names) == [0, 1, 2, 3]
        assert {event.reason for event in ended_names} == {Status.END_REACHED}
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)


async def test_an_end_of_now_ends_at_once_in_an_empty_bucket(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    async with consume(URL, dial=net.dial, end="now") as consumer:
        events = [event async for event in consumer]
    assert len([event for event in events if isinstance(event, StreamEnded)]) == 4


async def test_an_end_inside_a_snapshot_means_its_end(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 100)
    async with consume(URL, dial=net.dial, partitions=[0, 2], end={0: 3, 2: 1}) as consumer:
        events = [event async for event in consumer]
    ends = {event.partition: event.end for event in events if isinstance(event, SnapshotEnd)}
    assert ends == {0: server.partitions[0].high, 2: server.partitions[2].high}


async def test_bytes_are_acknowledged_when_the_next_event_is_asked_for(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 100, bytes(2000), keys=100)
    server.chunk_mutations = 10
    async with consume(URL, dial=net.dial, window_bytes=WINDOW_BYTES_MIN) as consumer:
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = server.connections
        used_bytes = connection.session.window.used_bytes
        # It may overshoot by one frame.
        assert WINDOW_BYTES_MIN <= used_bytes <= WINDOW_BYTES_MIN + 25_000
        received = 0
        async for event in consumer:
            await trio.testing.wait_all_tasks_blocked()
            assert connection.session.window.used_bytes <= WINDOW_BYTES_MIN + 25_000
            if isinstance(event, ChunkReceived):
                received += event.chunk.count
            if isinstance(event, CycleCompleted):
                break
        assert received == 100
        assert connection.session.window.used_bytes < WINDOW_BYTES_MIN // 4 + 25_000


async def test_bytes_of_a_lost_connection_are_not_acknowledged_on_the_next(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.partitions = server.partitions[:1]
    fill(server, 200, bytes(2000), keys=200)
    server.chunk_mutations = 10
    async with consume(URL, dial=net.dial, window_bytes=WINDOW_BYTES_MIN) as consumer:
        await trio.testing.wait_all_tasks_blocked()
        net.cut()
        await trio.sleep(5)
        (connection,) = server.connections
        used_bytes = connection.session.window.used_bytes
        assert used_bytes >= WINDOW_BYTES_MIN
        # The first four chunks came with the connection before.
        for index in range(4):
            assert len(await until(consumer, ChunkReceived)) == 1 + (index == 0)
            await trio.testing.wait_all_tasks_blocked()
            assert connection.session.window.used_bytes == used_bytes
        events = await until(consumer, SnapshotEnd)
        assert events[-1] == SnapshotEnd(PartitionId(0), server.partitions[0].high)


async def test_a_slow_application_is_not_taken_for_dead(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 100, bytes(2000), keys=100)
    mirror = Mirror()
    async with consume(URL, dial=net.dial, window_bytes=WINDOW_BYTES_MIN) as consumer:
        async for event in consumer:
            mirror.apply(event)
            await trio.sleep(600)
            if isinstance(event, CycleCompleted):
                break
    assert mirror.contents == server.contents()
    assert net.dialled == 1


async def test_events_that_nobody_asks_for_are_bounded(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer:
        await until(consumer, CycleCompleted)
        for index in range(3000):
            server.put(b"k", b"%d" % index)
            await trio.testing.wait_all_tasks_blocked()
        # Four events a change, had they all been read.
        assert 4096 <= consumer.statistics().waiting_events < 6000
        # A side that does not read does not take the other side for dead.
        await trio.sleep(1000)
        while mirror.contents.get(b"k") != b"2999":
            mirror.apply(await anext(consumer))
    assert net.dialled == 1


async def test_an_event_is_not_lost_by_cancelling(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 30)
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer:
        for index in range(200):
            if index == 100:
                fill(server, 30, b"more")
            with trio.move_on_after(0.001 * (index % 2)):
                mirror.apply(await anext(consumer))
    assert mirror.contents == server.contents()


async def test_two_tasks_cannot_iterate(net: FakeNet, autojump_clock: MockClock) -> None:
    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        nursery.start_soon(follow, consumer, Mirror())
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="another task"):
            await anext(consumer)
        nursery.cancel_scope.cancel()


# Barriers.


async def test_a_barrier_returns_once_everything_before_it_is_processed(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        nursery.start_soon(follow, consumer, mirror)
        for index in range(100):
            fill(server, 10, b"round-%d" % index)
            expected = server.contents()
            reached = await consumer.barrier()
            assert mirror.contents == expected
            assert reached.ends == {p.id: p.high for p in server.partitions}
        nursery.cancel_scope.cancel()


async def test_a_barrier_that_was_sent_by_hand_is_among_the_events(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 10)
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer:
        first, second = consumer.send_barrier(), consumer.send_barrier(b"mine")
        reached = []
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, BarrierReached):
                reached.append(event.cookie)
            if len(reached) == 2:
                break
        assert reached == [first, second] == [first, b"mine"]
    assert mirror.contents == server.contents()


async def test_a_cookie_cannot_be_used_twice_at_once(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    async with consume(URL, dial=net.dial) as consumer:
        consumer.send_barrier(b"mine")
        with pytest.raises(LocalProtocolError) as caught:
            consumer.send_barrier(b"mine")
        assert caught.value.status is Status.COOKIE_IN_USE
        with pytest.raises(LocalProtocolError):
            consumer.send_barrier(b"")
        await until(consumer, BarrierReached)
        with pytest.raises(LocalProtocolError):
            consumer.send_barrier(bytes(65))
        consumer.send_barrier(b"mine")


async def test_a_new_cookie_is_none_that_the_application_has_chosen(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """Also of a barrier that came back already, which the application has yet to see."""
    mirror = Mirror()
    cookies: list[bytes] = []

    async def process(consumer: Consumer) -> None:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, BarrierReached):
                cookies.append(event.cookie)

    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        consumer.send_barrier(b"upr-1")
        await trio.testing.wait_all_tasks_blocked()
        assert not len(consumer._streams.state.barriers)
        fill(server, 10)
        nursery.start_soon(process, consumer)
        assert (await consumer.barrier()).cookie == b"upr-2"
        assert mirror.contents == server.contents()
        assert cookies == [b"upr-1"]
        nursery.cancel_scope.cancel()


async def test_barrier_waits_while_too_many_are_open(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    back = []

    async def ask(consumer: Consumer) -> None:
        back.append(await consumer.barrier())

    server.paused = True
    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        for _ in range(300):
            nursery.start_soon(ask, consumer)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LocalProtocolError, match="64 barriers"):
            consumer.send_barrier()
        server.resume()
        nursery.start_soon(follow, consumer, Mirror())
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert len({event.cookie for event in back}) == 300


async def test_a_barrier_that_comes_back_wakes_one_of_the_tasks_that_wait_for_room(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    count = 1000
    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        nursery.start_soon(follow, consumer, Mirror())
        with counted_steps() as steps:
            async with trio.open_nursery() as waiting:
                for _ in range(count):
                    waiting.start_soon(consumer.barrier)
        nursery.cancel_scope.cancel()
    assert steps.count < 6 * count


async def test_open_barriers_are_sent_again_on_a_new_connection(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    cookies = []

    async def ask(consumer: Consumer) -> None:
        cookies.append(await consumer.barrier())

    server.paused = True
    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        nursery.start_soon(follow, consumer, Mirror())
        nursery.start_soon(ask, consumer)
        nursery.start_soon(ask, consumer)
        await trio.testing.wait_all_tasks_blocked()
        assert not cookies
        net.cut()
        server.paused = False
        await trio.sleep(10)
        assert len(cookies) == 2
        nursery.cancel_scope.cancel()


async def test_a_barrier_without_a_connection_is_sent_on_the_next(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with consume(URL, dial=net.dial) as consumer:
        await until(consumer, CycleCompleted)
        net.down = True
        net.cut()
        await trio.sleep(1)
        cookie = consumer.send_barrier()
        server.put(b"k", b"v")
        net.down = False
        events = await until(consumer, BarrierReached)
        assert events[-1] == BarrierReached(cookie, {p.id: p.high for p in server.partitions})
        assert any(isinstance(event, ChunkReceived) for event in events)


async def test_a_cancelled_barrier_is_not_among_the_events(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with consume(URL, dial=net.dial) as consumer:
        with trio.move_on_after(0.1):
            await consumer.barrier()
        assert await anext(consumer) == CycleCompleted(1)
        with trio.move_on_after(1) as scope:
            await anext(consumer)
        assert scope.cancelled_caught


async def test_barriers_end_with_the_streams(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def ask(consumer: Consumer) -> None:
        with pytest.raises(ClosedError):
            await consumer.barrier()

    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        await until(consumer, CycleCompleted)
        server.paused = True
        nursery.start_soon(ask, consumer)
        await trio.testing.wait_all_tasks_blocked()
        server.end_streams(Status.BUCKET_DELETED)
        assert len([event async for event in consumer]) == 4
        await ask(consumer)


async def test_a_barrier_that_has_come_back_is_not_among_the_last_events(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def ask(consumer: Consumer) -> None:
        with pytest.raises(ClosedError, match="every stream has ended"):
            await consumer.barrier()

    async with consume(URL, dial=net.dial) as consumer, trio.open_nursery() as nursery:
        nursery.start_soon(ask, consumer)
        await trio.testing.wait_all_tasks_blocked()
        assert not len(consumer._streams.state.barriers)
        server.end_streams(Status.BUCKET_DELETED)
        await trio.testing.wait_all_tasks_blocked()
        assert not [event async for event in consumer if isinstance(event, BarrierReached)]


async def test_barriers_end_with_the_consumer(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    end_event = trio.Event()

    async def ask(consumer: Consumer) -> None:
        with pytest.raises(ClosedError):
            await consumer.barrier()
        end_event.set()

    async with consume(URL, dial=net.dial) as consumer:
        net.nursery.start_soon(ask, consumer)
        await trio.testing.wait_all_tasks_blocked()
    await end_event.wait()


async def test_asking_for_an_event_ends_with_the_consumer(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    end_event = trio.Event()

    async def iterate(consumer: Consumer) -> None:
        with pytest.raises(ClosedError):
            await follow(consumer, Mirror())
        end_event.set()

    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with consume(URL, dial=net.dial) as consumer:
            net.nursery.start_soon(iterate, consumer)
            await trio.testing.wait_all_tasks_blocked()
            raise ZeroDivisionError
    await end_event.wait()


# Streams that end, and servers that refuse.


@pytest.mark.parametrize("reason", [Status.STATE_CHANGED, Status.ROLLBACK_NEEDED, Status.TOO_SLOW])
async def test_a_stream_that_ends_with_a_passing_error_is_requested_again(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock, reason: Status
) -> None:
    fill(server, 20)
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer:
        for event in await until(consumer, CycleCompleted):
            mirror.apply(event)
        server.end_streams(reason)
        fill(server, 20, b"more")
        while mirror.contents != server.contents():
            mirror.apply(await anext(consumer))
        assert consumer.statistics().connections == 2


async def test_a_bucket_that_is_deleted_ends_every_stream(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with consume(URL, dial=net.dial) as consumer:
        await until(consumer, CycleCompleted)
        server.end_streams(Status.BUCKET_DELETED)
        events = [event async for event in consumer]
    assert events == [StreamEnded(PartitionId(n), Status.BUCKET_DELETED) for n in range(4)]
    assert net.dialled == 1


async def test_a_partition_in_another_state_is_waited_for(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 20)
    server.partitions[2].state = PartitionState.PENDING

    async def activate() -> None:
        await trio.sleep(10)
        server.partitions[2].state = PartitionState.ACTIVE

    net.nursery.start_soon(activate)
    async with consume(URL, dial=net.dial) as consumer:
        await until(consumer, CycleCompleted)
    assert 10 <= trio.current_time() < 20


async def test_a_replica_can_be_asked_for(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    for partition in server.partitions:
        partition.state = PartitionState.REPLICA
    async with consume(URL, dial=net.dial, state=PartitionState.REPLICA) as consumer:
        await until(consumer, CycleCompleted)


@pytest.mark.parametrize(
    "status", [Status.NOT_MY_PARTITION, Status.WRONG_STATE, Status.SEQ_TOO_HIGH]
)
async def test_a_lasting_refusal_raises_its_error(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock, status: Status
) -> None:
    server.refuse = lambda m: status if isinstance(m, Stream) and m.partition == 1 else None
    async with consume(URL, dial=net.dial, retry_timeout_s=60) as consumer:
        with pytest.raises(ServerError, match="partition 1") as caught:
            await anext(consumer)
        assert caught.value.status is status
        assert "gave up after" in caught.value.__notes__[0]
    assert 60 <= trio.current_time() < 70
    assert net.dialled < 40


async def test_a_server_that_stays_away_raises_an_error_in_the_end(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill(server, 10)
    async with consume(URL, dial=net.dial, retry_timeout_s=60) as consumer:
        await trio.testing.wait_all_tasks_blocked()
        net.down = True
        net.cut()
        mirror = Mirror()
        with pytest.raises(BrokenError):
            await follow(consumer, mirror)
        # What came before is not lost.
        assert mirror.contents == server.contents()
        with pytest.raises(BrokenError):
            await consumer.barrier()


async def test_a_missing_bucket_raises_an_error_at_once(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(ServerError) as caught:
        async with consume("upr://fake/other", dial=net.dial):
            pass
    assert caught.value.status is Status.NO_BUCKET
    assert net.dialled == 1


async def test_an_address_that_never_answered_is_tried_once(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    net.down = True
    with pytest.raises(BrokenError):
        async with consume(URL, dial=net.dial):
            pass
    assert net.dialled == 1


async def test_a_first_connection_is_refused_or_gone_on_from(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """Cut at whatever byte of it: either the context is not entered, or the consumer goes on as it
    does after any other connection."""
    fill(server, 100)
    entered = []
    for count in range(0, 1200, 8):
        net.budgets = iter([(10_000, count)])
        mirror = Mirror()
        try:
            async with consume(URL, dial=net.dial) as consumer:
                entered.append(count)
                for event in await until(consumer, CycleCompleted):
                    mirror.apply(event)
        except BrokenError:
            assert count not in entered
        else:
            assert mirror.contents == server.contents()
    assert 0 < len(entered) < 150


async def test_an_exception_of_the_body_is_not_wrapped(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with consume(URL, dial=net.dial):
            raise ZeroDivisionError
    assert net.open == 0


@pytest.mark.parametrize("partitions", [[4], [0, 1023, 2]])
async def test_a_partition_that_the_bucket_does_not_have_raises_an_error(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock, partitions: list[int]
) -> None:
    with pytest.raises(ServerError, match="partitions 0 to 3") as caught:
        async with consume(URL, dial=net.dial, partitions=partitions):
            pass
    assert caught.value.status is Status.BAD_ARGUMENT
    assert net.dialled == 1


@pytest.mark.parametrize("partitions", [[], [-1], [3, 1024]])
async def test_impossible_partitions_raise_a_value_error(
    net: FakeNet, autojump_clock: MockClock, partitions: list[int]
) -> None:
    with pytest.raises(ValueError, match="partition"):
        async with consume(URL, dial=net.dial, partitions=partitions):
            pass
    assert net.dialled == 0


async def test_streams_accepted_and_ended_again_and_again_count_as_failures(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with consume(URL, dial=net.dial, retry_timeout_s=60) as consumer:
        with pytest.raises(ServerError) as caught:  # noqa: PT012
            async for _ in consumer:
                server.end_streams(Status.STATE_CHANGED)
        assert caught.value.status is Status.STATE_CHANGED
        assert "state changed" in consumer.statistics().last_failure
    assert net.dialled < 40


async def test_a_rollback_of_an_empty_consumer_is_an_error(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.refuse = lambda m: Status.ROLLBACK if isinstance(m, Stream) else None
    async with consume(URL, dial=net.dial) as consumer:
        with pytest.raises(ServerError) as caught:
            await anext(consumer)
        assert caught.value.status is Status.ROLLBACK
