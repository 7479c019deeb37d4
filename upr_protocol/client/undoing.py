"""A consumer with a ring buffer: it undoes what the server never had."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, Self

import trio

from upr_protocol.client.address import Address
from upr_protocol.client.consumer import Consumer, ConsumerStatistics, Resume, consume
from upr_protocol.client.events import (
    BarrierReached,
    ChunkReceived,
    Event,
    RolledBack,
    SnapshotEnd,
    StreamAccepted,
    Undone,
)
from upr_protocol.client.link import Dial, TrioOptions, dial_tcp
from upr_protocol.client.newest import Fetcher
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.recall import Recall, Recalled
from upr_protocol.client.resume import ResumeState
from upr_protocol.client.retry import PATIENCE_S_DEFAULT, Patience
from upr_protocol.client.ring import RingLimits
from upr_protocol.client.ring_file import RingFile
from upr_protocol.client.saving import SaveLimits
from upr_protocol.client.store import FileStore
from upr_protocol.client.wishes import End
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo

FORGOTTEN: Final = "the ring buffer does not reach down to where the resume state is"


class UndoingConsumer:
    """An async iterator of events, like `Consumer`; `consume_undoing` makes it.

    What differs: in place of `RolledBack` comes `Undone`, with all that it takes to go back; and
    while something that was read again is ahead of the stream, the ends of snapshots that do not
    reach it are not told, as the partition is not what the server had there.

    Every key is in the ring buffer, on disk, before the event that brings it is handed on. An
    application that is killed while it deals with `Undone` gets it, or one that undoes as much,
    again.
    """

    def __init__(
        self, consumer: Consumer, ring: RingFile, recall: Recall, forgotten: Iterable[PartitionId]
    ) -> None:
        self._consumer = consumer
        self._ring = ring
        self._recall = recall
        self._forgotten = deque(forgotten)
        """Partitions that the application is to begin again, whatever the server says."""
        self._logs: dict[PartitionId, FailoverLog] = {}
        self._event: Event | None = None
        """What came and was not told yet, as whoever asked was cancelled."""
        self._in_hand: Recalled | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | Undone:
        """The next event; the one before is dealt with. See `Consumer.__anext__`.

        Raises:
            OSError: The ring buffer cannot be written.
        """
        await self._deal_with()
        if self._forgotten:
            nothing = SeqNo(0)
            event = Undone(self._forgotten.popleft(), nothing, nothing, nothing, FORGOTTEN, {})
            return self._hand_on(Recalled(event, None))
        while True:
            if self._event is None:
                self._event = await anext(self._consumer)
            told = await self._tell(self._event)
            self._event = None
            if told is not None:
                return told

    async def _deal_with(self) -> None:
        """Remembers what the application has dealt with."""
        if self._in_hand is not None:
            event, entries = self._in_hand.event, self._in_hand.entries
            await self._ring.undone(event.partition, entries)
            self._in_hand = None
        if self._ring.ring.overfull and self._event is None:
            # Where the next process begins must not lie below what is let go of.
            await self._consumer.save()
            await self._ring.tidy(self._reached)

    def _reached(self, partition: PartitionId) -> SeqNo:
        """Up to where a partition's keys may be let go of."""
        if not self._recall.trusts(partition):
            return SeqNo(0)
        return self._consumer.resume_state.position(partition).highest_received

    def _hand_on(self, recalled: Recalled) -> Undone:
        self._in_hand = recalled
        return recalled.event

    async def _tell(self, event: Event) -> Event | Undone | None:
        """What the application is told of `event`. Cancelled, it can be asked again."""
        if isinstance(event, ChunkReceived):
            partition, chunk = event.partition, event.chunk
            branch_of = self._logs[partition].branch_of
            numbers = map(SeqNo, chunk.seqs.tolist())
            rows = [(k, n, branch_of(n)) for k, n in zip(chunk.keys(), numbers, strict=True)]
            await self._ring.receive(partition, rows)
        elif isinstance(event, SnapshotEnd):
            return event if self._recall.ends(event) else None
        elif isinstance(event, RolledBack):
            if not event.to:
                # An application that is killed half-way has less than it knows: whatever the server
                # says the next time, it must begin again.
                await self._ring.raise_floor(event.partition, SEQ_MAX)
            recalled = self._recall.rolled_back(event)
            return None if recalled is None else self._hand_on(recalled)
        elif isinstance(event, StreamAccepted):
            self._logs[event.partition] = event.log
            position = self._consumer.resume_state.position(event.partition)
            recalled = await self._recall.accepted(event, position.highest_received)
            return None if recalled is None else self._hand_on(recalled)
        return event

    # The rest is the consumer's.

    def send_barrier(self, cookie: bytes | None = None) -> bytes:
        """See `Consumer.send_barrier`."""
        return self._consumer.send_barrier(cookie)

    async def barrier(self) -> BarrierReached:
        """See `Consumer.barrier`."""
        return await self._consumer.barrier()

    @property
    def resume_state(self) -> ResumeState:
        """See `Consumer.resume_state`."""
        return self._consumer.resume_state if self._event is None else self._consumer.dealt_with

    async def save(self) -> None:
        """See `Consumer.save`. It does nothing after `__anext__` was cancelled while it dealt with
        an event that is still to be told."""
        await self._deal_with()
        if self._event is None:
            await self._consumer.save()

    def statistics(self) -> ConsumerStatistics:
        """See `Consumer.statistics`."""
        return self._consumer.statistics()


