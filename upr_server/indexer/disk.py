"""The disk of the indexes: while it is full, what is to be written waits for room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog
import trio

from upr_protocol.durable_files import FULL_DISK_ERRORS
from upr_server.indexer.index_file import DiskFullError

log = structlog.get_logger(__name__)

T = TypeVar("T")

RETRY_S: Final = 2.0
"""The pause before what has found no room is tried again. A round may take 0.2 s to be tried."""


class Disk:
    """Knows what waits for room. Each slice has one, as all its files are on one disk."""

    def __init__(self) -> None:
        self._reasons: dict[object, str] = {}
        """By what waits, what it was told last."""

    @property
    def full_reason(self) -> str:
        """What was told last to something that waits for room; empty if nothing does."""
        return next(iter(self._reasons.values()), "")

    def note_full(self, who: object, error: Exception) -> None:
        """Something has found no room, and waits until it tries again."""
        reason = str(error) if isinstance(error, DiskFullError) else f"the disk is full: {error}"
        if not self._reasons:
            log.error("disk full", error=reason)
        self._reasons[who] = reason

    def note_room(self, who: object) -> None:
        """It has found room, perhaps without having waited."""
        if self._reasons.pop(who, "") and not self._reasons:
            log.info("disk has space again")

    async def retry(self, write: Callable[[], Awaitable[T]]) -> T:
        """What `write` gives, which is called again and again while the disk is full. Cancelled, it
        has written or not, as `write` has."""
        who = object()
        try:
            while True:
                try:
                    result = await write()
                except (DiskFullError, OSError) as error:
                    if not is_full(error):
                        raise
                    self.note_full(who, error)
                else:
                    self.note_room(who)
                    return result
                await trio.sleep(RETRY_S)
        finally:
            # Where it has failed otherwise, or is cancelled, it waits no more.
            self._reasons.pop(who, None)


def is_full(error: Exception) -> bool:
    """Whether something was not written for want of room."""
    if isinstance(error, OSError):
        return error.errno in FULL_DISK_ERRORS
    return isinstance(error, DiskFullError)
