"""An indexer slower than the writers: its memory is bounded, it delays no other consumer, and it
catches up later."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
import trio
import trio.testing

from tests.indexer.kit import (
    a_server,
    an_indexer,
    ask,
    by_brute_force,
    define,
    name_of,
    scan,
    until_ready,
)
from tests.kit.process import eventually
from upr_protocol.client import ChunkReceived, Consumer, connect, consume, publisher
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer import batch_queues
from upr_server.indexer import indexer as indexer_module
from upr_server.indexer.batch_queues import QUEUE_BATCHES_MAX, ROUND_BYTES
from upr_server.indexer.builder import IndexBuilder
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.entry_reader import EntryReader, EntrySelection
from upr_server.indexer.freshness import ScanBarriers
from upr_server.indexer.index_batch import BATCH_OVERHEAD_BYTES, IndexBatch
from upr_server.indexer.index_file import EntrySource, IndexFile
from upr_server.indexer.index_file.view import COUNT_STEP
from upr_server.indexer.mark import NO_MARK, Mark
from upr_server.indexer.pipeline import (
    AHEAD_ROUNDS,
    GATHER_S,
    Pipeline,
    PipelineMember,
    worker_thread,
)
from upr_server.indexer.pool import SCAN_BYTES, STREAM_SHARE, MemoryPool, OverloadedError
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.extractor import Extractor
from upr_server.indexer.query import Query
from upr_server.indexer.slice_scanner import READS_AT_ONCE, NotFreshError

T = TypeVar("T")


async def work_for_a_second(function: Callable[[], T]) -> T:
    """Runs a function after a second, like a slow index."""
    await trio.sleep(1)
    return function()


BY_N = IndexDefinition(("n",))
NOT_PLAIN = IndexDefinition(("n || n",))
"""The indexer evaluates this expression document by document, not in columns."""
POOL_BYTES = 8 * 1024 * 1024
VALUE_BYTES = 10_000
COUNT = 4000


class Gate:
    """A worker thread that does nothing while the gate is closed."""

    def __init__(self) -> None:
        self._open = trio.Event()
        self._open.set()
        self._work = worker_thread()

    def close(self) -> None:
        self._open = trio.Event()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, function: Callable[[], T]) -> T:
        await self._open.wait()
        return await self._work(function)


async def count_all(consumer: Consumer, key_count: int) -> None:
    """Reads until so many different keys have been received."""
    keys: set[bytes] = set()
    async for event in consumer:
        if isinstance(event, ChunkReceived):
            keys.update(event.chunk.keys())
            if len(keys) >= key_count:
                return


async def test_a_blocked_indexer_slows_down_nobody_else(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, POOL_BYTES, work=gate) as indexer,
        consume(server.url("b")) as consumer,
    ):
        await define(client, "d", {"n": BY_N})
        await until_ready(indexer, "d/n")
        gate.close()
        contents = {}
        async with publisher(server.url("b")) as writer:
            for index in range(COUNT):
                value = json.dumps({"n": index % 100, "x": "x" * VALUE_BYTES})
                contents[b"%d" % index] = value.encode()
                await writer.set(str(index), value)
        # The other consumer receives everything, though the indexer has stopped receiving.
        with trio.fail_after(20):
            await count_all(consumer, COUNT + 1)
        pool = indexer.pool
        await eventually(lambda: not pool.has_room(STREAM_SHARE), "the pool is full")
        with pytest.raises(NotFreshError):
            await scan(indexer, "d/n", timeout_s=0.1)
        largest_chunk = 2 * 1024 * 1024
        assert (
            pool.peak_bytes <= POOL_BYTES * STREAM_SHARE + largest_chunk < COUNT * VALUE_BYTES / 4
        )
        gate.open()
        assert await scan(indexer, "d/n", timeout_s=20) == by_brute_force(BY_N, contents)
        assert pool.peak_bytes <= POOL_BYTES
        # The other indexes of the round are behind the index of the scan.
        pipeline = indexer.slices[0].pipeline
        await eventually(lambda: not pipeline.queued_batch_count, "all is applied")


async def test_building_leaves_room_in_the_pool(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, POOL_BYTES, work=gate) as indexer,
    ):
        contents = {}
        for index in range(1500):
            value = json.dumps({"n": index % 100, "x": "x" * VALUE_BYTES})
            contents[b"%d" % index] = value.encode()
            await client.set(str(index), value)
        await eventually(
            lambda: indexer.slices[0].figures()["applied"] == 1500, "the stream has been read"
        )
        gate.close()
        await define(client, "d", {"n": BY_N})
        gate.open()
        await until_ready(indexer, "d/n")
        assert await scan(indexer, "d/n") == by_brute_force(BY_N, contents)
        assert indexer.pool.peak_bytes <= POOL_BYTES


async def test_a_stop_does_not_wait_for_an_index_that_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop waits for a bounded time. What is not applied then is received again after the next
    start."""
    monkeypatch.setattr(indexer_module, "STOP_S", 0)
    entries = Extractor.entries
    began, may_go_on = threading.Event(), threading.Event()
    calls = 0

    def entries_when_allowed(
        self: Extractor, key: bytes, document: Any
    ) -> tuple[Sequence[bytes], bytes]:
        nonlocal calls
        if key.startswith(b"slow"):
            calls += 1
            began.set()
            assert may_go_on.wait(20)
        return entries(self, key, document)

    monkeypatch.setattr(Extractor, "entries", entries_when_allowed)
    contents = {b"slow%d" % index: b'{"n": %d}' % index for index in range(100)}
    async with a_server(partitions=1) as server, connect(server.url("b")) as client:
        async with an_indexer(server.url("b"), tmp_path) as indexer:
            await define(client, "d", {"n": NOT_PLAIN})
            await until_ready(indexer, "d/n")
            async with publisher(server.url("b")) as writer:
                for key, value in contents.items():
                    await writer.set(key, value)
            await trio.to_thread.run_sync(began.wait)
            # The stop cancels the round while the worker is at its first document.
            trio.lowlevel.spawn_system_task(_set_when_blocked, may_go_on)
        assert calls < len(contents)
        may_go_on.set()
        async with an_indexer(server.url("b"), tmp_path) as indexer:
            await until_ready(indexer, "d/n")
            assert await scan(indexer, "d/n", timeout_s=20) == by_brute_force(NOT_PLAIN, contents)


