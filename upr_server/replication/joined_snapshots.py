"""Small snapshots that a replica has received, put together before they go to disk. Pure.

Each would be a chunk there, which costs the process that writes some 20 µs, mostly to read it again
for the index. The active node does the same with those that it writes (`Collapse`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from upr_kernel import KeyTable, gather
from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo
from upr_server.engine.snapshots.collapse import JOINED_SNAPSHOTS_MAX, SHORT_RUN_BYTES_MAX
from upr_server.engine.snapshots.document_arrays import Rows


def join_snapshots(
    chunks: Sequence[Chunk], ends: Sequence[SeqNo], *, is_continued: bool
) -> Generator[None, None, tuple[list[Chunk], list[SeqNo]]]:
    """Makes one chunk of each run of small neighbours, of 64 KiB and 64 chunks at most. Of a key it
    keeps the newest mutation, as a snapshot has one at most. In steps of one run: 0.1 ms.

    Args:
        chunks: Chunks of snapshots, each from where the one before ends. The last snapshot may lack
            its end.
        ends: Those of the chunks' ends at which a snapshot ends.
        is_continued: Whether the first snapshot began before the first chunk. It stays as it is.

    Returns:
        The chunks and the ends that are left.
    """
    joiner = _SnapshotJoiner()
    end_set = frozenset(ends)
    snapshot: list[Chunk] = []
    for chunk in chunks:
        snapshot.append(chunk)
        if chunk.end in end_set:
            end_count = len(joiner.ends)
            joiner.add(snapshot, may_join=not is_continued)
            is_continued, snapshot = False, []
            if len(joiner.ends) > end_count:
                yield
    joiner.end_run()
    return joiner.chunks + snapshot, joiner.ends


class _SnapshotJoiner:
    """Puts snapshots together as they come.

    Attributes:
        chunks: The chunks that are done.
        ends: The ends of snapshots among them.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.ends: list[SeqNo] = []
        self._run: list[Chunk] = []
        self._run_bytes = 0

    def add(self, snapshot: Sequence[Chunk], *, may_join: bool) -> None:
        """The next snapshot."""
        nbytes = sum(chunk.nbytes for chunk in snapshot)
        is_small = nbytes <= SHORT_RUN_BYTES_MAX and len(snapshot) <= JOINED_SNAPSHOTS_MAX
        if (
            self._run_bytes + nbytes > SHORT_RUN_BYTES_MAX
            or len(self._run) + len(snapshot) > JOINED_SNAPSHOTS_MAX
        ):
            self.end_run()
        if may_join and is_small:
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
