"""Which failures pass, and for how long to go on trying."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from upr_protocol.client.core.backoff import Backoff
from upr_protocol.errors import BrokenError, ProtocolError, ServerError, Status, UprError

PATIENCE_S_DEFAULT: Final = 300.0
"""A restart, a deployment, a failover by hand: what takes longer wants a person."""

_PASSING: Final = frozenset(
    {
        Status.NOT_MY_PARTITION,
        Status.WRONG_STATE,
        Status.SEQ_TOO_HIGH,
        Status.TEMPORARY_FAILURE,
        Status.STATE_CHANGED,
        Status.ROLLBACK_NEEDED,
        Status.BACKFILL_FAILED,
        Status.TOO_SLOW,
        Status.SHUTTING_DOWN,
        Status.BAD_CHECKSUM,
        Status.IDLE,
        Status.TOO_MANY,
        Status.INTERNAL,
    }
)


def is_retryable(error: BaseException) -> bool:
    """Whether a new connection may fare better than the one that ended with `error`."""
    if isinstance(error, ServerError | ProtocolError):
        return error.status in _PASSING
    return isinstance(error, BrokenError)


class RetryPolicy:
    """Counts failures without progress between them, and says when to give up.

    Args:
        patience_s: How long to go on failing.
        draw: Gives numbers in [0, 1), for the waits between attempts.
    """

    __slots__ = ("_backoff", "_failing_since", "_patience_s", "last_failure")

    def __init__(self, patience_s: float, draw: Callable[[], float] = random.random) -> None:
        self._patience_s = patience_s
        self._failing_since: float | None = None
        self._backoff = Backoff(draw)
        self.last_failure = ""
        """Why the last connection, or attempt to make one, ended."""

    def progress(self) -> None:
        """Something useful came from the server."""
        self._failing_since = None
        self._backoff.reset()

    def wait_s(self, error: UprError, now: float) -> float:
        """How long to wait before the next attempt, after one that ended with `error`.

        Raises:
            UprError: `error`, when trying again is no use or was tried for long enough.
        """
        self.last_failure = str(error)
        if not is_retryable(error):
            raise error
        if self._failing_since is None:
            self._failing_since = now
        left_s = self._failing_since + self._patience_s - now
        if left_s <= 0:
            error.add_note(
                f"gave up after {self._backoff.failures + 1} attempts in "
                f"{now - self._failing_since:.0f} s"
            )
            raise error
        return min(self._backoff.next_wait_s(), left_s)
