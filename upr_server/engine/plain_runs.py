"""Plain runs: batches of `SET`s that expect no CAS, taken in for many partitions at once.

Most runs of most bundles are plain, few rows long, and new. The kernel adds all of them in one
call: it checks to which partition the keys belong and whether the run is new, enters the keys in
the tables, flags what they supersede, numbers the rows, copies them, and remembers the answers.
`Partition.mutate` takes in all others, one by one, and says why a run is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

import msgspec

from upr_kernel import add_runs
from upr_protocol.chunk import RUN_BYTES, BundleRun, decode_runs
from upr_protocol.ids import SeqNo
from upr_server.engine.batch import CheckedChunk, is_design_key
from upr_server.engine.bucket import Bucket
from upr_server.engine.partition import NANOSECONDS
from upr_server.engine.snapshots import PUBLISHED_BYTES_MIN, PUBLISHED_MUTATIONS_MIN

LONG_RUN_ROWS: Final = PUBLISHED_MUTATIONS_MIN
"""A run of so many rows is taken in alone, and may be kept as it came."""

_FIRST_SEQ: Final = Struct("<16xQ16x")
"""What a line of the answer says of the first number; 0 where nothing was done."""


class AppliedRuns(msgspec.Struct, frozen=True):
    """What became of runs that were to be taken in together.

    Attributes:
        answer_rows: What became of each run, as a line of the answer to a bundle; zeros for those
            with which nothing was done.
        remaining_indexes: Those with which nothing was done, by place. `Partition.mutate` has to
            decide about them.
    """

    answer_rows: bytes
    remaining_indexes: Sequence[int]


def apply_set_runs(
    bucket: Bucket,
    columns: CheckedChunk,
    directory: bytes,
    writers: bytes,
    attempt: int,
    now: float,
    *,
    first_row: int = 0,
    skip: bytes | None = None,
    in_order: bool = False,
) -> AppliedRuns:
    """Takes in runs of a chunk of plain `SET`s, in one step: those that are short, and for certain
    new to an active partition. O(rows).

    Args:
        bucket: The bucket.
        columns: The chunk, all of whose rows are plain.
        directory: The runs, as in the directory of a bundle. Each follows the one before.
        writers: The publisher of all runs, or of each; zeros for one that sends nothing again.
        attempt: Which run of its task the writer is; 0 where it has none.
        now: Seconds since 1970.
        first_row: Where the first run begins in the chunk.
        skip: A byte for each run, not 0 for those that are not to be taken in; None for none.
        in_order: Whether to do nothing with the runs behind one with which nothing was done.
    """
    if columns.may_expire or bucket.memory.expiries:
        runs = decode_runs(directory)
        skip = _with_expiring(bucket, runs, now, skip, may_expire=columns.may_expire)
    lines, remaining_indexes, notes, awaited_partitions, table_bytes, row_bytes, answer_bytes = (
        add_runs(
            columns.encoded,
            first_row,
            directory,
            writers,
            bucket.open_rows,
            attempt,
            skip,
            int(now * NANOSECONDS),
            LONG_RUN_ROWS,
            PUBLISHED_BYTES_MIN,
            in_order,
        )
    )
    memory, partitions = bucket.memory, bucket.partitions
    memory.table += table_bytes
    memory.arrays += row_bytes
    memory.writers += answer_bytes
    for partition_id, superseded_seqs in notes:
        partitions[partition_id].snapshots.open.note_added_run(superseded_seqs)
    design_keys: list[bytes] = []
    if columns.may_expire or columns.may_hold_designs:
        design_keys = _note_rows(bucket, columns, decode_runs(directory), first_row, lines)
    # Last: a reader or an observer that runs now sees the runs whole, with their answers.
    for partition_id in awaited_partitions:
        partitions[partition_id].snapshots.wake()
    applied_count = len(directory) // RUN_BYTES - len(remaining_indexes)
    if applied_count:
        # All partitions of a bucket have one observer.
        partitions[0].updates.notify_batches(design_keys, applied_count)
    return AppliedRuns(lines, remaining_indexes)


def _with_expiring(
    bucket: Bucket, runs: Sequence[BundleRun], now: float, skip: bytes | None, *, may_expire: bool
) -> bytes:
    """Skips also the runs of partitions in which something has expired, or may have once the runs
    before it were taken in. O(runs)."""
    flags = bytearray(len(runs)) if skip is None else bytearray(skip)
    partitions, earlier_partitions = bucket.partitions, set[int]()
    for index, run in enumerate(runs):
        if run.partition < len(partitions):
            is_due = partitions[run.partition].may_have_expired(now)
            flags[index] |= is_due or run.partition in earlier_partitions
        if may_expire:
            earlier_partitions.add(run.partition)
    return bytes(flags)


def _note_rows(
    bucket: Bucket, columns: CheckedChunk, runs: Sequence[BundleRun], first_row: int, lines: bytes
) -> list[bytes]:
    """Notes when the rows that were taken in expire; returns the keys of design documents among
    them. O(rows)."""
    design_keys: list[bytes] = []
    high = first_row
    for run, (first_seq,) in zip(runs, _FIRST_SEQ.iter_unpack(lines), strict=True):
        low, high = high, high + run.row_count
        if not first_seq:
            continue
        if columns.may_expire:
            partition = bucket.partitions[run.partition]
            partition.note_expiries(columns, low, high, SeqNo(first_seq))
        if columns.may_hold_designs:
            design_keys += filter(is_design_key, columns.keys[low:high])
    return design_keys
