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


class CreditShares:
    """Divides what lies between a bucket's high mark and its quota among its publishers, so that it
    stays near its quota however many they are. What one was granted while there were fewer is not
    taken back, and the last of a credit may be overshot by a frame."""

    def __init__(self) -> None:
        self._publishers: defaultdict[Bucket, set[Connection]] = defaultdict(set)

    def of(self, bucket: Bucket, connection: Connection) -> int:
        """What `connection` may have on its way to `bucket`. O(1)."""
        publishers = self._publishers[bucket]
        if connection not in publishers:
            return CREDIT_BYTES_MIN
        share = (bucket.quota.limit_bytes - bucket.quota.high_bytes) // len(publishers)
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