async def _set_when_blocked(event: threading.Event) -> None:
    await trio.testing.wait_all_tasks_blocked(0.05)
    event.set()


async def test_the_pool_reserves_memory_for_scans_and_streams() -> None:
    pool = MemoryPool(POOL_BYTES)
    pool.reserve(POOL_BYTES * 3 // 4)
    assert not pool.has_room(STREAM_SHARE)
    with (
        pool.reserve_for_scan() as scan,
        pytest.raises(OverloadedError),
        pool.reserve_for_scan(),
    ):
        raise AssertionError("there was room")
    assert pool.scan_bytes == 0
    # Once the size of an answer is known, other scans may use the rest of its reservation.
    with pool.reserve_for_scan() as scan:
        scan.reduce_to(POOL_BYTES // 4 - SCAN_BYTES)
        with pool.reserve_for_scan():
            assert pool.used_bytes + pool.scan_bytes == POOL_BYTES
    assert pool.scan_bytes == 0
    waited = trio.Event()

    async def wait() -> None:
        await pool.wait_for_room(STREAM_SHARE)
        waited.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not waited.is_set()
        # Streams do not wait for scans, because a scan may wait for changes from a stream.
        with pool.reserve_for_scan():
            pool.release(1)
            await waited.wait()
    assert pool.refused_count == 1


async def test_a_pipeline_applies_what_is_put_until_it_stops() -> None:
    pool = MemoryPool(POOL_BYTES)
    pipeline = Pipeline(pool, _work_at_once, (), queues=2)
    for index in range(10):
        pipeline.put(_batch(pool, 0, 400_000))
        if index < 2:
            pipeline.put(_batch(pool, 1, 1000))
    assert pipeline.put_count == pipeline.queued_batch_count == 12
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        assert await pipeline.drain()
        assert pipeline.has_applied(12)
        nursery.cancel_scope.cancel()
    assert pool.used_bytes == 0
    assert pipeline.is_stopped
    pipeline.put(_batch(pool, 0, 1))
    assert not await pipeline.drain()
    pipeline.abandon()
    assert pool.used_bytes == 0


class CountingFile:
    """An index that counts its commits."""

    def __init__(self) -> None:
        self.commits = 0
        self.failure = ""

    def apply_changes(self, *_: object) -> int:
        self.commits += 1
        return 0


def _member(file: CountingFile) -> PipelineMember:
    return PipelineMember(cast("IndexFile", file), cast("EntrySource", None))


async def test_a_pipeline_waits_for_one_index_of_another_and_not_for_all(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Twenty indexes are built, which take a second each, and scans wait for another index."""
    pool = MemoryPool(POOL_BYTES)
    turn = trio.StrictFIFOLock()

    async def work(function: Callable[[], T]) -> T:
        async with turn:
            await trio.sleep(1)
            return function()

    running_file, built_files = CountingFile(), [CountingFile() for _ in range(20)]
    running = Pipeline(pool, work, [_member(running_file)])
    building = Pipeline(pool, work, [_member(file) for file in built_files])
    building.put(_batch(pool, 0, 1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(building.run)
        await trio.sleep(2)
        nursery.start_soon(running.run)
        running.put(_batch(pool, 0, 1000))
        began = trio.current_time()
        assert await running.drain()
        # Two steps, reading the batch and writing it; each waits for one step of the other
        # pipeline.
        assert trio.current_time() - began <= 4
        assert await building.drain()
        nursery.cancel_scope.cancel()
    assert running_file.commits == 1
    assert all(file.commits == 1 for file in built_files)


async def test_an_index_that_was_left_out_costs_nothing() -> None:
    pool = MemoryPool(POOL_BYTES)
    left_out, other = CountingFile(), CountingFile()
    left_out.failure = "too costly"
    members = [_member(left_out), _member(other)]
    pipeline = Pipeline(pool, _work_at_once, members)
    pipeline.put(_batch(pool, 0, 1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        assert await pipeline.drain()
        nursery.cancel_scope.cancel()
    assert (left_out.commits, other.commits) == (0, 1)


async def test_a_scan_of_one_index_does_not_wait_for_the_others_commits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = MemoryPool(POOL_BYTES)

    first, second = CountingFile(), CountingFile()
    pipeline = Pipeline(pool, work_for_a_second, [_member(first), _member(second)])
    pipeline.put(_batch(pool, 0, 1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        await pipeline.wait_until(lambda: first.commits > 0, [PartitionId(0)])
        assert second.commits == 0
        assert await pipeline.drain()
        assert second.commits == 1
        nursery.cancel_scope.cancel()


async def test_a_round_begins_with_the_index_that_a_scan_waits_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A scan at `now` waits for all batches before its barrier, and for its own index only."""
    pool = MemoryPool(POOL_BYTES)

    others, own = [CountingFile(), CountingFile()], CountingFile()
    own_file = cast("IndexFile", own)
    pipeline = Pipeline(pool, work_for_a_second, [_member(file) for file in (*others, own)])
    for partition in range(3):
        pipeline.put(_batch(pool, partition, 1000))
    put_count = pipeline.put_count
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        await pipeline.wait_until(partial(pipeline.has_applied, put_count, own_file), file=own_file)
        assert own.commits == 1
        assert all(file.commits == 0 for file in others)
        assert not pipeline.has_applied(put_count)
        pipeline.put(_batch(pool, 0, 1000))
        assert not pipeline.has_applied(pipeline.put_count, own_file)
        assert await pipeline.drain()
        assert pipeline.has_applied(pipeline.put_count, own_file)
        assert {file.commits for file in (*others, own)} == {2}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("rounds_needed", [2, 3, 6])
async def test_an_index_that_a_scan_waits_for_takes_its_rounds_first(
    rounds_needed: int, autojump_clock: trio.testing.MockClock
) -> None:
    """It may be `AHEAD_ROUNDS` ahead of the others. In the end they have all rounds, too."""
    pool = MemoryPool(64 * ROUND_BYTES)

    others, own = [CountingFile(), CountingFile()], CountingFile()
    own_file = cast("IndexFile", own)
    pipeline = Pipeline(pool, work_for_a_second, [_member(file) for file in (*others, own)])
    for _ in range(rounds_needed):
        pipeline.put(_batch(pool, 0, ROUND_BYTES))
    put_count = pipeline.put_count
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        # The scan does not need the batch that is added now.
        await trio.sleep(1.5)
        pipeline.put(_batch(pool, 0, ROUND_BYTES))
        assert pipeline.round_count(own_file) == 0
        await pipeline.wait_until_applied(put_count, own_file)
        assert (own.commits, pipeline.round_count(own_file)) == (rounds_needed, rounds_needed)
        rounds_of_all = max(0, rounds_needed - AHEAD_ROUNDS)
        assert pipeline.rounds == rounds_of_all
        assert [file.commits for file in others] == [max(1, rounds_of_all), rounds_of_all]
        assert not pipeline.has_applied(put_count)
        assert await pipeline.drain()
        assert {file.commits for file in (*others, own)} == {rounds_needed + 1}
        assert pipeline.queued_batch_count == pool.used_bytes == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("batch_bytes", [ROUND_BYTES, 1000])
async def test_scans_that_follow_each_other_do_not_hold_up_other_indexes(
    batch_bytes: int, autojump_clock: trio.testing.MockClock
) -> None:
    """A scan always waits for their index, and still the others are at most `AHEAD_ROUNDS` behind
    it, with large rounds and with small ones."""
    pool = MemoryPool(64 * ROUND_BYTES)

    async def work(function: Callable[[], T]) -> T:
        # While a round is applied, another batch is added, and the next scan waits for it.
        pipeline.put(_batch(pool, 0, batch_bytes))
        nursery.start_soon(pipeline.wait_until_applied, pipeline.put_count, own_file)
        await trio.sleep(1)
        assert own.commits - other.commits <= AHEAD_ROUNDS
        return function()

    other, own = CountingFile(), CountingFile()
    own_file = cast("IndexFile", own)
    pipeline = Pipeline(pool, work, [_member(other), _member(own)])
    pipeline.put(_batch(pool, 0, batch_bytes))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        await trio.sleep(60)
        assert own.commits > 15
        assert other.commits >= own.commits - AHEAD_ROUNDS
        nursery.cancel_scope.cancel()


async def test_a_scan_that_ends_leaves_the_order_as_it_was(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = MemoryPool(64 * ROUND_BYTES)

    first, own = CountingFile(), CountingFile()
    pipeline = Pipeline(pool, work_for_a_second, [_member(first), _member(own)])
    pipeline.put(_batch(pool, 0, ROUND_BYTES))
    with trio.move_on_after(0.5):
        await pipeline.wait_until_applied(1, cast("IndexFile", own))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        await trio.sleep(2.5)
        assert (first.commits, own.commits) == (1, 0)
        nursery.cancel_scope.cancel()


async def test_a_round_waits_for_more_batches_unless_somebody_waits_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = MemoryPool(16 * ROUND_BYTES)
    pipeline = Pipeline(pool, _work_at_once, (), queues=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        began = trio.current_time()
        pipeline.put(_batch(pool, 0, 1000))
        pipeline.put(_batch(pool, 1, 1000))
        await pipeline.applied.wait()
        assert trio.current_time() - began == pytest.approx(GATHER_S)
        assert (pipeline.rounds, pipeline.queued_batch_count) == (1, 0)
        # The batches fill a round, so it begins at once.
        began = trio.current_time()
        pipeline.put(_batch(pool, 0, 1000))
        await trio.testing.wait_all_tasks_blocked()
        pipeline.put(_batch(pool, 0, ROUND_BYTES))
        await pipeline.applied.wait()
        assert trio.current_time() == began
        # `drain` waits for the round, so it begins at once.
        pipeline.put(_batch(pool, 0, 1000))
        await trio.testing.wait_all_tasks_blocked()
        assert await pipeline.drain()
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()


ROUND_S = 0.25


async def test_a_scan_of_ones_own_write_waits_for_its_partition_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Writers are faster than the indexer: the batches before the write take 10 s, and more are
    added all the time."""
    pool = MemoryPool(16 * 1024 * ROUND_BYTES)

    async def work(function: Callable[[], T]) -> T:
        await trio.sleep(ROUND_S)
        return function()

    pipeline = Pipeline(pool, work, (), queues=2)
    other_count, own = 7, PartitionId(0)
    batch_bytes = ROUND_BYTES // 16

    async def keep_putting() -> None:
        while True:
            for partition in range(1, 1 + other_count):
                for _ in range(4):
                    pipeline.put(_batch(pool, partition, batch_bytes))
            await trio.sleep(ROUND_S)

    for partition in range(1, 1 + other_count):
        for _ in range(92):
            pipeline.put(_batch(pool, partition, batch_bytes))
    assert pipeline.queued_batch_count * batch_bytes / ROUND_BYTES * ROUND_S > 10
    for _ in range(12):
        pipeline.put(_batch(pool, own, batch_bytes))
    put_count, began = pipeline.put_count, trio.current_time()
    waits: dict[str, float] = {}

    async def wait(name: str, condition: Callable[[], bool], *partitions: PartitionId) -> None:
        await pipeline.wait_until(condition, partitions)
        waits[name] = trio.current_time() - began

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_putting)
        nursery.start_soon(pipeline.run)
        await trio.sleep(ROUND_S / 2)
        async with trio.open_nursery() as scans:
            scans.start_soon(wait, "at_least", lambda: own not in pipeline.queued_partitions(), own)
            scans.start_soon(wait, "now", lambda: pipeline.has_applied(put_count))
        nursery.cancel_scope.cancel()
    # The round that was running, and two more, half of each for the partition.
    assert waits["at_least"] == pytest.approx(3 * ROUND_S)
    # All batches that were added before, and no later ones, except in the first round.
    assert waits["now"] == pytest.approx(put_count * batch_bytes / ROUND_BYTES * ROUND_S, rel=0.05)


async def _work_at_once(function: Callable[[], T]) -> T:
    await trio.lowlevel.checkpoint()
    return function()


async def test_building_stops_at_half_of_the_pool(tmp_path: Path) -> None:
    """The running indexes' stream may use three quarters, so it continues."""
    gate = Gate()
    largest_chunk = 2 * 1024 * 1024
    pool_bytes = 3 * POOL_BYTES
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, pool_bytes, work=gate) as indexer,
    ):
        async with publisher(server.url("b")) as writer:
            for index in range(COUNT):
                await writer.set(str(index), json.dumps({"n": 1, "x": "x" * VALUE_BYTES}))
        await eventually(lambda: indexer.slices[0].figures()["applied"] == COUNT, "it was read")
        await define(client, "d", {"n": BY_N})
        await eventually(
            lambda: indexer.slices[0].definitions.building_count == 1, "building has begun"
        )
        gate.close()
        await eventually(
            lambda: indexer.pool.used_bytes > pool_bytes // 2, "half of the pool is used"
        )
        await client.set("more", "{}")
        await eventually(
            lambda: indexer.slices[0].figures()["received"] == COUNT + 2, "it is received"
        )
        assert indexer.pool.used_bytes < pool_bytes // 2 + largest_chunk
        gate.open()
        await until_ready(indexer, "d/n")


async def test_a_full_queue_holds_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small batches do not fill the pool, so their number has its own limit."""
    batches_max = 5
    monkeypatch.setattr(batch_queues, "QUEUE_BATCHES_MAX", batches_max)
    gate = Gate()
    async with (
        a_server(partitions=1) as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, work=gate) as indexer,
    ):
        await client.set("k0", "{}")
        # Wait until the stream has saved its start, too: the gate would block that.
        await eventually(
            lambda: indexer.slices[0].figures()["applied"] == 1, "the stream has begun"
        )
        gate.close()
        written = 1

        def has_received() -> bool:
            return (
                indexer.slices[0].pipeline.is_full
                or indexer.slices[0].figures()["received"] == written
            )

        while not indexer.slices[0].pipeline.is_full:
            await client.set(f"k{written}", "{}")
            written += 1
            # Wait, so that the next write is in a snapshot of its own.
            await eventually(has_received, "it is received")
        for _ in range(2 * batches_max):
            await client.set(f"k{written}", "{}")
            written += 1
        # Another consumer receives everything.
        async with consume(server.url("b")) as consumer:
            await count_all(consumer, written)
        assert indexer.slices[0].pipeline.queued_batch_count == batches_max
        gate.open()
        await eventually(
            lambda: indexer.slices[0].figures()["applied"] == written, "all is applied"
        )


async def test_the_stream_does_not_wait_to_forget_keys_that_are_applied(
    tmp_path: Path,
) -> None:
    """If it waited until all indexes had all queued batches each time that it forgets received
    keys, scans at `now` would wait, too."""
    gate = Gate()
    async with (
        a_server(partitions=1) as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, undo_mutations=100, work=gate) as indexer,
    ):
        figures = indexer.slices[0].figures

        async def write(first: int, end: int, figure: str) -> None:
            for number in range(first, end):
                await client.set(f"k{number}", "{}")
            await eventually(lambda: figures()[figure] == end, f"{figure} is {end}")

        await write(0, 90, "applied")
        await write(90, 100, "applied")
        gate.close()
        await write(100, 150, "received")
        assert figures()["applied"] == 100
        gate.open()
        await eventually(lambda: figures()["applied"] == 150, "all is applied")


async def test_a_commit_is_durable_once_another_commit_follows() -> None:
    pipeline = Pipeline(MemoryPool(POOL_BYTES), _work_at_once)
    durable_seqs = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        # The third is a rollback.
        for seq in 5, 9, 3, 4:
            position = Position(FailoverLog(), SeqNo(seq), SeqNo(seq), None)
            pipeline.put(IndexBatch(PartitionId(0), Mark(position)))
            assert await pipeline.drain()
            durable_seqs.append(pipeline.durable_seq(PartitionId(0)))
        nursery.cancel_scope.cancel()
    assert durable_seqs == [0, 5, 3, 3]
    assert pipeline.durable_seq(PartitionId(1)) == 0


async def test_a_full_queue_holds_the_stream_of_a_new_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_queues, "QUEUE_BATCHES_MAX", 1)
    partitions = 16
    gate = Gate()
    run = IndexBuilder.run

    async def run_held(builder: IndexBuilder) -> None:
        gate.close()
        await run(builder)

    monkeypatch.setattr(IndexBuilder, "run", run_held)
    async with (
        a_server(partitions=partitions) as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, work=gate) as indexer,
    ):
        keys = 10 * partitions
        for index in range(keys):
            await client.set(f"k{index}", "{}")
        await eventually(lambda: indexer.slices[0].figures()["applied"] == keys, "it was read")
        await define(client, "d", {"n": BY_N})
        await eventually(
            lambda: indexer.slices[0].definitions.queued_batches > 0, "building has begun"
        )
        # Another consumer receives everything.
        async with consume(server.url("b")) as consumer:
            await count_all(consumer, keys + 1)
        assert indexer.slices[0].definitions.queued_batches == 1
        gate.open()
        await until_ready(indexer, "d/n")


async def test_a_queue_has_a_limit_of_batches() -> None:
    pool = MemoryPool(POOL_BYTES)
    pipeline = Pipeline(pool, Gate(), ())
    await trio.lowlevel.checkpoint()
    for _ in range(QUEUE_BATCHES_MAX):
        assert not pipeline.is_full
        pipeline.put(_batch(pool, 3, BATCH_OVERHEAD_BYTES))
    assert pipeline.is_full


def _batch(pool: MemoryPool, partition: int, nbytes: int) -> IndexBatch:
    pool.reserve(nbytes)
    return IndexBatch(PartitionId(partition), NO_MARK, nbytes=nbytes)


async def test_a_barrier_is_shared_by_scans_that_came_before_it_was_sent() -> None:
    pool = MemoryPool(POOL_BYTES)
    pipeline = Pipeline(pool, Gate(), ())
    barrier_count = 0
    back = trio.Event()

    async def barrier() -> None:
        nonlocal barrier_count, back
        barrier_count += 1
        await back.wait()
        back = trio.Event()

    barriers = ScanBarriers(barrier, pipeline)
    finished_scans: list[str] = []

    async def ask(name: str) -> None:
        await barriers.wait_until_applied()
        finished_scans.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(barriers.run)
        for name in "ab":
            nursery.start_soon(ask, name)
        await trio.testing.wait_all_tasks_blocked()
        assert barrier_count == 1
        # The first barrier was sent before these scans, so they need another one.
        for name in "cd":
            nursery.start_soon(ask, name)
        await trio.testing.wait_all_tasks_blocked()
        back.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (sorted(finished_scans), barrier_count) == (["a", "b"], 2)
        back.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (sorted(finished_scans), barrier_count) == (["a", "b", "c", "d"], 2)
        nursery.cancel_scope.cancel()


async def test_a_barrier_waits_for_what_the_queues_hold_before_it() -> None:
    """A request for the definitions waits so: a design document in a queue is not in the catalog
    yet."""
    pool = MemoryPool(POOL_BYTES)
    pipeline = Pipeline(pool, _work_at_once)
    barriers = ScanBarriers(trio.lowlevel.checkpoint, pipeline)
    pipeline.put(_batch(pool, 0, 1000))
    returned = trio.Event()

    async def ask() -> None:
        await barriers.wait_until_applied()
        returned.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(barriers.run)
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert barriers.sent_count == 1
        assert not returned.is_set()
        nursery.start_soon(pipeline.run)
        await returned.wait()
        assert pipeline.queued_batch_count == 0
        nursery.cancel_scope.cancel()


class SlowCount:
    """Replaces `EntryReader.select`; it waits before it returns entries.

    Attributes:
        has_begun: Set once the thread has begun to count.
        may_go_on: The test sets it to let the thread continue.
        entry_count: How many entries were counted.
    """

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = trio.Event(), threading.Event()
        self.entry_count = 0

    def select(self, _selection: EntrySelection) -> Iterator[bytes]:
        """Yields so many entries that counting them takes three steps."""
        trio.from_thread.run_sync(self.has_begun.set)
        self.may_go_on.wait()
        for _ in range(3 * COUNT_STEP):
            self.entry_count += 1
            yield b""


async def test_a_count_that_nobody_waits_for_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count of many entries takes minutes. Otherwise a stop of the indexer would wait for it, and
    clients that give up and ask again would occupy one thread after the other."""
    slow_count = SlowCount()

    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"n": BY_N})
        await until_ready(indexer, "d/n")
        monkeypatch.setattr(EntryReader, "select", slow_count.select)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, indexer, "d/n", Query(count=True, prefix=[1]))
            await slow_count.has_begun.wait()
            nursery.cancel_scope.cancel()
            slow_count.may_go_on.set()
    assert slow_count.entry_count == COUNT_STEP


