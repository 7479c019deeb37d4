"""Requests to one node, over one connection after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upr_protocol.client.asker import Asker
from upr_protocol.client.link import Link
from upr_protocol.client.retry import Patience
from upr_protocol.errors import UprError
from upr_protocol.wire import MapReply, Message

if TYPE_CHECKING:
    from upr_protocol.client.clerks import Clerks


class Clerk(Asker):
    """An asker that lives through several links to one node.

    Args:
        office: Whose it is.
        credit_timeout_s: How long a change waits for a server that grants no credit.

    Attributes:
        patience: Endless: each request has its own.
    """

    def __init__(self, office: Clerks, credit_timeout_s: float) -> None:
        super().__init__(office.address, credit_timeout_s)
        self.patience = Patience(float("inf"))
        self._office = office

    @property
    def is_up(self) -> bool:
        """Whether there is a link."""
        return self._link is not None and self._link.failure is None

    def connected(self, link: Link) -> None:
        """See `Handler`."""
        super().connected(link)
        self._office.connected(self, link)

    def received(self, message: Message) -> None:
        """See `Handler`."""
        if isinstance(message, MapReply):
            self._office.fleet.told(self, message)
        else:
            super().received(message)

    def lost(self, error: UprError) -> None:
        """See `Handler`."""
        super().lost(error)
        self._office.lost(error)
