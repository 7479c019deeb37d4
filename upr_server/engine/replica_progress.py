"""Replica progress: how far the replicas of one partition have come, and what waits for that."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from upr_protocol.ids import SeqNo

Replicated = Callable[[bool], None]
"""Called with True once enough replicas have a number, or with False when that is not known."""


@attrs.define
class _Report:
    source: object
    received: SeqNo
    persisted: SeqNo

    def reached(self, *, persisted: bool) -> SeqNo:
        return self.persisted if persisted else self.received


@attrs.define
class _WaitingCall:
    seq: SeqNo
    copies: int
    persisted: bool
    deadline: float
    call: Replicated


class ReplicaProgress:
    """Complete snapshot ends, received and persisted, of the replicas that follow now.

    All of them are of the history that the partition is in: a report of another says nothing.
    """

    __slots__ = ("_reports", "_waiting")

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._waiting: list[_WaitingCall] = []

    def __len__(self) -> int:
        """Replicas that have reported."""
        return len(self._reports)

    def report(
        self, replica: str, received: SeqNo, persisted: SeqNo, source: object = None
    ) -> None:
        """A replica has come so far, or has rolled back to there. O(waiting calls).

        Args:
            replica: Its name.
            received: The last complete snapshot end that it has received.
            persisted: The last one that it has on disk.
            source: The connection it came by: a replica may connect anew before the old connection
                is gone.
        """
        self._reports[replica] = _Report(source, received, persisted)
        self._call_reached()

    def forget_replica(self, replica: str, source: object = None) -> None:
        """The connection of a replica is gone. What it was counted for stays counted."""
        report = self._reports.get(replica)
        if report is not None and report.source is source:
            del self._reports[replica]

    def clear(self) -> None:
        """The partition is in another history, or not active any more: what waits is answered with
        False."""
        self._reports.clear()
        waiting, self._waiting = self._waiting, []
        for wait in waiting:
            wait.call(False)

    def seq_reached_by(self, copies: int, *, persisted: bool = False) -> SeqNo:
        """The number that so many replicas have, at least; 0 when there are not so many."""
        seqs = sorted(report.reached(persisted=persisted) for report in self._reports.values())
        return seqs[-copies] if 0 < copies <= len(seqs) else SeqNo(0)

    def call_when_reached(
        self, seq: SeqNo, copies: int, *, persisted: bool, deadline: float, call: Replicated
    ) -> None:
        """Calls `call` when so many replicas have everything up to `seq`; perhaps at once.

        Args:
            seq: The number.
            copies: How many, 1 or more.
            persisted: Whether they must have it on disk.
            deadline: When to give up; see `expire_waiting`.
            call: What is called.
        """
        if self.seq_reached_by(copies, persisted=persisted) >= seq:
            call(True)
        else:
            self._waiting.append(_WaitingCall(seq, copies, persisted, deadline, call))

    def expire_waiting(self, now: float) -> None:
        """Answers calls that have waited beyond their deadline with False. O(waiting calls)."""
        if self._waiting:
            late = [wait for wait in self._waiting if wait.deadline <= now]
            self._waiting = [wait for wait in self._waiting if wait.deadline > now]
            for wait in late:
                wait.call(False)

    def _call_reached(self) -> None:
        if not self._waiting:
            return
        reached: dict[tuple[int, bool], SeqNo] = {}
        due_calls: list[_WaitingCall] = []
        remaining: list[_WaitingCall] = []
        for wait in self._waiting:
            level = wait.copies, wait.persisted
            if level not in reached:
                reached[level] = self.seq_reached_by(wait.copies, persisted=wait.persisted)
            (due_calls if wait.seq <= reached[level] else remaining).append(wait)
        self._waiting = remaining
        # Last, since a call may ask for more to be waited for.
        for wait in due_calls:
            wait.call(True)

    @property
    def waiting_count(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    def statistics(self) -> dict[str, object]:
        """Figures, by replica."""
        return {
            name: {"received": report.received, "persisted": report.persisted}
            for name, report in self._reports.items()
        }
