"""How long to wait before the next attempt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.05
"""Longer than a listener needs to come back, shorter than a person notices."""

CAP_S: Final = 5.0
"""A server that was away for a minute is found again within this."""


class Backoff:
    """Waits that double with each failure, up to a cap, and are drawn between half and all of that,
    so that clients cut off together do not come back together.

    Args:
        draw: Gives numbers in [0, 1).
        first_s: The longest first wait.
        cap_s: The longest wait at all.
    """

    __slots__ = ("_cap_s", "_draw", "_first_s", "failures")

    def __init__(
        self,
        draw: Callable[[], float] = random.random,
        *,
        first_s: float = FIRST_S,
        cap_s: float = CAP_S,
    ) -> None:
        self._draw = draw
        self._first_s = first_s
        self._cap_s = cap_s
        self.failures = 0
        """Failures since the last success."""

    def next_wait_s(self) -> float:
        """One more failure: how long to wait now."""
        # 2**63 times anything is over every cap; a larger exponent would overflow in the end.
        longest: float = min(self._cap_s, self._first_s * 2 ** min(self.failures, 63))
        self.failures += 1
        return longest * (1 + self._draw()) / 2

    def reset(self) -> None:
        """It worked: the next failure is a first one."""
        self.failures = 0
