"""S2: Spark reads a bucket, against Spark reading the same rows as Parquet."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.kit.figures import Figure
from benchmarks.kit.spark import NOTHING, ROWS, beside_parquet


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """S2: all columns, into a sink that drops them."""
    return beside_parquet(
        "S2",
        f"Spark reads {ROWS:,} rows, pinned and from disk, all columns, into the noop sink; "
        "local[2].",
        "Spark reading the same rows and columns as uncompressed Parquet",
        lambda spark, source, server: spark.move(source, NOTHING, server),
        runs,
        say,
    )
