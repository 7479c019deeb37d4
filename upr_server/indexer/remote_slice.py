"""A slice that another node keeps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final, Protocol

import msgspec
import structlog
import trio

from upr_protocol.concurrency import first_failure
from upr_protocol.errors import UprError
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.slice_link import LinkedSlice
from upr_server.indexer.slices import SliceId, SliceObserver
from upr_server.indexer.worker_messages import ByteStream, FromNode, MessageStream

log = structlog.get_logger(__name__)

OPEN_S: Final = 5.0
"""How long it may take to open a link. A process that is stopped accepts connections, too."""

RETRY_S: Final = 1.0
"""The pause before a link is opened again."""


class LinkStream(ByteStream, Protocol):
    """A stream to a slice at another node."""

    async def aclose(self) -> None:
        """Closes it."""


class RemoteSlice(LinkedSlice):
    """Holds a slice at another node. What that node's slice is, and which indexes it has, that node
    decides itself.

    Args:
        slice_id: The slice.
        node: The other node's URL.
        open_link: Opens a stream to that slice there.
    """

    def __init__(
        self, slice_id: SliceId, node: str, open_link: Callable[[], Awaitable[LinkStream]]
    ) -> None:
        super().__init__(slice_id)
        self._node = node
        self._open_link = open_link
        self._trouble = "the link to it is being opened"

    async def run(self, observer: SliceObserver) -> None:
        """Keeps a link open."""
        while True:
            trouble = await self._run_link(observer)
            if trouble != self._trouble:
                self._trouble = trouble
                log.warning("no link to a slice", slice=self.title, trouble=trouble)
            await trio.sleep(RETRY_S)

    async def _run_link(self, observer: SliceObserver) -> str:
        """Opens a link, and talks over it; gives the reason for its end."""
        trouble = "the link to it has ended"
        try:
            with trio.fail_after(OPEN_S):
                stream = await self._open_link()
            async with aclosing(stream):
                log.info("a link to a slice", slice=self.title)
                await self._talk(MessageStream(stream, FromNode), observer)
        except* trio.TooSlowError:
            trouble = f"it has not answered for {OPEN_S:g} s"
        except* (UprError, OSError, msgspec.MsgspecError) as errors:
            trouble = str(first_failure(errors))
        return trouble

    @property
    def title(self) -> str:
        """The slice, and the node."""
        return f"{self.slice_id} at {self._node}"

    def _reason(self) -> str:
        return self._trouble

    async def stop(self) -> None:
        """That node applies what it has read when it stops itself."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Nothing is left to close."""

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """That node finds the definitions itself."""
