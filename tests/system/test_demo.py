"""The demonstration: as `make demo` runs it, and what it says when something is wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from deploy.demo import DemoError, SparkJob, compare_contents, compare_totals
from tests.kit.effort import effort
from tests.kit.process import ROOT, environment, eventually
from tests.spark.class_archive import JAVA_OPTIONS

DEMO: Final = (sys.executable, "-m", "deploy.demo")
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

    async def server_running(self) -> dict[int, str]:
        """Waits until its server is there; gives the command lines of its processes by ID."""
        await eventually(
            lambda: any("upr_server" in line for line in self.children().values()),
            "its server is there",
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


@asynccontextmanager
async def demo(*words: str, **settings: str) -> AsyncIterator[Demo]:
    process = await trio.lowlevel.open_process(
        (*DEMO, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT), SPARK_SUBMIT_OPTS=JAVA_OPTIONS, **settings),
    )
    running = Demo(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.listen)
            yield running
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def test_all_contents_are_equal_at_its_end() -> None:
    async with demo(*effort(("--months", "2"), ())) as running:
        assert await running.ended() == 0, running.shown
    for sentence in (
        *effort(
            (
                "51,955 flights. 601 name no aircraft and are left out",
                "51,354 remain, of 3,424 aircraft",
                "51,354 flights (17 MB) were written by Spark, and are on disk",
            ),
            (
                "336,776 flights. 2,512 name no aircraft and are left out",
                "334,264 remain, of 4,043 aircraft",
                "334,264 flights (111 MB) were written by Spark, and are on disk",
            ),
        ),
        "The server was stopped and started again",
        *(
            f"{consumer_name:<26}{effort('3,424', '4,043'):>9} aircraft, 0 differ"
            for consumer_name in (
                "the server",
                "consumer 'from the start'",
                "consumer 'from half-way'",
                "consumer 'slow'",
            )
        ),
        "of 16 carriers; 0 differ from the file's totals",
        "All contents are equal.",
    ):
        assert sentence in running.shown
    assert "WARN" not in running.shown


async def test_ctrl_c_leaves_no_process_behind() -> None:
    async with demo() as running:
        children = await running.server_running()
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 128 + signal.SIGINT, running.shown
        assert running.shown.endswith("\nstopped\n")
        assert "Traceback" not in running.shown
        # Spark's workers end when they notice that Java is gone.
        await eventually(lambda: gone(children), "its processes are gone")


async def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    async with demo(JAVA_HOME=str(tmp_path)) as running:
        assert await running.ended() == 1, running.shown
        assert running.shown.startswith("demo: Spark needs Java 17 or newer: install it")


async def test_the_reason_of_a_job_that_ends_is_in_the_error(tmp_path: Path) -> None:
    dies = "import sys; print('[UPR_NO_BUCKET] no such bucket\\nat java', file=sys.stderr); exit(3)"
    async with SparkJob.started("-c", dies, folder=tmp_path) as job:
        with pytest.raises(DemoError, match=r"code 3: \[UPR_NO_BUCKET\] no such bucket$"):
            await job.ask(write="upr://nowhere")


@pytest.mark.parametrize(
    "contents",
    [{b"N1": b"{1}"}, {b"N1": b"{1}", b"N2": b"{1}"}, {b"N1": b"{1}", b"N2": b"{2}", b"N3": b""}],
)
def test_contents_that_differ_are_an_error(contents: dict[bytes, bytes]) -> None:
    newest = {b"N1": b"{1}", b"N2": b"{2}"}
    compare_contents(newest, "the server", dict(newest))
    with pytest.raises(DemoError, match="the contents of the server differ"):
        compare_contents(newest, "the server", contents)


def test_totals_that_differ_are_an_error() -> None:
    totals = {"AA": [2, 300, 50], "UA": [1, 100, 20]}
    compare_totals(totals, dict(totals))
    for wrong in (
        {"AA": [2, 300, 50]},
        {**totals, "UA": [1, 100, 21]},
        {**totals, "B6": [1, 1, 1]},
    ):
        with pytest.raises(DemoError, match=r"Spark's totals differ from the file's: (UA|B6)"):
            compare_totals(totals, wrong)
