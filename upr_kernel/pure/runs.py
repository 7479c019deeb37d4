"""Runs of a bundle that are added to their partitions at once."""

from __future__ import annotations

from struct import Struct
from typing import Final

from upr_kernel.pure.answers import WRITER_BYTES
from upr_kernel.pure.columns import Buffer, Columns
from upr_kernel.pure.open_rows import OpenRows, RunLimits

# `upr_protocol` describes these layouts: a run in the directory of a bundle, and a line of the
# answer to one.
_RUN: Final = Struct("<IIQI4x")
_LINE: Final = Struct("<IIQQQQ")
_NO_WRITER: Final = bytes(WRITER_BYTES)

_U32_END: Final = 1 << 32

Note = tuple[int, list[int]]
"""A partition, and numbers of its open snapshot that a run superseded and that have no flag."""

Added = tuple[bytes, list[int], list[Note], list[int], int, int, int]
"""What `add_runs` returns."""


def add_runs(
    chunk: Buffer,
    first_row: int,
    runs: Buffer,
    writers: bytes,
    targets: tuple[OpenRows, ...],
    attempt: int,
    skip: bytes | None,
    cas: int,
    rows_max: int,
    bytes_max: int,
    in_order: bool,
    /,
) -> Added:
    """Adds runs of a bundle of plain `SET`s, one after the other, each to its partition: enters
    their keys, flags what they supersede, numbers their rows and copies them, and remembers what
    their writer is answered. O(rows).

    Left out are runs with a chain, runs whose partition takes none or is full, runs that are not
    new for certain, damaged or too large, and runs with a key of another partition. The native
    kernel leaves out, too, what it has no memory for.

    Args:
        chunk: The bundle's chunk: `SET`s that expect no CAS.
        first_row: Where the first run begins in it. Each other follows the one before.
        runs: An entry of the directory for each run: partition, rows, counter and chain.
        writers: The writer of all runs, or of each; 16 bytes, zeros for none.
        targets: The rows of each partition of the bucket.
        attempt: Which run of its task the writer is.
        skip: A byte for each run, not 0 for those to leave out; None for none.
        cas: The lowest CAS that is given.
        rows_max: A run has fewer rows.
        bytes_max: A run has fewer bytes of values.
        in_order: Whether to leave out all runs behind one that is left out.

    Returns:
        A line of the answer for each run, zeros for those left out; which were left out; notes of
        what the caller has to do in a partition: flag what has no flag here, take the rows of what
        is full, tidy; the partitions that somebody waits for; and by how many bytes the tables, the
        room for rows, and the answers have grown.

    Raises:
        ValueError: Runs, writers and flags are not for as many runs.
        ChunkDefectError: The chunk is damaged.
        MemoryError: There is no memory for what is returned.
    """
    run_count, remainder = divmod(len(runs), _RUN.size)
    if (
        remainder
        or len(writers) not in (WRITER_BYTES, WRITER_BYTES * run_count)
        or (skip is not None and len(skip) != run_count)
    ):
        raise ValueError("runs, writers and skip flags are not for as many runs")
    if first_row >= _U32_END:
        raise OverflowError("no chunk has so many rows")
    columns = Columns(chunk)
    limits = RunLimits(attempt, cas, len(targets), rows_max, bytes_max)
    lines: list[bytes] = []
    untouched_runs: list[int] = []
    notes: list[Note] = []
    awaited_partitions: list[int] = []
    table_bytes = row_bytes = answer_bytes = 0
    high = first_row
    for index, (partition, row_count, counter, chain) in enumerate(_RUN.iter_unpack(runs)):
        low, high = high, high + row_count
        writer_at = 0 if len(writers) == WRITER_BYTES else WRITER_BYTES * index
        writer = writers[writer_at : writer_at + WRITER_BYTES]
        rows = targets[partition] if partition < len(targets) else None
        if (
            rows is None
            or (in_order and untouched_runs)
            or (skip is not None and skip[index])
            or chain
            or not rows.history_id
            or rows.partition != partition
            or (writer != _NO_WRITER and not rows.answers.is_new(writer, counter, attempt))
            or not rows.fits(columns, low, high, limits)
        ):
            lines.append(bytes(_LINE.size))
            untouched_runs.append(index)
            continue
        table, rows_before = rows.table, rows.nbytes
        table_before = table.nbytes
        superseded = rows.add_run(chunk, columns, low, high, cas)
        first_seq, first_cas = rows.high - row_count + 1, rows.last_cas - row_count + 1
        if writer != _NO_WRITER:
            answer_bytes += rows.answers.remember_plain(
                writer, counter, attempt, rows.history_id, first_seq, rows.high, first_cas
            )
        table_bytes += table.nbytes - table_before
        row_bytes += rows.nbytes - rows_before
        lines.append(_LINE.pack(partition, 0, rows.history_id, first_seq, rows.high, first_cas))
        if superseded or rows.is_full or rows.wants_tidying:
            notes.append((partition, superseded))
        if rows.is_awaited:
            awaited_partitions.append(partition)
    return (
        b"".join(lines),
        untouched_runs,
        notes,
        awaited_partitions,
        table_bytes,
        row_bytes,
        answer_bytes,
    )
