"""Cursors: how consumers and the disk read the snapshots.

A cursor hands on a start, chunks and an end for each snapshot. It stands at the front of a
snapshot, or inside one at a number; `SnapshotSlot` counts the two apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo, SnapshotKind
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.snapshot_list import SnapshotList
from upr_server.engine.snapshots.snapshot_slot import SnapshotSlot


class _State(Enum):
    """What became of a cursor."""

    READING = "reading"
    """It stands in the list."""

    CLOSED = "closed"
    """Its owner has closed it."""

    DROPPED = "dropped"
    """It was dropped for memory; its owner has to be told."""


_READING: Final = _State.READING  # an enum's attributes are slow to look up


class SnapshotStart(msgspec.Struct, frozen=True):
    """What follows, up to the `SnapshotEnd`, leads from the state at `start` to that at `end`.

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


class SnapshotEnd(msgspec.Struct, frozen=True):
    """Here, and only here, what was read is a consistent state: that at number `end`."""

    end: SeqNo


class BackfillNeeded(msgspec.Struct, frozen=True):
    """The mutations in (start, end] are no longer in memory: read them from disk first."""

    start: SeqNo
    end: SeqNo


CursorItem = SnapshotStart | Chunk | SnapshotEnd | BackfillNeeded


def _following(slot: SnapshotSlot) -> SnapshotSlot:
    """The slot behind that of a closed snapshot."""
    assert slot.following is not None, "a closed snapshot is not the last"
    return slot.following


class Cursor:
    """A reader of one partition's mutations. Made by `MutationManager.register`.

    Attributes:
        name: Whose it is, for statistics.
        seq: Everything up to this number was handed on.
        droppable: Whether it may be dropped at all.
        slot: Where it stands. For the snapshot list and the manager, as are the next two.
        at_front: Whether it is counted as at the front of `slot`; else it is inside.
        entered: Slots in which it is counted as inside, oldest first.
    """

    __slots__ = (
        "_end",
        "_end_at_least",
        "_index",
        "_is_inside",
        "_on_ready",
        "_snapshots",
        "_state",
        "at_front",
        "droppable",
        "entered",
        "name",
        "seq",
        "slot",
    )

    def __init__(
        self,
        snapshots: SnapshotList[Cursor],
        name: str,
        slot: SnapshotSlot,
        seq: SeqNo,
        *,
        end_at_least: SeqNo = SeqNo(0),
        on_ready: Callable[[], None] | None = None,
        droppable: bool = True,
    ) -> None:
        self._snapshots = snapshots
        self._on_ready = on_ready
        self._end_at_least = end_at_least
        self._state = _READING
        # Inside an announced snapshot: where that ends, and the next segment of the one it reads.
        self._is_inside = False
        self._end = seq
        self._index = 0
        self.name = name
        self.droppable = droppable
        self.seq = seq
        self.slot = slot
        self.at_front = seq == slot.start
        self.entered: deque[SnapshotSlot] = deque()
        if self.at_front:
            slot.front_count += 1
        else:
            self._hold(slot)

    def __repr__(self) -> str:
        return f"<Cursor {self.name!r}, {self._state.value}, at {self.seq}>"

    # Reading.

    @property
    def has_next(self) -> bool:
        """Whether `next` would hand on anything. O(1)."""
        if self._is_inside or self._state is not _READING:
            return True
        snapshot = self.slot.snapshot
        return isinstance(snapshot, ClosedSnapshot) or snapshot.high > self.seq

    def poll(self) -> bool:
        """Whether `next` would hand on anything; if not, the cursor waits, as after `next` did."""
        if self.has_next:
            return True
        self._snapshots.wait(self)
        return False

    @property
    def is_reading(self) -> bool:
        """Whether a start was handed on and its end was not."""
        return self._is_inside

    def next(self) -> CursorItem | None:
        """The next item, or None: then it waits, and `on_ready` is called when there is one.

        A chunk costs O(its mutations) for the first cursor that comes to it and O(1) for the
        others, unless the cursor resumes inside it. Entering the open snapshot closes it.

        Raises:
            ValueError: The cursor was closed.
        """
        if not self._is_inside:
            return self._begin() if self._state is _READING else self._backfill_needed()
        snapshot = self.slot.snapshot
        assert isinstance(snapshot, ClosedSnapshot), "what is read is closed"
        if self._index == len(snapshot):
            if self.seq == self._end:
                return self._finish()
            # Several snapshots were announced as one: see `_begin`.
            self.slot = _following(self.slot)
            snapshot = self._snapshots.close(self.slot)
            self._index = 0
        chunk = snapshot.chunk(self._index)
        self._index += 1
        if chunk.start < self.seq:
            # The reader resumed inside this chunk, and has its beginning.
            chunk = chunk.slice(self.seq, chunk.end)
        self.seq = chunk.end
        return chunk

    def _begin(self) -> SnapshotStart | None:
        snapshots, slot = self._snapshots, self.slot
        if slot.snapshot is snapshots.open and snapshots.open.high <= self.seq:
            snapshots.wait(self)
            return None
        if self.at_front:
            self.at_front = False
            slot.front_count -= 1
            self._hold(slot)
        snapshot = snapshots.close(slot)
        self._index = snapshot.index(self.seq)
        # A reader that was interrupted in a snapshot ending at `_end_at_least` may hold a part of
        # it: its state is consistent at that end at the earliest. All snapshots up to there are
        # announced as one, though a key may then repeat.
        while snapshot.end < self._end_at_least:
            slot = _following(slot)
            snapshot = snapshots.close(slot)
            self._hold(slot)
        self._end_at_least = SeqNo(0)
        self._end = snapshot.end
        self._is_inside = True
        return SnapshotStart(self.seq, self._end, may_repeat=slot is not self.slot)

    def _finish(self) -> SnapshotEnd:
        self._is_inside = False
        self.slot = _following(self.slot)
        self.slot.front_count += 1
        self.at_front = True
        self._read_whole()
        return SnapshotEnd(self.seq)

    def _read_whole(self) -> None:
        """All slots that it has entered were handed on whole."""
        slots = list(self.entered)
        self.entered.clear()
        self._release(slots)

    def _backfill_needed(self) -> BackfillNeeded:
        if self._state is _State.CLOSED:
            raise ValueError(f"cursor {self.name!r} is closed")
        # Dropped. The disk may not have come as far as the cursor had: then there is nothing to
        # read from it, and the reader registers again where it stands.
        return BackfillNeeded(self.seq, max(self.seq, self._snapshots.persisted))

    # Standing somewhere.

    def _hold(self, slot: SnapshotSlot) -> None:
        slot.inside_count += 1
        self.entered.append(slot)

    def _release(self, slots: list[SnapshotSlot]) -> None:
        for slot in slots:
            slot.inside_count -= 1
        self._snapshots.left(slots)

    def step_over(self, following: SnapshotSlot) -> None:
        """Moves on to the front of `following`: it has read all of the slot that it stands in.

        For the snapshot list, which closes that one.
        """
        self.entered.pop().inside_count -= 1
        self.slot = following
        self.at_front = True
        following.front_count += 1

    @property
    def oldest_slot(self) -> SnapshotSlot:
        """The oldest slot that it keeps from being freed."""
        return self.entered[0] if self.entered else self.slot

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
        if self._state is not _READING:
            return
        self._is_inside = False
        self._snapshots.leave(self)
        slots = list(self.entered)
        self.entered.clear()
        if self.at_front:
            # Counted as inside for a moment, so that `_release` treats all alike.
            self.slot.front_count -= 1
            self.slot.inside_count += 1
            slots.append(self.slot)
        self._release(slots)


