"""S3: Spark streams a bucket, against Spark streaming the same rows as Parquet."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.kit.figures import Figure
from benchmarks.kit.spark import ROWS, beside_parquet


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """S3: all columns, into a sink that drops them."""
    return beside_parquet(
        "S3",
        f"Spark streams {ROWS:,} rows, trigger availableNow from a fresh checkpoint, all columns, "
        "into the noop sink; local[2].",
        "Spark streaming the same rows and columns as uncompressed Parquet",
        lambda spark, source, server: spark.stream(source, server),
        runs,
        say,
    )
