"""From a stream to the indexes: queues by partition, and the task that applies them.

Each batch goes into one of a few queues, by its partition (`batch_queues.py`). A round takes some
of them. A worker thread turns their documents into entries, each decoded once for all indexes,
and brings one index after another up to date, with one commit each. Over all pipelines one commit
is made at a time, as there is one interpreter. The pipelines take turns after each: where many
costly indexes are built, the running ones wait for one of them, and not for all.

Commits cost more than entries when they are small. So a round waits until enough has gathered for
it, but not for long, and not when somebody waits for the round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

import attrs
import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.ids import PartitionId
from upr_server.indexer.batch_queues import ROUND_BYTES, BatchQueues
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.index_file import EntrySource, IndexFile
from upr_server.indexer.pool import MemoryPool

T = TypeVar("T")

GATHER_S: Final = 0.05
"""The longest time that batches wait for a round to be worth its commits."""


class BlockingRunner(Protocol):
    """Runs blocking functions."""

    async def __call__(self, function: Callable[[], T]) -> T:
        """Calls `function` in a thread, one at a time, and returns its result. On cancellation it
        waits for the function to end, which may call `check_cancelled`."""


def check_cancelled() -> None:
    """For a function that a `BlockingRunner` runs: raises `trio.Cancelled` if its caller is
    cancelled."""
    trio.from_thread.check_cancelled()


def worker_thread() -> BlockingRunner:
    """Runs functions in a worker thread."""
    limiter = trio.CapacityLimiter(1)

    async def work(function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, limiter=limiter)

    return work


@attrs.define(eq=False)
class PipelineMember:
    """An index that a pipeline brings up to date.

    Attributes:
        file: The index.
        source: Makes its entries.
        partitions: The partitions whose batches it takes; None for all.
        on_change: Called when entries have changed.
    """

    file: IndexFile
    source: EntrySource
    partitions: set[PartitionId] | None = None
    on_change: Callable[[], None] = lambda: None

    def covers(self, partition: PartitionId) -> bool:
        """Whether it takes a partition's batches."""
        return self.partitions is None or partition in self.partitions


