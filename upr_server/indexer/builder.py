"""Building new indexes beside the running ones.

New indexes have a stream of their own, from the beginning. It first reads what there is (the
*backfill*), and then catches up with the running indexes' stream. Each partition *joins* the
running stream by itself, in these steps:

1. A partition may join when no snapshot of it is half applied here, the running stream is in the
   same history, and this stream is not behind it. From then on the running stream's batches go to
   the new indexes too, which skip what they have.
2. Until the running stream has come to where this one was, its join is *provisional*. If the
   history changes in that time, this stream may have applied changes that are lost, and the running
   stream's received keys do not list them. So the partition is built again.
3. After that the received keys cover everything that this stream received, so a rollback works for
   the new indexes as for the running ones.

Under load a snapshot may always be half applied. So the running stream pauses now and then, for a
quarter of a second at most, until the new indexes have caught up.

When every partition has joined, the index is marked complete on disk. After a crash before that,
the build goes on from the index's own marks. It has no received keys then, so a partition that must
be rolled back begins at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import attrs
import trio

from upr_protocol.client import (
    Address,
    ChunkReceived,
    Consumer,
    Event,
    RolledBack,
    SnapshotEnd,
    StreamAccepted,
    consume,
)
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId
from upr_server.indexer.index_batch import BatchAssembler, IndexBatch
from upr_server.indexer.mark import NO_MARK, Mark
from upr_server.indexer.pipeline import BlockingRunner, Pipeline, PipelineMember
from upr_server.indexer.pool import BUILD_SHARE, MemoryPool
from upr_server.indexer.stream import (
    IndexerStream,
    batch_bytes,
    common_state,
    pause_before_retry_s,
    superfluous_partitions,
)

PAUSE_S: Final = 0.25
"""The longest pause of the running indexes' stream."""

PAUSE_INTERVAL_S: Final = 1.0
"""The time between two pauses."""

PAUSE_MUTATIONS: Final = 20_000
"""The stream pauses only if the new indexes are at most so far behind: they catch up with so much
in that time."""

JOIN_INTERVAL_S: Final = 0.02
"""The shortest time between two looks at which partitions may join: a look at 1,024 of them takes
2 ms, and either stream may apply something a thousand times a second."""


