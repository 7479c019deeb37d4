"""What becomes of a partition that has gone over to the running indexes' stream too early."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.indexer.kit import BUCKET, POOL_BYTES, a_server
from tests.indexer.test_stream import PARTS, part_of_snapshot
from tests.kit.held_store import HeldStore
from tests.kit.process import eventually
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import (
    Address,
    ChunkReceived,
    Consumer,
    Event,
    ResumeState,
    RolledBack,
    SnapshotEnd,
    connect,
    consume,
)
from upr_protocol.failover import FailoverEntry, FailoverLog, Position
from upr_protocol.ids import Cas, Durability, HistoryId, Operation, PartitionId, SeqNo
from upr_server.indexer import builder as builder_module
from upr_server.indexer.builder import IndexBuilder
from upr_server.indexer.document_rows import DocumentRows, RoundChanges
from upr_server.indexer.entry_reader import EntrySelection
from upr_server.indexer.index_batch import DocumentChange, IndexBatch
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.mark import NO_MARK, Mark
from upr_server.indexer.pipeline import Pipeline, PipelineMember, worker_thread
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.stream import IndexerStream

PARTITION = PartitionId(0)
COUNT = 10
ANOTHER = FailoverLog((FailoverEntry(HistoryId(1), SeqNo(0)),))


class ByKey:
    """Every document has an entry: its key."""

    failure = ""
    has_payloads = False
    key_prefix = b""

    def attempt(self) -> AbstractContextManager[None]:
        """Nothing is noted."""
        return nullcontext()

    def single_entries(self, rows: DocumentRows) -> None:
        """None: `entries` says what they are."""

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        """The key, without a payload."""
        return (change.key,), b""


class OtherStream:
    """The running indexes' stream, which is where the test says.

    Attributes:
        partition_count: Always 1.
        is_rolling_back: Always false.
        listeners: Those that hear of its batches.
        position: How far it is: at first in some history of its own.
    """

    partition_count = 1
    is_rolling_back = False

    def __init__(self) -> None:
        self.listeners: list[Callable[[IndexBatch], None]] = []
        self.position = at(ANOTHER, 0)

    def reached_marks(self) -> dict[PartitionId, Mark]:
        return {PARTITION: self.position}

    async def partitions(self) -> list[PartitionId]:
        await trio.lowlevel.checkpoint()
        return [PARTITION]

    def put(self, mark: Mark) -> None:
        for listener in self.listeners:
            listener(IndexBatch(PARTITION, mark))

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass


class BusyStream(OtherStream):
    """It is one change ahead whenever anybody looks, unless it pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.file: IndexFile | None = None
        self._ahead = 1

    @property
    def is_paused(self) -> bool:
        return not self._ahead

    def reached_marks(self) -> dict[PartitionId, Mark]:
        assert self.file is not None
        mark = self.file.mark(PARTITION)
        return {PARTITION: at(mark.position.log, mark.seq + self._ahead)}

    def pause(self) -> None:
        self._ahead = 0
        self.put(self.reached_marks()[PARTITION])

    def resume(self) -> None:
        self._ahead = 1


class WithAWord:
    """A consumer, and a word to be said just before one of its events: whoever has it then
    has not come to wait for anything."""

    def __init__(self, consumer: Consumer, say: Callable[[Event], None]) -> None:
        self._consumer = consumer
        self._say = say

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def __aiter__(self) -> WithAWord:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._consumer)
        self._say(event)
        return event


def builder_of(
    *files: IndexFile, beside: OtherStream, url: str, running: Pipeline | None = None
) -> IndexBuilder:
    """A builder of some indexes, beside another stream, and the pipeline of that."""
    pool, work = MemoryPool(POOL_BYTES), worker_thread()
    members = [PipelineMember(file, ByKey()) for file in files]
    return IndexBuilder(
        Address.parse(url),
        pool,
        work,
        members,
        cast("IndexerStream", beside),
        running or Pipeline(pool, work),
        1,
    )


