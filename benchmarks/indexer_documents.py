"""The indexer and generated documents of 1 kB: `python -m benchmarks.indexer_documents`.

It tells, in one run: documents a second that three indexes are built with, beside the bare stream's
mutations and SQLite with the same indexes; what scans take at each consistency while a writer
writes as fast as it can, with `--rate`, or no further ahead of the indexes than `--ahead`; and what
the running indexes, a live consumer and scans notice while one index more is built. With
`--worker-counts 1,2,4` all of it is repeated for each number of workers, and SQLite is measured
once. Further options go to the indexer.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_double, c_longlong
from itertools import islice
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Final, cast

import attrs

from benchmarks.kit.indexers import (
    INDEXER,
    POLL_S,
    SERVER,
    ProcessorTimes,
    quantiles,
    resident,
    sqlite_rate,
    started,
    stream_rate,
    until_ready,
)
from upr_protocol.chunk import Mutation
from upr_protocol.client import (
    BlockingClient,
    BlockingConsumer,
    ChunkReceived,
    Failure,
    IndexClient,
    IndexerError,
    WriteResult,
)
from upr_protocol.ids import Operation

PARTITIONS: Final = 64
BATCH: Final = 2000
DOCUMENT_BYTES: Final = 1000
TIMEOUT_S: Final = 30.0
"""How long a scan waits to be fresh. Beside a writer that is faster it waits in vain."""

ANY_SCANS: Final = 5
"""Scans at `any` that follow each scan that waits."""

CREDIT_TIMEOUT_S: Final = 120.0
"""How long a write waits where the server's memory is full, as the disk is slower."""

DISK_BYTES: Final = 5000
"""What a document takes of the disk at most: at the server, in SQLite, and in four indexes."""

CITIES: Final = 1000
MAKERS: Final = 100_000
FIRST: Final = {
    "indexes": {
        "city": {"key": ["city"]},
        "city_n": {"key": ["city", "n"]},
        "maker": {"key": ["maker.name"]},
    }
}
ADDED: Final = {"indexes": {"n": {"key": ["n"]}}}
SQLITE: Final = (("$.city",), ("$.city", "$.n"), ("$.maker.name",))
NAMES: Final = {"first/city", "first/city_n", "first/maker"}
SPAWN: Final = multiprocessing.get_context("spawn")
STARTED_AT: Final = time.monotonic()


def document(number: int, version: int = 0) -> tuple[bytes, bytes]:
    """Key and value of a document. Each version of it stands elsewhere in every index."""
    # A multiplier that is prime: neighbours have other cities and makers.
    drawn = (number * 2_654_435_761 + version * 40_503) % (1 << 32)
    head = (
        f'{{"city":"city-{drawn % CITIES:04}","n":{drawn % 999_983},"maker":{{"name":"maker-'
        f'{drawn % MAKERS:06}","country":"x"}},"at":{time.time():.6f},"text":"'
    )
    return b"document-%08d" % number, (head.ljust(DOCUMENT_BYTES - 2, "t") + '"}').encode()


