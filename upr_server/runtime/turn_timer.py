"""How long one turn of the loop takes: nobody else is served meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio


class TurnTimer(trio.abc.Instrument):
    """Measures the turns of the loop that it is added to with `trio.lowlevel.add_instrument`.

    A turn is everything that runs between two waits for the system: a step of each task that is
    ready. What counts is the processor's time, so that a busy machine is not taken for a fault.

    Args:
        clock: The processor's time of this thread, in seconds.

    Attributes:
        longest_s: How long the longest turn took; 0 before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.longest_s = 0.0
        self._clock = clock
        self._began_at: float | None = None

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002
        """A turn begins."""
        self._began_at = self._clock()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002
        """A turn ends; the first one began before this was added, and does not count."""
        if self._began_at is not None:
            self.longest_s = max(self.longest_s, self._clock() - self._began_at)
