"""Cursors: how consumers and the disk read the mutation manager (seed 001).

A cursor hands on a start, chunks and an end for each snapshot. It stands at the front of a snapshot
(seed 001's dummy item: nothing of it was read) or inside one, at a number. Places count the two
apart: a snapshot with a cursor at its front may still take part in a collapse, as the first; one
with a cursor inside may not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo, SnapshotKind
from upr_server.engine.closed_snapshot import ClosedSnapshot
from upr_server.engine.open_snapshot import OpenSnapshot

if TYPE_CHECKING:
    from upr_server.engine.manager import MutationManager


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


class Place:
    """One snapshot's place in the manager's list, with the counts of who stands there.

    The place stays when its snapshot is closed, or is replaced by a collapsed one.

    Attributes:
        start: The snapshot's start, which never changes.
        snapshot: The snapshot.
        at_front: Cursors that have read nothing of it.
        inside: Cursors that began to read it, or will from a number inside it.
        behind: The place behind it; None for that of the open snapshot.
    """

    __slots__ = ("at_front", "behind", "inside", "snapshot", "start")

    def __init__(self, snapshot: OpenSnapshot) -> None:
        self.start = snapshot.start
        self.snapshot: OpenSnapshot | ClosedSnapshot = snapshot
        self.at_front = 0
        self.inside = 0
        self.behind: Place | None = None

    @property
    def end(self) -> SeqNo:
        """The snapshot's end; of the open one, as of now."""
        snapshot = self.snapshot
        return snapshot.end if isinstance(snapshot, ClosedSnapshot) else snapshot.high

    @property
    def is_free(self) -> bool:
        """Whether nobody stands here."""
        return not self.at_front and not self.inside


def _behind(place: Place) -> Place:
    """The place behind that of a closed snapshot."""
    assert place.behind is not None, "a closed snapshot is not the last"
    return place.behind


