"""The store, as the server uses it: over processes and LMDB, and simulated, alike."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

import lmdb
import pytest
import trio
import trio.testing

from tests.kit.answer_rows import pack_rows
from tests.kit.process import ROOT, children_of, environment, eventually, status_of
from tests.storage.log_model import Model, apply, chunk_of, record_of, row
from upr_protocol.chunk import LARGE_BYTES, Chunk, Mutation
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine import FetchRequest
from upr_server.storage import processes
from upr_server.storage.api import Store
from upr_server.storage.bucket_maintenance import MaintenanceStep
from upr_server.storage.calls import (
    CloseBucket,
    Commit,
    CreateBucketFiles,
    DeleteAnswers,
    DeleteBucketFiles,
    DeleteLeases,
    FindExpired,
    FindItems,
    FindSeqBefore,
    ItemsFound,
    LoadBuckets,
    Maintain,
    MarkCleanStop,
    PutLease,
    ReadChunks,
    StartServing,
    StoreCall,
)
from upr_server.storage.chunk_log import COMMIT_RESERVE_BYTES
from upr_server.storage.directory import (
    FORMAT_TEXT,
    DataDirectory,
    lock,
    lock_for_reading,
    lock_for_writing,
    prepare,
)
from upr_server.storage.errors import (
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StoreFailedError,
)
from upr_server.storage.lmdb_ordered_map import MAP_BYTES_DEFAULT, LmdbOrderedMap
from upr_server.storage.messages import HEAD, STEP_CHUNKS, STEP_ITEMS, Unpacker, pack_message
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.processes import (
    READS_SENT_MAX,
    SEND_BYTES,
    SEND_PARTS,
    SLOT_READ_BYTES_MIN,
    ProcessStore,
    open_store,
    send_in_steps,
)
from upr_server.storage.records import BucketRecord, LeaseRecord
from upr_server.storage.shared_slots import SLOT_BYTES, SLOTS, SlotPool, make_shared_memory
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore
from upr_server.storage.storage_server import StorageServer
from upr_server.storage.stored_bucket import StoredAnswer

PARTITIONS: Final = 4
BUCKET: Final = BucketRecord("planes", PARTITIONS, 1 << 20)
MAP_BYTES: Final = 1 << 30
PLENTY: Final = 1 << 24

Opener = Callable[[], AbstractAsyncContextManager[Store]]
"""Opens the same disk again each time."""


@pytest.fixture(params=["processes", "simulated"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    directory = SimulatedDirectory()

    @asynccontextmanager
    async def processes() -> AsyncIterator[Store]:
        async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
            yield store

    @asynccontextmanager
    async def simulated() -> AsyncIterator[Store]:
        random = Random(3)
        yield SimulatedStore(directory, lambda _call: random.random() / 1_000)

    return processes if request.param == "processes" else simulated


async def create(store: Store) -> None:
    await store.ask(CreateBucketFiles(BUCKET, [record_of(0)] * PARTITIONS))


def some_write(partition: int, high: int, count: int = 3, expiry: int = 0) -> PartitionWrite:
    rows = [
        row(Operation.SET, b"key %d" % seq, seq, seq, expiry)
        for seq in range(high + 1, high + count + 1)
    ]
    chunk = chunk_of(rows, high, high + count)
    return PartitionWrite(partition, record_of(high + count), [chunk])


def one_row(seq: int) -> Chunk:
    return chunk_of([row(Operation.SET, b"k", seq, seq)], seq - 1, seq)


async def read_all(store: Store, partition: int, through: int) -> list[Mutation]:
    rows: list[Mutation] = []
    after = SeqNo(0)
    while after < through:
        chunks = await store.ask(ReadChunks(BUCKET.name, partition, after, SeqNo(through), 200))
        assert chunks[0].start == after
        after = chunks[-1].end
        for chunk in chunks:
            rows += chunk
    return rows


async def upkeep(store: Store) -> tuple[MaintenanceStep, dict[str, Any]]:
    return await store.ask(Maintain(BUCKET.name, urgent=True, leases=(), purge_before_cas=0))


async def upkeep_all(store: Store) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    more = True
    while more:
        steps, figures = await upkeep(store)
        more = steps.has_more
    return figures


# What a bucket goes through.


async def test_a_bucket_is_found_again_as_it_was_left(opener: Opener) -> None:
    lease = LeaseRecord(9, "someone", ((0, 0, 3),), 60, 1_234.5)
    token = StoredAnswer(b"sixteen bytes id", 4, b"answer")
    async with opener() as store:
        assert (await store.ask(LoadBuckets())).buckets == []
        await create(store)
        await store.ask(StartServing(BUCKET.name, [(1, record_of(0))]))
        write = some_write(0, 0)
        rows = [(token.writer, counter, token.answer) for counter in (3, token.counter, 5)]
        answers = pack_rows(rows)
        write = PartitionWrite(0, write.record, write.chunks, [answers])
        await store.ask(Commit(BUCKET.name, [write, some_write(2, 0, 5)]))
        surplus_tokens = [StoredAnswer(token.writer, counter, b"") for counter in (3, 5, 6)]
        await store.ask(DeleteAnswers(BUCKET.name, 0, surplus_tokens))
        await store.ask(PutLease(BUCKET.name, lease))
        await store.ask(PutLease(BUCKET.name, LeaseRecord(10, "another", (), 60, 1.0)))
        await store.ask(DeleteLeases(BUCKET.name, [10, 11]))
        await store.ask(MarkCleanStop(BUCKET.name))
    async with opener() as store:
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert (stored_bucket.record, stored_bucket.is_clean, list(stored_bucket.leases)) == (
            BUCKET,
            True,
            [lease],
        )
        assert [partition.record.high for partition in stored_bucket.partitions] == [3, 0, 5, 0]
        assert list(stored_bucket.partitions[0].tokens) == [token]
        assert await read_all(store, 0, 3) == list(write.chunks[0])
        await store.ask(StartServing(BUCKET.name, []))
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert not stored_bucket.is_clean
        assert not store.failed.is_set()


async def test_a_folder_with_another_name_is_not_taken_for_the_bucket_that_it_was(
    tmp_path: Path,
) -> None:
    # The server would read one folder, and write to the other.
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
    buckets = tmp_path / "buckets"
    (buckets / BUCKET.name).rename(buckets / "renamed")
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        loaded = await store.ask(LoadBuckets())
    assert loaded.buckets == []
    assert loaded.damaged_buckets == {"renamed": f"its record is that of the bucket {BUCKET.name}"}


async def test_committed_items_are_read_looked_up_and_expire(opener: Opener) -> None:
    async with opener() as store:
        await create(store)
        write = some_write(1, 0, 10, expiry=50)
        await store.ask(Commit(BUCKET.name, [write]))
        rows = await read_all(store, 1, 10)
        assert rows == list(write.chunks[0])
        requests = [FetchRequest(row.key, row.seq, needs_value=True) for row in rows]
        assert (await store.ask(FindItems(BUCKET.name, 1, requests))).all_rows() == rows
        by_key = [FetchRequest(row.key, 0, needs_value=True) for row in rows]
        assert (await store.ask(FindItems(BUCKET.name, 1, by_key))).all_rows() == [None] * 10
        figures = await upkeep_all(store)
        assert (await store.ask(FindItems(BUCKET.name, 1, by_key))).all_rows() == rows
        assert await store.ask(FindExpired(BUCKET.name, 49, b"", 100)) == ([], b"")
        items, after = await store.ask(FindExpired(BUCKET.name, 50, b"", 4))
        assert [item.seq for item in items] == [1, 2, 3, 4]
        items, after = await store.ask(FindExpired(BUCKET.name, 50, after, 100))
        assert ([item.seq for item in items], after) == ([5, 6, 7, 8, 9, 10], b"")
        assert figures["commits"] == 1


def mapped_files(part: str) -> list[str]:
    """What the processes of the store have mapped, where the path has `part` in it."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in children_of(os.getpid())]
    return [line for text in maps for line in text.splitlines() if part in line]


