"""Small snapshots that a replica has received, put together before they go to disk. Pure.

Each would be a chunk there, which costs the process that writes some 20 µs, mostly to read it again
for the index. The active node does the same with those that it writes (`Collapse`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from upr_kernel import KeyTable, gather
from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo
from upr_server.engine.snapshots.document_arrays import Rows

JOINED_BYTES_MAX: Final = 64 * 1024
"""Snapshots are put together as long as they come to no more than this: 50 µs of work."""

STEP_RUNS: Final = 16
"""Runs that are put together before others have their turn."""


def join_snapshots(
    chunks: Sequence[Chunk], ends: Sequence[SeqNo], *, is_continued: bool
) -> Generator[None, None, tuple[list[Chunk], list[SeqNo]]]:
    """Makes one chunk of each run of small neighbours. Of a key it keeps the newest mutation, as a
    snapshot has one at most.

    Args:
        chunks: Chunks of snapshots, each from where the one before ends. The last snapshot may lack
            its end.
        ends: Those of the chunks' ends at which a snapshot ends.
        is_continued: Whether the first snapshot began before the first chunk. It stays as it is.

    Returns:
        The chunks and the ends that are left.
    """
    joined = _Joined()
    end_set = frozenset(ends)
    snapshot: list[Chunk] = []
    for chunk in chunks:
        snapshot.append(chunk)
        if chunk.end in end_set:
            joined.add(snapshot, may_join=not is_continued)
            is_continued, snapshot = False, []
            if joined.run_count >= STEP_RUNS:
                joined.run_count = 0
                yield
    joined.end_run()
    return joined.chunks + snapshot, joined.ends


class _Joined:
    """What has come of the snapshots so far.

    Attributes:
        chunks: The chunks that are done.
        ends: The ends of snapshots among them.
        run_count: How many runs were ended.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.ends: list[SeqNo] = []
        self.run_count = 0
        self._run: list[Chunk] = []
        self._run_bytes = 0

    def add(self, snapshot: Sequence[Chunk], *, may_join: bool) -> None:
        """The next snapshot."""
        nbytes = sum(chunk.nbytes for chunk in snapshot)
        if self._run_bytes + nbytes > JOINED_BYTES_MAX:
            self.end_run()
        if may_join and nbytes <= JOINED_BYTES_MAX:
            self._run += snapshot
            self._run_bytes += nbytes
        else:
            self.end_run()
            self.chunks += snapshot
            self.ends.append(snapshot[-1].end)

    def end_run(self) -> None:
        """What comes next is not put together with what came so far."""
        run = self._run
        if run:
            self.chunks.append(run[0] if len(run) == 1 else _joined_chunk(run))
            self.ends.append(run[-1].end)
            self.run_count += 1
            self._run, self._run_bytes = [], 0


def _joined_chunk(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk with the newest mutation of each key. O(mutations)."""
    table, flags = KeyTable(), bytearray(sum(chunk.count for chunk in chunks))
    first = 1
    for chunk in chunks:
        table.put_run(chunk.encode(), 0, chunk.count, first, 0, 1, flags)
        first += chunk.count
    rows: list[Rows] = []
    first = 0
    for chunk in chunks:
        skipped = flags[first : first + chunk.count]
        rows.append((chunk.encode(), 0, chunk.count, skipped if any(skipped) else None, None, 0))
        first += chunk.count
    return Chunk(gather(rows, chunks[0].start, chunks[-1].end))
