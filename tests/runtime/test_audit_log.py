"""The audit log: what is in it, and that its loss is noticed."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from upr_server.runtime import AuditLog, AuditLogError
from upr_server.runtime.audit_log import Fields


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def events(path: Path) -> list[str]:
    return [line["event"] for line in lines(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[AuditLog]:
    log = AuditLog(path, lambda: 1_800_000_000.25)
    yield log
    log.stop()


def written(log: AuditLog) -> None:
    """Waits until what was noted is written: it has no end before."""
    log.stop()
    assert not log._thread.is_alive()


def test_lines_have_a_number_a_time_and_what_was_noted(log: AuditLog, path: Path) -> None:
    log.start()
    log.note("request", user="bob", allowed=False)
    log.note("request", user="Zoë\n", allowed=True)
    written(log)
    assert lines(path)[1] == {
        "number": 2,
        "time": "2027-01-15T08:00:00.250+00:00",
        "event": "request",
        "user": "bob",
        "allowed": False,
    }
    assert [line["number"] for line in lines(path)] == [1, 2, 3, 4]
    assert events(path) == ["started", "request", "request", "stopped"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_repeated_is_one_line_with_a_count(log: AuditLog, path: Path) -> None:
    log.start()
    for _ in range(1000):
        log.note("request", user="bob")
    log.note("request", user="eve")
    written(log)
    # A period may end in between.
    assert sum(line.get("times", 1) for line in lines(path) if line.get("user") == "bob") == 1000
    assert len(lines(path)) < 10


def test_another_run_goes_on_in_the_same_file(path: Path) -> None:
    for _ in range(2):
        log = AuditLog(path, lambda: 0.0)
        log.start()
        written(log)
    assert events(path) == ["started", "stopped"] * 2


def test_full_files_are_renamed_and_the_oldest_is_deleted(path: Path) -> None:
    log = AuditLog(path, lambda: 0.0, file_bytes_max=200, files_max=2)
    log.start()
    for number in range(20):
        log.note("request", user=f"user-{number}")
    written(log)
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    numbers = [
        line["number"]
        for file in (f"{path}.2", f"{path}.1", str(path))
        for line in lines(Path(file))
    ]
    assert numbers == list(range(numbers[0], 23))
    assert all(file.stat().st_size <= 200 for file in path.parent.iterdir())


def line(user: str) -> Fields:
    return (("event", "request"), ("user", user))


@pytest.fixture
def opened(log: AuditLog) -> Iterator[AuditLog]:
    """A log whose thread does not run: tests write in its place."""
    log._descriptor = log._opened()
    yield log
    os.close(log._descriptor)


def test_a_file_that_was_removed_is_missed(opened: AuditLog, path: Path) -> None:
    opened._write([line("bob")])
    path.unlink()
    opened._write([line("eve")])
    assert events(path) == ["file was removed", "request"]
    assert [row["number"] for row in lines(path)] == [0, 2]


def test_lines_that_cannot_be_written_are_counted_and_told(
    opened: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def write_some(descriptor: int, data: bytes) -> int:
        write(descriptor, bytes(data[:3]))
        raise OSError(errno.ENOSPC, "No space left on device")

    opened._write([line("ada")])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        opened._write([line("bob"), line("bob")])
        opened._write([line("bob")])
    assert opened.lost_lines == 3
    opened._write([line("eve")])
    opened._write([line("joe")])
    assert opened.lost_lines == 3
    whole = [json.loads(row) for row in path.read_text().splitlines() if row.endswith("}")]
    assert [(row["number"], row.get("user"), row.get("times")) for row in whole] == [
        (1, "ada", None),
        (2, None, 3),
        (3, "eve", None),
        (4, "joe", None),
    ]


def test_lines_that_find_no_room_in_the_queue_are_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(path, lambda: 0.0, queue_lines_max=2)
    is_writing, may_write = threading.Event(), threading.Event()
    write = log._write

    def wait(batch: list[Fields]) -> None:
        is_writing.set()
        assert may_write.wait(60)
        write(batch)

    monkeypatch.setattr(log, "_write", wait)
    log.start()
    assert is_writing.wait(60)
    for number in range(5):
        log.note("request", user=number)
    assert log.lost_lines == 3
    may_write.set()
    log.stop()
    assert [(row["event"], row.get("user"), row.get("times")) for row in lines(path)] == [
        ("lines lost", None, 3),
        ("started", None, None),
        ("request", 0, None),
        ("request", 1, None),
        ("stopped", None, None),
    ]


def test_lines_that_wait_take_bounded_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(path, lambda: 0.0, queue_bytes_max=25_000)
    is_writing, may_write = threading.Event(), threading.Event()
    write = log._write

    def wait(batch: list[Fields]) -> None:
        is_writing.set()
        assert may_write.wait(60)
        write(batch)

    monkeypatch.setattr(log, "_write", wait)
    log.start()
    assert is_writing.wait(60)
    for number in range(5):
        log.note("request", detail=f"{number}{'x' * 10_000}")
    assert log.lost_lines == 3
    may_write.set()
    written(log)
    assert events(path) == ["lines lost", "started", "request", "request", "stopped"]
    assert log._queued_bytes == 0


def test_a_file_that_cannot_be_written_keeps_the_server_from_starting(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "no folder" / "audit.jsonl", lambda: 0.0)
    with pytest.raises(AuditLogError, match="audit_log"):
        log.start()
    log.note("nothing happens")


def test_before_the_start_nothing_is_noted(log: AuditLog, path: Path) -> None:
    log.note("request")
    assert not path.exists()
