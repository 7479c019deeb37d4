"""Batches from programs that block, to each node what is its."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from upr_protocol.address import Address
from upr_protocol.chunk import Chunk
from upr_protocol.client.blocking_fleet import BlockingFleet
from upr_protocol.client.blocking_link import BlockingLink, step_any
from upr_protocol.client.courier import ELSEWHERE
from upr_protocol.client.outbox import Batch, Outbox
from upr_protocol.client.outcome import status_of
from upr_protocol.client.retry import Patience
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Message, Refusal

Home = Address | None
"""Where a partition is; None while it is nowhere."""


class BlockingPost:
    """One run of publishing: batches are taken from a source as there is room.

    Args:
        fleet: The links.
        new_outbox: Gives each node's.
        patience: How long to go on without any answer.
        done: Called with each batch that is answered, or refused for good.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        fleet: BlockingFleet,
        new_outbox: Callable[[], Outbox],
        patience: Patience,
        done: Callable[[Batch], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._fleet = fleet
        self._new_outbox = new_outbox
        self._patience = patience
        self._done = done
        self._sleep = sleep
        self._boxes: dict[Home, Outbox] = {None: new_outbox()}
        self._at: dict[PartitionId, Home] = {}
        self._rests: dict[Home, float] = {}
        self._asks_at = float("inf")
        """When the map is to be asked for again."""

    def run(
        self,
        source: Iterator[tuple[PartitionId, Chunk]],
        buffer_bytes: int,
        timeout_s: float,
        credit_timeout_s: float,
    ) -> bool:
        """Sends and receives until everything is answered.

        Returns:
            Whether it ended because no credit came in time.

        Raises:
            UprError: No node could be reached for too long.
        """
        if not self._fleet.was_connected:
            self._fleet.any()
        while True:
            boxes = self._boxes.values()
            full = sum(box.nbytes for box in boxes) >= buffer_bytes
            batch = None if full else next(source, None)
            if batch is not None:
                self._box_of(batch[0]).add(*batch)
            elif not any(box.unanswered for box in boxes):
                return False
            links = self._pumped()
            now = time.monotonic()
            # What there is goes out while the next batch is made, which may take its time.
            deadline = now if batch is not None else now + timeout_s
            deadline = min(deadline, self._wakes_at)
            if batch is None:
                for box in self._boxes.values():
                    if box.starved_since is not None:
                        if now >= box.starved_since + credit_timeout_s:
                            return True
                        deadline = min(deadline, box.starved_since + credit_timeout_s)
            if links:
                step_any(list(links.values()), deadline)
            else:
                self._sleep(max(0.0, deadline - now))
                self._rests = {h: until for h, until in self._rests.items() if until > deadline}
            self._deal_with(links)

    @property
    def _wakes_at(self) -> float:
        times = [box.wakes_at for box in self._boxes.values()]
        rests = [until for home, until in self._rests.items() if self._boxes[home].unanswered]
        return min((self._asks_at, *(time for time in times if time is not None), *rests))

    # Where partitions are.

    def _box_of(self, partition: PartitionId) -> Outbox:
        if partition not in self._at:
            self._at[partition] = self._fleet.home_of(partition)
        return self._boxes.setdefault(self._at[partition], self._new_outbox())

    def _route(self) -> None:
        for partition, home in list(self._at.items()):
            now_at = self._fleet.home_of(partition)
            if now_at != home:
                lane = self._boxes[home].let_go(partition)
                self._at[partition] = now_at
                if lane is not None:
                    self._box_of(partition).take_over(partition, lane)

    # What is said and heard.

    def _pumped(self) -> dict[Home, BlockingLink]:
        """Sends what may be sent; the links on which something is awaited."""
        self._asks_at = float("inf")
        if self._boxes[None].unanswered or self._fleet.atlas.is_old:
            self._asks_at = self._fleet.refresh()
        self._route()
        links: dict[Home, BlockingLink] = {}
        for home, box in list(self._boxes.items()):
            if home is None or not box.unanswered or self._rests.get(home, 0) > time.monotonic():
                continue
            self._rests.pop(home, None)
            try:
                links[home] = self._fleet.at(home)
            except UprError as error:
                self._failed(home, error)
        for home, link in list(links.items()):
            self._boxes[home].pump(link.session, time.monotonic())
        if self._boxes[None].unanswered and not links and None not in self._rests:
            homeless = BrokenError("no node takes a partition that is published to")
            wait_s = self._patience.wait_s(homeless, time.monotonic())
            self._rests[None] = time.monotonic() + min(wait_s, 0.5)
        elif self._rests.get(None, 0) <= time.monotonic():
            self._rests.pop(None, None)
        return links

    def _failed(self, home: Home, error: UprError) -> None:
        """A node cannot be reached, or not any more."""
        if not self._fleet.was_connected:
            raise error
        self._boxes[home].disconnected()
        if home is not None:
            self._fleet.lost(home)
        now = time.monotonic()
        self._rests[home] = now + self._patience.wait_s(error, now)
        self._fleet.refresh()

    def _deal_with(self, links: dict[Home, BlockingLink]) -> None:
        for home, link in links.items():
            while (message := link.take()) is not None:
                self._heard(self._boxes[home], message)
            if link.failure is not None:
                self._failed(home, link.failure)

    def _heard(self, box: Outbox, message: Message) -> None:
        if isinstance(message, Refusal) and status_of(message.status) in ELSEWHERE:
            self._fleet.refresh(message.map_revision)
        answered = box.take(message, time.monotonic())
        if answered is not None:
            self._patience.progress()
            self._done(answered)
