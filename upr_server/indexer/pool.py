"""The memory that all queues and scans of an indexer share, in bytes (seed 003)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from upr_protocol.errors import UprError
from upr_server.indexer.bell import Bell

STREAM_SHARE: Final = 0.75
"""Above this part of the pool nothing more is taken from the running indexes' stream."""

BUILD_SHARE: Final = 0.5
"""Above this part nothing more is taken for indexes that are being built: they must leave room for
those that run."""

SCAN_BYTES: Final = 1024 * 1024
"""What a scan is taken to cost: its entries, as bytes and as JSON."""

RETRY_AFTER_S: Final = 1.0
"""When a scan that was refused may come again: queues move by the second."""


class OverloadedError(UprError):
    """There is no memory for a scan just now.

    Attributes:
        retry_after_s: When to come again.
    """

    def __init__(self) -> None:
        self.retry_after_s = RETRY_AFTER_S
        super().__init__("the indexer is short of memory; try again in a second")


class Pool:
    """Counts bytes. Streams wait for room, and scans are refused when there is none.

    A stream never waits for scans: they may wait for what it is about to bring.

    A stream that may take something takes what it is given next, whatever its size: so the pool may
    be exceeded by one chunk a stream, and scans are refused until it has gone.

    Args:
        nbytes: How much there is.

    Attributes:
        nbytes: How much there is.
        used: How much of it is in use by queues.
        peak: The most that was in use by queues.
        refused: Scans that were refused.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = self.peak = self.refused = self._scans = 0
        self._bell = Bell()

    def take(self, nbytes: int) -> None:
        """So much is in use."""
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def give_back(self, nbytes: int) -> None:
        """So much is not in use any more."""
        self.used -= nbytes
        assert self.used >= 0
        self._bell.ring()

    def has_room(self, share: float) -> bool:
        """Whether less than this share of the pool is in use."""
        return self.used < self.nbytes * share

    async def room(self, share: float) -> None:
        """Waits until less than this share of the pool is in use."""
        await self._bell.until(lambda: self.has_room(share))

    @contextmanager
    def scan(self) -> Iterator[None]:
        """Memory for a scan.

        Raises:
            OverloadedError: There is none.
        """
        if self.used + (self._scans + 1) * SCAN_BYTES > self.nbytes:
            self.refused += 1
            raise OverloadedError
        self._scans += 1
        try:
            yield
        finally:
            self._scans -= 1