def set_up(there: OtherStream, path: Path, url: str) -> tuple[IndexBuilder, IndexFile]:
    """A builder of one index, beside another stream."""
    file = IndexFile(path, BUCKET)
    return builder_of(file, beside=there, url=url), file


async def test_an_event_from_before_a_new_beginning_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history changes, and the partition is to be read again from 0, just as one more of its
    snapshots is its current event. If that event were applied, it would be all that is read
    again."""
    stream = OtherStream()
    words: list[Callable[[], None]] = []

    def say(event: Event) -> None:
        if words and isinstance(event, SnapshotEnd):
            words.pop()()

    @asynccontextmanager
    async def overheard(*args: Any, **options: Any) -> AsyncIterator[WithAWord]:
        async with consume(*args, **options) as consumer:
            yield WithAWord(consumer, say)

    monkeypatch.setattr(builder_module, "consume", overheard)
    async with a_server(partitions=1) as server, connect(server.url(BUCKET)) as client:
        for index in range(COUNT):
            await client.set(f"k{index}", json.dumps(index))
        builder, file = set_up(stream, tmp_path, server.url(BUCKET))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(builder.run)
            await eventually(lambda: file.mark(PARTITION).seq == COUNT, "it was read")
            mark = file.mark(PARTITION)
            # It goes over, and is pending: the other stream is not as far.
            stream.position = at(mark.position.log, COUNT // 2)
            stream.put(stream.position)
            await eventually(lambda: not builder.seqs_behind(), "it has gone over")
            words.append(lambda: stream.put(at(ANOTHER, COUNT // 2)))
            await client.set("k0", json.dumps("again"))
            await eventually(lambda: not words, "the history has changed")
            stream.position = at(mark.position.log, COUNT + 1)
            await eventually(lambda: file.is_built, "it was built")
        with file.open_view() as view:
            result = view.scan(EntrySelection(), COUNT + 1)
        assert result.entries == [b"k%d" % index for index in range(COUNT)]
        file.close()


def at(log: FailoverLog, seq: int) -> Mark:
    """Behind a whole snapshot."""
    return Mark(Position(log, SeqNo(seq), SeqNo(seq), None))


async def test_a_new_index_is_completed_under_a_load_that_never_ends(tmp_path: Path) -> None:
    """The running indexes' stream pauses for it."""
    busy = BusyStream()
    async with a_server(partitions=1) as server, connect(server.url(BUCKET)) as client:
        for index in range(COUNT):
            await client.set(f"k{index}", json.dumps(index))
        builder, file = set_up(busy, tmp_path, server.url(BUCKET))
        busy.file = file
        with trio.fail_after(20):
            await builder.run()
        assert file.is_built
        assert file.entry_count() == COUNT
        assert not busy.is_paused
        file.close()


class ManyParts:
    """A consumer that is sent a part of a snapshot of each partition, and no end of one."""

    def __init__(self, nbytes: int) -> None:
        self.resume_state = ResumeState(BUCKET)
        self.position = self.resume_state.position
        self._parts = [part_of_snapshot(PartitionId(n), nbytes) for n in range(PARTS)]

    def __aiter__(self) -> ManyParts:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint()
        if not self._parts:
            await trio.sleep_forever()
        part = self._parts.pop()
        self.resume_state.positions[part.partition] = at(ANOTHER, 1).position
        return part


