"""Strangers: connections whose clients have not said `Hello`, or not logged in where they must.

Anybody can open as many as the server allows connections, and can open them again when the server
has closed them.
"""

from __future__ import annotations

from collections import Counter


class Strangers:
    """Counts the connections of strangers, by network."""

    __slots__ = ("_counts", "_networks")

    def __init__(self) -> None:
        self._networks: dict[object, str] = {}
        """By connection."""
        self._counts: Counter[str] = Counter()

    def count_of(self, network: str) -> int:
        """How many a network has. O(1)."""
        return self._counts[network]

    def add(self, connection: object, network: str) -> None:
        """A connection from a network was accepted."""
        self._networks[connection] = network
        self._counts[network] += 1

    def discard(self, connection: object) -> None:
        """Notes that the client of a connection is no stranger any more, or has gone. Calling it
        again does nothing."""
        network = self._networks.pop(connection, None)
        if network is not None:
            self._counts[network] -= 1
            if not self._counts[network]:
                del self._counts[network]