async def test_a_deleted_bucket_can_be_created_again(opener: Opener) -> None:
    async with opener() as store:
        await create(store)
        await store.ask(Commit(BUCKET.name, [some_write(0, 0)]))
        assert len(await read_all(store, 0, 3)) == 3

        # Somebody still reads while it is deleted.
        async def read() -> None:
            for _ in range(200):
                try:
                    await read_all(store, 0, 3)
                except (StorageError, KeyError):
                    return  # there is no such bucket any more, or no such file

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
            await store.ask(DeleteBucketFiles(BUCKET.name))
        assert (await store.ask(LoadBuckets())).buckets == []
        # Nobody has a file of it open: otherwise the disk would not get its space back.
        assert mapped_files("/buckets/") == []
        await create(store)
        write = some_write(0, 0, 5)
        await store.ask(Commit(BUCKET.name, [write]))
        assert await read_all(store, 0, 5) == list(write.chunks[0])
        assert not store.failed.is_set()


async def test_an_answer_may_have_any_number_of_chunks(opener: Opener) -> None:
    count = 70_000
    small = [one_row(seq) for seq in range(1, count)]
    async with opener() as store:
        await create(store)
        await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(count - 1), small)]))
        chunks = await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(count - 1), PLENTY))
        assert (len(chunks), chunks[-1].end) == (count - 1, count - 1)


# Many callers.


