"""Credit: what publishers may have on their way to a bucket unanswered, and how they share it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from upr_server.engine import Bucket
    from upr_server.net.connection import Connection

CREDIT_BYTES_MAX: Final = 8 * 1024 * 1024
"""For one publisher: at 1 GB/s it covers 8 ms without an answer."""

CREDIT_BYTES_MIN: Final = 64 * 1024
"""Less would turn every batch into a round trip. It is what one has that has not published yet:
most who open a bucket only read it, and the first batch brings the rest."""


MEMORY_PER_BYTE: Final = 2
"""What a published byte comes to in memory, about: small mutations take as much again in the hash
table."""


class CreditShares:
    """Divides what lies between the mark at which a bucket is full and its quota among its
    publishers, so that it stays within its quota however many they are. What one was granted while
    there were fewer is not taken back, and the last of a credit may be overshot by a frame."""

    def __init__(self) -> None:
        self._publishers: defaultdict[Bucket, set[Connection]] = defaultdict(set)

    def of(self, bucket: Bucket, connection: Connection) -> int:
        """What `connection` may have on its way to `bucket`. O(1)."""
        publishers = self._publishers[bucket]
        if connection not in publishers:
            return CREDIT_BYTES_MIN
        room = (bucket.quota.limit_bytes - bucket.quota.full_bytes) // MEMORY_PER_BYTE
        share = room // len(publishers)
        return max(CREDIT_BYTES_MIN, min(CREDIT_BYTES_MAX, share))

    def publishes(self, bucket: Bucket, connection: Connection) -> None:
        """`connection` publishes to `bucket`."""
        self._publishers[bucket].add(connection)

    def leave(self, bucket: Bucket, connection: Connection) -> None:
        """`connection` will publish to `bucket` no more."""
        self._publishers[bucket].discard(connection)

    def forget(self, bucket: Bucket) -> None:
        """`bucket` was deleted."""
        self._publishers.pop(bucket, None)
