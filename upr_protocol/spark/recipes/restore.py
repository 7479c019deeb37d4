"""A backup's increments, one after the other, into a bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F

from upr_protocol.client import BlockingClient
from upr_protocol.spark.driver_connection import DriverConnection
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.options import SourceOptions
from upr_protocol.spark.recipes.backup import increment_folder, read_increments
from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.folder import plain_path
from upr_protocol.spark.recipes.latest_state import ProgressCallback, ignore_progress
from upr_protocol.spark.recipes.manifest import Manifest
from upr_protocol.spark.recipes.snapshot import rows_of
from upr_protocol.spark.recipes.target import check_own_options, check_write_options
from upr_protocol.spark.source import UprDataSource

_COLUMNS: Final = ("op", "key", "value", "flags", "expiry")
_OWN_OPTIONS: Final = frozenset({"onerror", "deadletterpath"})


@attrs.frozen
class RestoreResult:
    """What was restored.

    Attributes:
        increments: How many increments.
        rows: How many rows were applied: the newest of each key in each increment.
        seconds: How long it took.
    """

    increments: int
    rows: int
    seconds: float


def restore(
    spark: SparkSession,
    path: str | os.PathLike[str],
    url: str,
    *,
    through: int | None = None,
    may_have_contents: bool = False,
    options: Mapping[str, str] | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> RestoreResult:
    """Makes a bucket hold what another held when an increment of its backup was made.

    Keys, values, flags and expiry times are as they were; numbers and CAS values are the bucket's
    own, and it may have another number of partitions. A restore that was cut off may be run again,
    with `may_have_contents`.

    Args:
        spark: A session.
        path: The backup's folder.
        url: `upr://host:port/bucket`; the bucket has to be there, and to be empty.
        through: The number of the last increment that is applied; None for all.
        may_have_contents: Whether the bucket may hold something. Keys that the backup does not
            know stay.
        options: More options of the writes, as `durability`.
        on_progress: Called with a sentence on each increment.

    Raises:
        OptionError: There is no such increment, or an option is wrong.
        PipelineError: The chain has a gap, a file is missing, the bucket has contents, or it
            cannot be written.
    """
    started_at = time.monotonic()
    check_own_options(options or {}, _OWN_OPTIONS)
    check_write_options(options)
    folder = plain_path(path)
    if not folder.exists():
        raise PipelineError("UPR_FOLDER", f"{folder} is not there")
    with plain_errors():
        increments = read_increments(folder)
        if not increments:
            raise PipelineError("UPR_FOLDER", f"{folder} has no increment that was finished")
        if through is not None:
            if not 0 <= through < len(increments):
                raise OptionError(
                    f"increment {through} does not exist; the last is {len(increments) - 1}"
                )
            increments = increments[: through + 1]
        if not may_have_contents:
            _check_empty(url, options or {})
        spark.dataSource.register(UprDataSource)
        total = 0
        for manifest in increments:
            where = increment_folder(folder, manifest.number)
            rows = _apply(spark, where, manifest, url, options or {})
            total += rows
            on_progress(f"increment {manifest.number}: {rows} rows")
        return RestoreResult(len(increments), total, time.monotonic() - started_at)


def _check_empty(url: str, options: Mapping[str, str]) -> None:
    source_options = SourceOptions({**options, "url": url})
    connection = DriverConnection(source_options.address(), source_options.timeout_s())
    try:
        numbers = connection.ask(BlockingClient.seqnos)
    finally:
        connection.close()
    if any(row.high_seq for row in numbers):
        raise PipelineError(
            "UPR_NOT_EMPTY",
            f"{url} has had contents: restore into a new bucket, or say that it may have contents "
            "(may_have_contents): keys that the backup does not know stay then",
        )


def _apply(
    spark: SparkSession,
    folder: Path,
    manifest: Manifest,
    url: str,
    options: Mapping[str, str],
) -> int:
    """Writes the newest row of each key of one increment; gives how many those are."""
    columns = [F.col(name) for name in _COLUMNS]
    newest = (
        rows_of(spark, folder, manifest)
        .groupBy("key")
        .agg(F.max_by(F.struct(*columns), "seq").alias("newest"))
        .select("newest.*")
        # A restore deletes a key for an expiry as for a deletion.
        .withColumn("op", F.when(F.col("op") == "set", "set").otherwise("delete"))
    )
    row_count = Observation()
    rows = newest.observe(row_count, F.count(F.lit(1)).alias("rows"))
    writer = rows.write.format("upr").mode("append").options(**options).option("url", url)
    writer = writer.option("operation", "apply").option("operationColumn", "op")
    writer.option("flagsColumn", "flags").option("expiryColumn", "expiry").save()
    return int(row_count.get["rows"])
