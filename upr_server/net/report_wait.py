"""When a replica is sent the next small batch: once it has reported the one before.

A snapshot costs nearly the same whether it has one mutation or sixteen: closing it, its frame,
taking it in, a part of a commit. Single changes that are each sent on at once are each a snapshot.
So while a replica has yet to report a small batch, what comes meanwhile gathers in the open
snapshots, and goes out together. The faster changes come, the more gather; and where they come one
by one nothing waits. TCP does the same with small segments (Nagle's algorithm).
"""

from __future__ import annotations

import math
from typing import Final

SMALL_BATCH_BYTES: Final = 64 * 1024
"""A batch of as much is followed by the next at once: there is little to gain by more."""

REPORT_WAIT_S: Final = 0.02
"""How long a report is waited for. A replica whose disk is full sends none, and one whose stream
has just ended ignores what was sent on it."""


class ReportWait:
    """What one connection waits for before it sends more to a replica.

    Attributes:
        ends_at: When the wait ends without a report; minus infinity while there is none.
        was_used: Whether there ever was one: whether the peer is a replica.
    """

    __slots__ = ("ends_at", "was_used")

    def __init__(self) -> None:
        self.ends_at = -math.inf
        self.was_used = False

    def note_sent(self, nbytes: int, now: float) -> None:
        """Ends of snapshots were sent at the time `now`, which the replica will report, and
        `nbytes` in all."""
        if nbytes < SMALL_BATCH_BYTES:
            self.ends_at = now + REPORT_WAIT_S
            self.was_used = True

    def note_report(self) -> None:
        """The replica has reported."""
        self.ends_at = -math.inf

    def holds_back(self, now: float) -> bool:
        """Whether nothing more is to be sent yet."""
        return now < self.ends_at
