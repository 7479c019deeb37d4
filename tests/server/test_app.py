"""Servers that start from a configuration, on what their store has from before."""

from __future__ import annotations

import gc
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
import trio.testing

from tests.server.set_batches import batch
from upr_protocol.bucket_event import EventFilter
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import connect, consume
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Operation, PartitionState
from upr_protocol.partition_map import PartitionMap
from upr_server.app import Server, running_server
from upr_server.buckets import catalog
from upr_server.config import BucketConfig, ServerConfig
from upr_server.engine import Bucket, WriterToken, batch_of
from upr_server.engine.memory_policy import QUOTA_BYTES_MIN
from upr_server.runtime import System
from upr_server.storage.calls import LoadBuckets, Maintain, StoreCall
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import DataDirectoryError
from upr_server.storage.online.maintenance import REST_S
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

MIB = 1024 * 1024


async def buckets_of(
    config: ServerConfig, directory: SimulatedDirectory
) -> list[tuple[str, int, int]]:
    """Name, partitions and quota of each bucket of a server with this configuration."""
    async with (
        running_server(config, SimulatedStore(directory)) as server,
        connect(f"upr://127.0.0.1:{server.port}") as client,
    ):
        return [
            (row.name, row.partition_count, row.quota_bytes) for row in await client.list_buckets()
        ]


async def test_an_existing_bucket_keeps_its_partitions_and_gets_a_new_quota() -> None:
    directory = SimulatedDirectory()

    async def started(*buckets: BucketConfig) -> list[tuple[str, int, int]]:
        config = ServerConfig(listen="127.0.0.1:0", quota_bytes=64 * MIB, buckets=buckets)
        return await buckets_of(config, directory)

    assert await started(BucketConfig("b", 4)) == [("b", 4, 64 * MIB)]
    assert await started(BucketConfig("b", 8, 128 * MIB)) == [("b", 4, 128 * MIB)]
    assert await started(BucketConfig("c", 2)) == [("b", 4, 64 * MIB), ("c", 2, 64 * MIB)]