class Pipeline:
    """The queues of one stream.

    Args:
        pool: The pool from which the batches' bytes were reserved. They are released when a batch
            was applied.
        work: Where indexes are written.
        members: The indexes.
        queues: How many queues.

    Attributes:
        members: The indexes; may be changed at any time.
        applied: Notified when batches were applied to an index, and when they were applied to all.
            `wait_until` waits for it, and hurries rounds.
        before_round: Called in the worker's thread before a round's batches are applied.
        is_stopped: Whether `run` has ended, so that nothing more will be applied.
        mutations: How many mutations were applied.
        rounds: How many rounds were applied: commits of each index.
    """

    def __init__(
        self,
        pool: MemoryPool,
        work: BlockingRunner,
        members: Sequence[PipelineMember] = (),
        queues: int = 8,
    ) -> None:
        self._pool = pool
        self._work = work
        self.members = list(members)
        self._queues = BatchQueues(queues)
        self._required: Counter[PartitionId] = Counter()
        """How many tasks wait for changes of a partition."""
        self._awaited: Counter[IndexFile] = Counter()
        """How many tasks wait for an index."""
        self._in_round: set[IndexFile] = set()
        """The indexes that have the changes of the round under way."""
        self._waiting_tasks = 0
        self._arrived = Notifier()
        self.applied = Notifier()
        self.before_round: Callable[[], None] = lambda: None
        self.is_stopped = False
        self.mutations = self.rounds = 0

    def put(self, batch: IndexBatch) -> None:
        """Puts a batch into its partition's queue."""
        self._queues.put(batch)
        self._arrived.notify()

    @property
    def is_full(self) -> bool:
        """Whether one of the queues has no room."""
        return self._queues.is_full

    def is_queued(self, partition: PartitionId) -> bool:
        """Whether batches of a partition are not applied yet."""
        return self._queues.has(partition)

    @property
    def queued_batch_count(self) -> int:
        """How many batches are not applied yet."""
        return len(self._queues)

    @property
    def put_count(self) -> int:
        """How many batches were put so far; see `has_applied`."""
        return self._queues.put_count

    def has_applied(self, put_count: int, file: IndexFile | None = None) -> bool:
        """Whether the first `put_count` batches that were put are applied: to an index of the
        pipeline, or to all of them. O(1)."""
        if file in self._in_round:
            return self._queues.has_applied_with_round(put_count)
        return self._queues.has_applied(put_count)

    async def drain(self) -> bool:
        """Waits until everything that was put so far is applied. Returns False when it never will
        be, as the pipeline has stopped."""
        put_count = self.put_count
        await self.wait_until(lambda: self.is_stopped or self.has_applied(put_count))
        return self.has_applied(put_count)

    async def wait_until(
        self,
        condition: Callable[[], bool],
        partitions: Collection[PartitionId] = (),
        file: IndexFile | None = None,
    ) -> None:
        """Waits until rounds have made `condition` true. They do not wait for more batches
        meanwhile.

        Args:
            condition: What must be true.
            partitions: The partitions whose batches can make it true; empty if any can.
            file: The index that it is about, which rounds bring up to date first; None if it is
                about all.
        """
        if condition():
            return
        self._waiting_tasks += 1
        self._required.update(partitions)
        files = [] if file is None else [file]
        self._awaited.update(files)
        self._arrived.notify()
        try:
            await self.applied.wait_until(condition)
        finally:
            self._waiting_tasks -= 1
            self._required.subtract(partitions)
            self._required = +self._required
            self._awaited.subtract(files)
            self._awaited = +self._awaited

    async def sync(self) -> None:
        """Makes what was applied survive a crash of the machine."""
        for member in list(self.members):
            await self._work(member.file.sync)

    async def run(self) -> None:
        """Applies what comes, for ever. Cancelled, it does not commit to the index that it writes
        to; the stream brings that again.

        Raises:
            IndexFileError: An index cannot be written.
        """
        try:
            while True:
                await self._arrived.wait_until(lambda: len(self._queues) > 0)
                with trio.move_on_after(GATHER_S):
                    await self._arrived.wait_until(self._is_round_due)
                batches = self._queues.begin_round(self._required, by_age=self._waiting_tasks > 0)
                changed = await self._apply(batches)
                self._finish(batches)
                for member in changed:
                    member.on_change()
        finally:
            self.is_stopped = True
            self.applied.notify()

    def _is_round_due(self) -> bool:
        # A stream waits for the pool, too, when half of it is in use; for a full queue it waits
        # in `wait_until`.
        is_worthwhile = self._queues.queued_bytes >= min(ROUND_BYTES, self._pool.nbytes // 4)
        return is_worthwhile or self._waiting_tasks > 0

    async def _apply(self, batches: Sequence[IndexBatch]) -> list[PipelineMember]:
        """Brings each member up to date. Returns those whose entries have changed."""
        waiting_members = list(self.members)
        changes = await self._work(partial(self._changes, batches))
        changed = []
        while waiting_members:
            # Those that scans wait for come first.
            member = next(
                (member for member in waiting_members if member.file in self._awaited),
                waiting_members[0],
            )
            waiting_members.remove(member)
            own = changes.of(member.covers)
            # An index that was left out stays as it is: it would cost the others 2 µs a document.
            if own.batches and not member.file.failure:
                apply = partial(member.file.apply_changes, own, member.source)
                if await self._work(apply):
                    changed.append(member)
            # A scan of this index need not wait for the others.
            self._in_round.add(member.file)
            self.applied.notify()
        return changed

    def _changes(self, batches: Sequence[IndexBatch]) -> RoundChanges:
        self.before_round()
        return RoundChanges(batches)

    def _finish(self, batches: Sequence[IndexBatch]) -> None:
        self._queues.end_round()
        self._in_round.clear()
        for batch in batches:
            self._pool.release(batch.nbytes)
            self.mutations += sum(len(chunk) for chunk in batch.chunks)
        self.rounds += 1
        self.applied.notify()

    def abandon(self) -> None:
        """Releases what the queues hold; nothing of it will be applied."""
        for batch in self._queues.clear():
            self._pool.release(batch.nbytes)
