"""The clock of tests that ask for no mock clock.

Such tests wait for threads, sockets and other processes, with bounds of some seconds. On a busy
machine, or when a virtual machine is paused, this process may stand still for as long. If that
counted as time, all bounds would be over when it continues, before it has read what came.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio

STEP_S: Final = 0.1
"""How much time passes at most between two looks at the clock. Trio looks at least so often."""


class SteadyClock(trio.abc.Clock):
    """The real time, without the times in which this process stood still.

    Args:
        real_time: Returns the real time in seconds.
    """

    def __init__(self, real_time: Callable[[], float] = time.perf_counter) -> None:
        self._real_time = real_time
        self._time = 0.0
        self._looked_at = real_time()

    def start_clock(self) -> None:
        """Begins to count."""
        self._looked_at = self._real_time()

    def current_time(self) -> float:
        """The time in seconds."""
        now = self._real_time()
        self._time += min(now - self._looked_at, STEP_S)
        self._looked_at = now
        return self._time

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """How long Trio may wait in reality before it looks again."""
        return min(deadline - self.current_time(), STEP_S)
