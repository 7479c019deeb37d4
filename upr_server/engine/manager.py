"""The mutation manager: one partition's snapshots and the cursors that read them (seed 001).

A list of snapshots, oldest first; the last is open and takes mutations in. A cursor that enters the
open snapshot closes it, and a new one is opened behind it. Neighbours among which nobody stands are
collapsed. A closed snapshot that is the oldest may be freed when nobody stands in it or before it:
the disk has it, as the disk's own cursor has passed. It is freed when memory runs short, and until
then serves those who read.

Whoever is at the end of everything waits. The first mutation wakes all who wait, once; the snapshot
stays open until one of them comes to read, so that what arrives in between is still deduplicated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import attrgetter
from typing import Final

import msgspec

from upr_protocol.chunk import Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine.closed_snapshot import ClosedSnapshot
from upr_server.engine.collapse import Collapse, run_to_collapse
from upr_server.engine.cursor import BackfillNeeded, Cursor, PersistenceCursor, Place
from upr_server.engine.memory import Memory
from upr_server.engine.open_snapshot import OpenSnapshot

_START: Final = attrgetter("start")


class Registration(msgspec.Struct, frozen=True):
    """What registering led to.

    Attributes:
        cursor: The memory cursor.
        backfill: What must be read from disk before the cursor's first item; None for nothing.
    """

    cursor: Cursor
    backfill: BackfillNeeded | None = None


class NotInMemory(LookupError):  # noqa: N818  # it is an answer, not a fault
    """The mutation was freed: the disk has it."""


class MutationManager:
    """The snapshots and cursors of one partition.

    Args:
        start: The number before the first mutation that it will take in.
        memory: What the bucket holds.
        on_collapsible: Called when `collapse_wanted` becomes true.

    Attributes:
        open: The open snapshot.
        persistence: The cursor for the disk; it exists from the start, at the oldest snapshot.
    """

    __slots__ = (
        "_candidates",
        "_collapse",
        "_collapses",
        "_cursors",
        "_dropped",
        "_freed",
        "_inside_open",
        "_memory",
        "_on_collapsible",
        "_places",
        "_waiting",
        "open",
        "persistence",
    )

    def __init__(
        self, start: SeqNo, memory: Memory, on_collapsible: Callable[[], None] | None = None
    ) -> None:
        self._memory = memory
        self._on_collapsible = on_collapsible
        self.open = OpenSnapshot(start, memory)
        self._places = [Place(self.open)]
        # Dicts for sets, so that what depends on their order is the same in every run.
        self._cursors: dict[Cursor, None] = {}
        self._waiting: dict[Cursor, None] = {}
        # Those that resume inside the open snapshot: when it is closed, some have all of it.
        self._inside_open: dict[Cursor, None] = {}
        # Places at which something to collapse may be found.
        self._candidates: dict[Place, None] = {}
        self._collapse: Collapse | None = None
        self._collapses = self._dropped = self._freed = 0
        self.persistence = PersistenceCursor(self, self._places[0])
        self._cursors[self.persistence] = None

    # The ends.

    @property
    def high(self) -> SeqNo:
        """The highest number taken in."""
        return self.open.high

    @property
    def oldest(self) -> SeqNo:
        """Everything above this number is in memory."""
        return self._places[0].start

    def __len__(self) -> int:
        """Snapshots, with the open one."""
        return len(self._places)

    @property
    def dropped(self) -> int:
        """Cursors dropped, ever."""
        return self._dropped

    @property
    def cursor_count(self) -> int:
        """Cursors, with that for the disk."""
        return len(self._cursors)

    # Registering cursors.

    def register(
        self,
        name: str,
        start: SeqNo,
        *,
        end_at_least: SeqNo = SeqNo(0),
        on_ready: Callable[[], None] | None = None,
        droppable: bool = True,
    ) -> Registration:
        """Enters a cursor that reads what is above `start`. O(log snapshots).

        Args:
            name: Whose it is, for statistics.
            start: What the reader has already. Inside a snapshot, that one is sent from there, and
                ends where it ends.
            end_at_least: The first snapshot handed on must not end below this: the reader was cut
                in a snapshot that ends there. Several may be handed on as one for it, and keys
                may then repeat.
            on_ready: Called once each time that there is something to read after `next` said None.
            droppable: Whether the cursor may be dropped when memory runs short.

        Returns:
            The cursor; and if `start` is no longer in memory, what to read from disk before it: the
            cursor then stands where the disk ends.

        Raises:
            ValueError: `start` or `end_at_least` is above the highest number.
        """
        if max(start, end_at_least) > self.high:
            raise ValueError(f"{max(start, end_at_least)} is above the high number {self.high}")
        backfill = None
        if start < self.oldest:
            # A state on disk is that at the persisted end, and at no number before it.
            backfill = BackfillNeeded(start, self.persistence.committed)
            start = self.persistence.committed
        place = self._places[bisect_right(self._places, start, key=_START) - 1]
        cursor = Cursor(
            self,
            name,
            place,
            start,
            end_at_least=end_at_least,
            on_ready=on_ready,
            droppable=droppable,
        )
        self._cursors[cursor] = None
        if place.snapshot is self.open and not cursor.at_front:
            self._inside_open[cursor] = None
        return Registration(cursor, backfill)

    def may_drop(self, cursor: Cursor) -> bool:
        """Whether dropping this cursor is allowed and could free memory: it stands in a snapshot
        older than any that the disk still needs."""
        older = cursor.oldest_place.start < self.persistence.oldest_place.start
        return cursor.droppable and cursor in self._cursors and older

    def droppable(self) -> list[Cursor]:
        """The cursors that may be dropped and stand furthest back. O(cursors)."""
        found = [cursor for cursor in self._cursors if self.may_drop(cursor)]
        oldest = min((cursor.oldest_place.start for cursor in found), default=0)
        return [cursor for cursor in found if cursor.oldest_place.start == oldest]

    def drop(self, cursor: Cursor) -> None:
        """Takes a slow cursor out, so that what it held can be freed; it must backfill (seed 001).

        Raises:
            ValueError: It may not be dropped: see `may_drop`.
        """
        if not self.may_drop(cursor):
            raise ValueError(f"{cursor!r} may not be dropped")
        self._dropped += 1
        cursor.drop()

    # For the partition.

    def wake(self) -> None:
        """Tells the cursors that wait that there is something to read. O(cursors that wait)."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for cursor in waiting:
                cursor.wake()

    def find(self, number: int) -> Mutation:
        """The mutation with this number, which must be its key's newest. O(log mutations).

        Raises:
            NotInMemory: The disk has it.
            KeyError: There is none.
        """
        if number > self.open.start:
            return self.open.find(number)
        at = bisect_right(self._places, number - 1, key=_START) - 1
        if at < 0:
            raise NotInMemory(number)
        return self.close(self._places[at]).find(number)

    # For cursors.

    def close(self, place: Place) -> ClosedSnapshot:
        """The snapshot of `place`; if it is open, it is closed and a new one opened behind it."""
        snapshot = place.snapshot
        if isinstance(snapshot, OpenSnapshot):
            place.snapshot = snapshot = snapshot.close()
            self.open = OpenSnapshot(snapshot.end, self._memory)
            place.behind = behind = Place(self.open)
            self._places.append(behind)
            if self._inside_open:
                for cursor in self._inside_open:
                    if cursor.seq == snapshot.end:
                        cursor.step_over(behind)
                self._inside_open.clear()
        return snapshot

    def wait(self, cursor: Cursor) -> None:
        """Has `cursor` woken by the next mutation."""
        self._waiting[cursor] = None

    def forget(self, cursor: Cursor) -> None:
        """Takes `cursor` off the lists."""
        del self._cursors[cursor]
        self._waiting.pop(cursor, None)
        self._inside_open.pop(cursor, None)

    def left(self, places: Iterable[Place]) -> None:
        """Cursors have left these places: some may now be collapsed."""
        for place in places:
            self._consider(place)

    # Freeing what the disk has.

    @property
    def can_free(self) -> bool:
        """Whether `free_oldest` would free something. O(1)."""
        return len(self._places) > 1 and self._places[0].is_free

    def free_oldest(self) -> bool:
        """Frees the oldest snapshot, if it is closed and nobody stands there. O(its segments).

        Returns:
            Whether it did.
        """
        if not self.can_free:
            return False
        place = self._places.pop(0)
        self.close(place).free()
        self._candidates.pop(place, None)
        self._freed += 1
        return True

    def stand_at(self, seq: SeqNo) -> None:
        """Lets go of everything: the disk has what there is up to `seq`, which may never have been
        here. Whoever reads has to go on from disk, and who waits is woken. O(cursors + segments).

        Raises:
            ValueError: Something is here that the disk does not have.
        """
        if self.persistence.committed < self.high:
            raise ValueError(f"the disk has {self.persistence.committed} of {self.high}")
        waiting = list(self._waiting)
        for cursor in list(self._cursors):
            if cursor is not self.persistence:
                cursor.drop()
        for place in self._places:
            if isinstance(place.snapshot, ClosedSnapshot):
                place.snapshot.free()
        self._candidates.clear()
        self._collapse = None
        self.open = OpenSnapshot(seq, self._memory)
        self._places = [Place(self.open)]
        self.persistence.stand_at(self._places[0])
        for cursor in waiting:
            if cursor is not self.persistence:
                cursor.wake()

    # Collapsing.

    @property
    def collapse_wanted(self) -> bool:
        """Whether `collapse_step` has something to do. O(1)."""
        return self._collapse is not None or bool(self._candidates)

    def collapse_step(self, budget_mutations: int) -> bool:
        """Goes on collapsing: at most about `budget_mutations` are looked at.

        Args:
            budget_mutations: One costs 0.1 to 0.3 µs, and it is overrun by one chunk at most.

        Returns:
            Whether there is more to do.
        """
        collapse = self._collapse
        if collapse is None:
            collapse = self._collapse = self._next_collapse()
            if collapse is None:
                return False
        if not self._is_still_free(collapse.places):
            self._collapse = None
            self._consider(collapse.places[-1])
        elif collapse.step(budget_mutations):
            self._collapse = None
            self._put_in(collapse)
        return self.collapse_wanted

    def _consider(self, place: Place) -> None:
        if (
            place.inside
            or place in self._candidates
            or place.start < self.oldest
            or run_to_collapse(self._places, place, shortest=True) is None
        ):
            return
        wanted = self.collapse_wanted
        self._candidates[place] = None
        if not wanted and self._on_collapsible is not None:
            self._on_collapsible()

    def _next_collapse(self) -> Collapse | None:
        while self._candidates:
            place = next(iter(self._candidates))
            del self._candidates[place]
            run = run_to_collapse(self._places, place)
            if run is not None:
                return Collapse(run, [self.close(place) for place in run])
        return None

    def _is_still_free(self, run: list[Place]) -> bool:
        """Whether the places of `run` are still in the list, and nobody among them."""
        at = bisect_right(self._places, run[0].start, key=_START) - 1
        return (
            self._places[at : at + len(run)] == run
            and not any(place.inside for place in run)
            and not any(place.at_front for place in run[1:])
        )

    def _put_in(self, collapse: Collapse) -> None:
        run = collapse.places
        merged = ClosedSnapshot.of_chunks(collapse.chunks(), self._memory)
        for place in run:
            self.close(place).free()
            self._candidates.pop(place, None)
        run[0].snapshot = merged
        run[0].behind = run[-1].behind
        at = bisect_right(self._places, run[0].start, key=_START)
        del self._places[at : at + len(run) - 1]
        self._collapses += 1
        self._consider(run[0])

    # Figures and checks.

    def recount(self, memory: Memory) -> None:
        """Adds what it holds to `memory`, by counting. O(arrays + segments)."""
        for place in self._places:
            place.snapshot.recount(memory)

    def statistics(self) -> dict[str, int]:
        """Figures of this partition's queue. O(snapshots)."""
        return {
            "high": self.high,
            "oldest": self.oldest,
            "snapshots": len(self._places),
            "cursors": len(self._cursors),
            "waiting": len(self._waiting),
            "persisted": self.persistence.committed,
            "collapses": self._collapses,
            "dropped": self._dropped,
            "freed": self._freed,
        }

    def check_invariants(self) -> None:
        """The list, each snapshot, who stands where. O(mutations)."""
        places = self._places
        assert places[-1].snapshot is self.open
        for place, following in pairwise(places):
            assert isinstance(place.snapshot, ClosedSnapshot), "only the last is open"
            assert place.start == place.snapshot.start
            assert place.snapshot.end == following.start, "snapshots touch"
            assert place.behind is following
        for place in places:
            place.snapshot.check_invariants()
            fronts = sum(c.place is place and c.at_front for c in self._cursors)
            inside = sum(c.held.count(place) for c in self._cursors)
            assert place.at_front == fronts, (place.at_front, fronts)
            assert place.inside == inside, (place.inside, inside)
        committed = self.persistence.committed
        assert any(place.start == committed for place in places), "the disk's end is a boundary"
        for cursor in self._cursors:
            assert cursor.place in places, cursor
            assert all(place in places for place in cursor.held), cursor
            assert cursor.place.start <= cursor.seq <= cursor.place.end, cursor
        for cursor in self._inside_open:
            assert cursor.place is places[-1], cursor
            assert not cursor.at_front, cursor
        for cursor in self._waiting:
            assert cursor in self._cursors
            assert not cursor.has_next, "what waits has nothing to read"
        assert self.persistence in self._cursors
