"""What the application was given, and what it has dealt with."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from upr_protocol.client import resume
from upr_protocol.client.delivery import Delivery, RollBackAsked, Weight
from upr_protocol.client.events import ChunkReceived, Event, RolledBack
from upr_protocol.client.resume import ResumeState
from upr_protocol.client.saving import SaveLimits, SavePlan
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId


@attrs.define
class Handed:
    """What was handed on.

    Attributes:
        events: Events.
        chunks: Chunks among them.
        mutations: Mutations in those.
        nbytes: Their bytes.
    """

    events: int = 0
    chunks: int = 0
    mutations: int = 0
    nbytes: int = 0


class Ledger:
    """Follows the deliveries to the application: at most one is in its hands.

    Args:
        state: What it has dealt with so far.
        limits: How much may go unsaved.
        acknowledge: Told of each delivery that was dealt with.
        now: The time.

    Attributes:
        state: What it has dealt with. What is in hand is not in it.
        plan: When to save it.
        handed: Figures.
    """

    __slots__ = ("_acknowledge", "_current", "handed", "plan", "state")

    def __init__(
        self,
        state: ResumeState,
        limits: SaveLimits,
        acknowledge: Callable[[Delivery], object],
        now: float,
    ) -> None:
        self.state = state
        self.plan = SavePlan(limits, now)
        self.handed = Handed()
        self._acknowledge = acknowledge
        self._current: Delivery | None = None

    def hand_on(self, delivery: Delivery, event: Event) -> None:
        """`delivery`, which is of `event`, is in the application's hands."""
        assert self._current is None
        self._current = delivery
        self.handed.events += 1
        if isinstance(event, ChunkReceived):
            self.handed.chunks += 1
            self.handed.mutations += event.chunk.count
            self.handed.nbytes += event.chunk.nbytes

    def finish(self) -> None:
        """The application has dealt with what is in its hands."""
        if self._current is not None:
            current, self._current = self._current, None
            self.deal_with(current)

    def going_back(self, event: RollBackAsked | RolledBack) -> None:
        """The application is about to be told to go back. It may be killed when it has, and before
        it can say so; so the state says that it is going to, and should be saved now."""
        partition = event.partition
        position = resume.going_back(self.state.position(partition), event.ceiling)
        self.deal_with(Delivery(None, (partition, position), weight=Weight.HEAVY))

    def drop(self) -> None:
        """What is in its hands was not dealt with, as far as anyone knows."""
        self._current = None

    def deal_with(self, delivery: Delivery) -> None:
        """`delivery` was dealt with."""
        if delivery.position is not None:
            partition, position = delivery.position
            self.state.positions[partition] = position
        self.plan.dealt_with(delivery)
        self._acknowledge(delivery)

    def position_after_current(self, partition: PartitionId) -> Position:
        """How far a partition will be once what is in hand is dealt with."""
        if self._current is not None and self._current.position is not None:
            current_partition, position = self._current.position
            if current_partition == partition:
                return position
        return self.state.position(partition)

    def after_current(self) -> ResumeState:
        """A copy of the state as it will be once what is in hand is dealt with. O(partitions)."""
        state = self.state.copy()
        if self._current is not None and self._current.position is not None:
            partition, position = self._current.position
            state.positions[partition] = position
        return state
