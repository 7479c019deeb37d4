"""An async iterator of a consumer's events in which `Undone` takes the place of `RolledBack`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, Self

import trio

from upr_protocol.address import Address
from upr_protocol.client.core.delivery_tracker import SaveLimits
from upr_protocol.client.core.events import (
    ChunkReceived,
    Event,
    RolledBack,
    SnapshotEnd,
    StreamAccepted,
    Undone,
)
from upr_protocol.client.core.key_lookup import Item
from upr_protocol.client.core.subscription import End, Subscription
from upr_protocol.client.rollback.planner import RollbackPlan, RollbackPlanner
from upr_protocol.client.rollback.received_keys import ReceivedKeysSource
from upr_protocol.client.trio.client import connect
from upr_protocol.client.trio.connection import TrioOptions
from upr_protocol.client.trio.consumer import Consumer, ConsumerStatistics, Resume, open_consumer
from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo


class RollbackIterator(ABC):
    """Processes the events of a consumer that has the planner as its undo callback, and plans
    rollbacks; a subclass keeps what they bring."""

    def __init__(self, consumer: Consumer, planner: RollbackPlanner) -> None:
        self._consumer = consumer
        self._planner = planner
        self._logs: dict[PartitionId, FailoverLog] = {}
        self._current_event: Event | None = None
        """An event that the caller was not given, because it was cancelled while the event was
        processed. It is processed again by the next call, so processing must be repeatable."""

    def __aiter__(self) -> Self:
        return self

    async def _next_processed(self) -> Event | Undone:
        """The next event that the caller is to see, processed. Cancelled, no event is lost."""
        while True:
            if self._current_event is None:
                self._current_event = await self._next_event()
            event = await self._process(self._current_event)
            self._current_event = None
            if event is not None:
                return event

    async def _next_event(self) -> Event:
        return await anext(self._consumer)

    async def _process(self, event: Event) -> Event | Undone | None:
        """Processes an event; gives what the caller is to see in its place."""
        if isinstance(event, ChunkReceived):
            await self._keep_chunk(event, self._logs[event.partition])
        elif isinstance(event, SnapshotEnd):
            if not self._planner.is_consistent_at(event):
                return None
        elif isinstance(event, RolledBack):
            return await self._carry_out(self._planner.begin_rollback(event))
        elif isinstance(event, StreamAccepted):
            self._logs[event.partition] = event.log
            seq = self._consumer.position(event.partition).highest_received
            return await self._carry_out(await self._planner.compare(event, seq))
        return event

    async def _carry_out(self, plan: RollbackPlan | None) -> Undone | None:
        if plan is None:
            return None
        await self._roll_back(plan)
        return plan.event

    @abstractmethod
    async def _keep_chunk(self, event: ChunkReceived, log: FailoverLog) -> None:
        """Keeps the keys of a chunk that came in the history of `log`."""

    @abstractmethod
    async def _roll_back(self, plan: RollbackPlan) -> None:
        """Carries out a plan, or makes sure that it will be. Must not be cancelled half-way: the
        planner does not give a plan that follows an accepted stream again."""

    def send_barrier(self, cookie: bytes | None = None) -> bytes:
        """Sends a barrier; `BarrierReached` with its cookie will be among the events. See
        `Consumer.send_barrier`."""
        return self._consumer.send_barrier(cookie)

    def statistics(self) -> ConsumerStatistics:
        """The statistics of the consumer."""
        return self._consumer.statistics()


async def _read_newest(
    address: Address,
    options: TrioOptions,
    partition: PartitionId,
    keys: Sequence[bytes],
    history_id: HistoryId,
) -> tuple[list[Item | None], SeqNo]:
    """A `ReadNewest` over connections of its own, which retries."""
    retry = options.new_retry_state()
    while True:
        try:
            async with connect(address, identity=options.identity, dial=options.dial) as client:
                return await client.get_from(partition, keys, history_id)
        except UprError as error:
            await trio.sleep(retry.wait_after_failure_s(error, trio.current_time()))


@asynccontextmanager
async def consume_with_planner(
    address: Address,
    received_keys: ReceivedKeysSource,
    options: TrioOptions,
    *,
    partitions: Sequence[int] | None,
    start: Literal["beginning", "now"] = "beginning",
    resume: Resume,
    end: End,
    save_limits: SaveLimits | None = None,
) -> AsyncIterator[tuple[Consumer, RollbackPlanner]]:
    """A consumer whose undo callback is a planner over `received_keys`; see `consume`."""
    planner = RollbackPlanner(received_keys, partial(_read_newest, address, options))
    subscription = Subscription(partitions, start == "now", end=end, with_logs=True, has_undo=True)
    async with open_consumer(
        Consumer,
        address,
        subscription,
        options,
        resume=resume,
        undo=planner.choose_target,
        save_limits=save_limits,
    ) as consumer:
        yield consumer, planner
