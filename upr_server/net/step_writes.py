"""Writing at the end of a step: to all connections for which one step of a task has made something.

A writer that is woken runs in the loop's next turn, after another look at all sockets. For one
mutation on its way to a consumer that costs as much as taking it in. So what a step of a reader has
made for others is written at the step's end, once for each connection.

A mutation of a partition with a thousand consumers wakes a thousand writers. They are woken some in
each turn, so that others have their turn in between.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final, Protocol
from weakref import ref

import structlog
import trio

from upr_protocol.concurrency import Notifier

log = structlog.get_logger(__name__)

DIRECT_MAX: Final = 8
"""Connections that one step writes to, at some 20 µs each. The writers of the others are woken."""

DIRECT_BYTES: Final = 256 * 1024
"""Bytes after which a step writes to no further connection. A MiB takes about a millisecond, and
each connection may have so much to send."""

WOKEN_MAX: Final = 32
"""Writers that are woken in one turn of the loop: at some 65 µs each, 2 ms. What their peers
acknowledge meanwhile is read in the same turn."""


class Writable(Protocol):
    """A connection, as this module sees it."""

    def wake_writer(self) -> None:
        """Wakes its writer, which writes what there is to send."""

    def flush_now(self, now: float) -> int:
        """Writes what its socket takes of it at the time `now`; its writer writes the rest. Returns
        how many bytes there were."""


class StepWrites:
    """The connections that have got something to send in the step that is under way."""

    __slots__ = (
        "_connections",
        "_has_unwoken",
        "_is_collecting",
        "_is_running",
        "_unwoken",
        "_woken",
    )

    def __init__(self) -> None:
        self._connections: dict[Writable, None] = {}
        self._is_collecting = False
        self._is_running = False
        self._woken = 0
        """How many writers were woken since the last step began, or the last turn of `run`."""
        self._unwoken: dict[Writable, None] = {}
        """Connections whose writers are to be woken in a later turn."""
        self._has_unwoken = Notifier()

    def waker(self, connection: Writable) -> Callable[[], None]:
        """A function that adds `connection` to what the step writes, and does not keep the
        connection alive."""
        reference = ref(connection)

        def wake() -> None:
            existing = reference()
            if existing is not None:
                self.add(existing)

        return wake

    def begin(self, connection: Writable) -> None:
        """A step of `connection` begins; at the step's end, this connection is written to in any
        case. The step must not pass a checkpoint before `end`."""
        self._is_collecting = True
        self._woken = 0
        self._connections[connection] = None

    def add(self, connection: Writable) -> None:
        """A connection has something to send: it is written to at the step's end, or by its writer
        if no step has begun."""
        if self._is_collecting:
            self._connections[connection] = None
        else:
            self._wake(connection)

    def end(self, now: float) -> None:
        """The step ends, at the time `now`: writes to each of the connections once. An error
        concerns this connection and not the one whose step it is, so it is logged, and this
        connection's writer meets it again."""
        self._is_collecting = False
        connections, self._connections = self._connections, {}
        nbytes, direct_left = 0, DIRECT_MAX
        for connection in connections:
            if direct_left and nbytes < DIRECT_BYTES:
                direct_left -= 1
                try:
                    nbytes += connection.flush_now(now)
                    continue
                except Exception:
                    log.exception("writing at a step's end failed")
            self._wake(connection)

    def _wake(self, connection: Writable) -> None:
        if self._woken < WOKEN_MAX or not self._is_running:
            self._woken += 1
            connection.wake_writer()
        else:
            self._unwoken[connection] = None
            self._has_unwoken.notify()

    async def run(self) -> None:
        """Wakes the writers that are too many for one turn, until cancelled. Before it runs, and
        after that, all are woken at once."""
        self._is_running = True
        try:
            while True:
                while not self._unwoken:
                    await self._has_unwoken.wait()
                self._wake_some(WOKEN_MAX)
                await trio.lowlevel.checkpoint()
        finally:
            self._is_running = False
            self._wake_some(len(self._unwoken))

    def _wake_some(self, count: int) -> None:
        self._woken = 0
        for connection in list(islice(self._unwoken, count)):
            del self._unwoken[connection]
            connection.wake_writer()
