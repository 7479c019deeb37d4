"""Writing at the end of a step: to all connections for which one step of a task has made something.

A writer that is woken runs in the loop's next turn, after another look at all sockets. For one
mutation on its way to a consumer that costs as much as taking it in. So what a step of a reader has
made for others is written at the step's end, once for each connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

import structlog

log = structlog.get_logger(__name__)

DIRECT_MAX: Final = 8
"""Connections that one step writes to, at some 20 µs each. The writers of the others are woken."""


class Writable(Protocol):
    """A connection, as this module sees it."""

    def wake_writer(self) -> None:
        """Has its writer write what there is to send."""

    def write_now(self) -> None:
        """Writes what its socket takes of it now; its writer writes the rest."""


class StepWrites:
    """The connections that have got something to send in the step that is under way."""

    __slots__ = ("_connections", "_is_collecting")

    def __init__(self) -> None:
        self._connections: dict[Writable, None] = {}
        self._is_collecting = False

    def waker(self, connection: Writable) -> Callable[[], None]:
        """A function that adds `connection` to what the step writes, and does not keep the
        connection alive."""
        reference = ref(connection)

        def wake() -> None:
            existing = reference()
            if existing is not None:
                self.add(existing)

        return wake

    def begin(self) -> None:
        """A step begins. It must not pass a checkpoint before `end`."""
        self._is_collecting = True

    def add(self, connection: Writable) -> None:
        """A connection has something to send: it is written to at the step's end, or by its writer
        if no step has begun."""
        if self._is_collecting:
            self._connections[connection] = None
        else:
            connection.wake_writer()

    def end(self) -> None:
        """The step ends: writes to each of the connections once."""
        self._is_collecting = False
        connections, self._connections = self._connections, {}
        for place, connection in enumerate(connections):
            if place < DIRECT_MAX and _has_written(connection):
                continue
            connection.wake_writer()


def _has_written(connection: Writable) -> bool:
    """Writes to a connection; whether that went well. An error concerns this connection and not the
    one whose step it is, so it is logged, and this connection's writer meets it again."""
    try:
        connection.write_now()
    except Exception:
        log.exception("writing at a step's end failed")
        return False
    return True
