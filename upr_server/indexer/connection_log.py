"""What the log says of a stream's connection to the server, which the consumer makes again by
itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import trio

log = structlog.get_logger(__name__)

POLL_S: Final = 1.0
"""How often the connection is looked at. One that is back sooner is not logged."""


async def log_connection(lost_reason: Callable[[], str | None]) -> None:
    """Logs once that the connection is lost, and once that it is there again. Runs until cancelled.

    Args:
        lost_reason: Why there is no connection now; "" while there is one, None while it is not
            known or somebody else logs it.
    """
    was_lost = False
    while True:
        await trio.sleep(POLL_S)
        reason = lost_reason()
        if reason is None:
            continue
        if reason and not was_lost:
            log.warning("the connection to the server is lost; retrying", error=reason)
        elif was_lost and not reason:
            log.info("connected to the server again")
        was_lost = bool(reason)
