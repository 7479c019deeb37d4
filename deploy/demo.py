"""The demonstration: a Spark job writes, three consumers stream, and all contents are compared.

The Spark job (`demo_job.py`) writes the 336,776 flights that left New York in 2013, each under its
aircraft's tail number and in the order of departure: the newest flight of each aircraft stays.
Three consumers keep a copy: one from the start, one that joins half-way, and one that is slow.
Half-way the server is stopped and started again on its data. At the end a barrier tells each
consumer that it has everything. Then the copies, the server's contents and the file are compared
byte by byte, and Spark adds up what the stream holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import trio

from deploy.flights import MONTHS, Flights, read_flights, totals_by_carrier, unpack_flights
from upr_protocol.client import ChunkReceived, SnapshotEnd, connect, consume
from upr_protocol.errors import UprError
from upr_protocol.ids import Operation
from upr_protocol.limits import WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MIN

BUCKET: Final = "aircraft"
PARTITIONS: Final = 64

SLOW_PAUSE_S: Final = 0.01
"""How long the slow consumer works on each chunk."""

TIMEOUT_S: Final = 60.0
"""How long a process may take to start or to end."""


class DemoError(Exception):
    """The demonstration cannot go on, or its contents differ."""


def say(text: str) -> None:
    """Prints at once, also where the output is a pipe."""
    print(text, flush=True)


# The three consumers.


@attrs.define(eq=False)
class Follower:
    """A consumer that keeps a copy of the bucket in a dict."""

    name: str
    pause_s: float = 0.0
    window_bytes: int = WINDOW_BYTES_DEFAULT
    contents: dict[bytes, bytes] = attrs.field(factory=dict)
    ends: dict[int, int] = attrs.field(factory=dict)
    mutations: int = 0
    nbytes: int = 0
    snapshots: int = 0
    seconds: float = 0.0
    barrier_s: float = 0.0
    _state: str = "joins half-way"

    @property
    def state(self) -> str:
        """How far it is, in a few words."""
        return self._state or f"{self.mutations:,}"

    async def follow(self, url: str, written: trio.Event) -> None:
        """Streams the bucket until everything that was `written` has come."""
        began = time.monotonic()
        self._state = ""
        async with (
            consume(url, identity=f"demo:{self.name}", window_bytes=self.window_bytes) as consumer,
            trio.open_nursery() as nursery,
        ):

            async def stop_behind_a_barrier() -> None:
                await written.wait()
                sent_at = time.monotonic()
                barrier = await consumer.barrier()
                self.barrier_s = time.monotonic() - sent_at
                self.ends = {int(partition): int(end) for partition, end in barrier.ends.items()}
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop_behind_a_barrier)
            async for event in consumer:
                if isinstance(event, ChunkReceived):
                    self._apply(event)
                    await trio.sleep(self.pause_s)
                elif isinstance(event, SnapshotEnd):
                    self.snapshots += 1
        self.seconds = time.monotonic() - began
        self._state = "complete"

    def _apply(self, event: ChunkReceived) -> None:
        chunk = event.chunk
        self.mutations += chunk.count
        self.nbytes += chunk.nbytes
        for operation, key, value in zip(
            chunk.operations, chunk.keys(), chunk.values(), strict=True
        ):
            if operation == Operation.SET:
                self.contents[key] = value
            else:
                self.contents.pop(key, None)


# The server and the Spark job, each a process.


@asynccontextmanager
async def process(
    *command: str, stdin: int = subprocess.DEVNULL, stderr: int | None = None
) -> AsyncIterator[trio.Process]:
    """A Python process that ends, with all that it started, at the end of the context."""
    child = await trio.lowlevel.open_process(
        (sys.executable, *command),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        # Ctrl-C is for this process, which ends the others in order.
        start_new_session=True,
        # UPR_* are settings of the user's own servers.
        env={name: value for name, value in os.environ.items() if not name.startswith("UPR_")},
    )
    try:
        yield child
    finally:
        with trio.CancelScope(shield=True):
            child.terminate()
            with trio.move_on_after(TIMEOUT_S):
                await child.wait()
            child.kill()
            await child.wait()
            # Spark's Java notices late that nobody needs it any more.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


async def read_line(child: trio.Process) -> bytes:
    """The next line that a process prints; empty when it has ended."""
    assert child.stdout is not None
    line = bytearray()
    while not line.endswith(b"\n"):
        # A byte at a time: what follows the line belongs to the next call.
        if not (byte := await child.stdout.receive_some(1)):
            return b""
        line += byte
    return bytes(line)


@asynccontextmanager
async def server(folder: Path, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """A server on the data in `folder`; gives the address on which it listens."""
    main = "from upr_server.cli import main; main()"
    options = ("--listen", listen, "--data-dir", str(folder), "--log-level", "warning")
    async with process("-c", main, "serve", *options) as child:
        line = b""
        with trio.move_on_after(TIMEOUT_S):
            line = await read_line(child)
        if not line.startswith(b"listening on "):
            raise DemoError("the server did not start; its message stands above")
        yield line.decode().removeprefix("listening on ").strip()


@attrs.frozen
class SparkJob:
    """The Spark job: it takes a command a line, and answers each with a line."""

    child: trio.Process
    log_path: Path

    @classmethod
    @asynccontextmanager
    async def started(cls, *command: str, folder: Path) -> AsyncIterator[SparkJob]:
        """Starts it. Its first answer comes when it is ready."""
        log_path = folder / "spark.log"
        with log_path.open("wb") as log:
            async with process(*command, stdin=subprocess.PIPE, stderr=log.fileno()) as child:
                yield cls(child, log_path)

    async def ask(self, **command: str) -> Any:
        """Sends a command, and waits for its answer.

        Raises:
            DemoError: The job ended instead.
        """
        assert self.child.stdin is not None
        # A job that has ended shows in its answer.
        with suppress(trio.BrokenResourceError):
            await self.child.stdin.send_all(msgspec.json.encode(command) + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        """Its next answer.

        Raises:
            DemoError: The job ended instead.
        """
        if line := await read_line(self.child):
            return msgspec.json.decode(line)
        code = await self.child.wait()
        log = [line for line in self.log_path.read_text(errors="replace").splitlines() if line]
        # UPR's own sentence is plainer than the end of Java's traceback.
        reasons = [line for line in log if "[UPR_" in line] or log or ["it does not say why"]
        raise DemoError(f"the Spark job ended with code {code}: {reasons[-1].strip()}")


# What is shown meanwhile.


POLL_INTERVAL_S: Final = 0.05
"""How often the server is asked how much it has taken in: half-way is soon over."""


async def show_progress(url: str, total: int, followers: list[Follower], half: trio.Event) -> None:
    """Shows each second how far the job and the consumers are, for ever; sets `half` half-way."""
    next_line_at = 0.0
    while True:
        # The server is away for a moment, half-way.
        with suppress(UprError, OSError):
            async with connect(url, identity="demo:progress") as client:
                while True:
                    accepted = sum(row.high_seq for row in await client.seqnos())
                    if accepted * 2 >= total:
                        half.set()
                    if time.monotonic() >= next_line_at:
                        next_line_at = time.monotonic() + 1
                        states = [f"{follower.name} {follower.state}" for follower in followers]
                        share = f"Spark {accepted:>7,} flights {accepted / total:4.0%}"
                        say(f"  {'  |  '.join([share, *states])}")
                    await trio.sleep(POLL_INTERVAL_S)
        await trio.sleep(POLL_INTERVAL_S)


# The whole.


def check_java() -> None:
    """Looks where Spark will look for Java.

    Raises:
        DemoError: It is not there.
    """
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=os.path.join(home, "bin") if home else None) is None:
        raise DemoError(
            "Spark needs Java 17 or newer: install it (openjdk-17-jre-headless on Debian), or run "
            "`make demo`; JAVA_HOME names a Java that is not on the PATH"
        )


async def demo(months: int) -> None:
    """Runs the demonstration with the flights of so many months.

    Raises:
        DemoError: Contents differ, or something is missing.
    """
    began = time.monotonic()
    check_java()
    with tempfile.TemporaryDirectory(prefix="upr-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        path = unpack_flights(folder, months)
        job_script = str(Path(__file__).with_name("demo_job.py"))
        async with SparkJob.started(job_script, str(path), name, folder=folder) as job:
            say("Starting Spark, and reading the flights that left New York in 2013 …")
            flights = await trio.to_thread.run_sync(read_flights, path, abandon_on_cancel=True)
            say(
                f"  {flights.rows:,} flights. {flights.rows - flights.published:,} name no aircraft"
                f" and are left out.\n  {flights.published:,} remain, of {len(flights.newest):,}"
                " aircraft; of each, the newest flight stays."
            )
            await job.answer()
            await stream_and_compare(job, flights, folder / "data")
    say(f"\nAll contents are equal. {time.monotonic() - began:.1f} s in all.")


async def stream_and_compare(job: SparkJob, flights: Flights, data: Path) -> None:
    """Streams the flights through a server that is restarted half-way, and compares contents."""
    early, late = Follower("from the start"), Follower("from half-way")
    slow = Follower("slow", SLOW_PAUSE_S, WINDOW_BYTES_MIN)
    followers = [early, late, slow]
    half, written = trio.Event(), trio.Event()
    async with AsyncExitStack() as running:
        address = await running.enter_async_context(server(data))
        url = f"upr://{address}/{BUCKET}"
        async with connect(f"upr://{address}", identity="demo:setup") as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        say(f"\nStreaming them through {url} …")
        began = time.monotonic()
        async with trio.open_nursery() as watching:
            watching.start_soon(show_progress, url, flights.published, followers, half)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(early.follow, url, written)
                nursery.start_soon(slow.follow, url, written)

                async def restart_half_way() -> None:
                    await half.wait()
                    stopped_at = time.monotonic()
                    await running.aclose()
                    await running.enter_async_context(server(data, address))
                    away_s = time.monotonic() - stopped_at
                    say(f"  The server was stopped and started again; away for {away_s:.1f} s.")
                    nursery.start_soon(late.follow, url, written)

                nursery.start_soon(restart_half_way)
                if await job.ask(write=url) != flights.published:
                    raise DemoError("Spark wrote another number of flights than the file has")
                seconds = time.monotonic() - began
                written.set()
            watching.cancel_scope.cancel()
        report(flights, seconds, followers)
        await compare(flights, followers, url)
        say("\nSpark adds up what the stream holds now …")
        compare_totals(totals_by_carrier(flights.newest), await job.ask(add_up=url))


def report(flights: Flights, seconds: float, followers: list[Follower]) -> None:
    """Prints what each of them did."""
    say(
        f"\n{flights.published:,} flights ({flights.nbytes / 1e6:,.0f} MB) were written by Spark, "
        f"and are on disk, after {seconds:.1f} s: {flights.published / seconds:,.0f} a second.\n\n"
        "  consumer         snapshots  mutations    MB  a second         saved    barrier"
    )
    for follower in followers:
        saved = flights.published - follower.mutations
        say(
            f"  {follower.name:<15} {follower.snapshots:>10,} {follower.mutations:>10,}"
            f" {follower.nbytes / 1e6:>5.1f} {follower.mutations / follower.seconds:>9,.0f}"
            f" {saved:>8,} {saved / flights.published:>4.0%} {follower.barrier_s:>8.2f} s"
        )
    say(
        "\n  saved: mutations that deduplication kept from being sent, because a newer flight of\n"
        "  the same aircraft had come. barrier: how long after the job's end the consumer knew\n"
        "  that it had everything."
    )


async def compare(flights: Flights, followers: list[Follower], url: str) -> None:
    """Compares the server's contents and the consumers' copies with the file.

    Raises:
        DemoError: They differ.
    """
    async with connect(url, identity="demo:reader") as client:
        ends = {int(row.partition): int(row.high_seq) for row in await client.seqnos()}
        items = await client.get_many(sorted(flights.newest))
    if sum(ends.values()) != flights.published:
        raise DemoError(f"the server gave {sum(ends.values()):,} sequence numbers")
    say("\nThe newest flight of each aircraft, compared byte by byte with the file:")
    compare_contents(flights.newest, "the server", {i.key: i.value for i in items if i is not None})
    for follower in followers:
        compare_contents(flights.newest, f"consumer '{follower.name}'", follower.contents)
        if follower.ends != ends:
            raise DemoError(f"the barrier of '{follower.name}' is not at the server's numbers")


def compare_contents(expected: dict[bytes, bytes], name: str, contents: dict[bytes, bytes]) -> None:
    """Prints how many keys differ.

    Raises:
        DemoError: Some do.
    """
    keys = expected.keys() | contents.keys()
    different = sum(expected.get(key) != contents.get(key) for key in keys)
    say(f"  {name:<28} {len(contents):>6,} aircraft, {different:,} differ")
    if different:
        raise DemoError(f"the contents of {name} differ from the file's")


def compare_totals(expected: dict[str, list[int]], totals: dict[str, list[int]]) -> None:
    """Prints Spark's totals of the five largest carriers, and compares all with the file's.

    Raises:
        DemoError: Some differ.
    """
    say("  carrier    aircraft        miles      minutes in the air, of their newest flights")
    by_size = sorted(totals, key=lambda carrier: -totals[carrier][0])
    for carrier in by_size[:5]:
        aircraft, miles, minutes = totals[carrier]
        say(f"  {carrier:<10} {aircraft:>8,} {miles:>12,} {minutes:>12,}")
    carriers = expected.keys() | totals.keys()
    different = sorted(c for c in carriers if expected.get(c) != totals.get(c))
    say(f"  … of {len(carriers)} carriers; {len(different)} differ from the file's totals")
    if different:
        raise DemoError(f"Spark's totals differ from the file's: {', '.join(different)}")


async def until_signal(months: int) -> int:
    """Runs the demonstration with the flights of so many months; Ctrl-C and SIGTERM cancel it.
    Returns the exit code."""
    code = 0
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                nonlocal code
                code = 128 + await anext(signals)
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop)
            await demo(months)
            nursery.cancel_scope.cancel()
    return code


def main() -> int:
    """Runs the demonstration; returns the exit code."""
    arguments = argparse.ArgumentParser(
        prog="python -m deploy.demo",
        description="A Spark job writes flights, consumers stream them, and all contents are "
        "compared.",
    )
    arguments.add_argument(
        "--months",
        type=int,
        choices=range(1, MONTHS + 1),
        default=MONTHS,
        metavar="NUMBER",
        help="the flights of so many months, from January on (default: %(default)s)",
    )
    months = arguments.parse_args().months
    code = 1
    try:
        code = trio.run(until_signal, months)
    except* (DemoError, UprError, FileNotFoundError) as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        print(f"demo: {error}", file=sys.stderr)
    if code > 1:
        print("\nstopped", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
