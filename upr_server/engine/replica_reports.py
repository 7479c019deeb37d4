"""What the replicas of one partition have reported, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from upr_protocol.ids import SeqNo

Replicated = Callable[[bool], None]
"""Called with True once enough replicas have a number, or with False when that is not known."""


@attrs.define
class _Report:
    by: object
    received: SeqNo
    persisted: SeqNo

    def has(self, *, persisted: bool) -> SeqNo:
        return self.persisted if persisted else self.received


@attrs.define
class _Waiting:
    seq: SeqNo
    copies: int
    persisted: bool
    deadline: float
    call: Replicated


class ReplicaReports:
    """Complete snapshot ends, received and persisted, of the replicas that follow now.

    All of them are of the history that the partition is in: a report of another says nothing.
    """

    __slots__ = ("_reports", "_waiting")

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        """Replicas that have reported."""
        return len(self._reports)

    def report(self, replica: str, received: SeqNo, persisted: SeqNo, by: object = None) -> None:
        """A replica has come so far. One that went back says so, too. O(who waits).

        Args:
            replica: Its name.
            received: The last complete snapshot end that it has received.
            persisted: The last one that it has on disk.
            by: What told it: the same replica may connect anew before the old connection is gone.
        """
        self._reports[replica] = _Report(by, received, persisted)
        self._answer()

    def forget(self, replica: str, by: object = None) -> None:
        """What told of a replica does so no more. What it was counted for stays counted."""
        found = self._reports.get(replica)
        if found is not None and found.by is by:
            del self._reports[replica]

    def clear(self) -> None:
        """The partition is in another history, or nobody's master any more: nobody who waits is
        promised anything."""
        self._reports.clear()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.call(False)

    def reached(self, copies: int, *, persisted: bool = False) -> SeqNo:
        """The number that so many replicas have, at least; 0 when there are not so many."""
        found = sorted(one.has(persisted=persisted) for one in self._reports.values())
        return found[-copies] if 0 < copies <= len(found) else SeqNo(0)

    def when(
        self, seq: SeqNo, copies: int, *, persisted: bool, deadline: float, call: Replicated
    ) -> None:
        """Has `call` called when so many replicas have everything up to `seq`; perhaps at once.

        Args:
            seq: The number.
            copies: How many, 1 or more.
            persisted: Whether they must have it on disk.
            deadline: When to give up; see `give_up`.
            call: What is called.
        """
        if self.reached(copies, persisted=persisted) >= seq:
            call(True)
        else:
            self._waiting.append(_Waiting(seq, copies, persisted, deadline, call))

    def give_up(self, now: float) -> None:
        """Those whose deadline has come are promised nothing. O(who waits)."""
        if self._waiting:
            late = [one for one in self._waiting if one.deadline <= now]
            self._waiting = [one for one in self._waiting if one.deadline > now]
            for one in late:
                one.call(False)

    def _answer(self) -> None:
        if not self._waiting:
            return
        reached: dict[tuple[int, bool], SeqNo] = {}
        due: list[_Waiting] = []
        left: list[_Waiting] = []
        for one in self._waiting:
            level = one.copies, one.persisted
            if level not in reached:
                reached[level] = self.reached(one.copies, persisted=one.persisted)
            (due if one.seq <= reached[level] else left).append(one)
        self._waiting = left
        for one in due:
            one.call(True)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def statistics(self) -> dict[str, object]:
        """Figures, by replica."""
        return {
            name: {"received": one.received, "persisted": one.persisted}
            for name, one in self._reports.items()
        }
