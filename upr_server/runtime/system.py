"""What a server takes from the system it runs on: a clock, random numbers, and a network."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import attrs

from upr_protocol.ids import HistoryId
from upr_protocol.security import UNPROTECTED, Security
from upr_protocol.transport import Dial, dial_tcp
from upr_server.runtime.listeners import BoundListeners, bind_tcp
from upr_server.runtime.log_in_pauses import LogInPauses


@attrs.frozen
class System:
    """The real system by default. A simulation gives one that does the same in every run.

    Attributes:
        time: Seconds since 1970.
        random_bits: Draws so many bits that nobody can guess.
        draw: Draws from [0, 1), for the waits between attempts.
        dial: Connects to another server.
        security: How links to other servers are protected.
        bind: Listens at `HOST:PORT` for as long as the context.
        log_in_pauses: Which servers have refused this one, and when to try again.
    """

    time: Callable[[], float] = time.time
    random_bits: Callable[[int], int] = secrets.randbits
    draw: Callable[[], float] = random.random
    dial: Dial = dial_tcp
    security: Security = UNPROTECTED
    bind: Callable[[str], AbstractAsyncContextManager[BoundListeners]] = bind_tcp
    log_in_pauses: LogInPauses = attrs.field(factory=LogInPauses)

    def new_id(self) -> HistoryId:
        """A fresh random ID of a history, a bucket or an event batch; never 0."""
        return HistoryId(self.random_bits(64) or 1)
