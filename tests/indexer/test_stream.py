"""The stream of the running indexes: its marks, its memory, its connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from tests.indexer.kit import BUCKET, POOL_BYTES
from tests.indexer.snapshot_parts import PARTS, part_of_snapshot
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import (
    Address,
    Event,
    ReceivedKeysLimits,
    ResumeState,
    RollbackConsumer,
)
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import Cas, Operation, PartitionId, SeqNo
from upr_server.indexer import stream as stream_module
from upr_server.indexer.mark import Mark
from upr_server.indexer.pipeline import Pipeline, worker_thread
from upr_server.indexer.pool import STREAM_SHARE, MemoryPool
from upr_server.indexer.slices import SliceId
from upr_server.indexer.stream import IndexerStream


def position(seq: int) -> Position:
    return Position(FailoverLog.of_pairs([(1, 0)]), SeqNo(seq), SeqNo(seq), None)


PARTITION = PartitionId(0)


class ConsumerAtPositions:
    """A consumer with given positions."""

    def __init__(self, positions: dict[PartitionId, Position]) -> None:
        self.resume_state = ResumeState(BUCKET, positions)
        self.position = self.resume_state.position


def a_stream(folder: Path, pool: MemoryPool, pipeline: Pipeline) -> IndexerStream:
    return IndexerStream(
        Address.parse(f"upr://127.0.0.1:1/{BUCKET}"),
        pipeline,
        pool,
        folder / "received-keys",
        ReceivedKeysLimits(),
        SliceId(),
    )


def test_a_partition_without_changes_has_reached_its_consumers_position(tmp_path: Path) -> None:
    """After a failover there may be no change for a long time. A new index must not wait for
    one."""
    pool = MemoryPool(POOL_BYTES)
    stream = a_stream(tmp_path, pool, Pipeline(pool, worker_thread()))
    idle, busy = PartitionId(0), PartitionId(1)
    stream.marks = {busy: Mark(position(5))}
    assert stream.reached_marks() == stream.marks
    stream._consumer = cast(
        "RollbackConsumer", ConsumerAtPositions({idle: position(7), busy: position(9)})
    )
    row = Mutation(Operation.SET, b"k", b"v", SeqNo(9), Cas(9))
    # A part of a snapshot is received, but not yet in a queue.
    stream._assembler.add_chunk(busy, Chunk.build([row]), Mark(position(9)))
    assert stream.reached_marks() == {idle: Mark(position(7)), busy: Mark(position(5))}


async def test_parts_of_snapshots_that_fill_the_pool_are_applied(tmp_path: Path) -> None:
    """The rest of each snapshot waits for memory. Only applying the parts releases some."""
    pool = MemoryPool(POOL_BYTES)
    pipeline = Pipeline(pool, worker_thread())
    stream = a_stream(tmp_path, pool, pipeline)
    partitions = [PartitionId(number) for number in range(PARTS)]
    positions = {partition: position(1) for partition in partitions}
    consumer = cast("RollbackConsumer", ConsumerAtPositions(positions))
    for partition in partitions:
        await stream._handle(consumer, part_of_snapshot(partition, POOL_BYTES // 17))
    assert not pool.has_room(STREAM_SHARE)
    assert not pipeline.queued_batch_count, "all wait for the rest of their snapshots"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        with trio.fail_after(20):
            await stream._wait_for_room()
        nursery.cancel_scope.cancel()
    assert set(stream.marks) == set(partitions)


class BreaksInSnapshot:
    """A consumer whose connection breaks after a part of a snapshot."""

    def __init__(self) -> None:
        self.resume_state = ResumeState(BUCKET, {PARTITION: position(1)})
        self.position = self.resume_state.position
        self._parts = [part_of_snapshot(PARTITION, 10)]

    def flush_received_keys(self) -> None:
        """Does nothing: these tests undo nothing."""

    def __aiter__(self) -> BreaksInSnapshot:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint()
        if self._parts:
            return self._parts.pop()
        raise BrokenError("cut")


async def test_what_came_over_an_earlier_connection_is_applied_before_the_next_resumes(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next connection resumes from what is applied. After a failover the server may have lost
    changes that were received and not applied. If they were applied after that, nothing would
    undo them."""
    pool = MemoryPool(POOL_BYTES)
    pipeline = Pipeline(pool, worker_thread())
    stream = a_stream(tmp_path, pool, pipeline)
    waiting: list[bool] = []

    @asynccontextmanager
    async def consume_until_broken(*_args: Any, **_options: Any) -> AsyncIterator[BreaksInSnapshot]:
        await trio.lowlevel.checkpoint()
        waiting.append(stream._assembler.is_open(PARTITION) or pool.used_bytes > 0)
        if len(waiting) > 1:
            nursery.cancel_scope.cancel()
        yield BreaksInSnapshot()

    monkeypatch.setattr(stream_module, "consume_with_rollback", consume_until_broken)
    stream._partitions = [PARTITION]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.run)
        nursery.start_soon(stream.run)
    assert waiting == [False, False]


async def test_an_indexer_waits_for_a_server_that_stops_or_has_too_many_connections(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An indexer, or a worker, that was started while the server stopped ended the indexer."""
    pool = MemoryPool(POOL_BYTES)
    stream = a_stream(tmp_path, pool, Pipeline(pool, worker_thread()))
    statuses = [Status.SHUTTING_DOWN, Status.TOO_MANY, Status.SHUTTING_DOWN, Status.NO_BUCKET]
    asked_at: list[float] = []

    @asynccontextmanager
    async def refused(*_args: Any, **_options: Any) -> AsyncIterator[Any]:
        await trio.lowlevel.checkpoint()
        asked_at.append(trio.current_time())
        raise ServerError(statuses[len(asked_at) - 1], "")
        yield

    monkeypatch.setattr(stream_module, "connect", refused)
    with pytest.raises(ServerError, match="create the bucket first"):
        await stream.run()
    assert asked_at == pytest.approx([asked_at[0] + index for index in range(4)], abs=0.1)


async def test_an_indexer_waits_for_streams_above_its_users_limit(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new index needs as many streams as the running ones. If the user's limit does not allow
    them, the indexer must not end: it would end again after each start, and scans of all indexes
    would fail."""
    pool = MemoryPool(POOL_BYTES)
    pipeline = Pipeline(pool, worker_thread())
    stream = a_stream(tmp_path, pool, pipeline)
    refusals = [Status.LIMIT_REACHED, Status.LIMIT_REACHED, Status.NOT_ALLOWED]
    asked_at: list[float] = []

    @asynccontextmanager
    async def refused(*_args: Any, **_options: Any) -> AsyncIterator[Any]:
        await trio.lowlevel.checkpoint()
        asked_at.append(trio.current_time())
        raise ServerError(refusals[len(asked_at) - 1], "partition 0")
        yield

    monkeypatch.setattr(stream_module, "consume_with_rollback", refused)
    stream._partitions = [PARTITION]
    with pytest.raises(ServerError, match="log in as a user who may"):
        await stream.run()
    assert asked_at == pytest.approx([asked_at[0] + 10 * index for index in range(3)], abs=1)
