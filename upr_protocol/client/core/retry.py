"""Which failures may pass, how long to retry, and how long to wait between attempts.

Who retries what, after a lost connection or a refusal:

- **Connections.** `ConnectionPool` reconnects to each node by itself, and `RetryState` says how
  long it waits before each attempt and when it gives up. `BlockingConnectionPool` reconnects
  when a connection is asked for. `Client` does not reconnect if one node holds the whole bucket:
  its calls raise the error.
- **Batches** of a publisher without an answer: `UnansweredBatches` sends them again, with the same
  tokens, so that each takes effect once.
- **Streams** of a consumer: `StreamFollower` requests them again, each from its last position.
- **Requests** of a client (`get`, `set` and others): once sent, none is repeated after a lost
  connection, because it may have been carried out. A request that a node refused because it does
  not hold the partition is sent to another node (`RequestDispatcher`, `PartitionRouter`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from upr_protocol.errors import BrokenError, ProtocolError, ServerError, Status, UprError

RETRY_TIMEOUT_S_DEFAULT: Final = 300.0
"""A restart, a deployment, a failover by hand: what takes longer wants a person."""

FIRST_WAIT_S: Final = 0.05
"""Longer than a listener needs to come back, shorter than a person notices."""

WAIT_S_MAX: Final = 5.0
"""A server that was away for a minute is found again within this."""

MAP_WAIT_S_MAX: Final = 0.5
"""Between two rounds of asking for the partition map: when a partition is given to another node,
clients notice not much later."""

LOG_IN_RETRY_S: Final = 1.0
"""After a refused log-in: within a second a changed password is on all nodes that reach each other.
To try more often than once would take attempts from others on this host."""

WRONG_NODE: Final = frozenset({Status.NOT_MY_PARTITION, Status.WRONG_STATE})
"""How a node refuses a request that another node may be able to do."""

_RETRYABLE: Final = frozenset(
    {
        *WRONG_NODE,
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
        return error.status in _RETRYABLE
    return isinstance(error, BrokenError)


class Backoff:
    """Waits that double with each failure, up to a cap. Each is drawn between half and all of that,
    so that clients cut off together do not come back together.

    Args:
        draw: Gives numbers in [0, 1).
        cap_s: The longest wait of all.

    Attributes:
        failures: Failures since the last success.
    """

    __slots__ = ("_cap_s", "_draw", "failures")

    def __init__(self, draw: Callable[[], float], *, cap_s: float = WAIT_S_MAX) -> None:
        self.failures = 0
        self._draw = draw
        self._cap_s = cap_s

    def next_wait_s(self) -> float:
        """Counts one more failure, and gives the time to wait after it."""
        # 2**63 times anything is over every cap; a larger exponent would overflow in the end.
        longest: float = min(self._cap_s, FIRST_WAIT_S * 2 ** min(self.failures, 63))
        self.failures += 1
        return longest * (1 + self._draw()) / 2

    def reset(self) -> None:
        """Counts a success: the next failure is a first one."""
        self.failures = 0


class RetryState:
    """Counts failures with no progress between them, and decides when to give up: after `timeout_s`
    of failing. `last_failure` says why the last connection, or attempt to make one, ended; empty at
    first."""

    __slots__ = ("_backoff", "_failing_since", "_may_log_in_again", "_timeout_s", "last_failure")

    def __init__(self, timeout_s: float, draw: Callable[[], float]) -> None:
        self.last_failure = ""
        self._timeout_s = timeout_s
        self._failing_since: float | None = None
        self._backoff = Backoff(draw)
        self._may_log_in_again = True

    def note_progress(self) -> None:
        """Something useful arrived from the server."""
        self._failing_since = None
        self._may_log_in_again = True
        self._backoff.reset()

    def wait_after_failure_s(self, error: UprError, now: float) -> float:
        """How long to wait before the next attempt, after one that ended with `error`. A refused
        log-in is tried once more, as the node may not know of a changed password yet.

        Raises:
            UprError: `error`, when another attempt is of no use or the time is over.
        """
        self.last_failure = str(error)
        is_log_in = isinstance(error, ServerError) and error.status is Status.LOG_IN_FAILED
        if not (is_retryable(error) or (is_log_in and self._may_log_in_again)):
            raise error
        if self._failing_since is None:
            self._failing_since = now
        left_s = self._failing_since + self._timeout_s - now
        if left_s <= 0:
            error.add_note(
                f"gave up after {self._backoff.failures + 1} attempts in "
                f"{now - self._failing_since:.0f} s"
            )
            raise error
        if is_log_in:
            self._may_log_in_again = False
            return min(LOG_IN_RETRY_S, left_s)
        return min(self._backoff.next_wait_s(), left_s)
