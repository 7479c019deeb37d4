"""A loop in which the same happens each time: its clock is virtual, and so is chance."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final, TypeVar

import trio

from tests.kit.scheduler import seeded_scheduler

T = TypeVar("T")

EPOCH_S: Final = 1_700_000_000.0
"""What simulated clocks say at first, in seconds since 1970."""


class JumpingClock(trio.abc.Clock):
    """Virtual time: it is the next deadline's as soon as no task can run.

    Trio's own mock clock sees one round of the loop later that nothing happens, as something might
    come from a thread or a socket. Here there are none.

    What the simulated world itself waits for is in an agenda of the clock's: a cancel scope with a
    deadline costs more than all that a node does with a small message.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._agenda: list[tuple[float, int, trio.Event]] = []
        self._numbers = count()

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """How long to wait, when all do: not at all, if there is something to wait for."""
        agenda = self._agenda
        if agenda and agenda[0][0] <= deadline:
            self._now = max(self._now, agenda[0][0])
            while agenda and agenda[0][0] <= self._now:
                heappop(agenda)[-1].set()
            return 0.0
        if deadline == math.inf:
            return math.inf
        self._now = max(self._now, deadline)
        return 0.0

    def set_at(self, time: float, event: trio.Event) -> None:
        """Sets `event` at some time to come, whether or not anybody waits for it still."""
        heappush(self._agenda, (time, next(self._numbers), event))

    async def sleep(self, duration_s: float) -> None:
        """Waits, as `trio.sleep` does."""
        if duration_s <= 0:
            await trio.lowlevel.checkpoint()
            return
        event = trio.Event()
        self.set_at(self._now + duration_s, event)
        await event.wait()


class Chance:
    """The chance of one seed. Each who draws has a stream of its own, so that one who draws more
    does not change what the others draw.

    Args:
        seed: The seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def of(self, name: str) -> Random:
        """The stream of `name`: the same for the same seed and name, in every process."""
        return Random(f"{self.seed}/{name}")


def run_in_world(seed: int, main: Callable[[JumpingClock], Awaitable[T]]) -> T:
    """Runs `main`, given the clock, so that nothing but the seed decides what happens: in virtual
    time, which jumps ahead whenever all wait.

    Trio draws the order of the tasks that are ready; here it draws the same order each time.
    """
    with seeded_scheduler(seed):
        clock = JumpingClock()
        return trio.run(main, clock, clock=clock, strict_exception_groups=True)
