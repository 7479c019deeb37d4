"""Streams whose start is no longer in memory: they read from disk first and then from memory, lack
nothing, and get nothing twice. With simulated disks and a mock clock."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

from tests.server.modelled_partition import (
    INDEXED_S,
    NOW,
    HeldReads,
    Model,
    a_partition,
    items,
)
from tests.server.served_bucket import BUCKET, serving
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import Status
from upr_protocol.ids import SEQ_MAX, Operation, SeqNo, SnapshotKind
from upr_server.engine import (
    CursorItem,
    SnapshotEndItem,
    SnapshotStartItem,
    batch_of,
)
from upr_server.storage import bucket_maintenance
from upr_server.storage.calls import Commit, FindFirstSnapshotEnd, ReadChunks, StoreCall
from upr_server.storage.online import backfill, partition_reader
from upr_server.storage.online.backfill import (
    BUDGET_SHARE,
    READ_BYTES_MIN,
    WAIT_FOR_DISK,
    ReaderWait,
    StreamBrokenError,
)
from upr_server.storage.online.flusher import STEP_PARTITIONS
from upr_server.storage.online.leases import BACKFILL_LEASE_S
from upr_server.storage.online.partition_reader import PartitionReader
from upr_server.storage.processes import open_store
from upr_server.storage.simulated import SimulatedStore

Answer = TypeVar("Answer")


class Reader:
    """Reads the partition as a stream does, and compares its copy with the model at each snapshot's
    end.

    Attributes:
        model: The model.
        reader: The partition reader under test.
        kinds: For each snapshot, whether it came from disk or from memory.
        ends: The ends of the snapshots that were read completely.
        stream_end: The sequence number at which the stream ends.
    """

    def __init__(
        self, model: Model, start: int = 0, stream_end: int = SEQ_MAX, end_at_least: int = 0
    ) -> None:
        self.model = model
        self.stream_end = stream_end
        self._contents = model.contents(start)
        self._position = start
        self._end = start
        self._ready = trio.Event()
        self.kinds: list[SnapshotKind] = []
        self.ends: list[int] = []
        self.reader = PartitionReader(
            model.disk,
            model.partition,
            "test",
            SeqNo(start),
            end_at_least=SeqNo(end_at_least),
            stream_end=SeqNo(stream_end),
            on_ready=self._note_ready,
            on_disk=self._note_ready,
        )

    def _note_ready(self) -> None:
        self._ready.set()

    def step(self) -> CursorItem | ReaderWait | None:
        """Reads the next item, if there is one now."""
        self._ready = trio.Event()
        return self._take(self.reader.next())

    def step_whole(self) -> bool:
        """Reads the next snapshot as a whole, if the reader has one; returns whether it did."""
        start = self._position
        chunk = self.reader.next_whole_snapshot()
        if chunk is None:
            return False
        self._take(SnapshotStartItem(SeqNo(start), chunk.end))
        self._take(chunk)
        self._take(SnapshotEndItem(chunk.end))
        return True

    def _take(self, item: CursorItem | ReaderWait | None) -> CursorItem | ReaderWait | None:
        if isinstance(item, SnapshotStartItem):
            assert item.start == self._position
            assert item.end >= self._end
            self.kinds.append(item.kind)
            self._end = item.end
        elif isinstance(item, Chunk):
            assert item.start == self._position, "a chunk is missing, or comes twice"
            seqs = list(item.seqs)
            assert seqs == sorted(set(seqs))
            assert all(self._position < seq <= item.end for seq in seqs)
            for row in item:
                if row.op is Operation.SET:
                    self._contents[row.key] = row.value
                else:
                    self._contents.pop(row.key, None)
            self._position = item.end
        elif isinstance(item, SnapshotEndItem):
            assert item.end == self._position == self._end
            self.ends.append(item.end)
            assert self._contents == self.model.contents(item.end)
        return item

    async def read(self, items: int = 0) -> None:
        """Reads so many items; or everything up to the newest change or the stream's end, in whole
        snapshots where it can."""
        is_all = not items
        while (is_all or items) and not self._has_read_all():
            if is_all and self.step_whole():
                continue
            if self.step() in (None, WAIT_FOR_DISK):
                await self._ready.wait()
            self.reader.note_sent()
            items -= 1

    def _has_read_all(self) -> bool:
        end = min(self.model.partition.high_seq, self.stream_end)
        return self._position >= end and not self.reader.is_reading

    def close(self) -> None:
        self.reader.close()


async def test_a_stream_reads_from_disk_first_and_then_from_memory(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with a_partition() as (_, model):
        for turn in range(6):
            model.write(*items(turn * 50, 50))
            await model.persist()
        model.forget()
        assert model.partition.snapshots.oldest_start == 300
        reader = Reader(model)
        await reader.read()
        assert (reader.kinds, reader.ends) == ([SnapshotKind.DISK], [300])
        assert reader.step() is None
        model.write(*items(300, 7))
        await reader.read()
        assert reader.kinds[1:] == [SnapshotKind.MEMORY]
        assert reader.ends == [300, 307]
        assert model.disk.backfills == 1
        # A consumer that has a part of the snapshot receives the rest.
        for start in 0, 1, 50, 75, 299, 300, 307:
            other_reader = Reader(model, start)
            await other_reader.read()
            assert (SnapshotKind.DISK in other_reader.kinds) == (start < 300)
            other_reader.close()
        assert model.disk.memory.backfills == 0
        assert model.disk.leases.held_ranges() == []


async def test_a_stream_with_an_end_reads_up_to_the_next_snapshot_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It needs no cursor in memory, for which the server would have to keep snapshots."""
    async with a_partition() as (_, model):
        for turn in range(6):
            model.write(*items(turn * 50, 50))
            await model.persist()
        model.forget()
        cursor_count = model.partition.manager.cursor_count
        for start, stream_end, end in (0, 1, 50), (0, 50, 50), (20, 51, 100), (120, 250, 250):
            reader = Reader(model, start, stream_end)
            await reader.read()
            assert (reader.kinds, reader.ends) == ([SnapshotKind.DISK], [end])
            assert model.partition.manager.cursor_count == cursor_count
            reader.close()
        # Changes that are not on disk yet are read from memory after the backfill.
        model.write(*items(300, 10))
        reader = Reader(model, 250, 301)
        await reader.read()
        assert (reader.kinds, reader.ends) == ([SnapshotKind.DISK, SnapshotKind.MEMORY], [300, 310])
        reader.close()


