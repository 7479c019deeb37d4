"""How long the other side of a link has been silent, in time in which this process runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class Silence:
    """How long something has been awaited of the other side.

    Steps are counted, and not the time: if this process stood still for a minute, that is one step,
    and what came meanwhile is read in the next.

    Args:
        limit_s: How long it may last, seconds.
        step_s: What a step takes, seconds.

    Attributes:
        limit_s: How long it may last, from now on.
    """

    def __init__(self, limit_s: float, step_s: float) -> None:
        self.limit_s = limit_s
        self._step_s = step_s
        self._steps = 0
        self._is_waiting = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While in this context, something is awaited; at its end it has come."""
        self._steps, self._is_waiting = 0, True
        try:
            yield
        finally:
            self._is_waiting = False

    async def wait_until_too_long(self) -> None:
        """Waits until something has been awaited for as long as the limit, less up to a step."""
        while not self._is_waiting or self._steps * self._step_s < self.limit_s:
            await trio.sleep(self._step_s)
            self._steps += 1
