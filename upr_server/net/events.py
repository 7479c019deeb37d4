"""What connections need of the event bus."""

from __future__ import annotations

from typing import Protocol

import trio

from upr_protocol.bucket_event import BucketEvent, EventFilter
from upr_protocol.errors import ServerError, Status


class Events(Protocol):
    """What became of buckets, by consumer."""

    async def next_events(
        self,
        consumer: str,
        wanted: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
    ) -> tuple[int, bool, tuple[BucketEvent, ...]]:
        """Waits for something to tell a consumer: the number of the batch, or 0; whether it must
        look at everything; and what became of buckets.

        Raises:
            ServerError: `FENCED`, `LIMIT_REACHED`, `UNSUPPORTED`.
            StorageError: What is to be told cannot be read.
        """

    def statistics(self) -> dict[str, object]:
        """Figures."""


class NoEvents:
    """A server that tells nobody."""

    async def next_events(
        self,
        consumer: str,  # noqa: ARG002
        wanted: EventFilter,  # noqa: ARG002
        *,
        timeout_s: float,  # noqa: ARG002
        acknowledged: int,  # noqa: ARG002
        wait_s: float,  # noqa: ARG002
    ) -> tuple[int, bool, tuple[BucketEvent, ...]]:
        """See `Events`."""
        await trio.lowlevel.checkpoint()
        raise ServerError(Status.UNSUPPORTED, "this server has no event bus: events is false")

    def statistics(self) -> dict[str, object]:
        """See `Events`."""
        return {}