async def test_answers_without_room_in_a_lower_quota_are_deleted_from_disk_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise they would come back at every start, and a rollback would not delete them."""
    monkeypatch.setattr(catalog, "DELETED_ANSWERS_MAX", 100)
    directory = SimulatedDirectory()

    def running(quota_bytes: int) -> AbstractAsyncContextManager[Server]:
        buckets = (BucketConfig("b", 2, quota_bytes),)
        config = ServerConfig(listen="127.0.0.1:0", buckets=buckets)
        return running_server(config, SimulatedStore(directory))

    async def tokens_on_disk() -> list[set[tuple[bytes, int]]]:
        (stored_bucket,) = (await SimulatedStore(directory).ask(LoadBuckets())).buckets
        return [
            {(token.writer, token.counter) for token in partition.tokens}
            for partition in stored_bucket.partitions
        ]

    async with running(64 * MIB) as server:
        for partition in server.catalog.bucket("b").partitions:
            for number in range(600):
                token = WriterToken(number.to_bytes(16, "little"), 1 + partition.id)
                partition.mutate(batch_of(batch(number, 1), token), now=0.0)
    assert [len(tokens) for tokens in await tokens_on_disk()] == [600, 600]
    async with running(QUOTA_BYTES_MIN) as server:
        bucket = server.catalog.bucket("b")
        assert bucket.memory.writers <= bucket.memory_policy.answers_bytes(1)
        remembered_rows = [
            partition.repeated_batches.answers.answers_between(0, partition.high_seq)
            for partition in bucket.partitions
        ]
        remembered_tokens = [{row[:2] for row in rows} for rows in remembered_rows]
        assert all(0 < len(tokens) < 200 for tokens in remembered_tokens)
        assert await tokens_on_disk() == remembered_tokens
    assert await tokens_on_disk() == remembered_tokens


@pytest.mark.parametrize("events", [True, False])
async def test_an_idle_bucket_is_indexed_soon_after_an_update(
    autojump_clock: trio.testing.MockClock, events: bool
) -> None:
    looks: list[str] = []

    def delay(call: StoreCall[Any]) -> float:
        if isinstance(call, Maintain):
            looks.append(call.bucket)
        return 0.001

    buckets = (BucketConfig("updated", 1), BucketConfig("idle", 1))
    config = ServerConfig(listen="127.0.0.1:0", buckets=buckets, events=events)
    async with running_server(config, SimulatedStore(delay=delay)) as server:
        bucket = server.catalog.bucket("updated")
        (partition,) = bucket.partitions
        for index in range(1, 4):
            await trio.sleep(30.0)
            partition.mutate(batch_of(batch(index, 1)), now=0.0)
            await trio.sleep(2.0)
            assert partition.eviction.indexed_seq == partition.high_seq == index
        if events:
            # Maintenance runs after an update, and otherwise once each `REST_S`.
            looks.clear()
            await trio.sleep(10 * REST_S)
            partition.mutate(batch_of(batch(9, 1)), now=0.0)
            await trio.sleep(REST_S / 2)
            assert looks.count("updated") in range(12, 16)
            assert looks.count("idle") in range(9, 12)


async def test_more_partitions_than_allowed_are_refused() -> None:
    config = ServerConfig(listen="127.0.0.1:0", partitions_max=5)
    async with running_server(config, SimulatedStore()) as server, connect(server.url()) as client:
        await client.create_bucket("a", 3)
        with pytest.raises(ServerError, match="have 3 partitions, and may have 5") as refusal:
            await client.create_bucket("b", 3)
        assert refusal.value.status is Status.LIMIT_REACHED
        await client.create_bucket("b", 2)


async def test_the_memory_of_a_deleted_bucket_is_freed_soon(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gc.disable()  # otherwise the collector might free the bucket by chance
    try:
        async with running_server(ServerConfig(listen="127.0.0.1:0"), SimulatedStore()) as server:
            await server.catalog.create_bucket("short-lived", 2, 64 * MIB)
            server.catalog.bucket("short-lived").partitions[1].mutate(
                batch_of(batch(0, 100)), now=0.0
            )
            await trio.sleep(3.0)
            assert "short-lived" in names_of_buckets()
            await server.catalog.delete_bucket("short-lived")
            await trio.sleep(3.0)
            assert "short-lived" not in names_of_buckets()
    finally:
        gc.enable()


async def test_a_bucket_that_is_created_again_has_other_histories(
    autojump_clock: trio.testing.MockClock,
) -> None:
    histories: list[int] = []
    async with running_server(ServerConfig(listen="127.0.0.1:0"), SimulatedStore()) as server:
        for _ in range(2):
            await server.catalog.create_bucket("b", 8, 64 * MIB)
            for partition in server.catalog.bucket("b").partitions:
                ((history_id, seq),) = partition.failover_log.pairs()
                assert seq == 0
                histories.append(history_id)
            await server.catalog.delete_bucket("b")
    assert len(set(histories)) == 16
    assert max(histories) > 1 << 56, "they are drawn from 64 bits"


async def test_a_bucket_whose_files_cannot_be_deleted_is_refused_and_can_be_deleted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = SimulatedDirectory()

    def fail(_name: str) -> None:
        raise DataDirectoryError("cannot be deleted")

    config = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", 1),))
    async with running_server(config, SimulatedStore(directory)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(directory, "delete", fail)
            # At the second attempt the bucket is not served any more.
            for _ in range(2):
                with pytest.raises(DataDirectoryError):
                    await server.catalog.delete_bucket("b")
                with pytest.raises(ServerError, match="cannot be deleted") as refusal:
                    await server.catalog.create_bucket("b", 1, 64 * MIB)
                assert refusal.value.status is Status.DAMAGED
        await server.catalog.delete_bucket("b")
        await server.catalog.create_bucket("b", 1, 64 * MIB)


async def test_an_expired_item_is_deleted_without_a_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = System(time=trio.current_time)
    config = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", 1),))
    async with running_server(config, SimulatedStore(), system) as server:
        (partition,) = server.catalog.bucket("b").partitions
        now = trio.current_time()
        partition.mutate(batch_of(batch(0, 1, expiry=int(now) + 100)), now=now)
        await trio.sleep(95.0)
        assert partition.high_seq == 1
        await trio.sleep(10.0)
        assert (partition.high_seq, partition.item_count) == (2, 0)


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
async def test_a_clock_that_is_set_changes_no_timeout_of_a_consumer_of_events(
    autojump_clock: trio.testing.MockClock, step_s: float
) -> None:
    """One that asks in time is not cleared, and one that does not ask is, so that it takes no place
    of others for hours."""
    clock_s = 1e9
    system = System(time=lambda: clock_s + trio.current_time())

    async def ask(consumer: str, acknowledged: int = 0) -> tuple[int, bool]:
        batch_id, must_look, _ = await bus.next_events(
            consumer, EventFilter(), timeout_s=9.0, acknowledged=acknowledged, wait_s=1.0
        )
        return batch_id, must_look

    config = ServerConfig(listen="127.0.0.1:0")
    async with running_server(config, SimulatedStore(), system) as server:
        assert server.events is not None
        bus = server.events
        batch_id, _ = await ask("alive")
        await ask("dead")
        clock_s += step_s
        await trio.sleep(6.0)
        assert await ask("alive", batch_id) == (0, False)
        await trio.sleep(6.0)
        assert bus.statistics()["consumers"] == 1


def names_of_buckets() -> list[str]:
    """The names of all buckets in memory."""
    return [bucket.name for bucket in gc.get_objects() if isinstance(bucket, Bucket)]


async def test_expired_items_of_a_pending_partition_cost_no_processor_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A node that hands a partition over knows when items expire, but must not delete them."""
    config = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", 1),))
    ahead_s = 0.0
    system = System(time=lambda: time.time() + ahead_s)
    async with running_server(config, SimulatedStore(), system) as server:
        bucket = server.catalog.buckets.get("b")
        assert bucket is not None
        (partition,) = bucket.partitions
        chunk = Chunk.build([Mutation(Operation.SET, b"k", b"v", expiry=int(time.time()) + 1)])
        partition.mutate(batch_of(chunk), now=time.time())
        partition.change_state(PartitionState.PENDING, partition.failover_log)
        ahead_s = 10.0
        with trio.CancelScope() as scope:
            steps = StepCounter(scope)
            trio.lowlevel.add_instrument(steps)
            await trio.sleep(10)
        trio.lowlevel.remove_instrument(steps)
        ahead_s = -time.time()
        assert not scope.cancelled_caught
        assert partition.next_expiry() is not None


