"""Consuming: the changes of a bucket as an async iterator of events."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, Self

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.barriers import Barriers
from upr_protocol.client.core.delivery_tracker import (
    Delivery,
    DeliveryTracker,
    RollbackRequest,
    SaveLimits,
)
from upr_protocol.client.core.options import IDENTITY_DEFAULT
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import PATIENCE_S_DEFAULT, RetryPolicy
from upr_protocol.client.course import Course
from upr_protocol.client.events import BarrierReached, Event, RolledBack
from upr_protocol.client.feeds import Feeds
from upr_protocol.client.resume_files import FileStore, ResumeStore
from upr_protocol.client.trio.connection import TrioOptions
from upr_protocol.client.trio.connection_pool import ConnectionPool
from upr_protocol.client.wishes import End, Wishes, partitions_wanted
from upr_protocol.concurrency import background
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.failover import Position
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import (
    HANDSHAKE_TIMEOUT_S,
    IDLE_INTERVAL_S_DEFAULT,
    WINDOW_BYTES_DEFAULT,
)
from upr_protocol.transport import Dial, dial_tcp
from upr_protocol.wire import ReplicaAck

Resume = ResumeState | str | os.PathLike[str] | ResumeStore | None
"""Where a consumer begins and what it keeps: a state to begin with, a file's path, a store."""

UndoCallback = Callable[[PartitionId, SeqNo, str], Awaitable[SeqNo]]
"""Takes the application back when the server's history parted from what the consumer received.

Its arguments are the partition; the rollback ceiling, the highest sequence number that the
application and the server have in common; and the server's reason. It gives the sequence number
that the partition now stands at, from which its stream goes on: the end of a complete snapshot at
or below the ceiling, or 0 for a partition of which nothing is left. An application that has read
again every key that it received above the ceiling may give the ceiling itself.

The consumer calls it while the application asks for its next event, so every event before is
processed. If it is cancelled, or after a crash, it is called again: what is undone stays undone. By
then the resume state says that a rollback is under way, and is saved if there is a store. An
application that keeps the state itself has two ways. It undoes here for good, and saves
`Consumer.processed_state` together with that. Or it undoes when `RolledBack` comes, which is its
next event, and saves that event's state together with that.
"""

_TURN_S: Final = 0.001
"""For so long events that wait may be handed on without giving way to other tasks."""

_LAST_SAVE_S: Final = 10.0
"""How long the save on leaving may take."""


class _EndOfStreamsError(UprError):
    """Every stream has ended for good."""


@attrs.frozen
class ConsumerStatistics:
    """What a consumer can tell about itself.

    Attributes:
        connections: Connections made.
        connected: Whether there is one now.
        events: Events handed on.
        chunks: Chunks handed on.
        mutations: Mutations in them.
        nbytes: Their bytes.
        rollbacks: How many times a partition went back.
        saves: How many times the resume state was saved.
        waiting: Events that the application has not asked for yet.
        last_failure: Why the last connection, or attempt to make one, ended; empty at first.
    """

    connections: int
    connected: bool
    events: int
    chunks: int
    mutations: int
    nbytes: int
    rollbacks: int
    saves: int
    waiting: int
    last_failure: str


