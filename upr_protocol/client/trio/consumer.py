"""Consuming: the changes of a bucket as an async iterator of events."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, Self, TypeVar, Unpack

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.delivery_tracker import (
    Delivery,
    DeliveryTracker,
    RollbackRequest,
    SaveLimits,
)
from upr_protocol.client.core.events import BarrierReached, Event, RolledBack
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT
from upr_protocol.client.core.subscription import (
    End,
    Subscription,
    SubscriptionState,
)
from upr_protocol.client.resume_stores import FileStore, ResumeStore
from upr_protocol.client.trio.barrier_waiters import BarrierWaiters
from upr_protocol.client.trio.connection import ConnectOptions, TrioOptions
from upr_protocol.client.trio.streams import ConsumerStreams, EndOfStreamsError
from upr_protocol.concurrency import background_nursery
from upr_protocol.errors import ClosedError
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_protocol.limits import WINDOW_BYTES_DEFAULT

Resume = ResumeState | str | os.PathLike[str] | ResumeStore | None
"""Where a consumer begins, and where it keeps its resume state: a state to begin with and to keep
nowhere, the path of a file, or a store."""

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

_YIELD_INTERVAL_S: Final = 0.001
"""How long waiting events may be handed out before other tasks get their turn."""

UNPLACED_S: Final = 5.0
"""For how long no node must have served a partition before the figures tell of it: a takeover or a
restart is over by then."""

_LAST_SAVE_S: Final = 10.0
"""The longest that the save on leaving may take."""


@attrs.frozen
class ConsumerStatistics:
    """The figures of a consumer.

    Attributes:
        events: Events handed out.
        waiting_events: Events that the application has not asked for yet.
        last_failure: Why the last connection, or attempt to connect, ended; empty at first.
        unplaced_partitions: Partitions that no node has served for `UNPLACED_S` seconds or more.
        unplaced_reason: Why the first of them is not served; empty if that is not known.
    """

    connections: int
    is_connected: bool
    events: int
    chunks: int
    mutations: int
    nbytes: int
    rollbacks: int
    saves: int
    waiting_events: int
    last_failure: str
    unplaced_partitions: Sequence[PartitionId] = ()
    unplaced_reason: str = ""


class Consumer:
    """An async iterator of events; `consume` makes it.

    One task iterates. By asking for the next event the application acknowledges the one before.
    Only then are its bytes acknowledged to the server, and only then does the resume state cover
    it. So an application that is killed while it processes an event gets it again, and a slow
    application slows down its own stream and no other.

    When the connection is lost, or when partitions move to other nodes, the events go on after a
    while, inside a snapshot too. If the iterator is cancelled while it waits for an event, no event
    is lost. Events that have arrived are handed out without waiting; other tasks get their turn
    once a millisecond.
    """

    def __init__(
        self,
        address: Address,
        streams: ConsumerStreams,
        state: ResumeState,
        store: ResumeStore | None,
        limits: SaveLimits,
        undo: UndoCallback | None,
    ) -> None:
        self.address = address
        self._streams = streams
        self._store = store
        self._tracker = DeliveryTracker(state, limits, streams.acknowledge, trio.current_time())
        self._undo = undo
        self._rollback: Delivery | None = None
        """A rollback that has to be undone, or saved as pending, before anything else."""
        self._rollback_outcome: Delivery | None = None
        """What the application is given next: the rollback is undone."""
        self._is_iterating = False
        self._barriers = BarrierWaiters(streams)
        self._save_lock = trio.Lock()
        self._saves = 0
        self._next_yield_at = 0.0

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has."""
        return self._streams.state.partition_count

    # Events.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event; acknowledges the one before.

        Raises:
            StopAsyncIteration: Every stream has ended for good.
            ServerError: The server refused, and went on refusing.
            BrokenError: The server could not be reached for too long.
            ClosedError: The context was left.
        """
        if self._is_iterating:
            raise RuntimeError("another task asks this consumer for events already")
        self._is_iterating = True
        try:
            self._tracker.finish_current()
            now = trio.current_time()
            if now >= self._next_yield_at or now >= self._save_due_at():
                await self._yield_to_other_tasks(now)
            while (event := self._hand_out_next()) is None:
                await self._wait()
            return event
        except EndOfStreamsError:
            pass
        finally:
            self._is_iterating = False
        await self.save()
        raise StopAsyncIteration

    def _hand_out_next(self) -> Event | None:
        """Takes one delivery from the queue.

        Returns:
            Its event, if the application is to have it. Otherwise None; `_wait` before the next.
        """
        if self._rollback is not None:
            return None
        delivery, self._rollback_outcome = self._rollback_outcome, None
        if delivery is None:
            delivery = self._streams.queue.take()
            if delivery is None:
                return None
            if isinstance(delivery.event, RollbackRequest | RolledBack):
                self._rollback = delivery
                return None
        event = delivery.event
        assert not isinstance(event, RollbackRequest)
        if event is None or self._is_awaited_barrier(event):
            self._tracker.finish_delivery(delivery)
            return None
        self._tracker.hand_out(delivery, event)
        return event

    def _is_awaited_barrier(self, event: Event) -> bool:
        return isinstance(event, BarrierReached) and self._barriers.take_returned(event)

    async def _wait(self) -> None:
        """Does what must precede the next delivery. Waits until there is one, or a save is due."""
        if self._save_due_at() <= trio.current_time():
            await self.save()
        if self._rollback is not None:
            await self._roll_back(self._rollback)
        elif not len(self._streams.queue):
            with trio.move_on_at(self._save_due_at()):
                await self._streams.queue.wait()
            self._next_yield_at = trio.current_time() + _YIELD_INTERVAL_S

    async def _roll_back(self, delivery: Delivery) -> None:
        """Has a rollback undone, before the application is given `RolledBack`, and before anything
        that arrived meanwhile. If it is cancelled, the next call does it again."""
        event = delivery.event
        assert isinstance(event, RollbackRequest | RolledBack)
        self._tracker.begin_rollback(event)
        await self.save()
        if isinstance(event, RollbackRequest):
            assert self._undo is not None
            to = await self._undo(event.partition, event.ceiling, event.reason)
            delivery = self._streams.note_rolled_back(event.partition, to)
        self._rollback, self._rollback_outcome = None, delivery

    # Barriers.

    def send_barrier(self, cookie: bytes | None = None) -> bytes:
        """Sends a barrier; `BarrierReached` with its cookie will be among the events.

        Without a connection it is sent as soon as there is one. After a lost connection open
        barriers are sent again.

        Args:
            cookie: 1 to 64 bytes, of no other open barrier; by default a new one.

        Returns:
            The cookie.

        Raises:
            LocalProtocolError: 64 barriers are open, or this one is.
        """
        return self._barriers.send(cookie)

    async def barrier(self) -> BarrierReached:
        """Sends a barrier and waits until it comes back and everything before it is processed.

        Another task must iterate meanwhile; it does not see this barrier's event. If 64 barriers
        are open, this waits for one of them first. Cancelled, the barrier still comes back, unseen.

        Raises:
            ClosedError: Every stream ended, or the consumer was closed.
            UprError: The streams broke; the iterating task gets the same error.
        """
        return await self._barriers.send_and_wait()

    # The resume state.

    @property
    def resume_state(self) -> ResumeState:
        """A copy of the resume state as it is once the current event is processed.

        For applications that keep the state themselves: save it together with the effects of the
        events up to and including this one, best in one transaction. O(partitions).
        """
        return self._tracker.state_after_current()

    def position(self, partition: PartitionId) -> Position:
        """One partition's position in `resume_state`, without a copy of the others."""
        return self._tracker.position_after_current(partition)

    @property
    def processed_state(self) -> ResumeState:
        """A copy of the resume state without the current event. O(partitions)."""
        return self._tracker.state.copy()

    async def save(self) -> None:
        """Acknowledges the current event and saves now. Cancelled, the state is saved or not, but
        never in part. Several tasks may call it: no older state takes the place of a newer one.

        Raises:
            OSError: The file cannot be written; or the store's own errors.
        """
        tracker = self._tracker
        tracker.finish_current()
        if self._store is None:
            return
        async with self._save_lock:
            schedule = tracker.schedule
            if schedule.has_unsaved:
                now, moves = trio.current_time(), schedule.moves
                await self._store.save(tracker.state.copy())
                schedule.note_saved(now, moves)
                self._saves += 1

    def _save_due_at(self) -> float:
        return float("inf") if self._store is None else self._tracker.schedule.due_at

    async def _yield_to_other_tasks(self, now: float) -> None:
        """Saves, if that is due, and gives other tasks their turn."""
        if self._save_due_at() <= now:
            await self.save()
        await trio.lowlevel.checkpoint()
        self._next_yield_at = trio.current_time() + _YIELD_INTERVAL_S

    # The life of a consumer; `open_consumer` leads it.

    async def _run(self) -> None:
        await self._streams.run()
        error = self._streams.queue.error
        if error is None or isinstance(error, EndOfStreamsError):
            error = ClosedError("every stream has ended")
        self._barriers.fail_all(error)

    async def _start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._run)
        await self._streams.wait_opened()

    async def _leave(self) -> None:
        self._barriers.fail_all(ClosedError("the consumer was closed"))
        self._tracker.discard_current()
        await self.save()

    def _close(self) -> None:
        self._streams.close()
        self._barriers.close()

    def statistics(self) -> ConsumerStatistics:
        """The figures of the consumer."""
        streams, counts = self._streams, self._tracker.counts
        router = streams.connections.router
        unplaced_partitions, unplaced_reason = router.unplaced_since(
            trio.current_time() - UNPLACED_S
        )
        return ConsumerStatistics(
            streams.state.connection_count,
            streams.is_connected,
            counts.events,
            counts.chunks,
            counts.mutations,
            counts.nbytes,
            streams.state.rollback_count,
            self._saves,
            len(streams.queue),
            streams.connections.last_failure,
            unplaced_partitions,
            unplaced_reason,
        )


