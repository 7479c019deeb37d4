"""A loop in which the same happens each time: its clock is virtual, and so is chance."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final, TypeVar

import trio
import trio._core._run as trio_run

T = TypeVar("T")

EPOCH_S: Final = 1_700_000_000.0
"""What simulated clocks say at first, in seconds since 1970."""


class JumpingClock(trio.abc.Clock):
    """Virtual time: it is the next deadline's as soon as no task can run.

    Trio's own mock clock sees one round of the loop later that nothing happens, as something might
    come from a thread or a socket. Here there are none.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """How long to wait, when all do: not at all, if there is something to wait for."""
        if deadline == math.inf:
            return math.inf
        self._now = max(self._now, deadline)
        return 0.0


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


def run_in_world(seed: int, main: Callable[[], Awaitable[T]]) -> T:
    """Runs `main` so that nothing but the seed decides what happens: in virtual time, which jumps
    ahead whenever all wait.

    Trio runs the tasks that are ready in an order that it draws; here it draws the same each time.
    These are private parts of Trio, which is pinned: tests/simulation/test_world.py says when they
    have changed.
    """
    with _deterministic(seed):
        return trio.run(main, clock=JumpingClock(), strict_exception_groups=True)


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    parts: Any = trio_run
    before = parts._ALLOW_DETERMINISTIC_SCHEDULING, parts._r.getstate()
    parts._ALLOW_DETERMINISTIC_SCHEDULING = True
    parts._r.seed(seed)
    try:
        yield
    finally:
        parts._ALLOW_DETERMINISTIC_SCHEDULING = before[0]
        parts._r.setstate(before[1])
