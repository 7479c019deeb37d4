"""A log that nobody reads holds up nobody, and strangers cannot fill it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import structlog

from tests.kit.process import ROOT, environment
from upr_server.runtime.log_writer import LINES_PER_PERIOD, PERIOD_S, LogWriter, RepeatLimit

FLOOD = """
import structlog
from upr_server.runtime import set_up_logging
set_up_logging("info", "json")
log = structlog.get_logger("upr_server.net")
for number in range(20_000):
    log.warning(f"event {number % 900}", number=number, filling="x" * 100)
print("done", flush=True)
"""


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("upr_server", logging.WARNING, "", 0, text, None, None)


def test_a_pipe_without_a_reader_does_not_block_logging() -> None:
    """A pipe takes 64 KiB; twenty thousand lines are more."""
    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == b"done\n"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()


def test_lines_that_find_no_room_are_counted_and_the_others_are_written() -> None:
    reading, writing = os.pipe()
    ticked = threading.Event()
    writer = LogWriter(writing, queue_lines_max=3)
    for index in range(5):
        writer.emit(record(f"line {index}"))
    assert writer.dropped_lines == 2
    writer.start(ticked.set)
    writer.stop()
    assert ticked.is_set()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read().splitlines() == [b"line 0", b"line 1", b"line 2"]


def test_events_of_a_kind_are_limited_in_a_period_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    limit = RepeatLimit(lambda: now)

    def passed(kind: str) -> bool:
        try:
            limit(None, "warning", {"event": kind})
        except structlog.DropEvent:
            return False
        return True

    assert [passed("garbage") for _ in range(100)].count(True) == LINES_PER_PERIOD
    assert passed("another")
    limit.report()
    assert capsys.readouterr().out == ""
    now = PERIOD_S
    limit.report()
    out = capsys.readouterr().out
    assert "left out" in out
    assert "garbage" in out
    assert str(100 - LINES_PER_PERIOD) in out
    assert passed("garbage")


def test_kinds_without_end_are_counted_as_one() -> None:
    limit = RepeatLimit(lambda: 0.0)
    passed_count = 0
    for index in range(5000):
        try:
            limit(None, "warning", {"event": f"text {index}"})
            passed_count += 1
        except structlog.DropEvent:
            pass
    assert passed_count < 1100


def test_waiting_log_lines_are_written_when_the_process_ends() -> None:
    program = (
        "import structlog; from upr_server.runtime import set_up_logging;"
        "set_up_logging('info', 'json'); log = structlog.get_logger('upr_server');"
        "[log.info('one kind', number=number) for number in range(30)]"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        check=True,
    )
    events = [json.loads(line) for line in finished.stderr.splitlines()]
    assert [event.get("number") for event in events] == list(range(LINES_PER_PERIOD))
