"""The demonstration, as `make demo` runs it: to its end, to that of one of its processes, to
Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from deploy.demo import DemoError, Report, Watched, compare, compare_totals
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
        """Its processes, and theirs: their command lines by ID."""
        return dict(_children_of(self.process.pid))

    async def streaming(self) -> dict[int, str]:
        """Waits until its server and consumers are there; gives their command lines by ID."""
        await eventually(
            lambda: any('"slow"' in line for line in self.children().values()),
            "the last of its processes is there",
            TIMEOUT_S,
        )
        return self.children()


def _children_of(pid: int) -> Iterator[tuple[int, str]]:
    # Each stands with the thread that started it; what has ended meanwhile has none.
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, thread.read_text().split()):
                yield child, Path(f"/proc/{child}/cmdline").read_text()
                yield from _children_of(child)


def gone(children: dict[int, str]) -> bool:
    """Whether none of these processes is at work any more."""
    return not any(map(_is_running, children))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def all_gone(children: dict[int, str]) -> None:
    """Waits until none is: Spark's workers end when they notice that Java is gone."""
    await eventually(lambda: gone(children), "its processes are gone")


@asynccontextmanager
async def demo(**settings: str) -> AsyncIterator[Demo]:
    process = await trio.lowlevel.open_process(
        DEMO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT), **settings),
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
        "334,264 flights (111 MB) were written by Spark, and are on disk",
        "Half-way the server was stopped, and started again",
        "It has given out 334,264 sequence numbers",
        "consumer 'from the start'     4,043 aircraft, 0 differ",
        "consumer 'from half-way'      4,043 aircraft, 0 differ",
        "consumer 'slow'               4,043 aircraft, 0 differ",
        "of 16 carriers; 0 differ from what the file says",
        "All contents are equal.",
    ):
        assert said in found.shown
    assert "WARN" not in found.shown


async def test_a_process_that_is_killed_is_missed() -> None:
    line, said = "demo_job.py", "demo: the Spark job ended too early, with code -9"
    async with demo() as found:
        children = await found.streaming()
        victim = next(pid for pid, command in children.items() if line in command)
        os.kill(victim, signal.SIGKILL)
        assert await found.ended() == 1, found.shown
        assert said in found.shown
        await all_gone(children)


async def test_without_java_it_says_what_to_do(tmp_path: Path) -> None:
    async with demo(JAVA_HOME=str(tmp_path)) as found:
        assert await found.ended() == 1, found.shown
        assert found.shown.startswith("demo: Spark needs Java 17 or newer, and there is none: ")


async def test_stopped_it_leaves_nothing_behind() -> None:
    number = signal.SIGINT
    async with demo() as found:
        children = await found.streaming()
        found.process.send_signal(number)
        assert await found.ended() == 128 + number, found.shown
        assert found.shown.endswith("\nstopped\n")
        assert "Traceback" not in found.shown
        await all_gone(children)


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


def test_sums_that_differ_are_told() -> None:
    sums = {"AA": [2, 300, 50], "UA": [1, 100, 20]}
    compare_totals(sums, dict(sums))
    for wrong in ({"AA": [2, 300, 50]}, {**sums, "UA": [1, 100, 21]}, {**sums, "B6": [1, 1, 1]}):
        with pytest.raises(DemoError, match=r"Spark's sums differ from the file's: (UA|B6)"):
            compare_totals(sums, wrong)
