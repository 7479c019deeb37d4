"""The turns of log-ins that strangers cause: no host has more than one at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio


@attrs.define(eq=False)
class _Host:
    lock: trio.StrictFIFOLock = attrs.field(factory=trio.StrictFIFOLock)
    count: int = 0
    """How many have the lock, or wait for it."""


class LogInTurns:
    """Turns of log-ins: some at once, of each host one. Hosts that wait have their turns one after
    the other, whatever the number of their requests.

    Args:
        at_once: Turns at once.
    """

    def __init__(self, at_once: int) -> None:
        self._turns = trio.CapacityLimiter(at_once)
        self._hosts: dict[str, _Host] = {}

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Waits for a turn of a host, which lasts as long as the context. Cancelled, it has
        none."""
        host_turns = self._hosts.setdefault(host, _Host())
        host_turns.count += 1
        try:
            # A host whose lock is taken does not stand in the line of all.
            async with host_turns.lock, self._turns:
                yield
        finally:
            host_turns.count -= 1
            if not host_turns.count:
                del self._hosts[host]
