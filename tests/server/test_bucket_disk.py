"""A bucket and its disk when several things happen at once: writes during a commit, one full disk
of two, deleted buckets, items that expire together, readers that close at once. With simulated
disks and a mock clock."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import pytest
import structlog.testing
import trio
import trio.testing

from tests.engine.helpers import put, read
from tests.kit.held_store import HeldStore
from tests.kit.memory_network import HOST, PARTITIONS, MemoryNetwork, node
from tests.kit.steps import LargestStep
from tests.server.connected_peer import P0, sets
from tests.server.modelled_partition import INDEXED_S, HeldReads, a_partition
from tests.server.served_bucket import BUCKET, PERSISTED, answer_to, log_of, send, serving, speaking
from tests.server.set_batches import batch
from tests.storage.full_disk import FullDisk
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import SEQ_MAX, HistoryId, Operation, PartitionState, SeqNo
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.wire import Get, Lease, LeaseAction, Refusal, SeqnosAt
from upr_server.app import Server
from upr_server.config import ServerConfig
from upr_server.engine import Partition, batch_of
from upr_server.runtime import System
from upr_server.storage.calls import (
    Commit,
    DeleteLeases,
    FindExpired,
    FindItems,
    FindSeqBefore,
    LoadBuckets,
    Maintain,
    MeasureRanges,
    ReadChunks,
    StoreCall,
)
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
)
from upr_server.storage.online import bucket_disk, flusher
from upr_server.storage.online.backfill import WAIT_FOR_DISK
from upr_server.storage.online.leases import LAPSED_S
from upr_server.storage.online.partition_reader import PartitionReader
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.records import lease_key
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore
from upr_server.storage.simulated_disk import SimulatedDisk

NOW: Final = 1000.0
LONG_S: Final = 1e6


class _WithoutDelay(HeldStore):
    """A store without delays, in which commits wait until `released` is set."""

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, Commit):
            await self.released.wait()


async def test_a_commit_ends_with_a_snapshot_though_changes_arrive_while_it_is_collected(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "STEP_BYTES", 10_000)
    store = _WithoutDelay()
    async with serving(store, 1) as server:
        partition = server.catalog.bucket(BUCKET).partitions[0]
        persistence = partition.manager.persistence
        partition.mutate(batch_of(batch(0, 1)), now=NOW)
        await trio.sleep(1)
        # During a commit, a consumer closes the snapshot of newer changes. More changes arrive
        # after it, and while both snapshots are collected for the next commit.
        partition.mutate(batch_of(batch(1, 3000, nbytes=1000)), now=NOW)
        cursor = partition.manager.register("a consumer", SeqNo(1)).cursor
        cursor.next()
        partition.mutate(batch_of(batch(3001, 1)), now=NOW)
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        disk.flusher.call_when_persisted(partition, partition.high_seq, lambda _persisted: None)
        store.released.set()
        for _ in range(100):
            await trio.lowlevel.checkpoint()
            if persistence.is_reading:
                break
        assert persistence.is_reading
        for index in range(10):
            partition.mutate(batch_of(batch(3002 + index * 1000, 1000, nbytes=1000)), now=NOW)
            await trio.lowlevel.checkpoint()
        cursor.close()
        await disk.flusher.wait_until_persisted(partition, partition.high_seq)
        chunks = await read_all(store, partition)
        assert [row.key for chunk in chunks for row in chunk] == [
            b"%d" % key_number for key_number in range(partition.high_seq)
        ]


async def read_all(store: SimulatedStore, partition: Partition) -> list[Chunk]:
    """All chunks of a partition on disk."""
    chunks: list[Chunk] = []
    end = partition.manager.persistence.committed_seq
    while not chunks or chunks[-1].end < end:
        after = chunks[-1].end if chunks else SeqNo(0)
        chunks += await store.ask(ReadChunks(BUCKET, partition.id, after, end, 1 << 30))
    return chunks


class _Stalling(SimulatedStore):
    """A store that executes a number of commits, and blocks in the next one.

    Attributes:
        commits_left: How many more commits it executes.
    """

    def __init__(self, commits_left: int) -> None:
        super().__init__()
        self.commits_left = commits_left

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, Commit):
            if not self.commits_left:
                await trio.sleep_forever()
            self.commits_left -= 1
        await super().wait(call)


async def test_a_server_killed_inside_a_large_snapshot_starts_at_the_end_of_the_snapshot_before_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("COMMIT_BYTES", "COMMIT_BYTES_MAX"):
        monkeypatch.setattr(flusher, constant, 200_000)
    store = _Stalling(3)
    with trio.CancelScope() as kill:
        async with serving(store, 1) as server:
            partition = server.catalog.bucket(BUCKET).partitions[0]
            partition.mutate(batch_of(batch(0, 1)), now=NOW)
            await trio.sleep(1)
            for number in range(10):
                first = 1 + number * 1000
                partition.mutate(batch_of(batch(first, 1000, nbytes=1000)), now=NOW)
            await trio.sleep(1)
            assert partition.manager.persistence.committed_seq == 1
            assert store.commits_left == 0
            kill.cancel()
            await trio.lowlevel.checkpoint()
    disk_store = SimulatedStore(store.directory)
    (stored_bucket,) = (await disk_store.ask(LoadBuckets())).buckets
    assert not stored_bucket.is_clean
    async with serving(disk_store, 1) as server:
        partition = server.catalog.bucket(BUCKET).partitions[0]
        assert partition.high_seq == 1
        partition.mutate(batch_of(batch(1, 3, nbytes=1)), now=NOW)
        await trio.sleep(1)
        assert partition.manager.persistence.committed_seq == 4
        rows = [row for chunk in await read_all(disk_store, partition) for row in chunk]
        assert [(row.key, row.seq) for row in rows] == [(b"%d" % n, n + 1) for n in range(4)]


async def test_a_bucket_without_room_on_disk_does_not_keep_another_from_a_clean_stop(
    autojump_clock: trio.testing.MockClock,
) -> None:
    directory = SimulatedDirectory()
    store = SimulatedStore(directory)

    async def start_and_stop() -> None:
        async with serving(store, 1) as server:
            await server.catalog.create_bucket("other", 1, 1 << 26)
            log_of(store).bytes_max = 1000
            for name in (BUCKET, "other"):
                server.catalog.bucket(name).partitions[0].mutate(batch_of(batch(0, 1)), now=NOW)
                # The first bucket has found no room by now, and waits before it tries again.
                await trio.sleep(3.05)

            server.catalog.bucket("other").partitions[0].mutate(batch_of(batch(1, 1)), now=NOW)

    with pytest.RaisesGroup(DiskFullError, flatten_subgroups=True):
        await start_and_stop()
    full, other_bucket = (await SimulatedStore(directory).ask(LoadBuckets())).buckets
    assert (full.record.name, full.is_clean, full.partitions[0].record.high) == (BUCKET, False, 0)
    assert (
        other_bucket.record.name,
        other_bucket.is_clean,
        other_bucket.partitions[0].record.high,
    ) == (
        "other",
        True,
        2,
    )


async def test_an_index_without_room_on_disk_is_reported_while_writes_continue(
    autojump_clock: trio.testing.MockClock,
) -> None:
    directory = SimulatedDirectory()
    async with serving(SimulatedStore(directory), 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        disk = server.catalog.disks[bucket]
        assert disk.maintenance.statistics()["full"] == ""
        _, index = directory.disks[BUCKET]
        index.bytes_max = 100
        for first in range(0, 100, 10):
            bucket.partitions[0].mutate(batch_of(batch(first, 10)), now=NOW)
            await trio.sleep(3)
        figures = disk.maintenance.statistics()
        assert figures["unindexed_mutations"] == 100
        assert "exceed the disk's 100" in str(figures["full"])
        assert disk.flusher.statistics()["full"] == ""
        index.bytes_max = 1 << 30
        await trio.sleep(3)
        figures = disk.maintenance.statistics()
        assert (figures["unindexed_mutations"], figures["full"]) == (0, "")


class _NoMaintenance(SimulatedStore):
    """A store that never finishes maintenance, so the index stays behind."""

    async def execute(self, call: StoreCall[Any]) -> Any:
        if isinstance(call, Maintain):
            await trio.sleep_forever()
        return await super().execute(call)


async def test_a_read_that_waits_for_the_index_is_refused_when_its_bucket_is_deleted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    directory = SimulatedDirectory()
    async with serving(_NoMaintenance(directory), 1) as server, speaking(server) as peer:
        await answer_to(peer, await send(peer, sets(b"a"), PERSISTED))
    async with serving(_NoMaintenance(directory), 1) as server, speaking(server) as peer:
        opaque = peer.opaque()
        await peer.send(Get((b"a",), partition=P0, opaque=opaque))
        await trio.sleep(1)
        await server.catalog.delete_bucket(BUCKET)
        answer = await answer_to(peer, opaque)
        assert isinstance(answer, Refusal)
        assert answer.status == Status.NO_BUCKET


async def test_a_key_is_not_read_from_another_bucket_of_the_same_name(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldReads(FindItems)
    async with serving(store, 1) as server, speaking(server) as peer:
        await answer_to(peer, await send(peer, sets(b"a"), PERSISTED))
        await trio.sleep(INDEXED_S)
        partition = server.catalog.bucket(BUCKET).partitions[0]
        while partition.manager.free_oldest() or partition.eviction.evict(1000):
            pass
        store.released = trio.Event()
        opaque = peer.opaque()
        await peer.send(Get((b"a",), partition=P0, opaque=opaque))
        await trio.sleep(1)
        await server.catalog.delete_bucket(BUCKET)
        await server.catalog.create_bucket(BUCKET, 1, 1 << 26)
        partition = server.catalog.bucket(BUCKET).partitions[0]
        partition.mutate(batch_of(sets(b"a", value=b"another's")), now=NOW)
        await trio.sleep(INDEXED_S)
        store.released.set()
        answer = await answer_to(peer, opaque)
        assert isinstance(answer, Refusal), answer
        assert answer.status == Status.NO_BUCKET


class StepCounter:
    """Counts the steps of upkeep.

    Attributes:
        count: How many there were.
        first: Set at the first step.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = trio.Event()

    def count_step(self) -> Iterator[None]:
        """Counts a step; returns an iterator without items."""
        self.count += 1
        self.first.set()
        return iter(())


