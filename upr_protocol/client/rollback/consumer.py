"""A consumer that remembers its received keys and undoes just what the server does not have."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import repeat
from typing import Final, Literal, Unpack, cast

import trio

from upr_protocol.address import Address
from upr_protocol.client.core.delivery_tracker import SaveLimits
from upr_protocol.client.core.events import BarrierReached, ChunkReceived, Event, Undone
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT
from upr_protocol.client.core.subscription import End
from upr_protocol.client.resume_stores import ResumeStore
from upr_protocol.client.rollback.iterator import RollbackIterator, consume_with_planner
from upr_protocol.client.rollback.planner import RollbackPlan, RollbackPlanner
from upr_protocol.client.rollback.received_keys import ReceivedKeysLimits
from upr_protocol.client.rollback.received_keys_file import ReceivedKeysFile
from upr_protocol.client.trio.connection import ConnectOptions, TrioOptions
from upr_protocol.client.trio.consumer import Consumer, Resume, load_resume_state
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, HistoryId, PartitionId, SeqNo

ABOVE_POSITION: Final = "the received keys do not reach down to the resume state's position"


class RollbackConsumer(RollbackIterator):
    """An async iterator of events, like `Consumer`; `consume_with_rollback` makes it.

    Two things differ. `Undone` takes the place of `RolledBack`, with everything that it takes to go
    back. And while a key that was read again is ahead of the stream, snapshot ends below it are
    left out, because the partition matches no state of the server there.

    Every key is recorded on disk before the application is given the event that brings it, or
    when the application calls `flush_received_keys`, if it has asked for that. An application that
    is killed while it processes `Undone` gets it, or one that undoes as much, again.

    Attributes:
        durable_seq: May be set by an application whose store has much to do at each save. Gives the
            number up to which what came of a partition survives a crash anyway. Then keys up to
            there are forgotten without a save.
    """

    def __init__(
        self,
        consumer: Consumer,
        planner: RollbackPlanner,
        received_keys: ReceivedKeysFile,
        restarts: Iterable[PartitionId],
    ) -> None:
        super().__init__(consumer, planner)
        self._received_keys = received_keys
        self._restarts = deque(restarts)
        """Partitions that the application must start again, whatever the server says."""
        self._current_plan: RollbackPlan | None = None
        """The plan whose event the application is processing."""
        self.durable_seq: Callable[[PartitionId], SeqNo] | None = None

    async def __anext__(self) -> Event | Undone:
        """The next event; the one before is processed. See `Consumer.__anext__`.

        Raises:
            OSError: The received keys cannot be written.
        """
        await self._acknowledge()
        if self._restarts:
            partition, zero = self._restarts.popleft(), SeqNo(0)
            event = Undone(partition, zero, zero, zero, ABOVE_POSITION, {})
            self._current_plan = RollbackPlan(event, versions=None)
            return event
        return await self._next_processed()

    async def _acknowledge(self) -> None:
        """Records what the application has processed."""
        if self._current_plan is not None:
            event, versions = self._current_plan.event, self._current_plan.versions
            await self._received_keys.confirm_rollback(event.partition, versions)
            self._current_plan = None
        if self._received_keys.keys.is_overfull and self._current_event is None:
            await self._forget_oldest_keys()
        # Also where no keys are forgotten: a few that change again and again fill the file, too.
        await self._received_keys.rewrite_if_due()

    async def _forget_oldest_keys(self) -> None:
        """Drops the oldest received keys. The next process must not begin below one of them."""
        keys_file = self._received_keys
        if self.durable_seq is None or not await keys_file.trim(
            self._droppable_seq_without_save, in_order=True
        ):
            await self._consumer.save()
            await keys_file.trim(self._droppable_seq)

    def _droppable_seq_without_save(self, partition: PartitionId) -> SeqNo:
        assert self.durable_seq is not None
        return min(self.durable_seq(partition), self._droppable_seq(partition))

    def _droppable_seq(self, partition: PartitionId) -> SeqNo:
        if not self._planner.is_compared(partition):
            return SeqNo(0)
        return self._consumer.position(partition).highest_received

    def flush_received_keys(self) -> None:
        """Records the received keys on disk, with one write. May be called in any thread, and
        blocks it. Needed only with `buffer_received_keys`.

        Raises:
            OSError: They cannot be written; call it again.
        """
        self._received_keys.flush()

    async def _keep_chunk(self, event: ChunkReceived, log: FailoverLog) -> None:
        chunk, current = event.chunk, log.current
        keys, seqs = chunk.keys(), cast("list[SeqNo]", chunk.seqs.tolist())
        if log.branch_of(SeqNo(chunk.start + 1)) == current:
            # Nearly always: to look for the branch of each row takes as long as the rest.
            branches: Iterable[HistoryId] = repeat(current, len(seqs))
        else:
            branches = map(log.history_with, seqs)
        await self._received_keys.receive(event.partition, zip(keys, seqs, branches, strict=True))

    async def _roll_back(self, plan: RollbackPlan) -> None:
        if plan.versions is None:
            # An application that is killed half-way has less than is recorded here. It must start
            # the partition again, whatever the server says then.
            await self._received_keys.raise_floor(plan.event.partition, SEQ_MAX)
        self._current_plan = plan

    async def barrier(self) -> BarrierReached:
        """Sends a barrier and waits until it comes back. See `Consumer.barrier`."""
        return await self._consumer.barrier()

    @property
    def resume_state(self) -> ResumeState:
        """A copy of the resume state as it is once the current event is processed. See
        `Consumer.resume_state`."""
        return self._consumer.resume_state if self._current_event is None else self.processed_state

    @property
    def processed_state(self) -> ResumeState:
        """A copy of the resume state without the current event. O(partitions)."""
        return self._consumer.processed_state

    def position(self, partition: PartitionId) -> Position:
        """One partition's position in `resume_state`, without a copy of the others."""
        if self._current_event is None:
            return self._consumer.position(partition)
        return self._consumer.processed_state.position(partition)

    async def save(self) -> None:
        """Acknowledges the current event and saves now, in the task that iterates; see
        `Consumer.save`. Does nothing after `__anext__` was cancelled with an event that the
        application has yet to see."""
        await self._acknowledge()
        if self._current_event is None:
            await self._consumer.save()


