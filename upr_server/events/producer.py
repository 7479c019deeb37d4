"""The producer: counts what the engine reports, in every consumer's queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from upr_protocol.bucket_event import ANY_DESIGN
from upr_protocol.limits import DESIGNS_MAX
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
        self._queues.remove_oversized()
        self._on_change()

    def bucket_updated(self, bucket: Bucket, designs: Sequence[bytes], batch_count: int) -> None:
        """Counts each batch as an update, and notes the design documents among what it changed."""
        name, incarnation = bucket.name, bucket.incarnation
        if len(designs) > DESIGNS_MAX:
            # No queue names so many: each would go through all of them to find that out.
            distinct_designs = tuple(dict.fromkeys(designs))
            is_named = len(distinct_designs) <= DESIGNS_MAX
            designs = distinct_designs if is_named else (ANY_DESIGN,)
        for queue in self._queues:
            queue.count_updates(name, incarnation, designs, batch_count)
        self._on_change()