async def test_many_callers_at_once_each_get_their_own_answer(opener: Opener) -> None:
    model = Model(PARTITIONS)

    async def write_and_read(store: Store, partition: int) -> None:
        for turn in range(15):
            write = some_write(partition, model.highs[partition], 1 + turn % 3)
            await store.ask(Commit(BUCKET.name, [write]))
            model.take([write])
            high = model.highs[partition]
            rows = await read_all(store, partition, high)
            assert apply({}, rows) == model.contents(partition, high)
            seq = 1 + turn % high
            want = FetchRequest(b"key %d" % seq, seq, needs_value=True)
            items = await store.ask(FindItems(BUCKET.name, partition, [want]))
            assert items.all_rows() == [rows[seq - 1]]

    async def tidy(store: Store) -> None:
        for _ in range(20):
            await upkeep(store)

    async with opener() as store:
        await create(store)
        async with trio.open_nursery() as nursery:
            for partition in range(PARTITIONS):
                nursery.start_soon(write_and_read, store, partition)
            nursery.start_soon(tidy, store)


async def test_a_caller_that_is_cancelled_leaves_the_others_their_answers(opener: Opener) -> None:
    async with opener() as store:
        await create(store)
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.ask(LoadBuckets())
        for partition in range(PARTITIONS):
            with trio.move_on_after(0.0001 * partition):
                await store.ask(Commit(BUCKET.name, [some_write(partition, 0)]))
        (bucket,) = (await store.ask(LoadBuckets())).buckets
        # Each is there, whole, or not at all.
        for partition, stored_partition in enumerate(bucket.partitions):
            assert stored_partition.record.high in (0, 3)
            assert len(await read_all(store, partition, stored_partition.record.high)) in (0, 3)


# A disk that is full.


def test_a_bucket_refused_by_a_full_disk_can_be_created_later(tmp_path: Path) -> None:
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)

    def find_no_room(_log: OrderedMap, _index: OrderedMap) -> None:
        raise DiskFullError("no room")

    with pytest.raises(DiskFullError):
        directory.create("b", find_no_room)
    assert directory.names() == []
    with pytest.raises(DiskFullError):
        directory.create("b", find_no_room)
    directory.create("b", lambda _log, _index: None)
    assert directory.names() == ["b"]


@pytest.mark.parametrize("error_number", [errno.EMFILE, errno.EACCES, errno.ENOSPC])
def test_a_bucket_whose_files_cannot_be_made_can_be_created_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    """Where no descriptor was left, the error was taken for a bug, and the server ended."""
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)
    calls_left = attempts = failures = 0
    sentences: list[str] = []

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls_left
            calls_left -= 1
            if calls_left == 0:
                raise OSError(error_number, os.strerror(error_number))
            return function(*arguments, **options)

        return call

    while not directory.names():
        attempts += 1
        calls_left = attempts
        with monkeypatch.context() as patch:
            for place, name in ((os, "open"), (os, "fsync"), (os, "statvfs"), (os, "mkdir")):
                patch.setattr(place, name, failing(getattr(place, name)))
            patch.setattr(Path, "rename", failing(Path.rename))
            try:
                directory.create("b", lambda _log, _index: None)
            except DiskFullError:
                assert error_number == errno.ENOSPC
            except DataDirectoryError as error:
                sentences.append(str(error))
            else:
                if calls_left <= 0:
                    # Whether there is room for a lock file need not be known.
                    directory.delete("b")
                continue
            failures += 1
            assert directory.names() == []
    assert failures >= 8
    assert len(sentences) == (0 if error_number == errno.ENOSPC else failures)
    is_told = error_number == errno.EMFILE
    assert all(("ulimit -n" in sentence) == is_told for sentence in sentences)


def test_a_bucket_that_cannot_be_opened_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)
    server = StorageServer(directory)
    call = CreateBucketFiles(BucketRecord("b", 1, 0, incarnation=1), [record_of(0)])

    def fail(_name: str) -> tuple[OrderedMap, OrderedMap]:
        raise DataDirectoryError("no addresses are left")

    with monkeypatch.context() as patch:
        patch.setattr(directory, "open", fail)
        for _ in range(2):
            with pytest.raises(DataDirectoryError, match="no addresses"):
                call.run_on(server)
            assert directory.names() == []
    call.run_on(server)
    assert directory.names() == ["b"]
    server.close()


def test_folders_that_a_crash_left_are_no_buckets_and_are_removed(tmp_path: Path) -> None:
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)
    directory.create("b", lambda _log, _index: None)
    buckets = tmp_path / "buckets"
    for name in (".new-half-made", ".deleted-half"):
        (buckets / name / "log").mkdir(parents=True)
    (buckets / "notes.txt").write_text("not ours")
    assert DataDirectory(tmp_path, readonly=True).names() == ["b"]
    assert len(list(buckets.iterdir())) == 4, "a reader changes nothing"
    assert directory.remove_leftovers() == {}
    assert directory.names() == ["b"]
    assert sorted(path.name for path in buckets.iterdir()) == ["b", "notes.txt"]