class PersistenceCursor(Cursor):
    """The cursor that carries mutations to disk.

    It reads like any other, but what it has read stays in memory until the disk has it: `commit`
    gives its slots up, not reading on.
    """

    __slots__ = ()

    def __init__(self, snapshots: SnapshotList[Cursor], slot: SnapshotSlot) -> None:
        super().__init__(snapshots, "persistence", slot, slot.start, droppable=False)

    @property
    def committed(self) -> SeqNo:
        """Everything up to this number is on disk."""
        return self._snapshots.persisted

    def subscribe(self, on_ready: Callable[[], None]) -> None:
        """Has `on_ready` called when there is something to persist."""
        self._on_ready = on_ready

    def _read_whole(self) -> None:
        pass

    def restart_at(self, slot: SnapshotSlot) -> None:
        """Goes to the front of `slot`, up to which the disk has everything.

        For the manager, which has let go of all other slots.
        """
        self.entered.clear()
        self.slot = slot
        self.at_front = True
        slot.front_count += 1
        self.seq = slot.start
        self._snapshots.wait(self)

    def commit(self, through: SeqNo) -> None:
        """The disk has everything up to `through`, the end of a snapshot that was read whole.

        O(snapshots committed). May free them.

        Raises:
            ValueError: `through` is not such an end.
        """
        read_whole = [slot for slot in self.entered if slot is not self.slot]
        committed = [slot for slot in read_whole if slot.start < through]
        if not committed or self._snapshots.close(committed[-1]).end != through:
            raise ValueError(f"{through} is not the end of a snapshot that was read")
        for _ in committed:
            self.entered.popleft()
        self._snapshots.persisted = through
        self._release(committed)
