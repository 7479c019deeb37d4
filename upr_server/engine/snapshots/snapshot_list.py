"""The snapshot list: what cursors share of one partition's snapshots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from upr_kernel import OpenRows
from upr_protocol.chunk import Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.open_snapshot import OpenSnapshot
from upr_server.engine.snapshots.segment import FreedMemory
from upr_server.engine.snapshots.snapshot_entry import SnapshotEntry

RETURNED_BYTES: Final = 16 * 1024 * 1024
"""Memory of freed snapshots that one step gives back: a chunk of 512 KiB takes 32 µs, as its pages
go back to the system, and a GiB of them 65 ms."""

RETURNED_BYTES_MIN: Final = 16 * 1024
"""What the smallest part of a snapshot counts as."""

_START: Final = attrgetter("start")


class NotInMemory(LookupError):  # noqa: N818  # it is an answer, not a fault
    """The mutation was freed: the disk has it."""


class ListedCursor(Protocol):
    """What the list asks of a cursor that stands in it."""

    @property
    def seq(self) -> SeqNo:
        """Everything up to this number was handed on."""

    def move_to_front_of(self, next_entry: SnapshotEntry) -> None:
        """Moves on to the front of `next_entry`: the cursor has read all of the entry before."""

    def wake(self) -> None:
        """There is something to read."""


CursorT = TypeVar("CursorT", bound=ListedCursor)


class SnapshotList(Generic[CursorT]):
    """One partition's snapshots, oldest first, and the cursors that stand in them.

    The last snapshot is open and takes mutations in. Each begins where the one before ends.

    Args:
        start: The number before the first mutation that it will take in.
        rows: The rows of the open snapshot.
        memory: What the bucket holds.
        on_released: Called with each entry that a cursor has left: it may now be collapsed.

    Attributes:
        on_released: See above. One cursor that has left one entry calls it without `note_released`.
        open: The open snapshot.
        entries: The entries, oldest first.
        cursors: The cursors, in a dict so that their order is the same in every run.
        persisted_seq: Everything up to this number is on disk.
    """

    __slots__ = (
        "_freed_memory",
        "_memory",
        "_resuming_in_open",
        "_waiting_cursors",
        "cursors",
        "entries",
        "on_released",
        "open",
        "persisted_seq",
    )

    def __init__(
        self,
        start: SeqNo,
        rows: OpenRows,
        memory: MemoryAccount,
        on_released: Callable[[SnapshotEntry], None],
    ) -> None:
        self._memory = memory
        self.on_released = on_released
        self.open = OpenSnapshot(start, rows, memory)
        self.entries = [SnapshotEntry(self.open)]
        self.persisted_seq = start
        self.cursors: dict[CursorT, None] = {}
        self._waiting_cursors: dict[CursorT, None] = {}
        # Those that resume inside the open snapshot: when it is closed, some have all of it.
        self._resuming_in_open: dict[CursorT, None] = {}
        # What freed snapshots held, and is still to be given back.
        self._freed_memory: list[FreedMemory] = []

    def __len__(self) -> int:
        """Snapshots, with the open one."""
        return len(self.entries)

    @property
    def high_seq(self) -> SeqNo:
        """The highest number taken in."""
        return self.open.high_seq

    @property
    def oldest_start(self) -> SeqNo:
        """Everything above this number is in memory."""
        return self.entries[0].start

    @property
    def segment_count(self) -> int:
        """Segments of all closed snapshots. O(snapshots)."""
        return sum(
            len(entry.snapshot)
            for entry in self.entries
            if isinstance(entry.snapshot, ClosedSnapshot)
        )

    # Finding.

    def entry_at(self, seq: SeqNo) -> SnapshotEntry:
        """The newest entry that starts at or before `seq`. O(log snapshots)."""
        return self.entries[bisect_right(self.entries, seq, key=_START) - 1]

    def find(self, seq: int) -> Mutation:
        """The mutation with this number, which must be its key's newest. O(log mutations).

        Raises:
            NotInMemory: The disk has it.
            KeyError: No mutation has this number.
        """
        if seq > self.open.start:
            return self.open.find(seq)
        index = bisect_right(self.entries, seq - 1, key=_START) - 1
        if index < 0:
            raise NotInMemory(seq)
        return self.close(self.entries[index]).find(seq)

    # For cursors.

    def add_cursor(self, cursor: CursorT, entry: SnapshotEntry, *, is_inside: bool) -> None:
        """A new cursor stands in `entry`: inside it, or at its front."""
        self.cursors[cursor] = None
        if is_inside and entry.snapshot is self.open:
            self._resuming_in_open[cursor] = None

    def remove_cursor(self, cursor: CursorT) -> None:
        """A cursor was closed or dropped."""
        del self.cursors[cursor]
        self._waiting_cursors.pop(cursor, None)
        self.open.rows.is_awaited = bool(self._waiting_cursors)
        self._resuming_in_open.pop(cursor, None)

    def note_released(self, entries: Sequence[SnapshotEntry]) -> None:
        """A cursor has left these entries, which rise."""
        for index, entry in enumerate(entries, 1):
            # Neighbours that are free belong to one run, which is found from the last of them.
            next_entry = entries[index] if index < len(entries) else None
            if next_entry is None or next_entry is not entry.next_entry or not next_entry.is_free:
                self.on_released(entry)

    def stop_notifying(self) -> None:
        """Nobody is told any more of what cursors have left."""
        self.on_released = lambda _entry: None

    def add_waiting(self, cursor: CursorT) -> None:
        """Has `reader` woken by the next mutation."""
        self._waiting_cursors[cursor] = None
        self.open.rows.is_awaited = True

    def wake(self) -> None:
        """Tells the cursors that wait that there is something to read. O(cursors that wait)."""
        if self._waiting_cursors:
            cursors, self._waiting_cursors = self._waiting_cursors, {}
            self.open.rows.is_awaited = False
            for cursor in cursors:
                cursor.wake()

    def waiting_cursors(self) -> list[CursorT]:
        """The cursors that wait."""
        return list(self._waiting_cursors)

    def resuming_in_open(self) -> list[CursorT]:
        """The cursors that resume inside the open snapshot."""
        return list(self._resuming_in_open)

    def close(self, entry: SnapshotEntry) -> ClosedSnapshot:
        """The snapshot of `entry`; if it is open, it is closed, and an entry behind it is open."""
        snapshot = entry.snapshot
        if isinstance(snapshot, ClosedSnapshot):
            return snapshot
        entry.snapshot = closed_snapshot = snapshot.close()
        # It begins again behind what it held.
        entry.next_entry = next_entry = SnapshotEntry(snapshot)
        self.entries.append(next_entry)
        if self._resuming_in_open:
            # A cursor that resumed at the snapshot's very end has all of it: inside the closed one
            # it would announce a snapshot without mutations.
            for cursor in self._resuming_in_open:
                if cursor.seq == closed_snapshot.end:
                    cursor.move_to_front_of(next_entry)
            self._resuming_in_open.clear()
        return closed_snapshot

    # Freeing what the disk has.

    @property
    def can_free(self) -> bool:
        """Whether `free_oldest` would free something. O(1)."""
        return len(self.entries) > 1 and self.entries[0].is_free

    def free_oldest(self) -> SnapshotEntry | None:
        """Frees the oldest snapshot, if it is closed and no cursor stands there. O(its segments).
        Much memory is given back by `return_memory`.

        The disk has it: its own cursor has passed.

        Returns:
            The entry it stood in, which is no longer in the list.
        """
        if not self.can_free:
            return None
        entry = self.entries.pop(0)
        self._free([entry])
        return entry

    def _free(self, entries: Sequence[SnapshotEntry]) -> None:
        """Frees closed snapshots, and gives back little memory at once."""
        has_waited = self.has_freed_memory
        for entry in entries:
            self._freed_memory += self.close(entry).free()
        # In one step snapshots of many partitions may be freed: what waited goes on waiting.
        if not has_waited:
            self.return_memory()

    @property
    def has_freed_memory(self) -> bool:
        """Whether `return_memory` has something to do. O(1)."""
        return bool(self._freed_memory)

    def return_memory(self) -> bool:
        """Goes on giving back the memory of freed snapshots, about `RETURNED_BYTES` of it. It does
        not count any more.

        Returns:
            Whether there was any.
        """
        freed_memory, nbytes = self._freed_memory, 0
        while freed_memory and nbytes < RETURNED_BYTES:
            nbytes += max(freed_memory.pop().nbytes, RETURNED_BYTES_MIN)
        return nbytes > 0

    def restart_at(self, seq: SeqNo) -> SnapshotEntry:
        """Lets go of all snapshots: the disk has what there is up to `seq`. O(segments). Their
        memory is given back by `return_memory`.

        Returns:
            The only entry, with an empty open snapshot.
        """
        for entry in self.entries:
            if isinstance(entry.snapshot, ClosedSnapshot):
                self._freed_memory += entry.snapshot.free()
        self.open = OpenSnapshot(seq, self.open.rows, self._memory)
        self.entries = [SnapshotEntry(self.open)]
        self.persisted_seq = seq
        return self.entries[0]

    # Collapsing.

    def is_run_free(self, run: Sequence[SnapshotEntry]) -> bool:
        """Whether the entries of `run` are still in the list, and no cursor stands inside them or
        at the front of any but the first. O(log snapshots + run)."""
        index = bisect_right(self.entries, run[0].start, key=_START) - 1
        return (
            self.entries[index : index + len(run)] == run
            and not any(entry.inside_count for entry in run)
            and not any(entry.front_count for entry in run[1:])
        )

    def replace(self, run: Sequence[SnapshotEntry], merged_snapshot: ClosedSnapshot) -> None:
        """Puts one snapshot in the first entry of `run`, and removes the others. Much memory is
        given back by `return_memory`."""
        self._free(run)
        first_entry = run[0]
        first_entry.snapshot = merged_snapshot
        first_entry.next_entry = run[-1].next_entry
        index = bisect_right(self.entries, first_entry.start, key=_START)
        del self.entries[index : index + len(run) - 1]

    # Checks.

    def recount(self, memory: MemoryAccount) -> None:
        """Adds what it holds to `memory`, by counting. O(arrays + segments)."""
        for entry in self.entries:
            entry.snapshot.recount(memory)

    def check_invariants(self) -> None:
        """Order and each snapshot. O(mutations)."""
        assert self.entries[-1].snapshot is self.open
        for entry, next_entry in pairwise(self.entries):
            assert isinstance(entry.snapshot, ClosedSnapshot), "only the last is open"
            assert entry.start == entry.snapshot.start
            assert entry.snapshot.end == next_entry.start, "snapshots touch"
            assert entry.next_entry is next_entry
        for entry in self.entries:
            entry.snapshot.check_invariants()
        assert any(entry.start == self.persisted_seq for entry in self.entries), (
            "the disk's end is a boundary"
        )
        assert self._waiting_cursors.keys() <= self.cursors.keys()
        assert self._resuming_in_open.keys() <= self.cursors.keys()
