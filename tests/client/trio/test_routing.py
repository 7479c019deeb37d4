"""Clients of several nodes: they go where the map says, whatever it says next."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.kit.consuming import follow, until
from tests.kit.effort import effort
from tests.kit.fake_cluster import FakeCluster
from tests.kit.mirror import Mirror
from upr_protocol.client import (
    Address,
    BarrierReached,
    Consumer,
    CycleCompleted,
    Publisher,
    StreamEnded,
    consume,
    publisher,
)
from upr_protocol.errors import BrokenError, Status
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import GetMap, Mutate, Stream

URL = "upr://a,b,c/b"


@pytest.fixture
def cluster(nursery: trio.Nursery) -> FakeCluster:
    return FakeCluster(nursery, "abc", 6)


def fill(cluster: FakeCluster, count: int, value: bytes = b"v", keys: int = 60) -> None:
    for index in range(count):
        cluster.any.put(b"key-%d" % (index % keys), value + b"-%d" % index)


@asynccontextmanager
async def mirrored(
    cluster: FakeCluster, url: str = URL, **options: object
) -> AsyncIterator[tuple[Consumer, Mirror]]:
    """A consumer, and the copy that a task makes of what it is told."""
    mirror = Mirror()
    async with (
        consume(url, dial=cluster.dial, **options) as consumer,  # type: ignore[arg-type]
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(follow, consumer, mirror)
        yield consumer, mirror
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def mirrored_publisher(
    cluster: FakeCluster, url: str = URL
) -> AsyncIterator[tuple[Consumer, Mirror, Publisher]]:
    """A consumer with its copy, and a publisher."""
    async with (
        mirrored(cluster, url) as (consumer, mirror),
        publisher(url, dial=cluster.dial) as sink,
    ):
        yield consumer, mirror, sink


async def set_keys(sink: Publisher, count: int, value: str) -> None:
    """Sets so many keys, in all partitions, to one value."""
    for index in range(count):
        await sink.set(f"key-{index}", value)


async def test_each_partition_is_read_where_it_is_active(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 200)
    async with mirrored(cluster) as (consumer, mirror):
        reached = await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
        assert reached.ends == {p.id: p.high for p in cluster.any.partitions}
        for name in "abc":
            (connection,) = cluster.server(name).connections
            assert connection.counts[Stream] == 2
        fill(cluster, 20, b"w")
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
    assert cluster.open == 0


@pytest.mark.parametrize("url", ["upr://nowhere,b/b", "upr://c/b", "upr://b:12000/b"])
async def test_any_node_of_the_cluster_can_be_named_in_the_url(
    cluster: FakeCluster, autojump_clock: MockClock, url: str
) -> None:
    fill(cluster, 50)
    async with mirrored(cluster, url) as (consumer, mirror):
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()


async def test_connecting_fails_when_no_named_node_answers(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    with pytest.raises(BrokenError, match="nothing at upr://nowhere"):
        async with consume("upr://nobody,nowhere/b", dial=cluster.dial):
            pass


async def test_a_single_node_is_never_asked_for_a_map(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    cluster = FakeCluster(nursery, "a")
    server = cluster.any
    server.map = None
    fill(cluster, 50)
    async with mirrored_publisher(cluster, "upr://a/b") as (consumer, mirror, sink):
        await sink.set("k", "v")
        await sink.flush()
        await consumer.barrier()
        assert mirror.contents == server.contents()
        assert server.bucket_opens == cluster.nets["a"].dialled == 2
        assert not any(connection.counts[GetMap] for connection in server.connections)
        # A lost connection is a reason to ask for the map: not here.
        cluster.nets["a"].cut()
        await sink.set("l", "v")
        await sink.flush()
        await consumer.barrier()
        assert mirror.contents == server.contents()
        assert server.bucket_opens == cluster.nets["a"].dialled == 4
        assert not any(connection.counts[GetMap] for connection in server.connections)


async def test_clients_of_a_single_node_follow_when_it_joins_a_cluster(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    cluster = FakeCluster(nursery, "ab")
    cluster.server("a").map = None
    fill(cluster, 50)
    async with mirrored_publisher(cluster, "upr://a/b") as (consumer, mirror, sink):
        await sink.set("k", "v")
        await consumer.barrier()
        cluster.tell("a")
        await set_keys(sink, 50, "new")
        await sink.flush()
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
        assert mirror.contents[b"key-49"] == b"new"
        assert cluster.server("b").connections


async def test_consumers_and_publishers_follow_a_partition_that_moves(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    async with mirrored_publisher(cluster) as (consumer, mirror, sink):
        await consumer.barrier()
        # Others to that node, which asked for the map, may still be about to close.
        (untouched,) = (c for c in cluster.server("c").connections if c.counts[Stream])
        cluster.move({0: Assignment(active="b"), 3: Assignment(active="b")})
        for index in range(100):
            await sink.set(f"key-{index}", f"after-{index}")
        await sink.flush()
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
        assert mirror.contents[b"key-99"] == b"after-99"
        assert untouched in cluster.server("c").connections
        # Nobody goes on where nothing is.
        assert not cluster.server("a").connections


async def test_publishing_goes_to_the_active_and_counts_once(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=cluster.dial, batch_mutations=5) as sink:
        for round_ in range(20):
            for _ in range(50):
                await sink.increment(f"counter-{random.randrange(40)}")
            partition = round_ % 6
            cluster.move(
                {partition: Assignment(active="abc"[round_ % 3])}, tell="abc"[round_ % 2 :]
            )
        cluster.tell("abc")
        await sink.flush()
        assert not sink.failures
    assert sum(int(value) for value in cluster.any.contents().values()) == 1000
    assert cluster.open == 0


async def test_clients_follow_the_partitions_of_a_lost_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    async with mirrored_publisher(cluster) as (consumer, mirror, sink):
        await consumer.barrier()
        cluster.kill("a")
        await set_keys(sink, 60, "after")
        await trio.sleep(3)
        assert sink.statistics().unanswered_batches
        began = trio.current_time()
        cluster.move({0: Assignment(active="b"), 3: Assignment(active="c")}, tell="bc")
        await sink.flush()
        assert trio.current_time() - began < 1.0
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
        assert set(mirror.contents.values()) == {b"after"}


async def test_a_silent_node_does_not_hold_up_other_nodes(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """Waiting for it does not hold up what others tell."""
    fill(cluster, 100)
    async with mirrored_publisher(cluster) as (consumer, mirror, sink):
        await consumer.barrier()
        cluster.silent.add("a")
        cluster.kill("a")
        await set_keys(sink, 60, "after")
        await trio.sleep(5)
        began = trio.current_time()
        cluster.move({0: Assignment(active="b"), 3: Assignment(active="c")}, tell="bc")
        await sink.flush()
        assert trio.current_time() - began < 1.0
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()


@pytest.fixture
def dials(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many connections clients asked for, by node."""
    counted: Counter[str] = Counter()
    dial = cluster.dial

    async def dial_and_count(address: Address) -> trio.abc.Stream:
        counted[address.host] += 1
        return await dial(address)

    monkeypatch.setattr(cluster, "dial", dial_and_count)
    return counted


