"""Lines: what one partition is asked, in order, while something of it is read from disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from upr_protocol.chunk import Mutation
from upr_protocol.errors import ServerError, Status
from upr_protocol.wire import Get, Mutate
from upr_server.engine import NOTHING_FETCHED, Fetched, FetchRequest, Partition
from upr_server.storage.errors import CorruptionError, StorageError
from upr_server.storage.online.bucket_disk import BucketDisk

if TYPE_CHECKING:
    from upr_server.net.connection import Connection

FOUND_BYTES_MAX: Final = 64 * 1024 * 1024
"""What one request may need from disk. Only a batch of operations that read large values comes to
more; it is refused, whole."""

log = structlog.get_logger(__name__)

Apply = Callable[[Fetched], Sequence[FetchRequest]]
"""Does what a request asks; or does nothing, and says what must be read from disk first."""

_Queue = deque[tuple[Get | Mutate, Apply]]


class Line:
    """The line before one partition.

    Mostly there is none: a request is answered at once. One that needs something from disk waits
    for it, and those that come meanwhile stand behind it. One is served at a time. Those of one
    connection are served in their order, and connections take turns: none waits for more than one
    request of each of the others.

    A connection's requests are worked off by a task of its own, which ends with it: nothing is read
    for those who are gone. It also waits while the connection owes its peer too much to answer
    more, and keeps nobody else from the line meanwhile.

    Args:
        disk: Where the partition's bucket is kept.
        partition: The partition.
    """

    __slots__ = ("_disk", "_partition", "_queues", "_turn")

    def __init__(self, disk: BucketDisk, partition: Partition) -> None:
        self._disk = disk
        self._partition = partition
        self._queues: dict[Connection, _Queue] = {}
        self._turn = trio.StrictFIFOLock()

    def do(self, connection: Connection, request: Get | Mutate, apply: Apply) -> None:
        """Has `request` answered: now, or in its turn."""
        queue = self._queues.get(connection)
        if queue is None:
            if not self._turn.locked() and not apply(NOTHING_FETCHED):
                return
            queue = self._queues[connection] = deque()
            connection.start(partial(self._work_off, connection, queue))
        queue.append((request, apply))
        connection.stands_in_line(_bytes_of(request))

    async def _work_off(self, connection: Connection, queue: _Queue) -> None:
        try:
            while queue:
                await connection.until_it_may_be_answered()
                async with self._turn:
                    await self._answer(connection, *queue[0])
                request, _ = queue.popleft()
                connection.has_left_line(_bytes_of(request))
        finally:
            del self._queues[connection]

    async def _answer(self, connection: Connection, request: Get | Mutate, apply: Apply) -> None:
        pin = self._partition.eviction.pin()
        try:
            await self._settle(apply)
        except ServerError as error:
            connection.refuse(request, error.status, error.sentence)
        except Exception:
            log.exception("a request failed", request=type(request).__name__)
            connection.fault(request)
        finally:
            self._partition.eviction.unpin(pin)

    async def _settle(self, apply: Apply) -> None:
        fetched: dict[bytes, Mutation | None] = {}
        nbytes = 0
        while missing := apply(fetched):
            more = await self._fetch(missing)
            nbytes += sum(len(row.value) for row in more.values() if row is not None)
            if nbytes > FOUND_BYTES_MAX:
                raise ServerError(
                    Status.LIMIT_REACHED,
                    f"the request needs more than {FOUND_BYTES_MAX} bytes from disk; ask for "
                    "less at a time",
                )
            fetched |= more

    async def _fetch(self, missing: Sequence[FetchRequest]) -> dict[bytes, Mutation | None]:
        try:
            return await self._disk.find(self._partition, missing)
        except CorruptionError as error:
            log.error("a damaged record", partition=self._partition.id, error=str(error))
            raise ServerError(Status.DAMAGED, str(error)) from error
        except StorageError as error:
            raise ServerError(Status.TEMPORARY_FAILURE, str(error)) from error


def _bytes_of(request: Get | Mutate) -> int:
    return request.chunk.nbytes if isinstance(request, Mutate) else sum(map(len, request.keys))
