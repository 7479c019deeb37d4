"""A bundle made of runs that lie in chunks of their own."""

from __future__ import annotations

from struct import Struct
from typing import Final

from upr_kernel.pure.chunks import Part, gather
from upr_kernel.pure.columns import HEAD_BYTES, U64_END, Buffer, Columns

# `upr_protocol` describes this layout: a run in the directory of a bundle.
_RUN: Final = Struct("<IIQI4x")

_U32_END: Final = 1 << 32

RunPart = tuple[int, Buffer, int, int]
"""A run to be joined to others: its partition, its rows as a chunk, its counter and its chain."""


def join_runs(runs: list[RunPart], /) -> tuple[bytes, bytes]:
    """A bundle of these runs. O(rows), and one copy of the bytes.

    Args:
        runs: The runs, by rising partition.

    Returns:
        The directory, and one encoded chunk of all rows. A published chunk has no numbers, so the
        rows have none, whatever they have in the runs' own chunks.

    Raises:
        ValueError: A run has no rows, or the partitions do not rise.
        OverflowError: A number is out of range, or there are more than 2 GiB of keys, or of values.
        ChunkDefectError: A chunk is damaged.
    """
    entries: list[bytes] = []
    parts: list[Part] = []
    row_count = 0
    last_partition = -1
    for partition, chunk, counter, chain in runs:
        in_range = 0 <= partition < _U32_END and 0 <= counter < U64_END and 0 <= chain < _U32_END
        if not in_range:
            raise OverflowError("a partition, counter or chain is out of range")
        count = Columns(chunk).count
        if not count or partition <= last_partition:
            raise ValueError("a run has no rows, or the partitions do not rise")
        last_partition = partition
        row_count += count
        entries.append(_RUN.pack(partition, count, counter, chain))
        parts.append((chunk, 0, count, None, None, 0))
    joined = gather(parts, 0, 0)
    numbers_end = HEAD_BYTES + 8 * row_count
    numbers = bytes(8 * row_count)
    return b"".join(entries), b"".join((joined[:HEAD_BYTES], numbers, joined[numbers_end:]))
