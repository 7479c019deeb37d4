"""A bell: wakes whoever waits for events."""

from __future__ import annotations

import trio


class Bell:
    """See the module."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def ring(self) -> None:
        """Something was put into queues."""
        self._event.set()
        self._event = trio.Event()

    def next(self) -> trio.Event:
        """Set when it rings next. Asked for before a poll, nothing is missed between the two."""
        return self._event