async def _prepare(ring: RingFile, state: ResumeState | None) -> list[PartitionId]:
    """Makes the ring buffer and the resume state fit; gives the partitions that must begin again.

    A new ring buffer knows nothing of what was received before. An old one may begin above where
    the resume state is, when that is older than what was saved last, or is gone.
    """
    positions = state.positions if state is not None else {}
    if not ring.found:
        for partition, position in positions.items():
            if position.highest_received:
                await ring.raise_floor(partition, position.highest_received)
        return []
    return sorted(
        partition
        for partition, floor in ring.ring.floors().items()
        if partition not in positions or positions[partition].highest_received < floor
    )


@asynccontextmanager
async def consume_undoing(
    target: str | Address,
    ring: str | os.PathLike[str],
    *,
    resume: Resume,
    ring_limits: RingLimits | None = None,
    partitions: Sequence[int] | None = None,
    start: Literal["beginning", "now"] = "beginning",
    end: End = None,
    identity: str = IDENTITY_DEFAULT,
    patience_s: float = PATIENCE_S_DEFAULT,
    save_limits: SaveLimits | None = None,
    dial: Dial = dial_tcp,
    draw: Callable[[], float] = random.random,
) -> AsyncIterator[UndoingConsumer]:
    """A consumer that undoes what the server never had, with a ring buffer in the file `ring`.

    Args:
        target: `upr://host:port/bucket`.
        ring: The file; made when there is none. It belongs to `resume` as that belongs to the
            application's data. Begin it with a resume state that holds all that was dealt with.
        resume: See `consume`. An application that keeps the state itself must do so at every event.
        ring_limits: How much the ring buffer keeps. What goes back below that begins at 0.
        partitions: See `consume`, also for what follows.
        start: Where partitions without a position start.
        end: Where the streams end.
        identity: `what:who`, for the server's logs and statistics.
        patience_s: How long it goes on without a connection that streams before it gives up.
        save_limits: How much may be read again after a crash.
        dial: How to reach an address, where that is not plain TCP.
        draw: Gives numbers in [0, 1), for the waits between attempts.

    Raises:
        JournalError: The ring buffer is damaged, or another bucket's.
        OSError: The ring buffer or the resume file cannot be read or written.
        UprError: See `consume`.
    """
    address = (Address.parse(target) if isinstance(target, str) else target).with_bucket()
    resume = FileStore(resume) if isinstance(resume, str | os.PathLike) else resume
    ring_file = await trio.to_thread.run_sync(RingFile, ring, address.bucket, ring_limits)
    try:
        if resume is None or isinstance(resume, ResumeState):
            state = resume.copy() if resume is not None else ResumeState(address.bucket)
            resume = state
            store = None
        else:
            store = resume
            state = await store.load() or ResumeState(address.bucket)
        state.check_bucket(address.bucket)
        forgotten = await _prepare(ring_file, state)
        for partition in forgotten:
            state.positions.pop(partition, None)
        if store is not None and forgotten:
            # Should this process end before the application has heard of it, the ring buffer still
            # says the same.
            await store.save(state)
        options = TrioOptions(identity=identity, dial=dial)
        recall = Recall(ring_file, Fetcher(address, options, Patience(patience_s, draw)))
        async with consume(
            address,
            partitions=partitions,
            start=start,
            resume=resume,
            end=end,
            undo=recall,
            with_logs=True,
            identity=identity,
            patience_s=patience_s,
            save_limits=save_limits,
            dial=dial,
            draw=draw,
        ) as consumer:
            yield UndoingConsumer(consumer, ring_file, recall, forgotten)
    finally:
        ring_file.close()