async def test_a_bucket_can_be_deleted_while_its_memory_is_freed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    # Commits never end, so nothing is on disk, and each step of freeing memory collapses one
    # partition. A deletion takes a second.
    store = SimulatedStore(delay=lambda call: LONG_S if isinstance(call, Commit) else 1)
    async with serving(store, 64) as server:
        bucket = server.catalog.bucket(BUCKET)
        for partition in bucket.partitions:
            for _ in range(8):
                put(partition, b"k")
                read(partition, partition.snapshot_end)
        bucket.memory_policy.limit_bytes = 1
        steps = StepCounter()
        server.upkeep.call_after_step(steps.count_step)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.upkeep.run_freeing)
            server.upkeep.request_relief(bucket)
            await steps.first.wait()
            assert bucket.needs_collapse
            await server.catalog.delete_bucket(BUCKET)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert steps.count < 10, "nothing is freed of a deleted bucket"


class _DelayedAnswers(SimulatedStore):
    """A store that executes all calls at once, and answers some of them only once `released` is
    set."""

    def __init__(self, is_late: Callable[[StoreCall[Any]], bool]) -> None:
        super().__init__()
        self._is_late = is_late
        self.is_asked = trio.Event()
        self.released = trio.Event()

    async def execute(self, call: StoreCall[Any]) -> Any:
        answer = await super().execute(call)
        if self._is_late(call):
            self.is_asked.set()
            await self.released.wait()
        return answer


