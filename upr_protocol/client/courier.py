"""Brings batches to one node, over one connection after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from upr_protocol.client.link import Link
from upr_protocol.client.outbox import Outbox
from upr_protocol.client.outcome import status_of
from upr_protocol.client.retry import Patience
from upr_protocol.errors import BrokenError, Status, UprError
from upr_protocol.wire import Credit, MapReply, Message, Refusal

if TYPE_CHECKING:
    from upr_protocol.client.couriers import Couriers

ELSEWHERE: Final = frozenset({Status.NOT_MY_PARTITION, Status.WRONG_STATE})
"""What a node says when another one may be the right one."""


class Courier:
    """A handler that lives through several links to one node.

    Args:
        outbox: What is to be brought there.
        patience: Told of progress.
        office: Whose it is.

    Attributes:
        outbox: See above.
        patience: See above.
    """

    def __init__(self, outbox: Outbox, patience: Patience, office: Couriers) -> None:
        self.outbox = outbox
        self.patience = patience
        self._office = office
        self._link: Link | None = None

    # The link's side.

    def connected(self, link: Link) -> None:
        """See `Handler`."""
        office, count = self._office, link.greeting.partition_count
        if office.partition_count not in (0, count):
            link.fail(
                BrokenError(
                    f"the bucket was made anew, with {count} partitions instead of "
                    f"{office.partition_count}"
                )
            )
            office.stop(link.failure)
            return
        office.partition_count = count
        office.connections += 1
        office.fleet.greeted(self, link)
        self._link = link
        self.pump()
        office.notify()

    def received(self, message: Message) -> None:
        """See `Handler`."""
        office = self._office
        if isinstance(message, MapReply):
            office.fleet.told(self, message)
            return
        if isinstance(message, Refusal) and status_of(message.status) in ELSEWHERE:
            office.fleet.doubt(message.map_revision)
        if not isinstance(message, Credit):
            batch = self.outbox.take(message, trio.current_time())
            if batch is not None:
                self.patience.progress()
                office.answered(batch)
        self.pump()
        office.notify()

    def writable(self) -> None:
        """See `Handler`."""
        self.pump()

    async def breathe(self) -> None:
        """See `Handler`. Answers are bounded by the batches in flight."""

    def lost(self, error: UprError) -> None:  # noqa: ARG002  whoever connects again has it
        """See `Handler`."""
        self._link = None
        self.outbox.disconnected()
        self._office.notify()

    # The office's side.

    async def drain(self) -> None:
        """See `Member`. What has no answer is sent again elsewhere, under its old number."""

    def pump(self) -> None:
        """Sends what may be sent now."""
        link = self._link
        if link is not None and self.outbox.pump(link.session, trio.current_time()):
            link.poke()
