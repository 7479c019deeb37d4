"""Requests about one partition, in order, while something of it is read from disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Final, Literal, Protocol

import structlog
import trio

from upr_protocol.chunk import Mutation
from upr_protocol.errors import ServerError, Status
from upr_server.engine import (
    NOTHING_FETCHED,
    Bucket,
    FetchedItems,
    FetchRequest,
    Partition,
    damaged_item,
    is_damaged,
)
from upr_server.net.backlog import ConnectionBacklog
from upr_server.net.turns import Turns
from upr_server.storage.errors import CorruptionError, StorageError
from upr_server.storage.online.bucket_disk import BucketDisk

FETCHED_BYTES_MAX: Final = 64 * 1024 * 1024
"""What one request may need from disk. Only a batch of operations that read large values comes to
more; it is refused, whole."""

LARGE_FETCH_BYTES: Final = 2 * 1024 * 1024
"""A request that needs more than this from disk needs the turn of its connection for that. A
connection may have requests to 16 partitions under way, of up to 64 MiB each."""

log = structlog.get_logger(__name__)


class _LargeError(Exception):
    """A request needs much from disk, and it is not its turn."""


class Unfinished(Enum):
    """What a request says that has more to do than others should wait for."""

    UNFINISHED = auto()


UNFINISHED: Final = Unfinished.UNFINISHED

StillNeeded = Sequence[FetchRequest] | Literal[Unfinished.UNFINISHED]
"""What a request needs before it is done: keys that must be read from disk, or another turn;
nothing when it is done."""


class PartitionRequest(Protocol):
    """A request to one partition."""

    @property
    def nbytes(self) -> int:
        """About what it takes while it waits."""

    def apply(self, fetched_items: FetchedItems) -> StillNeeded:
        """Does and answers what was asked; or changes nothing, and says what it needs first."""

    def refuse(self, error: ServerError) -> None:
        """Answers that it is not done, and why."""

    def fail(self) -> None:
        """The server failed to carry it out; the connection ends."""


class QueuedClient(Protocol):
    """The connection whose requests wait in a queue, as the queue sees it.

    Attributes:
        backlog: Counts what waits.
    """

    backlog: ConnectionBacklog

    def start_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Runs `task`, which must not raise, until the connection's end cancels it."""


