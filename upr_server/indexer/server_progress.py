"""How far the server is, for the figures that say how far an index is behind it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import trio

from upr_protocol.client import Address, connect
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo

MAX_AGE_S: Final = 1.0
"""How long an answer is used again: a list of indexes asks once, and not once for each index."""

TIMEOUT_S: Final = 2.0
"""The status of an index waits no longer for a server that does not answer."""


class ServerProgress:
    """The highest sequence number of each partition at the server.

    The stream's own marks do not tell it: they count what has been received, and right after a
    start that is next to nothing.

    Args:
        address: The bucket.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._seqs: dict[PartitionId, SeqNo] = {}
        self._asked_at = -MAX_AGE_S
        """When the last question ended."""
        self._asking = trio.Lock()

    async def seqs(self) -> Mapping[PartitionId, SeqNo]:
        """The numbers, at most a second old; the last ones known if the server does not answer
        within two seconds. Callers that come together share one question."""
        async with self._asking:
            if trio.current_time() - self._asked_at >= MAX_AGE_S:
                await self._renew()
        return self._seqs

    async def _renew(self) -> None:
        # The stream's log lines tell that the server is away.
        with trio.move_on_after(TIMEOUT_S), suppress(UprError):
            async with connect(self._address, identity="upr-indexer") as client:
                rows = await client.seqnos()
            self._seqs = {row.partition: row.high_seq for row in rows}
        self._asked_at = trio.current_time()
