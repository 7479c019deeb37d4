"""`upr-server restore`: a copy of a data directory takes the place of its original."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.processes import Line, Upr, start_server
from tests.kit.process import UPR_SERVER
from tests.storage.small_directory import BUCKET, PARTITIONS, make
from upr_protocol.client import (
    BlockingClient,
    BlockingRollbackConsumer,
    ChunkReceived,
    PartitionInfo,
    RolledBack,
    Undone,
)
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.directory import DataDirectory, lock
from upr_server.storage.errors import CorruptionError, DataDirectoryError
from upr_server.storage.event_queue_file import EventQueueFile
from upr_server.storage.offline.restore import RestoredBucket, begin_new_histories


def restore(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*UPR_SERVER, "restore", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def changes(url: str, resume_file: Path) -> list[Line]:
    """What a consumer gets until it has caught up."""
    upr = Upr("tail", url, "--resume", str(resume_file), "--until", "caught-up")
    out, _ = upr.finished()
    return [json.loads(line) for line in out.splitlines()]


class UndoingCopy:
    """A copy of a bucket that is kept from run to run, and undoes what the server lost.

    Attributes:
        items: The copy.
        undone: What was undone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.items: dict[bytes, bytes] = {}
        self.undone: list[Undone] = []

    def catch_up(self, url: str) -> None:
        """Receives everything that the server has now."""
        folder = self._folder
        with BlockingRollbackConsumer(
            url, folder / "received keys", resume=folder / "undoing state", end="now"
        ) as consumer:
            for event in consumer:
                assert not isinstance(event, RolledBack)
                if isinstance(event, ChunkReceived):
                    self.items |= {mutation.key: mutation.value for mutation in event.chunk}
                elif isinstance(event, Undone):
                    self.undone.append(event)
                    for key, item in event.documents.items():
                        assert item is None
                        del self.items[key]


def partition_of(url: str) -> PartitionInfo:
    with BlockingClient(url) as client:
        (info,) = client.partitions()
    return info


def put(url: str, key: str) -> int:
    """Stores a key. Returns its sequence number."""
    with BlockingClient(url) as client:
        return client.set(key, b"v").seq


@pytest.mark.timeout(120)
def test_a_restored_copy_begins_new_histories_and_consumers_roll_back(tmp_path: Path) -> None:
    data, backup, resume_file = tmp_path / "data", tmp_path / "backup", tmp_path / "state"
    copy = UndoingCopy(tmp_path)
    config = tmp_path / "server.toml"
    config.write_text('[[buckets]]\nname = "b"\npartitions = 1\n')
    options = ("--data-dir", str(data), "--config", str(config))
    with start_server("127.0.0.1:0", *options) as server:
        url = f"{server.url}b"
        assert put(url, "before the backup") == 1
        server.stop()
    shutil.copytree(data, backup)

    address = server.url.removeprefix("upr://").rstrip("/")
    with start_server(address, *options) as server:
        assert put(url, "after the backup") == 2
        old_log = partition_of(url).log
        received = [line["key"] for line in changes(url, resume_file) if "key" in line]
        assert received == ["before the backup", "after the backup"]
        copy.catch_up(url)
        assert copy.items.keys() == {b"before the backup", b"after the backup"}
        server.stop()

    shutil.rmtree(data)
    shutil.copytree(backup, data)
    restored = restore("--new-histories", "--data-dir", data)
    assert (restored.returncode, restored.stderr) == (0, "")
    assert restored.stdout.splitlines() == [
        "b: 1 partitions begin new histories",
        f"{data} is ready to be served",
    ]
    with start_server(address, *options) as server:
        new_log = partition_of(url).log
        assert new_log.current != old_log.current
        assert new_log.entries[1:] == old_log.entries, "it continues the history up to the backup"
        # The same sequence number, but another change, in another history.
        assert put(url, "after the restore") == 2
        lines = changes(url, resume_file)
        assert lines[0]["event"] == "rollback"
        received = [line["key"] for line in lines if "key" in line]
        assert received[-1] == "after the restore"
        assert "after the backup" not in received
        copy.catch_up(url)
        assert [(event.to, event.documents) for event in copy.undone] == [
            (1, {b"after the backup": None})
        ]
        assert copy.items.keys() == {b"before the backup", b"after the restore"}
        server.stop()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    make(path)
    return path


def mark_clean(data: Path) -> None:
    storage = BucketStorage(*DataDirectory(data).open(BUCKET))
    storage.log.mark_clean_stop()
    storage.close()


def is_clean(data: Path) -> bool:
    storage = BucketStorage(*DataDirectory(data).open(BUCKET))
    try:
        return storage.open().is_clean
    finally:
        storage.close()


def test_restore_removes_the_mark_of_a_clean_stop_and_the_event_queues(data: Path) -> None:
    mark_clean(data)
    EventQueueFile(data).save(b"queues")
    assert is_clean(data)
    for _ in range(2):
        assert begin_new_histories(data) == [RestoredBucket(BUCKET, PARTITIONS)]
        assert not is_clean(data)
        assert not EventQueueFile(data).take()


def test_it_asks_for_confirmation(data: Path) -> None:
    mark_clean(data)
    refusal = restore("--data-dir", data)
    assert refusal.returncode == 2
    assert "say --new-histories" in refusal.stderr
    assert is_clean(data)


def test_a_directory_that_a_server_uses_is_refused(data: Path) -> None:
    mark_clean(data)
    descriptor = lock(data)
    assert descriptor is not None
    try:
        refusal = restore("--new-histories", "--data-dir", data)
    finally:
        os.close(descriptor)
    assert refusal.returncode == 1
    assert "is in use by a server; stop it first" in refusal.stderr
    assert is_clean(data)


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryError, match="not a data directory"):
        begin_new_histories(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_bucket_without_a_log_is_refused(data: Path) -> None:
    (data / "buckets" / BUCKET / "log" / "data.mdb").unlink()
    with pytest.raises(
        CorruptionError, match=rf"{BUCKET} .*data.mdb is missing.* repeat the command"
    ):
        begin_new_histories(data)