async def test_parts_of_snapshots_that_fill_the_pool_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else releases what they have reserved: the rest of each waits for room."""

    @asynccontextmanager
    async def many_parts(*_args: Any, **_options: Any) -> AsyncIterator[ManyParts]:
        await trio.lowlevel.checkpoint()
        yield ManyParts(POOL_BYTES // 17)

    monkeypatch.setattr(builder_module, "consume", many_parts)
    builder, file = set_up(OtherStream(), tmp_path, "upr://127.0.0.1:1/b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(builder.run)
        # Half of the pool, and another one that begins when that is applied.
        await eventually(lambda: file.entry_count() > PARTS // 2, "they are applied")
        nursery.cancel_scope.cancel()
    file.close()


class Standing:
    """A consumer that stands at 0."""

    def __init__(self) -> None:
        self.resume_state = ResumeState(BUCKET)
        self.position = self.resume_state.position


async def test_a_rollback_in_the_middle_of_a_snapshot_drops_what_came_of_it(tmp_path: Path) -> None:
    builder, file = set_up(OtherStream(), tmp_path, "upr://127.0.0.1:1/b")
    consumer = cast("Consumer", Standing())
    row = Mutation(Operation.SET, b"lost", b"0", SeqNo(1), Cas(1))
    for event in (
        ChunkReceived(PARTITION, Chunk.build([row])),
        RolledBack(PARTITION, SeqNo(0), SeqNo(0), "a failover"),
        SnapshotEnd(PARTITION, SeqNo(1)),
    ):
        builder._handle(consumer, event)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(builder.pipeline.run)
        assert await builder.pipeline.drain()
        nursery.cancel_scope.cancel()
    assert file.entry_count() == 0
    file.close()


async def test_a_rollback_while_an_index_is_built_takes_out_what_was_lost(tmp_path: Path) -> None:
    """The builder has no received keys to undo with, so the partition is built again from 0."""
    stream, store = OtherStream(), HeldStore()
    store.released.set()
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as crash:
            async with (
                a_server(store, partitions=1) as server,
                connect(server.url(BUCKET)) as client,
            ):
                for index in range(COUNT):
                    await client.set(f"k{index}", "0", durability=Durability.PERSISTED)
                builder, file = set_up(stream, tmp_path, server.url(BUCKET))
                nursery.start_soon(builder.run)
                store.released = trio.Event()
                await client.set("lost", "0")
                # The mark comes after the entries: a reader may see these without it.
                await eventually(lambda: file.mark(PARTITION).seq == COUNT + 1, "it was read")
                assert file.entry_count() == COUNT + 1
                lost_history = file.mark(PARTITION).history_id
                crash.cancel()
        store = HeldStore(store.directory)
        store.released.set()
        async with (
            a_server(store, partitions=1, port=server.port) as server,
            connect(server.url(BUCKET)) as client,
        ):
            await client.set("k0", "1")
            await eventually(
                lambda: (
                    file.mark(PARTITION).seq == COUNT + 1
                    and file.mark(PARTITION).history_id != lost_history
                ),
                "it was read again",
            )
            assert not file.is_built
            stream.position = file.mark(PARTITION)
            stream.put(stream.position)
            await eventually(lambda: file.is_built, "it was built")
        with file.open_view() as view:
            result = view.scan(EntrySelection(), COUNT + 2)
        assert result.entries == [b"k%d" % index for index in range(COUNT)]
        file.close()


def keys_of(file: IndexFile) -> list[bytes]:
    """The keys of the documents that an index has."""
    with file.open_view() as view:
        return view.scan(EntrySelection(), 2 * COUNT).entries


async def test_changes_that_one_of_two_new_indexes_had_alone_are_lost_with_them(
    tmp_path: Path,
) -> None:
    """A stop came between their commits, and then a failover. To the server the stream is where
    the index is that is further behind, which has lost nothing."""
    stream, store = OtherStream(), HeldStore()
    files = [IndexFile(tmp_path / name, BUCKET) for name in ("ahead", "behind")]
    store.released.set()

    async def build(until: Callable[[], bool], *members: IndexFile) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(builder_of(*members, beside=stream, url=server.url(BUCKET)).run)
            await eventually(until, "it was read")
            nursery.cancel_scope.cancel()

    with trio.CancelScope() as crash:
        async with (
            a_server(store, partitions=1) as server,
            connect(server.url(BUCKET)) as client,
        ):
            for index in range(COUNT):
                await client.set(f"k{index}", "0", durability=Durability.PERSISTED)
            await build(lambda: all(file.mark(PARTITION).seq == COUNT for file in files), *files)
            store.released = trio.Event()
            await client.set("lost", "0")
            await build(lambda: files[0].mark(PARTITION).seq == COUNT + 1, files[0])
            assert keys_of(files[0])[-1] == b"lost"
            crash.cancel()
    store = HeldStore(store.directory)
    store.released.set()
    async with a_server(store, partitions=1) as server, connect(server.url(BUCKET)) as client:
        await client.set("late", "0")
        await build(lambda: all(b"late" in keys_of(file) for file in files), *files)
    for file in files:
        assert keys_of(file) == [*(b"k%d" % index for index in range(COUNT)), b"late"]
        file.close()


async def test_an_index_is_complete_when_the_running_ones_have_what_it_has(tmp_path: Path) -> None:
    """Their rounds write the received keys, without which nothing knows what a failover undoes: a
    crash must not find the index complete before that."""
    stream = OtherStream()
    async with a_server(partitions=1) as server, connect(server.url(BUCKET)) as client:
        await client.set("k", "0")
        pool = MemoryPool(POOL_BYTES)
        running = Pipeline(pool, worker_thread())
        file = IndexFile(tmp_path, BUCKET)
        builder = builder_of(file, beside=stream, url=server.url(BUCKET), running=running)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(builder.run)
            await eventually(lambda: file.mark(PARTITION).seq == 1, "it was read")
            stream.position = file.mark(PARTITION)
            running.put(IndexBatch(PARTITION, stream.position))
            stream.put(stream.position)
            await eventually(
                lambda: running._waiting_tasks == 1 or file.is_built, "it has caught up"
            )
            assert not file.is_built
            nursery.start_soon(running.run)
            await eventually(lambda: file.is_built, "it was built")
            nursery.cancel_scope.cancel()
        file.close()


async def test_a_partition_that_no_longer_exists_is_cleared(tmp_path: Path) -> None:
    """The bucket was deleted and created again with fewer, while the index was being built."""
    stream, file, gone = OtherStream(), IndexFile(tmp_path, BUCKET), PartitionId(1)
    row = Mutation(Operation.SET, b"gone", b"0", SeqNo(1), Cas(1))
    batch = IndexBatch(gone, at(ANOTHER, 1), [Chunk.build([row])])
    file.apply_changes(RoundChanges([batch]), ByKey())
    builder = builder_of(file, beside=stream, url="upr://127.0.0.1:1/b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(builder.run)
        await eventually(lambda: file.mark(gone) == NO_MARK, "it was cleared")
        nursery.cancel_scope.cancel()
    assert not keys_of(file)
    file.close()


class NewFile:
    """An index that has nothing yet, and notes which partitions it is asked for."""

    failure = ""

    def __init__(self, asked: list[PartitionId]) -> None:
        self.marks: dict[PartitionId, Mark] = {}
        self._asked = asked

    def mark(self, partition: PartitionId) -> Mark:
        self._asked.append(partition)
        return NO_MARK


def test_a_look_at_who_may_join_asks_one_index_of_those_that_are_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asked all 64 of a design: 6 ms of the loop for 1,024 partitions, fifty times a second."""
    asked: list[PartitionId] = []
    pool = MemoryPool(POOL_BYTES)
    members = [PipelineMember(cast("IndexFile", NewFile(asked)), ByKey()) for _ in range(64)]
    partitions = [PartitionId(number) for number in range(100)]
    stream = OtherStream()
    monkeypatch.setattr(
        stream, "reached_marks", lambda: {partition: at(ANOTHER, 5) for partition in partitions}
    )
    builder = IndexBuilder(
        Address.parse("upr://127.0.0.1:1/b"),
        pool,
        worker_thread(),
        members,
        cast("IndexerStream", stream),
        Pipeline(pool, worker_thread()),
        1,
    )
    builder._partitions = partitions
    builder._join()
    assert builder.seqs_behind() == 500
    assert not builder.has_joined
    assert asked == partitions
