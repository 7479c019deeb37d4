"""Which events the application was given, which of them it has processed, and when to save that."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, unique
from typing import Final

import attrs
import msgspec

from upr_protocol.client.core import resume_state
from upr_protocol.client.core.events import ChunkReceived, Event, RolledBack
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId, SeqNo

COMPLETE_INTERVAL_S: Final = 0.2
"""Complete snapshots may come by the thousand a second. To flush a file for each of them would take
all the time, and what is not saved is only read again."""

SAVE_INTERVAL_S: Final = 1.0
"""The most that is read again after a crash, in time."""

SAVE_BYTES: Final = 64 * 1024 * 1024
"""The most that is read again after a crash, in bytes."""


@unique
class SavePriority(IntEnum):
    """How soon the resume state is worth saving once a delivery is processed."""

    PARTIAL = 0
    """Some more of a snapshot."""
    COMPLETE = 1
    """A complete snapshot."""
    URGENT = 2
    """A new failover log, or a rollback: it must be saved before anything that follows."""


class RollbackRequest(msgspec.Struct, frozen=True):
    """The server asks for a rollback. The code that undoes it reports to
    `StreamFollower.note_rolled_back`.

    Attributes:
        ceiling: The sequence number to roll back to, or below.
        reason: The server's reason.
    """

    partition: PartitionId
    ceiling: SeqNo
    reason: str


class Delivery(msgspec.Struct, frozen=True):
    """Something for the application, and what holds once the application has processed it.

    Attributes:
        event: The application's event, or a rollback that must be undone first. None when only the
            position moves.
        position: The partition and its position afterwards; None when no position moves.
        nbytes: Bytes to acknowledge to the server afterwards.
        connection_number: The connection that brought the bytes; no other one acknowledges them.
        priority: How soon this is worth saving.
    """

    event: Event | RollbackRequest | None
    position: tuple[PartitionId, Position] | None = None
    nbytes: int = 0
    connection_number: int = 0
    priority: SavePriority = SavePriority.PARTIAL


@attrs.frozen
class SaveLimits:
    """How much may go unsaved.

    Attributes:
        complete_interval_s: Seconds between two saves at complete snapshots.
        interval_s: Seconds between two saves in any case.
        nbytes: Bytes of chunks between two saves in any case.
    """

    complete_interval_s: float = COMPLETE_INTERVAL_S
    interval_s: float = SAVE_INTERVAL_S
    nbytes: float = SAVE_BYTES


class SaveSchedule:
    """When to save a state that has moved since the last save.

    Attributes:
        moves: How many times the state has moved.
    """

    __slots__ = ("_limits", "_nbytes", "_priority", "_saved_at", "moves")

    def __init__(self, limits: SaveLimits, now: float) -> None:
        self.moves = 0
        self._limits = limits
        self._saved_at = now
        self._priority: SavePriority | None = None
        """The highest priority of what is unsaved; None while everything is saved."""
        self._nbytes = 0

    @property
    def has_unsaved(self) -> bool:
        """Whether there is something to save."""
        return self._priority is not None

    def add_unsaved(self, priority: SavePriority, nbytes: int) -> None:
        """The state has moved past so many bytes of events."""
        self.moves += 1
        self._nbytes += nbytes
        if self._priority is None or priority > self._priority:
            self._priority = priority

    @property
    def due_at(self) -> float:
        """When to save; infinity if there is nothing to save."""
        if self._priority is None:
            return float("inf")
        if self._priority is SavePriority.URGENT or self._nbytes >= self._limits.nbytes:
            return self._saved_at
        if self._priority is SavePriority.COMPLETE:
            return self._saved_at + self._limits.complete_interval_s
        return self._saved_at + self._limits.interval_s

    def note_saved(self, now: float, moves: int) -> None:
        """The state is saved as it was after so many moves."""
        self._saved_at = now
        if moves == self.moves:
            self._priority = None
            self._nbytes = 0


@attrs.define
class DeliveryCounts:
    """What the application was given."""

    events: int = 0
    chunks: int = 0
    mutations: int = 0
    nbytes: int = 0


class DeliveryTracker:
    """Tracks the deliveries to the application, which has at most one at a time, the current one.

    Args:
        state: What the application has processed so far.
        acknowledge: Called with each processed delivery.

    Attributes:
        state: What the application has processed, without the current delivery.
        schedule: When to save the state.
        current_delivery: What the application is processing; None while it has nothing.
    """

    __slots__ = ("_acknowledge", "counts", "current_delivery", "schedule", "state")

    def __init__(
        self,
        state: ResumeState,
        limits: SaveLimits,
        acknowledge: Callable[[Delivery], object],
        now: float,
    ) -> None:
        self.state = state
        self.schedule = SaveSchedule(limits, now)
        self.counts = DeliveryCounts()
        self._acknowledge = acknowledge
        self.current_delivery: Delivery | None = None

    def hand_out(self, delivery: Delivery, event: Event) -> None:
        """The application is given `event`, which is the one of `delivery`."""
        assert self.current_delivery is None
        self.current_delivery = delivery
        self.counts.events += 1
        if isinstance(event, ChunkReceived):
            self.counts.chunks += 1
            self.counts.mutations += event.chunk.count
            self.counts.nbytes += event.chunk.nbytes

    def finish_current(self) -> None:
        """The application has processed its current delivery. If this is interrupted, the next call
        does it again."""
        if self.current_delivery is not None:
            self.finish_delivery(self.current_delivery)
            self.current_delivery = None

    def finish_delivery(self, delivery: Delivery) -> None:
        """`delivery` is processed."""
        if delivery.position is not None:
            partition, position = delivery.position
            self.state.positions[partition] = position
        if delivery.position is not None or delivery.priority is not SavePriority.PARTIAL:
            self.schedule.add_unsaved(delivery.priority, delivery.nbytes)
        self._acknowledge(delivery)

    def discard_current(self) -> None:
        """The application has stopped: it may not have processed its current delivery."""
        self.current_delivery = None

    def begin_rollback(self, event: RollbackRequest | RolledBack) -> None:
        """The application is about to be told to roll back. It may be killed after it has done so
        and before it can report it, so the state says that a rollback is pending. Save it now."""
        partition = event.partition
        position = resume_state.position_during_rollback(
            self.state.position(partition), event.ceiling
        )
        self.finish_delivery(Delivery(None, (partition, position), priority=SavePriority.URGENT))

    def position_after_current(self, partition: PartitionId) -> Position:
        """The partition's position once the current delivery is processed."""
        if self.current_delivery is not None and self.current_delivery.position is not None:
            moved_partition, position = self.current_delivery.position
            if moved_partition == partition:
                return position
        return self.state.position(partition)

    def state_after_current(self) -> ResumeState:
        """A copy of the state as it is once the current delivery is processed. O(partitions)."""
        state = self.state.copy()
        if self.current_delivery is not None and self.current_delivery.position is not None:
            partition, position = self.current_delivery.position
            state.positions[partition] = position
        return state