C = TypeVar("C", bound=Consumer)


async def load_resume_state(
    resume: Resume, bucket: str, key_prefix: bytes
) -> tuple[ResumeState, ResumeStore | None]:
    """A copy of the state to begin with, and where it is kept.

    Raises:
        ResumeStateError: It is not a resume state, or the state of another bucket or of other keys.
        OSError: The resume file cannot be read.
    """
    state: ResumeState | None
    if resume is None or isinstance(resume, ResumeState):
        state, store = resume, None
    else:
        store = FileStore(resume) if isinstance(resume, str | os.PathLike) else resume
        state = await store.load()
    return (state or ResumeState(bucket)).of_stream(bucket, key_prefix), store


@asynccontextmanager
async def open_consumer(
    consumer_class: type[C],
    address: Address,
    subscription: Subscription,
    options: TrioOptions,
    *,
    resume: Resume,
    undo: UndoCallback | None,
    save_limits: SaveLimits | None,
) -> AsyncIterator[C]:
    """A consumer of some class; see `consume`."""
    bucket = address.with_bucket().bucket
    state, store = await load_resume_state(resume, bucket, subscription.key_prefix)
    streams = ConsumerStreams(address, options, SubscriptionState(subscription, state.copy()))
    consumer = consumer_class(address, streams, state, store, save_limits or SaveLimits(), undo)
    try:
        async with background_nursery() as nursery:
            await consumer._start(nursery)  # noqa: SLF001
            try:
                yield consumer
            finally:
                deadline = trio.current_time() + _LAST_SAVE_S
                with trio.CancelScope(shield=True, deadline=deadline):
                    await consumer._leave()  # noqa: SLF001
    finally:
        consumer._close()  # noqa: SLF001


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
    key_prefix: bytes = b"",
    undo: UndoCallback | None = None,
    with_logs: bool = False,
    follow_map: bool = True,
    window_bytes: int = WINDOW_BYTES_DEFAULT,
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
    save_limits: SaveLimits | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[Consumer]:
    """A consumer of one bucket.

    Leaving the context saves what was processed and closes the connection, also after an exception
    or a cancellation.

    Args:
        target: `upr://host:port/bucket`; several nodes as `upr://host:port,host:port/bucket`.
        partitions: The partitions to stream; by default all. An empty list is a ValueError.
        start: Where partitions without a position start: at the beginning, or at what the server
            has when the first connection is made. That position lasts, across connections and, with
            a store, across processes.
        resume: A state to begin with; or a file's path or a store, from which the state is loaded
            and in which it is kept.
        state: The state that the partitions must be in. Of a bucket on several nodes, each
            partition is read from a node where it is in this state; for instance from the first
            replica that can be reached.
        end: Where the streams end: at a sequence number, at one for each partition, or `"now"`,
            what the server has when the first connection is made. An end inside a snapshot means
            the snapshot's end.
        lease_id: A lease that holds what lies between the positions and `end`. Just that is read
            from disk, with every version in it, and so the same each time; `ServerError` with
            `RANGE_GONE` if the lease does not hold it. 0 for no lease.
        key_prefix: What the keys of the changes begin with. The server leaves the others out; a
            chunk may have no row. Resume with the prefix that the state was saved with.
        undo: Takes the application back when the server's history parted from what was received;
            by default the partition starts again at 0.
        with_logs: Whether `StreamAccepted` events come, which bring the failover logs.
        follow_map: Whether to go to the nodes that the partition map names; otherwise the consumer
            stays with the node at `target`.
        window_bytes: How many bytes of a node may be in flight or wait for the application.
        retry_timeout_s: How long to go on without a connection that streams before giving up; of
            several nodes, without one that streams some partition.
        save_limits: How much may be read again after a crash.
        **options: How to connect.

    Raises:
        AddressError: The URL is malformed, or names no bucket.
        ResumeStateError: What was loaded is not a resume state, or `resume` is the state of another
            bucket, or of another `key_prefix`.
        BrokenError: The server cannot be reached.
        ServerError: The server refused, for instance with `NO_BUCKET`.
        OSError: The resume file cannot be read or written.
    """
    subscription = Subscription(
        partitions,
        start == "now",
        state,
        end,
        lease_id,
        with_logs=with_logs,
        has_undo=undo is not None,
        key_prefix=key_prefix,
    )
    async with open_consumer(
        Consumer,
        Address.parse(target) if isinstance(target, str) else target,
        subscription,
        TrioOptions(
            window_bytes=window_bytes,
            retry_timeout_s=retry_timeout_s,
            follow_map=follow_map,
            **options,
        ),
        resume=resume,
        undo=undo,
        save_limits=save_limits,
    ) as consumer:
        yield consumer