class Cursor:
    """A reader of one partition's mutations. Made by `MutationManager.register`.

    Attributes:
        name: Whose it is, for statistics.
        seq: Everything up to this number was handed on.
        droppable: Whether it may be dropped at all.
        place: Where it stands. For the manager, as are the next two.
        at_front: Whether it is counted as at the front of `place`; else it is inside.
        held: Places in which it is counted as inside, oldest first.
    """

    __slots__ = (
        "_end",
        "_end_at_least",
        "_gone",
        "_index",
        "_manager",
        "_on_ready",
        "_reading",
        "at_front",
        "droppable",
        "held",
        "name",
        "place",
        "seq",
    )

    def __init__(
        self,
        manager: MutationManager,
        name: str,
        place: Place,
        seq: SeqNo,
        *,
        end_at_least: SeqNo = SeqNo(0),
        on_ready: Callable[[], None] | None = None,
        droppable: bool = True,
    ) -> None:
        self._manager = manager
        self._on_ready = on_ready
        self._end_at_least = end_at_least
        self._gone = ""
        # While it reads: where the snapshot it announced ends, and its next segment.
        self._reading = False
        self._end = seq
        self._index = 0
        self.name = name
        self.droppable = droppable
        self.seq = seq
        self.place = place
        self.at_front = seq == place.start
        self.held: deque[Place] = deque()
        if self.at_front:
            place.at_front += 1
        else:
            self._hold(place)

    def __repr__(self) -> str:
        return f"<Cursor {self.name!r} at {self.seq}{' ' + self._gone if self._gone else ''}>"

    # Reading.

    @property
    def has_next(self) -> bool:
        """Whether `next` would hand on anything. O(1)."""
        if self._reading or self._gone:
            return True
        snapshot = self.place.snapshot
        return isinstance(snapshot, ClosedSnapshot) or snapshot.high > self.seq

    def poll(self) -> bool:
        """Whether `next` would hand on anything; if not, the cursor waits, as after `next` did."""
        if self.has_next:
            return True
        self._manager.wait(self)
        return False

    @property
    def is_reading(self) -> bool:
        """Whether a start was handed on and its end was not."""
        return self._reading

    def next(self) -> CursorItem | None:
        """The next item, or None: then it waits, and `on_ready` is called when there is one.

        A chunk costs O(its mutations) for the first cursor that comes to it and O(1) for the
        others, unless the cursor resumes inside it. Entering the open snapshot closes it.

        Raises:
            ValueError: The cursor was closed.
        """
        if not self._reading:
            return self._say_gone() if self._gone else self._begin()
        snapshot = self.place.snapshot
        assert isinstance(snapshot, ClosedSnapshot), "what is read is closed"
        if self._index == len(snapshot):
            if self.seq == self._end:
                return self._finish()
            # The announced snapshot is made of several.
            self.place = _behind(self.place)
            snapshot = self._manager.close(self.place)
            self._index = 0
        chunk = snapshot.chunk(self._index)
        self._index += 1
        if chunk.start < self.seq:
            chunk = chunk.slice(self.seq, chunk.end)
        self.seq = chunk.end
        return chunk

    def _begin(self) -> SnapshotStart | None:
        manager, place = self._manager, self.place
        if place.snapshot is manager.open and manager.open.high <= self.seq:
            manager.wait(self)
            return None
        if self.at_front:
            self.at_front = False
            place.at_front -= 1
            self._hold(place)
        snapshot = manager.close(place)
        self._index = snapshot.index(self.seq)
        while snapshot.end < self._end_at_least:
            place = _behind(place)
            snapshot = manager.close(place)
            self._hold(place)
        self._end_at_least = SeqNo(0)
        self._end = snapshot.end
        self._reading = True
        return SnapshotStart(self.seq, self._end, may_repeat=place is not self.place)

    def _finish(self) -> SnapshotEnd:
        self._reading = False
        self.place = _behind(self.place)
        self.place.at_front += 1
        self.at_front = True
        self._read_whole()
        return SnapshotEnd(self.seq)

    def _read_whole(self) -> None:
        """What it holds was handed on whole."""
        held = list(self.held)
        self.held.clear()
        self._release(held)

    def _say_gone(self) -> BackfillNeeded:
        if self._gone == "closed":
            raise ValueError(f"cursor {self.name!r} is closed")
        return BackfillNeeded(self.seq, max(self.seq, self._manager.persistence.committed))

    # Standing somewhere.

    def _hold(self, place: Place) -> None:
        place.inside += 1
        self.held.append(place)

    def _release(self, places: list[Place]) -> None:
        for place in places:
            place.inside -= 1
        self._manager.left(places)

    def step_over(self, behind: Place) -> None:
        """Moves on to the front of the place `behind`: it has all of the one that it stands in.

        For the manager, which closes that one.
        """
        self.held.pop().inside -= 1
        self.place = behind
        self.at_front = True
        behind.at_front += 1

    @property
    def oldest_place(self) -> Place:
        """The oldest place that it keeps from being freed."""
        return self.held[0] if self.held else self.place

    def wake(self) -> None:
        """There is something to read: tells the owner. For the manager."""
        if self._on_ready is not None:
            self._on_ready()

    def close(self) -> None:
        """Takes the cursor out of the manager. Closing it again does nothing."""
        self._leave()
        self._gone = "closed"

    def drop(self) -> None:
        """Takes the cursor out against its will: `next` then asks for a backfill.

        For the manager, which sees to it that the cursor may be dropped.
        """
        self._leave()
        self._gone = "dropped"

    def _leave(self) -> None:
        if self._gone:
            return
        self._reading = False
        self._manager.forget(self)
        left = list(self.held)
        self.held.clear()
        if self.at_front:
            self.place.at_front -= 1
            self.place.inside += 1
            left.append(self.place)
        self._release(left)


class PersistenceCursor(Cursor):
    """The cursor that carries mutations to disk (seed 001).

    It reads like any other, but what it has read stays in memory until the disk has it: its places
    are given up by `commit`, not by reading on.

    Attributes:
        committed: Everything up to this number is on disk.
    """

    __slots__ = ("committed",)

    def __init__(self, manager: MutationManager, place: Place) -> None:
        super().__init__(manager, "persistence", place, place.start, droppable=False)
        self.committed = place.start

    def subscribe(self, on_ready: Callable[[], None]) -> None:
        """Has `on_ready` called when there is something to persist."""
        self._on_ready = on_ready

    def _read_whole(self) -> None:
        pass

    def stand_at(self, place: Place) -> None:
        """Goes to the front of the place `place`, up to which the disk has everything.

        For the manager, which has let go of all other places.
        """
        self.held.clear()
        self.place = place
        self.at_front = True
        place.at_front += 1
        self.seq = self.committed = place.start
        self._manager.wait(self)

    def commit(self, through: SeqNo) -> None:
        """The disk has everything up to `through`, the end of a snapshot that was read whole.

        O(snapshots committed). May free them.

        Raises:
            ValueError: That is no such end.
        """
        whole = [place for place in self.held if place is not self.place]
        done = [place for place in whole if place.start < through]
        if not done or self._manager.close(done[-1]).end != through:
            raise ValueError(f"{through} is not the end of a snapshot that was read")
        for _ in done:
            self.held.popleft()
        self.committed = through
        self._release(done)
