"""The file that keeps the event queues during a clean restart."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from upr_server.storage.calls import SaveEventQueues, TakeEventQueues
from upr_server.storage.directory import DataDirectory
from upr_server.storage.errors import CorruptionError, DataDirectoryError, DiskFullError
from upr_server.storage.event_queue_file import EventQueueFile
from upr_server.storage.processes import open_store

NAME = "event-queues"


@pytest.fixture
def file(tmp_path: Path) -> EventQueueFile:
    return EventQueueFile(tmp_path)


def test_the_queues_saved_last_are_loaded_once(file: EventQueueFile, tmp_path: Path) -> None:
    assert file.take() == b""
    file.save(b"earlier")
    file.save(b"queues")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert file.take() == b"queues"
    # The file is removed before any event is delivered: after a crash, there is none.
    assert not list(tmp_path.iterdir())
    assert file.take() == b""


@pytest.mark.parametrize("flipped", range(8))
def test_a_damaged_file_is_refused_and_removed(
    file: EventQueueFile, tmp_path: Path, flipped: int
) -> None:
    file.save(b"data")
    data = bytearray((tmp_path / NAME).read_bytes())
    data[flipped] ^= 1
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(CorruptionError):
        file.take()
    assert file.take() == b""


def test_a_file_that_was_cut_is_refused(file: EventQueueFile, tmp_path: Path) -> None:
    file.save(b"data")
    (tmp_path / NAME).write_bytes(b"")
    with pytest.raises(CorruptionError):
        file.take()


def test_a_file_that_cannot_be_removed_keeps_the_server_from_starting(
    file: EventQueueFile, tmp_path: Path
) -> None:
    # If the server started, the next one would take the outdated queues for current ones.
    (tmp_path / NAME).mkdir()
    with pytest.raises(DataDirectoryError, match="remove it"):
        file.take()


def failing(error: int) -> Callable[[int], None]:
    def fsync(_descriptor: int) -> None:
        raise OSError(error, os.strerror(error))

    return fsync


@pytest.mark.parametrize(
    ("error", "raised"), [(errno.ENOSPC, DiskFullError), (errno.EIO, DataDirectoryError)]
)
def test_a_failed_write_leaves_no_file(
    file: EventQueueFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    raised: type[Exception],
) -> None:
    monkeypatch.setattr(os, "fsync", failing(error))
    with pytest.raises(raised):
        file.save(b"queues")
    assert not list(tmp_path.iterdir())


async def test_queues_are_saved_by_the_process_that_writes(tmp_path: Path) -> None:
    for expected in (b"", b"queues \0\xff"):
        async with open_store(tmp_path / "data") as store:
            assert await store.ask(TakeEventQueues()) == expected
            await store.ask(SaveEventQueues(b"queues \0\xff"))
    assert DataDirectory(tmp_path / "data").event_queues.take() == b"queues \0\xff"
