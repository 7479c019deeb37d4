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


def reached_metadata(reached_seqs: Mapping[int, int], *, is_anew: bool = False) -> dict[str, str]:
    """What a commit records of its batch.

    Args:
        reached_seqs: The highest number of each partition that the batch has.
        is_anew: Whether nothing is left of what the table had before.
    """
    metadata = {REACHED: json.dumps(reached_seqs, separators=(",", ":"))}
    if is_anew:
        metadata[ANEW] = "true"
    return metadata


def version_before(history: Sequence[Mapping[str, Any]], partition: int, seq: int) -> int | None:
    """The newest version of a table that has nothing of a partition above a number.

    Args:
        history: The table's commits, newest first.
        partition: The partition.
        seq: The end of one of its batches.

    Returns:
        The version; None for the table before the first commit of its query.
    """
    version: int = history[0]["version"]
    for commit in history:
        reached_seq = json.loads(commit.get(REACHED, "{}")).get(str(partition))
        if reached_seq is not None and reached_seq <= seq:
            break
        if reached_seq is not None:
            version = commit["version"] - 1
        if ANEW in commit:
            # What was before is of another query.
            return None if version < commit["version"] else version
    return version if version >= 0 else None


def rewound_rows(
    table: Any, open_version: Callable[[int], Any], rewound_to: Mapping[int, int]
) -> pa.Table:
    """Rows that the table had at the numbers to which partitions went back, and has no more.

    Args:
        table: The table.
        open_version: Opens an earlier version of it.
        rewound_to: By partition the number to which it went back.

    Returns:
        The rows, each key once.

    Raises:
        PipelineError: The table does not have an earlier version any more.
    """
    # A caller that has a table has the package.
    from deltalake.exceptions import DeltaError

    history = table.history()
    partitions_of: dict[int, list[int]] = {}
    for partition, seq in rewound_to.items():
        if seq:
            version = version_before(history, partition, seq)
            if version is not None:
                partitions_of.setdefault(version, []).append(partition)
    tables = [pa.Table.from_batches([], pa.schema(table.schema()))]
    for version, partitions in partitions_of.items():
        partition_filter = [("partition", "in", partitions)]
        try:
            earlier_rows = open_version(version).to_pyarrow_table(filters=partition_filter)
        except (OSError, DeltaError) as error:
            raise _not_there(version, str(error)) from error
        if pc.any(_is_above(earlier_rows, rewound_to)).as_py():
            raise _not_there(version, "it has newer rows")
        current_rows = table.to_pyarrow_table(
            columns=["partition", "seq", "key"], filters=partition_filter
        )
        unchanged = current_rows.filter(pc.invert(_is_above(current_rows, rewound_to)))["key"]
        is_unchanged = pc.is_in(earlier_rows["key"], value_set=unchanged)
        tables.append(earlier_rows.filter(pc.invert(is_unchanged)))
    return pa.concat_tables(tables)


def _is_above(rows: pa.Table, rewound_to: Mapping[int, int]) -> pa.ChunkedArray:
    """Whether each row's number is above the one to which its partition went back."""
    partitions = pa.array(rewound_to, pa.int32())
    bounds = pa.array(rewound_to.values(), pa.int64())
    bound = bounds.take(pc.index_in(rows["partition"], value_set=partitions))
    return pc.greater(rows["seq"], bound)


def _not_there(version: int, reason: str) -> PipelineError:
    return PipelineError(
        "UPR_TABLE",
        f"partitions went back, and the table cannot be read as it was then, at version {version} "
        f"({reason}): begin it anew with a new checkpoint (begin_anew), or stream with "
        "onRollback=marker. Keep versions for longer (VACUUM)",
    )
