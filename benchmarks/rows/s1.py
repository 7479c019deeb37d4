"""S1: Spark writes a DataFrame, against what the server takes in, and against writing Parquet."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.ingest import Published, publish, publishers
from benchmarks.kit.machine import check_disk
from benchmarks.kit.processes import UprServer
from benchmarks.kit.spark import (
    EMPTY,
    ROWS,
    WARM_UPS,
    Moved,
    Spark,
    against_empty,
    details,
    rates,
)
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS
from upr_protocol.client import BlockingClient

ENOUGH: Final = 500_000.0
"""Rows a second that are enough, however many the server might take in."""


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """S1 against the server's own rate, and against Parquet; every run has a fresh server."""
    check_disk()
    say(f"S1: making {ROWS:,} rows")
    ours: list[Moved] = []
    files: list[Moved] = []
    empties: list[Moved] = []
    ingest: list[Published] = []
    with tempfile.TemporaryDirectory() as name, Spark() as spark, Spark() as peer_spark:
        rows = spark.make(Path(name) / "rows")
        for index in range(-WARM_UPS, runs):
            moved = _write(spark, rows)
            file = peer_spark.move(rows, str(Path(name) / "written"))
            empty = peer_spark.move(rows, EMPTY)
            published = _publish()
            if index < 0:
                continue
            ours.append(moved)
            files.append(file)
            empties.append(empty)
            ingest.append(published)
            say(
                f"  run {index + 1}: {moved.rate:,.0f} rows/s; Parquet {file.rate:,.0f}; "
                f"the empty sink {empty.rate:,.0f}; "
                f"the server takes in {published.rate:,.0f} mutations/s"
            )
    bars = Spread.of([min(ENOUGH, run.rate) for run in ingest])
    measured = {
        **details(ours, files),
        "server_ingest_per_s": Spread.of([run.rate for run in ingest]).to_json(),
    }
    return [
        Figure.more_is_better(
            row="S1",
            text=f"Spark writes {ROWS:,} rows, all on disk at its end; 16-byte keys, 112-byte "
            "values, local[2].",
            unit="rows/s",
            ours=rates(ours),
            peer=bars,
            peer_name="what the server takes in (as B1, in the same runs), at most 500,000 rows/s",
            first_bar=1.0,
            aim=1.0,
            details=measured,
        ),
        Figure.more_is_better(
            row="S1 Parquet",
            text="The same runs.",
            unit="rows/s",
            ours=rates(ours),
            peer=rates(files),
            peer_name="Spark writing the same rows as uncompressed Parquet",
            first_bar=None,
            aim=None,
            details=measured,
        ),
        against_empty("S1", ours, empties, first_bar=0.5, aim=0.8),
    ]


def _write(spark: Spark, rows: str) -> Moved:
    """One run.

    Raises:
        CannotMeasureError: Not every row was written once.
    """
    with UprServer(partitions=PARTITIONS) as server:
        moved = spark.move(rows, server.url, server)
        with BlockingClient(server.url) as client:
            numbers = client.seqnos()
    row_count = sum(row.high_seq for row in numbers)
    persisted = sum(row.persisted_seq for row in numbers)
    if (row_count, persisted) != (ROWS, ROWS):
        raise CannotMeasureError(
            f"{row_count:,} of {ROWS:,} rows were written, {persisted:,} are on disk"
        )
    return moved


def _publish() -> Published:
    with (
        UprServer(partitions=PARTITIONS) as server,
        publishers(server, CHUNK_MUTATIONS) as client,
    ):
        client.answer()
        publish(server, client, ROWS // 8)
        return publish(server, client, ROWS)
