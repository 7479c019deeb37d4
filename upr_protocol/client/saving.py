"""When a resume state is worth writing down."""

from __future__ import annotations

from typing import Final

import attrs

from upr_protocol.client.delivery import Delivery, Weight

COMPLETE_INTERVAL_S: Final = 0.2
"""Complete snapshots may come by the thousand a second; a flushed write each would be all that
happens. What is not written down is only read again."""

SAVE_INTERVAL_S: Final = 1.0
"""The most that is read again after a crash, in time."""

SAVE_BYTES: Final = 64 * 1024 * 1024
"""The most that is read again after a crash, in bytes."""


@attrs.frozen
class SaveLimits:
    """How much may go unwritten.

    Attributes:
        complete_interval_s: Time between two saves at complete snapshots.
        interval_s: Time between two saves in any case.
        nbytes: Bytes of chunks between two saves in any case.
    """

    complete_interval_s: float = COMPLETE_INTERVAL_S
    interval_s: float = SAVE_INTERVAL_S
    nbytes: float = SAVE_BYTES


class SavePlan:
    """Follows what was dealt with since the last save.

    Args:
        limits: How much may go unwritten.
        now: The time.
    """

    __slots__ = ("_limits", "_nbytes", "_saved_at", "_weight")

    def __init__(self, limits: SaveLimits, now: float) -> None:
        self._limits = limits
        self._saved_at = now
        self._weight: Weight | None = None
        self._nbytes = 0

    @property
    def dirty(self) -> bool:
        """Whether there is anything to save."""
        return self._weight is not None

    def dealt_with(self, delivery: Delivery) -> None:
        """The application has dealt with `delivery`."""
        weight = delivery.weight
        if delivery.position is not None or weight is not Weight.LIGHT:
            self._nbytes += delivery.nbytes
            if self._weight is None or weight > self._weight:
                self._weight = weight

    @property
    def due_at(self) -> float:
        """When to save; never, when there is nothing to save."""
        if self._weight is None:
            return float("inf")
        if self._weight is Weight.HEAVY or self._nbytes >= self._limits.nbytes:
            return self._saved_at
        if self._weight is Weight.COMPLETE:
            return self._saved_at + self._limits.complete_interval_s
        return self._saved_at + self._limits.interval_s

    def saved(self, now: float) -> None:
        """What was dealt with so far is saved."""
        self._saved_at = now
        self._weight = None
        self._nbytes = 0
