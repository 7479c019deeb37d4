"""What a driver asks of a server, without Spark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace

import pytest

from tests.kit.threaded import ThreadedCluster, ThreadedFake, trio_thread
from tests.spark.bucket import change, put
from upr_protocol.client import BlockingClient
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo
from upr_protocol.partition_map import Assignment
from upr_protocol.spark import driver_connection
from upr_protocol.spark.driver_client import BucketDriverClient, acquire_new_lease
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.wire import Await, Lease, LeaseAction, Message, SeqnosAt


def test_a_position_replaces_that_of_another_process(new_bucket: Callable[..., str]) -> None:
    url = new_bucket(2)
    change(url, put(range(20)))
    options = ReadOptions.parse({"url": url}, streaming=True)
    driver = BucketDriverClient(options)
    ends: dict[int, int] = {
        row.partition: row.persisted_seq for row in driver.wait_until_persisted().values()
    }
    driver.close()
    for seqs, numbers_behind in ((dict.fromkeys(ends, 0), 20), (ends, 0)):
        # It is not connected yet, and cannot end the lease that is there.
        driver = BucketDriverClient(options)
        driver.put_position(7, "orders", seqs)
        driver.close()
        with BlockingClient(url) as client:
            (consumer,) = client.stats(client.address.bucket)["leases"]["consumers"]
        assert consumer["numbers_behind"] == numbers_behind


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a driver has waited, each time; no time passes."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(driver_connection, "time", clock)
    return waits


@contextmanager
def changing_bucket(
    monkeypatch: pytest.MonkeyPatch, change_count: float
) -> Iterator[tuple[BucketDriverClient, list[Message]]]:
    """A bucket with one change, whose partition has begun another history each of the first so many
    times that it is waited for; and what it was asked for."""
    awaits: list[Message] = []

    def refuse(message: Message) -> Status | None:
        if not isinstance(message, Await):
            return None
        awaits.append(message)
        return Status.HISTORY_CHANGED if len(awaits) <= change_count else None

    with trio_thread() as thread:
        fake = thread.call(lambda: ThreadedFake(thread))
        fake.server.refuse = refuse
        fake.server.put(b"key", b"value")
        monkeypatch.setattr(
            driver_connection, "BlockingClient", partial(BlockingClient, dial=fake.dial)
        )
        options = ReadOptions.parse({"url": "upr://fake/b", "timeoutSeconds": "60"}, streaming=True)
        driver = BucketDriverClient(options)
        yield driver, awaits
        driver.close()


def test_a_barrier_that_meets_a_failover_waits_for_the_new_node(
    monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    """It has what was acknowledged as replicated. That may not be on its disk yet."""
    with changing_bucket(monkeypatch, 1) as (driver, awaits):
        assert max(row.high_seq for row in driver.wait_until_persisted().values()) == 1
        assert len(awaits) == 2
        assert len(waits) == 1


def test_a_barrier_pauses_between_failovers_and_gives_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    with changing_bucket(monkeypatch, math.inf) as (driver, awaits):
        with pytest.raises(PipelineError, match="has begun another history"):
            driver.wait_until_persisted()
        assert len(awaits) == len(waits) + 1 < 40
        assert 60 <= sum(waits) < 70


def test_numbers_at_a_time_are_asked_for_again_after_a_failover(
    monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    """A server refuses to say what another history had."""
    refusals = [Status.HISTORY_CHANGED]

    def refuse(message: Message) -> Status | None:
        return refusals.pop() if isinstance(message, SeqnosAt) and refusals else None

    with trio_thread() as thread:
        fake = thread.call(lambda: ThreadedFake(thread))
        fake.server.refuse = refuse
        monkeypatch.setattr(
            driver_connection, "BlockingClient", partial(BlockingClient, dial=fake.dial)
        )
        driver = BucketDriverClient(ReadOptions.parse({"url": "upr://fake/b"}))
        seqs = driver.seqnos_at_time(datetime(2026, 1, 31, tzinfo=UTC))
        assert seqs == dict.fromkeys(range(4), 0)
        assert not refusals
        assert len(waits) == 1
        driver.close()


def test_a_partition_of_a_bucket_that_was_created_again_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trio_thread() as thread:
        fake = thread.call(lambda: ThreadedFake(thread))
        monkeypatch.setattr(
            driver_connection, "BlockingClient", partial(BlockingClient, dial=fake.dial)
        )
        driver = BucketDriverClient(ReadOptions.parse({"url": "upr://fake/b", "partitions": "0"}))
        driver.seqnos()
        partition = fake.server.partitions[2]
        log = partition.log
        assert driver.has_partition(partition.id, log)
        assert driver.has_partition(partition.id, FailoverLog())
        assert not driver.has_partition(PartitionId(4), log)
        thread.call(lambda: partition.fail_over(99, SeqNo(0)))
        driver.seqnos()
        assert driver.has_partition(partition.id, log), "it is the same after a failover"
        assert not driver.has_partition(partition.id, FailoverLog.of_pairs([(7, 0)]))
        driver.close()


def test_a_new_lease_is_acquired_though_a_partition_moves_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`a` has granted its part before `b` says that `a` has one of its partitions now."""
    with trio_thread() as thread:
        nodes = thread.call(lambda: ThreadedCluster(thread, "ab", 4))
        monkeypatch.setattr(
            driver_connection, "BlockingClient", partial(BlockingClient, dial=nodes.dial)
        )
        driver = BucketDriverClient(ReadOptions.parse({"url": "upr://a,b/b"}))
        driver.seqnos()
        nodes.move({3: Assignment(active="a")})
        lease = acquire_new_lease(driver, [(partition, 0, SEQ_MAX) for partition in range(4)])
        assert [leased.partition for leased in lease.ranges] == list(range(4))
        for name in "ab":
            assert list(nodes.cluster.server(name).leases) == [lease.lease_id]
        driver.close()


def test_a_lease_that_a_node_does_not_grant_in_time_is_released_at_the_others(
    monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    """It held back their compaction until it ended by itself."""
    with trio_thread() as thread:
        nodes = thread.call(lambda: ThreadedCluster(thread, "ab", 4))
        client = partial(BlockingClient, dial=nodes.dial)
        monkeypatch.setattr(driver_connection, "BlockingClient", client)
        options = ReadOptions.parse({"url": "upr://a,b/b", "timeoutSeconds": "60"})
        driver = BucketDriverClient(options)
        driver.seqnos()
        granted: list[int] = []

        def refuse(message: Message) -> Status | None:
            if not isinstance(message, Lease) or message.action != LeaseAction.ACQUIRE:
                return None
            granted.extend(nodes.cluster.server("a").leases)
            return Status.TIMED_OUT

        thread.call(lambda: setattr(nodes.cluster.server("b"), "refuse", refuse))
        with pytest.raises(PipelineError, match="timeoutSeconds"):
            acquire_new_lease(driver, [(partition, 0, SEQ_MAX) for partition in range(4)])
        driver.close()
        assert granted
        assert not nodes.cluster.server("a").leases
