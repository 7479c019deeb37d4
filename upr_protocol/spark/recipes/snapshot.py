"""A bucket's contents at one moment, as a folder of Parquet files with a manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.recipes.cut import ConsistentCut, consistent_cut
from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.folder import (
    locked_folder,
    path_to_read,
    paths_in_folder,
    plain_path,
    remove_paths,
)
from upr_protocol.spark.recipes.latest import latest
from upr_protocol.spark.recipes.latest_state import (
    LATEST_STATE_SCHEMA,
    ProgressCallback,
    ignore_progress,
)
from upr_protocol.spark.recipes.manifest import (
    DATA_FOLDER,
    MANIFEST,
    Manifest,
    PartitionPart,
    files_below,
)
from upr_protocol.spark.schema import UNPARSED


def snapshot(
    spark: SparkSession,
    url: str,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: Mapping[str, str] | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Manifest:
    """Writes what a bucket holds to a folder: `data/*.parquet`, a row for each key, and
    `manifest.json`, which is written last and makes it count.

    All that was acknowledged before the call is in it. Until the manifest is there `read_snapshot`
    refuses the folder.

    Args:
        spark: A session.
        url: `upr://host:port/bucket`.
        path: The folder; a plain path that every executor reaches.
        overwrite: Whether what is in the folder is removed first, when that is a snapshot, whole
            or not. Otherwise the folder must be empty or missing.
        options: More options of the read: `leaseSeconds`, `timeoutSeconds`.
        on_progress: Called with a sentence on each step.

    Returns:
        What the folder holds.

    Raises:
        PipelineError: There is something in the folder, or the bucket cannot be read.
    """
    folder = plain_path(path)
    _check_may_be_used(folder, overwrite=overwrite)
    with plain_errors(), locked_folder(folder), consistent_cut(spark, url, options or {}) as cut:
        _check_may_be_used(folder, overwrite=overwrite)
        # The manifest is removed first, as it makes the rest count.
        remove_paths(sorted(paths_in_folder(folder), key=lambda path: path.name != MANIFEST))
        on_progress(f"{cut.bucket} is read up to {sum(cut.ends.values())} numbers")
        # A read has no markers: without `op` nobody looks for them, which would read it twice.
        rows = latest(cut.changes.drop("op"))
        # With `valueSchema` there are values that do not fit.
        unparsed = [name for name in rows.columns if name == UNPARSED]
        rows = rows.select(*LATEST_STATE_SCHEMA.names, *unparsed)
        rows.write.parquet(str(folder / DATA_FOLDER))
        manifest = describe_cut(spark, cut, folder, "snapshot")
        manifest.write(folder)
        on_progress(f"{manifest.rows} rows in {len(manifest.files)} files")
        return manifest


def read_snapshot(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
    """The rows of a snapshot: key, value, partition, history_id, seq, cas, flags, expiry; and
    unparsed, if it was made with the option `valueSchema`.

    Raises:
        PipelineError: The folder is not a snapshot, was never finished, or lacks files.
    """
    folder = plain_path(path)
    manifest = Manifest.read(folder)
    if manifest.kind != "snapshot":
        raise PipelineError("UPR_FOLDER", f"{folder} is an increment of a backup, and no snapshot")
    return rows_of(spark, folder, manifest)


def rows_of(spark: SparkSession, folder: Path, manifest: Manifest) -> DataFrame:
    """The rows that a manifest speaks of, and no others."""
    paths = [path_to_read(folder / DATA_FOLDER / name) for name in manifest.files]
    return spark.read.parquet(*paths)


def describe_cut(
    spark: SparkSession,
    cut: ConsistentCut,
    folder: Path,
    kind: Literal["snapshot", "increment"],
    increment: int = 0,
) -> Manifest:
    """The manifest of what was written of a cut: rows are counted in the files.

    Raises:
        PipelineError: The bucket has lost some of it meanwhile.
    """
    cut.check()
    files = dict(files_below(folder / DATA_FOLDER))
    stored_rows = spark.read.parquet(path_to_read(folder / DATA_FOLDER))
    is_deleted = F.col("value").isNull() if kind == "increment" else F.lit(False)
    counts = {
        row["partition"]: (row["rows"], row["deletions"])
        for row in stored_rows.groupBy("partition")
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.sum(is_deleted.cast("long")).alias("deletions"),
        )
        .collect()
    }
    partitions = {
        str(partition): PartitionPart(
            f"{cut.logs[partition].current:016x}",
            tuple((f"{history_id:016x}", seq) for history_id, seq in cut.logs[partition].pairs()),
            cut.starts[partition],
            end,
            counts.get(partition, (0, 0))[0],
        )
        for partition, end in sorted(cut.ends.items())
    }
    return Manifest(
        kind=kind,
        bucket=cut.bucket,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        partition_count=len(partitions),
        partitions=partitions,
        rows=sum(rows for rows, _ in counts.values()),
        deletions=sum(deletions for _, deletions in counts.values()),
        files=files,
        number=increment,
    )


def _check_may_be_used(folder: Path, *, overwrite: bool) -> None:
    paths = paths_in_folder(folder)
    if not paths:
        return
    own_names = {DATA_FOLDER, MANIFEST, f"_{MANIFEST}.unfinished"}
    foreign_names = [path.name for path in paths if path.name not in own_names]
    if foreign_names:
        raise PipelineError(
            "UPR_FOLDER",
            f"{folder} has something else in it ({foreign_names[0]}): take another folder",
        )
    if not overwrite:
        state = "a snapshot" if folder / MANIFEST in paths else "a snapshot that was not finished"
        raise PipelineError(
            "UPR_FOLDER",
            f"{folder} has {state} in it: take another folder, or have it overwritten (overwrite)",
        )
