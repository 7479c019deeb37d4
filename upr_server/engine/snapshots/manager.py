"""The mutation manager: the cursors of one partition, and the snapshots that they read.

Mutations do not come through here: `Partition.mutate` appends them to `snapshots.open`. The manager
decides what becomes of the snapshots behind the open one: it registers cursors, drops slow ones,
collapses neighbouring snapshots, and frees what the disk has.

**The list.** Snapshots stand oldest first; the last is open and takes mutations in. A cursor that
enters the open snapshot closes it, and a new one is opened behind it. Neighbours that no cursor
stands between are collapsed. The oldest snapshot, once closed, may be freed when no cursor stands
in it or before it: the disk has it, as the disk's own cursor has passed. It is freed when memory
runs short, and serves readers until then.

A cursor at the end of everything waits. The first mutation wakes all that wait, once; the snapshot
stays open until one of them comes to read, so that what arrives in between is still deduplicated
by key.

**Cursor drop.** A snapshot cannot be freed while a cursor stands in it or before it. So a slow
consumer's cursor keeps memory that the disk no longer needs. When memory is short and nothing else
can be freed (`Bucket.free_memory` has the order), the cursors that stand furthest back are dropped.
A dropped cursor answers `BackfillNeeded`: its stream goes on from disk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import msgspec

from upr_kernel import OpenRows
from upr_protocol.ids import SeqNo
from upr_server.engine.hash_table import HashTable
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.collapse import (
    Collapse,
    entries_to_collapse,
    entries_to_join,
)
from upr_server.engine.snapshots.cursor import BackfillNeeded, Cursor, PersistenceCursor
from upr_server.engine.snapshots.snapshot_entry import SnapshotEntry
from upr_server.engine.snapshots.snapshot_list import SnapshotList


class Registration(msgspec.Struct, frozen=True):
    """What registering led to.

    Attributes:
        cursor: The memory cursor.
        backfill: What must be read from disk before the cursor's first item; None for nothing.
    """

    cursor: Cursor
    backfill: BackfillNeeded | None = None


class MutationManager:
    """Manages one partition's cursors, and the snapshots that they have read.

    It manages no mutations: `Partition` appends those to `snapshots.open`, and readers take them
    from their cursors.

    Args:
        start: The number before the first mutation that it will take in.
        rows: The rows of the open snapshot.
        table: The partition's keys; it tells up to which number it has forgotten some.
        memory: What the bucket holds.
        on_collapsible: Called when `needs_collapse` becomes true.

    Attributes:
        snapshots: The snapshots.
        persistence: The cursor for the disk; it exists from the start, at the oldest snapshot.
        dropped_count: Cursors dropped, ever.
    """

    __slots__ = (
        "_candidates",
        "_collapse",
        "_collapsed_count",
        "_freed_count",
        "_has_released",
        "_memory",
        "_on_collapsible",
        "_table",
        "dropped_count",
        "persistence",
        "snapshots",
    )

    def __init__(
        self,
        start: SeqNo,
        rows: OpenRows,
        table: HashTable,
        memory: MemoryAccount,
        on_collapsible: Callable[[], None] | None = None,
    ) -> None:
        self._memory = memory
        self._table = table
        self._on_collapsible = on_collapsible
        self.snapshots: SnapshotList[Cursor] = SnapshotList(start, rows, memory, self._released)
        # Entries around which something to collapse may be found, in their order, each with whether
        # two snapshots are enough.
        self._candidates: dict[SnapshotEntry, bool] = {}
        # Whether a cursor has left an entry since `consider_short_runs` was called.
        self._has_released = False
        self._collapse: Collapse | None = None
        self._collapsed_count = self._freed_count = 0
        self.dropped_count = 0
        self.persistence = PersistenceCursor(self.snapshots, self.snapshots.entries[0])
        self.snapshots.add_cursor(self.persistence, self.snapshots.entries[0], is_inside=False)

    @property
    def cursor_count(self) -> int:
        """Cursors, with that for the disk."""
        return len(self.snapshots.cursors)

    def stop_notifying(self) -> None:
        """Its bucket was deleted: nothing is collapsed or persisted any more. Once the cursors of
        readers are closed, it is in no reference cycle."""
        self._on_collapsible = None
        self._candidates.clear()
        self._collapse = None
        self.snapshots.stop_notifying()
        self.snapshots.remove_cursor(self.persistence)

    # Registering cursors.

    def register(
        self,
        name: str,
        start: SeqNo,
        *,
        end_at_least: SeqNo = SeqNo(0),
        on_ready: Callable[[], None] | None = None,
    ) -> Registration:
        """Registers a cursor that reads everything above `start`. O(log snapshots).

        Args:
            name: Whose it is, for statistics.
            start: What the reader has already. Inside a snapshot, the cursor begins there, and the
                snapshot it announces ends where that one ends.
            end_at_least: The first snapshot handed on must not end below this: the reader was
                interrupted in a snapshot that ends there. Several may be handed on as one for it,
                and keys may then repeat.
            on_ready: Called once there is something to read, each time after `next` gave None.

        Returns:
            The cursor; and if `start` is no longer in memory, what to read from disk before it: the
            cursor then stands where the disk ends.

        Raises:
            ValueError: `start` or `end_at_least` is above the highest number.
        """
        snapshots = self.snapshots
        if max(start, end_at_least) > snapshots.high_seq:
            raise ValueError(
                f"{max(start, end_at_least)} is above the high number {snapshots.high_seq}"
            )
        backfill = None
        if start < snapshots.oldest_start:
            # A backfill is needed. A state on disk is that at the persisted end, and at no number
            # before it. (`PartitionReader` asks before it registers, and fixes the end later.)
            backfill = BackfillNeeded(start, snapshots.persisted_seq)
            start = snapshots.persisted_seq
        entry = snapshots.entry_at(start)
        cursor = Cursor(
            snapshots,
            name,
            entry,
            start,
            end_at_least=end_at_least,
            on_ready=on_ready,
        )
        snapshots.add_cursor(cursor, entry, is_inside=not cursor.at_front)
        return Registration(cursor, backfill)

    # Cursor drop.

    def droppable_cursors(self) -> list[Cursor]:
        """The cursors that may be dropped and stand furthest back: in a snapshot older than any
        that the disk still needs. One level with the disk holds back nothing that the disk's cursor
        does not hold back too: to drop it would cost a backfill and free nothing. O(cursors), and
        O(1) where the disk needs the oldest snapshot."""
        if self.persistence.oldest_entry is self.snapshots.entries[0]:
            # None is behind the disk. While that is slow, every partition of a bucket is asked in
            # one step, and 200 consumers have 200,000 cursors there.
            return []
        # Only these: while any of them stays, dropping a cursor further on frees nothing. In one
        # pass: 4,000 cursors are looked at in one step.
        cursors: list[Cursor] = []
        oldest = self.persistence.oldest_entry.start
        for cursor in self.snapshots.cursors:
            start = cursor.oldest_entry.start
            if start < oldest:
                oldest, cursors = start, [cursor]
            elif start == oldest and cursors:
                cursors.append(cursor)
        return cursors

    def drop_furthest_back(self) -> bool:
        """Cursor drop: removes all `droppable_cursors`, so that what they held can be freed. Their
        `next` then asks for a backfill, and the streams go on from disk.

        Returns:
            Whether there were any.
        """
        cursors = self.droppable_cursors()
        for cursor in cursors:
            cursor.drop()
        self.dropped_count += len(cursors)
        return bool(cursors)

    # Freeing what the disk has.

    def free_oldest(self) -> bool:
        """Frees the oldest snapshot, if it is closed and no cursor stands there. O(its segments).
        What of its memory is too much for one step, `collapse_step` gives back.

        Returns:
            Whether it did.
        """
        needed_collapse = self.needs_collapse
        entry = self.snapshots.free_oldest()
        if entry is None:
            return False
        self._candidates.pop(entry, None)
        self._freed_count += 1
        self._tell_of_collapse(needed_collapse)
        return True

    def restart_at(self, seq: SeqNo) -> None:
        """Begins again at `seq` with nothing in memory: the disk has what there is up to `seq`,
        which may never have been in memory. Every reader has to go on from disk, and those that
        wait are woken. `collapse_step` gives back the memory of what there was.

        O(cursors + segments).

        Raises:
            ValueError: Memory holds something that the disk does not have.
        """
        snapshots = self.snapshots
        if snapshots.persisted_seq < snapshots.high_seq:
            raise ValueError(f"the disk has {snapshots.persisted_seq} of {snapshots.high_seq}")
        waiting_cursors = snapshots.waiting_cursors()
        for cursor in list(snapshots.cursors):
            if cursor is not self.persistence:
                cursor.drop()
        self._candidates.clear()
        self._collapse = None
        needed_collapse = self.needs_collapse
        self.persistence.restart_at(snapshots.restart_at(seq))
        self._tell_of_collapse(needed_collapse)
        for cursor in waiting_cursors:
            if cursor is not self.persistence:
                cursor.wake()

    # Collapsing.

    @property
    def needs_collapse(self) -> bool:
        """Whether `collapse_step` has something to do. O(1)."""
        return (
            self._collapse is not None or bool(self._candidates) or self.snapshots.has_freed_memory
        )

    def _tell_of_collapse(self, needed_collapse: bool) -> None:
        """Says that there is something to do for `collapse_step`, unless that was so before."""
        if not needed_collapse and self.needs_collapse and self._on_collapsible is not None:
            self._on_collapsible()

    def collapse_step(self, budget_mutations: int) -> bool:
        """Goes on collapsing: looks at about `budget_mutations` at most. First it gives back the
        memory of freed snapshots, some in each step.

        Args:
            budget_mutations: One costs 0.1 to 0.3 µs, and so do some hundred bytes; it is overrun
                by one chunk at most.

        Returns:
            Whether there is more to do.
        """
        if self.snapshots.return_memory():
            return self.needs_collapse
        collapse = self._collapse
        if collapse is None:
            collapse = self._collapse = self._next_collapse()
            if collapse is None:
                return False
        if not self.snapshots.is_run_free(collapse.entries):
            # A cursor has entered the run since, or its oldest was freed. What was done is thrown
            # away: the cursor reads the snapshots as they were.
            self._collapse = None
            self._consider(collapse.entries[-1])
        elif collapse.step(budget_mutations):
            self._collapse = None
            self._finish(collapse)
        return self.needs_collapse

    def consider_short_runs(self) -> None:
        """Has snapshots collapsed that cursors have left and that are too few and too small to be
        collapsed at once: any two small neighbours of like size.

        To be called from time to time. If every two were collapsed as soon as a cursor leaves, a
        consumer that follows small writes would cost a collapse for each.

        O(1) if no cursor has moved since the last call; otherwise O(snapshots).
        """
        if not self._has_released:
            return
        self._has_released = False
        for entry, next_entry in pairwise(self.snapshots.entries):
            # A run is looked for from the newest entry that may belong to it.
            if not next_entry.is_free or next_entry.next_entry is None:
                self._consider(entry, may_be_short=True)

    def join_unwritten(self) -> int:
        """Collapses the small snapshots that the disk's cursor comes to next, if no other cursor
        stands between them. Written one by one, each would be a chunk of its own on disk.

        O(their mutations): some 5 µs for each snapshot, and 300 µs at most.

        Returns:
            How many snapshots were put together.
        """
        cursor = self.persistence
        if self._collapse is not None or not cursor.at_front:
            return 0
        run = entries_to_join(cursor.entry)
        if run:
            collapse = self._collapse_of(run)
            while not collapse.step(sys.maxsize):
                pass
            self._finish(collapse)
        return len(run)

    def _released(self, entry: SnapshotEntry) -> None:
        """A cursor has left `entry`."""
        self._has_released = True
        # This comes first, as in `_consider`: most of the time the next reader is still to come.
        if not entry.inside_count:
            self._consider(entry)

    def _consider(self, entry: SnapshotEntry, *, may_be_short: bool = False) -> None:
        """Makes `entry` a candidate, if there is a run to collapse around it."""
        entries = self.snapshots.entries
        if (
            entry.inside_count
            or entry in self._candidates
            or entry.start < entries[0].start
            or entries_to_collapse(entries, entry, may_be_short=may_be_short, shortest=True) is None
        ):
            return
        needed_collapse = self.needs_collapse
        self._candidates[entry] = may_be_short
        self._tell_of_collapse(needed_collapse)

    def _next_collapse(self) -> Collapse | None:
        while self._candidates:
            entry, may_be_short = next(iter(self._candidates.items()))
            del self._candidates[entry]
            # Cursors may have come since it became a candidate.
            run = entries_to_collapse(self.snapshots.entries, entry, may_be_short=may_be_short)
            if run is not None:
                return self._collapse_of(run)
        return None

    def _collapse_of(self, run: list[SnapshotEntry]) -> Collapse:
        snapshots = [self.snapshots.close(entry) for entry in run]
        return Collapse(run, snapshots, self._table.evicted_through)

    def _finish(self, collapse: Collapse) -> None:
        run, needed_collapse = collapse.entries, self.needs_collapse
        merged_snapshot = ClosedSnapshot.of_chunks(collapse.chunks(), self._memory)
        merged_snapshot.renews_keys = collapse.renews_keys
        self.snapshots.replace(run, merged_snapshot)
        for entry in run:
            self._candidates.pop(entry, None)
        self._collapsed_count += 1
        self._has_released = True
        self._tell_of_collapse(needed_collapse)
        self._consider(run[0])

    # Figures and checks.

    def statistics(self) -> dict[str, int]:
        """Figures of this partition's queue. O(snapshots)."""
        snapshots = self.snapshots
        return {
            "high": snapshots.high_seq,
            "oldest": snapshots.oldest_start,
            "snapshots": len(snapshots),
            "cursors": len(snapshots.cursors),
            "waiting": len(snapshots.waiting_cursors()),
            "persisted": snapshots.persisted_seq,
            "collapses": self._collapsed_count,
            "dropped": self.dropped_count,
            "freed": self._freed_count,
        }

    def check_invariants(self) -> None:
        """The list, each snapshot, where each cursor stands. O(mutations)."""
        snapshots = self.snapshots
        snapshots.check_invariants()
        cursors = list(snapshots.cursors)
        for entry in snapshots.entries:
            front_count = sum(cursor.entry is entry and cursor.at_front for cursor in cursors)
            inside_count = sum(cursor.held_entries.count(entry) for cursor in cursors)
            assert entry.front_count == front_count, (entry.front_count, front_count)
            assert entry.inside_count == inside_count, (entry.inside_count, inside_count)
        for cursor in cursors:
            assert cursor.entry in snapshots.entries, cursor
            assert all(entry in snapshots.entries for entry in cursor.held_entries), cursor
            assert cursor.entry.start <= cursor.seq <= cursor.entry.end, cursor
        for cursor in snapshots.resuming_in_open():
            assert cursor.entry is snapshots.entries[-1], cursor
            assert not cursor.at_front, cursor
        for cursor in snapshots.waiting_cursors():
            assert not cursor.has_next, "a cursor that waits has nothing to read"
        assert self.persistence in snapshots.cursors
