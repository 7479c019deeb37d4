"""The memory that all queues and scans of an indexer share, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError

STREAM_SHARE: Final = 0.75
"""Above this share of the pool the running indexes' stream pauses."""

BUILD_SHARE: Final = 0.5
"""Above this share the streams of new indexes pause: they must leave room for the running ones."""

ANSWER_BYTES_MAX: Final = 1024 * 1024
"""The most entries that one answer holds, in bytes; a continuation gives more."""

PIECE_BYTES: Final = 32 * 1024
"""An answer becomes JSON in pieces of about so many bytes of entries, one at a time."""

SCAN_OVERHEAD_BYTES: Final = 8 * PIECE_BYTES
"""What a scan takes beside its entries: a piece as Python objects, as JSON, and on its way."""

SCAN_BYTES: Final = ANSWER_BYTES_MAX + SCAN_OVERHEAD_BYTES
"""What a scan counts for until it is known what it has found."""

RETRY_AFTER_S: Final = 1.0
"""When a refused scan may come again: queues move by the second."""


class OverloadedError(UprError):
    """The pool has no memory for a scan just now, or the indexer has other limits to keep.

    Attributes:
        retry_after_s: When to come again.
    """

    def __init__(self, reason: str = "the indexer is short of memory") -> None:
        self.retry_after_s = RETRY_AFTER_S
        super().__init__(f"{reason}; try again in a second")


class ScanReservation:
    """What one scan has reserved of a pool.

    Attributes:
        nbytes: How many bytes.

    Raises:
        OverloadedError: The pool is full.
    """

    def __init__(self, pool: MemoryPool) -> None:
        pool.reserve_scan(SCAN_BYTES)
        self._pool = pool
        self.nbytes = SCAN_BYTES

    def reduce_to(self, nbytes: int) -> None:
        """Gives back what is not needed, now that it is known how much is. O(1)."""
        self._pool.release_scan(self.nbytes - nbytes)
        self.nbytes = nbytes


class MemoryPool:
    """Counts bytes. Streams wait for room; scans are refused when it is full.

    A stream never waits for scans: they may wait for what it is about to bring. A stream that has
    found room takes its next chunk, whatever its size. So each stream may exceed the pool by one
    chunk, and scans are refused until that is applied.

    Args:
        nbytes: The pool's size.

    Attributes:
        nbytes: The pool's size.
        used_bytes: Bytes that queues have reserved.
        scan_bytes: Bytes that scans have reserved: until their answers are sent.
        peak_bytes: The most that queues ever had reserved.
        refused_count: How many scans were refused.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used_bytes = self.peak_bytes = self.refused_count = self.scan_bytes = 0
        self._released = Notifier()

    def reserve(self, nbytes: int) -> None:
        """Counts bytes as used, even if that exceeds the pool."""
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, nbytes: int) -> None:
        """Counts reserved bytes as free again."""
        self.used_bytes -= nbytes
        assert self.used_bytes >= 0
        self._released.notify()

    def has_room(self, share: float) -> bool:
        """Whether less than this share of the pool is in use."""
        return self.used_bytes < self.nbytes * share

    async def wait_for_room(self, share: float) -> None:
        """Waits until less than this share of the pool is in use."""
        await self._released.wait_until(lambda: self.has_room(share))

    def reserve_scan(self, nbytes: int) -> None:
        """Counts bytes as used by a scan.

        Raises:
            OverloadedError: The pool is full.
        """
        if self.used_bytes + self.scan_bytes + nbytes > self.nbytes:
            self.refused_count += 1
            raise OverloadedError
        self.scan_bytes += nbytes

    def release_scan(self, nbytes: int) -> None:
        """Counts bytes that a scan has used as free again."""
        self.scan_bytes -= nbytes
        assert self.scan_bytes >= 0

    def figures(self) -> dict[str, int]:
        """Figures of the pool, for `GET /v1/status`."""
        return {
            "pool_bytes": self.nbytes,
            "pool_used": self.used_bytes,
            "pool_peak": self.peak_bytes,
            "scan_bytes": self.scan_bytes,
            "scans_refused": self.refused_count,
        }

    @contextmanager
    def reserve_for_scan(self) -> Iterator[ScanReservation]:
        """Reserves the memory of one scan for as long as the context: until its answer is sent.

        Raises:
            OverloadedError: The pool is full.
        """
        reservation = ScanReservation(self)
        try:
            yield reservation
        finally:
            reservation.reduce_to(0)
