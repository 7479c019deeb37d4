"""A full disk: an indexer answers from what it has, says why, and goes on when there is room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import trio

from tests.indexer.kit import (
    BUCKET,
    a_server,
    an_indexer,
    by_brute_force,
    define,
    name_of,
    scan,
    until_ready,
    workers_in_the_loop,
)
from tests.kit.process import eventually
from upr_protocol.client import connect
from upr_protocol.client.rollback.checksummed_file import ChecksummedFile
from upr_server.indexer import definitions as definitions_module
from upr_server.indexer import disk as disk_module
from upr_server.indexer import worker_process as worker_process_module
from upr_server.indexer.definitions import index_path
from upr_server.indexer.disk import Disk
from upr_server.indexer.index_file import DiskFullError, IndexFile, IndexFileError
from upr_server.indexer.index_file.errors import FREE_BYTES_MIN, errors_of_index
from upr_server.indexer.indexer import STOP_S, Indexer
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.slice_scanner import BuildingError, NotFreshError
from upr_server.indexer.slices import SliceMissingError

BY_N = IndexDefinition(("n",))
FULL = "the disk is full"


class FakeDisk:
    """A disk for the files of an indexer.

    Attributes:
        full_for: For what there is no room.
    """

    def __init__(self) -> None:
        self.full_for: set[str] = set()

    def check(self, kind: str) -> None:
        if kind in self.full_for:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FakeDisk:
    """The disk. A commit finds out at its end that there is no room."""
    disk = FakeDisk()
    write, append = IndexFile._write, ChecksummedFile.append

    @contextmanager
    def write_if_room(file: IndexFile) -> Iterator[Any]:
        with write(file) as transaction:
            yield transaction
            disk.check("indexes")

    def append_if_room(file: ChecksummedFile, record: bytes) -> None:
        disk.check("received keys")
        append(file, record)

    monkeypatch.setattr(IndexFile, "_write", write_if_room)
    monkeypatch.setattr(ChecksummedFile, "append", append_if_room)
    for module in disk_module, definitions_module:
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    return disk


def full_reason(indexer: Indexer) -> str:
    return indexer.slices[0].pipeline.disk.full_reason


@pytest.mark.parametrize("full_for", [{"indexes"}, {"received keys"}, {"indexes", "received keys"}])
async def test_an_indexer_goes_on_when_there_is_room(
    tmp_path: Path, disk: FakeDisk, full_for: set[str]
) -> None:
    """A full disk ended it."""
    contents = {b"old": b'{"n": -1}'}
    with structlog.testing.capture_logs() as logs:
        async with (
            a_server() as server,
            connect(server.url(BUCKET)) as client,
            # The received keys are written at rollbacks' limits, too, and not with rounds only.
            an_indexer(server.url(BUCKET), tmp_path, undo_mutations=5) as indexer,
        ):
            await define(client, "d", {"n": BY_N})
            await client.set(b"old", contents[b"old"])
            await until_ready(indexer, "d/n")
            assert await scan(indexer, "d/n") == [([-1], "old")]
            disk.full_for = full_for
            for number in range(20):
                contents[b"k%d" % number] = b'{"n": %d}' % number
                await client.set(f"k{number}", contents[b"k%d" % number])
            await eventually(lambda: bool(full_reason(indexer)), "there is no room")
            assert await scan(indexer, "d/n", consistency="any") == [([-1], "old")]
            with pytest.raises(NotFreshError, match=FULL):
                await scan(indexer, "d/n", timeout_s=0.05)
            status = await indexer.scanner.status(name_of("d/n"))
            assert status.state == "ready"
            assert FULL in status.failure
            assert FULL in (await indexer.statistics())["slices"][0]["failure"]
            await define(client, "e", {"n": BY_N})
            await eventually(lambda: name_of("e/n") in indexer.designs.names(), "it is defined")
            with pytest.raises(BuildingError):
                await scan(indexer, "e/n", consistency="any")
            assert FULL in (await indexer.scanner.status(name_of("e/n"))).failure
            disk.full_for = set()
            for name in "d/n", "e/n":
                await until_ready(indexer, name)
                assert await scan(indexer, name, timeout_s=20) == by_brute_force(BY_N, contents)
            await eventually(lambda: not full_reason(indexer), "nothing waits for room")
            assert not (await indexer.scanner.status(name_of("d/n"))).failure
    names = [line["event"] for line in logs]
    assert (names.count("disk full"), names.count("disk has space again")) == (1, 1)


async def test_a_dropped_index_may_make_room(tmp_path: Path, disk: FakeDisk) -> None:
    """Though another one waits for it: neither its building nor its making holds up a drop."""
    async with (
        a_server() as server,
        connect(server.url(BUCKET)) as client,
        an_indexer(server.url(BUCKET), tmp_path) as indexer,
    ):
        await define(client, "d", {"n": BY_N})
        await client.set("k", '{"n": 1}')
        await until_ready(indexer, "d/n")
        disk.full_for = {"indexes"}
        await define(client, "e", {"n": BY_N})
        await eventually(lambda: name_of("e/n") in indexer.designs.names(), "it is defined")
        await eventually(lambda: bool(full_reason(indexer)), "there is no room")
        await client.delete("_design/d")
        path = index_path(tmp_path / "slice-0-of-1", name_of("d/n"), BY_N)
        await eventually(lambda: not path.exists(), "it is dropped")
        disk.full_for = set()
        await until_ready(indexer, "e/n")
        assert await scan(indexer, "e/n") == [([1], "k")]


@pytest.mark.parametrize("full_for", [{"indexes"}, {"received keys"}])
async def test_a_stop_does_not_wait_for_room(
    tmp_path: Path, disk: FakeDisk, full_for: set[str]
) -> None:
    """What was not applied is read again."""
    async with a_server() as server, connect(server.url(BUCKET)) as client:
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await define(client, "d", {"n": BY_N})
            await until_ready(indexer, "d/n")
            disk.full_for = full_for
            await client.set("k", '{"n": 1}')
            await eventually(lambda: bool(full_reason(indexer)), "there is no room")
            began = trio.current_time()
        assert trio.current_time() - began < STOP_S / 2
        disk.full_for = set()
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await until_ready(indexer, "d/n")
            assert await scan(indexer, "d/n") == [([1], "k")]


async def test_workers_start_when_there_is_room(
    tmp_path: Path, disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that found none ended all."""
    monkeypatch.setattr(worker_process_module, "RESTART_S", 0.01)
    async with a_server() as server, connect(server.url(BUCKET)) as client:
        url = server.url(BUCKET)
        make_holder = workers_in_the_loop(url, tmp_path)
        disk.full_for = {"indexes"}
        async with an_indexer(url, tmp_path, slices=2, make_holder=make_holder) as indexer:
            failures: list[str] = []

            async def ask() -> None:
                try:
                    await indexer.holders[1].ping()
                except SliceMissingError as error:
                    failures.append(str(error))

            with trio.fail_after(20):
                while not any(FULL in failure for failure in failures):
                    await ask()
                    await trio.sleep(0.01)
            disk.full_for = set()
            await define(client, "d", {"n": BY_N})
            await until_ready(indexer, "d/n")


