"""From a stream to the indexes: queues by partition, and the task that applies them.

Each batch goes into one of a few queues, by its partition (`batch_queues.py`). A round takes some
of them. A worker thread turns their documents into entries, each decoded once for all indexes,
and brings one index after another up to date, with one commit each. Over all pipelines one commit
is made at a time, as there is one interpreter. The pipelines take turns after each: where many
costly indexes are built, the running ones wait for one of them, and not for all.

Commits cost more than entries when they are small. So a round waits until enough has gathered for
it, but not for long, and not when somebody waits for the round.

A scan waits for one index. So that index may be ahead of the others by some rounds: it takes them
as soon as they are needed, and the others take them later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Final, Protocol, TypeVar

import attrs
import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.batch_queues import ROUND_BYTES, BatchQueues
from upr_server.indexer.disk import Disk
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.index_file import EntrySource, IndexFile
from upr_server.indexer.pool import MemoryPool
from upr_server.runtime import in_background

T = TypeVar("T")

GATHER_S: Final = 0.05
"""The longest time that batches wait for a round to be worth its commits."""

AHEAD_ROUNDS: Final = 3
"""How far an index that a scan waits for may be ahead of the others. They wait for so much more,
and the batches stay in memory until all have them. Not a number of bytes: where each round is
small, thousands of them would come to 12 MiB, and the others would wait for seconds."""


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
        return await trio.to_thread.run_sync(_called_in_background, function, limiter=limiter)

    return work


def _called_in_background(function: Callable[[], T]) -> T:
    """What a function gives, called so that scans and other processes have their turns first."""
    with in_background():
        return function()


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


@attrs.define(eq=False)
class _Round:
    """A round under way.

    Attributes:
        batches: Its batches.
        changes: Their changes.
        members: The indexes that have yet to take them.
    """

    batches: Sequence[IndexBatch]
    changes: RoundChanges
    members: list[PipelineMember]

    def member_of(self, file: IndexFile) -> PipelineMember | None:
        """The member of an index; None if it has the changes. O(members)."""
        return next((member for member in self.members if member.file is file), None)


class Pipeline:
    """The queues of one stream.

    Args:
        pool: The pool from which the batches' bytes were reserved. They are released when a batch
            was applied.
        work: Where indexes are written.
        members: The indexes.
        queues: How many queues.
        disk: The disk of the indexes.

    Attributes:
        disk: The disk of the indexes. What finds no room there is tried again and again.
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
        disk: Disk | None = None,
    ) -> None:
        self._pool = pool
        self._work = work
        self.disk = disk or Disk()
        self.members = list(members)
        self._queues = BatchQueues(queues)
        self._required: Counter[PartitionId] = Counter()
        """How many tasks wait for changes of a partition."""
        self._awaited: Counter[IndexFile] = Counter()
        """How many tasks wait for an index."""
        self._targets: list[tuple[int, IndexFile]] = []
        """The calls of `wait_until_applied`, the oldest first."""
        self._rounds: deque[_Round] = deque()
        """The rounds under way, the oldest first."""
        self._applied_seqs: dict[PartitionId, SeqNo] = {}
        """How far the indexes are in each partition of which they were given something."""
        self._durable_seqs: dict[PartitionId, SeqNo] = {}
        """How far they were one round before."""
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

    def queued_partitions(self) -> set[PartitionId]:
        """The partitions of which batches are not applied yet. O(partitions + batches)."""
        return self._queues.partitions()

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
        pipeline, or to all of them. O(members)."""
        return self._queues.has_applied(put_count, 0 if file is None else self._rounds_of(file))

    def _rounds_of(self, file: IndexFile) -> int:
        """How many of the rounds under way an index has."""
        return sum(
            1 for _ in takewhile(lambda round_: round_.member_of(file) is None, self._rounds)
        )

    def round_count(self, file: IndexFile) -> int:
        """How many rounds were applied to an index. O(members)."""
        return self.rounds + self._rounds_of(file)

    def durable_seq(self, partition: PartitionId) -> SeqNo:
        """Up to which number all indexes have a partition even after a crash of the machine, which
        may take the last commit of each index back. 0 if that is not known. O(1)."""
        durable_seq = self._durable_seqs.get(partition, SeqNo(0))
        # A rollback may have taken them back meanwhile.
        return min(durable_seq, self._applied_seqs.get(partition, SeqNo(0)))

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

    async def wait_until_applied(self, put_count: int, file: IndexFile) -> None:
        """Waits until an index has the first `put_count` batches that were put. Meanwhile it comes
        before the others, by `AHEAD_ROUNDS` at most."""
        target = put_count, file
        self._targets.append(target)
        try:
            await self.wait_until(lambda: self.has_applied(put_count, file), file=file)
        finally:
            self._targets.remove(target)

    async def write(self, function: Callable[[], T]) -> T:
        """Calls a function that writes an index, where indexes are written: again and again while
        the disk is full. Between two calls others have their turn, as one that makes room."""
        return await self.disk.retry(lambda: self._work(function))

    async def sync(self) -> None:
        """Makes what was applied survive a crash of the machine."""
        for member in list(self.members):
            await self.write(member.file.sync)

    async def run(self) -> None:
        """Applies what comes, for ever. Cancelled, it does not commit to the index that it writes
        to; the stream brings that again.

        Raises:
            IndexFileError: An index cannot be written.
        """
        try:
            while True:
                if not self._rounds:
                    await self._arrived.wait_until(lambda: len(self._queues) > 0)
                    with trio.move_on_after(GATHER_S):
                        await self._arrived.wait_until(self._is_round_due)
                    await self._begin_round()
                elif self._is_round_missing():
                    await self._begin_round()
                await self._apply_to_one()
                while self._rounds and not self._rounds[0].members:
                    self._end_round()
        finally:
            self.is_stopped = True
            self.applied.notify()

    def _is_round_due(self) -> bool:
        # A stream waits for the pool, too, when half of it is in use; for a full queue it waits
        # in `wait_until`.
        is_worthwhile = self._queues.queued_bytes >= min(ROUND_BYTES, self._pool.nbytes // 4)
        return is_worthwhile or self._waiting_tasks > 0

    def _next_target(self) -> IndexFile | None:
        """The index that a scan waits for first, of those that lack what it waits for."""
        return next(
            (file for put_count, file in self._targets if not self.has_applied(put_count, file)),
            None,
        )

    def _is_round_missing(self) -> bool:
        """Whether a scan waits for batches that are in no round yet, and its index may go ahead."""
        file = self._next_target()
        return (
            file is not None
            and self._rounds_of(file) == len(self._rounds)
            and len(self._rounds) < AHEAD_ROUNDS
            and self._queues.waiting_count > 0
            and self._queues.round_bytes < self._pool.nbytes // 4
        )

    async def _begin_round(self) -> None:
        batches = self._queues.begin_round(self._required, by_age=self._waiting_tasks > 0)
        members = list(self.members)
        changes = await self.write(partial(self._changes, batches))
        self._rounds.append(_Round(batches, changes, members))

    def _changes(self, batches: Sequence[IndexBatch]) -> RoundChanges:
        self.before_round()
        return RoundChanges(batches)

    def _next_member(self) -> tuple[_Round, PipelineMember] | None:
        """The index that comes next, and its oldest round; None if all have all rounds."""
        file = self._next_target()
        if file is not None:
            for round_ in self._rounds:
                member = round_.member_of(file)
                if member is not None:
                    return round_, member
        round_ = self._rounds[0]
        # Those that scans wait for come first.
        awaited_members = (member for member in round_.members if member.file in self._awaited)
        member = next(awaited_members, None) or next(iter(round_.members), None)
        return None if member is None else (round_, member)

    async def _apply_to_one(self) -> None:
        """Brings one index as far as its oldest round."""
        item = self._next_member()
        if item is None:
            return
        round_, member = item
        changes = round_.changes.of(member.covers)
        changed = 0
        # An index that was left out stays as it is: it would cost the others 2 µs a document.
        if changes.batches and not member.file.failure:
            changed = await self.write(partial(member.file.apply_changes, changes, member.source))
        round_.members.remove(member)
        # A scan of this index need not wait for the others.
        self.applied.notify()
        if changed:
            member.on_change()

    def _end_round(self) -> None:
        self._queues.end_round()
        self._durable_seqs = self._applied_seqs.copy()
        for batch in self._rounds.popleft().batches:
            self._applied_seqs[batch.partition] = batch.mark.seq
            self._pool.release(batch.nbytes)
            self.mutations += sum(len(chunk) for chunk in batch.chunks)
        self.rounds += 1
        self.applied.notify()

    def abandon(self) -> None:
        """Releases what the queues hold; nothing of it will be applied."""
        self._rounds.clear()
        for batch in self._queues.clear():
            self._pool.release(batch.nbytes)
