"""Writing the log without ever waiting for whoever reads it, and without end.

Strangers decide how much is logged: each damaged connection is a line. And a pipe that nobody reads
takes no more after some hundred lines.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final

import structlog

QUEUE_LINES_MAX: Final = 10_000
"""Lines that wait for the log's reader, a few MiB. Further lines are dropped, and counted."""

EXIT_TIMEOUT_S: Final = 2.0
"""How long the process waits at its end for the log's reader."""

LINES_PER_PERIOD: Final = 20
PERIOD_S: Final = 1.0
"""Of one kind of event so many are written in a period; the others are counted."""

_KINDS_MAX: Final = 1000
"""Kinds that are counted; texts of libraries may have numbers in them."""

_LEFT_OUT: Final = "log lines of a kind left out"
_DROPPED: Final = "log lines dropped; standard error is read too slowly"


class LogWriter(logging.Handler):
    """Writes lines in a thread of its own.

    Args:
        descriptor: Where to write.
        queue_lines_max: How many lines may wait.

    Attributes:
        dropped_lines: Lines that were dropped since the last that was written.
    """

    def __init__(self, descriptor: int, queue_lines_max: int = QUEUE_LINES_MAX) -> None:
        super().__init__()
        self.dropped_lines = 0
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(queue_lines_max)
        self._on_tick: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)

    def start(self, on_tick: Callable[[], None]) -> None:
        """Begins to write. What waits at the process's end is written then, if it goes quickly.

        Args:
            on_tick: Called about once a second, in the thread.
        """
        self._on_tick = on_tick
        self._thread.start()
        atexit.register(self.stop)

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a line, or drops it."""
        try:
            self._lines.put_nowait(self.format(record).encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            self.dropped_lines += 1
        except Exception:  # noqa: BLE001  # a line must not end the task that logs it
            self.handleError(record)

    def stop(self) -> None:
        """Ends the thread once it has written what waits; waits for that `EXIT_TIMEOUT_S`."""
        try:
            self._lines.put(None, timeout=EXIT_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(EXIT_TIMEOUT_S)

    def _run(self) -> None:
        ticked_at = time.monotonic()
        is_last = False
        while not is_last:
            try:
                line = self._lines.get(timeout=PERIOD_S)
            except queue.Empty:
                line = b""
            is_last = line is None
            if line:
                # Not by `sys.stderr`: its lock, held while the reader sleeps, would hold up others.
                _write(self._descriptor, line)
            if time.monotonic() - ticked_at >= PERIOD_S or is_last:
                ticked_at = time.monotonic()
                self._on_tick()
                self._report_dropped()
        while not self._lines.empty():
            _write(self._descriptor, self._lines.get_nowait() or b"")

    def _report_dropped(self) -> None:
        if self.dropped_lines:
            count, self.dropped_lines = self.dropped_lines, 0
            structlog.get_logger(__name__).warning(_DROPPED, lines=count)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        pass  # nobody is left to be told


class RepeatLimit:
    """A processor of structlog that lets through some events of a kind in a period, and counts the
    others. A kind is the event's text. Errors with tracebacks are limited like all others.

    Args:
        clock: Seconds of any monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By kind: when its period began, and how many came in it. The thread reads it, too.
        self._kinds: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def __call__(
        self, _logger: object, _method: str, event_dict: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Passes an event on, or raises `DropEvent`."""
        kind = str(event_dict.get("event"))
        if kind in (_LEFT_OUT, _DROPPED):
            return event_dict
        with self._lock:
            now = self._clock()
            began_at, count = self._kinds.get(kind, (now, 0))
            if count == 0 and len(self._kinds) >= _KINDS_MAX:
                kind, (began_at, count) = "", self._kinds.get("", (now, 0))
            self._kinds[kind] = began_at, count + 1
        if count >= LINES_PER_PERIOD:
            raise structlog.DropEvent
        return event_dict

    def report(self) -> None:
        """Logs how many of each kind were left out in the periods that are over."""
        with self._lock:
            now = self._clock()
            over = {
                kind: count
                for kind, (began_at, count) in self._kinds.items()
                if now - began_at >= PERIOD_S
            }
            for kind in over:
                del self._kinds[kind]
        for kind, count in over.items():
            if count > LINES_PER_PERIOD:
                structlog.get_logger(__name__).warning(
                    _LEFT_OUT, kind=kind, lines=count - LINES_PER_PERIOD
                )
