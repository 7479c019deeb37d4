"""S2: Spark reads a bucket, against Spark reading the same rows as Parquet."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.kit.figures import Figure
from benchmarks.kit.machine import check_disk
from benchmarks.kit.processes import UprServer
from benchmarks.kit.spark import NOTHING, ROWS, Moved, Spark, details, load, rates
from benchmarks.kit.work import PARTITIONS


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """S2: all columns, into a sink that drops them."""
    check_disk()
    say(f"S2: writing {ROWS:,} rows")
    ours: list[Moved] = []
    files: list[Moved] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        UprServer(partitions=PARTITIONS) as server,
        Spark() as spark,
    ):
        copy = load(spark, server, Path(folder))
        for number in range(-1, runs):  # run -1 warms up and is not kept
            moved = spark.move(server.url, NOTHING, server)
            file = spark.move(copy, NOTHING)
            if number < 0:
                continue
            ours.append(moved)
            files.append(file)
            say(f"  run {number + 1}: {moved.rate:,.0f} rows/s; Parquet {file.rate:,.0f}")
    return [
        Figure.more_is_better(
            row="S2",
            text=f"Spark reads {ROWS:,} rows, pinned and from disk, all columns, into the "
            "noop sink; local[2].",
            unit="rows/s",
            ours=rates(ours),
            peer=rates(files),
            peer_name="Spark reading the same rows and columns as uncompressed Parquet",
            first_bar=0.5,
            aim=1.0,
            details=details(ours, files),
        )
    ]