@pytest.mark.parametrize("function", ["rename", "rmtree"])
def test_a_bucket_that_cannot_be_deleted_can_be_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)
    directory.create("b", lambda _log, _index: None)

    def fail(*_arguments: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path if function == "rename" else shutil, function, fail)
        for _ in range(2):
            with pytest.raises(DataDirectoryError, match="cannot be deleted"):
                directory.delete("b")
        is_half_deleted = function == "rmtree"
        assert list(directory.remove_leftovers()) == [".deleted-b"] * is_half_deleted
    directory.delete("b")
    assert list((tmp_path / "buckets").iterdir()) == []
    # Somebody else may have removed the files.
    directory.delete("b")


def test_a_bucket_behind_a_symbolic_link_can_be_deleted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare(data)
    directory = DataDirectory(data, bytes_max=MAP_BYTES)
    directory.create("b", lambda _log, _index: None)
    folder, elsewhere = data / "buckets" / "b", tmp_path / "elsewhere"
    folder.rename(elsewhere)
    (elsewhere / "lost+found").mkdir()
    folder.symlink_to(elsewhere)
    directory.delete("b")
    assert list((data / "buckets").iterdir()) == []
    assert [path.name for path in elsewhere.iterdir()] == ["lost+found"]
    # A crash may have come between.
    (data / "buckets" / ".deleted-b").symlink_to(elsewhere)
    assert directory.remove_leftovers() == {}
    assert list((data / "buckets").iterdir()) == []
    directory.create("b", lambda _log, _index: None)


def test_a_symbolic_link_to_a_disk_that_is_not_mounted_is_a_damaged_bucket(tmp_path: Path) -> None:
    """Its name must not be taken for that of a bucket that does not exist."""
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)
    (tmp_path / "buckets" / "b").symlink_to(tmp_path / "not mounted")
    loaded = LoadBuckets().run_on(StorageServer(directory))
    assert list(loaded.damaged_buckets) == ["b"]
    assert "b/log/data.mdb is missing" in loaded.damaged_buckets["b"]
    directory.delete("b")
    assert list((tmp_path / "buckets").iterdir()) == []


def test_a_directory_that_is_mounted_for_reading_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(DataDirectoryError, match=r"Read-only file system; mount its file system"):
        prepare(tmp_path)


async def test_a_folder_whose_name_is_no_text_is_a_damaged_bucket(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "buckets" / "b\udcff").mkdir()
    async with open_store(tmp_path) as store:
        loaded = await store.ask(LoadBuckets())
    assert list(loaded.damaged_buckets) == ["b\\udcff"]
    assert r"b\udcff/log/data.mdb is missing" in loaded.damaged_buckets["b\\udcff"]


def test_a_disk_without_space_refuses_a_new_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB is not even asked: its new lock file would kill the process with SIGBUS."""
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)
    free_blocks = COMMIT_RESERVE_BYTES // 4096 - 1
    disk = SimpleNamespace(f_frsize=4096, f_blocks=1 << 20, f_bavail=free_blocks)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _path: disk)
        with pytest.raises(DiskFullError, match="a new bucket needs"):
            directory.create("b", lambda _log, _index: None)
    assert list((tmp_path / "buckets").iterdir()) == []
    directory.create("b", lambda _log, _index: None)


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["mkdir", "rename", "lmdb"])
def test_a_bucket_that_cannot_be_created_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int, where: str
) -> None:
    prepare(tmp_path)
    directory = DataDirectory(tmp_path, bytes_max=MAP_BYTES)

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(error_number, os.strerror(error_number))

    def fill(log: OrderedMap, _index: OrderedMap) -> None:
        with log.write():
            if where == "lmdb":
                error = lmdb.Error("mdb_txn_commit")
                error.__dict__["code"] = error_number
                raise error

    with monkeypatch.context() as patch:
        if where != "lmdb":
            patch.setattr(Path, where, fail)
        with pytest.raises(DiskFullError, match="the disk is full"):
            directory.create("b", fill)
    assert list((tmp_path / "buckets").iterdir()) == []
    directory.create("b", lambda _log, _index: None)
    assert directory.names() == ["b"]


def test_a_large_disk_has_addresses_for_many_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map as large as this disk would take all addresses of a process."""
    prepare(tmp_path)
    disk = SimpleNamespace(f_frsize=4096, f_blocks=1 << 35, f_bavail=1 << 35)
    monkeypatch.setattr(os, "statvfs", lambda _path: disk)
    directory = DataDirectory(tmp_path)
    names = [f"b{index:02}" for index in range(20)]
    for name in names:
        directory.create(name, lambda _log, _index: None)
    open_maps = [part for name in names for part in directory.open(name)]
    assert isinstance(open_maps[0], LmdbOrderedMap)
    assert open_maps[0].free_bytes > MAP_BYTES_DEFAULT - MAP_BYTES
    for part in open_maps:
        part.close()
    too_large = DataDirectory(tmp_path, bytes_max=1 << 60)
    with pytest.raises(DataDirectoryError, match="set disk_bytes_max to less"):
        too_large.open("b00")


