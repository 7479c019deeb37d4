"""Lines: what one partition is asked, in order, while something of it is read from disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from upr_protocol.chunk import Mutation
from upr_protocol.errors import ServerError, Status
from upr_protocol.wire import Message
from upr_server.engine import FetchNeeded, Found, Partition
from upr_server.storage.bucket_disk import BucketDisk
from upr_server.storage.errors import CorruptionError, StorageError

if TYPE_CHECKING:
    from upr_server.net.connection import Connection

FOUND_BYTES_MAX: Final = 64 * 1024 * 1024
"""What one request may need from disk. Only a batch of operations that read large values comes to
more; it is refused, whole."""

log = structlog.get_logger(__name__)

Apply = Callable[[Found], None]
"""Does what a request asks, or raises `FetchNeeded` before it has done anything."""


class Line:
    """The line before one partition.

    Mostly there is none: a request is answered at once. One that needs something from disk waits
    for it, and those that come meanwhile stand behind it, so that each sees what those before it
    did.

    Args:
        disk: Where the partition's bucket is kept.
        partition: The partition.
    """

    __slots__ = ("_disk", "_partition", "_queue")

    def __init__(self, disk: BucketDisk, partition: Partition) -> None:
        self._disk = disk
        self._partition = partition
        self._queue: deque[tuple[Connection, Message, Apply]] = deque()

    def do(self, connection: Connection, request: Message, apply: Apply) -> None:
        """Has `request` answered: now, or in its turn."""
        if not self._queue:
            try:
                apply({})
            except FetchNeeded:
                self._disk.nursery.start_soon(self._work_off)
            else:
                return
        self._queue.append((connection, request, apply))

    async def _work_off(self) -> None:
        while self._queue:
            connection, request, apply = self._queue[0]
            pin = self._partition.pin()
            try:
                await self._settle(apply)
            except ServerError as error:
                connection.refuse(request, error.status, error.sentence)
            except Exception:
                log.exception("a request failed", request=type(request).__name__)
                connection.fault(request)
            finally:
                self._partition.unpin(pin)
                self._queue.popleft()
            connection.wake()

    async def _settle(self, apply: Apply) -> None:
        found: dict[bytes, Mutation | None] = {}
        nbytes = 0
        while (needed := _try(apply, found)) is not None:
            more = await self._fetch(needed)
            nbytes += sum(len(row.value) for row in more.values() if row is not None)
            if nbytes > FOUND_BYTES_MAX:
                raise ServerError(
                    Status.LIMIT_REACHED,
                    f"the request needs more than {FOUND_BYTES_MAX} bytes from disk; ask for "
                    "less at a time",
                )
            found |= more

    async def _fetch(self, needed: FetchNeeded) -> dict[bytes, Mutation | None]:
        try:
            return await self._disk.find(self._partition, needed.wants)
        except CorruptionError as error:
            log.error("a damaged record", partition=self._partition.id, error=str(error))
            raise ServerError(Status.DAMAGED, str(error)) from error
        except StorageError as error:
            raise ServerError(Status.TEMPORARY_FAILURE, str(error)) from error


def _try(apply: Apply, found: Found) -> FetchNeeded | None:
    """Does what a request asks, or gives what that needs from disk."""
    try:
        apply(found)
    except FetchNeeded as needed:
        return needed
    return None
