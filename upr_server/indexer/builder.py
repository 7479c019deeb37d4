"""Building new indexes beside those that run.

New indexes have a stream of their own, from the beginning: the *backfill*, and behind it the
*catch-up* with the running indexes' stream. Partition by partition they go over to that one:

- Here a partition is at n, with nothing of it on its way; there it is at m, in the same history,
  and n is not below m. Then what comes there goes to the new indexes, too; they skip what they
  have.
- Until m has reached n the partition is *pending*. If the history changes meanwhile, what was read
  here above m may be lost, and the ring buffer does not know of it: the partition is built again.
  Afterwards the ring buffer knows every key that was received here above its floor: at n all that
  changed was received there, too, under the same number or a higher one.
- Under load there may always be something on its way. So the running indexes' stream is held, for a
  quarter of a second at most, now and then, until the rest has caught up with it.

When every partition has gone over, the index says so on disk. Until then a crash begins where its
own marks are; it has no ring buffer, so a partition that must go back begins at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.client import (
    Address,
    ChunkReceived,
    Consumer,
    Event,
    RolledBack,
    SnapshotEnd,
    StreamAccepted,
    connect,
    consume,
)
from upr_protocol.errors import BrokenError
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.bell import Bell
from upr_server.indexer.mark import NO_MARK, Mark
from upr_server.indexer.piece import Assembler, Piece
from upr_server.indexer.pipeline import Member, Pipeline, Work
from upr_server.indexer.pool import BUILD_SHARE, Pool
from upr_server.indexer.stream import RETRY_S, Stream, common_state, piece_bytes

log = structlog.get_logger(__name__)

HOLD_S: Final = 0.25
"""The longest that the running indexes wait for one that is being built."""

HOLD_INTERVAL_S: Final = 1.0
"""How often they do."""

JOIN_INTERVAL_S: Final = 0.02
"""How soon it is looked again which partitions may go over: a look at 1,024 takes 2 ms, and on
either side something may be applied a thousand times a second."""

HOLD_MUTATIONS: Final = 20_000
"""They wait for no more than this: so much is caught up with in the time."""


class Builder:
    """Builds some indexes; see the module.

    Args:
        address: The bucket.
        pool: The common memory pool.
        work: Where indexes are written.
        members: The indexes, for `pipeline`'s members; those of the running stream are their twins.
        stream: The running indexes' stream.
        running: Its pipeline.
        rings: Rings of its own pipeline.

    Attributes:
        pipeline: What applies what is read here.
        members: The indexes that are still wanted.
    """

    def __init__(
        self,
        address: Address,
        pool: Pool,
        work: Work,
        members: Iterable[Member],
        stream: Stream,
        running: Pipeline,
        rings: int,
    ) -> None:
        self._address = address
        self._pool = pool
        self._work = work
        self._stream = stream
        self._running = running
        self.members = list(members)
        self._twins = [attrs.evolve(member, partitions=set()) for member in self.members]
        self.pipeline = Pipeline(pool, work, self.members, rings)
        self._assembler = Assembler(pool, self.pipeline.put, piece_bytes(pool))
        self._joined: set[PartitionId] = set()
        self._pending: dict[PartitionId, Mark] = {}
        self._partition_count = 0
        self._scope = trio.CancelScope()
        self._moved = Bell()

    async def run(self) -> None:
        """Builds, until every partition has gone over.

        Raises:
            IndexFileError: An index cannot be written.
            UprError: The server refused.
        """
        self._running.members += self._twins
        done = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.pipeline.run)
                await self._prepare()
                nursery.start_soon(self._keep_joining)
                nursery.start_soon(self._keep_holding)
                await self._read_until_joined()
                nursery.cancel_scope.cancel()
            for member in list(self.members):
                if member in self.members:
                    await self._work(member.file.join)
            done = True
        finally:
            self._assembler.drop_all()
            self.pipeline.abandon()
            self._pending.clear()
            wanted = [member.file for member in self.members] if done else []
            for twin in self._twins:
                if twin.file in wanted:
                    twin.partitions = None
                elif twin in self._running.members:
                    self._running.members.remove(twin)

    def leave(self, member: Member) -> None:
        """An index is not wanted any more. Nothing is written to it once a batch is done."""
        self.members.remove(member)
        self.pipeline.members.remove(member)
        for twin in self._twins:
            if twin.file is member.file and twin in self._running.members:
                self._running.members.remove(twin)

    async def _prepare(self) -> None:
        """What a crash has left in different histories is built again."""
        while not self._partition_count:
            try:
                async with connect(self._address, identity="upr-indexer") as client:
                    self._partition_count = client.partition_count
            except BrokenError:
                await trio.sleep(RETRY_S)
        for partition in map(PartitionId, range(self._partition_count)):
            histories = {member.file.mark(partition).history_id for member in self.members}
            if len(histories) > 1:
                self._forget(partition)
        await self.pipeline.drain()

    # The stream.

    async def _read_until_joined(self) -> None:
        while self._left():
            with trio.CancelScope() as self._scope:
                try:
                    await self._read()
                except BrokenError as error:
                    log.warning("the server cannot be reached", error=str(error))
                    await trio.sleep(RETRY_S)

    def _left(self) -> list[PartitionId]:
        """Partitions that have not gone over."""
        return [
            partition
            for partition in map(PartitionId, range(self._partition_count))
            if partition not in self._joined or partition in self._pending
        ]

    async def _read(self) -> None:
        # What came over an earlier connection and is no piece yet comes again.
        self._assembler.drop_all()
        await self.pipeline.drain()
        wanted = sorted(set(range(self._partition_count)) - self._joined)
        if not wanted:
            # The running indexes' stream has yet to reach what was read here.
            await trio.sleep_forever()
        async with consume(
            self._address,
            partitions=wanted,
            resume=common_state(self._address.bucket, self.members),
            with_logs=True,
            retry_timeout_s=math.inf,
            identity="upr-indexer-build",
        ) as consumer:
            async for event in consumer:
                # A partition that has just been begun again would go on behind this event, without
                # what was before it. `_look` cancels this, but the event is in hand already.
                await trio.lowlevel.checkpoint_if_cancelled()
                self._take(consumer, event)
                if not self._pool.has_room(BUILD_SHARE):
                    self._assembler.flush_all()
                    await self._pool.room(BUILD_SHARE)
                await self.pipeline.applied.until(lambda: not self.pipeline.is_full)

    def _take(self, consumer: Consumer, event: Event) -> None:
        partition = getattr(event, "partition", None)
        if partition is None or partition in self._joined:
            return
        mark = Mark(consumer.resume_state.position(partition))
        if isinstance(event, ChunkReceived):
            self._assembler.chunk(partition, event.chunk, mark)
        elif isinstance(event, SnapshotEnd | StreamAccepted):
            self._assembler.move(partition, mark)
        elif isinstance(event, RolledBack):
            self._forget(partition)

    def _forget(self, partition: PartitionId) -> None:
        self._assembler.drop(partition)
        self._assembler.put(Piece(partition, NO_MARK, forgets=True))

    # Going over.

    async def _keep_joining(self) -> None:
        while True:
            self._join()
            if not self._left():
                self._scope.cancel()
            with trio.move_on_after(HOLD_INTERVAL_S):
                # Also where nothing comes any more on this side: the other may have moved.
                async with trio.open_nursery() as nursery:
                    for bell in (self.pipeline.applied, self._moved):
                        nursery.start_soon(_first, bell, nursery.cancel_scope)
            await trio.sleep(JOIN_INTERVAL_S)

    def _join(self) -> None:
        if self._stream.is_undoing:
            return
        reached = self._stream.reached()
        for partition in map(PartitionId, range(self._partition_count)):
            there = reached.get(partition, NO_MARK)
            if partition in self._pending:
                self._look(partition, there)
            if partition in self._joined or self.pipeline.is_queued(partition):
                continue
            marks = [member.file.mark(partition) for member in self.members]
            if all(_goes_over(mark, there) for mark in marks):
                self._joined.add(partition)
                self._assembler.drop(partition)
                furthest = max(marks, key=lambda mark: mark.seq, default=NO_MARK)
                if furthest.seq > there.seq:
                    self._pending[partition] = furthest
                for twin in self._twins:
                    assert twin.partitions is not None
                    twin.partitions.add(partition)

    def moved(self, piece: Piece) -> None:
        """The running indexes' stream has put a piece."""
        self._moved.ring()
        if piece.partition in self._pending:
            self._look(piece.partition, piece.mark, goes_back=piece.goes_back)

    def _look(self, partition: PartitionId, there: Mark, *, goes_back: bool = False) -> None:
        """What becomes of a partition that is pending, now that the other stream is at `there`."""
        pending = self._pending[partition]
        if goes_back or there.history_id != pending.history_id:
            del self._pending[partition]
            self._joined.discard(partition)
            for twin in self._twins:
                assert twin.partitions is not None
                twin.partitions.discard(partition)
            self._forget(partition)
            self._scope.cancel()
        elif there.seq >= pending.seq:
            del self._pending[partition]

    async def _keep_holding(self) -> None:
        while True:
            await trio.sleep(HOLD_INTERVAL_S)
            if not 0 < self.behind() <= HOLD_MUTATIONS:
                continue
            self._stream.hold()
            try:
                with trio.move_on_after(HOLD_S):
                    await self._moved_or_applied_until_even()
            finally:
                self._stream.release()

    async def _moved_or_applied_until_even(self) -> None:
        await self.pipeline.applied.until(lambda: not self.behind())

    def behind(self) -> int:
        """How many numbers it is behind the running indexes, in partitions that have not gone
        over; one at least for each of these."""
        total = 0
        reached = self._stream.reached()
        for number in range(self._partition_count):
            partition = PartitionId(number)
            if partition not in self._joined:
                here = min((m.file.mark(partition).seq for m in self.members), default=SeqNo(0))
                total += max(1, reached.get(partition, NO_MARK).seq - here)
        return total


def _goes_over(here: Mark, there: Mark) -> bool:
    """Whether a partition that is at `here` may follow a stream that is at `there`."""
    return here.seq >= there.seq and here.is_settled and here.history_id == there.history_id


async def _first(bell: Bell, scope: trio.CancelScope) -> None:
    await bell.wait()
    scope.cancel()
