"""A bucket's changes as a chain of increments, each of which goes on where the last one ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from upr_protocol.failover import RollBack, Start, decide_start
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.options import SourceOptions
from upr_protocol.spark.recipes.cut import Infos, consistent_cut
from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.folder import (
    locked_folder,
    make_folder,
    paths_in_folder,
    plain_path,
    remove_paths,
)
from upr_protocol.spark.recipes.latest_state import ProgressCallback, ignore_progress
from upr_protocol.spark.recipes.manifest import DATA_FOLDER, MANIFEST, Manifest
from upr_protocol.spark.recipes.snapshot import describe_cut

_DIGITS: Final = 6

_OF_SOME_KEYS: Final = frozenset({"key", "keyprefix"})
_OF_TYPED_VALUES: Final = frozenset({"valueschema", "infersample"})


def backup(
    spark: SparkSession,
    url: str,
    path: str | os.PathLike[str],
    *,
    options: Mapping[str, str] | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Manifest:
    """Adds an increment to a backup: every change, deletions too, since the last one; the first
    has all that there is.

    Increments are folders `000000`, `000001` and so on, each with `data/*.parquet` and
    `manifest.json`, which is written last and makes it count. One that was never finished is
    removed by the next call.

    Before anything is written it is made sure that the bucket still has the history that the backup
    has followed, and has forgotten no deletion since. If not, the increments so far stay good, and
    nothing can be added to them.

    Args:
        spark: A session.
        url: `upr://host:port/bucket`.
        path: The backup's folder; a plain path that every executor reaches.
        options: More options of the read: `leaseSeconds`, `timeoutSeconds`.
        on_progress: Called with a sentence on each step.

    Returns:
        What the increment holds.

    Raises:
        OptionError: An option would have the increment lack keys, or change values.
        PipelineError: `UPR_ROLLBACK` when the histories have parted, `UPR_RANGE_GONE` when
            deletions are forgotten: begin a new backup in another folder. Or the folder holds
            something else, or the bucket cannot be read.
    """
    _check_options(options or {})
    folder = plain_path(path)
    with plain_errors(), locked_folder(folder):
        increments = read_increments(folder)
        last_increment = increments[-1] if increments else None
        index = len(increments)
        bucket = SourceOptions({"url": url}).address().bucket
        _check_bucket(folder, last_increment, bucket)

        def starts_of(infos: Infos) -> Mapping[PartitionId, SeqNo]:
            return {} if last_increment is None else _starts(last_increment, infos)

        with consistent_cut(spark, url, options or {}, starts_of) as cut:
            into = increment_folder(folder, index)
            make_folder(into)
            remove_paths(paths_in_folder(into))
            on_progress(f"increment {index}: {_numbers(cut.starts, cut.ends)} numbers to read")
            cut.changes.write.parquet(str(into / DATA_FOLDER))
            manifest = describe_cut(spark, cut, into, "increment", index)
            manifest.write(into)
            on_progress(
                f"increment {index}: {manifest.rows} rows, {manifest.deletions} of them deletions"
            )
            return manifest


def _check_bucket(folder: Path, last_increment: Manifest | None, bucket: str) -> None:
    """Makes sure that a backup is of the bucket of this name, or has nothing yet."""
    if last_increment is not None and last_increment.bucket != bucket:
        raise PipelineError(
            "UPR_FOLDER",
            f"{folder} is a backup of the bucket {last_increment.bucket!r}, and not of "
            f"{bucket!r}: take another folder",
        )


def _check_options(options: Mapping[str, str]) -> None:
    """Makes sure that every increment has all keys, and values as they are."""
    for name in options:
        if name.lower() in _OF_SOME_KEYS:
            raise OptionError(
                f"the option {name} is not for a backup: the next increment begins where this one "
                "ends, so no increment would have what this one left out. Leave the option out, or "
                "read these keys into files of your own"
            )
        if name.lower() in _OF_TYPED_VALUES:
            raise OptionError(
                f"the option {name} is not for a backup, whose values are restored as they are: "
                "leave it out, and use it where the restored bucket is read"
            )


def read_increments(folder: Path) -> list[Manifest]:
    """The increments of a backup, first to last; none when there is nothing yet.

    Raises:
        PipelineError: One is missing or damaged, or does not go on where the one before it ends;
            or the folder holds something else.
    """
    increments: list[Manifest] = []
    gap: int | None = None
    for path in paths_in_folder(folder):
        if not (path.is_dir() and path.name.isdigit() and len(path.name) == _DIGITS):
            raise PipelineError(
                "UPR_FOLDER", f"{folder} contains {path.name}, which is no part of a backup"
            )
        increment = int(path.name)
        if not (path / MANIFEST).exists():
            # The last one may be unfinished. If another is behind it, it is missing.
            gap = increment if gap is None else gap
            continue
        missing_number = len(increments) if gap is None else gap
        if increment != len(increments) or gap is not None:
            raise _gap(folder, f"increment {missing_number} is missing, and {increment} is there")
        manifest = Manifest.read(path)
        if manifest.kind != "increment" or manifest.number != increment:
            raise _gap(folder, f"{path.name} holds something else than increment {increment}")
        _check_joint(folder, increments[-1] if increments else None, manifest)
        increments.append(manifest)
    return increments


def increment_folder(folder: Path, increment: int) -> Path:
    """Where an increment lies in a backup."""
    return folder / f"{increment:0{_DIGITS}}"


def _check_joint(folder: Path, before: Manifest | None, manifest: Manifest) -> None:
    """Makes sure that an increment begins where the one before it ends."""
    ends = {} if before is None else before.ends
    for name, part in manifest.partitions.items():
        end = ends.get(PartitionId(int(name)), 0)
        if part.start != end:
            raise _gap(
                folder,
                f"increment {manifest.number} begins at {part.start} in partition {name}, and the "
                f"increment before it ends at {end}",
            )
    if before is not None and (before.bucket, set(before.partitions)) != (
        manifest.bucket,
        set(manifest.partitions),
    ):
        raise _gap(folder, f"increment {manifest.number} is of another bucket")


def _gap(folder: Path, sentence: str) -> PipelineError:
    return PipelineError(
        "UPR_BACKUP_GAP",
        f"{folder}: {sentence}. Put back what is missing, or restore only what is before it",
    )


def _starts(last_increment: Manifest, infos: Infos) -> Mapping[PartitionId, SeqNo]:
    """Where the next increment begins, if it can follow the last one."""
    anew = "Begin a new backup in another folder; the increments so far can still be restored"
    if len(infos) != last_increment.partition_count:
        raise PipelineError(
            "UPR_ROLLBACK",
            f"the bucket has {len(infos)} partitions, and had {last_increment.partition_count} at "
            f"the last increment: it is another bucket. {anew}",
        )
    for partition, info in infos.items():
        part = last_increment.partitions[str(partition)]
        if 0 < part.end < info.purge_seq:
            raise PipelineError(
                "UPR_RANGE_GONE",
                f"partition {partition} has forgotten deletions up to {info.purge_seq}, and the "
                f"last increment ends at {part.end}: it was made too long ago. {anew}",
            )
        decision = decide_start(info.log, info.high_seq, info.purge_seq, part.position)
        if not isinstance(decision, Start):
            ceiling = decision.ceiling if isinstance(decision, RollBack) else info.high_seq
            raise PipelineError(
                "UPR_ROLLBACK",
                f"partition {partition} has another history than the backup: the backup has it up "
                f"to {part.end}, and shares {ceiling} with the server ({decision.reason.value}). "
                f"{anew}",
            )
    return last_increment.ends


def _numbers(starts: Mapping[PartitionId, SeqNo], ends: Mapping[PartitionId, SeqNo]) -> int:
    return sum(ends.values()) - sum(starts.values())
