"""Waking those who wait for something to change."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Bell:
    """Rung when something changed; whoever waits looks again."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def ring(self) -> None:
        """Wakes all who wait."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` is true. It is looked at now, and whenever the bell was rung."""
        while not condition():
            await self._event.wait()

    async def wait(self) -> None:
        """Waits until the bell is rung."""
        await self._event.wait()