class _StoreBesideKeys:
    """A resume store beside received keys.

    It records the keys before the state that covers them. Otherwise a consumer that crashes would
    not know, at its next start, which keys it has to undo.

    Args:
        store: The store.
        received_keys: The keys.
        first_state: What to begin with: partitions that must start again are not in it. The store
            may still have them, if it keeps what the application has.
    """

    def __init__(
        self, store: ResumeStore, received_keys: ReceivedKeysFile, first_state: ResumeState
    ) -> None:
        self._store = store
        self._received_keys = received_keys
        self._first_state = first_state

    async def load(self) -> ResumeState:
        """What to begin with."""
        await trio.lowlevel.checkpoint()
        return self._first_state

    async def save(self, state: ResumeState) -> None:
        """Flushes the received keys, and saves the state.

        Raises:
            OSError: One of the two cannot be written.
        """
        await trio.to_thread.run_sync(self._received_keys.flush)
        await self._store.save(state)


def _partitions_to_restart(
    received_keys: ReceivedKeysFile, state: ResumeState
) -> list[PartitionId]:
    """The partitions that must start again: the received keys may begin above a resume state that
    is older than the last one saved, or was lost."""
    return sorted(
        partition
        for partition, floor in received_keys.keys.floors().items()
        if state.position(partition).highest_received < floor
    )


@asynccontextmanager
async def consume_with_rollback(
    target: str | Address,
    received_keys: str | os.PathLike[str],
    *,
    resume: Resume,
    received_keys_limits: ReceivedKeysLimits | None = None,
    buffer_received_keys: bool = False,
    partitions: Sequence[int] | None = None,
    start: Literal["beginning", "now"] = "beginning",
    end: End = None,
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
    save_limits: SaveLimits | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[RollbackConsumer]:
    """A consumer that undoes just what the server does not have, after a failover.

    The file `received_keys` records the keys received lately, as many as `received_keys_limits`
    say; a rollback below them starts at 0. It is created if it is missing. It belongs to `resume`
    as that belongs to the application's data: begin the file with a resume state that covers
    everything processed. An application that keeps the state itself must do so at every event.
    The other arguments are those of `consume`.

    By default each chunk's keys are written and synced before the application is given the chunk.
    An application that makes the effects of many events durable at once can save these writes:
    with `buffer_received_keys` it calls `flush_received_keys` itself, before each such commit.

    Raises:
        DamagedFileError: The file of received keys is damaged, or of another bucket.
        OSError: The received keys or the resume file cannot be read or written.
        UprError: See `consume`.
    """
    address = (Address.parse(target) if isinstance(target, str) else target).with_bucket()
    state, store = await load_resume_state(resume, address.bucket, b"")
    keys_file = await trio.to_thread.run_sync(
        partial(
            ReceivedKeysFile,
            received_keys,
            address.bucket,
            received_keys_limits,
            is_buffered=buffer_received_keys,
            # A new file knows no key that was received before.
            first_floors={
                partition: position.highest_received
                for partition, position in state.positions.items()
                if position.highest_received
            },
        )
    )
    try:
        restarts = _partitions_to_restart(keys_file, state)
        for partition in restarts:
            state.positions.pop(partition, None)
        if store is not None:
            store = _StoreBesideKeys(store, keys_file, state)
            if restarts:
                # If this process ends before the application has seen `Undone`, the next one finds
                # the same from the received keys.
                await store.save(state)
        async with consume_with_planner(
            address,
            keys_file,
            TrioOptions(**options, retry_timeout_s=retry_timeout_s),
            partitions=partitions,
            start=start,
            resume=state if store is None else store,
            end=end,
            save_limits=save_limits,
        ) as (consumer, planner):
            yield RollbackConsumer(consumer, planner, keys_file, restarts)
    finally:
        keys_file.close()
