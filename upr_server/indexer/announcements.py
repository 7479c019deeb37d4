"""Design documents that the server's event bus announces."""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import structlog
import trio

from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, EventKind
from upr_protocol.client import Address, Item, connect, follow_events
from upr_protocol.errors import ServerError, Status, UprError
from upr_server.indexer.overlay import DesignOverlay
from upr_server.indexer.pure.definition import design_name, readable_text

log = structlog.get_logger(__name__)

LIMIT_RETRY_S: Final = 10.0
"""The pause where the bus has too many consumers."""

READ_TIMEOUT_S: Final = 10.0
"""How long to try to read an announced document. A server that cannot be asked does not stream
either, and the stream brings the document in the end. With a longer timeout the bus would drop
this consumer's queue."""


class Announcements:
    """Learns from the event bus that design documents have changed, and reads them ahead of the
    stream.

    The stream brings them, too, and it decides: it knows them at a start, and rolls them back. But
    it may be far behind, or pause because the pool is full. Nothing is lost without an event bus,
    or when an announced document cannot be read.

    Args:
        address: The bucket.
        consumer: The indexer's name as a consumer of the bus.
        streamed: Gives the documents that the stream has brought, by name.
        overlay: Takes the documents that it has not.
    """

    def __init__(
        self,
        address: Address,
        consumer: str,
        streamed: Callable[[], Mapping[str, bytes]],
        overlay: DesignOverlay,
    ) -> None:
        self._address = address
        self._consumer = consumer
        self._streamed = streamed
        self._overlay = overlay

    async def run(self) -> None:
        """Follows the bus until it refuses. If it has too many consumers, others may end."""
        is_full = True
        while is_full:
            try:
                await self._listen()
            except UprError as error:
                log.warning(
                    "event bus unreachable; following design documents through the stream",
                    error=str(error),
                )
                is_full = isinstance(error, ServerError) and error.status is Status.LIMIT_REACHED
            if is_full:
                await trio.sleep(LIMIT_RETRY_S)

    async def _listen(self) -> None:
        async with follow_events(
            self._address,
            consumer=self._consumer,
            kinds=EventKind.DESIGN,
            # A bucket's name has no wildcards.
            pattern=self._address.bucket,
            identity="upr-indexer",
            retry_timeout_s=math.inf,
        ) as feed:
            async for event in feed:
                # "Look at everything" and `ANY_DESIGN` name no document to read: the stream is
                # about to bring it.
                if isinstance(event, BucketEvent):
                    await self._read([key for key in event.designs if key != ANY_DESIGN])

    async def _read(self, keys: Collection[bytes]) -> None:
        if not keys:
            return
        try:
            async with connect(
                self._address, identity="upr-indexer", retry_timeout_s=READ_TIMEOUT_S
            ) as client:
                # One by one: there may be a thousand, each of 20 MiB.
                for key in keys:
                    if not self._take_in(key, await client.get(key)):
                        log.info("announced documents are too long; waiting for the stream")
                        return
        except UprError as error:
            log.info("announced documents unreadable; waiting for the stream", error=str(error))

    def _take_in(self, key: bytes, item: Item | None) -> bool:
        """Overlays a document that was just read, if that is of use. Returns whether there was room
        for it."""
        design = design_name(key)
        text = None if item is None else readable_text(bytes(item.value))
        # Mostly the stream was faster, and nothing is to be overlaid.
        if design in self._overlay.texts or self._streamed().get(design) != text:
            return self._overlay.put(design, text)
        return True


def consumer_name(data_dir: Path) -> str:
    """The name under which the bus knows the indexer in `data_dir`, also after it has restarted."""
    place = f"{socket.gethostname()}\0{data_dir.resolve()}"
    return f"indexer-{hashlib.sha256(place.encode(errors='surrogateescape')).hexdigest()[:12]}"
