"""S2: Spark reads a bucket, against Spark reading the same rows as Parquet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import UprServer
from benchmarks.kit.spark import (
    EMPTY,
    FEW_COLUMNS,
    NOTHING,
    ROWS,
    WARM_UPS,
    Moved,
    Spark,
    against_empty,
    beside_parquet,
    load,
    rates,
)
from benchmarks.kit.work import PARTITIONS


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """S2: all columns, and two, into a sink that drops them."""
    return _all_columns(runs, say) + _two_columns(runs, say)


def _all_columns(runs: int, say: Callable[[str], None]) -> list[Figure]:
    return beside_parquet(
        "S2",
        f"Spark reads {ROWS:,} rows, pinned and from disk, all columns, into the noop sink; "
        "local[2].",
        "Spark reading the same rows and columns as uncompressed Parquet",
        lambda spark, source, server: spark.move(source, NOTHING, server),
        runs,
        say,
    )


def _two_columns(runs: int, say: Callable[[str], None]) -> list[Figure]:
    two: list[Moved] = []
    twelve: list[Moved] = []
    empties: list[Moved] = []
    with (
        TemporaryDirectory() as folder,
        UprServer(partitions=PARTITIONS) as server,
        Spark() as spark,
        Spark() as peer_spark,
    ):
        load(spark, server, Path(folder))
        for index in range(-WARM_UPS, runs):
            few = spark.move(server.url, NOTHING, server, FEW_COLUMNS)
            all_columns = spark.move(server.url, NOTHING, server)
            empty = peer_spark.move(EMPTY, NOTHING, None, FEW_COLUMNS)
            if index < 0:
                continue
            two.append(few)
            twelve.append(all_columns)
            empties.append(empty)
            say(f"  two columns: {few.rate:,.0f} rows/s; the empty source {empty.rate:,.0f}")
    return [
        against_empty("S2 two columns", two, empties, first_bar=0.7, aim=0.9),
        Figure.less_is_better(
            row="S2 two columns by twelve",
            text="The same runs: the time for key and value.",
            unit="s",
            ours=Spread.of([run.seconds for run in two]),
            peer=Spread.of([run.seconds for run in twelve]),
            peer_name="the time for all columns",
            first_bar=1 / 0.65,
            aim=None,
            details={"twelve_columns_per_s": rates(twelve).to_json()},
        ),
    ]
