"""How long tasks hold the loop: nobody else is served meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio

SAMPLE_S: Final = 0.0005
"""How often the processor's time is read while there is work. A reading is a call to the system of
2 µs, a step of a task often no more than 20; the wall's clock takes a tenth of that."""


class TurnTimer(trio.abc.Instrument):
    """Measures the loop that it was started in.

    A *step* is what a task does between two checkpoints. A *turn* is everything that runs between
    two waits for the system: a step of each task that is ready. What counts is the processor's
    time, so that a busy machine is not taken for a fault. A figure may be too high by `SAMPLE_S`.

    Args:
        processor_clock: The processor's time of this thread, in seconds.
        wall_clock: A clock that is cheaper to read, in seconds.

    Attributes:
        turn_count: How many turns have ended.
        longest_turn_s: How long the longest turn took; 0 before the first.
        longest_step_s: How long the longest step took; 0 before the first.
        longest_step_task: The task that took it.
    """

    def __init__(
        self,
        processor_clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.turn_count = 0
        self.longest_turn_s = 0.0
        self.longest_step_s = 0.0
        self.longest_step_task = ""
        self._processor_clock = processor_clock
        self._wall_clock = wall_clock
        self._sampled_at = self._processor_s = self._turn_began_s = 0.0

    def start(self) -> None:
        """Measures the loop that this is called in from now on."""
        self._sample(self._wall_clock())
        self._turn_began_s = self._processor_s
        trio.lowlevel.add_instrument(self)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """A step ends."""
        now = self._wall_clock()
        if now - self._sampled_at < SAMPLE_S:
            return
        began_s = self._processor_s
        self._sample(now)
        if self._processor_s - began_s > self.longest_step_s:
            self.longest_step_s = self._processor_s - began_s
            self.longest_step_task = task.name

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002
        """A turn ends."""
        self.turn_count += 1
        now = self._wall_clock()
        if now - self._sampled_at >= SAMPLE_S:
            self._sample(now)
        turn_s = self._processor_s - self._turn_began_s
        self.longest_turn_s = max(self.longest_turn_s, turn_s)
        self._turn_began_s = self._processor_s

    def _sample(self, now: float) -> None:
        self._sampled_at = now
        self._processor_s = self._processor_clock()
