"""From a stream to the indexes: queues by partition, and what applies them (seed 003).

A demultiplexer puts each piece into one of a few rings, by its partition, so that a partition's
pieces stay in order. In turns some of each ring become a batch; a worker thread turns its documents
into entries, each decoded once for all indexes, and brings index after index up to date, a commit
each. One batch at a time, over all pipelines: LMDB has one writer an index, and Python one
interpreter. The rings see to it that a busy partition does not make the others wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

import attrs
import trio

from upr_protocol.ids import PartitionId
from upr_server.indexer.bell import Bell
from upr_server.indexer.index_file import IndexFile, Source
from upr_server.indexer.piece import Piece
from upr_server.indexer.pool import Pool

T = TypeVar("T")

BATCH_BYTES: Final = 1024 * 1024
"""About what a batch takes: large enough to pay for its commit, small enough that the next in turn
does not wait for long."""

RING_PIECES_MAX: Final = 4096
"""A ring's length: pieces may be small, and each has its overhead."""


class Work(Protocol):
    """Does what blocks."""

    async def __call__(self, function: Callable[[], T]) -> T:
        """What `function` returns, called in a thread, one at a time. Cancelled, it ends first."""


def worker_thread() -> Work:
    """A worker thread."""
    limiter = trio.CapacityLimiter(1)

    async def work(function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, limiter=limiter)

    return work


@attrs.define(eq=False)
class Member:
    """An index that a pipeline brings up to date.

    Attributes:
        file: The index.
        source: Says what its entries are.
        partitions: Whose pieces are for it; None for all.
        on_change: Called when entries have changed.
    """

    file: IndexFile
    source: Source
    partitions: set[PartitionId] | None = None
    on_change: Callable[[], None] = lambda: None

    def takes(self, partition: PartitionId) -> bool:
        """Whether a partition's pieces are for it."""
        return self.partitions is None or partition in self.partitions


Ticket = tuple[int, ...]
"""How many pieces each ring had been given at some moment."""


class Pipeline:
    """See the module.

    Args:
        pool: Whose bytes the pieces hold. They are taken before `put`, and given back when a piece
            was applied.
        work: Where indexes are written.
        members: The indexes.
        rings: How many rings.

    Attributes:
        members: The indexes; may be changed at any time.
        applied: Rung when pieces were applied.
        mutations: Mutations applied.
        batches: Commits of each index.
    """

    def __init__(
        self, pool: Pool, work: Work, members: Sequence[Member] = (), rings: int = 8
    ) -> None:
        self._pool = pool
        self._work = work
        self.members = list(members)
        self._rings: list[deque[Piece]] = [deque() for _ in range(rings)]
        self._given = [0] * rings
        self._done = [0] * rings
        self._queued: Counter[PartitionId] = Counter()
        self._arrived = Bell()
        self.applied = Bell()
        self.is_stopped = False
        self.mutations = self.batches = 0

    def put(self, piece: Piece) -> None:
        """Puts a piece into its partition's ring."""
        number = piece.partition % len(self._rings)
        self._rings[number].append(piece)
        self._given[number] += 1
        self._queued[piece.partition] += 1
        self._arrived.ring()

    @property
    def is_full(self) -> bool:
        """Whether a ring has no room."""
        return any(len(ring) >= RING_PIECES_MAX for ring in self._rings)

    def is_queued(self, partition: PartitionId) -> bool:
        """Whether there are pieces of a partition that are not applied yet."""
        return self._queued[partition] > 0

    @property
    def length(self) -> int:
        """How many pieces are not applied yet."""
        return sum(self._given) - sum(self._done)

    def ticket(self) -> Ticket:
        """Stands for all that was put so far."""
        return tuple(self._given)

    def has_applied(self, ticket: Ticket) -> bool:
        """Whether everything was applied that `ticket` stands for."""
        return all(done >= given for done, given in zip(self._done, ticket, strict=True))

    async def drain(self) -> bool:
        """Waits until all that was put so far was applied; False when it never will be."""
        ticket = self.ticket()
        await self.applied.until(lambda: self.is_stopped or self.has_applied(ticket))
        return self.has_applied(ticket)

    async def sync(self) -> None:
        """What was applied survives a crash of the machine."""
        for member in list(self.members):
            await self._work(member.file.sync)

    async def run(self) -> None:
        """Applies what comes, for ever.

        Raises:
            IndexFileError: An index cannot be written.
        """
        try:
            while True:
                await self._arrived.until(lambda: any(self._rings))
                batch = self._next_batch()
                members = list(self.members)
                changed = await self._work(partial(_apply, batch, members))
                self._finish(batch)
                for member in changed:
                    member.on_change()
        finally:
            self.is_stopped = True
            self.applied.ring()

    def _next_batch(self) -> list[Piece]:
        batch: list[Piece] = []
        nbytes = 0
        # A ring's front stays there until it was applied, so that `_finish` finds it.
        positions = [0] * len(self._rings)
        found = True
        while found and nbytes < BATCH_BYTES:
            found = False
            for number, ring in enumerate(self._rings):
                if positions[number] < len(ring) and nbytes < BATCH_BYTES:
                    piece = ring[positions[number]]
                    positions[number] += 1
                    batch.append(piece)
                    nbytes += piece.nbytes
                    found = True
        return batch

    def _finish(self, batch: Sequence[Piece]) -> None:
        for piece in batch:
            number = piece.partition % len(self._rings)
            assert self._rings[number].popleft() is piece
            self._done[number] += 1
            self._queued[piece.partition] -= 1
            self._pool.give_back(piece.nbytes)
            self.mutations += sum(len(chunk) for chunk in piece.chunks)
        self.batches += 1
        self.applied.ring()

    def abandon(self) -> None:
        """Gives back what the queues hold; nothing of it will be applied."""
        for ring in self._rings:
            for piece in ring:
                self._pool.give_back(piece.nbytes)
            ring.clear()


def _apply(batch: Sequence[Piece], members: Sequence[Member]) -> list[Member]:
    """Brings each member up to date; gives those whose entries have changed."""
    rows = [(piece, list(piece.rows())) for piece in batch]
    changed = []
    for member in members:
        mine = [(piece, some) for piece, some in rows if member.takes(piece.partition)]
        if mine and member.file.apply(mine, member.source):
            changed.append(member)
    return changed
