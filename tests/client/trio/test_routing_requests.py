"""Requests to several nodes: each to the one whose partition it is about."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from tests.kit.fake_cluster import FakeCluster
from tests.kit.fake_server import FakeConnection, FakeServer
from upr_protocol.client import Address, Client, NotDurableError, connect
from upr_protocol.client.core.retry import WAIT_S_MAX
from upr_protocol.client.options import FIRST_ATTEMPT_TIMEOUT_S
from upr_protocol.client.trio.client import LOCATE_S
from upr_protocol.client.trio.dispatcher import REQUEST_RETRY_TIMEOUT_S
from upr_protocol.errors import BrokenError, ClosedError, ServerError, Status, UprError
from upr_protocol.ids import SEQ_MAX, Durability, PartitionId
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import Await, Get, Lease, LeaseAction, LeaseReply, Message, Mutate

URL = "upr://a,b,c/b"
KEYS = [f"key-{index}" for index in range(60)]


@pytest.fixture
def cluster(nursery: trio.Nursery) -> FakeCluster:
    return FakeCluster(nursery, "abc", 6)


def key_of(cluster: FakeCluster, partition: int) -> str:
    return next(key for key in KEYS if cluster.any.partition_of(key.encode()).id == partition)


async def test_each_key_is_read_at_the_node_of_its_partition(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with connect("upr://b/b", dial=cluster.dial) as client:
        for key in KEYS:
            write_result = await client.set(key, f"value of {key}")
            assert (
                await client.await_durable(write_result, Durability.PERSISTED) == write_result.seq
            )
        items = await client.get_many([*KEYS, "none"])
        assert [item and item.value.decode() for item in items] == [
            *(f"value of {key}" for key in KEYS),
            None,
        ]
        for name in "abc":
            (connection,) = cluster.server(name).connections
            assert connection.counts[Mutate] == sum(
                cluster.any.partition_of(key.encode()).id % 3 == "abc".index(name) for key in KEYS
            )
            assert connection.counts[Get] == 2
    assert cluster.open == 0


async def test_requests_follow_the_map(cluster: FakeCluster, autojump_clock: MockClock) -> None:
    async with connect(URL, dial=cluster.dial) as client:
        for turn in range(6):
            names = "abc"[turn % 2] + "abc"[turn % 3]
            cluster.move({turn: Assignment(active=names[0])}, tell=set(names))
            for key in KEYS[:20]:
                await client.increment(key)
            cluster.tell("abc")
            assert all(await client.get_many(KEYS[:20]))
    assert set(cluster.any.contents().values()) == {b"6"}


async def test_a_wait_for_durability_goes_on_elsewhere_for_the_rest_of_its_time(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """The node that hands the partition over refuses the wait late."""
    a, b = cluster.server("a"), cluster.server("b")
    deadlines_ms: list[int] = []

    def note_deadline(request: Message) -> None:
        if isinstance(request, Await):
            deadlines_ms.append(request.deadline_ms)

    a.refuse = b.refuse = note_deadline
    async with connect(URL, dial=cluster.dial) as client, trio.open_nursery() as nursery:
        write_result = await client.set(key_of(cluster, 0), "1")
        a.held.add(Await)
        nursery.start_soon(
            partial(client.await_durable, write_result, Durability.PERSISTED, timeout_s=20.0)
        )
        await trio.sleep(15)
        cluster.move({0: Assignment(active="b")})
        a.release()
    assert [deadline_ms for deadline_ms in deadlines_ms if deadline_ms > 5000] == [20_000]
    assert len(deadlines_ms) > 1


@asynccontextmanager
async def left_with_a_change(cluster: FakeCluster, client: Client) -> AsyncIterator[FakeServer]:
    """All that `a` had has gone to `b`, and `client` knows it, while a change of a key of partition
    0 is on its way to `a`."""
    a = cluster.server("a")
    a.held.add(Mutate)
    await trio.sleep(1)
    cluster.move({partition: Assignment(active="b") for partition in (0, 2, 3, 5)}, tell="bc")
    # The new map is asked for.
    await client.set(key_of(cluster, 2), "1")
    await trio.sleep(5)
    assert len(a.connections) == 1
    yield a
    await trio.sleep(5)
    assert not a.connections


async def test_a_node_that_is_let_go_still_answers_open_requests(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """It had made the change already."""
    async with connect("upr://b/b", dial=cluster.dial) as client, trio.open_nursery() as nursery:
        numbers: list[int | None] = []

        async def count() -> None:
            numbers.append((await client.increment(key_of(cluster, 0))).count)

        nursery.start_soon(count)
        async with left_with_a_change(cluster, client) as a:
            a.release()
        assert numbers == [1]
        assert client.statistics().open_requests == 0


async def test_a_node_that_is_let_go_may_fail_without_harm(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    key = key_of(cluster, 0)
    async with connect("upr://b/b", dial=cluster.dial) as client, trio.open_nursery() as nursery:

        async def count() -> None:
            with pytest.raises(ServerError):
                await client.increment(key)

        nursery.start_soon(count)
        async with left_with_a_change(cluster, client) as a:
            (connection,) = a.connections
            # No other connection would fare better.
            connection.session.fail(Status.UNKNOWN_MESSAGE, "what is that?")
            connection.wake()
        assert (await client.increment(key)).count == 1


async def test_requests_wait_until_their_partition_has_an_active_node(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    key = key_of(cluster, 2)
    async with connect(URL, dial=cluster.dial, retry_timeout_s=10) as client:
        await client.set(key, "1")
        cluster.move({2: Assignment(handing_over="c")})

        async def appoint() -> None:
            await trio.sleep(4)
            cluster.move({2: Assignment(active="a")})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(appoint)
            await client.set(key, "2")
            assert 4 <= trio.current_time() < 4.6
        cluster.move({2: Assignment()})
        with pytest.raises((BrokenError, ServerError)):
            await client.set(key, "3")
        # Nothing is wrong with the others.
        await client.set(key_of(cluster, 1), "4")
        item = await client.get(key_of(cluster, 1))
        assert item is not None
        assert item.value == b"4"


async def test_leaving_ends_requests_that_wait_for_a_node(
    cluster: FakeCluster, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    key = key_of(cluster, 2)
    end_event = trio.Event()

    async def ask(client: Client) -> None:
        with pytest.raises(ClosedError):
            await client.set(key, "1")
        end_event.set()

    async with connect(URL, dial=cluster.dial) as client:
        cluster.move({2: Assignment()})
        nursery.start_soon(ask, client)
        await trio.sleep(1)
    await end_event.wait()
    assert trio.current_time() < REQUEST_RETRY_TIMEOUT_S


async def test_a_lost_node_breaks_its_open_requests_and_no_later_ones(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    key = key_of(cluster, 0)
    async with connect(URL, dial=cluster.dial) as client:
        await client.set(key, "1")
        cluster.server("a").held.add(Get)

        async def ask() -> None:
            with pytest.raises(BrokenError):
                await client.get(key)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1)
            cluster.kill("a")
        cluster.move({0: Assignment(active="b"), 3: Assignment(active="b")}, tell="bc")
        item = await client.get(key)
        assert item is not None
        assert item.value == b"1"
        assert client.statistics().open_requests == 0


async def test_seqnos_come_from_the_node_of_each_partition(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=cluster.dial) as client:
        for key in KEYS:
            await client.set(key, "v")
        rows = await client.seqnos()
        assert [(row.partition, row.high_seq) for row in rows] == [
            (p.id, p.high) for p in cluster.any.partitions
        ]
        assert [row.partition for row in await client.seqnos([4, 1])] == [1, 4]
        with pytest.raises(ServerError) as refused:
            await client.seqnos([1, 900])
        assert refused.value.status is Status.NOT_MY_PARTITION
        infos = client.partitions()
        assert [info.partition for info in infos] == list(map(PartitionId, range(6)))
        cluster.move({0: Assignment(active="b")})
        assert len(await client.seqnos()) == 6


async def test_a_change_without_durability_in_time_raises_not_durable(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    for name in "abc":
        cluster.server(name).refuse = lambda m: (
            Status.NOT_DURABLE_YET if isinstance(m, Mutate) else None
        )
    async with connect(URL, dial=cluster.dial) as client:
        with pytest.raises(NotDurableError, match="was made but could still be lost") as caught:
            await client.set("k", "v", durability=Durability.REPLICATED, copies=1)
        assert caught.value.status is Status.NOT_DURABLE_YET
        assert caught.value.written is None


async def test_connect_returns_once_all_nodes_were_tried(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with connect("upr://b/b", dial=cluster.dial) as client:
        assert [info.partition for info in client.partitions()] == list(range(6))
    assert trio.current_time() == 0
    cluster.kill("a")
    async with connect("upr://b/b", dial=cluster.dial) as client:
        assert [info.partition for info in client.partitions()] == [1, 2, 4, 5]
    assert trio.current_time() == 0
    cluster.silent.add("a")
    cluster.move({0: Assignment(), 1: Assignment()})
    async with connect("upr://b/b", dial=cluster.dial, connect_timeout_s=0.5) as client:
        assert [info.partition for info in client.partitions()] == [2, 4, 5]
    assert trio.current_time() == pytest.approx(0.5)


async def test_connect_does_not_wait_long_for_a_node_that_is_not_needed(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    cluster.silent.add("a")
    async with connect("upr://b/b", dial=cluster.dial) as client:
        assert trio.current_time() == pytest.approx(LOCATE_S)
        await client.set(key_of(cluster, 1), "v")
        assert trio.current_time() == pytest.approx(LOCATE_S)
        with trio.move_on_after(5) as waiting:
            await client.set(key_of(cluster, 0), "v")
        assert waiting.cancelled_caught


async def test_connect_goes_on_to_the_next_host_when_one_hangs(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    cluster.silent.add("a")
    async with connect(URL, dial=cluster.dial) as client:
        assert trio.current_time() == pytest.approx(FIRST_ATTEMPT_TIMEOUT_S + LOCATE_S)
        await client.set(key_of(cluster, 1), "v")
    began_at = trio.current_time()
    cluster.silent.update("bc")
    with pytest.raises(BrokenError, match="upr://b:12000/b: it did not answer in time"):
        async with connect(URL, dial=cluster.dial, connect_timeout_s=10):
            pass
    assert trio.current_time() - began_at == pytest.approx(2 * FIRST_ATTEMPT_TIMEOUT_S + 30)


async def test_a_host_that_is_slow_is_connected_to_when_no_other_can_be(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async def dial(address: Address) -> trio.abc.Stream:
        if address.host == "c":
            raise ConnectionRefusedError("nobody is there")
        await trio.sleep(5)
        return await cluster.dial(address)

    async with connect("upr://a,b,c/b", dial=dial) as client:
        await client.set(key_of(cluster, 1), "v")


async def test_connect_gives_nodes_that_are_far_away_the_time_that_the_first_took(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async def dial(address: Address) -> trio.abc.Stream:
        await trio.sleep(2 if address.host == "b" else 5)
        return await cluster.dial(address)

    async with connect("upr://b/b", dial=dial) as client:
        assert len(client.partitions()) == 6
    assert trio.current_time() == pytest.approx(7)


async def test_renewing_a_lease_fails_unless_every_node_has_renewed_it(
    cluster: FakeCluster, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lease(connection: FakeConnection, message: Lease) -> None:
        connection.session.send(
            LeaseReply(message.lease_id, message.time_to_live_s, (), opaque=message.opaque)
        )

    def asked() -> str:
        servers = {name: cluster.server(name) for name in "abc"}
        return "".join(
            name
            for name, server in servers.items()
            for connection in server.connections
            for _ in range(connection.counts[Lease])
        )

    monkeypatch.setattr(FakeConnection, "_on_lease", lease, raising=False)
    # Longer than the pause between two attempts to connect becomes.
    retry_timeout_s = WAIT_S_MAX + 2
    async with connect("upr://b/b", dial=cluster.dial, retry_timeout_s=retry_timeout_s) as client:
        await client.renew_lease(7, time_to_live_s=60)
        assert asked() == "abc"
        cluster.kill("a")
        await trio.sleep(0.1)
        with pytest.raises(BrokenError, match="no connection to the active node of partition 0"):
            await client.renew_lease(7, time_to_live_s=60)
        assert asked() == "bbcc"
        with pytest.raises(BrokenError, match="no connection to the active node of partition 0"):
            await client.release_lease(7)
        # It comes back while it is waited for.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.release_lease, 7)
            await trio.sleep(1)
            assert asked() == "bbbbcccc"
            cluster.nets["a"].down = False
        assert asked() == "abbbbcccc"
        # A partition that is nowhere has no node to be asked.
        cluster.kill("a")
        cluster.move({0: Assignment(), 3: Assignment(active="c")})
        await trio.sleep(3)
        await client.renew_lease(7, time_to_live_s=60)
        assert asked() == "bbbbbccccc"


EVERYTHING = [(partition, 0, SEQ_MAX) for partition in range(6)]


async def test_a_lease_is_acquired_at_the_node_that_has_become_active(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=cluster.dial) as client:
        cluster.move({0: Assignment(active="b")})
        lease = await client.acquire_lease(EVERYTHING[:1], time_to_live_s=60, owner="o", lease_id=7)
        assert [leased.partition for leased in lease.ranges] == [0]
        assert list(cluster.server("b").leases) == [7]
        assert not cluster.server("a").leases


@pytest.mark.parametrize("to", ["a", "c"])
async def test_a_lease_whose_partitions_have_moved_is_not_acquired_again(
    cluster: FakeCluster, autojump_clock: MockClock, to: str
) -> None:
    """Its node keeps the ranges, and the new one takes others or has none: together they would
    lack partitions, or have some twice."""
    async with connect(URL, dial=cluster.dial) as client:

        async def acquire(lease_id: int) -> list[PartitionId]:
            lease = await client.acquire_lease(
                EVERYTHING, time_to_live_s=60, owner="o", lease_id=lease_id
            )
            return [leased.partition for leased in lease.ranges]

        assert await acquire(7) == await acquire(7) == list(range(6))
        # `a` has one more of which the lease has no range there, and keeps the other; or `b` has
        # none any more.
        cluster.move({1: Assignment(active=to), 4: Assignment(active=to)})
        await client.seqnos()  # which learns the map
        with pytest.raises(ServerError, match="another node has become active") as refused:
            await acquire(7)
        assert refused.value.status is Status.RANGE_GONE
        assert await acquire(8) == list(range(6))


async def test_a_new_lease_begins_anew_when_a_partition_has_moved_meanwhile(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    """`a` has granted its part before `c` says that `a` has one of its partitions now."""
    async with connect(URL, dial=cluster.dial) as client:
        cluster.move({5: Assignment(active="a")})
        lease = await client.acquire_lease(EVERYTHING, time_to_live_s=60, owner="o")
        assert [leased.partition for leased in lease.ranges] == list(range(6))
        for name in "abc":
            assert list(cluster.server(name).leases) == [lease.lease_id]


@pytest.mark.parametrize("failure", ["refused", "away", "cancelled"])
async def test_a_new_lease_that_one_node_does_not_grant_is_released_at_the_others(
    cluster: FakeCluster, autojump_clock: MockClock, failure: str
) -> None:
    """Nobody knows its ID, and it would hold back their compaction until it ends by itself."""
    is_cancelled = failure == "cancelled"
    granted: list[int] = []
    server = cluster.server("c")

    def refuse(message: Message) -> Status | None:
        if not isinstance(message, Lease) or message.action != LeaseAction.ACQUIRE:
            return None
        granted.extend(cluster.server("a").leases)
        return Status.LIMIT_REACHED if failure == "refused" else None

    async with connect(URL, dial=cluster.dial) as client:
        await client.seqnos()
        server.refuse = refuse
        if failure == "away":
            cluster.kill("c")
        elif is_cancelled:
            server.held.add(Lease)
        with (
            trio.CancelScope() as scope,
            nullcontext() if is_cancelled else pytest.raises(UprError),
        ):
            scope.deadline = trio.current_time() + 1.0 if is_cancelled else math.inf
            await client.acquire_lease(EVERYTHING, time_to_live_s=60, owner="o")
        assert scope.cancelled_caught == is_cancelled
        assert granted or failure != "refused"
        assert not cluster.server("a").leases
        assert not cluster.server("b").leases


async def test_a_lease_is_not_renewed_at_a_node_that_is_not_active_any_more(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=cluster.dial) as client:
        await client.acquire_lease(EVERYTHING, time_to_live_s=60, owner="o", lease_id=7)
        cluster.move({0: Assignment(active="b")})
        await client.seqnos()
        with pytest.raises(ServerError, match="another node has become active") as refused:
            await client.renew_lease(7, time_to_live_s=60)
        assert refused.value.status is Status.RANGE_GONE
        # A node without any partition is not asked for what it holds.
        cluster.move({3: Assignment(active="b")})
        await client.seqnos()
        lease = await client.renew_lease(7, time_to_live_s=60)
        assert [leased.partition for leased in lease.ranges] == [1, 2, 4, 5]


@pytest.mark.parametrize("url", [URL, "upr://c/b"])
@pytest.mark.parametrize("revision", [2, 4])
async def test_a_bucket_that_was_created_again_is_found_by_its_new_map(
    cluster: FakeCluster, autojump_clock: MockClock, revision: int, url: str
) -> None:
    """Its map begins again with a low revision, or has the same one by now."""
    async with connect(url, dial=cluster.dial) as client:
        while cluster.map.revision < 4:
            cluster.move({0: Assignment(active="b")})
        for key in KEYS:
            await client.set(key, "1")
        cluster.create_again("c", revision=revision)
        await trio.sleep(1)
        for key in KEYS:
            await client.set(key, "2")
        assert trio.current_time() < 2
        # From there on the higher revision counts again.
        cluster.move({0: Assignment(active="b")})
        for key in KEYS:
            await client.set(key, "3")
    assert cluster.open == 0


async def test_an_older_map_does_not_count_while_a_node_may_have_the_newer_one(
    cluster: FakeCluster, autojump_clock: MockClock
) -> None:
    key, other_key = key_of(cluster, 0), key_of(cluster, 2)
    async with connect(URL, dial=cluster.dial, retry_timeout_s=5) as client:
        while cluster.map.revision < 4:
            cluster.move({0: Assignment(active="b")})
        await client.set(key, "1")
        # The active node of partition 2 has the newer map, though it does not answer for a while.
        cluster.create_again("a", revision=2, names="ab")
        for is_down in (False, True, False):
            cluster.nets["c"].down = is_down
            cluster.nets["c"].cut()
            with pytest.raises((BrokenError, ServerError)):
                await client.set(key, "2")
        await client.set(other_key, "2")
        cluster.create_again("a", revision=2)
        await client.set(key, "3")
        await client.set(other_key, "3")