# Memory that is shared with the process that reads.


@pytest.fixture
async def reading(tmp_path: Path) -> AsyncIterator[tuple[ProcessStore, SlotPool]]:
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        if store._reader.slots is None:
            pytest.skip("no memory without a name")
        yield store, store._reader.slots


async def read_whole(store: Store, through: int) -> list[Chunk]:
    return await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(through), PLENTY))


async def test_a_slot_is_lent_for_as_long_as_a_chunk_of_it_lives(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    write = PartitionWrite(0, record_of(3), [one_row(seq) for seq in (1, 2, 3)])
    await store.ask(Commit(BUCKET.name, [write]))
    # A small read goes through the pipe.
    small = await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(3), SLOT_READ_BYTES_MIN - 1))
    assert (small, len(slots)) == (list(write.chunks), SLOTS)
    chunks = await read_whole(store, 3)
    assert (chunks, len(slots)) == (list(write.chunks), SLOTS - 1)
    values = chunks.pop().value_bytes
    chunks.clear()
    assert (bytes(values), len(slots)) == (bytes(write.chunks[-1].value_bytes), SLOTS - 1)
    del values
    assert len(slots) == SLOTS


async def test_chunks_that_do_not_fit_a_slot_go_through_the_pipe(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    sizes = (SLOT_BYTES // 2, SLOT_BYTES, 10, SLOT_BYTES // 2, 10)
    large = [
        chunk_of([row(Operation.SET, b"k", seq, seq, size=size)], seq - 1, seq)
        for seq, size in enumerate(sizes, 1)
    ]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(5), large)]))
    chunks = await read_whole(store, 5)
    assert (chunks, len(slots)) == (large, SLOTS - 1)
    for chunk in chunks:
        chunk.check(chunk.crc)


async def test_with_every_slot_lent_chunks_go_through_the_pipe(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    expected = [one_row(1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(1), expected)]))
    answers = [await read_whole(store, 1) for _ in range(SLOTS + 3)]
    assert len(slots) == 0
    assert all(answer == expected for answer in answers)
    answers.clear()
    assert len(slots) == SLOTS


async def test_a_caller_that_is_cancelled_gives_its_slot_back_when_the_answer_has_come(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    expected = [one_row(1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(1), expected)]))
    os.kill(store._reader.process.pid, signal.SIGSTOP)
    for _ in range(3):
        with trio.move_on_after(0.01):
            await read_whole(store, 1)
    assert len(slots) == SLOTS - 3, "the process may still write to them"
    os.kill(store._reader.process.pid, signal.SIGCONT)
    chunks = await read_whole(store, 1)
    assert (chunks, len(slots)) == (expected, SLOTS - 1)


async def test_chunks_outlive_the_process_that_read_them(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, _ = reading
    expected = [one_row(1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(1), expected)]))
    chunks = await read_whole(store, 1)
    os.kill(store._reader.process.pid, signal.SIGKILL)
    with pytest.raises(StoreFailedError, match="killed by SIGKILL"):
        await read_whole(store, 1)
    assert chunks == expected


async def test_a_system_without_such_memory_reads_through_the_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "make_shared_memory", lambda: None)
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        write = some_write(0, 0)
        await store.ask(Commit(BUCKET.name, [write]))
        assert store._reader.slots is None
        assert await read_whole(store, 3) == list(write.chunks)


# Processes.


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's allocator")
async def test_buckets_after_a_large_value_take_little_memory(tmp_path: Path) -> None:
    def anonymous_bytes() -> int:
        return sum(status_of(pid, "RssAnon") for pid in children_of(os.getpid()))

    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        for seq in (1, 2):
            value = row(Operation.SET, b"large", seq, seq, size=10 << 20)
            chunk = chunk_of([value], seq - 1, seq)
            await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(seq), [chunk])]))
        before = anonymous_bytes()
        for index in range(20):
            record = BucketRecord(f"bucket-{index}", 1, 1 << 20)
            await store.ask(CreateBucketFiles(record, [record_of(0)]))
        # The maps of each bucket reserve 6 MiB, and use hardly any of it.
        assert anonymous_bytes() - before < 20 << 20