async def test_an_error_of_another_kind_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "RETRY_S", 0)
    disk = Disk()
    errors: list[Exception] = [
        OSError(errno.ENOSPC, "no room"),
        DiskFullError("no room"),
        OSError(errno.EIO, "broken"),
    ]

    async def write() -> None:
        await trio.lowlevel.checkpoint()
        raise errors.pop(0)

    with pytest.raises(OSError, match="broken"):
        await disk.retry(write)
    assert not errors
    assert not disk.full_reason


@pytest.mark.parametrize(
    ("number", "free_bytes", "kind"),
    [
        (errno.ENOSPC, 1 << 40, DiskFullError),
        (errno.EDQUOT, 1 << 40, DiskFullError),
        (errno.EIO, 0, DiskFullError),
        (errno.EIO, FREE_BYTES_MIN, IndexFileError),
        (errno.EACCES, 0, IndexFileError),
    ],
)
def test_a_write_that_ends_half_way_has_found_no_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    free_bytes: int,
    kind: type[IndexFileError],
) -> None:
    """LMDB calls that an error of input and output, as it calls a broken disk."""
    free = SimpleNamespace(f_bavail=free_bytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _path: free)
    with pytest.raises(IndexFileError) as failure, errors_of_index(tmp_path):
        raise OSError(number, os.strerror(number))
    assert type(failure.value) is kind


def test_a_new_index_needs_some_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB is not even asked: its new lock file would kill the process with SIGBUS."""
    path = tmp_path / "new"
    with monkeypatch.context() as patch:
        free = SimpleNamespace(f_bavail=FREE_BYTES_MIN - 1, f_frsize=1)
        patch.setattr(os, "statvfs", lambda _path: free)
        with pytest.raises(DiskFullError, match="a new index needs 1048576"):
            IndexFile(path, BUCKET)
    assert list(path.iterdir()) == []
    IndexFile(path, BUCKET).close()
    # What is there is opened however little is left.
    monkeypatch.setattr(os, "statvfs", lambda _path: free)
    IndexFile(path, BUCKET).close()
