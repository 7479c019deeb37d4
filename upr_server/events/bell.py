"""A bell: wakes whoever waits for events."""

from __future__ import annotations

import trio


class Bell:
    """Wakes those that wait. To ring one that nobody waits for costs next to nothing, and the
    engine does so for each batch."""

    def __init__(self) -> None:
        self._event: trio.Event | None = None

    def ring(self) -> None:
        """Wakes whoever waits now."""
        if self._event is not None:
            self._event.set()
            self._event = None

    def next(self) -> trio.Event:
        """Set when it rings next. Asked for before a poll, nothing is missed between the two."""
        if self._event is None:
            self._event = trio.Event()
        return self._event
