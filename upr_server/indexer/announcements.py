"""What the server's event bus tells of design documents."""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

import structlog

from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, EventKind
from upr_protocol.client import Address, connect, follow_events
from upr_protocol.errors import UprError
from upr_server.indexer.catalog import Catalog
from upr_server.indexer.definition import design_name
from upr_server.indexer.overlay import Overlay

log = structlog.get_logger(__name__)

READ_PATIENCE_S: Final = 10.0
"""How long to try to read what is announced. Whoever cannot be asked does not stream either, and
the stream brings it in the end; to take longer than the bus waits for would be to be forgotten."""


class Announcements:
    """Hears that design documents have changed, and reads them, ahead of the stream.

    The stream brings them too, and what it brings is the truth: it knows them at a start, and takes
    them back. But it may be far behind, or stand still as the pool is full. Nothing is lost when
    there is no event bus, or what it tells cannot be read.

    Args:
        address: The bucket.
        consumer: Under which name the bus knows this indexer.
        catalog: What the stream has brought.
        overlay: Where that goes which it has not.
    """

    def __init__(self, address: Address, consumer: str, catalog: Catalog, overlay: Overlay) -> None:
        self._address = address
        self._consumer = consumer
        self._catalog = catalog
        self._overlay = overlay

    async def run(self) -> None:
        """Listens until that is no use any more."""
        try:
            await self._listen()
        except UprError as error:
            log.warning(
                "the event bus is not heard: definitions come by the stream alone",
                error=str(error),
            )

    async def _listen(self) -> None:
        async with follow_events(
            self._address,
            consumer=self._consumer,
            kinds=EventKind.DESIGN,
            # No character of a bucket's name stands for others.
            pattern=self._address.bucket,
            identity="upr-indexer",
            retry_timeout_s=math.inf,
        ) as feed:
            async for event in feed:
                # "Look at everything", and that any may have changed, names nothing to be read: the
                # stream is about to bring it.
                if isinstance(event, BucketEvent):
                    await self._read([key for key in event.designs if key != ANY_DESIGN])

    async def _read(self, keys: Collection[bytes]) -> None:
        if not keys:
            return
        try:
            async with connect(
                self._address, identity="upr-indexer", retry_timeout_s=READ_PATIENCE_S
            ) as client:
                items = await client.get_many(list(keys))
        except UprError as error:
            log.info("what is announced cannot be read", error=str(error))
            return
        told = self._overlay.texts
        brought = await self._catalog.current()
        for key, item in zip(keys, items, strict=True):
            design, text = design_name(key), None if item is None else bytes(item.value)
            # As a rule the stream was faster.
            if design in told or brought.get(design) != text:
                self._overlay.put(design, text)


def consumer_name(data_dir: Path) -> str:
    """The name under which the bus knows the indexer in `data_dir`, also after it has restarted."""
    place = f"{socket.gethostname()}\0{data_dir.resolve()}"
    return f"indexer-{hashlib.sha256(place.encode(errors='surrogateescape')).hexdigest()[:12]}"
