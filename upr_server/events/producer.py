"""The producer: counts what the engine reports, in every consumer's queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from upr_server.engine import Bucket
from upr_server.events.queues import EventQueues


class Producer:
    """The engine's `BucketObserver`. The engine reports batches, not mutations, and a
    report costs one dictionary look-up and one addition a consumer.

    Args:
        queues: The queues.
        on_change: Called after something was counted.
    """

    def __init__(self, queues: EventQueues, on_change: Callable[[], None]) -> None:
        self._queues = queues
        self._on_change = on_change

    def bucket_created(self, bucket: Bucket) -> None:
        """Counts a bucket's creation."""
        for queue in self._queues:
            queue.count_creation(bucket.name, bucket.incarnation)
        self._on_change()

    def bucket_deleted(self, bucket: Bucket) -> None:
        """Counts a bucket's deletion."""
        for queue in self._queues:
            queue.count_deletion(bucket.name, bucket.incarnation)
        self._on_change()

    def bucket_updated(self, bucket: Bucket, designs: Sequence[bytes], batch_count: int) -> None:
        """Counts each batch as an update, and notes the design documents among what it changed."""
        name, incarnation = bucket.name, bucket.incarnation
        for queue in self._queues:
            queue.count_updates(name, incarnation, designs, batch_count)
        self._on_change()
