"""Replica progress: how far the replicas of one partition have come, and what waits for that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container
from typing import Final

import attrs

from upr_protocol.ids import SeqNo

STEP_CALLS: Final = 64
"""Waiting calls that are made at a time: each sends a reply, at some 15 µs, and a publisher may
wait for 4,096."""

OnReplicated = Callable[[bool], None]
"""Called with True once enough replicas have a number, or with False when that is not known."""


@attrs.define
class _Report:
    received_seq: SeqNo
    persisted_seq: SeqNo


@attrs.define
class _WaitingCall:
    seq: SeqNo
    deadline: float
    call: OnReplicated


class ReplicaProgress:
    """Complete snapshot ends, received and persisted, of the replicas that follow now.

    All of them are of the history that the partition is in: a report of another says nothing.
    """

    __slots__ = ("_connection_numbers", "_reports", "_void_calls", "_waiting_calls")

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._connection_numbers: dict[str, int] = {}
        """The newest connection by which each replica has reported; it may have ended."""
        self._waiting_calls: dict[tuple[int, bool], deque[_WaitingCall]] = {}
        """By level, with rising numbers and deadlines: how many copies, and whether on disk."""
        self._void_calls: deque[_WaitingCall] = deque()
        """What waited in an earlier history."""

    def __len__(self) -> int:
        """Replicas that have reported."""
        return len(self._reports)

    def report(
        self,
        replica: str,
        received_seq: SeqNo,
        persisted_seq: SeqNo,
        connection_number: int = 0,
    ) -> int:
        """A replica has come so far, or has rolled back to there. Makes some of the calls that
        waited for that.

        Args:
            replica: Its name.
            received_seq: The last complete snapshot end that it has received.
            persisted_seq: The last one that it has on disk.
            connection_number: The connection it came by; newer ones have higher numbers. A replica
                may connect again before the old connection is gone. What comes by that one, once
                the replica has reported by the newer one, is late, and does not count; also if the
                newer one has ended.

        Returns:
            As `make_calls`.
        """
        if self._connection_numbers.get(replica, 0) > connection_number:
            return 0
        self._connection_numbers[replica] = connection_number
        self._reports[replica] = _Report(received_seq, persisted_seq)
        return self.make_calls()

    def forget_replica(self, replica: str, connection_number: int = 0) -> None:
        """The connection of a replica is gone. What it was counted for stays counted."""
        if self._connection_numbers.get(replica) == connection_number:
            self._reports.pop(replica, None)

    def keep_replicas(self, names: Container[str]) -> None:
        """The partition has these replicas from now on: what other nodes have reported does not
        count any more. O(reports)."""
        for name in [name for name in self._connection_numbers if name not in names]:
            del self._connection_numbers[name]
            self._reports.pop(name, None)

    def clear(self) -> None:
        """The partition is in another history, or not active any more: what waits is answered with
        False; some of it at once, and the rest by `make_calls`."""
        self._reports.clear()
        for calls in self._waiting_calls.values():
            self._void_calls += calls
        self._waiting_calls.clear()
        self.make_calls()

    def seq_reached_by(self, copies: int, *, persisted: bool = False) -> SeqNo:
        """The number that so many replicas have, at least; 0 when there are not so many."""
        reports = self._reports.values()
        if not 0 < copies <= len(reports):
            return SeqNo(0)
        seqs = [report.persisted_seq if persisted else report.received_seq for report in reports]
        return sorted(seqs)[-copies]

    def call_when_reached(
        self, seq: SeqNo, copies: int, *, persisted: bool, deadline: float, call: OnReplicated
    ) -> None:
        """Calls `call` when so many replicas have everything up to `seq`; perhaps at once.

        Args:
            seq: The number, not below those of earlier calls: a lower one is answered with them.
            copies: How many, 1 or more.
            persisted: Whether they must have it on disk.
            deadline: When to give up, not before earlier calls do; see `make_calls`.
            call: What is called.
        """
        if self.seq_reached_by(copies, persisted=persisted) >= seq:
            call(True)
        else:
            calls = self._waiting_calls.setdefault((copies, persisted), deque())
            calls.append(_WaitingCall(seq, deadline, call))

    def make_calls(self, now: float = -math.inf) -> int:
        """Makes `STEP_CALLS` at most of the calls that are due: those for what was reached, with
        True, and those that have waited beyond their deadlines, with False. O(levels + calls).

        Args:
            now: The time that deadlines are compared with.

        Returns:
            How many it has made. If these are `STEP_CALLS`, more may be due.
        """
        count = 0
        while self._void_calls:
            self._void_calls.popleft().call(False)
            count += 1
            if count >= STEP_CALLS:
                return count
        for (copies, persisted), calls in list(self._waiting_calls.items()):
            reached_seq = self.seq_reached_by(copies, persisted=persisted)
            # A call may ask for more to be waited for.
            while calls and (calls[0].seq <= reached_seq or calls[0].deadline <= now):
                waiting_call = calls.popleft()
                waiting_call.call(waiting_call.seq <= reached_seq)
                count += 1
                if count >= STEP_CALLS:
                    return count
            if not calls:
                self._waiting_calls.pop((copies, persisted), None)
        return count

    @property
    def waiting_count(self) -> int:
        """Calls that wait."""
        return len(self._void_calls) + sum(map(len, self._waiting_calls.values()))

    def statistics(self) -> dict[str, object]:
        """Figures, by replica."""
        return {
            name: {"received": report.received_seq, "persisted": report.persisted_seq}
            for name, report in self._reports.items()
        }
