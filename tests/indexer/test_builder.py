"""The builder of new indexes: how partitions join the running indexes' stream, and rollbacks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.indexer.kit import BUCKET, POOL_BYTES, a_server
from tests.indexer.snapshot_parts import PARTS, part_of_snapshot
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
        """A context that does nothing."""
        return nullcontext()

    def single_entries(self, rows: DocumentRows) -> None:
        """None, so that `entries` is called for each document."""

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        """The key, without a payload."""
        return (change.key,), b""


class FakeRunningStream:
    """The running indexes' stream; the test sets its position.

    Attributes:
        partition_count: Always 1.
        is_rolling_back: Always false.
        listeners: The functions that it calls with each batch.
        position: The mark that it has reached: at first in a history that the server does not have.
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


class AlwaysAheadStream(FakeRunningStream):
    """It is always one change ahead of the new index, except while it pauses."""

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


class ConsumerWithHook:
    """A consumer that calls a function just before it returns an event.

    No other task runs between that call and the moment in which the reader gets the event.
    """

    def __init__(self, consumer: Consumer, before_event: Callable[[Event], None]) -> None:
        self._consumer = consumer
        self._before_event = before_event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def __aiter__(self) -> ConsumerWithHook:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._consumer)
        self._before_event(event)
        return event


def builder_of(
    *files: IndexFile, stream: FakeRunningStream, url: str, running: Pipeline | None = None
) -> IndexBuilder:
    """A builder of some indexes, with the running indexes' stream and pipeline."""
    pool, work = MemoryPool(POOL_BYTES), worker_thread()
    members = [PipelineMember(file, ByKey()) for file in files]
    return IndexBuilder(
        Address.parse(url),
        pool,
        work,
        members,
        cast("IndexerStream", stream),
        running or Pipeline(pool, work),
        1,
    )


def set_up(stream: FakeRunningStream, path: Path, url: str) -> tuple[IndexBuilder, IndexFile]:
    """A builder of one index, and that index."""
    file = IndexFile(path, BUCKET)
    return builder_of(file, stream=stream, url=url), file


async def test_an_event_that_was_received_before_a_partition_starts_again_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history changes, so the partition must be read again from 0. At that moment the builder
    has just received the end of another snapshot. If it applied that event, it would take the
    partition as read up to there, and read nothing else again."""
    stream = FakeRunningStream()
    actions: list[Callable[[], None]] = []

    def act_before_snapshot_end(event: Event) -> None:
        if actions and isinstance(event, SnapshotEnd):
            actions.pop()()

    @asynccontextmanager
    async def consume_with_hook(*args: Any, **options: Any) -> AsyncIterator[ConsumerWithHook]:
        async with consume(*args, **options) as consumer:
            yield ConsumerWithHook(consumer, act_before_snapshot_end)

    monkeypatch.setattr(builder_module, "consume", consume_with_hook)
    async with a_server(partitions=1) as server, connect(server.url(BUCKET)) as client:
        for index in range(COUNT):
            await client.set(f"k{index}", json.dumps(index))
        builder, file = set_up(stream, tmp_path, server.url(BUCKET))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(builder.run)
            await eventually(lambda: file.mark(PARTITION).seq == COUNT, "it was read")
            mark = file.mark(PARTITION)
            # The partition joins, provisionally: the running stream is behind this one.
            stream.position = at(mark.position.log, COUNT // 2)
            stream.put(stream.position)
            await eventually(lambda: not builder.seqs_behind(), "the partition has joined")
            actions.append(lambda: stream.put(at(ANOTHER, COUNT // 2)))
            await client.set("k0", json.dumps("again"))
            await eventually(lambda: not actions, "the history has changed")
            stream.position = at(mark.position.log, COUNT + 1)
            await eventually(lambda: file.is_built, "it was built")
        with file.open_view() as view:
            result = view.scan(EntrySelection(), COUNT + 1)
        assert result.entries == [b"k%d" % index for index in range(COUNT)]
        file.close()


def at(log: FailoverLog, seq: int) -> Mark:
    """The mark after a complete snapshot that ends at `seq`."""
    return Mark(Position(log, SeqNo(seq), SeqNo(seq), None))


async def test_a_new_index_is_completed_under_a_load_that_never_ends(tmp_path: Path) -> None:
    """The running indexes' stream pauses until the new index has caught up."""
    stream = AlwaysAheadStream()
    async with a_server(partitions=1) as server, connect(server.url(BUCKET)) as client:
        for index in range(COUNT):
            await client.set(f"k{index}", json.dumps(index))
        builder, file = set_up(stream, tmp_path, server.url(BUCKET))
        stream.file = file
        with trio.fail_after(20):
            await builder.run()
        assert file.is_built
        assert file.entry_count() == COUNT
        assert not stream.is_paused
        file.close()


