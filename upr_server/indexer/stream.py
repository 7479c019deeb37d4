"""The one stream of the running indexes of a slice."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import structlog
import trio

from upr_protocol.client import (
    Address,
    ChunkReceived,
    Event,
    Item,
    ReceivedKeysLimits,
    ResumeState,
    RollbackConsumer,
    SaveLimits,
    SnapshotEnd,
    StreamEnded,
    Undone,
    connect,
    consume_with_rollback,
)
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.ids import PartitionId
from upr_server.indexer.disk import is_full
from upr_server.indexer.index_batch import BatchAssembler, IndexBatch
from upr_server.indexer.mark import NO_MARK, Mark
from upr_server.indexer.pipeline import Pipeline, PipelineMember
from upr_server.indexer.pool import STREAM_SHARE, MemoryPool
from upr_server.indexer.slices import SliceId

log = structlog.get_logger(__name__)

STREAM_RETRY_S: Final = 1.0
"""The pause between two attempts to reach a server."""

LIMIT_RETRY_S: Final = 10.0
"""The pause where the server refuses streams because the user has too many: others may end."""

_PASSING_REFUSALS: Final = frozenset(
    {Status.SHUTTING_DOWN, Status.TOO_MANY, Status.TEMPORARY_FAILURE}
)
"""What a server that stops, or has too much to do, answers to who connects just then. A consumer
that is connected tries again by itself."""

NEVER: Final = SaveLimits(math.inf, math.inf, math.inf)
"""The indexes save what was applied with their entries; the consumer need not save by itself."""


def pause_before_retry_s(error: UprError) -> float:
    """How long to wait before reading again. Says why in the log. Raises the error if to read again
    does not help."""
    is_passing = isinstance(error, ServerError) and error.status in _PASSING_REFUSALS
    if is_passing or isinstance(error, BrokenError):
        log.warning("server unreachable; retrying", error=str(error))
        return STREAM_RETRY_S
    if isinstance(error, ServerError) and error.status is Status.LIMIT_REACHED:
        log.warning("the server refuses streams; retrying", error=str(error))
        return LIMIT_RETRY_S
    raise error


def batch_bytes(pool: MemoryPool) -> int:
    """A snapshot that is larger than this is applied in parts."""
    return min(4 * 1024 * 1024, pool.nbytes // 16)


def common_marks(members: Iterable[PipelineMember]) -> dict[PartitionId, Mark]:
    """How far all of `members` are: in each partition, as far as the last of those that take it.
    Indexes that were left out do not count.

    A stream resumes from there. Members that are further skip what they have.
    """
    members = [member for member in members if not member.file.failure]
    common: dict[PartitionId, Mark] = {}
    for partition in {partition for member in members for partition in member.file.marks}:
        marks = [member.file.mark(partition) for member in members if member.covers(partition)]
        mark = min(marks, key=lambda mark: mark.seq, default=NO_MARK)
        if mark != NO_MARK:
            common[partition] = mark
    return common


def common_state(bucket: str, members: Iterable[PipelineMember]) -> ResumeState:
    """`common_marks` as a resume state."""
    marks = common_marks(members)
    return ResumeState(bucket, {partition: mark.position for partition, mark in marks.items()})


def superfluous_partitions(
    members: Iterable[PipelineMember], partitions: Collection[PartitionId]
) -> list[PartitionId]:
    """The partitions of which one of `members` has something, and which are none of `partitions`:
    the bucket was deleted, and created again with fewer. No stream will ever take that back."""
    known_partitions = frozenset(partitions)
    return sorted(
        {
            partition
            for member in members
            for partition in member.file.marks.keys() - known_partitions
            if member.file.mark(partition) != NO_MARK
        }
    )


class _IndexedState:
    """A resume store: the indexes hold the resume state, and saving it means to apply everything
    that came."""

    def __init__(self, bucket: str, pipeline: Pipeline, assembler: BatchAssembler) -> None:
        self._bucket = bucket
        self._pipeline = pipeline
        self._assembler = assembler

    async def load(self) -> ResumeState:
        """How far all indexes are."""
        return common_state(self._bucket, self._pipeline.members)

    async def save(self, state: ResumeState) -> None:  # noqa: ARG002  it is what came
        """Applies everything, and syncs it. Does nothing once the pipeline has stopped: what was
        not applied is read again."""
        # Parts of snapshots, too: the consumer is about to forget their keys. An indexer that
        # starts without those parts would begin the partition again.
        self._assembler.flush_all()
        if await self._pipeline.drain():
            await self._pipeline.sync()


class IndexerStream:
    """The one stream of the running indexes. It keeps the keys that it has received, and rolls the
    indexes back with them when the server has lost changes.

    Args:
        address: The bucket.
        pipeline: Where batches go.
        pool: The memory pool. While it is short the stream reads nothing, so the server waits for
            this consumer, and for no other.
        received_keys_path: The file of the received keys.
        received_keys_limits: How many keys it keeps.
        slice_id: The slice whose partitions it reads.

    Attributes:
        marks: By partition, how far it is after the batch that was put last.
        partition_count: How many partitions the bucket has; 0 before that is known.
        is_rolling_back: Whether a rollback is under way.
        rollbacks: How many partitions were rolled back.
        listeners: Called with each batch that is put.
    """

    def __init__(
        self,
        address: Address,
        pipeline: Pipeline,
        pool: MemoryPool,
        received_keys_path: str | os.PathLike[str],
        received_keys_limits: ReceivedKeysLimits,
        slice_id: SliceId,
    ) -> None:
        self._address = address
        self._pipeline = pipeline
        self._pool = pool
        self._received_keys_path = received_keys_path
        self._received_keys_limits = received_keys_limits
        self._slice_id = slice_id
        self._partitions: list[PartitionId] | None = None
        self.partition_count = 0
        self._assembler = BatchAssembler(pool, self._put, batch_bytes(pool))
        self._store = _IndexedState(address.bucket, pipeline, self._assembler)
        self._consumer: RollbackConsumer | None = None
        self._changed = Notifier()
        self._pauses = 0
        self.marks: dict[PartitionId, Mark] = {}
        self.is_rolling_back = False
        self.rollbacks = 0
        self.listeners: list[Callable[[IndexBatch], None]] = []

    @property
    def is_connected(self) -> bool:
        """Whether a connection streams, if there is anything to stream."""
        if self._partitions == []:
            return True
        return self._consumer is not None and self._consumer.statistics().is_connected

    def lost_reason(self) -> str | None:
        """Why the connection of the consumer is lost; "" while it is not, None while there is no
        consumer: `run` logs why."""
        if self._consumer is None:
            return None
        statistics = self._consumer.statistics()
        return "" if statistics.is_connected else statistics.last_failure

    def reached_marks(self) -> dict[PartitionId, Mark]:
        """How far each partition is, by what was put. Where no chunk waits for the rest of its
        snapshot, it is as far as the consumer, which learns of a new history before a change of it
        comes. O(partitions)."""
        marks = dict(self.marks)
        if self._consumer is not None:
            for partition, position in self._consumer.resume_state.positions.items():
                if not self._assembler.is_open(partition):
                    marks[partition] = Mark(position)
        return marks

    async def partitions(self) -> list[PartitionId]:
        """Waits until it is known which partitions there are; gives the slice's."""
        await self._changed.wait_until(lambda: self._partitions is not None)
        assert self._partitions is not None
        return self._partitions

    async def run(self) -> None:
        """Follows the bucket for as long as it is there.

        Raises:
            ServerError: The server refused, or the bucket is gone.
            DamagedFileError: The file of the received keys is damaged.
            OSError: That file cannot be written.
        """
        while True:
            pause_s = STREAM_RETRY_S
            try:
                await self._follow()
            except UprError as error:
                pause_s = pause_before_retry_s(error)
            except OSError as error:
                # The file of the received keys. Once it is open, `_next_event` waits for room.
                if not is_full(error):
                    raise
                self._pipeline.disk.note_full(self, error)
            await trio.sleep(pause_s)

    async def _follow(self) -> None:
        if self._partitions is None:
            async with connect(self._address, identity="upr-indexer") as client:
                self.partition_count = client.partition_count
                self._partitions = self._slice_id.partitions(client.partition_count)
            self._changed.notify()
        for partition in superfluous_partitions(self._pipeline.members, self._partitions):
            self._assembler.put_batch(
                IndexBatch(partition, NO_MARK, clears_one_of=self.partition_count)
            )
        if not self._partitions:
            # There are more slices than partitions.
            await trio.sleep_forever()
        # What came over an earlier connection is applied first, so that this one resumes after it.
        self._assembler.flush_all()
        await self._pipeline.drain()
        self.marks = common_marks(self._pipeline.members)
        async with consume_with_rollback(
            self._address,
            self._received_keys_path,
            resume=self._store,
            received_keys_limits=self._received_keys_limits,
            partitions=self._partitions,
            buffer_received_keys=True,
            retry_timeout_s=math.inf,
            save_limits=NEVER,
            identity="upr-indexer",
        ) as consumer:
            self._pipeline.disk.note_room(self)
            self._consumer = consumer
            # Before the indexes have a change, its key must be on disk.
            self._pipeline.before_round = consumer.flush_received_keys
            # A save waits until all that is queued is applied. Keys are mostly forgotten without.
            consumer.durable_seq = self._pipeline.durable_seq
            self._changed.notify()
            failure: UprError | None = None
            try:
                while (event := await self._next_event(consumer)) is not None:
                    await self._handle(consumer, event)
                    await self._wait_for_room()
            except UprError as error:
                failure = error
            finally:
                self._consumer = None
                self._changed.notify()
            # What was put is applied, so its keys must be on disk. The next consumer opens their
            # file again.
            flush = consumer.flush_received_keys
            await self._pipeline.disk.retry(lambda: trio.to_thread.run_sync(flush))
            if failure is not None:
                raise failure

    async def _next_event(self, consumer: RollbackConsumer) -> Event | Undone | None:
        """The next event; None at the end. Waits for room on the disk where received keys have to
        be recorded first."""
        try:
            return await anext(consumer, None)
        except OSError as error:
            if not is_full(error):
                raise
        return await self._pipeline.disk.retry(lambda: anext(consumer, None))

    async def _wait_for_room(self) -> None:
        """Waits until more may be read. Meanwhile nothing is acknowledged, so the server stops when
        the window is full."""
        if not self._pool.has_room(STREAM_SHARE):
            self._assembler.flush_all()
            await self._pool.wait_for_room(STREAM_SHARE)
        if self._pipeline.is_full:
            await self._pipeline.wait_until(lambda: not self._pipeline.is_full)
        if self._pauses:
            await self._changed.wait_until(lambda: not self._pauses)

    async def _handle(self, consumer: RollbackConsumer, event: Event | Undone) -> None:
        match event:
            case ChunkReceived(partition, chunk):
                self._assembler.add_chunk(partition, chunk, _mark(consumer, partition))
            case SnapshotEnd(partition):
                self._assembler.complete_snapshot(partition, _mark(consumer, partition))
            case Undone():
                await self._roll_back(consumer, event)
            case StreamEnded(_, reason):
                raise ServerError(reason, "")
            case _:
                pass

    async def _roll_back(self, consumer: RollbackConsumer, event: Undone) -> None:
        """Applies a rollback. It must be on disk, in every index, before the next event is asked
        for: asking for it tells the consumer that it may forget what it rolled back."""
        partition = event.partition
        log.warning(
            "rolling back",
            partition=partition,
            to=event.to,
            keys=len(event.documents),
            reason=event.reason,
        )
        self.rollbacks += 1
        self.is_rolling_back = True
        try:
            self._assembler.flush_partition(partition)
            position = consumer.position(partition)
            documents = _values(event.documents)
            nbytes = sum(len(key) + len(value or b"") for key, value in documents.items())
            self._pool.reserve(nbytes)
            self._assembler.put_batch(
                IndexBatch(
                    partition,
                    Mark(position, event.consistent_from),
                    rollback_documents=documents,
                    clears_one_of=0 if event.to else self.partition_count,
                    nbytes=nbytes,
                )
            )
            await self._pipeline.drain()
            await self._pipeline.sync()
        finally:
            self.is_rolling_back = False

    def _put(self, batch: IndexBatch) -> None:
        self.marks[batch.partition] = batch.mark
        self._pipeline.put(batch)
        for listener in self.listeners:
            listener(batch)

    # For scans and builders.

    def pause(self) -> None:
        """Reads nothing more until `resume`."""
        self._pauses += 1

    def resume(self) -> None:
        """Ends one `pause`."""
        self._pauses -= 1
        self._changed.notify()

    async def barrier(self) -> None:
        """Waits until all that was acknowledged before the call has been put. Survives lost
        connections."""
        while await self.partitions():
            await self._changed.wait_until(lambda: self._consumer is not None)
            assert self._consumer is not None
            try:
                await self._consumer.barrier()
                return
            except UprError as error:
                # `run` learns the reason, too, and connects again or ends.
                log.debug("barrier lost; retrying", error=str(error))
                await trio.sleep(STREAM_RETRY_S)


def _mark(consumer: RollbackConsumer, partition: PartitionId) -> Mark:
    return Mark(consumer.position(partition))


def _values(documents: Mapping[bytes, Item | None]) -> dict[bytes, bytes | None]:
    return {key: None if item is None else bytes(item.value) for key, item in documents.items()}
