"""A replica of some partitions: follows one node, and puts what comes on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import structlog
import trio

from upr_protocol.client import (
    AnswersReceived,
    ChunkReceived,
    Event,
    ReplicaConsumer,
    ResumeState,
    SaveLimits,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    consume_as_replica,
)
from upr_protocol.client.core.resume_state import ROLLBACK_PENDING
from upr_protocol.errors import RemoteProtocolError, ServerError, Status, UprError
from upr_protocol.ids import Cas, PartitionId, PartitionState, SeqNo
from upr_server.engine import Partition
from upr_server.engine.partition import unpack
from upr_server.replication.host import Host
from upr_server.replication.incoming import Answer, Incoming
from upr_server.runtime import System
from upr_server.storage.calls import Commit, FindSnapshotEnd
from upr_server.storage.chunk_log import PartitionWrite, Token
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.flusher import encode_answer
from upr_server.storage.records import PartitionRecord

BUFFER_BYTES: Final = 32 * 1024 * 1024
"""What may wait for the disk: four commits."""

COMMIT_BYTES: Final = 8 * 1024 * 1024
"""A commit takes no further partition once it has come to this; see the flusher's."""

PATIENCE_S: Final = 5.0
"""How long a consumer tries by itself, before it is made anew from what is on disk."""

RETRY_S: Final = 0.5
"""How long to wait then, and on a full disk."""

log = structlog.get_logger(__name__)