class IndexBuilder:
    """Builds some indexes.

    Args:
        address: The bucket.
        pool: The common memory pool.
        work: Where indexes are written.
        members: The indexes, as members of `pipeline`. The running pipeline gets a member for the
            file of each, which takes the partitions that have joined.
        stream: The running indexes' stream.
        running_pipeline: Its pipeline.
        queues: How many queues its own pipeline has.

    Attributes:
        pipeline: Applies what this stream reads.
        members: The indexes that are still wanted.
        trouble: Why nothing could be read when that was tried last; empty if something was.
    """

    def __init__(
        self,
        address: Address,
        pool: MemoryPool,
        work: BlockingRunner,
        members: Iterable[PipelineMember],
        stream: IndexerStream,
        running_pipeline: Pipeline,
        queues: int,
    ) -> None:
        self._address = address
        self._pool = pool
        self._stream = stream
        self._running_pipeline = running_pipeline
        self.members = list(members)
        self._running_members = [attrs.evolve(member, partitions=set()) for member in self.members]
        self.pipeline = Pipeline(pool, work, self.members, queues, running_pipeline.disk)
        self._assembler = BatchAssembler(pool, self.pipeline.put, batch_bytes(pool))
        self._joined_partitions: set[PartitionId] = set()
        self._provisional_marks: dict[PartitionId, Mark] = {}
        self._partitions: list[PartitionId] = []
        self._scope = trio.CancelScope()
        self._stream_moved = Notifier()
        self.trouble = ""

    async def run(self) -> None:
        """Builds until every partition has joined.

        Raises:
            IndexFileError: An index cannot be written.
            UprError: The server refused.
        """
        self._running_pipeline.members += self._running_members
        self._stream.listeners.append(self._on_batch)
        is_complete = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.pipeline.run)
                await self._prepare()
                nursery.start_soon(self._keep_joining)
                nursery.start_soon(self._keep_pausing)
                await self._read_until_joined()
                nursery.cancel_scope.cancel()
            # The received keys of what these indexes have are on disk once the running ones have
            # it, too. A crash before that would leave nothing that knows what to roll back.
            if not await self._running_pipeline.drain():
                return
            for member in list(self.members):
                if member in self.members:
                    await self.pipeline.write(member.file.mark_built)
            is_complete = True
        finally:
            self._stream.listeners.remove(self._on_batch)
            self._assembler.drop_all()
            self.pipeline.abandon()
            self._provisional_marks.clear()
            built_files = [member.file for member in self.members] if is_complete else []
            for running_member in self._running_members:
                if running_member.file in built_files:
                    running_member.partitions = None
                elif running_member in self._running_pipeline.members:
                    self._running_pipeline.members.remove(running_member)

    def remove(self, member: PipelineMember) -> None:
        """Stops building an index. After the round under way nothing more is written to it."""
        self.members.remove(member)
        self.pipeline.members.remove(member)
        for running_member in self._running_members:
            if (
                running_member.file is member.file
                and running_member in self._running_pipeline.members
            ):
                self._running_pipeline.members.remove(running_member)

    async def _prepare(self) -> None:
        """Learns the partitions. Builds a partition again if a crash has left the indexes in
        different histories of it, and clears those that there are no more."""
        self._partitions = await self._stream.partitions()
        for partition in superfluous_partitions(self.members, self._partitions):
            self._begin_again(partition)
        for partition in self._partitions:
            histories = {mark.history_id for mark in self._marks(partition)}
            if len(histories) > 1:
                self._begin_again(partition)
        await self.pipeline.drain()

    def _marks(self, partition: PartitionId) -> Iterator[Mark]:
        """How far each index is in a partition. One that was left out stays where it is, so the
        others do not wait for it."""
        return (member.file.mark(partition) for member in self.members if not member.file.failure)

    # The stream.

    async def _read_until_joined(self) -> None:
        while self._unjoined_partitions():
            with trio.CancelScope() as self._scope:
                try:
                    await self._read()
                except UprError as error:
                    pause_s, self.trouble = pause_before_retry_s(error), str(error)
                    await trio.sleep(pause_s)

    def _unjoined_partitions(self) -> list[PartitionId]:
        """The partitions that have not joined, or have joined provisionally."""
        return [
            partition
            for partition in self._partitions
            if partition not in self._joined_partitions or partition in self._provisional_marks
        ]

    async def _read(self) -> None:
        # What came over an earlier connection and is not a batch yet comes again.
        self._assembler.drop_all()
        await self.pipeline.drain()
        partitions = sorted(set(self._partitions) - self._joined_partitions)
        if not partitions:
            # All have joined, and some provisionally: the running stream has yet to reach them.
            await trio.sleep_forever()
        async with consume(
            self._address,
            partitions=partitions,
            resume=common_state(self._address.bucket, self.members),
            with_logs=True,
            retry_timeout_s=math.inf,
            identity="upr-indexer-build",
        ) as consumer:
            async for event in consumer:
                # `_check_provisional` may have begun a partition again and cancelled this scope
                # while the event was received. Applied now, it would follow on nothing.
                await trio.lowlevel.checkpoint_if_cancelled()
                # A stream may be accepted before another is refused.
                if not isinstance(event, StreamAccepted):
                    self.trouble = ""
                self._handle(consumer, event)
                if not self._pool.has_room(BUILD_SHARE):
                    self._assembler.flush_all()
                    await self._pool.wait_for_room(BUILD_SHARE)
                await self.pipeline.wait_until(lambda: not self.pipeline.is_full)

    def _handle(self, consumer: Consumer, event: Event) -> None:
        partition = getattr(event, "partition", None)
        if partition is None or partition in self._joined_partitions:
            return
        mark = Mark(consumer.position(partition))
        if isinstance(event, ChunkReceived):
            self._assembler.add_chunk(partition, event.chunk, mark)
        elif isinstance(event, StreamAccepted) and self._has_lost(mark, event):
            self._begin_again(partition)
            self._scope.cancel()
        elif isinstance(event, SnapshotEnd | StreamAccepted):
            self._assembler.complete_snapshot(partition, mark)
        elif isinstance(event, RolledBack):
            self._begin_again(partition)

    def _has_lost(self, stream_mark: Mark, event: StreamAccepted) -> bool:
        """Whether an index that a stop or a crash has left ahead of the stream has changes that the
        server has lost meanwhile: the server knows of the stream only, which need not go back."""
        # A stream that begins at 0 does so because the partition is begun again already.
        return stream_mark.seq > 0 and any(
            mark.seq > stream_mark.seq
            and not event.log.contains(mark.position.log.history_with(mark.seq), mark.seq)
            for mark in self._marks(event.partition)
        )

    def _begin_again(self, partition: PartitionId) -> None:
        self._assembler.drop_partition(partition)
        self._assembler.put_batch(
            IndexBatch(partition, NO_MARK, clears_one_of=self._stream.partition_count)
        )

    # Joining.

    async def _keep_joining(self) -> None:
        while True:
            self._join()
            if not self._unjoined_partitions():
                self._scope.cancel()
            with trio.move_on_after(PAUSE_INTERVAL_S):
                # Either stream may have moved.
                async with trio.open_nursery() as nursery:
                    for notifier in (self.pipeline.applied, self._stream_moved):
                        nursery.start_soon(_wait_and_cancel, notifier, nursery.cancel_scope)
            await trio.sleep(JOIN_INTERVAL_S)

    def _join(self) -> None:
        if self._stream.is_rolling_back:
            return
        reached_marks = self._stream.reached_marks()
        for partition in list(self._provisional_marks):
            self._check_provisional(partition, reached_marks.get(partition, NO_MARK))
        queued_partitions = self.pipeline.queued_partitions()
        for partition in self._partitions:
            if partition in self._joined_partitions or partition in queued_partitions:
                continue
            running_mark = reached_marks.get(partition, NO_MARK)
            # Mostly the first index says no. To look at all takes 6 ms, where there are 64.
            if all(_may_join(mark, running_mark) for mark in self._marks(partition)):
                self._joined_partitions.add(partition)
                self._assembler.drop_partition(partition)
                furthest_mark = max(
                    self._marks(partition), key=lambda mark: mark.seq, default=NO_MARK
                )
                if furthest_mark.seq > running_mark.seq:
                    self._provisional_marks[partition] = furthest_mark
                for running_member in self._running_members:
                    assert running_member.partitions is not None
                    running_member.partitions.add(partition)

    def _on_batch(self, batch: IndexBatch) -> None:
        """Takes notice of a batch that the running stream has put."""
        self._stream_moved.notify()
        if batch.partition in self._provisional_marks:
            self._check_provisional(batch.partition, batch.mark, is_rollback=batch.is_rollback)

    def _check_provisional(
        self, partition: PartitionId, running_mark: Mark, *, is_rollback: bool = False
    ) -> None:
        """Decides about a partition that has joined provisionally, now that the running stream is
        at `running`: it is begun again, has joined for good, or stays provisional."""
        provisional_mark = self._provisional_marks[partition]
        if is_rollback or running_mark.history_id != provisional_mark.history_id:
            del self._provisional_marks[partition]
            self._joined_partitions.discard(partition)
            for running_member in self._running_members:
                assert running_member.partitions is not None
                running_member.partitions.discard(partition)
            self._begin_again(partition)
            self._scope.cancel()
        elif running_mark.seq >= provisional_mark.seq:
            del self._provisional_marks[partition]

    async def _keep_pausing(self) -> None:
        while True:
            await trio.sleep(PAUSE_INTERVAL_S)
            if not 0 < self.seqs_behind() <= PAUSE_MUTATIONS:
                continue
            self._stream.pause()
            try:
                with trio.move_on_after(PAUSE_S):
                    await self.pipeline.wait_until(lambda: self.has_joined)
            finally:
                self._stream.resume()

    @property
    def has_joined(self) -> bool:
        """Whether every partition has joined, perhaps provisionally."""
        return len(self._joined_partitions) == len(self._partitions)

    def seqs_behind(self) -> int:
        """How many sequence numbers the new indexes are behind the running ones, in partitions that
        have not joined: the one that each round comes to last. Each partition counts 1 at least.
        O(partitions)."""
        marks: Mapping[PartitionId, Mark] = {}
        for member in self.members:
            if not member.file.failure:
                marks = member.file.marks
        reached_marks = self._stream.reached_marks()
        return sum(
            max(1, reached_marks.get(partition, NO_MARK).seq - marks.get(partition, NO_MARK).seq)
            for partition in self._partitions
            if partition not in self._joined_partitions
        )


def _may_join(mark: Mark, running_mark: Mark) -> bool:
    """Whether a partition that is at `mark` may follow a stream that is at `running`."""
    return (
        mark.seq >= running_mark.seq
        and mark.is_settled
        and mark.history_id == running_mark.history_id
    )


async def _wait_and_cancel(notifier: Notifier, scope: trio.CancelScope) -> None:
    await notifier.wait()
    scope.cancel()
