"""Programs that block and several nodes."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Iterator

import pytest

from tests.kit.mirror import Mirror
from tests.kit.threaded import ThreadedCluster, trio_thread
from upr_protocol.chunk import CounterDelta, Mutation
from upr_protocol.client import (
    Address,
    BarrierReached,
    BlockingClient,
    BlockingConsumer,
    WriteResult,
)
from upr_protocol.client.blocking import connection
from upr_protocol.client.blocking.connection import SocketOptions
from upr_protocol.client.blocking.connection_pool import BlockingConnectionPool
from upr_protocol.client.options import FIRST_ATTEMPT_TIMEOUT_S
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.ids import SEQ_MAX, Durability, Operation
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import Await, Get, Lease, LeaseAction, Message

URL = "upr://a,b,c/b"
PARTITIONS = 6
KEYS = [f"key-{index}" for index in range(60)]


@pytest.fixture
def nodes() -> Iterator[ThreadedCluster]:
    with trio_thread() as thread:
        yield thread.call(lambda: ThreadedCluster(thread, "abc", PARTITIONS))


def client(nodes: ThreadedCluster, url: str = URL, **options: float) -> BlockingClient:
    return BlockingClient(url, dial=nodes.dial, **options)  # type: ignore[arg-type]


def increments(count: int) -> list[Mutation]:
    value = CounterDelta(1, 1).encode()
    return [
        Mutation(Operation.INCREMENT, b"key-%d" % (index % 60), value) for index in range(count)
    ]


def counted(nodes: ThreadedCluster) -> int:
    return sum(map(int, nodes.cluster.any.contents().values()))


def read(consumer: BlockingConsumer, mirror: Mirror) -> None:
    """Applies events until a barrier comes back."""
    consumer.barrier(b"%d" % mirror.mutations)
    for event in consumer:
        mirror.apply(event)
        if isinstance(event, BarrierReached):
            assert set(event.ends) == set(range(PARTITIONS))
            return


def test_requests_go_where_the_map_says(
    nodes: ThreadedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_UNREAD_S", math.inf)
    with client(nodes, "upr://c/b") as kv:
        for key in KEYS:
            kv.set(key, "1")
        nodes.move({0: Assignment(active="b"), 1: Assignment(active="c")})
        for key in KEYS:
            kv.increment(key)
        items = kv.get_many(KEYS)
        assert [item and item.value for item in items] == [b"2"] * 60
        assert [row.partition for row in kv.seqnos()] == list(range(PARTITIONS))
        with pytest.raises(ServerError) as refused:
            kv.seqnos([1, 900])
        assert refused.value.status is Status.NOT_MY_PARTITION
        assert [info.partition for info in kv.partitions()] == list(range(PARTITIONS))
        nodes.kill("a")
        nodes.move({3: Assignment(active="b")}, tell="bc")
        with pytest.raises(BrokenError):
            kv.seqnos()  # nobody listened while it was lost
        assert len(kv.seqnos()) == PARTITIONS
        with pytest.raises(BrokenError):
            client(nodes, "upr://a/b", retry_timeout_s=0.1).connect()


def test_a_bucket_that_was_created_again_is_found_by_its_new_map(nodes: ThreadedCluster) -> None:
    """Its map begins again with a low revision."""
    with client(nodes) as kv:
        while nodes.cluster.map.revision < 4:
            nodes.move({0: Assignment(active="b")})
        for key in KEYS:
            kv.set(key, "1")
        nodes.thread.call(lambda: nodes.cluster.create_again("c", revision=2))
        for key in KEYS:
            kv.set(key, "2")
        assert [item and item.value for item in kv.get_many(KEYS)] == [b"2"] * 60


def test_a_host_that_hangs_has_the_whole_time_only_if_no_other_answers(
    nodes: ThreadedCluster,
) -> None:
    now = 0.0
    dialled: list[tuple[str, float]] = []
    hanging = {"a"}

    def dial(address: Address, timeout_s: float) -> socket.socket:
        nonlocal now
        dialled.append((address.host, timeout_s))
        if address.host in hanging:
            now += timeout_s
            raise TimeoutError("timed out")
        return nodes.dial(address, timeout_s)

    options = SocketOptions(connect_timeout_s=10.0, dial=dial, clock=lambda: now)
    pool = BlockingConnectionPool(Address.parse(URL), options, random.random)
    assert pool.to_any_node().address.host == "b"
    assert dialled == [("a", FIRST_ATTEMPT_TIMEOUT_S), ("b", FIRST_ATTEMPT_TIMEOUT_S)]
    pool.close()
    hanging.update("bc")
    dialled.clear()
    pool = BlockingConnectionPool(Address.parse(URL), options, random.random)
    with pytest.raises(BrokenError, match="timed out"):
        pool.to_any_node()
    assert [host for host, timeout_s in dialled if timeout_s == FIRST_ATTEMPT_TIMEOUT_S] == [
        "a",
        "b",
    ]
    assert [host for host, timeout_s in dialled if timeout_s == 10.0] == ["c", "a", "b"]


def test_a_timeout_names_the_node_that_did_not_answer(nodes: ThreadedCluster) -> None:
    key = next(key for key in KEYS if nodes.cluster.any.partition_of(key.encode()).id % 3 == 1)
    others_key = next(key for key in KEYS if nodes.cluster.any.partition_of(key.encode()).id == 0)
    # Long enough for the node that does answer, also where the machine pauses.
    with client(nodes, timeout_s=0.5) as kv:
        nodes.cluster.server("b").held = {Get}
        with pytest.raises(TimeoutError, match=r"^upr://b:12000/b did not answer in [\d.]+ s$"):
            kv.get(key)
        with pytest.raises(TimeoutError, match=r"^upr://b:12000/b did not answer in [\d.]+ s$"):
            kv.get_many([others_key, key])


def test_a_wait_for_durability_has_the_rest_of_its_time_at_the_next_node(
    nodes: ThreadedCluster,
) -> None:
    key = next(key for key in KEYS if nodes.cluster.any.partition_of(key.encode()).id == 0)
    deadlines_ms: list[int] = []

    def note_deadline(request: Message) -> None:
        if isinstance(request, Await):
            deadlines_ms.append(request.deadline_ms)

    with client(nodes) as kv:
        write_result = kv.set(key, "1")
        for name in "ab":
            nodes.cluster.server(name).refuse = note_deadline
        nodes.move({0: Assignment(active="b")})
        kv.await_durable(write_result, Durability.PERSISTED, timeout_s=20.0)
    assert len(deadlines_ms) > 1
    assert all(deadline_ms < 20_000 for deadline_ms in deadlines_ms)


def test_batches_follow_their_partitions(nodes: ThreadedCluster) -> None:
    with client(nodes, "upr://nobody,b/b") as kv:
        assert all(isinstance(result, WriteResult) for result in kv.apply(increments(300)))
        nodes.move({0: Assignment(active="b"), 1: Assignment(active="c")})
        kv.apply(increments(300))
        nodes.kill("a")
        nodes.move({3: Assignment(active="b")}, tell="bc")
        kv.apply(increments(300))
        nodes.move(
            {partition: Assignment(active="c") for partition in range(PARTITIONS)}, tell="bc"
        )
        kv.apply(increments(300))
    assert counted(nodes) == 1200


def test_requests_fail_when_a_partition_has_no_active_node(nodes: ThreadedCluster) -> None:
    nodes.move({2: Assignment()})
    with (
        client(nodes, retry_timeout_s=1.0) as kv,
        pytest.raises(BrokenError, match="no node is active for partition"),
    ):
        kv.apply(increments(60))
    with (
        BlockingConsumer(URL, dial=nodes.dial, retry_timeout_s=1.0) as consumer,
        pytest.raises(BrokenError, match="no node is active for partition 2"),
    ):
        read(consumer, Mirror())


def test_streams_follow_their_partitions(nodes: ThreadedCluster) -> None:
    mirror = Mirror()
    with client(nodes) as kv, BlockingConsumer("upr://b/b", dial=nodes.dial) as consumer:
        kv.apply(increments(300))
        read(consumer, mirror)
        assert mirror.contents == nodes.cluster.any.contents()
        nodes.move({0: Assignment(active="b"), 1: Assignment(active="c")})
        kv.apply(increments(300))
        read(consumer, mirror)
        assert mirror.contents == nodes.cluster.any.contents()
        nodes.kill("a")
        nodes.move({3: Assignment(active="b")}, tell="bc")
        kv.apply(increments(300))
        read(consumer, mirror)
        assert mirror.contents == nodes.cluster.any.contents()


def test_a_blocking_consumer_until_now_ends_on_every_node(nodes: ThreadedCluster) -> None:
    with client(nodes) as kv:
        kv.apply(increments(300))
    mirror = Mirror()
    with BlockingConsumer(URL, dial=nodes.dial, end="now") as consumer:
        for event in consumer:
            mirror.apply(event)
        assert consumer.is_finished
    assert mirror.contents == nodes.cluster.any.contents()


def test_a_lease_belongs_to_the_node_that_was_active(nodes: ThreadedCluster) -> None:
    everything = [(partition, 0, SEQ_MAX) for partition in range(PARTITIONS)]
    with client(nodes) as kv:
        nodes.move({0: Assignment(active="b")})
        for _ in range(2):
            lease = kv.acquire_lease(everything[:1], time_to_live_s=60, owner="o", lease_id=7)
            assert [leased.partition for leased in lease.ranges] == [0]
        assert list(nodes.cluster.server("b").leases) == [7]
        assert not nodes.cluster.server("a").leases
        kv.acquire_lease(everything, time_to_live_s=60, owner="o", lease_id=8)
        nodes.move({0: Assignment(active="a")})
        kv.seqnos()  # which learns the map
        with pytest.raises(ServerError, match="another node has become active") as refused:
            kv.renew_lease(8, time_to_live_s=60)
        assert refused.value.status is Status.RANGE_GONE
        with pytest.raises(ServerError, match="another node has become active"):
            kv.acquire_lease(everything, time_to_live_s=60, owner="o", lease_id=8)
        lease = kv.acquire_lease(everything, time_to_live_s=60, owner="o", lease_id=9)
        assert [leased.partition for leased in lease.ranges] == list(range(PARTITIONS))


def test_a_new_lease_begins_anew_when_a_partition_has_moved_meanwhile(
    nodes: ThreadedCluster,
) -> None:
    """`a` has granted its part before `c` says that `a` has one of its partitions now."""
    everything = [(partition, 0, SEQ_MAX) for partition in range(PARTITIONS)]
    with client(nodes) as kv:
        kv.seqnos()
        nodes.move({5: Assignment(active="a")})
        lease = kv.acquire_lease(everything, time_to_live_s=60, owner="o")
        assert [leased.partition for leased in lease.ranges] == list(range(PARTITIONS))
        for name in "abc":
            assert list(nodes.cluster.server(name).leases) == [lease.lease_id]


def test_a_new_lease_that_one_node_does_not_grant_is_released_at_the_others(
    nodes: ThreadedCluster,
) -> None:
    everything = [(partition, 0, SEQ_MAX) for partition in range(PARTITIONS)]
    granted: list[int] = []

    def refuse(message: Message) -> Status | None:
        if not isinstance(message, Lease) or message.action != LeaseAction.ACQUIRE:
            return None
        granted.extend(nodes.cluster.server("a").leases)
        return Status.LIMIT_REACHED

    with client(nodes) as kv:
        kv.seqnos()
        nodes.thread.call(lambda: setattr(nodes.cluster.server("c"), "refuse", refuse))
        with pytest.raises(ServerError) as refused:
            kv.acquire_lease(everything, time_to_live_s=60, owner="o")
        assert refused.value.status is Status.LIMIT_REACHED
        assert granted
        assert not nodes.cluster.server("a").leases
        assert not nodes.cluster.server("b").leases


def test_a_lease_is_released_at_every_node_that_can_be_asked(
    nodes: ThreadedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_UNREAD_S", math.inf)
    everything = [(partition, 0, SEQ_MAX) for partition in range(PARTITIONS)]
    leases = {name: nodes.cluster.server(name).leases for name in "abc"}
    with BlockingClient(URL, dial=nodes.dial, sleep=lambda _: nodes.down.clear()) as kv:
        kv.acquire_lease(everything, time_to_live_s=60, owner="o", lease_id=7)
        nodes.kill("a")
        with pytest.raises(BrokenError):
            kv.release_lease(7)
        assert {name for name in leases if leases[name]} == {"a"}
        # It comes back while it is waited for.
        kv.release_lease(7)
        assert not any(leases.values())
        with pytest.raises(ServerError) as refused:
            kv.release_lease(7)
        assert refused.value.status is Status.BAD_ARGUMENT