class OnlyPartsConsumer:
    """A consumer that receives a part of a snapshot of each partition, and never the end of a
    snapshot."""

    def __init__(self, nbytes: int) -> None:
        self.resume_state = ResumeState(BUCKET)
        self.position = self.resume_state.position
        self._parts = [part_of_snapshot(PartitionId(n), nbytes) for n in range(PARTS)]

    def __aiter__(self) -> OnlyPartsConsumer:
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
    """The rest of each snapshot waits for memory. Only applying the parts releases some."""

    @asynccontextmanager
    async def consume_parts(*_args: Any, **_options: Any) -> AsyncIterator[OnlyPartsConsumer]:
        await trio.lowlevel.checkpoint()
        yield OnlyPartsConsumer(POOL_BYTES // 17)

    monkeypatch.setattr(builder_module, "consume", consume_parts)
    builder, file = set_up(FakeRunningStream(), tmp_path, "upr://127.0.0.1:1/b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(builder.run)
        # Half of the parts fit into the pool; the next one starts after those are applied.
        await eventually(lambda: file.entry_count() > PARTS // 2, "the parts are applied")
        nursery.cancel_scope.cancel()
    file.close()


class ConsumerAtZero:
    """A consumer whose position is 0 in every partition."""

    def __init__(self) -> None:
        self.resume_state = ResumeState(BUCKET)
        self.position = self.resume_state.position


async def test_a_rollback_in_the_middle_of_a_snapshot_drops_the_received_part(
    tmp_path: Path,
) -> None:
    builder, file = set_up(FakeRunningStream(), tmp_path, "upr://127.0.0.1:1/b")
    consumer = cast("Consumer", ConsumerAtZero())
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
    """The builder cannot undo changes, because it has no received keys. So the partition is built
    again from 0."""
    stream, store = FakeRunningStream(), HeldStore()
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
                # The mark is written after the entries: a reader may see the entries before it.
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
    """The indexer stops between the commits of the two indexes, and then there is a failover. The
    stream continues from the position of the index that is behind. To the server nothing after
    that position was lost, so it does not tell the other index to roll back."""
    stream, store = FakeRunningStream(), HeldStore()
    files = [IndexFile(tmp_path / name, BUCKET) for name in ("ahead", "behind")]
    store.released.set()

    async def build(until: Callable[[], bool], *members: IndexFile) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(builder_of(*members, stream=stream, url=server.url(BUCKET)).run)
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
    """The rounds of the running indexes write the received keys, which list what a failover undoes.
    So the index must not be complete on disk before that: after a crash, it could not undo."""
    stream = FakeRunningStream()
    async with a_server(partitions=1) as server, connect(server.url(BUCKET)) as client:
        await client.set("k", "0")
        pool = MemoryPool(POOL_BYTES)
        running = Pipeline(pool, worker_thread())
        file = IndexFile(tmp_path, BUCKET)
        builder = builder_of(file, stream=stream, url=server.url(BUCKET), running=running)
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
    """While the index was being built, the bucket was deleted and created again with fewer
    partitions."""
    stream, file, removed = FakeRunningStream(), IndexFile(tmp_path, BUCKET), PartitionId(1)
    row = Mutation(Operation.SET, b"k", b"0", SeqNo(1), Cas(1))
    batch = IndexBatch(removed, at(ANOTHER, 1), [Chunk.build([row])])
    file.apply_changes(RoundChanges([batch]), ByKey())
    builder = builder_of(file, stream=stream, url="upr://127.0.0.1:1/b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(builder.run)
        await eventually(lambda: file.mark(removed) == NO_MARK, "it was cleared")
        nursery.cancel_scope.cancel()
    assert not keys_of(file)
    file.close()


class RecordingFile:
    """An empty index that records the partitions for which it is asked."""

    failure = ""

    def __init__(self, asked: list[PartitionId]) -> None:
        self.marks: dict[PartitionId, Mark] = {}
        self._asked = asked

    def mark(self, partition: PartitionId) -> Mark:
        self._asked.append(partition)
        return NO_MARK


def test_the_builder_asks_one_index_for_the_partitions_that_may_not_join_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it asked all 64 indexes of a design, that took 6 ms of the event loop for 1,024
    partitions, fifty times a second."""
    asked: list[PartitionId] = []
    pool = MemoryPool(POOL_BYTES)
    members = [PipelineMember(cast("IndexFile", RecordingFile(asked)), ByKey()) for _ in range(64)]
    partitions = [PartitionId(number) for number in range(100)]
    stream = FakeRunningStream()
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
