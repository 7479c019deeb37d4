"""Staying connected."""

from __future__ import annotations

from typing import Final, Protocol

import trio

from upr_protocol.client.address import Address
from upr_protocol.client.link import Handler, TrioOptions, open_link
from upr_protocol.client.retry import Patience
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.ids import PartitionId

LIVED_S: Final = 10.0
"""A link that lasted so long was a good one: its loss is a first failure."""


class Persistent(Handler, Protocol):
    """A handler that lives through several links."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to connect for."""

    @property
    def connections(self) -> int:
        """How many links came as far as being greeted."""


async def stay_connected(
    address: Address,
    options: TrioOptions,
    handler: Persistent,
    patience: Patience,
    partitions: tuple[PartitionId, ...] = (),
) -> None:
    """Connects, and connects again whenever the link is lost, until the handler is finished.

    The first connection is tried once: an address that never answered is more likely wrong than
    away. Cancelled, it closes the link that it has.

    Raises:
        UprError: There is no use in going on; why the last link, or the attempt, ended.
    """
    while True:
        error: UprError = ClosedError("the connection was closed here")
        try:
            async with open_link(address, options, handler, partitions) as link:
                connected_at = trio.current_time()
                await link.ended.wait()
                if trio.current_time() - connected_at >= LIVED_S:
                    patience.progress()
                if link.failure is not None:
                    error = link.failure
        except UprError as failure:
            error = failure
        if handler.finished:
            return
        if not handler.connections:
            raise error
        await trio.sleep(patience.wait_s(error, trio.current_time()))
