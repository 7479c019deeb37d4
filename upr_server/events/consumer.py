"""A consumer: a name, its health, and what it takes out of its queue."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from upr_protocol.bucket_event import BucketEvent
from upr_server.events import queues
from upr_server.events.errors import UnknownConsumerError
from upr_server.events.store import EventStore


@attrs.frozen
class News:
    """What a consumer is told.

    Attributes:
        everything: Whether it may have missed anything, and must look at everything. What comes
            after this is told as events.
        events: What became of buckets since it asked last.
        is_all: Whether the queue was looked at to its end.
    """

    everything: bool
    events: tuple[BucketEvent, ...]
    is_all: bool = True


class Consumer:
    """One consumer. Whoever has its name goes on with its queue.

    Args:
        store: Where the queues are.
        name: Its name: letters, digits, dots, underscores and hyphens.
        timeout_s: When it has not polled for so long it is taken for dead, and its queue goes.
        time: Seconds since 1970.
    """

    def __init__(
        self, store: EventStore, name: str, timeout_s: float, time: Callable[[], float]
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._store = store
        self._time = time
        self._after = b""

    async def poll(self) -> News:
        """Takes out of the queue what is there, and says that the consumer is alive. If it is not
        known, or was cleared, it registers, and is told so.

        Cancelled, what was taken out is lost: who may be cancelled shields this.

        Raises:
            TooManyConsumersError: It is not known, and no more can be registered.
            StorageError: The store failed, or was full.
        """
        now = self._time()
        try:
            polled = await queues.poll(self._store, self.name, self.timeout_s, now, self._after)
        except UnknownConsumerError:
            self._after = b""
            await queues.register(self._store, self.name, self.timeout_s, now)
            return News(everything=True, events=())
        self._after = polled.after
        return News(everything=False, events=polled.events, is_all=not polled.after)

    async def is_known(self) -> bool:
        """Says that the consumer is alive; whether it is still registered."""
        try:
            await queues.report_health(self._store, self.name, self.timeout_s, self._time())
        except UnknownConsumerError:
            return False
        return True
