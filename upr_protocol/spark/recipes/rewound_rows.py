"""What a Delta table has to take back from its own earlier versions when partitions rewind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from upr_protocol.spark.errors import PipelineError

REACHED: Final = "upr.reached"
"""The entry of a commit that has the number that each partition of its batch had come to."""

ANEW: Final = "upr.anew"
"""The entry of a commit that dropped what the table had of an earlier query."""


def reached_metadata(reached: Mapping[int, int], *, is_anew: bool = False) -> dict[str, str]:
    """What a commit records of its batch.

    Args:
        reached: The highest number of each partition that the batch has.
        is_anew: Whether nothing is left of what the table had before.
    """
    metadata = {REACHED: json.dumps(reached, separators=(",", ":"))}
    if is_anew:
        metadata[ANEW] = "true"
    return metadata


def version_before(history: Sequence[Mapping[str, Any]], partition: int, seq: int) -> int:
    """The newest version of a table that has nothing of a partition above a number.

    Args:
        history: The table's commits, newest first.
        partition: The partition.
        seq: The end of one of its batches.

    Returns:
        The version; -1 for the table before the first commit of its query.
    """
    version: int = history[0]["version"]
    for commit in history:
        reached = json.loads(commit.get(REACHED, "{}")).get(str(partition))
        if reached is not None and reached <= seq:
            break
        if reached is not None:
            version = commit["version"] - 1
        if ANEW in commit:
            # What was before is of another query.
            return -1 if version < commit["version"] else version
    return version


def rewound_rows(
    table: Any, open_version: Callable[[int], Any], went_to: Mapping[int, int]
) -> pa.Table:
    """Rows that the table had at the numbers to which partitions went back, and has no more.

    Args:
        table: The table.
        open_version: Opens an earlier version of it.
        went_to: The number by partition.

    Returns:
        The rows, each key once.

    Raises:
        PipelineError: The table does not have an earlier version any more.
    """
    # Whoever has a table has the package.
    from deltalake.exceptions import DeltaError

    history = table.history()
    partitions_of: dict[int, list[int]] = {}
    for partition, seq in went_to.items():
        if seq:
            version = version_before(history, partition, seq)
            partitions_of.setdefault(version, []).append(partition)
    partitions_of.pop(-1, None)
    tables = [pa.Table.from_batches([], pa.schema(table.schema()))]
    for version, partitions in partitions_of.items():
        at_partitions = [("partition", "in", partitions)]
        try:
            earlier_rows = open_version(version).to_pyarrow_table(filters=at_partitions)
        except (OSError, DeltaError) as error:
            raise _not_there(version, str(error)) from error
        if pc.any(_is_above(earlier_rows, went_to)).as_py():
            raise _not_there(version, "it has newer rows")
        current_rows = table.to_pyarrow_table(
            columns=["partition", "seq", "key"], filters=at_partitions
        )
        unchanged = current_rows.filter(pc.invert(_is_above(current_rows, went_to)))["key"]
        is_unchanged = pc.is_in(earlier_rows["key"], value_set=unchanged)
        tables.append(earlier_rows.filter(pc.invert(is_unchanged)))
    return pa.concat_tables(tables)


def _is_above(rows: pa.Table, went_to: Mapping[int, int]) -> pa.ChunkedArray:
    """Whether each row's number is above the one to which its partition went back."""
    partitions = pa.array(went_to, pa.int32())
    bounds = pa.array(went_to.values(), pa.int64())
    bound = bounds.take(pc.index_in(rows["partition"], value_set=partitions))
    return pc.greater(rows["seq"], bound)


def _not_there(version: int, reason: str) -> PipelineError:
    return PipelineError(
        "UPR_TABLE",
        f"partitions went back, and the table cannot be read as it was then, at version {version} "
        f"({reason}): begin it anew with a new checkpoint (begin_anew), or stream with "
        "onRollback=marker. Keep versions for longer (VACUUM)",
    )
