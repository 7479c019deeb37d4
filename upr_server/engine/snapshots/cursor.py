"""Cursors: how consumers and the disk read the snapshots.

A cursor hands on a start, chunks and an end for each snapshot. It stands at the front of a
snapshot, or inside one at a number; `SnapshotEntry` counts the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo, SnapshotKind
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.snapshot_entry import SnapshotEntry
from upr_server.engine.snapshots.snapshot_list import SnapshotList


class _State(Enum):
    """Whether a cursor is in the list of snapshots still."""

    LISTED = "listed"
    """It stands in the list."""

    CLOSED = "closed"
    """Its owner has closed it."""

    DROPPED = "dropped"
    """It was dropped for memory; its owner has to be told."""


_LISTED: Final = _State.LISTED  # an enum's attributes are slow to look up


class SnapshotStartItem(msgspec.Struct, frozen=True):
    """What follows, up to the `SnapshotEndItem`, leads from the state at `start` to that at `end`.

    Attributes:
        start: Exclusive: where the cursor stood.
        end: Inclusive.
        kind: Read from memory or from disk.
        may_repeat: Whether a key may occur more than once; its last mutation counts.
    """

    start: SeqNo
    end: SeqNo
    kind: SnapshotKind = SnapshotKind.MEMORY
    may_repeat: bool = False


class SnapshotEndItem(msgspec.Struct, frozen=True):
    """Here, and only here, what was read is a consistent state: that at number `end`."""

    end: SeqNo


class BackfillNeeded(msgspec.Struct, frozen=True):
    """The mutations in (start, end] are no longer in memory: read them from disk first."""

    start: SeqNo
    end: SeqNo


CursorItem = SnapshotStartItem | Chunk | SnapshotEndItem | BackfillNeeded


def _entry_behind(entry: SnapshotEntry) -> SnapshotEntry:
    """The entry behind that of a closed snapshot."""
    assert entry.next_entry is not None, "a closed snapshot is not the last"
    return entry.next_entry


class Cursor:
    """A reader of one partition's mutations. Made by `MutationManager.register`.

    Attributes:
        name: Whose it is, for statistics.
        seq: Everything up to this number was handed on.
        entry: Where it stands. For the snapshot list and the manager, as are the next two.
        at_front: Whether it is counted as at the front of `entry`; if not, it is inside.
        held_entries: Entries in which it is counted as inside, oldest first.
    """

    __slots__ = (
        "_end",
        "_end_at_least",
        "_index",
        "_is_reading",
        "_on_ready",
        "_snapshots",
        "_state",
        "at_front",
        "entry",
        "held_entries",
        "name",
        "seq",
    )

    def __init__(
        self,
        snapshots: SnapshotList[Cursor],
        name: str,
        entry: SnapshotEntry,
        seq: SeqNo,
        *,
        end_at_least: SeqNo = SeqNo(0),
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._on_ready = on_ready
        self._end_at_least = end_at_least
        self._state = _LISTED
        # Whether a snapshot was announced and its end was not; where that ends; and the next
        # segment of the one that it reads.
        self._is_reading = False
        self._end = seq
        self._index = 0
        self.name = name
        self.seq = seq
        self.entry = entry
        self.at_front = seq == entry.start
        # A list, though the oldest are removed first: there are few, and an empty deque takes ten
        # times as much of what each stream costs.
        self.held_entries: list[SnapshotEntry] = []
        if self.at_front:
            entry.front_count += 1
        else:
            self._hold(entry)

    def __repr__(self) -> str:
        return f"<Cursor {self.name!r}, {self._state.value}, at {self.seq}>"

    # Reading.

    @property
    def has_next(self) -> bool:
        """Whether `next` would hand on anything. O(1)."""
        snapshots = self._snapshots
        return (
            self._is_reading
            or self._state is not _LISTED
            or self.entry.snapshot is not snapshots.open
            or snapshots.open.rows.high > self.seq
        )

    def poll(self) -> bool:
        """Whether `next` would hand on anything; if not, the cursor waits, as after `next` did."""
        if self.has_next:
            return True
        self._snapshots.add_waiting(self)
        return False

    @property
    def is_reading(self) -> bool:
        """Whether a start was handed on and its end was not."""
        return self._is_reading

    def next(self) -> CursorItem | None:
        """The next item, or None: then it waits, and `on_ready` is called when there is one.

        A chunk costs O(its mutations) for the first cursor that comes to it and O(1) for the
        others, unless the cursor resumes inside it. Entering the open snapshot closes it.

        Raises:
            ValueError: The cursor was closed.
        """
        if not self._is_reading:
            return self._begin() if self._state is _LISTED else self._backfill_needed()
        snapshot = self.entry.snapshot
        assert isinstance(snapshot, ClosedSnapshot), "only closed snapshots are read"
        if self._index == len(snapshot):
            if self.seq == self._end:
                return self._finish()
            # Several snapshots were announced as one: see `_begin`.
            self.entry = _entry_behind(self.entry)
            snapshot = self._snapshots.close(self.entry)
            self._index = 0
        chunk = snapshot.chunk(self._index)
        self._index += 1
        if chunk.start < self.seq:
            # The reader resumed inside this chunk, and has its beginning.
            chunk = chunk.slice(self.seq, chunk.end)
        self.seq = chunk.end
        return chunk

    def next_whole_snapshot(self) -> Chunk | None:
        """The next snapshot at once, if it is one chunk: what `next` would hand on as a start, the
        chunk and an end, at a third of the cost. None if it is not, or there is none, or the cursor
        stands inside one; ask `next` then.
        """
        if not self.at_front or self._end_at_least or self._state is not _LISTED:
            return None
        entry, snapshots = self.entry, self._snapshots
        # The kernel's attributes: this runs for nearly every change.
        if entry.snapshot is snapshots.open and snapshots.open.rows.high <= self.seq:
            return None
        chunk = snapshots.close(entry).whole_chunk()
        if chunk is None:
            return None
        self.seq = chunk.end
        next_entry = entry.next_entry
        assert next_entry is not None, "a closed snapshot is not the last"
        self.entry = next_entry
        entry.front_count -= 1
        next_entry.front_count += 1
        self._note_read_at_once(entry)
        return chunk

    def _note_read_at_once(self, entry: SnapshotEntry) -> None:
        """It was at the front of `entry`, and is behind it."""
        self._snapshots.on_released(entry)

    def _begin(self) -> SnapshotStartItem | None:
        snapshots, entry = self._snapshots, self.entry
        if entry.snapshot is snapshots.open and snapshots.open.high_seq <= self.seq:
            snapshots.add_waiting(self)
            return None
        if self.at_front:
            self.at_front = False
            entry.front_count -= 1
            self._hold(entry)
        snapshot = snapshots.close(entry)
        self._index = snapshot.segment_index_after(self.seq)
        # A reader that was interrupted in a snapshot ending at `_end_at_least` may hold a part of
        # it: its state is consistent at that end at the earliest. All snapshots up to there are
        # announced as one, though a key may then repeat.
        while snapshot.end < self._end_at_least:
            entry = _entry_behind(entry)
            snapshot = snapshots.close(entry)
            self._hold(entry)
        self._end_at_least = SeqNo(0)
        self._end = snapshot.end
        self._is_reading = True
        return SnapshotStartItem(self.seq, self._end, may_repeat=entry is not self.entry)

    def _finish(self) -> SnapshotEndItem:
        self._is_reading = False
        self.entry = _entry_behind(self.entry)
        self.entry.front_count += 1
        self.at_front = True
        self._read_whole()
        return SnapshotEndItem(self.seq)

    def _read_whole(self) -> None:
        """All entries that it holds were handed on whole."""
        entries = list(self.held_entries)
        self.held_entries.clear()
        self._release(entries)

    def _backfill_needed(self) -> BackfillNeeded:
        if self._state is _State.CLOSED:
            raise ValueError(f"cursor {self.name!r} is closed")
        # Dropped: a backfill is needed wherever the reader stands, as nothing holds its place in
        # memory any more. The disk may not have come as far as the cursor had: then there is
        # nothing to read from it, and the reader registers again where it stands.
        return BackfillNeeded(self.seq, max(self.seq, self._snapshots.persisted_seq))

    # Standing somewhere.

    def _hold(self, entry: SnapshotEntry) -> None:
        entry.inside_count += 1
        self.held_entries.append(entry)

    def _release(self, entries: list[SnapshotEntry]) -> None:
        for entry in entries:
            entry.inside_count -= 1
        self._snapshots.note_released(entries)

    def move_to_front_of(self, next_entry: SnapshotEntry) -> None:
        """Moves on to the front of `next_entry`: it has read all of the entry that it stands in.

        For the snapshot list, which closes that one.
        """
        self.held_entries.pop().inside_count -= 1
        self.entry = next_entry
        self.at_front = True
        next_entry.front_count += 1

    @property
    def oldest_entry(self) -> SnapshotEntry:
        """The oldest entry that it keeps from being freed."""
        return self.held_entries[0] if self.held_entries else self.entry

    def wake(self) -> None:
        """There is something to read: tells the owner. For the snapshot list."""
        if self._on_ready is not None:
            self._on_ready()

    def close(self) -> None:
        """Takes the cursor out of the list. Closing it again does nothing."""
        self._leave()
        self._state = _State.CLOSED

    def drop(self) -> None:
        """Takes the cursor out of the list: `next` then asks for a backfill.

        In the middle of a snapshot, its end is never handed on: the reader's state is not
        consistent before it has read from disk what the backfill names.

        For the manager, which checks that the cursor may be dropped.
        """
        self._leave()
        self._state = _State.DROPPED

    def _leave(self) -> None:
        if self._state is not _LISTED:
            return
        self._is_reading = False
        self._snapshots.remove_cursor(self)
        entries = list(self.held_entries)
        self.held_entries.clear()
        if self.at_front:
            # Counted as inside for a moment, so that `_release` treats all alike.
            self.entry.front_count -= 1
            self.entry.inside_count += 1
            entries.append(self.entry)
        self._release(entries)


class PersistenceCursor(Cursor):
    """The cursor that carries mutations to disk.

    It reads like any other, but what it has read stays in memory until the disk has it: `commit`
    gives its entries up, not reading on.
    """

    __slots__ = ()

    def __init__(self, snapshots: SnapshotList[Cursor], entry: SnapshotEntry) -> None:
        super().__init__(snapshots, "persistence", entry, entry.start)

    @property
    def committed_seq(self) -> SeqNo:
        """Everything up to this number is on disk."""
        return self._snapshots.persisted_seq

    def subscribe(self, on_ready: Callable[[], None]) -> None:
        """Has `on_ready` called when there is something to persist."""
        self._on_ready = on_ready

    def _read_whole(self) -> None:
        pass

    def _note_read_at_once(self, entry: SnapshotEntry) -> None:
        self._hold(entry)

    def restart_at(self, entry: SnapshotEntry) -> None:
        """Goes to the front of `entry`, up to which the disk has everything.

        For the manager, which has let go of all other entries. This cursor holds none, as the disk
        has all there is.
        """
        self.entry = entry
        self.at_front = True
        entry.front_count += 1
        self.seq = entry.start
        self._snapshots.add_waiting(self)

    def commit(self, through: SeqNo) -> None:
        """The disk has everything up to `through`, the end of a snapshot that was read whole.

        O(snapshots committed). May free them.

        Raises:
            ValueError: `through` is not such an end.
        """
        read_whole = [entry for entry in self.held_entries if entry is not self.entry]
        committed_entries = [entry for entry in read_whole if entry.start < through]
        if not committed_entries or self._snapshots.close(committed_entries[-1]).end != through:
            raise ValueError(f"{through} is not the end of a snapshot that was read")
        del self.held_entries[: len(committed_entries)]
        self._snapshots.persisted_seq = through
        self._release(committed_entries)
