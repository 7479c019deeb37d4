"""How many of something there may be, and how many of them from one host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class HostLimit:
    """Counts what comes from hosts, connections for instance.

    Args:
        total_max: How many there may be, half of them from one host.

    Attributes:
        total_max: How many there may be.
        host_max: How many there may be from one host.
    """

    def __init__(self, total_max: int) -> None:
        self.total_max = total_max
        self.host_max = total_max // 2
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    @property
    def is_full(self) -> bool:
        """Whether there may be no more. O(hosts)."""
        return len(self) >= self.total_max

    def is_full_for(self, host: str) -> bool:
        """Whether there may be no more from this host."""
        return self._counts[host] >= self.host_max

    @contextmanager
    def counted(self, host: str) -> Iterator[None]:
        """Counts one of a host for as long as the context."""
        self._counts[host] += 1
        try:
            yield
        finally:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]