@pytest.mark.parametrize("role", ["writer", "reader"])
async def test_a_killed_process_fails_the_store_and_its_callers(tmp_path: Path, role: str) -> None:
    failures: list[str] = []

    async def call(store: ProcessStore, high: int) -> None:
        try:
            while True:
                if role == "reader":
                    await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(3), 100))
                else:
                    await store.ask(LoadBuckets())
        except StoreFailedError as error:
            failures.append(str(error))

    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        await store.ask(Commit(BUCKET.name, [some_write(0, 0)]))
        worker = store._reader if role == "reader" else store._writer
        async with trio.open_nursery() as nursery:
            for index in range(5):
                nursery.start_soon(call, store, index)
            await trio.sleep(0.05)
            os.kill(worker.process.pid, signal.SIGKILL)
            with trio.fail_after(10):
                await store.failed.wait()
        sentence = f"the store's {role} process was killed by SIGKILL; the system's log may say why"
        assert store.failure == f"{sentence}; start the server again"
        assert failures == [store.failure] * 5
        with pytest.raises(StoreFailedError, match="killed by SIGKILL"):
            await store.ask(Commit(BUCKET.name, [some_write(0, 3)]))
    # The directory is as it was.
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert stored_bucket.partitions[0].record.high == 3


async def test_a_process_killed_by_a_signal_without_a_name_fails_the_store(tmp_path: Path) -> None:
    signal_number = signal.SIGRTMIN + 6
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        os.kill(store._writer.process.pid, signal_number)
        with trio.fail_after(10):
            await store.failed.wait()
        assert store.failure == (
            f"the store's writer process was killed by signal {signal_number}; the system's log "
            "may say why; start the server again"
        )


async def test_if_one_process_cannot_start_the_other_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EMFILE, "no descriptors")

    monkeypatch.setattr(processes, "_start_reader", refuse)
    before = set(children_of(os.getpid()))
    with pytest.RaisesGroup(OSError):
        async with open_store(tmp_path / "data", bytes_max=MAP_BYTES):
            pass
    assert set(children_of(os.getpid())) == before


