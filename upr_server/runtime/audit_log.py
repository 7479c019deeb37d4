"""The audit log: who asked for what, and whether it was allowed. JSON lines in a file of their own.

Lines are written in a thread, so that a slow disk holds up nobody. A line that cannot be written is
noticed: it is counted, the server's log and statistics tell it, and so does the next line. Each
line has a number, so that one that is missing leaves a gap.

Users decide how much is written. What is repeated within a second becomes one line that says how
often it happened. A full file is renamed, and the oldest of several is deleted.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import structlog

from upr_protocol.errors import UprError

FILE_BYTES_MAX: Final = 16 * 1024 * 1024
FILES_MAX: Final = 10
"""Full files that are kept beside the one that is written."""

QUEUE_LINES_MAX: Final = 10_000
"""Lines that wait for the disk, a few MiB. More are lost, and counted."""

QUEUE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Memory of lines that wait for the disk: users choose how long some of them are. More are lost,
and counted."""

KINDS_MAX: Final = 1000
"""Different lines of a second whose repetitions are counted; each of more is a line."""

PERIOD_S: Final = 1.0
STOP_TIMEOUT_S: Final = 2.0
_MODE: Final = 0o600
_LINE_BYTES: Final = 500
"""Memory of a line beside its texts."""

log = structlog.get_logger(__name__)

Fields = tuple[tuple[str, object], ...]


class AuditLogError(UprError):
    """The audit log cannot be written."""


class AuditLog:
    """An audit log.

    Args:
        path: The file.
        clock: Seconds since 1970.
        file_bytes_max: A file that has reached this is full.
        files_max: Full files that are kept.
        queue_lines_max: Lines that may wait for the disk.
        queue_bytes_max: The memory that they may take.

    Attributes:
        lost_lines: Lines that were lost since the start.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
        queue_lines_max: int = QUEUE_LINES_MAX,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self.lost_lines = 0
        self._path = path
        self._clock = clock
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max
        self._lines: queue.Queue[Fields | None] = queue.Queue(queue_lines_max)
        self._queue_bytes_max = queue_bytes_max
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._repeats: dict[Fields, int] = {}
        """What was noted in this period, and how often beside the line that was written."""
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._descriptor = -1
        self._number = 0
        self._is_torn = False
        """Whether the file may end inside a line."""
        self._untold = 0
        """Lines that were lost since the last that was written."""

    def start(self) -> None:
        """Begins to write.

        Raises:
            AuditLogError: The file cannot be written.
        """
        try:
            self._descriptor = self._opened()
        except OSError as error:
            raise AuditLogError(
                f"the audit log {self._path} cannot be written: {error.strerror}; give the "
                "server's user the right to, or name another file (audit_log)"
            ) from error
        self._thread.start()
        self.note("started")

    def note(self, event: str, **fields: object) -> None:
        """Notes an event. Never waits; while the log is not running, nothing is noted.

        Args:
            event: What happened.
            fields: What else is to be known; JSON's types, which are hashable.
        """
        if not self._thread.is_alive():
            return
        key: Fields = (("event", event), *fields.items())
        with self._lock:
            if key in self._repeats:
                self._repeats[key] += 1
                return
            if len(self._repeats) < KINDS_MAX:
                self._repeats[key] = 0
        self._queue((("time", self._now()), *key))

    def stop(self) -> None:
        """Ends once what waits is written; waits for that `STOP_TIMEOUT_S`."""
        if not self._thread.is_alive():
            return
        self._flush_repeats()
        stopped: Fields = (("time", self._now()), ("event", "stopped"))
        with self._lock:
            self._queued_bytes += _nbytes(stopped)
        with suppress(queue.Full):
            self._lines.put(stopped, timeout=STOP_TIMEOUT_S)
            self._lines.put(None, timeout=STOP_TIMEOUT_S)
        self._thread.join(STOP_TIMEOUT_S)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")

    def _queue(self, fields: Fields) -> None:
        nbytes = _nbytes(fields)
        with self._lock:
            has_room = self._queued_bytes + nbytes <= self._queue_bytes_max
            if has_room:
                try:
                    self._lines.put_nowait(fields)
                    self._queued_bytes += nbytes
                except queue.Full:
                    has_room = False
        if not has_room:
            self._lose(1)

    def _lose(self, count: int) -> None:
        with self._lock:
            if not self._untold:
                log.error("lines of the audit log are lost", path=str(self._path))
            self.lost_lines += count
            self._untold += count

    def _flush_repeats(self) -> None:
        with self._lock:
            repeats, self._repeats = self._repeats, {}
        for key, count in repeats.items():
            if count:
                self._queue((("time", self._now()), *key, ("times", count)))

    # In the thread.

    def _run(self) -> None:
        is_last, period_began = False, time.monotonic()
        while not is_last:
            batch: list[Fields] = []
            try:
                fields = self._lines.get(timeout=PERIOD_S)
                while fields is not None:
                    batch.append(fields)
                    fields = self._lines.get_nowait()
                is_last = True
            except queue.Empty:
                pass
            if batch:
                nbytes = sum(map(_nbytes, batch))
                self._write(batch)
                with self._lock:
                    self._queued_bytes -= nbytes
            if time.monotonic() - period_began >= PERIOD_S:
                period_began = time.monotonic()
                self._flush_repeats()
        os.close(self._descriptor)

    def _write(self, batch: list[Fields]) -> None:
        with self._lock:
            untold = self._untold
        if untold:
            batch.insert(0, (("time", self._now()), ("event", "lines lost"), ("times", untold)))
        written_count = 0
        try:
            self._find_file()
            for fields in batch:
                self._append(msgspec.json.encode({"number": self._number + 1, **dict(fields)}))
                self._number += 1
                written_count += 1
            os.fsync(self._descriptor)
        except OSError as error:
            log.error("the audit log cannot be written", path=str(self._path), error=str(error))
        with self._lock:
            if untold and written_count:
                self._untold -= untold
        if missing_count := len(batch) - max(written_count, bool(untold)):
            self._lose(missing_count)

    def _find_file(self) -> None:
        """Opens the file again if somebody has removed it, or put another one in its place."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        log.error("the audit log was removed; writing a new one", path=str(self._path))
        self._replace_descriptor()
        self._append(
            msgspec.json.encode({"number": 0, "time": self._now(), "event": "file was removed"})
        )

    def _append(self, line: bytes) -> None:
        if os.fstat(self._descriptor).st_size + len(line) > self._file_bytes_max:
            self._rotate()
        # What a full disk has left of a line must not become the beginning of this one.
        view = memoryview(b"\n" * self._is_torn + line + b"\n")
        self._is_torn = True
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._is_torn = False

    def _rotate(self) -> None:
        for number in range(self._files_max - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._full(number).rename(self._full(number + 1))
        self._path.rename(self._full(1))
        self._replace_descriptor()

    def _full(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _replace_descriptor(self) -> None:
        full_descriptor, self._descriptor = self._descriptor, self._opened()
        os.close(full_descriptor)

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _MODE)


def _nbytes(fields: Fields) -> int:
    """The memory that a line takes while it waits, about."""
    return _LINE_BYTES + sum(sys.getsizeof(value) for _, value in fields if isinstance(value, str))
