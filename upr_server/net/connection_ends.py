"""Ending connections that are over: some in each turn of the loop.

A thousand peers may leave in the same moment, or stay silent for too long. To end a connection
takes several steps of its tasks, and those of all of them would come together.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio

from upr_server.net.step_queue import StepQueue

ENDS_MAX: Final = 16
"""Connections that are ended in one turn of the loop: their steps take some 3 ms."""


class ConnectionEnds(StepQueue[trio.CancelScope]):
    """Cancels the tasks of connections that are over, a scope for each, in the order in which they
    ended."""

    __slots__ = ()

    def _step(self, items: deque[trio.CancelScope]) -> None:
        for _ in range(min(ENDS_MAX, len(items))):
            items.popleft().cancel()