class Consumer:
    """An async iterator of events; `consume` makes it.

    One task iterates. To ask for the next event is to say that the one before is dealt with: only
    then are its bytes acknowledged to the server, and only then does the resume state hold it. So
    an application that is killed while it deals with an event gets it again, and one that is slow
    slows its own stream down and nobody else's.

    When the connection is lost the events just go on after a while, inside a snapshot too; and so
    when partitions move to other nodes.
    Cancelled while it waits for an event, the iterator loses none. Events that have come already
    are handed on without waiting; other tasks get their turn once a millisecond.
    """

    def __init__(
        self,
        address: Address,
        feeds: Feeds,
        state: ResumeState,
        store: ResumeStore | None,
        limits: SaveLimits,
        undo: UndoCallback | None = None,
    ) -> None:
        self.address = address
        self._feeds = feeds
        self._store = store
        self._tracker = DeliveryTracker(state, limits, feeds.acknowledge, trio.current_time())
        self._undo = undo
        # A rollback that the application is yet to be asked for, or told of; and one that it is to
        # be told of next.
        self._to_go_back: Delivery | None = None
        self._back: Delivery | None = None
        self._iterating = False
        self._barriers = Barriers(feeds)
        self._saves = 0
        self._turn_ends_at = 0.0

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has."""
        return self._feeds.course.partition_count

    # Events.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event; the one before is dealt with.

        Raises:
            StopAsyncIteration: Every stream has ended for good.
            ServerError: The server refused, and went on refusing.
            BrokenError: The server could not be reached for too long.
        """
        if self._iterating:
            raise RuntimeError("another task asks this consumer for events already")
        self._iterating = True
        try:
            self._tracker.finish()
            now = trio.current_time()
            if now >= self._turn_ends_at or now >= self._save_at():
                await self._give_way(now)
            while (event := self._take()) is None:
                await self._wait()
            return event
        except _EndOfStreamsError:
            pass
        finally:
            self._iterating = False
        await self.save()
        raise StopAsyncIteration

    def _take(self) -> Event | None:
        """Takes one delivery; its event, when that is for the application. Otherwise `_wait`."""
        if self._to_go_back is not None:
            return None
        delivery, self._back = self._back, None
        if delivery is None:
            delivery = self._feeds.mailbox.get_nowait()
            if delivery is None:
                return None
            if isinstance(delivery.event, RollbackRequest | RolledBack):
                self._to_go_back = delivery
                return None
        event = delivery.event
        assert not isinstance(event, RollbackRequest)
        if event is None or self._is_awaited(event):
            self._tracker.finish_delivery(delivery)
            return None
        self._tracker.hand_out(delivery, event)
        return event

    def _is_awaited(self, event: Event) -> bool:
        return isinstance(event, BarrierReached) and self._barriers.returned(event)

    async def _wait(self) -> None:
        """Does what must be done before the next delivery, and waits until there is one, or until a
        save is due."""
        if self._save_at() <= trio.current_time():
            await self.save()
        if self._to_go_back is not None:
            await self._go_back(self._to_go_back)
        elif not len(self._feeds.mailbox):
            with trio.move_on_at(self._save_at()):
                await self._feeds.mailbox.wait()
            self._turn_ends_at = trio.current_time() + _TURN_S

    async def _go_back(self, delivery: Delivery) -> None:
        """Before the application hears of a rollback: has it undone where somebody undoes. What
        follows is `RolledBack`, before anything that came meanwhile. Cancelled, it is for the next
        call."""
        event = delivery.event
        assert isinstance(event, RollbackRequest | RolledBack)
        self._tracker.begin_rollback(event)
        await self.save()
        if isinstance(event, RollbackRequest):
            assert self._undo is not None
            to = await self._undo(event.partition, event.ceiling, event.reason)
            delivery = self._feeds.rolled_back(event.partition, to)
        self._to_go_back, self._back = None, delivery

    # Replicas.

    def report(
        self, partition: PartitionId, history_id: HistoryId, received: SeqNo, persisted: SeqNo
    ) -> None:
        """Tells the server which complete snapshot ends a replica has. Without a connection it is
        dropped: whoever reports does so again after a stream was accepted.

        Args:
            partition: The partition.
            history_id: The history that the ends belong to.
            received: The last one received.
            persisted: The last one on disk.
        """
        self._feeds.report(ReplicaAck(history_id, received, persisted, partition=partition))

    # Barriers.

    def send_barrier(self, cookie: bytes | None = None) -> bytes:
        """Sends a barrier; `BarrierReached` with its cookie will be among the events.

        Without a connection it is sent as soon as there is one; open barriers are sent again after
        a connection was lost.

        Args:
            cookie: 1 to 64 bytes, of no other open barrier; by default one is made.

        Returns:
            The cookie.

        Raises:
            LocalProtocolError: 64 barriers are open, or this one is.
        """
        if cookie is None:
            cookie = self._barriers.new_cookie()
        self._feeds.barrier(cookie)
        return cookie

    async def barrier(self) -> BarrierReached:
        """Sends a barrier and waits until it comes back, and everything before it was dealt with.

        Another task must iterate meanwhile; it does not see this barrier's event. When 64 barriers
        are open it first waits for one of them. Cancelled, the barrier still comes back, unseen.

        Raises:
            ClosedError: Every stream ended, or the consumer was closed.
            UprError: What the iterating task was told when the streams broke.
        """
        return await self._barriers.wait()

    # The resume state.

    @property
    def resume_state(self) -> ResumeState:
        """A copy of the resume state as it is once the event in hand is dealt with.

        For applications that keep it themselves: save it together with what the events up to and
        including this one did, best in one transaction. O(partitions).
        """
        return self._tracker.state_after_current()

    def position(self, partition: PartitionId) -> Position:
        """How far `partition` is once the event in hand is dealt with; see `resume_state`."""
        return self._tracker.position_after_current(partition)

    @property
    def processed_state(self) -> ResumeState:
        """A copy of the resume state without the event in hand. O(partitions)."""
        return self._tracker.state.copy()

    async def save(self) -> None:
        """Says that the event in hand is dealt with, and saves now. Cancelled, the state is saved
        or not, but whole.

        Raises:
            OSError: The file cannot be written; or what the store raises.
        """
        tracker = self._tracker
        tracker.finish()
        if self._store is not None and tracker.schedule.has_unsaved:
            now = trio.current_time()
            await self._store.save(tracker.state)
            tracker.schedule.saved(now)
            self._saves += 1

    def _save_at(self) -> float:
        return float("inf") if self._store is None else self._tracker.schedule.due_at

    async def _give_way(self, now: float) -> None:
        """To the save, when it is due, and to other tasks."""
        if self._save_at() <= now:
            await self.save()
        await trio.lowlevel.checkpoint()
        self._turn_ends_at = trio.current_time() + _TURN_S

    # Behind the scenes.

    async def _run(self) -> None:
        error: UprError = _EndOfStreamsError("every stream has ended")
        try:
            await self._feeds.fleet.run()
        except UprError as failure:
            error = failure
        self._feeds.mailbox.end(error)
        if isinstance(error, _EndOfStreamsError):
            error = ClosedError("every stream has ended")
        self._barriers.end(error)
        self._feeds.opened.set()

    async def _start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._run)
        await self._feeds.opened.wait()
        if not self._feeds.course.connections:
            await self._feeds.mailbox.wait()

    async def _leave(self) -> None:
        self._barriers.end(ClosedError("the consumer was closed"))
        self._tracker.discard()
        await self.save()

    def statistics(self) -> ConsumerStatistics:
        """What the consumer can tell about itself."""
        counts = self._tracker.counts
        return ConsumerStatistics(
            self._feeds.course.connections,
            self._feeds.connected_now,
            counts.events,
            counts.chunks,
            counts.mutations,
            counts.nbytes,
            self._feeds.course.rollbacks,
            self._saves,
            len(self._feeds.mailbox),
            self._feeds.fleet.last_failure,
        )