@pytest.mark.parametrize("is_in_memory", [False, True])
async def test_a_stream_whose_end_lies_in_an_interrupted_snapshot_ends_with_that_snapshot(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    """The disk has shorter snapshots, but at their ends the consumer may lack older values."""
    monkeypatch.setattr(partition_reader, "EXCESS_MUTATIONS_MAX", 0)
    async with a_partition() as (_, model):
        for turn in range(6):
            model.write(*items(turn * 50, 50))
            await model.persist()
        if not is_in_memory:
            model.forget()
        # The consumer was interrupted at 20, in a snapshot up to 150.
        reader = Reader(model, 20, stream_end=60, end_at_least=150)
        await reader.read()
        assert reader.ends == [150]
        assert reader.kinds == [SnapshotKind.MEMORY if is_in_memory else SnapshotKind.DISK]
        reader.close()


async def test_a_stream_with_an_end_is_read_from_disk_where_memory_has_collapsed_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_reader, "EXCESS_MUTATIONS_MAX", 10)
    async with a_partition() as (_, model):
        for turn in range(12):
            model.write(*items(turn * 10, 10))
            await model.persist()
        while model.partition.manager.collapse_step(1000):
            pass
        collapsed_end = model.partition.snapshots.entry_at(SeqNo(0)).end
        assert collapsed_end >= 80
        for stream_end, kind, end in (
            (5, SnapshotKind.DISK, 10),
            (11, SnapshotKind.DISK, 20),
            (collapsed_end - 10, SnapshotKind.MEMORY, collapsed_end),
        ):
            reader = Reader(model, 0, stream_end)
            await reader.read()
            assert (reader.kinds, reader.ends) == ([kind], [end])
            reader.close()