@pytest.mark.parametrize("lock_directory", [lock_for_reading, lock_for_writing])
async def test_a_file_system_that_cannot_lock_is_told_as_such(
    lock_directory: Callable[[Path], AbstractContextManager[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a network disk whose server has no locks."""

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    prepare(tmp_path)
    lock(tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DataDirectoryError, match="No locks available"):
        async with open_store(tmp_path):
            pass
    with pytest.raises(DataDirectoryError, match="No locks available"), lock_directory(tmp_path):
        pass
    assert set(os.listdir("/proc/self/fd")) == before, "a descriptor is left"


async def test_only_one_server_may_use_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOCK_TIMEOUT_S", 0.2)
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        with pytest.raises(DataDirectoryError, match="in use by another server"):
            async with open_store(tmp_path, bytes_max=MAP_BYTES):
                pytest.fail("it was opened twice")
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert stored_bucket.record == BUCKET
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        assert len((await store.ask(LoadBuckets())).buckets) == 1


_HOLD: Final = """
import sys, trio
from pathlib import Path
from upr_server.storage.processes import open_store

async def main():
    async with open_store(Path(sys.argv[1]), bytes_max=1 << 30) as store:
        print(store._writer.process.pid, store._reader.process.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not waited for is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def test_a_killed_server_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    process = await trio.lowlevel.open_process(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment()
    )
    try:
        assert process.stdout is not None
        async with process.stdout:
            output = b""
            while not output.endswith(b"\n"):
                output += await process.stdout.receive_some()
        pids = [int(word) for word in output.split()]
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
    finally:
        process.kill()
        with trio.fail_after(10, shield=True):
            await process.wait()
    await eventually(lambda: not any(map(is_running, pids)), "the processes end", 20)
    # And the next may begin at once.
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        assert (await store.ask(LoadBuckets())).buckets == []


# Directories that are not ours.


def everything_in(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


async def refused(path: Path, match: str) -> None:
    before = everything_in(path)
    with pytest.raises(DataDirectoryError, match=match):
        async with open_store(path):
            pytest.fail("it was opened")
    assert everything_in(path) == before


async def test_a_directory_of_another_version_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "buckets").mkdir()
    (tmp_path / "format").write_text("upr 999\n")
    await refused(tmp_path, "has the format 'upr 999'")


async def test_a_foreign_directory_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("Dear Sir")
    await refused(tmp_path, "is not empty")


async def test_a_buckets_folder_without_a_format_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "buckets" / "some").mkdir(parents=True)
    (tmp_path / "buckets" / "some" / "data").write_text("of somebody")
    await refused(tmp_path, "is not empty")


async def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(DataDirectoryError, match="cannot be written"):
        async with open_store(path):
            pytest.fail("it was opened")
    assert path.read_text() == "text"


@pytest.mark.parametrize("is_written", [False, True])
def test_a_directory_whose_creation_was_interrupted_is_completed(
    tmp_path: Path, is_written: bool
) -> None:
    (tmp_path / "buckets").mkdir()
    if is_written:
        (tmp_path / ".format").write_text("")
    prepare(tmp_path)
    assert (tmp_path / "format").read_text() == FORMAT_TEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buckets", "format"]


def test_items_with_large_values_go_beside_the_message() -> None:
    large = bytes(LARGE_BYTES + 1)
    rows = [
        Mutation(Operation.SET, b"a", large, SeqNo(7), Cas(3), 5, 9),
        None,
        Mutation(Operation.SET, b"b", b"small", SeqNo(8), Cas(4)),
        Mutation(Operation.SET, b"c", large, SeqNo(9), Cas(5)),
    ]
    packed, buffers = pack_message(ItemsFound.of(list(rows)))
    assert len(packed) < 1000
    items = Unpacker().unpack(packed, ItemsFound, buffers)
    assert items.all_rows() == rows
    first = items.all_rows()[0]
    assert isinstance(first.value, memoryview), "it is not copied"


class RecordingStream(trio.abc.SendStream):
    """Takes all that it is given at once, as a pipe does while its reader is quick."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self.pieces.append(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_a_large_call_is_sent_in_steps() -> None:
    stream = RecordingStream()
    parts = [b"head", b"a" * (3 * SEND_BYTES), b"", b"b" * 10, b"c" * SEND_BYTES]
    await send_in_steps(stream, list(parts))
    assert b"".join(stream.pieces) == b"".join(parts)
    assert max(map(len, stream.pieces)) == SEND_BYTES
    assert len(stream.pieces) == 5


async def test_many_parts_are_sent_in_order() -> None:
    stream = RecordingStream()
    parts = [b"%d" % index for index in range(2 * SEND_PARTS + 1)]
    await send_in_steps(stream, list(parts))
    assert b"".join(stream.pieces) == b"".join(parts)
    assert len(stream.pieces) == 3


class EncodedChunk(Chunk):
    """A chunk that counts how often one of its kind was encoded."""

    __slots__ = ()
    count_encoded = 0

    def encode(self) -> memoryview:
        EncodedChunk.count_encoded += 1
        return super().encode()


class EncodedInStep(trio.abc.Instrument):
    """How many chunks each step has encoded, if any."""

    def __init__(self) -> None:
        EncodedChunk.count_encoded = 0
        self.counts: list[int] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if EncodedChunk.count_encoded:
            self.counts.append(EncodedChunk.count_encoded)
            EncodedChunk.count_encoded = 0


async def test_a_commit_of_many_chunks_is_packed_in_steps(tmp_path: Path) -> None:
    count = STEP_ITEMS * 3 // 4
    chunks = [EncodedChunk(one_row(seq).encode()) for seq in range(1, count + 1)]
    writes = [
        PartitionWrite(partition, record_of(count), chunks) for partition in range(PARTITIONS)
    ]
    async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
        await create(store)
        encoded = EncodedInStep()
        trio.lowlevel.add_instrument(encoded)
        await store.ask(Commit(BUCKET.name, writes))
        trio.lowlevel.remove_instrument(encoded)
        assert encoded.counts == [count] * PARTITIONS


class ReceivingSteps(trio.abc.Instrument):
    """Counts the steps of the tasks that receive answers.

    Args:
        on_step: Called before each, with its number.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda _: None) -> None:
        self.count = 0
        self._on_step = on_step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.endswith("_Worker.receive"):
            self.count += 1
            self._on_step(self.count)


@asynccontextmanager
async def a_held_worker(
    slots: SlotPool | None = None, *, receives: bool = True
) -> AsyncIterator[tuple[processes._Worker, bytearray, trio.SocketStream]]:
    """A process that answers nothing: what it has received, and the pipe to answer by."""
    own_socket, process_socket = trio.socket.socketpair()
    own_pipe, process_pipe = trio.SocketStream(own_socket), trio.SocketStream(process_socket)
    worker = processes._Worker(cast("Any", None), own_pipe, "reader", slots)
    received = bytearray()

    async def take_requests() -> None:
        while receives:
            received.extend(await process_pipe.receive_some())

    async with own_pipe, process_pipe, trio.open_nursery() as nursery:
        for task in (worker.send, worker.receive, take_requests):
            nursery.start_soon(task)
        yield worker, received, process_pipe
        nursery.cancel_scope.cancel()


async def test_reads_for_thousands_of_streams_hold_up_no_other_call() -> None:
    async with a_held_worker() as (worker, received, process_pipe), trio.open_nursery() as nursery:
        for _ in range(1000):
            nursery.start_soon(worker.call, ReadChunks("b", 0, SeqNo(0), SeqNo(9), 1))
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"ReadChunks") == READS_SENT_MAX
        for _ in range(100):
            nursery.start_soon(worker.call, FindSeqBefore("b", 0, 1))
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"FindSeqBefore") == 100
        # Each answer makes room for one more. These have no chunks.
        await process_pipe.send_all(5 * (HEAD.pack(1, 0, False) + b"\x90"))
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"ReadChunks") == READS_SENT_MAX + 5
        nursery.cancel_scope.cancel()


