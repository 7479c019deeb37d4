"""What the follower gives the application."""

from __future__ import annotations

from enum import IntEnum, unique

import msgspec

from upr_protocol.client.events import Event
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId, SeqNo


@unique
class Weight(IntEnum):
    """How soon a delivery, once dealt with, is worth writing down."""

    LIGHT = 0
    """Some more of a snapshot."""
    COMPLETE = 1
    """A complete snapshot."""
    HEAVY = 2
    """What must not be forgotten: a new log, a rollback."""


class RollBackAsked(msgspec.Struct, frozen=True):
    """The server asks for a rollback; whoever undoes it says so to `Follower.rolled_back`.

    Attributes:
        partition: The partition.
        ceiling: The number to go back to, or below.
        reason: Why, in the server's words.
    """

    partition: PartitionId
    ceiling: SeqNo
    reason: str


class Delivery(msgspec.Struct, frozen=True):
    """Something for the application, and what is true once the application has dealt with it.

    Attributes:
        event: What the application is told, or asked to undo first; None when only the state
            moves.
        position: The partition and its position afterwards; None when no position moves.
        nbytes: Bytes to be acknowledged then.
        connection: In which connection they came; in another they are not acknowledged.
        weight: How soon it is worth writing down.
    """

    event: Event | RollBackAsked | None
    position: tuple[PartitionId, Position] | None = None
    nbytes: int = 0
    connection: int = 0
    weight: Weight = Weight.LIGHT
