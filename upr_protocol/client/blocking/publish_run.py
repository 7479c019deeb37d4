"""Batches from programs that block, to each node what is its."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from upr_protocol.address import Address
from upr_protocol.chunk import Chunk
from upr_protocol.client.blocking.connection import BlockingConnection, step_any
from upr_protocol.client.blocking.connection_pool import BlockingConnectionPool
from upr_protocol.client.core.accumulator import Accumulator, Batch
from upr_protocol.client.core.results import status_of
from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.trio.node_publisher import WRONG_NODE
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Message, Refusal

Home = Address | None
"""Where a partition is; None while it is nowhere."""


class PublishRun:
    """One run of publishing: batches are taken from a source as there is room.

    Args:
        pool: The connections.
        new_accumulator: Gives each node's.
        patience: How long to go on without any answer.
        done: Called with each batch that is answered, or refused for good.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        pool: BlockingConnectionPool,
        new_accumulator: Callable[[], Accumulator],
        patience: RetryPolicy,
        done: Callable[[Batch], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._pool = pool
        self._new_accumulator = new_accumulator
        self._patience = patience
        self._done = done
        self._sleep = sleep
        self._boxes: dict[Home, Accumulator] = {None: new_accumulator()}
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
        if not self._pool.was_connected:
            self._pool.any()
        while True:
            boxes = self._boxes.values()
            full = sum(box.nbytes for box in boxes) >= buffer_bytes
            batch = None if full else next(source, None)
            if batch is not None:
                self._box_of(batch[0]).add(*batch)
            elif not any(box.unanswered for box in boxes):
                return False
            connections = self._pumped()
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
            if connections:
                step_any(list(connections.values()), deadline)
            else:
                self._sleep(max(0.0, deadline - now))
                self._rests = {h: until for h, until in self._rests.items() if until > deadline}
            self._deal_with(connections)

    @property
    def _wakes_at(self) -> float:
        times = [box.wakes_at for box in self._boxes.values()]
        rests = [until for home, until in self._rests.items() if self._boxes[home].unanswered]
        return min((self._asks_at, *(time for time in times if time is not None), *rests))

    # Where partitions are.

    def _box_of(self, partition: PartitionId) -> Accumulator:
        if partition not in self._at:
            self._at[partition] = self._pool.home_of(partition)
        return self._boxes.setdefault(self._at[partition], self._new_accumulator())

    def _route(self) -> None:
        for partition, home in list(self._at.items()):
            now_at = self._pool.home_of(partition)
            if now_at != home:
                batches = self._boxes[home].let_go(partition)
                self._at[partition] = now_at
                if batches is not None:
                    self._box_of(partition).take_over(partition, batches)

    # What is said and heard.

    def _pumped(self) -> dict[Home, BlockingConnection]:
        """Sends what may be sent; the connections on which something is awaited."""
        self._asks_at = float("inf")
        if self._boxes[None].unanswered or self._pool.metadata.is_stale:
            self._asks_at = self._pool.refresh()
        self._route()
        connections: dict[Home, BlockingConnection] = {}
        for home, box in list(self._boxes.items()):
            if home is None or not box.unanswered or self._rests.get(home, 0) > time.monotonic():
                continue
            self._rests.pop(home, None)
            try:
                connections[home] = self._pool.at(home)
            except UprError as error:
                self._failed(home, error)
        for home, connection in list(connections.items()):
            self._boxes[home].pump(connection.session, time.monotonic())
        if self._boxes[None].unanswered and not connections and None not in self._rests:
            unplaced = BrokenError("no node takes a partition that is published to")
            wait_s = self._patience.wait_s(unplaced, time.monotonic())
            self._rests[None] = time.monotonic() + min(wait_s, 0.5)
        elif self._rests.get(None, 0) <= time.monotonic():
            self._rests.pop(None, None)
        return connections

    def _failed(self, home: Home, error: UprError) -> None:
        """A node cannot be reached, or not any more."""
        if not self._pool.was_connected:
            raise error
        self._boxes[home].disconnected()
        if home is not None:
            self._pool.lost(home)
        now = time.monotonic()
        self._rests[home] = now + self._patience.wait_s(error, now)
        self._pool.refresh()

    def _deal_with(self, connections: dict[Home, BlockingConnection]) -> None:
        for home, connection in connections.items():
            while (message := connection.take()) is not None:
                self._heard(self._boxes[home], message)
            if connection.failure is not None:
                self._failed(home, connection.failure)

    def _heard(self, box: Accumulator, message: Message) -> None:
        if isinstance(message, Refusal) and status_of(message.status) in WRONG_NODE:
            self._pool.refresh(message.map_revision)
        answered = box.take(message, time.monotonic())
        if answered is not None:
            self._patience.progress()
            self._done(answered)