async def test_what_a_stream_that_has_ended_would_have_read_is_not_read() -> None:
    """Otherwise consumers that come and go would have others wait behind all that they asked
    for."""
    shared_memory = make_shared_memory()
    assert shared_memory is not None
    slots = SlotPool(shared_memory)
    os.close(shared_memory)
    scopes = [trio.CancelScope() for _ in range(READS_SENT_MAX + 100)]
    async with (
        a_held_worker(slots) as (worker, received, process_pipe),
        trio.open_nursery() as nursery,
    ):

        async def read(scope: trio.CancelScope) -> None:
            with scope:
                await worker.call(ReadChunks("ended", 0, SeqNo(0), SeqNo(9), SLOT_READ_BYTES_MIN))

        for scope in scopes:
            nursery.start_soon(read, scope)
        await trio.testing.wait_all_tasks_blocked()
        for scope in scopes:
            scope.cancel()
        nursery.start_soon(worker.call, ReadChunks("going on", 0, SeqNo(0), SeqNo(9), 1))
        await trio.testing.wait_all_tasks_blocked()
        assert len(slots) == SLOTS - READS_SENT_MAX, "those that were sent keep theirs"
        await process_pipe.send_all(HEAD.pack(1, 0, False) + b"\x90")
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"ended") == READS_SENT_MAX
        assert received.count(b"going on") == 1
        nursery.cancel_scope.cancel()


async def test_a_read_that_waits_is_left_out_with_its_caller_and_a_change_is_not() -> None:
    """Otherwise clients that ask again and again, as answers come late, would make all later
    still."""
    requests = [FetchRequest(b"%0250d" % index, 0, True) for index in range(20_000)]
    calls: list[StoreCall[Any]] = [
        CloseBucket("b"),
        *(FindItems("b", 0, requests[:1]) for _ in range(100)),
        DeleteLeases("b", [1]),
        *(FindExpired("b", 1, b"", 1) for _ in range(100)),
    ]
    async with (
        a_held_worker(receives=False) as (worker, _, _),
        trio.open_nursery() as nursery,
    ):
        # It fills the pipe.
        nursery.start_soon(worker.call, FindItems("b", 0, requests))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01):
            async with trio.open_nursery() as clients:
                for call in calls:
                    clients.start_soon(worker.call, call)
        unsent_calls = [pending_call.call for pending_call in worker._unsent_calls]
        assert {type(call) for call in unsent_calls} == {CloseBucket, DeleteLeases}
        assert len(unsent_calls) == 2
        nursery.cancel_scope.cancel()


MANY_CHUNKS: Final = 10 * STEP_CHUNKS


async def commit_many_chunks(store: Store) -> ReadChunks:
    """Returns the call that reads them."""
    await create(store)
    chunks = [one_row(seq) for seq in range(1, MANY_CHUNKS + 1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(MANY_CHUNKS), chunks)]))
    return ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(MANY_CHUNKS), PLENTY)


async def test_an_answer_of_many_chunks_is_unpacked_in_steps(tmp_path: Path) -> None:
    async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
        call = await commit_many_chunks(store)
        steps = ReceivingSteps()
        trio.lowlevel.add_instrument(steps)
        chunks = await store.ask(call)
        trio.lowlevel.remove_instrument(steps)
        assert [chunk.end for chunk in chunks] == list(range(1, MANY_CHUNKS + 1))
        assert steps.count >= 2 * MANY_CHUNKS // STEP_CHUNKS


async def test_a_store_that_closes_while_it_unpacks_an_answer_fails_the_call(
    tmp_path: Path,
) -> None:
    with trio.CancelScope() as scope:
        async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
            call = await commit_many_chunks(store)

            def close(step: int) -> None:
                if step == 2 * MANY_CHUNKS // STEP_CHUNKS:
                    scope.cancel()

            steps = ReceivingSteps(close)
            trio.lowlevel.add_instrument(steps)
            with trio.CancelScope(shield=True), pytest.raises(StoreFailedError, match="is closed"):
                await store.ask(call)
            trio.lowlevel.remove_instrument(steps)
