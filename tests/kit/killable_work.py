"""Work of a recorded client that a test may kill at any moment, and that may fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from tests.kit.history import History, Said
from upr_protocol.errors import LocalProtocolError, UprError


class KillableWork:
    """Attempts at a client's work, one after the other.

    Args:
        name: The client's name in the history.
        history: Where the errors of attempts are noted.
    """

    def __init__(self, name: str, history: History) -> None:
        self._name = name
        self._history = history
        self._scope = trio.CancelScope()

    def kill(self) -> None:
        """Ends the attempt that runs, as if its process were killed."""
        self._scope.cancel()

    async def attempt(self, work: Callable[[], Awaitable[object]]) -> None:
        """Does the work until it ends, fails or is killed. Only a mistake of ours is raised."""
        with trio.CancelScope() as self._scope:
            await trio.lowlevel.checkpoint()
            try:
                await work()
            except UprError as error:
                if isinstance(error, LocalProtocolError):
                    raise
                self._history.add(Said(self._name, f"{error}"))