async def test_a_backfill_with_an_end_is_safe_from_a_compaction_before_it_begins(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it asks the disk for its end, everything up to there becomes garbage."""
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    store = HeldReads(FindFirstSnapshotEnd)
    async with a_partition(store) as (_, model):
        model.write(*items(0, 60))
        await model.persist()
        model.forget()
        store.released = trio.Event()
        reader = Reader(model, stream_end=30)
        assert reader.step() is WAIT_FOR_DISK
        await trio.testing.wait_all_tasks_blocked()
        for turn in range(1, 9):
            model.write(*items(turn * 60, 60))
            await model.persist()
            await trio.sleep(INDEXED_S)
        store.released.set()
        await reader.read()
        assert reader.ends == [60]
        reader.close()
        await trio.sleep(INDEXED_S)
        assert int(str(model.disk.maintenance.statistics()["compactions"])) > 0
        # The compaction has now removed the earlier states.
        again = Reader(model, stream_end=30)
        await again.read()
        assert again.ends[0] >= 60
        again.close()


class NotedCommits(SimulatedStore):
    """A store that says when it has carried out a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.carried_out = Notifier()

    async def execute(self, call: StoreCall[Answer]) -> Answer:
        answer = await super().execute(call)
        if isinstance(call, Commit):
            self.carried_out.notify()
        return answer


async def test_a_backfill_includes_a_commit_for_which_compaction_has_deleted_changes(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has a commit, and has compacted what it supersedes, before the server has recorded
    the commit in each of its many partitions."""
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    store = NotedCommits()
    async with serving(store, 64 * STEP_PARTITIONS) as server:
        bucket = server.catalog.bucket(BUCKET)
        model = Model(server.catalog.disks[bucket], bucket.partitions[0])
        model.write(*items(0, 60))
        await model.persist()
        model.forget()
        carried_out = store.carried_out.next_event()
        model.write(*items(60, 60))
        # The commit is recorded in its last partition first.
        for partition in bucket.partitions[1:]:
            rows = [Mutation(Operation.SET, b"key", b"value")]
            partition.mutate(batch_of(Chunk.build(rows, SeqNo(0), SeqNo(0))), now=NOW)
        await carried_out.wait()
        maintenance = model.disk.maintenance
        async with maintenance.paused():
            maintenance._waiters += 1
            while not maintenance.statistics().get("compactions"):
                await maintenance._step()
            maintenance._waiters -= 1
        reader = Reader(model)
        await reader.read()
        assert reader.ends[-1] == 120
        reader.close()


async def test_slots_of_shared_memory_are_free_after_a_backfill(tmp_path: Path) -> None:
    """With real disks: chunks use slots only until they are sent."""
    async with open_store(tmp_path, bytes_max=1 << 30) as store, a_partition(store) as (_, model):
        slots = store._reader.slots
        if slots is None:
            pytest.skip("this system has no anonymous memory that processes can share")

        free = len(slots)
        for turn in range(6):
            model.write(*items(turn * 20, 20, size=50_000))
            await model.persist()
        model.forget()
        reader = Reader(model)
        await reader.read(items=2)
        assert len(slots) < free
        await reader.read()
        assert (reader.kinds, reader.ends) == ([SnapshotKind.DISK], [120])
        assert len(slots) == free
        # A reader that is closed while much is read ahead.
        other_reader = Reader(model)
        await other_reader.read(items=2)
        assert len(slots) < free
        other_reader.close()
        # When this read has returned, all earlier reads have, too.
        await Reader(model).read()
        assert len(slots) == free


async def test_a_cursor_that_is_dropped_during_a_backfill_causes_another_backfill(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldReads(ReadChunks)
    async with a_partition(store) as (_, model):
        model.write(*items(0, 50))
        await model.persist()
        model.forget()
        store.released = trio.Event()
        reader = Reader(model)
        start = reader.step()
        assert start is WAIT_FOR_DISK
        await trio.testing.wait_all_tasks_blocked()
        # Its cursor in memory is at 50, so memory cannot be freed beyond that.
        model.write(*items(50, 50))
        await model.persist()
        model.write(*items(100, 50))
        await model.persist()
        assert model.forget() == 1
        store.released.set()
        await reader.read()
        assert reader.kinds == [SnapshotKind.DISK, SnapshotKind.DISK]
        assert reader.ends == [50, 150]
        assert model.disk.backfills == 2


async def test_a_cursor_dropped_inside_a_snapshot_finishes_it_from_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with a_partition() as (_, model):
        reader = Reader(model)
        model.write(*items(0, 50))
        assert isinstance(reader.step(), SnapshotStartItem)
        for turn in range(1, 4):
            model.write(*items(turn * 50, 50))
            await model.persist()
        assert model.forget() == 1
        model.write(*items(200, 1))
        await reader.read()
        assert reader.kinds[:2] == [SnapshotKind.MEMORY, SnapshotKind.DISK]
        assert reader.ends == [200, 201]


async def test_a_dropped_cursor_waits_until_the_disk_has_its_announced_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The stream has announced a snapshot (0, 3], of which the disk has only (0, 1]. If it ended at
    1, the consumer would count as consistent there, but it may lack older values of keys whose
    newer values it has."""
    store = HeldReads(Commit)
    async with a_partition(store) as (_, model):
        model.write(*items(0, 1))
        await model.persist()
        await trio.sleep(INDEXED_S)
        store.released = trio.Event()
        model.write(*items(1, 2))
        reader = Reader(model, end_at_least=3)
        start = reader.step()
        assert isinstance(start, SnapshotStartItem)
        assert start.end == 3
        # The commit of the rest is running. Maintenance does not wait for it yet: that would delay
        # every backfill.
        await trio.sleep(0.15)
        assert model.forget() == 1
        assert reader.step() is WAIT_FOR_DISK
        await trio.sleep(0.01)
        assert reader.step() is WAIT_FOR_DISK
        store.released.set()
        await reader.read()
        assert reader.ends == [3]
        reader.close()


def read_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes backfills read ahead 100,000 bytes, 20,000 at a time."""
    monkeypatch.setattr(backfill, "QUEUE_BYTES", 100_000)
    monkeypatch.setattr(backfill, "READ_BYTES", 20_000)


async def persist_1_2_mb(model: Model) -> None:
    """Writes 120 values of 10,000 bytes, and waits until they are on disk only."""
    for turn in range(60):
        model.write(*((b"%d-%d" % (turn, n), bytes(10_000)) for n in range(2)))
        await model.persist()
    model.forget()


async def test_a_backfill_whose_reader_stalls_reads_ahead_up_to_its_own_limit(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies even if the common budget of all backfills has room."""
    read_little_at_a_time(monkeypatch)
    async with a_partition() as (server, model):
        await persist_1_2_mb(model)
        budget = int(server.catalog.bucket(BUCKET).memory_policy.limit_bytes * BUDGET_SHARE)
        assert budget > 300_000, "otherwise the limit is never reached"
        reader = Reader(model)
        assert reader.step() is WAIT_FOR_DISK
        await trio.sleep(10)
        assert 100_000 <= model.disk.memory.backfills < 150_000
        reader.close()


async def test_a_backfill_that_takes_an_hour_ends_its_stream(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow consumer could keep a range from compaction for any length of time."""
    read_little_at_a_time(monkeypatch)
    async with a_partition() as (_, model):
        await persist_1_2_mb(model)
        reader = Reader(model)
        assert reader.step() is WAIT_FOR_DISK
        await trio.sleep(BACKFILL_LEASE_S - 1)
        assert model.disk.leases.held_ranges() == [(0, 0, 120)]
        await trio.sleep(2)
        assert model.disk.leases.held_ranges() == []
        with pytest.raises(StreamBrokenError) as broken:
            await reader.read()
        assert broken.value.status is Status.TOO_SLOW
        reader.close()


@pytest.mark.parametrize(("purge_seq", "is_refused"), [(10, False), (11, True)])
async def test_a_backfill_that_a_purge_overtakes_ends_with_a_rollback(
    autojump_clock: trio.testing.MockClock, purge_seq: int, is_refused: bool
) -> None:
    """Otherwise the consumer would lack deletions above its position, without notice."""
    store = HeldReads(FindFirstSnapshotEnd)
    async with a_partition(store) as (_, model):
        model.write(*items(0, 60))
        await model.persist()
        model.forget()
        store.released = trio.Event()
        reader = Reader(model, start=10, stream_end=30)
        assert reader.step() is WAIT_FOR_DISK
        await trio.testing.wait_all_tasks_blocked()
        model.partition.purge_seq = SeqNo(purge_seq)
        store.released.set()
        if is_refused:
            with pytest.raises(StreamBrokenError) as broken:
                await reader.read()
            assert broken.value.status is Status.ROLLBACK_NEEDED
        else:
            await reader.read()
            assert reader.ends == [60]
        reader.close()


@pytest.mark.parametrize("is_more", [False, True])
async def test_a_cursor_dropped_before_a_snapshots_end_item_still_gets_it(
    autojump_clock: trio.testing.MockClock, is_more: bool
) -> None:
    """There may be no later change that would bring the end."""
    async with a_partition() as (_, model):
        reader = Reader(model)
        model.write(*items(0, 50))
        assert isinstance(reader.step(), SnapshotStartItem)
        assert isinstance(reader.step(), Chunk)
        if is_more:
            model.write(*items(50, 50))
        await model.persist()
        assert model.forget() == 1
        assert isinstance(reader.step(), SnapshotEndItem)
        await reader.read()
        assert reader.ends == ([50, 100] if is_more else [50])
        assert model.disk.backfills == is_more
        model.write(*items(100 if is_more else 50, 5))
        await reader.read()
        assert reader.kinds[-1] == SnapshotKind.MEMORY


async def test_a_backfills_end_is_fixed_and_compaction_leaves_it_complete(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile every key is overwritten again and again, so that nearly everything is garbage."""
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    store = HeldReads(ReadChunks)
    async with a_partition(store) as (_, model):
        model.write(*items(0, 60))
        await model.persist()
        model.forget()
        store.released = trio.Event()
        reader = Reader(model)
        assert reader.step() is WAIT_FOR_DISK
        await trio.testing.wait_all_tasks_blocked()
        assert model.disk.leases.held_ranges() == [(0, 0, 60)]
        for turn in range(1, 9):
            model.write(*items(turn * 60, 60))
            await model.persist()
            await trio.sleep(INDEXED_S)
            model.forget()
        assert int(str(model.disk.maintenance.statistics()["compactions"])) > 0
        assert model.disk.leases.held_ranges() == [(0, 0, 60)]
        store.released.set()
        await reader.read()
        assert reader.ends == [60, 540]
        assert model.disk.leases.held_ranges() == []
        # The backfill is over, so superseded changes are removed.
        before = int(str(model.disk.maintenance.statistics()["chunk_bytes"]))
        for turn in range(9, 12):
            model.write(*items(turn * 60, 60))
            await model.persist()
            await trio.sleep(INDEXED_S)
        assert int(str(model.disk.maintenance.statistics()["chunk_bytes"])) < before
        reader.close()


async def test_backfills_of_stalled_readers_stay_within_their_budget(
    autojump_clock: trio.testing.MockClock,
) -> None:
    many = 30
    async with a_partition() as (server, model):
        memory = model.disk.memory
        for turn in range(60):
            model.write(*((b"%d-%d" % (turn, n), bytes(10_000)) for n in range(20)))
            await model.persist()
        model.forget()
        total = 60 * 20 * 10_000
        budget = int(server.catalog.bucket(BUCKET).memory_policy.limit_bytes * BUDGET_SHARE)
        assert budget + many * READ_BYTES_MIN < many * total / 10, (
            "otherwise the limit is never reached"
        )
        readers = [Reader(model) for _ in range(many)]
        for reader in readers:
            assert reader.step() is WAIT_FOR_DISK
        most = 0
        for _ in range(200):
            await trio.sleep(0.001)
            most = max(most, memory.backfills)
        # Each backfill may read one piece beyond the budget, and a piece ends with a chunk.
        assert budget / 2 < most <= budget + many * (READ_BYTES_MIN + 256 * 1024)

        async def read(reader: Reader) -> None:
            nonlocal most
            while reader.ends != [1200]:
                await reader.read(1)
                most = max(most, memory.backfills)
            reader.close()

        async with trio.open_nursery() as nursery:
            for reader in readers[: many // 2]:
                nursery.start_soon(read, reader)
        assert most <= budget + many * (READ_BYTES_MIN + 256 * 1024)
        # Closed readers release their part of the budget.
        for reader in readers[many // 2 :]:
            reader.close()
        await trio.testing.wait_all_tasks_blocked()
        assert memory.backfills == 0
        assert model.disk.leases.held_ranges() == []
        assert model.partition.manager.cursor_count == 1


async def test_a_backfill_whose_reader_stalls_leaves_memory_for_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    reads: list[int] = []

    def delay(call: StoreCall[Any]) -> float:
        if isinstance(call, ReadChunks):
            reads.append(call.bytes_max)
        return 0.0

    async with a_partition(SimulatedStore(delay=delay)) as (server, model):
        for turn in range(100):
            model.write(*((b"%d-%d" % (turn, n), bytes(10_000)) for n in range(20)))
            await model.persist()
        model.forget()
        budget = int(server.catalog.bucket(BUCKET).memory_policy.limit_bytes * BUDGET_SHARE)
        assert budget < 100 * 20 * 10_000 / 2, "otherwise the limit is never reached"
        idle, other_reader = Reader(model), Reader(model)
        assert idle.step() is WAIT_FOR_DISK
        await trio.sleep(1)
        largest = max(reads)
        reads.clear()
        while other_reader.ends != [2000]:
            await other_reader.read(1)
        assert min(reads[:-1]) >= largest / 4
        idle.close()
        other_reader.close()


async def read_or_start_again(readers: list[Reader], index: int, items: int = 0) -> None:
    """Reads so many items, or everything. A reader that would lack deletions is refused; then
    another one replaces it, and starts at 0."""
    reader = readers[index]
    try:
        await reader.read(items)
    except StreamBrokenError as error:
        status = error.status
    else:
        return
    assert status is Status.ROLLBACK_NEEDED
    assert 0 < reader.reader.seq < reader.model.partition.purge_seq
    reader.close()
    readers[index] = Reader(reader.model)
    if not items:
        await readers[index].read()


@pytest.mark.parametrize("seed", range(60))
async def test_readers_agree_with_the_model_whatever_happens(
    autojump_clock: trio.testing.MockClock, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Random(seed)
    if seed % 2:
        monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
        monkeypatch.setattr(bucket_maintenance, "GARBAGE_SHARE", 0.05)
    if seed % 3:
        monkeypatch.setattr(partition_reader, "EXCESS_MUTATIONS_MAX", 0)
    store = SimulatedStore(delay=lambda _call: draw.random() / 50)
    async with a_partition(store) as (_, model):
        partition = model.partition
        # All deletions are old enough to be purged, or none is.
        model.disk.maintenance._purge_age_s = 0.0 if seed % 4 else math.inf
        readers = [Reader(model) for _ in range(3)]
        drop_count = 0

        for _ in range(120):
            choice = draw.random()
            if choice < 0.25:
                count = draw.randrange(1, 60)
                model.write(*items(partition.high_seq, count, draw.choice((1, 200))))
            elif choice < 0.3:
                model.delete(*{b"key %d" % draw.randrange(40): None for _ in range(8)})
            elif choice < 0.45:
                await model.persist()
            elif choice < 0.6:
                drop_count += model.forget()
            elif choice < 0.65:
                index = draw.randrange(len(readers))
                readers[index].close()
                ends = [end for end in readers[index].ends if end >= partition.purge_seq] or [0]
                start, high = draw.choice(ends), int(partition.high_seq)
                stream_end = draw.choice((SEQ_MAX, draw.randint(start, max(start, high))))
                readers[index] = Reader(model, start, stream_end)
            elif choice < 0.75:
                await trio.sleep(draw.random())
            else:
                with trio.move_on_after(draw.random() / 20):
                    index = draw.randrange(len(readers))
                    await read_or_start_again(readers, index, draw.randrange(1, 12))
        for index in range(len(readers)):
            await read_or_start_again(readers, index)
            reader = readers[index]
            assert not reader.ends or reader.ends[-1] >= min(partition.high_seq, reader.stream_end)
            reader.close()
        fresh = Reader(model)
        await fresh.read()
        fresh.close()
        assert model.disk.backfills > 0
        assert drop_count > 0