def documents(count: int, version: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """So many documents."""
    return (document(number, version) for number in range(count))


Results = Sequence[WriteResult | Failure]


def publish(
    url: str, rows: Iterator[tuple[bytes, bytes]], on_batch: Callable[[Results], bool]
) -> None:
    """Writes documents, until they end or `on_batch`, called with the results of each batch, says
    no.

    Raises:
        SystemExit: A document could not be written.
    """
    with BlockingClient(url, credit_timeout_s=CREDIT_TIMEOUT_S) as client:
        while batch := [Mutation(Operation.SET, *row) for row in islice(rows, BATCH)]:
            results = client.apply(batch)
            failure = next((row for row in results if isinstance(row, Failure)), None)
            if failure is not None:
                raise SystemExit(f"a document was not written: {failure}")
            if not on_batch(results):
                return


class AheadLimit:
    """Keeps a writer from being too far ahead of an index: after each batch it waits until the
    index has what was written so many documents before.

    Args:
        asking: The indexer.
        name: The index.
        documents: How far ahead the writer may be.
    """

    def __init__(self, asking: IndexClient, name: str, documents: int) -> None:
        self._asking = asking
        self._name = name
        self._documents = documents
        self._written: deque[Results] = deque()
        self._ahead = 0

    def add(self, results: Results) -> None:
        """A batch was written. Waits until the writer may go on."""
        self._written.append(results)
        self._ahead += len(results)
        while self._ahead > self._documents:
            oldest = self._written.popleft()
            newest = {row.partition: row for row in oldest if isinstance(row, WriteResult)}
            options: dict[str, Any] = {"consistency": "at_least", "written": list(newest.values())}
            self._asking.scan(self._name, limit=1, timeout_s=TIMEOUT_S, **options)
            self._ahead -= len(oldest)


@attrs.frozen
class Counters:
    """What the writer and the live consumer have done; shared with their processes.

    Attributes:
        written: Documents written.
        received: Documents that the consumer has received.
        late_s: The sum over chunks of how late their last document came.
        chunks: How many chunks came.
        latest_s: The latest of them.
        is_over: Not 0 when both are to end.
    """

    written: Synchronized[int] = attrs.field(factory=lambda: SPAWN.Value(c_longlong, 0))
    received: Synchronized[int] = attrs.field(factory=lambda: SPAWN.Value(c_longlong, 0))
    late_s: Synchronized[float] = attrs.field(factory=lambda: SPAWN.Value(c_double, 0.0))
    chunks: Synchronized[int] = attrs.field(factory=lambda: SPAWN.Value(c_longlong, 0))
    latest_s: Synchronized[float] = attrs.field(factory=lambda: SPAWN.Value(c_double, 0.0))
    is_over: Synchronized[int] = attrs.field(factory=lambda: SPAWN.Value(c_longlong, 0))


@attrs.frozen
class Writing:
    """How the writer writes.

    Attributes:
        url: The bucket.
        indexer: Where the indexer answers.
        count: How many documents there are, which it writes again and again.
        rate: How many a second at most; 0 for all it can.
        ahead: How many it may be ahead of an index; 0 for any number.
    """

    url: str
    indexer: str
    count: int
    rate: float
    ahead: int


def keep_writing(writing: Writing, counters: Counters) -> None:
    """Writes documents until all is over."""
    began = time.monotonic()
    with IndexClient(writing.indexer) as asking:
        limit = AheadLimit(asking, "first/city", writing.ahead)

        def on_batch(results: Results) -> bool:
            counters.written.value += len(results)
            if writing.rate:
                ahead_s = began + counters.written.value / writing.rate - time.monotonic()
                threading.Event().wait(max(0.0, ahead_s))
            if writing.ahead:
                limit.add(results)
            return not counters.is_over.value

        version = 0
        while not counters.is_over.value:
            version += 1
            publish(writing.url, documents(writing.count, version), on_batch)


def keep_receiving(url: str, counters: Counters) -> None:
    """Reads what is written from now on."""
    with BlockingConsumer(url, start="now") as consumer:
        consumer.connect()
        while not counters.is_over.value:
            event = consumer.next_event(timeout_s=0.5)
            if isinstance(event, ChunkReceived):
                counters.received.value += len(event.chunk)
                last = json.loads(bytes(event.chunk.values()[-1]))
                if "at" not in last:
                    # The scans' own document.
                    continue
                late_s = time.time() - last["at"]
                counters.late_s.value += late_s
                counters.chunks.value += 1
                counters.latest_s.value = max(counters.latest_s.value, late_s)


@contextmanager
def beside(writing: Writing) -> Iterator[Counters]:
    """A writer and a live consumer, as processes, for as long as the context."""
    counters = Counters()
    processes = [
        SPAWN.Process(target=keep_receiving, args=(writing.url, counters)),
        SPAWN.Process(target=keep_writing, args=(writing, counters)),
    ]
    for process in processes:
        process.start()
    try:
        while not counters.received.value:
            if not all(process.is_alive() for process in processes):
                raise SystemExit("the writer or the consumer has ended; it says why above")
            threading.Event().wait(POLL_S)
        yield counters
    finally:
        counters.is_over.value = 1
        for process in processes:
            process.join()


class Phase:
    """What happens in a phase of the run, and its report.

    Args:
        asking: The indexer.
        url: The bucket.
        counters: The writer's and the consumer's.
    """

    def __init__(self, asking: IndexClient, url: str, counters: Counters) -> None:
        self._asking = asking
        self._url = url
        self._counters = counters

    def run(self, title: str, goes_on: Callable[[], bool]) -> None:
        """Scans at each consistency in turn, and prints what it took and what else went on."""
        counters = self._counters
        counters.latest_s.value = 0.0
        began, before = time.monotonic(), self._figures()
        times = self._scans(goes_on)
        took_s, after = time.monotonic() - began, self._figures()
        written, received, applied, late_s, chunks = (
            new - old for new, old in zip(after, before, strict=True)
        )
        print(f"{title}, {took_s:.0f} s:")
        print(f"  written {written / took_s:,.0f} documents/s, and a client's own by scans")
        print(f"  running indexes applied {applied / took_s:,.0f} documents/s")
        print(
            f"  a live consumer received {received / took_s:,.0f} documents/s, "
            f"{late_s / max(1, chunks) * 1000:.0f} ms after they were made on average, the last "
            f"of them {counters.latest_s.value * 1000:.0f} ms"
        )
        for name, times_ms in times.items():
            late = sum(time_ms >= TIMEOUT_S * 1000 for time_ms in times_ms)
            refusals_text = f"; {late} of them were refused as not fresh" if late else ""
            print(f"  scans of 100, {name}: {quantiles(times_ms)}{refusals_text}")

    def _figures(self) -> tuple[float, ...]:
        counters = self._counters
        return (
            counters.written.value,
            counters.received.value,
            self._asking.status().get("applied", 0),
            counters.late_s.value,
            counters.chunks.value,
        )

    def _scans(self, goes_on: Callable[[], bool]) -> dict[str, list[float]]:
        options: dict[str, Any] = {"prefix": ["city-0007"], "limit": 100, "timeout_s": TIMEOUT_S}
        times: dict[str, list[float]] = {"any": [], "now": [], "at_least": []}
        with BlockingClient(self._url) as client:

            def read_own_write() -> None:
                write_result = client.set("own", '{"city": "own"}')
                began_at[0] = time.perf_counter()
                options_with = {**options, "consistency": "at_least", "written": [write_result]}
                self._asking.scan("first/city", **options_with)

            began_at = [0.0]
            kinds: dict[str, Callable[[], object]] = {
                "any": lambda: self._asking.scan("first/city", **options),
                "now": lambda: self._asking.scan("first/city", consistency="now", **options),
                "at_least": read_own_write,
            }
            while goes_on() or len(times["at_least"]) < 2:
                # Most are at `any`: they are short, and a percentile needs many.
                for name in ("now", *["any"] * ANY_SCANS, "at_least", *["any"] * ANY_SCANS):
                    began_at[0] = time.perf_counter()
                    try:
                        kinds[name]()
                    except IndexerError as error:
                        if error.code != "not_fresh":
                            raise
                    times[name].append((time.perf_counter() - began_at[0]) * 1000)
        return times


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Holds for so long from the first call."""
    ends_at: list[float] = []

    def goes_on() -> bool:
        if not ends_at:
            ends_at.append(time.monotonic() + seconds)
        return time.monotonic() < ends_at[0]

    return goes_on


def tell(text: str) -> None:
    """Prints a line, and how long the program has run."""
    print(f"[{time.monotonic() - STARTED_AT:5.0f} s] {text}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of writing before the build")
    parser.add_argument(
        "--build-seconds",
        type=float,
        default=300.0,
        help="of writing beside the build, at most: it ends when it has caught up",
    )
    parser.add_argument(
        "--rate", type=float, default=0.0, help="documents a second of the writer; 0 for all it can"
    )
    parser.add_argument(
        "--ahead",
        type=int,
        default=0,
        help="how many documents the writer may be ahead of an index; 0 for any number",
    )
    parser.add_argument(
        "--moved",
        type=int,
        help="how many documents to write once more, before the writing; all by default",
    )
    parser.add_argument(
        "--worker-counts",
        type=_counts,
        default=[],
        help="numbers of workers, with commas between; by default the indexer's own choice",
    )
    parser.add_argument("--data-dir", type=Path, help="where to keep everything meanwhile")
    parser.add_argument("--no-sqlite", action="store_true")
    options, indexer_options = parser.parse_known_args()
    # Each line when it is known: a run that is cut has printed what it has measured.
    cast("io.TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
    _check_disk(options.data_dir, options.documents)
    for count in options.worker_counts or [0]:
        in_workers = []
        if count:
            tell(f"--- workers: {count}")
            in_workers = ["--workers", str(count)]
        # A folder for each: the one before is removed, so that the disk need not have room for all.
        with tempfile.TemporaryDirectory(
            dir=options.data_dir, ignore_cleanup_errors=True
        ) as folder:
            _measure(Path(folder), options, [*in_workers, *indexer_options])
        options.no_sqlite = True


def _check_disk(folder: Path | None, document_count: int) -> None:
    """Makes the folder, and refuses a run for which it has no room.

    Raises:
        SystemExit: It has none.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder or tempfile.gettempdir()).free
    if free_bytes < document_count * DISK_BYTES:
        raise SystemExit(
            f"{document_count:,} documents take {document_count * DISK_BYTES / 1e9:.0f} GB of the "
            f"disk, and {free_bytes / 1e9:.0f} GB are free; name another --data-dir"
        )


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _measure(data: Path, options: argparse.Namespace, indexer_options: list[str]) -> None:
    count = options.documents
    with ExitStack() as stack:
        quiet = ("--log-level", "warning")
        server, address = stack.enter_context(
            started(
                SERVER,
                *("serve", "--listen", "127.0.0.1:0", "--data-dir", str(data / "server"), *quiet),
            )
        )
        url = f"upr://{address}/documents"
        with BlockingClient(f"upr://{address}/") as client:
            client.create_bucket("documents", PARTITIONS)
        tell(f"writing {count:,} documents")
        began = time.monotonic()
        publish(url, documents(count), lambda _results: True)
        tell(f"{count:,} documents written: {count / (time.monotonic() - began):,.0f}/s")
        tell(f"the bare stream: {stream_rate(url):,.0f} mutations/s")
        if not options.no_sqlite:
            tell("writing them into SQLite")
            rate, used_us = sqlite_rate(data, documents(count), SQLITE)
            tell(
                f"SQLite with the same three indexes: {rate:,.0f} documents/s, {used_us:.1f} µs of "
                "a processor a document"
            )
        indexer, where = stack.enter_context(
            started(
                INDEXER,
                *(url, "--listen", "127.0.0.1:0", "--data-dir", str(data / "indexer"), *quiet),
                *indexer_options,
            )
        )
        asking = stack.enter_context(IndexClient(where))
        tell("the indexer reads the stream")
        began = time.monotonic()
        # A slice that has much to do may have no figures.
        while asking.status().get("applied", 0) < count:
            threading.Event().wait(POLL_S)
        tell(f"stream read, no index yet: {count / (time.monotonic() - began):,.0f} documents/s")
        asking.create("first", FIRST)
        times, took_s = ProcessorTimes(indexer=indexer, server=server), until_ready(asking, NAMES)
        tell(
            f"three indexes built: {count / took_s:,.0f} documents/s, {took_s:.0f} s; "
            f"{times.of_documents(count)}"
        )
        times, began = ProcessorTimes(indexer=indexer, server=server), time.monotonic()
        moved = count if options.moved is None else min(options.moved, count)
        tell(f"writing {moved:,} documents once more")
        publish(url, documents(moved, -1), lambda _results: True)
        for name in NAMES:
            asking.count(name, consistency="now", timeout_s=300)
        took_s = time.monotonic() - began
        tell(
            f"{moved:,} written once more, moved in every index: {moved / took_s:,.0f} "
            f"documents/s, {took_s:.0f} s; {times.of_documents(moved)}"
        )
        _measure_load(url, where, asking, options)
        disk_bytes = sum(row["disk_bytes"] for row in asking.indexes())
        tell(
            f"memory of the indexer: {resident(indexer)} MiB; its four indexes: "
            f"{disk_bytes / 2**30:.1f} GiB"
        )
        for name in ("first/city", "added/n"):
            # One of them is the scans' own.
            entries = asking.count(name, consistency="now", timeout_s=300)
            if entries not in (count, count + 1):
                raise SystemExit(f"{name} has {entries} entries, not {count}")
        tell("compared: every index has an entry for each document")


def _measure_load(url: str, indexer: str, asking: IndexClient, options: argparse.Namespace) -> None:
    is_in_time = for_seconds(options.build_seconds)

    def is_building() -> bool:
        return is_in_time() and any(row["state"] != "ready" for row in asking.indexes())

    writing = Writing(url, indexer, options.documents, options.rate, options.ahead)
    with beside(writing) as counters:
        phase = Phase(asking, url, counters)
        phase.run("while a writer writes", for_seconds(options.seconds))
        began = time.monotonic()
        asking.create("added", ADDED)
        until_known(asking, "added/n")
        phase.run("while one index more is built beside that", is_building)
    if not is_in_time():
        tell("the writer was ended before the build had caught up")
    until_ready(asking, {"added/n"})
    took_s = time.monotonic() - began
    tell(f"one index built: {options.documents / took_s:,.0f} documents/s, {took_s:.0f} s")


def until_known(asking: IndexClient, name: str) -> None:
    """Waits until the indexer has heard of an index."""
    while all(row["name"] != name for row in asking.indexes()):
        threading.Event().wait(POLL_S)


if __name__ == "__main__":
    main()
