"""Collapsing: several closed snapshots become one, the newer item of each key wins.

A run of neighbours may be collapsed if no cursor stands inside any of them, nor at the front of any
but the first: a cursor at the front of the first reads the collapsed snapshot as well as it would
have read them all. Size decides whether it is worth it, as in a log-structured merge: a snapshot is
rewritten only together with newer ones that come to half its size at least. So a mutation is copied
a logarithmic number of times, the sizes that stay fall by half from one to the next, and all of
them together come to about twice the oldest one, whose keys are unique.

The work is done in steps beside the snapshots: first each chunk's keys go into a table, which tells
what is superseded, then the rest is gathered. The result replaces the snapshots at the end at once,
if no cursor has entered the run meanwhile. Where all keys were new when they came, nothing is
superseded: then no key is looked at, and only small chunks are copied.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from upr_kernel import KeyTable, gather
from upr_protocol.chunk import LARGE_BYTES, Chunk, WidenedChunk
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.document_arrays import Rows
from upr_server.engine.snapshots.snapshot_entry import SnapshotEntry

COLLAPSE_SNAPSHOTS_MIN: Final = 8
"""Small snapshots are collapsed so many at a time while more of them come: a collapse costs 20 to
50 µs, however little is in it."""

SHORT_RUN_SNAPSHOTS_MIN: Final = 2
"""From time to time so many are enough: see `MutationManager.consider_short_runs`."""

SHORT_RUN_BYTES_MAX: Final = 64 * 1024
"""As long as they come to no more than this, which costs 100 µs. Larger ones wait until their bytes
matter: then few collapses do the work of many."""

JOINED_SNAPSHOTS_MIN: Final = 3
"""How many small ones at least are put together before they are written to disk. Each would be a
chunk there, which costs the writer and the index more than this costs here."""

JOINED_SNAPSHOTS_MAX: Final = 64
"""And not more at a time, which bounds the step."""

COLLAPSE_BYTES_MIN: Final = 256 * 1024
"""Two are enough when the newer ones come to this: then their bytes are what matters."""

CHUNK_BYTES: Final = 512 * 1024
"""Chunks that result are about this long. Each chunk costs the server and every consumer some steps
of Python beside its bytes; of a bucket that was loaded in chunks of 150 kB that was a third of what
it cost to stream. Twice a `segment.SEGMENT_BYTES`, as segments go to disk, too, where a key is read
with its whole chunk. With the batch of a streamer that such a chunk may exceed it is no more than
one call writes (`socket_io.WRITE_BYTES`)."""

CHUNK_MUTATIONS: Final = 4096
"""And not longer than this, about, which bounds the steps of the next collapse."""

WIDEN_BYTES: Final = 1024 * 1024
"""What is copied at a time of a large chunk that must begin earlier: 0.7 ms, in new memory."""

WIDEN_COST: Final = 4096
"""What that costs, in mutations of `Collapse.step`."""

BYTES_PER_MUTATION: Final = 512
"""Bytes of a chunk that cost as much as a mutation: they may be copied twice, when the chunk is
encoded for the first time and when it is put together with others."""

_START: Final = attrgetter("start")


def entries_to_collapse(
    entries: Sequence[SnapshotEntry],
    entry: SnapshotEntry,
    *,
    may_be_short: bool = False,
    shortest: bool = False,
) -> list[SnapshotEntry] | None:
    """The run around `entry` that should be collapsed, or None. O(log entries + run).

    Args:
        entries: All entries, oldest first; the last one holds the open snapshot.
        entry: Where something changed.
        may_be_short: Whether two snapshots are enough, if all of them are small.
        shortest: Whether to look only as far as shows that there is a run. That matters while the
            disk is behind with very many snapshots.
    """
    closed_count = len(entries) - 1
    if entry.inside_count or not closed_count:
        return None
    last_index = closed_count - 1
    if entries[last_index] is not entry:
        last_index = bisect_left(entries, entry.start, key=_START)
        if last_index >= closed_count or entries[last_index] is not entry:
            return None
    while last_index + 1 < closed_count and entries[last_index + 1].is_free:
        last_index += 1
    first_index, newer_bytes = last_index, 0
    snapshots_min = SHORT_RUN_SNAPSHOTS_MIN if may_be_short else COLLAPSE_SNAPSHOTS_MIN
    total_bytes = entries[last_index].snapshot.nbytes
    bytes_max = SHORT_RUN_BYTES_MAX if may_be_short else sys.maxsize
    is_enough = False
    while first_index and not entries[first_index].front_count and not (shortest and is_enough):
        older = entries[first_index - 1]
        size = older.snapshot.nbytes
        # An older snapshot that is more than twice as large is left out: to copy it for the few
        # bytes of the newer ones would cost more than it frees. So each mutation is copied only a
        # few times.
        if older.inside_count or size > 2 * total_bytes or size > bytes_max - total_bytes:
            break
        first_index, newer_bytes, total_bytes = first_index - 1, total_bytes, total_bytes + size
        is_enough = (
            last_index - first_index >= snapshots_min - 1 or newer_bytes >= COLLAPSE_BYTES_MIN
        )
    return list(entries[first_index : last_index + 1]) if is_enough else None


def entries_to_join(entry: SnapshotEntry) -> list[SnapshotEntry]:
    """The run of small closed snapshots that begins with `entry`, if it is worth putting together
    before it is written to disk; otherwise an empty list. O(run)."""
    run: list[SnapshotEntry] = []
    total_bytes, last = 0, entry
    while (
        last.next_entry is not None
        and not last.inside_count
        and (last is entry or not last.front_count)
        and len(run) < JOINED_SNAPSHOTS_MAX
    ):
        total_bytes += last.snapshot.nbytes
        if total_bytes > SHORT_RUN_BYTES_MAX:
            break
        run.append(last)
        last = last.next_entry
    return run if len(run) >= JOINED_SNAPSHOTS_MIN else []


class Collapse:
    """A collapse under way.

    Args:
        entries: The run, oldest first.
        snapshots: Their snapshots.
        evicted_through: The table has forgotten keys up to this number. A snapshot that has one of
            them again does not count as renewing it.

    Attributes:
        entries: The run.
        renews_keys: What `ClosedSnapshot` says, of the result.
    """

    __slots__ = (
        "_chunks",
        "_chunks_to_enter",
        "_entered_chunks",
        "_flags",
        "_group",
        "_group_bytes",
        "_group_count",
        "_is_disjoint",
        "_table",
        "_taken_count",
        "_widened_chunks",
        "entries",
        "renews_keys",
    )

    def __init__(
        self,
        entries: list[SnapshotEntry],
        snapshots: list[ClosedSnapshot],
        evicted_through: int = 0,
    ) -> None:
        self.entries = entries
        self.renews_keys = any(snapshot.renews_keys for snapshot in snapshots)
        # Whether no key occurs in two of the snapshots.
        self._is_disjoint = evicted_through <= snapshots[0].start and not any(
            snapshot.renews_keys for snapshot in snapshots[1:]
        )
        # Chunks that are not in the table yet, and those that are; oldest first.
        self._chunks_to_enter = _oldest_first(snapshots)
        self._entered_chunks: deque[Chunk] = deque()
        # Their mutations are numbered from 1, and a newer one of a key flags the older.
        self._table = KeyTable()
        self._flags = bytearray()
        # How many mutations were taken out of the table's chunks again.
        self._taken_count = 0
        # Results, oldest first; and the group of chunks that the next one will be made of, with
        # flags for what is superseded.
        self._chunks: list[Chunk] = []
        self._group: list[tuple[Chunk, bytes | bytearray | None]] = []
        self._group_count = 0
        self._group_bytes = 0
        # Large chunks that must begin earlier, each with its place in the result.
        self._widened_chunks: deque[tuple[int, WidenedChunk]] = deque()

    def step(self, budget_mutations: int) -> bool:
        """Goes on by about so many mutations, or bytes that cost as much; returns whether it is
        done."""
        while budget_mutations > 0:
            chunk = next(self._chunks_to_enter, None)
            if chunk is not None and self._is_disjoint:
                # Where it stays as it is, its rows cost nothing.
                is_copied = self._add_to_group(chunk, b"")
                budget_mutations -= chunk.nbytes // BYTES_PER_MUTATION if is_copied else 0
                budget_mutations -= 1
            elif chunk is not None:
                self._enter(chunk)
                budget_mutations -= max(chunk.count + 1, chunk.nbytes // BYTES_PER_MUTATION)
            elif self._entered_chunks:
                chunk = self._entered_chunks.popleft()
                flags = self._flags[self._taken_count : self._taken_count + chunk.count]
                self._taken_count += chunk.count
                self._add_to_group(chunk, flags)
                budget_mutations -= max(chunk.count // 2 + 1, chunk.nbytes // BYTES_PER_MUTATION)
            else:
                self._finish_group()
                if not self._widened_chunks:
                    return True
                self._widen()
                budget_mutations -= WIDEN_COST
        return False

    def chunks(self) -> list[Chunk]:
        """The result, oldest first, once it is done."""
        return self._chunks

    def _enter(self, chunk: Chunk) -> None:
        """Enters the next newer chunk into the table. O(its mutations)."""
        flags = self._flags
        first_seq = len(flags) + 1
        flags += bytes(chunk.count)
        self._table.put_run(chunk.encode(), 0, chunk.count, first_seq, 0, 1, flags)
        self._entered_chunks.append(chunk)

    def _add_to_group(self, chunk: Chunk, skip_flags: bytes | bytearray) -> bool:
        """Adds the next newer chunk to the result. At memory speed.

        Args:
            chunk: The chunk.
            skip_flags: A byte for each row, 1 for those that are superseded; empty if none is.

        Returns:
            Whether its rows may have to be copied.
        """
        count, nbytes = chunk.count - skip_flags.count(1), chunk.nbytes
        skip: bytes | bytearray | None = None
        if count < chunk.count:
            skip = skip_flags
            nbytes = nbytes * count // chunk.count
        # A long chunk that loses no row stays as it is: its readers share its bytes.
        alone = skip is None and nbytes > CHUNK_BYTES // 2
        too_long = (
            self._group_bytes + nbytes > CHUNK_BYTES or self._group_count + count > CHUNK_MUTATIONS
        )
        # A group that was superseded as a whole goes with what comes next, which covers its
        # numbers. The newest chunk's last mutation stays, so that there is such a chunk.
        if self._group_count and (alone or too_long):
            self._finish_group()
        self._group.append((chunk, skip))
        self._group_count += count
        self._group_bytes += nbytes
        if alone:
            self._finish_group()
        return not alone

    def _finish_group(self) -> None:
        """Makes one chunk of the group."""
        group = self._group
        if not group:
            return
        start, end = group[0][0].start, group[-1][0].end
        last_chunk, last_skip = group[-1]
        is_last_alone = last_skip is None and self._group_count == last_chunk.count
        if len(group) == 1 and last_skip is None:
            self._chunks.append(last_chunk)
        elif is_last_alone and last_chunk.nbytes > LARGE_BYTES:
            # All that differs is where it begins.
            self._widened_chunks.append((len(self._chunks), WidenedChunk(last_chunk, start)))
            self._chunks.append(last_chunk)
        else:
            rows: list[Rows] = [
                (chunk.encode(), 0, chunk.count, skip, None, 0) for chunk, skip in group
            ]
            self._chunks.append(Chunk(gather(rows, start, end)))
        group.clear()
        self._group_count = self._group_bytes = 0

    def _widen(self) -> None:
        """Copies a piece of the next large chunk that must begin earlier than it does."""
        chunk_index, widened_chunk = self._widened_chunks[0]
        if widened_chunk.copy(WIDEN_BYTES):
            self._chunks[chunk_index] = widened_chunk.chunk()
            self._widened_chunks.popleft()


def _oldest_first(snapshots: list[ClosedSnapshot]) -> Iterator[Chunk]:
    for snapshot in snapshots:
        for index in range(len(snapshot)):
            yield snapshot.chunk(index)
