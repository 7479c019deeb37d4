"""Sending at a steady rate, whatever the other side does."""

from __future__ import annotations

import ctypes
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1_000

_RECEIVE_EVERY: Final = 32
"""When it is late it does not wait, and looks for answers only now and then."""

_LEAD_NS: Final = 5_000_000


def sharpen_timers() -> None:
    """Has this process woken within a microsecond of the time it asked for, not 50."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)


def paced(
    rate: float,
    count: int,
    connection: socket.socket,
    send: Callable[[Sequence[int]], None],
    receive: Callable[[], None],
    *,
    together: int = 1,
    before_send: Callable[[], None] | None = None,
) -> list[int]:
    """Sends `count` mutations at `rate` a second.

    Args:
        rate: Mutations a second.
        count: Mutations.
        connection: Where answers come; waited on between calls.
        send: Called with the times at which the next mutations were due, ns of the monotonic clock:
            latency counts from there, so that a sender who is held up does not flatter whoever
            holds it up.
        receive: Called when there is something to receive.
        together: How many of the mutations that are due go in one call at most.
        before_send: Waits until something may be sent; what becomes due meanwhile goes, too.

    Returns:
        How late each mutation was, in ns.
    """
    late: list[int] = []
    start = time.monotonic_ns() + _LEAD_NS
    calls = 0
    while len(late) < count:
        index = len(late)
        due = start + int(index * 1e9 / rate)
        now = time.monotonic_ns()
        if now >= due and calls % _RECEIVE_EVERY == 0 and readable(connection, 0):
            receive()
        while now < due:
            if readable(connection, (due - now) / 1e9):
                receive()
            now = time.monotonic_ns()
        if before_send is not None:
            before_send()
            now = time.monotonic_ns()
        end = min(count, index + together, max(index, int((now - start) * rate / 1e9)) + 1)
        dues = [start + int(row * 1e9 / rate) for row in range(index, end)]
        late += [now - due for due in dues]
        calls += 1
        send(dues)
    return late


def readable(connection: socket.socket, timeout_s: float) -> bool:
    """Waits until there is something to receive; whether there is."""
    return bool(select.select([connection], [], [], timeout_s)[0])


def percentiles_us(samples_ns: Sequence[int]) -> dict[str, Any]:
    """Count, p50, p99, p99.9 and maximum of nanoseconds, in microseconds."""
    array = np.asarray(samples_ns, dtype=np.int64) / 1e3
    p50, p99, p999 = np.percentile(array, (50, 99, 99.9))
    return {
        "count": len(samples_ns),
        "p50_us": round(float(p50), 1),
        "p99_us": round(float(p99), 1),
        "p99.9_us": round(float(p999), 1),
        "max_us": round(float(array.max()), 1),
    }
