"""The mock clock and threads.

A mock clock that jumps does so whenever no task can run, and a task that waits for a thread cannot:
a write of a millisecond would be hours of the clock's, in which everybody says again and again that
they are there, and the thread has to fight that for the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import trio
from trio.testing import MockClock

T = TypeVar("T")

_run_sync = trio.to_thread.run_sync
_stopped: WeakKeyDictionary[MockClock, list[float]] = WeakKeyDictionary()
"""For each thread that is waited for, how long its clock would have waited before it jumps."""


async def run_sync(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """`trio.to_thread.run_sync`; meanwhile the test's clock, if it is a mock clock, does not
    advance.

    The clock does not wait for calls that may be abandoned, because they may never end.
    """
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, MockClock) or options.get("abandon_on_cancel"):
        return await _run_sync(function, *args, **options)
    thresholds = _stopped.setdefault(clock, [])
    thresholds.append(clock.autojump_threshold)
    clock.autojump_threshold = math.inf
    try:
        return await _run_sync(function, *args, **options)
    finally:
        threshold = thresholds.pop()
        if not thresholds:
            clock.autojump_threshold = threshold
