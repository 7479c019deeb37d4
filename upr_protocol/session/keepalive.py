"""Telling a silent peer from a dead one."""

from __future__ import annotations

DEAD_AFTER_INTERVALS = 2
"""How many idle intervals of silence make a peer dead: one `Noop` may be late, not two."""


class KeepAlive:
    """When to say `Noop`, and when to give up. Times are seconds of any monotonic clock.

    Args:
        interval_s: The idle interval both sides agreed on.
        now: The time.
    """

    __slots__ = ("_interval_s", "_received_at", "_sent_at")

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._sent_at = now
        self._received_at = now

    def note_sent(self, now: float) -> None:
        """Something was sent."""
        self._sent_at = now

    def note_received(self, now: float) -> None:
        """Something was received."""
        self._received_at = now

    def is_noop_due(self, now: float) -> bool:
        """Whether this side was silent for the interval."""
        return now >= self.noop_due_at

    @property
    def noop_due_at(self) -> float:
        """When `is_noop_due` turns true."""
        return self._sent_at + self._interval_s

    def is_peer_dead(self, now: float) -> bool:
        """Whether the peer was silent for too long."""
        return now >= self._received_at + DEAD_AFTER_INTERVALS * self._interval_s

    def next_check(self) -> float:
        """The earliest time at which `is_noop_due` or `is_peer_dead` can turn true."""
        dead_at = self._received_at + DEAD_AFTER_INTERVALS * self._interval_s
        return min(self.noop_due_at, dead_at)
