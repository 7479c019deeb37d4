"""The demonstration, as `make demo` runs it: to its end, to that of one consumer, to Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from deploy.demo import DemoError, Report, Watched, compare
from tests.kit.process import ROOT, environment, eventually

DEMO: Final = (sys.executable, str(ROOT / "deploy" / "demo.py"))
TIMEOUT_S: Final = 240

pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 30),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
]


class Demo:
    """A demonstration that is running."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.shown = ""
        self._said_all = trio.Event()

    async def listen(self) -> None:
        """Takes in what it shows, to its end."""
        assert self.process.stdout is not None
        while data := await self.process.stdout.receive_some():
            self.shown += data.decode(errors="replace")
        self._said_all.set()

    async def ended(self) -> int:
        """Waits for its end; gives its exit code."""
        with trio.fail_after(TIMEOUT_S):
            await self._said_all.wait()
            return await self.process.wait()

    def children(self) -> dict[int, str]:
        """Its processes: their command lines by ID."""
        # Each stands with the thread that started it.
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(child) for thread in threads for child in thread.read_text().split()]
        return {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}

    async def streaming(self) -> dict[int, str]:
        """Waits until its server and consumers are there; gives their command lines by ID."""
        await eventually(
            lambda: any('"slow"' in line for line in self.children().values()),
            "the last of its processes is there",
            TIMEOUT_S,
        )
        return self.children()


def gone(children: dict[int, str]) -> bool:
    """Whether none of these processes is there any more."""
    return not any(Path(f"/proc/{child}").exists() for child in children)


@asynccontextmanager
async def demo() -> AsyncIterator[Demo]:
    process = await trio.lowlevel.open_process(
        DEMO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    found = Demo(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.listen)
            yield found
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def test_it_ends_by_itself_with_equal_contents() -> None:
    async with demo() as found:
        assert await found.ended() == 0, found.shown
    for said in (
        "336,776 flights in",
        "2,512 name no aircraft and are left out",
        "334,264 remain, of 4,043 aircraft",
        "the server                    4,043 aircraft, 0 differ",
        "consumer 'from the start'     4,043 aircraft, 0 differ",
        "consumer 'from half-way'      4,043 aircraft, 0 differ",
        "consumer 'slow'               4,043 aircraft, 0 differ",
        "All contents are equal.",
    ):
        assert said in found.shown


async def test_a_consumer_that_is_killed_is_missed() -> None:
    async with demo() as found:
        children = await found.streaming()
        victim = next(pid for pid, line in children.items() if '"slow"' in line)
        os.kill(victim, signal.SIGKILL)
        assert await found.ended() == 1, found.shown
        assert "demo: the consumer 'slow' ended too early, with code -9" in found.shown
        assert gone(children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_stopped_it_leaves_nothing_behind(number: signal.Signals) -> None:
    async with demo() as found:
        children = await found.streaming()
        found.process.send_signal(number)
        assert await found.ended() == 128 + number, found.shown
        assert found.shown.endswith("\nstopped\n")
        assert "Traceback" not in found.shown
        assert gone(children)


def test_what_differs_is_told() -> None:
    newest = {b"N1": b"{1}", b"N2": b"{2}"}
    numbers = {0: 7}
    whole = Watched("whole", report=Report(ends=numbers), contents=dict(newest))
    compare(newest, dict(newest), [whole], numbers)
    for wrong in ({b"N1": b"{1}"}, {**newest, b"N2": b"{1}"}, {**newest, b"N3": b"{}"}):
        with pytest.raises(DemoError, match="contents differ: the server"):
            compare(newest, wrong, [whole], numbers)
        spoilt = Watched("spoilt", report=Report(ends=numbers), contents=wrong)
        with pytest.raises(DemoError, match="contents differ: consumer 'spoilt'"):
            compare(newest, dict(newest), [whole, spoilt], numbers)
    with pytest.raises(DemoError, match="not at the server's numbers"):
        compare(newest, dict(newest), [whole], {0: 8})
