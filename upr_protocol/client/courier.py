"""Brings batches to the server, over one connection after another."""

from __future__ import annotations

from collections.abc import Callable

import trio

from upr_protocol.client.link import Link
from upr_protocol.client.outbox import Batch, Outbox
from upr_protocol.client.retry import Patience
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.wire import Credit, Message


class Courier:
    """A handler that lives through several links.

    Args:
        outbox: What is to be brought to the server.
        patience: Told of progress.
        on_done: Called with each batch that is answered, or refused for good.

    Attributes:
        finished: Whether nothing more will be sent.
        error: Why.
        connections: Connections made.
        partition_count: The bucket's; 0 before the first connection.
        patience: See above.
    """

    def __init__(
        self, outbox: Outbox, patience: Patience, on_done: Callable[[Batch], None]
    ) -> None:
        self.finished = False
        self.connections = 0
        self.error: UprError | None = None
        self.partition_count = 0
        self._outbox = outbox
        self.patience = patience
        self._on_done = on_done
        self._link: Link | None = None
        self._changed = trio.Event()
        self._rest_changed = trio.Event()

    # The link's side.

    def connected(self, link: Link) -> None:
        """See `Handler`."""
        count = link.greeting.partition_count
        if self.partition_count not in (0, count):
            link.fail(
                BrokenError(
                    f"the bucket was made anew, with {count} partitions instead of "
                    f"{self.partition_count}"
                )
            )
            self.stop(link.failure)
            return
        self.partition_count = count
        self.connections += 1
        self._link = link
        self.pump()
        self._notify()

    def received(self, message: Message) -> None:
        """See `Handler`."""
        now = trio.current_time()
        if isinstance(message, Credit):
            self.pump()
            self._notify()
            return
        batch = self._outbox.take(message, now)
        if batch is not None:
            self.patience.progress()
            self._on_done(batch)
        self.pump()
        self._notify()
        if self._outbox.wakes_at is not None:
            self._rest_changed.set()

    def writable(self) -> None:
        """See `Handler`."""
        self.pump()

    async def breathe(self) -> None:
        """See `Handler`. Answers are bounded by the batches in flight."""

    def lost(self, error: UprError) -> None:  # noqa: ARG002  whoever connects again has it
        """See `Handler`."""
        self._link = None
        self._outbox.disconnected()
        self._notify()

    # The publisher's side.

    def pump(self) -> None:
        """Sends what may be sent now."""
        link = self._link
        if link is not None and self._outbox.pump(link.session, trio.current_time()):
            link.poke()

    async def pump_rested(self) -> None:
        """Pumps whenever batches that were refused have waited long enough."""
        while True:
            wakes_at = self._outbox.wakes_at
            if wakes_at is None:
                self._rest_changed = trio.Event()
                await self._rest_changed.wait()
            else:
                await trio.sleep_until(wakes_at)
                self.pump()

    def stop(self, error: UprError | None) -> None:
        """Nothing more will be sent."""
        self.finished = True
        if self.error is None:
            self.error = error
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def change(self, deadline: float) -> None:
        """Waits until something has changed, or the deadline."""
        with trio.move_on_at(deadline):
            await self._changed.wait()