async def test_connected_nodes_are_asked_for_the_map_on_their_connection(
    cluster: FakeCluster, dials: Counter[str], autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    async with mirrored(cluster) as (consumer, mirror):
        await consumer.barrier()
        began = dials.copy()
        # The node that is to have it does not know yet.
        cluster.move({0: Assignment(active="b")}, tell="ac")
        await trio.sleep(5)
        cluster.tell("b")
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
    assert dials == began


async def test_waiting_for_a_node_does_not_flood_the_others_with_requests(
    cluster: FakeCluster, dials: Counter[str], autojump_clock: MockClock
) -> None:
    """A failover that takes a while: each client asks, but not all the time."""
    fill(cluster, 100)
    async with mirrored(cluster) as (consumer, mirror):
        await consumer.barrier()
        began = dials.copy()
        connection_lists = [cluster.server(name).connections for name in "bc"]
        before = sum(c.counts[GetMap] for connections in connection_lists for c in connections)
        cluster.move({0: Assignment(), 3: Assignment()})
        cluster.kill("a")
        await trio.sleep(60)
        after = sum(c.counts[GetMap] for connections in connection_lists for c in connections)
        assert dials - began == {"a": dials["a"] - began["a"]}
        # Twice a second to four times, as waits are drawn.
        assert 60 * 2 < after - before < 60 * 4 * 2
        cluster.move({0: Assignment(active="b"), 3: Assignment(active="c")}, tell="bc")
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()


async def test_other_nodes_are_asked_for_the_map_on_one_lasting_connection(
    cluster: FakeCluster, dials: Counter[str], autojump_clock: MockClock
) -> None:
    cluster.move({partition: Assignment(active="a") for partition in range(6)})
    fill(cluster, 100)
    b, c = cluster.server("b"), cluster.server("c")
    async with mirrored(cluster) as (consumer, mirror):
        await consumer.barrier()
        await trio.sleep(5)
        assert not b.connections
        began = dials.copy()
        cluster.move({partition: Assignment() for partition in range(6)})
        cluster.kill("a")
        await trio.sleep(60)
        assert dials["b"] == began["b"] + 1
        (connection,) = c.connections
        assert 60 < connection.counts[GetMap] < 60 * 4
        # It falls silent, and another connection may fare better; and it is lost, and made again.
        c.held.add(GetMap)
        await trio.sleep(10)
        c.held.clear()
        assert 3 <= dials["c"] - began["c"] <= 6
        cluster.nets["b"].cut()
        await trio.sleep(1)
        assert dials["b"] == began["b"] + 2
        cluster.move({partition: Assignment(active="b") for partition in range(6)})
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
        assert len(b.connections) == 2
        await trio.sleep(5)
        assert len(b.connections) == 1
        assert not c.connections


async def test_a_silent_connection_is_not_relied_on_for_the_map(
    cluster: FakeCluster, dials: Counter[str], autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    async with mirrored(cluster) as (consumer, mirror):
        await consumer.barrier()
        began = dials["b"]
        cluster.server("b").held.add(GetMap)
        cluster.kill("a")
        cluster.move({0: Assignment(active="b"), 3: Assignment(active="b")}, tell="b")
        with trio.fail_after(5):
            await trio.lowlevel.checkpoint()
            while dials["b"] == began:  # noqa: ASYNC110  a counter tells nobody
                await trio.sleep(0.01)
        cluster.server("b").held.clear()
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()


async def test_the_first_node_is_let_go_when_it_holds_no_partition(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with publisher("upr://a/b", dial=cluster.dial) as sink:
        await sink.set("k", "1")
        await sink.flush()
        cluster.move({0: Assignment(active="b"), 3: Assignment(active="c")}, tell="bc")
        cluster.kill("a")
        await set_keys(sink, 60, "2")
        await sink.flush()
        cluster.move({partition: Assignment(active="c") for partition in range(6)}, tell="bc")
        cluster.kill("b")
        await set_keys(sink, 60, "3")
    assert cluster.any.contents() == {b"key-%d" % n: b"3" for n in range(60)} | {b"k": b"1"}


async def test_a_takeover_stalls_publishers_for_less_than_a_second(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """The old one hands over, nobody is active for a moment, then the new one is."""
    async with publisher(URL, dial=cluster.dial, linger_s=0.001) as sink:
        key = next(
            key for key in map(str, range(100)) if cluster.any.partition_of(key.encode()).id == 0
        )
        await sink.set(key, "1")
        await sink.flush()
        for pause_s in (0.0, 0.02, 0.3):
            cluster.move({0: Assignment(handing_over="a", replicas={"b": ""})})
            await sink.set(key, "2")
            await trio.sleep(pause_s)
            assert sink.statistics().unanswered_batches <= 1
            cluster.move({0: Assignment(active="b")})
            began = trio.current_time()
            await sink.flush()
            assert trio.current_time() - began < 0.5
            cluster.move({0: Assignment(active="a")})
            await sink.set(key, "3")
            await sink.flush()
    assert cluster.any.contents() == {key.encode(): b"3"}


async def test_a_partition_without_an_active_is_waited_for(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    cluster.move({2: Assignment(replicas={"a": ""})})
    fill(cluster, 100)
    async with (
        mirrored(cluster, end="now") as (consumer, mirror),
        publisher(URL, dial=cluster.dial) as sink,
    ):
        await set_keys(sink, 60, "after")
        with trio.move_on_after(20) as scope:
            await consumer.barrier()
        assert scope.cancelled_caught
        assert 2 not in mirror.ends
        assert len(mirror.ends) == 5
        cluster.move({2: Assignment(active="a")})
        await sink.flush()
        await trio.sleep(5)
        assert len(mirror.ends) == 6


async def test_clients_give_up_on_a_partition_without_an_active_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    cluster.move({2: Assignment()})
    gave_up = pytest.raises(BrokenError, match="no node is active for partition 2")
    async with consume(URL, dial=cluster.dial, retry_timeout_s=20) as consumer:
        with gave_up:
            await follow(consumer, Mirror())
    assert 20 <= trio.current_time() < 25
    began = trio.current_time()
    with gave_up:
        await fill_by_publishing(cluster)
    assert 19.9 < trio.current_time() - began < 25


async def test_the_retry_timeout_starts_anew_each_time_a_partition_loses_its_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """A partition for which nothing came since the last takeover is not waited for since then."""
    quiet, busy = (
        next(key for key in map(str, range(100)) if cluster.any.partition_of(key.encode()).id == n)
        for n in (0, 3)
    )
    began = 0.0

    async def run() -> None:
        nonlocal began
        async with publisher(URL, dial=cluster.dial, retry_timeout_s=10, linger_s=0.001) as sink:
            await sink.set(busy, "1")
            await sink.flush()
            for turn in range(3):
                old_active, new_active = "abab"[turn], "abab"[turn + 1]
                cluster.move(
                    {partition: Assignment(handing_over=old_active) for partition in (0, 3)}
                )
                await sink.set(quiet if turn == 2 else busy, "2")
                await trio.sleep(4)
                assert sink.statistics().unanswered_batches == 1
                cluster.move({partition: Assignment(active=new_active) for partition in (0, 3)})
                await sink.flush()
                await trio.sleep(20)
            cluster.move({partition: Assignment() for partition in (0, 3)})
            await sink.set(busy, "3")
            await trio.sleep(6)
            began = trio.current_time()
            await sink.set(quiet, "3")
            await trio.sleep(3)
            cluster.move({3: Assignment(active="c")})
            await trio.sleep(1)
            assert sink.statistics().unanswered_batches == 1

    with pytest.raises(BrokenError, match="no node is active for partition 0"):
        await run()
    assert 9.9 < trio.current_time() - began < 13


async def fill_by_publishing(cluster: FakeCluster) -> None:
    async with publisher(URL, dial=cluster.dial, retry_timeout_s=20) as sink:
        await set_keys(sink, 30, "v")


async def test_a_stale_map_is_asked_for_again(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """Only one node has the newest map, and it is the one that says no."""
    async with publisher("upr://b/b", dial=cluster.dial) as sink:
        await sink.set("k", "1")
        await sink.flush()
        cluster.move({partition: Assignment(active="c") for partition in range(6)}, tell="a")
        await set_keys(sink, 60, "2")
        await trio.sleep(1)
        cluster.tell("bc")
        await sink.flush()
    assert len(cluster.any.contents()) == 61
    assert not sink.failures


async def test_an_old_active_does_not_hold_back_what_the_new_one_has(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """A replica is read where there is one, and where that is away from another."""
    cluster.move(
        {partition: Assignment(active="a", replicas={"b": "", "c": ""}) for partition in range(6)}
    )
    fill(cluster, 100)
    async with mirrored(cluster, state=PartitionState.REPLICA) as (consumer, mirror):
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
        await trio.sleep(5)
        assert not cluster.server("a").connections
        assert not cluster.server("c").connections
        cluster.kill("b")
        fill(cluster, 100, b"w")
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()
        assert cluster.server("c").connections
        cluster.move(
            {partition: Assignment(active="c", replicas={"a": ""}) for partition in range(6)}
        )
        fill(cluster, 100, b"x")
        await consumer.barrier()
        assert mirror.contents == cluster.any.contents()


async def test_a_consumer_may_stay_with_one_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    async with consume(
        "upr://b/b", dial=cluster.dial, partitions=[1, 4], follow_map=False
    ) as consumer:
        await until(consumer, CycleCompleted)
        assert cluster.nets["b"].dialled == 1
        assert not cluster.server("a").connections
        (connection,) = cluster.server("b").connections
        assert not connection.counts[GetMap]


async def test_a_consumer_until_now_ends_on_every_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    expected = cluster.any.contents()
    mirror = Mirror()
    ended_names = []
    async with consume(URL, dial=cluster.dial, end="now") as consumer:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, StreamEnded):
                ended_names.append(event.partition)
    assert sorted(ended_names) == list(range(6))
    assert mirror.contents == expected
    assert cluster.open == 0


async def test_a_consumer_from_now_starts_on_every_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    async with mirrored(cluster, start="now") as (consumer, mirror):
        await consumer.barrier()
        assert mirror.contents == {}
        cluster.move({0: Assignment(active="c"), 1: Assignment(active="a")})
        fill(cluster, 60, b"w")
        await consumer.barrier()
        assert len(mirror.contents) == 60


async def test_a_barrier_comes_back_though_partitions_move(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    reached = []
    async with mirrored(cluster) as (consumer, mirror):
        await consumer.barrier()
        for name in "abc":
            cluster.server(name).paused = True

        async def pass_one() -> None:
            reached.append(await consumer.barrier())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_one)
            fill(cluster, 60, b"w")
            await trio.sleep(0.1)
            cluster.server("a").resume()
            cluster.server("b").resume()
            await trio.sleep(1)
            assert not reached
            cluster.move({partition: Assignment(active="a") for partition in range(6)})
            await trio.sleep(1)
        (event,) = reached
        assert set(event.ends) == set(range(6))
        assert mirror.contents == cluster.any.contents()


async def test_a_barrier_waits_for_a_partition_that_has_rolled_back_since_it_passed(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """The copy has nothing of the partition then, until it has come again."""
    fill(cluster, 100)
    reached = []
    async with mirrored(cluster) as (consumer, mirror):
        await consumer.barrier()
        cluster.server("c").paused = True

        async def pass_one() -> None:
            reached.append(await consumer.barrier())
            assert mirror.contents == cluster.any.contents()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_one)
            await trio.sleep(1)  # it has passed a and b
            partition = cluster.any.partitions[0]
            partition.fail_over(5000, int(partition.high) - 1)
            cluster.server("b").paused = True
            cluster.move({0: Assignment(active="b")})
            await trio.sleep(1)
            assert consumer.statistics().rollbacks == 1
            cluster.server("c").resume()
            await trio.sleep(1)
            assert not reached
            cluster.server("b").resume()
        assert set(reached[0].ends) == set(range(6))


async def test_a_barrier_through_several_nodes_is_one_event(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with consume(URL, dial=cluster.dial) as consumer:
        cookies = [consumer.send_barrier() for _ in range(5)]
        back = []
        async for event in consumer:
            if isinstance(event, BarrierReached):
                back.append(event.cookie)
                if len(back) == 3:
                    cluster.nets["b"].cut()
                if len(back) == 5:
                    break
        assert back == cookies
        assert consumer.statistics().connections >= 3


async def test_a_resume_state_is_valid_on_any_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    fill(cluster, 100)
    mirror = Mirror()
    state = None
    for turn in range(6):
        async with consume(URL, dial=cluster.dial, resume=state) as consumer:
            for _ in range(4):
                mirror.apply(await anext(consumer))
            state = consumer.resume_state
        mirror = Mirror(mirror.items)
        cluster.move({turn: Assignment(active="abc"[turn % 3])})
    async with consume(URL, dial=cluster.dial, resume=state, end="now") as consumer:
        async for event in consumer:
            mirror.apply(event)
    assert mirror.contents == cluster.any.contents()


async def test_a_change_that_is_not_durable_yet_is_sent_again(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    refusing = True
    for name in "abc":
        cluster.server(name).refuse = lambda m: (
            Status.NOT_DURABLE_YET if refusing and isinstance(m, Mutate) else None
        )
    async with publisher(URL, dial=cluster.dial) as sink:
        await sink.set("k", "v")
        await trio.sleep(10)
        refusing = False
    assert cluster.any.contents() == {b"k": b"v"}
    refusing = True
    async with publisher(URL, dial=cluster.dial, retry_timeout_s=5) as sink:
        await sink.set("k", "v")
        await sink.flush()
        assert [failure.status for failure in sink.failures] == [Status.NOT_DURABLE_YET]
        sink.failures.clear()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["move", "none", "cut", "down", "up", "stale", "tell", "pause"]),
        st.integers(0, 5),
        st.sampled_from("abc"),
    ),
    max_size=25,
)


@settings(max_examples=effort(30, 60), deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1 << 20))
# `c` refuses a run, is active again, and is sent the next run before the refused one.
@example(
    steps=[
        ("move", 0, "a"),
        ("stale", 5, "a"),
        ("stale", 0, "a"),
        ("up", 0, "a"),
        ("move", 0, "a"),
        ("move", 5, "c"),
        *[("move", 0, "a")] * 6,
    ],
    seed=1 << 20,
)
def test_nothing_is_lost_and_nothing_is_done_twice(
    steps: list[tuple[str, int, str]], seed: int
) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        async with trio.open_nursery() as nursery:
            cluster = FakeCluster(nursery, "abc", 6)
            added_count = 0
            async with (
                mirrored(cluster, draw=draw.random) as (consumer, mirror),
                publisher(URL, dial=cluster.dial, draw=draw.random, batch_mutations=3) as sink,
            ):
                for step, moved, name in steps:
                    for _ in range(draw.randrange(8)):
                        await sink.increment(f"counter-{draw.randrange(30)}")
                        added_count += 1
                    if step == "move":
                        cluster.move({moved: Assignment(active=name)})
                    elif step == "none":
                        cluster.move({moved: Assignment(replicas={name: ""})})
                    elif step == "stale":
                        cluster.move({moved: Assignment(active=name)}, tell=name)
                    elif step == "tell":
                        cluster.tell(name)
                    elif step == "cut":
                        cluster.nets[name].cut()
                    elif step == "down":
                        cluster.kill(name)
                    elif step == "up":
                        cluster.nets[name].down = False
                    await trio.sleep(draw.choice([0, 0.01, 0.2, 2.0]))
                for net in cluster.nets.values():
                    net.down = False
                cluster.move(
                    {
                        partition: Assignment(active=assignment.active or "a")
                        for partition, assignment in enumerate(cluster.map.partitions)
                    }
                )
                began = trio.current_time()
                await sink.flush()
                assert not sink.failures
                reached = await consumer.barrier()
                assert trio.current_time() - began < 30
                assert set(reached.ends) == set(map(PartitionId, range(6)))
                contents = cluster.any.contents()
                assert mirror.contents == contents
                assert sum(map(int, contents.values())) == added_count
            assert cluster.open == 0
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
