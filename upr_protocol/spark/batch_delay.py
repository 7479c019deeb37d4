"""When the next batch of a stream waits for more changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class BatchDelay:
    """Makes batches wait until there is enough for them, or until a change has waited long enough:
    the options `minOffsetsPerTrigger` and `maxTriggerDelay`. The first batch of a run does not
    wait: nobody knows for how long its changes have done so.

    Args:
        numbers_min: How many sequence numbers are enough.
        delay_s: How long a change waits, at most.
        clock: Gives the time, in seconds.
    """

    def __init__(
        self, numbers_min: int, delay_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._numbers_min = numbers_min
        self._delay_s = delay_s
        self._clock = clock
        self._deadline_s: float | None = -math.inf
        """When the oldest change that waits has waited long enough; None if no change waits."""

    def must_wait(self, numbers: int) -> bool:
        """Whether the next batch waits. If it does not, the batch begins now.

        Args:
            numbers: How many sequence numbers there are for it. If there are none, the batch waits:
                changes that arrive while it is planned are the next look's, or they would be in a
                batch that nobody knows to have begun.
        """
        if not numbers:
            return True
        now = self._clock()
        if self._deadline_s is None:
            self._deadline_s = now + self._delay_s
        if numbers < self._numbers_min and now < self._deadline_s:
            return True
        self._deadline_s = None
        return False
