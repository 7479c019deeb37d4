"""When a replica is sent the next small batch: once it has reported the one before.

A snapshot costs nearly the same whether it has one mutation or sixteen: closing it, its frame,
taking it in, a part of a commit. Single changes that are each sent on at once are each a snapshot.
So while a replica has yet to report a small batch, what comes meanwhile gathers in the open
snapshots, and goes out together. The faster changes come, the more gather; and where they come one
by one nothing waits. TCP does the same with small segments (Nagle's algorithm).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from upr_protocol.ids import HistoryId, PartitionId, SeqNo

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

    __slots__ = ("_end", "_partition", "ends_at", "was_used")

    def __init__(self) -> None:
        self.ends_at = -math.inf
        self.was_used = False
        # The last snapshot of the batch: a replica takes them in as they come.
        self._partition = PartitionId(0)
        self._end = SeqNo(0)

    def note_sent(self, nbytes: int, partition: PartitionId, end: SeqNo, now: float) -> None:
        """A batch was sent at the time `now`.

        Args:
            nbytes: Its bytes.
            partition: The partition of its last snapshot.
            end: Where that ends.
            now: The time.
        """
        if nbytes < SMALL_BATCH_BYTES:
            self._partition, self._end = partition, end
            self.ends_at = now + REPORT_WAIT_S
            self.was_used = True

    def note_report(self, rows: Iterable[tuple[PartitionId, HistoryId, SeqNo, SeqNo]]) -> None:
        """The replica has reported. What it says of the beginning of the batch, or of what has come
        to its disk, does not end the wait.

        Args:
            rows: The rows of its `ReplicaAck`.
        """
        if self.ends_at == -math.inf:
            return
        for partition, _, received_seq, _ in rows:
            if partition == self._partition and received_seq >= self._end:
                self.ends_at = -math.inf

    def holds_back(self, now: float) -> bool:
        """Whether nothing more is to be sent yet."""
        return now < self.ends_at