class PartitionRequestQueue:
    """The requests that wait for one partition.

    Most requests are answered at once and never wait. A request that needs something from disk, or
    more than one turn of the loop, waits for it, and later requests for the partition wait until it
    is answered. One request is answered at a time. A connection's requests keep their order.
    Connections alternate: a request waits for at most one request of each other connection.

    Each connection with waiting requests has a task, which ends with the connection: the disk is
    not read for connections that are gone. While a peer is slow to take its replies, its task waits
    without holding up other connections.

    Args:
        disk: Where the partition's bucket is kept.
        partition: The partition.
        turns: The turns of long requests.
    """

    __slots__ = ("_answer_lock", "_disk", "_partition", "_queues", "_turns")

    def __init__(self, disk: BucketDisk, partition: Partition, turns: Turns) -> None:
        self._disk = disk
        self._partition = partition
        self._turns = turns
        self._queues: dict[QueuedClient, deque[PartitionRequest]] = {}
        self._answer_lock = trio.StrictFIFOLock()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits."""
        return not self._queues and not self._answer_lock.locked()

    def has_earlier(self, client: QueuedClient) -> bool:
        """Whether a request of `client` would have to wait behind others."""
        # The owner of the lock has a queue until it has released the lock.
        return bool(self._queues) and (client in self._queues or self._answer_lock.locked())

    def submit(self, client: QueuedClient, request: PartitionRequest) -> None:
        """Applies `request`: now, or behind those that wait already.

        Raises:
            ServerError: It was applied now, and is to be refused.
        """
        if not self.has_earlier(client) and not request.apply(NOTHING_FETCHED):
            return
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = deque()
            client.start_task(partial(self._run_requests, client, queue))
        queue.append(request)
        client.backlog.request_queued(request.nbytes)

    async def _run_requests(self, client: QueuedClient, queue: deque[PartitionRequest]) -> None:
        try:
            while queue:
                # Before the lock: a peer that does not read its replies holds up no other.
                await client.backlog.wait_for_reply_room()
                is_large = False
                try:
                    async with self._answer_lock:
                        await self._run_request(queue[0], client.backlog)
                except _LargeError:
                    is_large = True
                if is_large:
                    # This waits outside of the `except` block, as the error holds what was read.
                    # Otherwise each request of the connection could hold a large item while it
                    # waits for its turn.
                    await self._run_large(client.backlog, queue[0])
                request = queue.popleft()
                client.backlog.request_dequeued(request.nbytes)
        finally:
            del self._queues[client]

    async def _run_large(self, backlog: ConnectionBacklog, request: PartitionRequest) -> None:
        async with backlog.large_turns:
            await backlog.wait_for_reply_room()
            async with self._answer_lock:
                await self._run_request(request, None)

    async def _run_request(
        self, request: PartitionRequest, backlog: ConnectionBacklog | None
    ) -> None:
        """Answers a request, unless it needs much from disk and it is not its turn for that: then
        `_LargeError` is raised. If it has its turn already, `backlog` is None."""
        try:
            is_applied = False
            while not is_applied:
                is_applied = await self._fetch_and_apply(request, backlog)
        except _LargeError:
            raise
        except ServerError as error:
            request.refuse(error)
        except Exception:
            log.exception("request failed", request=type(request).__name__)
            request.fail()

    async def _fetch_and_apply(
        self, request: PartitionRequest, backlog: ConnectionBacklog | None
    ) -> bool:
        """Returns whether the request was applied. If not, the partition has begun again, as a
        replica that has become active meanwhile, and what was fetched for the request does not
        count."""
        # One pin for all reads and turns of the request: what the first read brought is used only
        # after the last, and a key that changed meanwhile must still be found in the table.
        eviction = self._partition.eviction
        pin = eviction.pin()
        turns: trio.StrictFIFOLock | None = None
        try:
            fetched_items: dict[bytes, Mutation | None] = {}
            nbytes = 0
            while still_needed := request.apply(fetched_items):
                if still_needed is UNFINISHED:
                    await self._turns.next_turn()
                else:
                    rows = await self._fetch(still_needed)
                    nbytes += sum(len(row.value) for row in rows.values() if row is not None)
                    if nbytes > FETCHED_BYTES_MAX:
                        raise _too_large_error()
                    if nbytes > LARGE_FETCH_BYTES and backlog is not None and turns is None:
                        turns = _take_large_turn(backlog)
                    fetched_items |= rows
                if not eviction.is_pinned(pin):
                    return False
            return True
        finally:
            # An evaluation that began again may hold it.
            self._partition.release_expiry()
            eviction.unpin(pin)
            if turns is not None:
                turns.release()

    async def _fetch(self, fetch_requests: Sequence[FetchRequest]) -> dict[bytes, Mutation | None]:
        rows: dict[bytes, Mutation | None]
        try:
            rows = await self._disk.find_items(self._partition, fetch_requests)
        except CorruptionError as error:
            # Nothing of what is missing can be found. What is in memory is served.
            rows = {request.key: damaged_item(request, str(error)) for request in fetch_requests}
        except StorageError as error:
            raise ServerError(Status.TEMPORARY_FAILURE, str(error)) from error
        damages = [row.value for row in rows.values() if row is not None and is_damaged(row)]
        if damages:
            log.error(
                "damaged record",
                partition=self._partition.id,
                keys=len(damages),
                error=damages[0].decode(),
            )
        return rows


def _take_large_turn(backlog: ConnectionBacklog) -> trio.StrictFIFOLock:
    """Takes the turn of a request that has read much, if nobody else has it and the peer takes its
    replies; otherwise raises `_LargeError`."""
    if backlog.large_turns.locked() or not backlog.has_reply_room:
        raise _LargeError
    backlog.large_turns.acquire_nowait()
    return backlog.large_turns


def _too_large_error() -> ServerError:
    return ServerError(
        Status.LIMIT_REACHED,
        f"the request needs more than {FETCHED_BYTES_MAX} bytes from disk; ask for less at a time",
    )


class PartitionRequestQueues:
    """The queues of all partitions, made when they are first needed."""

    def __init__(self) -> None:
        self._queues: dict[Partition, PartitionRequestQueue] = {}
        self._turns = Turns()

    def __len__(self) -> int:
        """Queues that were made."""
        return len(self._queues)

    def queue_of(self, disk: BucketDisk, partition: Partition) -> PartitionRequestQueue:
        """The queue of a partition."""
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = PartitionRequestQueue(disk, partition, self._turns)
        return queue

    def have_earlier(self, partition: Partition, client: QueuedClient) -> bool:
        """Whether a request of `client` to a partition would have to wait behind others."""
        queue = self._queues.get(partition)
        return queue is not None and queue.has_earlier(client)

    def remove_bucket(self, bucket: Bucket) -> None:
        """`bucket` was deleted."""
        for partition in bucket.partitions:
            self._queues.pop(partition, None)

    @property
    def are_idle(self) -> bool:
        """Whether no request waits in any of them."""
        return all(queue.is_idle for queue in self._queues.values())
