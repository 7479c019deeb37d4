"""A link on which a node is asked for its partition map, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import attrs
import trio

from upr_protocol.client.address import Address
from upr_protocol.client.link import Link, TrioOptions, open_link
from upr_protocol.errors import UprError
from upr_protocol.wire import GetMap, MapReply, Message

IDLE_S: Final = 2.0
"""A scout who is not asked for so long closes the link: while a partition has no node, rounds of
asking follow each other faster."""

PATIENCE_S: Final = 2.0
"""How long an answer is waited for before the node is taken for gone."""


class Scout:
    """A link's handler, and the link.

    Args:
        address: The node, and the bucket whose map is of interest.
        options: How to connect.
        told: Called with each answer; what it raises ends the link.

    Attributes:
        scope: Cancelled, it is over.
    """

    def __init__(
        self, address: Address, options: TrioOptions, told: Callable[[MapReply], None]
    ) -> None:
        self.scope = trio.CancelScope()
        self._address = address
        self._options = options
        self._told = told
        self._link: Link | None = None
        self._asked_at = trio.current_time()
        self._waits = True
        self._is_over = False

    async def run(self) -> None:
        """Connects, asks, and stays for as long as it is asked again. There is no error: who does
        not answer is asked anew in the next round."""
        with suppress(UprError), self.scope:
            async with open_link(
                attrs.evolve(self._address, bucket=""), self._options, self
            ) as link:
                while link.failure is None and trio.current_time() < self._asked_at + IDLE_S:
                    with trio.move_on_at(self._asked_at + IDLE_S):
                        await link.ended.wait()
        self._is_over = True

    def ask(self) -> bool:
        """Asks the node again, unless its answer is still waited for; whether it may yet come."""
        now = trio.current_time()
        if self._is_over:
            return False
        if self._waits:
            return now < self._asked_at + PATIENCE_S
        self._asked_at = now
        return self._send()

    def _send(self) -> bool:
        assert self._link is not None
        try:
            self._link.send(GetMap(self._address.bucket, opaque=self._link.session.new_opaque()))
        except UprError:
            return False
        self._waits = True
        return True

    # The link's side.

    def connected(self, link: Link) -> None:
        """See `Handler`."""
        self._link = link
        self._send()

    def received(self, message: Message) -> None:
        """See `Handler`. A refusal is an answer, too: there is no such bucket here."""
        self._waits = False
        if isinstance(message, MapReply):
            self._told(message)

    def writable(self) -> None:
        """See `Handler`. One request does not crowd a link."""

    async def breathe(self) -> None:
        """See `Handler`. There is one answer to each question."""

    def lost(self, error: UprError) -> None:  # noqa: ARG002  the next round connects anew
        """See `Handler`."""
        self._is_over = True
