"""Plain runs: batches of `SET`s that expect no CAS, taken in for many partitions at once.

Most runs of most bundles are plain, few rows long, and new. The kernel adds all of them in one
call: it checks to which partition the keys belong, enters them in the tables, flags what they
supersede, numbers the rows, and copies them. What is left for each run is its answer.
`Partition.mutate` takes in all others, one by one, and says why a run is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from upr_kernel import add_runs
from upr_protocol.ids import Cas, HistoryId, SeqNo
from upr_server.engine.batch import CheckedChunk, is_design_key
from upr_server.engine.bucket import Bucket
from upr_server.engine.partition import NANOSECONDS, Partition
from upr_server.engine.publisher_answers import WriterToken
from upr_server.engine.snapshots import PUBLISHED_BYTES_MIN, PUBLISHED_MUTATIONS_MIN

LONG_RUN_ROWS: Final = PUBLISHED_MUTATIONS_MIN
"""A run of so many rows is taken in alone, and may be kept as it came."""

RunNumbers = tuple[HistoryId, SeqNo, SeqNo, Cas]
"""The history of a run that was applied, its first and last number, and its first CAS."""


def set_runs(
    bucket: Bucket,
    columns: CheckedChunk,
    bounds: Sequence[int],
    partitions: Sequence[Partition | None],
    tokens: Sequence[WriterToken | None],
    attempt: int,
    now: float,
    *,
    in_order: bool = False,
) -> list[RunNumbers | None]:
    """Takes in runs of a chunk of plain `SET`s, in one step: those that are short, and for certain
    new to an active partition. O(rows).

    Args:
        bucket: The bucket of the partitions.
        columns: The chunk, all of whose rows are plain.
        bounds: Where each run begins in it, and where the last ends.
        partitions: The partition of each run; None for one that is not to be taken in. A writer may
            have several runs for one partition only if their counters rise, and then none of the
            rows may expire.
        tokens: The name of each run; None for one that nobody will send again.
        attempt: Which run of its task the writer is; 0 where it has none.
        now: Seconds since 1970.
        in_order: Whether to do nothing with the runs behind one with which nothing was done.

    Returns:
        The numbers of each run; None for those with which nothing was done. `Partition.mutate` has
        to decide about them.
    """
    targets = [
        partition.rows
        if partition is not None and partition.takes_at_once(token, attempt, now)
        else None
        for partition, token in zip(partitions, tokens, strict=True)
    ]
    numbers, notes, table_bytes, row_bytes = add_runs(
        columns.chunk.encode(),
        tuple(bounds),
        tuple(targets),
        int(now * NANOSECONDS),
        len(bucket.partitions),
        LONG_RUN_ROWS,
        PUBLISHED_BYTES_MIN,
        in_order,
    )
    bucket.memory.table += table_bytes
    bucket.memory.arrays += row_bytes
    for index, superseded in notes:
        partition = partitions[index]
        assert partition is not None
        partition.snapshots.open.settle(superseded)
    results: list[RunNumbers | None] = []
    design_keys: list[bytes] = []
    applied_count, informed = 0, None
    for index, (pair, partition) in enumerate(zip(numbers, partitions, strict=True)):
        if pair is None or partition is None:
            results.append(None)
            continue
        low, high = bounds[index], bounds[index + 1]
        first_seq, first_cas = pair
        applied_count, informed = applied_count + 1, partition
        if columns.may_expire:
            partition.note_expiries(columns, low, high, SeqNo(first_seq))
        if columns.may_hold_designs:
            design_keys += filter(is_design_key, columns.keys[low:high])
        results.append(
            partition.finish_run(tokens[index], attempt, first_seq, high - low, first_cas)
        )
    # Last: an observer that runs now sees the runs whole, with their answers.
    if informed is not None:
        informed.notify_batches(design_keys, applied_count)
    return results