async def test_a_bucket_can_be_deleted_while_its_expired_items_are_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = _DelayedAnswers(lambda call: isinstance(call, FindExpired))
    async with serving(store, 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        partition = bucket.partitions[0]
        partition.mutate(batch_of(batch(0, 1, expiry=1)), now=0)
        await trio.sleep(10)
        while partition.manager.free_oldest() or partition.eviction.evict(1000):
            pass
        high_seq = partition.high_seq
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.upkeep.run_expiring)
            await store.is_asked.wait()
            await server.catalog.delete_bucket(BUCKET)
            bucket.memory_policy.limit_bytes = 1
            bucket.memory.backfills += 1000
            await server.catalog.create_bucket(BUCKET, 1, 1 << 26)
            store.released.set()
            await trio.sleep(1)
            assert partition.high_seq == high_seq, "a deleted bucket expires nothing"
            nursery.cancel_scope.cancel()
        # The task that frees memory must not try again and again to free that of a deleted bucket.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.upkeep.run_freeing)
            steps = StepCounter()
            server.upkeep.call_after_step(steps.count_step)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert steps.count <= 1


async def test_a_request_for_a_lease_is_refused_if_its_bucket_is_deleted_meanwhile(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = _DelayedAnswers(lambda call: isinstance(call, MeasureRanges))
    async with serving(store, 1) as server, speaking(server) as peer:
        await answer_to(peer, await send(peer, sets(b"a"), PERSISTED))
        opaque = peer.opaque()
        await peer.send(Lease(LeaseAction.ACQUIRE, 7, 60, "me", ((0, 0, SEQ_MAX),), opaque=opaque))
        await store.is_asked.wait()
        await server.catalog.delete_bucket(BUCKET)
        store.released.set()
        answer = await answer_to(peer, opaque)
        assert isinstance(answer, Refusal)
        assert answer.status == Status.NO_BUCKET


@pytest.mark.parametrize(
    ("state", "branch_count", "status"),
    [
        (PartitionState.ACTIVE, 1, Status.HISTORY_CHANGED),
        (PartitionState.PENDING, 0, Status.NOT_MY_PARTITION),
    ],
    ids=["another history", "another state"],
)
async def test_a_number_at_a_time_is_that_of_the_history_that_it_is_told_with(
    autojump_clock: trio.testing.MockClock,
    state: PartitionState,
    branch_count: int,
    status: Status,
) -> None:
    """A failover may come while the number is read from disk. A stream from there would leave out
    changes of the new history, or the client would have to roll back."""
    store = _DelayedAnswers(lambda call: isinstance(call, FindSeqBefore))
    async with serving(store, 1) as server, speaking(server) as peer:
        opaque = peer.opaque()
        await peer.send(SeqnosAt(0, (0,), opaque=opaque))
        await store.is_asked.wait()
        (partition,) = server.catalog.bucket(BUCKET).partitions
        failover_log = partition.failover_log
        for _ in range(branch_count):
            failover_log = failover_log.with_branch(HistoryId(1 << 40), SeqNo(0))
        partition.change_state(state, failover_log)
        store.released.set()
        answer = await answer_to(peer, opaque)
        assert isinstance(answer, Refusal)
        assert answer.status == status


def has_chunks(call: StoreCall[Any]) -> bool:
    """Whether a call commits mutations."""
    return isinstance(call, Commit) and any(write.chunks for write in call.writes)


async def test_a_replica_can_be_deleted_while_its_commit_is_answered(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    MemoryNetwork(monkeypatch)
    store = _DelayedAnswers(has_chunks)
    port = 77
    async with node("a", BUCKET) as active, node("z", port=port, store=store) as replica:
        nodes = {"a": f"{HOST}:{active.port}", "z": f"{HOST}:{port}"}
        assignment = Assignment(active="a", replicas={"z": ""})
        new_map = PartitionMap(
            bucket=BUCKET, revision=1, nodes=nodes, partitions=(assignment,) * PARTITIONS
        )
        await active.partition_maps.set_map(0, new_map.encode())
        await replica.partition_maps.adopt_map_from(BUCKET, nodes["a"])
        put(active.catalog.bucket(BUCKET).partitions[0], b"k")
        with trio.fail_after(60):
            await store.is_asked.wait()
        await replica.catalog.delete_bucket(BUCKET)
        store.released.set()
        await trio.sleep(1)
        assert BUCKET not in replica.catalog.buckets


@asynccontextmanager
async def upkeep_running(server: Server) -> AsyncIterator[None]:
    """Runs expiry, freeing and collapsing of a server while the context lasts."""
    async with trio.open_nursery() as nursery:
        for task in (
            server.upkeep.run_expiring,
            server.upkeep.run_freeing,
            server.upkeep.run_collapsing,
        ):
            nursery.start_soon(task)
        yield
        nursery.cancel_scope.cancel()


async def test_items_that_expire_together_stay_within_the_quota(
    autojump_clock: trio.testing.MockClock,
) -> None:
    count, quota_bytes = 20_000, 1 << 20
    async with serving(SimulatedStore(), 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        partition = bucket.partitions[0]
        for first in range(0, count, 1000):
            partition.mutate(batch_of(batch(first, 1000, expiry=1060, nbytes=1)), now=NOW)
        await trio.sleep(10)
        while partition.manager.free_oldest() or partition.eviction.evict(1000):
            pass
        bucket.memory_policy.limit_bytes = quota_bytes
        peak = 0
        async with upkeep_running(server):
            with trio.fail_after(100_000):
                await trio.lowlevel.checkpoint()
                while partition.item_count:
                    await trio.sleep(0.05)
                    peak = max(peak, bucket.memory.total)
        assert quota_bytes / 2 < peak <= quota_bytes
        assert partition.high_seq == 2 * count


class _Peak(trio.abc.Instrument):
    """Records the highest value of a number at the end of any step of a task.

    Attributes:
        number: The highest value so far.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.number = 0
        self._now = number

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        self.number = max(self.number, self._now())


async def test_items_in_memory_that_expire_together_stay_within_the_quota(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The deletion of an item with a long key needs more memory than it frees at once."""
    quota_bytes = 4 << 20
    async with serving(SimulatedStore(), 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        partition, count = bucket.partitions[0], 0
        while bucket.memory.total < 0.8 * quota_bytes:
            rows = [
                Mutation(Operation.SET, b"%0240d" % index, b"", expiry=1500)
                for index in range(count, count + 500)
            ]
            partition.mutate(batch_of(Chunk.build(rows, SeqNo(0), SeqNo(0))), now=NOW)
            count += 500
            await trio.sleep(1)
            while partition.manager.free_oldest():
                pass
        bucket.memory_policy.limit_bytes = quota_bytes
        peak = _Peak(lambda: bucket.memory.total)
        trio.lowlevel.add_instrument(peak)
        async with upkeep_running(server):
            await trio.sleep(1000)
        trio.lowlevel.remove_instrument(peak)
        assert partition.high_seq == 2 * count
        assert quota_bytes / 2 < peak.number <= 0.9 * quota_bytes


class _CountingExpiry(SimulatedStore):
    """A store that counts how often it reads expired items.

    Attributes:
        find_count: How often it did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.find_count = 0

    async def execute(self, call: StoreCall[Any]) -> Any:
        self.find_count += isinstance(call, FindExpired)
        return await super().execute(call)


async def test_expired_items_that_cannot_be_deleted_cost_a_bounded_number_of_reads(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_disk, "DUE_MAX", 10)
    monkeypatch.setattr(bucket_disk, "EXPIRED_PASSED_MAX", 50)
    store = _CountingExpiry()
    async with serving(store, 2) as server:
        bucket = server.catalog.bucket(BUCKET)
        disk, (pending, active) = server.catalog.disks[bucket], bucket.partitions
        pending.mutate(batch_of(batch(0, 300, expiry=1500, nbytes=1)), now=NOW)
        active.mutate(batch_of(batch(300, 3, expiry=1501, nbytes=1)), now=NOW)
        await trio.sleep(10)
        for partition in bucket.partitions:
            while partition.manager.free_oldest() or partition.eviction.evict(1000):
                pass
        # A node deletes nothing in a partition that it hands over. The items of the other partition
        # expire later.
        pending.change_state(PartitionState.PENDING, pending.failover_log)
        for call_count in range(1, 8):
            await disk.expire_on_disk(2000.0)
            assert store.find_count <= 5 * call_count
        assert (pending.high_seq, active.high_seq) == (300, 6)
        # All items that can be deleted are deleted, however many.
        pending.change_state(PartitionState.ACTIVE, pending.failover_log)
        await disk.expire_on_disk(2000.0)
        assert (pending.high_seq, active.high_seq) == (600, 6)


async def test_observers_are_called_once_for_all_items_that_the_disk_reports_as_expired(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a hundred consumers of events: counting each item for each of them took 9 ms."""
    monkeypatch.setattr(bucket_disk, "DUE_MAX", 50)
    updates: list[tuple[Sequence[bytes], int]] = []
    async with serving(SimulatedStore(), 2) as server:
        bucket = server.catalog.bucket(BUCKET)
        for partition in bucket.partitions:
            partition.mutate(batch_of(batch(0, 40, expiry=1500, nbytes=1)), now=NOW)
        design = Mutation(Operation.SET, b"_design/x", expiry=1500)
        bucket.partitions[1].mutate(batch_of(Chunk.build([design])), now=NOW)
        await trio.sleep(10)
        for partition in bucket.partitions:
            while partition.manager.free_oldest() or partition.eviction.evict(1000):
                pass
            partition.updates._on_update = lambda designs, count: updates.append((designs, count))
        await server.catalog.disks[bucket].expire_on_disk(2000.0)
        assert [partition.high_seq for partition in bucket.partitions] == [80, 82]
    assert sorted(updates) == [([], 1), ([b"_design/x"], 1)]


async def test_expired_items_on_disk_are_deleted_in_steps(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting all items that one read finds takes 4 to 7 ms, and waking a hundred readers takes
    more."""
    monkeypatch.setattr(bucket_disk, "EXPIRED_STEP", 8)
    monkeypatch.setattr(bucket_disk, "WOKEN_STEP", 10)
    async with serving(SimulatedStore(), 4) as server:
        bucket = server.catalog.bucket(BUCKET)
        partitions, disk = bucket.partitions, server.catalog.disks[bucket]
        for partition in partitions:
            partition.mutate(batch_of(batch(0, 20, expiry=1500, nbytes=1)), now=NOW)
        await trio.sleep(10)
        woken: list[Partition] = []
        for partition in partitions:
            while partition.manager.free_oldest() or partition.eviction.evict(1000):
                pass
            for _ in range(9):
                on_ready = partial(woken.append, partition)
                reader = partition.manager.register("reader", SeqNo(20), on_ready=on_ready).cursor
                assert not reader.poll()
        largest_steps = [
            LargestStep(lambda: sum(partition.high_seq for partition in partitions)),
            LargestStep(lambda: len(woken)),
        ]
        for largest_step in largest_steps:
            trio.lowlevel.add_instrument(largest_step)
        await disk.expire_on_disk(2000.0)
        for largest_step in largest_steps:
            trio.lowlevel.remove_instrument(largest_step)
        assert [partition.high_seq for partition in partitions] == [40] * 4
        assert sorted(partition.id for partition in woken) == sorted([*range(4)] * 9)
        assert [largest_step.added_count for largest_step in largest_steps] == [8, 9]
        assert not any(partition.eviction.pin_count for partition in partitions)
        await trio.sleep(1)
        assert disk.flusher.lag_mutations == 0


async def test_deletions_of_a_cancelled_expiry_are_persisted(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletions that it has made must be written to disk before the stop is marked as clean."""
    monkeypatch.setattr(bucket_disk, "EXPIRED_STEP", 8)
    async with serving(SimulatedStore(), 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        partition, disk = bucket.partitions[0], server.catalog.disks[bucket]
        partition.mutate(batch_of(batch(0, 20, expiry=1500, nbytes=1)), now=NOW)
        await trio.sleep(10)
        while partition.manager.free_oldest() or partition.eviction.evict(1000):
            pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.expire_on_disk, 2000.0)
            while partition.high_seq == 20:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        high_seq = partition.high_seq
        assert 20 < high_seq < 40
        assert not partition.eviction.pin_count
        await trio.sleep(1)
        assert partition.manager.persistence.committed_seq == high_seq


class _FailingExpiry(SimulatedStore):
    """A store that cannot find expired items.

    Attributes:
        error: The error to raise; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: StorageError | None = None

    async def execute(self, call: StoreCall[Any]) -> Any:
        if isinstance(call, FindExpired) and self.error is not None:
            raise self.error
        return await super().execute(call)


async def test_a_failure_to_read_expired_items_is_logged_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = _FailingExpiry()
    damage, trouble = CorruptionError("a bad page"), DataDirectoryError("no addresses are left")
    async with serving(store, 1) as server, trio.open_nursery() as nursery:
        with structlog.testing.capture_logs() as lines:
            nursery.start_soon(server.upkeep.run_expiring)
            for error in (damage, trouble, None, trouble):
                store.error = error
                await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert [(line["event"], line["error"]) for line in lines if "error" in line] == [
        ("damaged record", "a bad page"),
        ("expired items cannot be read", "no addresses are left"),
        ("expired items cannot be read", "no addresses are left"),
    ]


async def test_deleted_keys_leave_the_memory_of_an_idle_bucket(
    autojump_clock: trio.testing.MockClock,
) -> None:
    count = 20_000
    async with serving(SimulatedStore(), 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        partition = bucket.partitions[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.upkeep.run_expiring)
            for first in range(0, count, 1000):
                partition.mutate(batch_of(batch(first, 1000, nbytes=1)), now=NOW)
            deletions = [Mutation(Operation.DELETE, b"%d" % index) for index in range(10, count)]
            for first in range(0, count, 1000):
                partition.mutate(batch_of(Chunk.build(deletions[first : first + 1000])), now=NOW)
            assert bucket.memory.table > 500_000
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
        assert sorted(key for key, _, _ in partition.table) == [b"%d" % n for n in range(10)]
        assert bucket.memory.table < 200_000, "the table shrinks in steps as it is used"
        bucket.check_invariants()


async def test_small_snapshots_of_an_idle_bucket_become_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """They are not joined at once, because more may follow."""
    async with serving(SimulatedStore(), 1) as server:
        partition = server.catalog.bucket(BUCKET).partitions[0]
        cursor = partition.manager.register("slow", SeqNo(0)).cursor
        for _ in range(7):
            put(partition, b"k")
            read(partition)
        assert len(partition.snapshots) >= 7
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.upkeep.run_collapsing)
            nursery.start_soon(server.upkeep.run_expiring)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
        assert len(partition.snapshots) == 2
        cursor.close()


async def test_deletions_are_kept_for_ever_with_an_infinite_purge_age(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = ServerConfig(identity="a", purge_age_s=math.inf)
    server = Server(config, SimulatedStore(), System(time=lambda: NOW + trio.current_time()))
    async with server.recovered_buckets():
        await server.catalog.create_bucket(BUCKET, 1, 64 * 1024 * 1024)
        partition = server.catalog.bucket(BUCKET).partitions[0]
        partition.mutate(batch_of(Chunk.build([Mutation(Operation.DELETE, b"k")])), now=NOW)
        await trio.sleep(10)
        assert partition.eviction.indexed_seq == partition.high_seq, "maintenance has run"
        assert partition.purge_seq == 0


async def test_a_bucket_can_be_deleted_while_it_waits_to_be_collapsed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The task that collapses wakes, and finds that the bucket is gone."""

    def make_small_snapshots(name: str) -> Partition:
        partition = server.catalog.bucket(name).partitions[0]
        partition.manager.register("slow", SeqNo(0))
        for _ in range(7):
            put(partition, b"k")
            read(partition)
        partition.manager.consider_short_runs()
        assert partition.manager.needs_collapse
        return partition

    async with serving(SimulatedStore(), 1) as server, trio.open_nursery() as nursery:
        await server.catalog.create_bucket("short-lived", 1, 64 * 1024 * 1024)
        nursery.start_soon(server.upkeep.run_collapsing)
        await trio.testing.wait_all_tasks_blocked()
        make_small_snapshots("short-lived")
        # As in `delete_bucket`, which may run before the task does.
        server.upkeep.remove_bucket(server.catalog.bucket("short-lived"))
        await server.catalog.delete_bucket("short-lived")
        partition = make_small_snapshots(BUCKET)
        await trio.sleep(10)
        assert len(partition.snapshots) == 2, "the task still collapses other buckets"
        nursery.cancel_scope.cancel()


async def test_buckets_take_turns_at_collapsing(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(SimulatedStore(), 20) as server, trio.open_nursery() as nursery:
        await server.catalog.create_bucket("other", 1, 64 * 1024 * 1024)
        (other,) = server.catalog.bucket("other").partitions
        for partition in (*server.catalog.bucket(BUCKET).partitions, other):
            partition.manager.register("slow", SeqNo(0))
            for _ in range(8):
                put(partition, b"k")
                read(partition)
            assert partition.manager.needs_collapse
        steps = StepCounter()
        server.upkeep.call_after_step(steps.count_step)
        nursery.start_soon(server.upkeep.run_collapsing)
        while other.manager.needs_collapse:
            await trio.lowlevel.checkpoint()
        assert steps.count < 5, "the first bucket has 20 partitions to collapse"
        nursery.cancel_scope.cancel()


async def test_a_reader_that_closes_at_once_leaves_no_cursor_and_no_memory(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with a_partition() as (_, model):
        model.write((b"a", b"1"), (b"b", b"2"))
        await model.persist()
        model.forget()
        cursors = model.partition.manager.cursor_count
        for ticks in range(1, 12):
            for _ in range(10):
                reader = PartitionReader(
                    model.disk,
                    model.partition,
                    "one that leaves",
                    SeqNo(0),
                    end_at_least=SeqNo(0),
                    stream_end=SEQ_MAX,
                    on_ready=lambda: None,
                    on_disk=lambda: None,
                )
                assert reader.next() is WAIT_FOR_DISK
                for _ in range(ticks):
                    await trio.lowlevel.checkpoint()
                reader.close()
                await trio.testing.wait_all_tasks_blocked()
                assert model.partition.manager.cursor_count == cursors
                assert model.disk.memory.backfills == 0


async def test_callers_that_stop_waiting_for_a_commit_leave_no_callback(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store, 1) as server:
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        partition = disk.bucket.partitions[0]
        partition.mutate(batch_of(sets(b"k")), now=NOW)
        for _ in range(10):
            with trio.move_on_after(1):
                await disk.flusher.wait_until_persisted(partition, partition.high_seq)
        assert not disk.flusher._callbacks
        assert disk.flusher._waiters == 0
        store.released.set()
        await disk.flusher.wait_until_persisted(partition, partition.high_seq)


class _UndeletableLeases(SimulatedStore):
    """A store in which no lease can be deleted while `is_full`; counts the steps of maintenance."""

    is_full = True
    maintenance_steps = 0

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, DeleteLeases) and self.is_full:
            raise DiskFullError("full")
        self.maintenance_steps += isinstance(call, Maintain)
        await super().wait(call)


async def test_a_lapsed_lease_is_kept_until_it_can_be_deleted_on_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """After a restart the lease would exist again, though compaction might have removed data in its
    ranges."""
    store = _UndeletableLeases()
    async with serving(store, 1) as server:
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        async with disk.maintenance.paused():
            await disk.leases.acquire(5, "o", [(0, 0, SeqNo(0))], 1)
        autojump_clock.jump(2 * LAPSED_S)
        await trio.sleep(1)
        assert [lease.lease_id for lease in disk.leases.lapsed_leases()] == [5]


class _FullDirectory(SimulatedDirectory):
    """A directory whose logs are on disks with room for small commits only."""

    def create(self, name: str, fill: Callable[[OrderedMap, OrderedMap], None]) -> None:
        log, index = FullDisk(), SimulatedDisk()
        fill(log, index)
        self.disks[name] = log, index


class _CountedMaintenance(SimulatedStore):
    """Counts the steps of indexing and compaction."""

    maintenance_steps = 0

    async def wait(self, call: StoreCall[Any]) -> None:
        self.maintenance_steps += isinstance(call, Maintain)
        await super().wait(call)


async def test_leases_that_lapsed_together_do_not_keep_a_full_disk_from_compaction(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """They must be deleted before compaction continues, and a commit that deletes all of them finds
    no room."""
    store = _CountedMaintenance(_FullDirectory())
    async with serving(store, 1) as server:
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        async with disk.maintenance.paused():
            for lease_id in range(1, 51):
                await disk.leases.acquire(lease_id, "o", [(0, 0, SeqNo(0))], 1)
        full_disk = store.directory.disks[BUCKET][0]
        assert isinstance(full_disk, FullDisk)
        full_disk.changes_max = 2
        autojump_clock.jump(2 * LAPSED_S)
        await trio.sleep(5)
        steps_before = store.maintenance_steps
        await trio.sleep(5)
        assert store.maintenance_steps > steps_before
        assert not disk.leases.lapsed_leases()
        full_disk.changes_max = 1 << 62


async def _directory_with_a_damaged_lease() -> SimulatedDirectory:
    """The disk of a stopped server with two leases: 5, which is damaged, and 6."""
    directory = SimulatedDirectory()
    async with serving(SimulatedStore(directory), 1) as server:
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        async with disk.maintenance.paused():
            for lease_id in (5, 6):
                await disk.leases.acquire(lease_id, "o", [(0, 0, SeqNo(0))], 1000)
    directory.disks[BUCKET][0].flip_bit(lease_key(5), 77)
    return directory


def _leases_on_disk(directory: SimulatedDirectory) -> set[bytes]:
    return {lease_key(5), lease_key(6)} & set(directory.disks[BUCKET][0].keys())


async def test_a_damaged_lease_does_not_keep_a_server_with_a_full_disk_from_starting(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The lease is lost, and its record is deleted once there is room. Nothing is compacted before
    that: if the record became readable again, the lease would cover data that no longer exists."""
    directory = await _directory_with_a_damaged_lease()
    store = _UndeletableLeases(directory)
    async with serving(store, 1) as server:
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        await trio.sleep(5)
        assert len(disk.leases) == 1
        assert _leases_on_disk(directory) == {lease_key(5), lease_key(6)}
        assert not store.maintenance_steps
        store.is_full = False
        await trio.sleep(5)
        assert _leases_on_disk(directory) == {lease_key(6)}
        assert store.maintenance_steps


async def test_a_lease_that_replaces_a_damaged_one_is_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    directory = await _directory_with_a_damaged_lease()
    store = _UndeletableLeases(directory)
    async with serving(store, 1) as server:
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        async with disk.maintenance.paused():
            await disk.leases.acquire(5, "another", [(0, 0, SeqNo(0))], 1000)
        store.is_full = False
        await trio.sleep(5)
        assert disk.leases.get_whole(5).owner == "another"
        assert _leases_on_disk(directory) == {lease_key(5), lease_key(6)}
