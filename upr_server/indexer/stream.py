"""The one stream of the running indexes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog
import trio

from upr_protocol.client import (
    Address,
    BarrierReached,
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
    consume_with_rollback,
)
from upr_protocol.errors import BrokenError, ServerError, UprError
from upr_protocol.ids import PartitionId
from upr_server.indexer.bell import Bell
from upr_server.indexer.mark import NO_MARK, Mark
from upr_server.indexer.piece import Assembler, Piece
from upr_server.indexer.pipeline import Member, Pipeline
from upr_server.indexer.pool import STREAM_SHARE, Pool

log = structlog.get_logger(__name__)

RETRY_S: Final = 1.0
"""Between two attempts at a server that was not there when the stream began."""

NEVER: Final = SaveLimits(math.inf, math.inf, math.inf)
"""What was applied is saved with the data; the consumer need not ask for it."""


def piece_bytes(pool: Pool) -> int:
    """Above this, a snapshot is applied in parts."""
    return min(4 * 1024 * 1024, pool.nbytes // 16)


def common_marks(members: Iterable[Member]) -> dict[PartitionId, Mark]:
    """How far all of `members` are: in each partition, as far as the last of those that take it.

    A stream goes on from there; who is further skips what it has.
    """
    members = list(members)
    found: dict[PartitionId, Mark] = {}
    for partition in {number for member in members for number in member.file.marks}:
        marks = [member.file.mark(partition) for member in members if member.takes(partition)]
        mark = min(marks, key=lambda mark: mark.seq, default=NO_MARK)
        if mark != NO_MARK:
            found[partition] = mark
    return found


def common_state(bucket: str, members: Iterable[Member]) -> ResumeState:
    """`common_marks` as a resume state."""
    marks = common_marks(members)
    return ResumeState(bucket, {number: mark.position for number, mark in marks.items()})


class _Store:
    """The resume state is in the indexes: to save it is to have everything applied."""

    def __init__(self, bucket: str, pipeline: Pipeline) -> None:
        self._bucket = bucket
        self._pipeline = pipeline

    async def load(self) -> ResumeState:
        """See `ResumeStore`."""
        return common_state(self._bucket, self._pipeline.members)

    async def save(self, state: ResumeState) -> None:  # noqa: ARG002  what was handed on is put
        """See `ResumeStore`. When the pipeline has stopped there is nothing to be done: what was
        not applied is read again."""
        if await self._pipeline.drain():
            await self._pipeline.sync()


class Stream:
    """The one stream of the running indexes, with the ring buffer that takes them back (seed 002).

    Args:
        address: The bucket.
        pipeline: Where pieces go.
        pool: Waited for before more is taken; so the server waits for this consumer, and no other.
        ring_path: The ring buffer's file.
        ring_limits: How much it keeps.
        on_put: Told of each piece.

    Attributes:
        marks: By partition, behind what was put last.
        is_undoing: Whether something is being undone.
        rollbacks: How many times a partition went back.
    """

    def __init__(
        self,
        address: Address,
        pipeline: Pipeline,
        pool: Pool,
        ring_path: str | os.PathLike[str],
        ring_limits: ReceivedKeysLimits,
        on_put: Callable[[Piece], None],
    ) -> None:
        self._address = address
        self._pipeline = pipeline
        self._pool = pool
        self._ring_path = ring_path
        self._ring_limits = ring_limits
        self._on_put = on_put
        self._store = _Store(address.bucket, pipeline)
        self._assembler = Assembler(pool, self._put, piece_bytes(pool))
        self._consumer: RollbackConsumer | None = None
        self._changed = Bell()
        self._holds = 0
        self.marks: dict[PartitionId, Mark] = {}
        self.is_undoing = False
        self.rollbacks = 0

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that streams."""
        return self._consumer is not None and self._consumer.statistics().connected

    def reached(self) -> dict[PartitionId, Mark]:
        """How far each partition is: as it was put last; where nothing waits to be put, as far as
        the consumer is, which knows of a new history before anything changes. O(partitions)."""
        found = dict(self.marks)
        if self._consumer is not None:
            for partition, position in self._consumer.resume_state.positions.items():
                if not self._assembler.holds(partition):
                    found[partition] = Mark(position)
        return found

    async def run(self) -> None:
        """Follows the bucket for as long as it is there.

        Raises:
            ServerError: The server refused, or the bucket is gone.
            RecordLogError: The ring buffer is damaged.
            OSError: It cannot be written.
        """
        while True:
            try:
                await self._follow()
            except BrokenError as error:
                log.warning("the server cannot be reached", error=str(error))
            await trio.sleep(RETRY_S)

    async def _follow(self) -> None:
        # What came over an earlier connection counts as soon as it is applied.
        self._assembler.flush_all()
        await self._pipeline.drain()
        self.marks = common_marks(self._pipeline.members)
        async with consume_with_rollback(
            self._address,
            self._ring_path,
            resume=self._store,
            received_keys_limits=self._ring_limits,
            retry_timeout_s=math.inf,
            save_limits=NEVER,
            identity="upr-indexer",
        ) as consumer:
            self._consumer = consumer
            self._changed.ring()
            try:
                async for event in consumer:
                    await self._take(consumer, event)
                    await self._room()
            finally:
                self._consumer = None
                self._changed.ring()

    async def _room(self) -> None:
        """Waits until more may be taken. Until then nothing is acknowledged, and the server stops
        when its window is full."""
        if not self._pool.has_room(STREAM_SHARE):
            self._assembler.flush_all()
            await self._pool.room(STREAM_SHARE)
        await self._pipeline.applied.until(lambda: not self._pipeline.is_full)
        await self._changed.until(lambda: not self._holds)

    async def _take(self, consumer: RollbackConsumer, event: Event | Undone) -> None:
        match event:
            case ChunkReceived(partition, chunk):
                self._assembler.chunk(partition, chunk, _mark(consumer, partition))
            case SnapshotEnd(partition):
                self._assembler.move(partition, _mark(consumer, partition))
            case Undone():
                await self._undo(consumer, event)
            case StreamEnded(_, reason):
                raise ServerError(reason, "")
            case _:
                pass

    async def _undo(self, consumer: RollbackConsumer, event: Undone) -> None:
        """Goes back. It must be on disk, in every index, before the next event is asked for: then
        the ring buffer takes it that what it knew of is no more."""
        partition = event.partition
        log.warning(
            "going back", partition=partition, to=event.to, keys=len(event.documents),
            reason=event.reason,
        )  # fmt: skip
        self.rollbacks += 1
        self.is_undoing = True
        try:
            self._assembler.flush(partition)
            position = consumer.resume_state.position(partition)
            documents = _values(event.documents)
            nbytes = sum(len(key) + len(value or b"") for key, value in documents.items())
            self._pool.take(nbytes)
            self._assembler.put(
                Piece(
                    partition,
                    Mark(position, event.settled),
                    undone=documents,
                    forgets=not event.to,
                    nbytes=nbytes,
                )
            )
            await self._pipeline.drain()
            await self._pipeline.sync()
        finally:
            self.is_undoing = False

    def _put(self, piece: Piece) -> None:
        self.marks[piece.partition] = piece.mark
        self._pipeline.put(piece)
        self._on_put(piece)

    # For others.

    def hold(self) -> None:
        """Nothing more is taken until `release`."""
        self._holds += 1

    def release(self) -> None:
        """See `hold`."""
        self._holds -= 1
        self._changed.ring()

    async def barrier(self) -> BarrierReached:
        """Waits until all that was acknowledged before has been put, also when the connection is
        lost meanwhile."""
        while True:
            await self._changed.until(lambda: self._consumer is not None)
            assert self._consumer is not None
            try:
                return await self._consumer.barrier()
            except UprError as error:
                # Whoever follows finds out why, and begins anew or ends.
                log.debug("a barrier did not come back", error=str(error))
                await trio.sleep(RETRY_S)


def _mark(consumer: RollbackConsumer, partition: PartitionId) -> Mark:
    return Mark(consumer.resume_state.position(partition))


def _values(documents: Mapping[bytes, Item | None]) -> dict[bytes, bytes | None]:
    return {key: None if item is None else bytes(item.value) for key, item in documents.items()}
