"""The snapshot list: what cursors share of one partition's snapshots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from upr_protocol.chunk import Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.open_snapshot import OpenSnapshot
from upr_server.engine.snapshots.snapshot_slot import SnapshotSlot

_START: Final = attrgetter("start")


class NotInMemory(LookupError):  # noqa: N818  # it is an answer, not a fault
    """The mutation was freed: the disk has it."""


class Reader(Protocol):
    """What the list asks of a cursor that stands in it."""

    @property
    def seq(self) -> SeqNo:
        """Everything up to this number was handed on."""

    def step_over(self, following: SnapshotSlot) -> None:
        """Moves on to the front of `following`: the cursor has read all of the slot before."""

    def wake(self) -> None:
        """There is something to read."""


ReaderT = TypeVar("ReaderT", bound=Reader)


class SnapshotList(Generic[ReaderT]):
    """One partition's snapshots, oldest first, and the cursors that stand in them.

    The last snapshot is open and takes mutations in. Each begins where the one before ends.

    Args:
        start: The number before the first mutation that it will take in.
        memory: What the bucket holds.
        on_left: Called with each slot that a cursor has left: it may now be collapsed.

    Attributes:
        open: The open snapshot.
        slots: The slots, oldest first.
        readers: The cursors, in a dict so that their order is the same in every run.
        persisted: Everything up to this number is on disk.
    """

    __slots__ = (
        "_inside_open",
        "_memory",
        "_on_left",
        "_waiting",
        "open",
        "persisted",
        "readers",
        "slots",
    )

    def __init__(
        self, start: SeqNo, memory: MemoryAccount, on_left: Callable[[SnapshotSlot], None]
    ) -> None:
        self._memory = memory
        self._on_left = on_left
        self.open = OpenSnapshot(start, memory)
        self.slots = [SnapshotSlot(self.open)]
        self.persisted = start
        self.readers: dict[ReaderT, None] = {}
        self._waiting: dict[ReaderT, None] = {}
        # Those that resume inside the open snapshot: when it is closed, some have all of it.
        self._inside_open: dict[ReaderT, None] = {}

    def __len__(self) -> int:
        """Snapshots, with the open one."""
        return len(self.slots)

    @property
    def high(self) -> SeqNo:
        """The highest number taken in."""
        return self.open.high

    @property
    def oldest(self) -> SeqNo:
        """Everything above this number is in memory."""
        return self.slots[0].start

    # Finding.

    def slot_at(self, seq: SeqNo) -> SnapshotSlot:
        """The newest slot that starts at or before `seq`. O(log snapshots)."""
        return self.slots[bisect_right(self.slots, seq, key=_START) - 1]

    def find(self, seq: int) -> Mutation:
        """The mutation with this number, which must be its key's newest. O(log mutations).

        Raises:
            NotInMemory: The disk has it.
            KeyError: No mutation has this number.
        """
        if seq > self.open.start:
            return self.open.find(seq)
        index = bisect_right(self.slots, seq - 1, key=_START) - 1
        if index < 0:
            raise NotInMemory(seq)
        return self.close(self.slots[index]).find(seq)

    # For cursors.

    def enter(self, reader: ReaderT, slot: SnapshotSlot, *, is_inside: bool) -> None:
        """A new cursor stands in `slot`: inside it, or at its front."""
        self.readers[reader] = None
        if is_inside and slot.snapshot is self.open:
            self._inside_open[reader] = None

    def leave(self, reader: ReaderT) -> None:
        """A cursor was closed or dropped."""
        del self.readers[reader]
        self._waiting.pop(reader, None)
        self._inside_open.pop(reader, None)

    def left(self, slots: Iterable[SnapshotSlot]) -> None:
        """A cursor has left these slots."""
        for slot in slots:
            self._on_left(slot)

    def wait(self, reader: ReaderT) -> None:
        """Has `reader` woken by the next mutation."""
        self._waiting[reader] = None

    def wake(self) -> None:
        """Tells the cursors that wait that there is something to read. O(cursors that wait)."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for reader in waiting:
                reader.wake()

    def waiting(self) -> list[ReaderT]:
        """The cursors that wait."""
        return list(self._waiting)

    def inside_open(self) -> list[ReaderT]:
        """The cursors that resume inside the open snapshot."""
        return list(self._inside_open)

    def close(self, slot: SnapshotSlot) -> ClosedSnapshot:
        """The snapshot of `slot`; if it is open, it is closed and a new one opened behind it."""
        snapshot = slot.snapshot
        if isinstance(snapshot, OpenSnapshot):
            slot.snapshot = snapshot = snapshot.close()
            self.open = OpenSnapshot(snapshot.end, self._memory)
            slot.following = following = SnapshotSlot(self.open)
            self.slots.append(following)
            if self._inside_open:
                # A cursor that resumed at the snapshot's very end has all of it: inside the closed
                # one it would announce a snapshot without mutations.
                for reader in self._inside_open:
                    if reader.seq == snapshot.end:
                        reader.step_over(following)
                self._inside_open.clear()
        return snapshot

    # Freeing what the disk has.

    @property
    def can_free(self) -> bool:
        """Whether `free_oldest` would free something. O(1)."""
        return len(self.slots) > 1 and self.slots[0].is_free

    def free_oldest(self) -> SnapshotSlot | None:
        """Frees the oldest snapshot, if it is closed and no cursor stands there. O(its segments).

        The disk has it: its own cursor has passed.

        Returns:
            The slot it stood in, which is no longer in the list.
        """
        if not self.can_free:
            return None
        slot = self.slots.pop(0)
        self.close(slot).free()
        return slot

    def restart_at(self, seq: SeqNo) -> SnapshotSlot:
        """Lets go of all snapshots: the disk has what there is up to `seq`. O(segments).

        Returns:
            The only slot, with an empty open snapshot.
        """
        for slot in self.slots:
            if isinstance(slot.snapshot, ClosedSnapshot):
                slot.snapshot.free()
        self.open = OpenSnapshot(seq, self._memory)
        self.slots = [SnapshotSlot(self.open)]
        self.persisted = seq
        return self.slots[0]

    # Collapsing.

    def is_run_free(self, run: Sequence[SnapshotSlot]) -> bool:
        """Whether the slots of `run` are still in the list, and no cursor stands inside them or at
        the front of any but the first. O(log snapshots + run)."""
        index = bisect_right(self.slots, run[0].start, key=_START) - 1
        return (
            self.slots[index : index + len(run)] == run
            and not any(slot.inside_count for slot in run)
            and not any(slot.front_count for slot in run[1:])
        )

    def replace(self, run: Sequence[SnapshotSlot], merged: ClosedSnapshot) -> None:
        """Puts one snapshot in the first slot of `run`, and removes the others."""
        for slot in run:
            self.close(slot).free()
        first = run[0]
        first.snapshot = merged
        first.following = run[-1].following
        index = bisect_right(self.slots, first.start, key=_START)
        del self.slots[index : index + len(run) - 1]

    # Checks.

    def recount(self, memory: MemoryAccount) -> None:
        """Adds what it holds to `memory`, by counting. O(arrays + segments)."""
        for slot in self.slots:
            slot.snapshot.recount(memory)

    def check_invariants(self) -> None:
        """Order and each snapshot. O(mutations)."""
        assert self.slots[-1].snapshot is self.open
        for slot, following in pairwise(self.slots):
            assert isinstance(slot.snapshot, ClosedSnapshot), "only the last is open"
            assert slot.start == slot.snapshot.start
            assert slot.snapshot.end == following.start, "snapshots touch"
            assert slot.following is following
        for slot in self.slots:
            slot.snapshot.check_invariants()
        assert any(slot.start == self.persisted for slot in self.slots), (
            "the disk's end is a boundary"
        )
        assert self._waiting.keys() <= self.readers.keys()
        assert self._inside_open.keys() <= self.readers.keys()
