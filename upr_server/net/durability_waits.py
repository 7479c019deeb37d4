"""What one connection waits for: numbers that are to become as durable as was asked (`Await`).

A connection may wait for thousands of numbers, and all may be reached, or time out, in one moment.
With a task for each, 18,000 waits held the loop for 140 ms. So a connection has one task, which
answers some at a time; and of all connections one has its turn in a turn of the loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

import attrs
import structlog
import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Durability, HistoryId, PartitionState
from upr_protocol.wire import Await, AwaitReply, Message
from upr_server.engine import Bucket, Partition
from upr_server.net.replies import DurabilityTarget
from upr_server.net.turns import Turns

STEP_COST: Final = 1024
"""What one step does, in groups of waits that it looks at, at some 1 µs each."""

ANSWER_COST: Final = 16
"""What an answer costs, in the same unit."""

LOOK_AGAIN_S: Final = 1.0
"""How often waits are looked at though nobody has told of progress: a partition may have another
state or history, which ends the waits for it."""

WAIT_BYTES: Final = 500
"""What a wait takes in memory, with its request, about. A client may wait for weeks, for a replica
that is gone, and ask again all the time."""

STALE_MIN: Final = 64
"""A heap may be cleaned of waits that are over when it has more of them than this, and more than of
the others."""

_FOLLOWED: Final = (PartitionState.ACTIVE, PartitionState.PENDING)

log = structlog.get_logger(__name__)


@attrs.define(eq=False)
class _Wait:
    request: Await
    group: _Group
    is_over: bool = False


class _Heap:
    """Waits by number or by deadline, and those that are over among them."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, _Wait]] = []
        self._stale_count = 0

    def __len__(self) -> int:
        """Waits that are not over."""
        return len(self._entries) - self._stale_count

    def add(self, key: float, place: int, wait: _Wait) -> None:
        """Adds a wait; of several with one key, those of lower places come first. O(log waits)."""
        heappush(self._entries, (key, place, wait))

    def first(self) -> tuple[float, _Wait] | None:
        """The first that is not over, with its key; None for none."""
        entries = self._entries
        while entries:
            key, _, wait = entries[0]
            if not wait.is_over:
                return key, wait
            heappop(entries)
            self._stale_count -= 1
        return None

    def note_over(self) -> None:
        """Another of its waits is over. O(1), amortised."""
        self._stale_count += 1
        if self._stale_count > max(STALE_MIN, len(self)):
            self._entries = [entry for entry in self._entries if not entry[2].is_over]
            heapify(self._entries)
            self._stale_count = 0

    def check_invariants(self) -> None:
        """Order, and the count. O(waits)."""
        entries = self._entries
        assert all(entries[(i - 1) // 2] <= entries[i] for i in range(1, len(entries))), "no heap"
        assert sum(wait.is_over for _, _, wait in entries) == self._stale_count
        assert self._stale_count <= max(STALE_MIN, len(self))


@attrs.define(eq=False)
class _Group:
    """Waits for one partition in one history, at one level."""

    partition: Partition
    history_id: HistoryId
    target: DurabilityTarget
    heap: _Heap = attrs.field(factory=_Heap)

    @property
    def is_in_history(self) -> bool:
        return self.partition.failover_log.current == self.history_id

    @property
    def lacks_followers(self) -> bool:
        """Whether it waits for replicas, and these follow another node now."""
        return self.target.copies > 0 and self.partition.state not in _FOLLOWED

    @property
    def cannot_be_reached(self) -> bool:
        """Whether no number is expected to be reached any more."""
        return not self.is_in_history or self.lacks_followers or bool(self.partition.damage)


class OwedBytes(Protocol):
    """What a connection has waiting, as its waits see it; `ConnectionBacklog` is one."""

    def reply_owed(self, nbytes: int) -> None:
        """A reply waits, which takes about so many bytes."""

    def reply_sent(self, nbytes: int) -> None:
        """Such a reply waits no longer."""


class WaitingClient(Protocol):
    """The connection, as its waits see it."""

    @property
    def backlog(self) -> OwedBytes:
        """What the connection has waiting. While that is too much, it asks for nothing more."""

    @property
    def bucket(self) -> Bucket | None:
        """The bucket that it opened; None once that was deleted."""

    def start_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Runs `task`, which must not raise, until the connection's end cancels it."""

    def send(self, message: Message) -> None:
        """Sends an answer."""

    def refuse_for(self, request: Message, error: ServerError) -> None:
        """Refuses a request."""

    def fail_in(self, kind: type[Message]) -> None:
        """Ends the connection after the server failed to carry out a request of this kind."""

    def wake(self) -> None:
        """Wakes the writer, which writes what was sent."""


class ProgressSource(Protocol):
    """The bucket's disk, as this module sees it.

    Attributes:
        progress: Notified when the disk or a replica has come further.
    """

    progress: Notifier


class DurabilityWaits:
    """The waits of one connection for one bucket.

    Args:
        client: The connection.
        disk: The bucket's disk, which tells of progress.
        turns: The turns of the waits of all connections.
    """

    __slots__ = (
        "_added_count",
        "_client",
        "_deadlines",
        "_disk",
        "_groups",
        "_is_running",
        "_scope",
        "_turns",
    )

    def __init__(self, client: WaitingClient, disk: ProgressSource, turns: Turns) -> None:
        self._client = client
        self._disk = disk
        self._turns = turns
        self._groups: dict[tuple[Partition, HistoryId, Durability, int], _Group] = {}
        self._deadlines = _Heap()
        self._added_count = 0
        self._is_running = False
        self._scope = trio.CancelScope()
        """Around the time in which nothing is due."""

    def __len__(self) -> int:
        """How many waits are not over."""
        return len(self._deadlines)

    def add(
        self, request: Await, partition: Partition, target: DurabilityTarget, deadline: float
    ) -> None:
        """Answers `request` once its number is reached, which it is not yet; or refuses it. O(log
        waits).

        Args:
            request: The request.
            partition: Its partition, which is in the history that the request names.
            target: How durable the number must be.
            deadline: When to give up.
        """
        key = partition, request.history_id, target.durability, target.copies
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(partition, request.history_id, target)
        self._added_count += 1
        self._client.backlog.reply_owed(WAIT_BYTES)
        wait = _Wait(request, group)
        group.heap.add(request.seq, self._added_count, wait)
        self._deadlines.add(deadline, self._added_count, wait)
        self._scope.deadline = min(self._scope.deadline, deadline)
        if not self._is_running:
            self._is_running = True
            self._client.start_task(self._run)

    async def _run(self) -> None:
        """Answers the waits until there are none."""
        try:
            while len(self):
                await self._answer_all()
        except Exception:
            log.exception("waiting failed")
            self._client.fail_in(Await)
            self._client.wake()
        finally:
            self._is_running = False

    async def _answer_all(self) -> None:
        """Answers the waits that are over; then lets some time pass, if any are left."""
        # Taken first: others have their turn between the look and the wait.
        progressed = self._disk.progress.next_event()
        await self._turns.next_turn()
        for _ in self._steps():
            self._client.wake()
            await self._turns.next_turn()
        self._client.wake()
        first_deadline = self._deadlines.first()
        if first_deadline is not None:
            look_at = min(first_deadline[0], trio.current_time() + LOOK_AGAIN_S)
            self._scope = trio.CancelScope(deadline=look_at)
            with self._scope:
                await progressed.wait()

    def _steps(self) -> Iterator[None]:
        """Answers the waits that are over; yields where others should have their turn."""
        cost = 0
        for wait in self._waits_over():
            cost += 1
            if wait is not None:
                self._answer(wait)
                cost += ANSWER_COST
            if cost >= STEP_COST:
                cost = 0
                yield

    def _waits_over(self) -> Iterator[_Wait | None]:
        """The waits that are over, each of which is to be answered at once; None for each look at a
        group of which none is."""
        deadlines = self._deadlines
        while (late := deadlines.first()) is not None and late[0] <= trio.current_time():
            yield late[1]
        for key in list(self._groups):
            group = self._groups[key]
            while (lowest := group.heap.first()) is not None and (
                lowest[0] <= group.target.reached_seq(group.partition)
                or group.cannot_be_reached
                or self._client.bucket is None
            ):
                yield lowest[1]
            if lowest is None:
                del self._groups[key]
            yield None

    def _answer(self, wait: _Wait) -> None:
        wait.is_over = True
        self._client.backlog.reply_sent(WAIT_BYTES)
        group, request = wait.group, wait.request
        group.heap.note_over()
        self._deadlines.note_over()
        reached = group.target.reached_seq(group.partition)
        if self._client.bucket is None:
            error = ServerError(Status.NO_BUCKET, "the bucket was deleted")
        elif not group.is_in_history:
            sentence = "the number belongs to another history now"
            error = ServerError(Status.HISTORY_CHANGED, sentence)
        elif reached < request.seq and group.partition.damage:
            sentence = f"partition {request.partition} is damaged: {group.partition.damage}"
            error = ServerError(Status.DAMAGED, sentence)
        elif reached < request.seq and group.lacks_followers:
            # Another node may be active in this history: the client goes on waiting there.
            state = group.partition.state.name.lower()
            sentence = f"partition {request.partition} is {state} here now, not active"
            error = ServerError(Status.NOT_MY_PARTITION, sentence)
        elif reached < request.seq:
            sentence = f"partition {request.partition} has reached {reached} at this level"
            error = ServerError(Status.TIMED_OUT, sentence)
        else:
            reply = AwaitReply(reached, partition=request.partition, opaque=request.opaque)
            self._client.send(reply)
            return
        self._client.refuse_for(request, error)

    def check_invariants(self) -> None:
        """That the heaps agree. O(waits)."""
        self._deadlines.check_invariants()
        for group in self._groups.values():
            group.heap.check_invariants()
        assert len(self) == sum(len(group.heap) for group in self._groups.values())
