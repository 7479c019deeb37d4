"""A server and an indexer as processes, SQLite beside them, and what they take."""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Final

from upr_protocol.client import BlockingConsumer, ChunkReceived, IndexClient

SERVER: Final = "from upr_server.cli import main; main()"
INDEXER: Final = "from upr_server.indexer.cli import main; main()"
POLL_S: Final = 0.05
"""The pause between two questions whether the indexer is done: answers take its time, too."""

SQLITE_BATCH: Final = 5000
"""Documents that SQLite commits at once."""


@contextmanager
def started(program: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and where it says that it listens."""
    with subprocess.Popen(
        (sys.executable, "-c", program, *options), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def until_ready(asking: IndexClient, names: set[str]) -> float:
    """Waits until indexes are built; how many seconds it took."""
    began = time.monotonic()
    while not names <= {row["name"] for row in asking.indexes() if row["state"] == "ready"}:
        threading.Event().wait(POLL_S)
    return time.monotonic() - began


def family(process: subprocess.Popen[str]) -> list[Path]:
    """The folders in `/proc` of a process and its workers."""
    own = Path(f"/proc/{process.pid}")
    # Each thread has its own children.
    children = [path.read_text().split() for path in own.glob("task/*/children")]
    return [own, *(Path(f"/proc/{child}") for child in chain.from_iterable(children))]


def resident(process: subprocess.Popen[str]) -> int:
    """MiB of memory of their own that a process and its workers have now."""
    return sum(
        int(line.split()[1]) // 1024
        for folder in family(process)
        for line in (folder / "status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )


def processor_s(process: subprocess.Popen[str]) -> float:
    """The processor time that a process and its workers have used, in seconds."""
    return sum(processor_times_s(process))


def processor_times_s(process: subprocess.Popen[str]) -> list[float]:
    """The processor time that a process and each of its workers have used, in seconds: the process
    first, and the workers as they were started."""
    own, *workers = family(process)
    times_s = []
    for folder in (own, *sorted(workers, key=lambda folder: int(folder.name))):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        times_s.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return times_s


class ProcessorTimes:
    """The processor time that processes use from now on, by process.

    Args:
        processes: The processes, by name. Workers that come or go meanwhile do not count.
    """

    def __init__(self, **processes: subprocess.Popen[str]) -> None:
        self._processes = processes
        self._before = {name: processor_times_s(process) for name, process in processes.items()}

    def of_documents(self, count: int) -> str:
        """What so many documents have taken, for people: microseconds a document."""
        names = []
        for name, process in self._processes.items():
            times_s = processor_times_s(process)
            used = [
                f"{(after - before) / count * 1e6:.1f}"
                for before, after in zip(self._before[name], times_s, strict=False)
            ]
            names.append(f"{name} {used[0]}" + "".join(f", its worker {us}" for us in used[1:]))
        return "µs of a processor a document: " + "; ".join(names)


def stream_rate(url: str) -> float:
    """Mutations a second that a consumer reads which does nothing with them, from the beginning to
    now."""
    began, mutations = time.monotonic(), 0
    with BlockingConsumer(url, end="now") as consumer:
        for event in consumer:
            if isinstance(event, ChunkReceived):
                mutations += len(event.chunk)
    return mutations / (time.monotonic() - began)


def sqlite_rate(
    folder: Path, documents: Iterable[tuple[bytes, bytes]], indexes: Sequence[Sequence[str]]
) -> tuple[float, float]:
    """Documents a second that SQLite writes into a table with indexes of expressions, in this
    process; and its processor time for a document, in µs.

    Args:
        folder: Where its file is.
        documents: Key and document of each.
        indexes: The paths of each index, as `$.a`.
    """
    path = folder / "documents.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("CREATE TABLE documents (key TEXT PRIMARY KEY, value TEXT)")
        for number, paths in enumerate(indexes):
            parts = ", ".join(f"json_extract(value, '{path}')" for path in paths)
            database.execute(f"CREATE INDEX index_{number} ON documents ({parts})")
        began, used_s, count = time.monotonic(), time.process_time(), 0
        more_documents = iter(documents)
        while batch := [
            (key.decode(), value.decode()) for key, value in islice(more_documents, SQLITE_BATCH)
        ]:
            database.execute("BEGIN")
            database.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?)", batch)
            database.execute("COMMIT")
            count += len(batch)
        took_s, used_s = time.monotonic() - began, time.process_time() - used_s
    for file in folder.glob(f"{path.name}*"):
        file.unlink()
    return count / took_s, used_s / count * 1e6


def quantiles(times_ms: Sequence[float]) -> str:
    """Median, 99th percentile and maximum, for people."""
    if len(times_ms) < 2:
        return "too few"
    cuts = statistics.quantiles(times_ms, n=100)
    return (
        f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, longest {max(times_ms):.0f} ms, of "
        f"{len(times_ms)}"
    )
