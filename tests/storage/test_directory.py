"""The data directory: its lock, its format, and the folders of its buckets."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from tests.storage.log_model import record_of
from tests.storage.planes import (
    BUCKET,
    MAP_BYTES,
    create,
)
from upr_server.storage import processes
from upr_server.storage.calls import (
    CreateBucketFiles,
    LoadBuckets,
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
)
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.lmdb_space import MAP_BYTES_DEFAULT
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.processes import (
    open_store,
)
from upr_server.storage.records import BucketRecord
from upr_server.storage.storage_server import StorageServer

# Folders of buckets.


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
    assert all(("ulimit -Hn" in sentence) == is_told for sentence in sentences)


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
    before = set(os.listdir("/proc/self/fd"))
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        with pytest.raises(DataDirectoryError, match="in use by another server"):
            async with open_store(tmp_path, bytes_max=MAP_BYTES):
                pytest.fail("it was opened twice")
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert stored_bucket.record == BUCKET
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        assert len((await store.ask(LoadBuckets())).buckets) == 1
    del store  # It has the memory that it shared with a process.
    assert set(os.listdir("/proc/self/fd")) == before, "a descriptor is left"


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
