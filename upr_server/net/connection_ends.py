"""Ending connections that are over: some in each turn of the loop.

A thousand peers may leave in the same moment, or stay silent for too long. To end a connection
takes several steps of its tasks, and those of all of them would come together.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio

from upr_protocol.concurrency import Notifier

ENDS_MAX: Final = 16
"""Connections that are ended in one turn of the loop: their steps take some 3 ms."""


class ConnectionEnds:
    """Cancels the tasks of connections that are over, in the order in which they ended."""

    __slots__ = ("_has_waiting", "_is_running", "_waiting_scopes")

    def __init__(self) -> None:
        self._is_running = False
        self._waiting_scopes: deque[trio.CancelScope] = deque()
        self._has_waiting = Notifier()

    def end(self, scope: trio.CancelScope) -> None:
        """Cancels the tasks of a connection, `scope`, in one of the next turns. O(1)."""
        if self._is_running:
            self._waiting_scopes.append(scope)
            self._has_waiting.notify()
        else:
            scope.cancel()

    async def run(self) -> None:
        """Ends connections, until cancelled. Before it runs, and after that, each is ended at
        once."""
        self._is_running = True
        try:
            while True:
                while not self._waiting_scopes:
                    await self._has_waiting.wait()
                self._end_some(ENDS_MAX)
                await trio.lowlevel.checkpoint()
        finally:
            self._is_running = False
            self._end_some(len(self._waiting_scopes))

    def _end_some(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting_scopes))):
            self._waiting_scopes.popleft().cancel()