@asynccontextmanager
async def consume(
    target: str | Address,
    *,
    partitions: Sequence[int] | None = None,
    start: Literal["beginning", "now"] = "beginning",
    resume: Resume = None,
    state: PartitionState = PartitionState.ACTIVE,
    end: End = None,
    lease_id: int = 0,
    undo: UndoCallback | None = None,
    with_answers: bool = False,
    with_logs: bool = False,
    by_map: bool = True,
    window_bytes: int = WINDOW_BYTES_DEFAULT,
    identity: str = IDENTITY_DEFAULT,
    patience_s: float = PATIENCE_S_DEFAULT,
    save_limits: SaveLimits | None = None,
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
    connect_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    dial: Dial = dial_tcp,
    draw: Callable[[], float] = random.random,
) -> AsyncIterator[Consumer]:
    """A consumer of one bucket.

    Leaving the context, by an exception or cancelled too, saves what was dealt with and closes the
    connection.

    Args:
        target: `upr://host:port/bucket`; several nodes as `upr://host:port,host:port/bucket`.
        partitions: Those to stream; by default all. An empty list is a ValueError.
        start: Where partitions without a position start: at the beginning, or at what the server
            has when the first connection is made. A position that was taken once stays the
            position, across connections and, with a store, across processes.
        resume: A state to begin with; or a file's path or a store, from which it is loaded and in
            which it is kept.
        state: The state that the partitions must be in: of a bucket that several nodes hold, each
            partition is read from a node where it is that; from the first replica that can be
            reached, for instance.
        end: Where the streams end: at a number, at a number a partition, or `"now"`, what the
            server has when the first connection is made. One inside a snapshot means its end.
        lease_id: A lease that holds what lies between the positions and `end`: just that is read,
            from disk, with every version in it, and so the same each time; `ServerError` with
            `RANGE_GONE` when it does not hold it. 0 for none.
        undo: Takes the application back when the server's history has parted from what was
            received; by default the partition begins again at 0.
        with_answers: Whether `AnswersReceived` are to come, for a replica.
        with_logs: Whether `StreamAccepted` are to come.
        by_map: Whether to go to the nodes that the partition map names, and not to stay with the
            one at `target`.
        window_bytes: How many bytes of a node may be on their way or waiting for the application.
        identity: `what:who`, for the server's logs and statistics.
        patience_s: How long it goes on without a connection that streams before it gives up; of
            several nodes, without one that gives some partition.
        save_limits: How much may be read again after a crash.
        idle_interval_s: The silence after which a side says that it is there still.
        connect_timeout_s: How long a connection and its first answers may take.
        dial: How to reach an address, where that is not plain TCP.
        draw: Gives numbers in [0, 1), for the waits between attempts.

    Raises:
        AddressError: The URL is none, or names no bucket.
        ResumeStateError: What was loaded is no resume state, or that of another bucket.
        BrokenError: There is no connection to be had.
        ServerError: The server refused, for instance with `NO_BUCKET`.
        OSError: The resume file cannot be read or written.
    """
    address = Address.parse(target) if isinstance(target, str) else target
    bucket = address.with_bucket().bucket
    store = FileStore(resume) if isinstance(resume, str | os.PathLike) else resume
    if store is None or isinstance(store, ResumeState):
        found, store = store, None
    else:
        found = await store.load()
    if found is None:
        found = ResumeState(bucket)
    found.check_bucket(bucket)
    options = TrioOptions(identity, window_bytes, idle_interval_s, connect_timeout_s, dial)
    wishes = Wishes(
        partitions_wanted(partitions),
        start == "now",
        state,
        end,
        lease_id,
        with_answers,
        with_logs,
        undo is not None,
    )
    feeds = Feeds(Course(wishes, found.copy()), lambda: RetryPolicy(patience_s, draw))
    feeds.fleet = ConnectionPool(
        address,
        options,
        feeds,
        patience_s=patience_s,
        state=state,
        by_map=by_map,
        draw=draw,
        opened=wishes.partitions,
    )
    consumer = Consumer(address, feeds, found.copy(), store, save_limits or SaveLimits(), undo)
    async with background() as nursery:
        await consumer._start(nursery)  # noqa: SLF001
        try:
            yield consumer
        finally:
            deadline = trio.current_time() + _LAST_SAVE_S
            with trio.CancelScope(shield=True, deadline=deadline):
                await consumer._leave()  # noqa: SLF001