class Replicator:
    """Follows one node for some partitions of one bucket, until it is stopped.

    Args:
        host: The server.
        disk: The bucket.
        node: This node's name.
        source: The name of the node that is followed.
        address: Where that is.
        partitions: The partitions, and the state that each is in there.
        incoming: What is known of them; it outlives this object.
        system: How the node is reached.
    """

    def __init__(
        self,
        host: Host,
        disk: BucketDisk,
        node: str,
        source: str,
        address: str,
        partitions: Mapping[PartitionId, PartitionState],
        incoming: dict[PartitionId, Incoming],
        system: System,
    ) -> None:
        self.source = source
        self.address = address
        self.partitions = dict(partitions)
        self._host = host
        self._disk = disk
        self._node = node
        self._incoming = incoming
        self._system = system
        self._consumer: ReplicaConsumer | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._dirty: dict[PartitionId, None] = {}
        self._wakeup = trio.Event()
        self._taken = trio.Event()
        self._turn = trio.Lock()
        self._commits = 0
        self._on_disk = {number: incoming[number].record() for number in partitions}
        self._is_gone = self._is_stopping = False
        self._lost = ""
        self.trouble = ""
        """Why it does not follow now; empty while it does."""

    @property
    def _url(self) -> str:
        return f"upr://{self.address}/{self._disk.bucket.name}"

    # Its life.

    async def run(self) -> None:
        """Follows until `stop`; what came by then is on disk when this ends."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    states = sorted(set(self.partitions.values()))
                    for state in states:
                        nursery.start_soon(self._follow, state)
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await self._flush()
                finally:
                    self._ended.set()

    def cancel(self) -> None:
        """Ends it: the bucket is gone."""
        self._is_gone = True
        self._dirty.clear()
        self._scope.cancel()

    def hurry(self) -> None:
        """It is about to be ended: a full disk is not waited for any more."""
        self._is_stopping = True

    async def stop(self) -> None:
        """Ends it, and waits until what came is on disk.

        Raises:
            DiskFullError: There is no room for it, and it is forgotten.
        """
        self._is_stopping = True
        self._scope.cancel()
        await self._ended.wait()
        if self._lost:
            raise DiskFullError(self._lost)

    def _check_not_gone(self) -> None:
        if self._is_gone:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")

    # Following.

    async def _follow(self, state: PartitionState) -> None:
        """Follows the partitions that are in one state there, for ever."""
        numbers = sorted(p for p, there in self.partitions.items() if there is state)
        told = ""
        while True:
            try:
                async with consume_as_replica(
                    self._url,
                    partitions=numbers,
                    state=state,
                    resume=_Logs(self, numbers),
                    undo=self._undo,
                    identity=f"replica:{self._node}",
                    retry_timeout_s=PATIENCE_S,
                    save_limits=SaveLimits(math.inf, math.inf, 1 << 62),
                    dial=self._system.dial,
                    draw=self._system.draw,
                ) as consumer:
                    async for event in consumer:
                        self._take(consumer, event)
                        await self._wait_for_room()
                self.trouble = "every stream has ended"
            except UprError as error:
                self.trouble = str(error)
            tell = log.debug if self.trouble == told else log.warning
            told = self.trouble
            tell(
                "replication stopped; trying again",
                bucket=self._disk.bucket.name,
                source=self.source,
                error=self.trouble,
            )
            await trio.sleep(RETRY_S)

    def _take(self, consumer: ReplicaConsumer, event: Event) -> None:
        if isinstance(event, ChunkReceived):
            # Received chunks may be views of what the connection reads into.
            self._incoming[event.partition].add(event.chunk)
            self._is_dirty(event.partition)
        elif isinstance(event, SnapshotStart):
            incoming = self._incoming[event.partition]
            incoming.begin(event.history_id, event.end, event.purge_seq)
        elif isinstance(event, AnswersReceived):
            self._incoming[event.partition].add_answers(_checked(event.rows))
        elif isinstance(event, SnapshotEnd):
            self._incoming[event.partition].finish(event.end)
            self._is_dirty(event.partition)
            self._report(consumer, event.partition)
        elif isinstance(event, StreamAccepted):
            self.trouble = ""
            self._consumer = consumer
            self._report(consumer, event.partition)

    def _report(self, consumer: ReplicaConsumer, number: PartitionId) -> None:
        incoming, partition = self._incoming[number], self._disk.bucket.partitions[number]
        consumer.report(number, incoming.log.current, incoming.high, partition.high_seq)

    def _is_dirty(self, number: PartitionId) -> None:
        self._dirty[number] = None
        self._wakeup.set()

    async def _wait_for_room(self) -> None:
        while sum(self._incoming[number].nbytes for number in self._dirty) > BUFFER_BYTES:
            if self._taken.is_set():
                self._taken = trio.Event()
            await self._taken.wait()

    def positions(self, numbers: list[PartitionId]) -> ResumeState:
        """From where the streams of these partitions go on."""
        state = ResumeState(self._disk.bucket.name)
        for number in numbers:
            state.positions[number] = self._incoming[number].position
        return state

    async def keep_logs(self, state: ResumeState, numbers: list[PartitionId]) -> None:
        """Puts the logs that the master has told on disk, before any data."""
        for number in numbers:
            incoming = self._incoming[number]
            position = state.positions.get(number)
            # What it goes back to it keeps itself, in one with what it undoes.
            if position is not None and position.log.current != ROLLBACK_PENDING:
                incoming.accepted(position.log)
            if incoming.has_news:
                self._is_dirty(number)
        await self._flush()

    # Writing.

    async def _write(self) -> None:
        while True:
            if not self._dirty:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
            await self._commit()

    async def _flush(self) -> None:
        """Brings what has come to disk."""
        while self._dirty:
            await self._commit()
        async with self._turn:
            pass

    async def _commit(self) -> None:
        async with self._turn:
            writes: list[PartitionWrite] = []
            total = 0
            for number in list(self._dirty):
                incoming = self._incoming[number]
                total += incoming.nbytes
                del self._dirty[number]
                if incoming.has_news:
                    writes.append(self._arrived(number, incoming))
                if total > COMMIT_BYTES:
                    break
            if not writes:
                await trio.lowlevel.checkpoint()
                return
            # Whoever stops it waits for this; what is half done would be done again in vain.
            with trio.CancelScope(shield=True):
                is_there = await self._put(writes)
            if is_there:
                self._commits += 1
                for write in writes:
                    self._has_come(write)
        self._taken.set()
        self._disk.committed()

    def _arrived(self, number: PartitionId, incoming: Incoming) -> PartitionWrite:
        partition = self._disk.bucket.partitions[number]
        arrived = incoming.take()
        if arrived.answers:
            partition.take_answers(arrived.answers)
        tokens = [
            Token(token.writer, token.counter, b"" if answer is None else encode_answer(answer))
            for token, answer in partition.take_news(arrived.record.high).items()
        ]
        return PartitionWrite(
            number, arrived.record, arrived.chunks, tokens, arrived.ends, arrived.purge_seq
        )

    async def _put(self, writes: list[PartitionWrite]) -> bool:
        """Puts it on disk; gives up when that is full and it is to stop, or the bucket is gone.

        Returns:
            Whether it is there.
        """
        while not self._is_gone:
            try:
                await self._disk.store.ask(Commit(self._disk.bucket.name, writes))
                return True
            except DiskFullError as error:
                if not self.trouble:
                    log.error("disk full", bucket=self._disk.bucket.name, error=str(error))
                self.trouble = str(error)
            if self._is_stopping:
                self._lost = self.trouble
                for number, record in self._on_disk.items():
                    self._incoming[number] = Incoming.of(record)
                self._dirty.clear()
                return False
            await trio.sleep(RETRY_S)
        return False

    def _has_come(self, write: PartitionWrite) -> None:
        number = PartitionId(write.partition)
        self._on_disk[number] = write.record
        partition = self._disk.bucket.partitions[number]
        stands_on_disk(partition, write.record)
        partition.has_taken(write.chunks)
        partition.purge_seq = max(partition.purge_seq, write.purge_seq)
        failover_log = self._incoming[number].log
        if partition.failover_log != failover_log:
            partition.become(partition.state, failover_log)
            # Whoever follows this node has to hear of the new log before any data.
            self._host.end_streams(self._disk.bucket, number, Status.ROLLBACK_NEEDED)
        if self._consumer is not None:
            self._report(self._consumer, number)

    # Going back.

    async def _undo(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        disk, number, incoming = self._disk, partition, self._incoming[partition]
        bucket = disk.bucket
        undone = bucket.partitions[number]
        with trio.CancelScope(shield=True):
            await self._flush()
            self._host.end_streams(bucket, number, Status.ROLLBACK_NEEDED)
            async with disk.maintenance.paused(), self._turn:
                before = incoming.received
                found = await disk.store.ask(
                    FindSnapshotEnd(bucket.name, number, ceiling, undone.indexed)
                )
                to = SeqNo(found or 0)
                failover_log = incoming.log.until(to)
                pairs = tuple(failover_log.pairs())
                record = PartitionRecord(PartitionState.REPLICA, pairs, to, undone.last_cas)
                tokens = [Token(one.writer, one.counter, b"") for one in undone.answered_above(to)]
                self._check_not_gone()
                broken = await disk.truncate(number, record, tokens)
                # Whoever has begun to read meanwhile may have been told of what is gone.
                self._host.end_streams(bucket, number, Status.ROLLBACK_NEEDED)
                disk.leases.mark_broken(broken)
                undone.cut(to)
                incoming.cut(to)
                self._on_disk[number] = record
                undone.become(undone.state, failover_log)
        log.warning(
            "a replica went back",
            bucket=bucket.name,
            partition=number,
            was=before,
            ceiling=ceiling,
            to=to,
            reason=reason,
        )
        return to

    def statistics(self) -> dict[str, object]:
        """Figures; sizes in bytes."""
        return {
            "source": self.source,
            "partitions": len(self.partitions),
            "commits": self._commits,
            "waiting_bytes": sum(self._incoming[number].nbytes for number in self._dirty),
            "trouble": self.trouble,
        }


class _Logs:
    """Keeps what must be on disk before any data: the logs. Data says itself how far it goes."""

    def __init__(self, replicator: Replicator, numbers: list[PartitionId]) -> None:
        self._replicator = replicator
        self._numbers = numbers

    async def load(self) -> ResumeState:
        """From where the streams go on."""
        await trio.lowlevel.checkpoint()
        return self._replicator.positions(self._numbers)

    async def save(self, state: ResumeState) -> None:
        """Puts the logs on disk."""
        await self._replicator.keep_logs(state, self._numbers)


def _checked(rows: Iterable[tuple[bytes, int, int, bytes]]) -> list[Answer]:
    try:
        for _, _, _, answer in rows:
            unpack(answer)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"an answer that cannot be read: {error}") from error
    return [(writer, batch, SeqNo(seq), answer) for writer, batch, seq, answer in rows]


def stands_on_disk(partition: Partition, record: PartitionRecord) -> None:
    """The disk has this of a partition that keeps nothing in memory."""
    if record.high != partition.high_seq:
        partition.stand_at(record.high, Cas(record.last_cas))
