"""Any DataFrame into a bucket, with what became of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
from pyarrow import parquet
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.folder import plain_path
from upr_protocol.spark.recipes.latest_state import ProgressCallback, ignore_progress
from upr_protocol.spark.recipes.target import check_own_options
from upr_protocol.spark.source import UprDataSource

_OWN_OPTIONS: Final = frozenset({"url", "keycolumn", "valuecolumn", "onerror", "deadletterpath"})
"""Options of the write that the recipe sets by itself, in lower case."""


@attrs.frozen
class LoadResult:
    """What became of a load.

    Attributes:
        rows: How many rows were written.
        failed: How many are among the dead letters instead.
        seconds: How long it took.
    """

    rows: int
    failed: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        """Rows written in a second."""
        return self.rows / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rows} rows written, {self.failed} failed, in {self.seconds:.1f} s "
            f"({self.rows_per_s:.0f} rows/s)"
        )


def bulk_load(
    frame: DataFrame,
    url: str,
    *,
    key: str = "key",
    value: str = "value",
    dead_letters: str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> LoadResult:
    """Writes the rows of a DataFrame to a bucket.

    Nothing is undone when it fails: with `operation=upsert`, the default, it may be run again.

    Args:
        frame: The rows.
        url: `upr://host:port/bucket`.
        key: The column of the keys.
        value: The column of the values; several, with commas between them, or `*` for the whole
            row, make a JSON object.
        dead_letters: A folder for rows that are refused; None to fail with the first of them.
        options: More options of the write, as `operation`, `expiryColumn` or `durability`.
        on_progress: Called with a sentence at the end.

    Returns:
        How many rows there were, and how long it took.

    Raises:
        OptionError: One of `options` is set by the recipe.
        PipelineError: An option is wrong, rows were refused, or the server cannot be reached.
    """
    started_at = time.monotonic()
    check_own_options(options or {}, _OWN_OPTIONS)
    frame.sparkSession.dataSource.register(UprDataSource)
    counted = Observation()
    rows = frame.observe(counted, F.count(F.lit(1)).alias("rows"))
    writer = rows.write.format("upr").mode("append").options(**(options or {}))
    writer = writer.option("url", url).option("keyColumn", key).option("valueColumn", value)
    old_files: set[tuple[Path, int]] = set()
    folder = None
    if dead_letters is not None:
        folder = plain_path(dead_letters)
        old_files = _letters(folder)
        writer = writer.option("onError", "deadLetter").option("deadLetterPath", str(folder))
    with plain_errors():
        writer.save()
    failed = 0
    if folder is not None:
        new_files = _letters(folder) - old_files
        failed = sum(parquet.read_metadata(path).num_rows for path, _ in new_files)
    loaded = LoadResult(int(counted.get["rows"]) - failed, failed, time.monotonic() - started_at)
    on_progress(str(loaded))
    return loaded


def _letters(folder: Path) -> set[tuple[Path, int]]:
    """The files of dead letters, and when they were written: with a `writeId`, a load replaces the
    files of the one before."""
    return {(path, path.stat().st_mtime_ns) for path in folder.glob("part-*.parquet")}