async def test_a_refusal_says_what_a_pending_partition_waits_for() -> None:
    """Its user has no map to reload, and an operator may have to do something."""
    config = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", 1),))
    async with running_server(config, SimulatedStore()) as server:
        bucket = server.catalog.buckets.get("b")
        assert bucket is not None
        (partition,) = bucket.partitions
        partition.change_state(PartitionState.PENDING, partition.failover_log)
        async with connect(server.url("b")) as client:
            with pytest.raises(ServerError, match=r"pending here, not active; .*`upr failover`"):
                await client.set("k", "v")
        async with consume(server.url("b"), retry_timeout_s=0.0) as consumer:
            with pytest.raises(ServerError, match=r"pending here; .*`upr failover`"):
                await anext(consumer)


class StepCounter(trio.abc.Instrument):
    """Cancels a scope after 100,000 steps of all tasks, which means that time does not advance."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope
        self._left = 100_000

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        self._left -= 1
        if self._left == 0:
            self._scope.cancel()


@pytest.mark.parametrize(
    ("address", "bucket", "partition_count", "reason"),
    [
        ("http://10.0.0.1:12000", "b", 2, "is not HOST:PORT"),
        ("10.0.0.1:12000", "other", 2, "it is of bucket 'other'"),
        ("10.0.0.1:12000", "b", 3, "with 3 partitions, not 2"),
    ],
)
async def test_other_buckets_are_served_though_a_partition_map_cannot_be_used(
    address: str, bucket: str, partition_count: int, reason: str
) -> None:
    directory = SimulatedDirectory()
    buckets = (BucketConfig("a", 2), BucketConfig("b", 2))
    config = ServerConfig(listen="127.0.0.1:0", buckets=buckets)
    assert len(await buckets_of(config, directory)) == 2
    stored_map = PartitionMap.of_one_node(bucket, partition_count, "node", address)
    log, _ = directory.disks["b"]
    ChunkLog(log).put_partition_map(stored_map.encode(), ())
    async with (
        running_server(config, SimulatedStore(directory)) as server,
        connect(server.url()) as client,
    ):
        assert [row.name for row in await client.list_buckets()] == ["a"]
        assert reason in server.catalog.damaged["b"]
        with pytest.raises(ServerError, match="replace it by its dump") as refusal:
            await client.create_bucket("b", 2)
        assert refusal.value.status is Status.DAMAGED
        await client.delete_bucket("b")
        await client.create_bucket("b", 2)