async def test_counts_leave_threads_for_the_other_work_of_a_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, forty counts would take all threads of the process: until one ended, the
    slice could report no status and read no design document."""
    begun, may_go_on = threading.Semaphore(0), threading.Event()

    def select(_reader: EntryReader, _selection: EntrySelection) -> Iterator[bytes]:
        begun.release()
        may_go_on.wait()
        return iter(())

    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"n": BY_N})
        await until_ready(indexer, "d/n")
        monkeypatch.setattr(EntryReader, "select", select)
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(ask, indexer, "d/n", Query(count=True, prefix=[1]))
            own_thread = trio.CapacityLimiter(1)
            for _ in range(READS_AT_ONCE):
                await trio.to_thread.run_sync(begun.acquire, limiter=own_thread)
            await trio.testing.wait_all_tasks_blocked()
            try:
                with trio.fail_after(20):
                    status = await indexer.scanner.status(name_of("d/n"))
                    # The timeout of a scan includes its wait for a thread.
                    with pytest.raises(NotFreshError):
                        await ask(indexer, "d/n", Query(limit=10_000, timeout_s=0.1))
            finally:
                may_go_on.set()
    assert status.state == "ready"


async def test_a_count_of_an_index_that_is_dropped_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is removed when nothing reads it, and until then the slice applies no definition. A
    count may take minutes."""
    slow_count = SlowCount()

    async def count_all_entries() -> None:
        with pytest.raises(NoIndexError):
            await ask(indexer, "d/n", Query(count=True, prefix=[1]))

    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"n": BY_N})
        await until_ready(indexer, "d/n")
        monkeypatch.setattr(EntryReader, "select", slow_count.select)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_all_entries)
            await slow_count.has_begun.wait()
            await indexer.designs.drop("d")
            definitions = indexer.slices[0].definitions
            await eventually(lambda: not definitions.names(), "it is dropped")
            slow_count.may_go_on.set()
    assert slow_count.entry_count == COUNT_STEP


@pytest.mark.parametrize("limit", [1, 10_000])
async def test_a_scan_that_needs_no_wait_needs_no_time(tmp_path: Path, limit: int) -> None:
    """With a timeout of 0 s, only a scan that must wait is refused as not fresh."""
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"n": BY_N})
        for key in "xy":
            await client.set(key, '{"n": 1}')
        await until_ready(indexer, "d/n")
        assert len(await scan(indexer, "d/n")) == 2
        query = Query(timeout_s=0, limit=limit, hold_s=1)
        page = await ask(indexer, "d/n", query)
        assert page.entries[0].id == "x"
        again = msgspec.structs.replace(query, moment=page.moment, hold_s=0)
        assert (await ask(indexer, "d/n", again)).entries == page.entries
        with pytest.raises(NotFreshError):
            await ask(indexer, "d/n", Query(timeout_s=0, limit=limit, consistency="now"))
