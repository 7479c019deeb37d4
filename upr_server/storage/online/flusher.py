"""The flusher: carries whole snapshots of a bucket's partitions to disk, many in one commit.

One commit is under way at a time, and what comes meanwhile goes into the next: throughput is all in
the batching. When somebody waits for durability the next commit begins at once; otherwise after a
short while, in which what is overwritten need not be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import msgspec
import structlog
import trio

from upr_protocol.chunk import Chunk
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.engine import Bucket, Partition, SnapshotEnd
from upr_server.storage.api import Store
from upr_server.storage.calls import Commit
from upr_server.storage.chunk_log import PartitionWrite, Token
from upr_server.storage.errors import DiskFullError
from upr_server.storage.records import PartitionRecord

FLUSH_INTERVAL_S: Final = 0.1
"""How long what nobody waits for may stay in memory only."""

COMMIT_BYTES: Final = 8 * 1024 * 1024
"""A commit takes no further snapshot once it has come to this: it stays within 100 ms on a plain
disk, and what it takes in memory on both sides of the pipe stays small."""

UNINDEXED_MAX: Final = 512 * 1024
"""Mutations that may be on disk and not yet in its index. Beyond it commits wait: what a load
overwrites meanwhile need not be written, memory fills, and then publishers slow down. Else the
index, and compaction, which needs it, would fall behind for as long as the load lasts."""

RETRY_S: Final = 1.0
"""How long to wait before trying again on a full disk."""

STEP_BYTES: Final = 1024 * 1024
"""What is encoded before others have their turn, a millisecond or so."""

SNAPSHOT_BYTES: Final = 16 * 1024
"""What closing and encoding a snapshot of one mutation comes to, in the same coin."""

STEP_PARTITIONS: Final = 8
"""Partitions whose commits are told before others have their turn."""

log = structlog.get_logger(__name__)

Persisted = Callable[[bool], None]
"""Called with True once a number is on disk, or with False when that cannot be promised."""


class Flusher:
    """See the module.

    Args:
        store: The disk.
        bucket: What to carry there.
        on_commit: Called after each commit.
    """

    def __init__(self, store: Store, bucket: Bucket, on_commit: Callable[[], None]) -> None:
        self._store = store
        self._bucket = bucket
        self._on_commit = on_commit
        # Partitions with something to persist; a dict, so that they take turns.
        self._dirty: dict[PartitionId, None] = {}
        self._dirty_since = 0.0
        self._wakeup = trio.Event()
        self._waiting: dict[PartitionId, deque[tuple[SeqNo, Persisted]]] = {}
        # Tasks that wait in `wait_until_persisted`; the event is set, and replaced, at each commit.
        self._waiters = 0
        self._progress = trio.Event()
        self._stopping = False
        self._indexed = trio.Event()
        self._index_moves = True
        self._commits = self._committed_bytes = self._committed_mutations = 0
        self._last_commit_s = self._longest_commit_s = 0.0
        self.full = ""
        """Why nothing can be written now; empty when it can."""
        self.last_commit_at = trio.current_time()
        """When the last commit ended."""
        for partition in bucket.partitions:
            partition.deduplicator.keep_pending()
            cursor = partition.manager.persistence
            cursor.subscribe(partial(self._is_dirty, partition.id))
            if cursor.poll():
                self._is_dirty(partition.id)

    def _is_dirty(self, partition: PartitionId) -> None:
        if not self._dirty:
            self._dirty_since = trio.current_time()
            self._wakeup.set()
        self._dirty[partition] = None

    # Waiting for the disk.

    def when_persisted(self, partition: Partition, seq: SeqNo, call: Persisted) -> None:
        """Has `call` called when everything up to `seq` is on disk; perhaps at once."""
        if partition.manager.persistence.committed >= seq:
            call(True)
        elif self.full:
            call(False)
        else:
            self._waiting.setdefault(partition.id, deque()).append((seq, call))
            self._wakeup.set()

    async def wait_until_persisted(self, partition: Partition, seq: SeqNo) -> None:
        """Waits until everything up to `seq` is on disk, however long the disk is full. Cancelled,
        nothing is left of it, also while a commit takes for ever."""
        self._waiters += 1
        self._wakeup.set()
        try:
            while partition.manager.persistence.committed < seq:
                await self._progress.wait()
        finally:
            self._waiters -= 1

    def _answer(self, partition: Partition) -> None:
        waiting = self._waiting.get(partition.id)
        committed = partition.manager.persistence.committed
        # Numbers are asked for in the order in which they are given, but for late questions.
        while waiting and waiting[0][0] <= committed:
            waiting.popleft()[1](True)
        if not waiting:
            self._waiting.pop(partition.id, None)

    def refuse_all(self) -> None:
        """Nobody who waits is promised anything."""
        waiting, self._waiting = self._waiting, {}
        for calls in waiting.values():
            for _, call in calls:
                call(False)

    # Flushing.

    async def run(self) -> None:
        """Flushes for ever; after `stop`, until everything is on disk."""
        while True:
            if not self._dirty:
                if self._stopping:
                    return
                self._wakeup = trio.Event()
                if not self._dirty:
                    await self._wakeup.wait()
                continue
            await self._linger()
            await self._keep_pace()
            await self._commit(await self._collect())

    def stop(self) -> None:
        """No more mutations will come: `run` is to bring what there is to disk, and to end."""
        self._stopping = True
        self._wakeup.set()
        self._indexed.set()

    async def _linger(self) -> None:
        """Lets more come together, unless somebody waits."""
        with trio.move_on_at(self._dirty_since + FLUSH_INTERVAL_S):
            await trio.lowlevel.checkpoint()
            while not self._waiting and not self._waiters and not self._stopping:
                self._wakeup = trio.Event()
                await self._wakeup.wait()

    async def _keep_pace(self) -> None:
        """Lets the index come nearer, if it is far behind and moves."""
        await trio.lowlevel.checkpoint()
        while self._index_moves and not self._stopping and self.unindexed() > UNINDEXED_MAX:
            self._indexed = trio.Event()
            await self._indexed.wait()

    def unindexed(self) -> int:
        """How many mutations are on disk that the index has not taken in. O(partitions)."""
        return sum(
            partition.manager.persistence.committed - partition.eviction.indexed
            for partition in self._bucket.partitions
        )

    def index_moves(self, moves: bool) -> None:
        """The index has come further; or it cannot, and nobody is to wait for it."""
        self._index_moves = moves
        self._indexed.set()

    async def _collect(self) -> list[PartitionWrite]:
        """Reads whole snapshots of partitions that have any, each partition's as far as it has come
        now."""
        writes: list[PartitionWrite] = []
        self._dirty_since = trio.current_time()
        total = unyielded = 0
        for number in list(self._dirty):
            partition = self._bucket.partitions[number]
            chunks: list[Chunk] = []
            ends: list[SeqNo] = []
            for item in self._snapshots(partition, COMMIT_BYTES - total):
                if isinstance(item, SnapshotEnd):
                    ends.append(item.end)
                    continue
                chunks.append(item)
                total += item.nbytes
                unyielded += item.nbytes + SNAPSHOT_BYTES
                if unyielded > STEP_BYTES:
                    unyielded = 0
                    await trio.lowlevel.checkpoint()
            if chunks:
                writes.append(self._write(partition, chunks, ends))
            del self._dirty[number]
            if partition.manager.persistence.poll():
                self._dirty[number] = None
            if total >= COMMIT_BYTES:
                break
        return writes

    def _snapshots(self, partition: Partition, room: int) -> Iterator[Chunk | SnapshotEnd]:
        cursor = partition.manager.persistence
        goal = partition.high_seq
        # To the end of the snapshot that holds the goal: others may close it, and with it what came
        # since.
        while cursor.seq < goal or cursor.is_reading:
            item = cursor.next()
            if isinstance(item, Chunk):
                room -= item.nbytes
                yield item
            elif isinstance(item, SnapshotEnd):
                yield item
                if room <= 0:
                    return

    def _write(
        self, partition: Partition, chunks: list[Chunk], ends: list[SeqNo]
    ) -> PartitionWrite:
        through = chunks[-1].end
        tokens = [
            Token(token.writer, token.counter, b"" if answer is None else encode_answer(answer))
            for token, answer in partition.deduplicator.take_pending(through).items()
        ]
        return PartitionWrite(partition.id, record_of(partition, through), chunks, tokens, ends)

    async def _commit(self, writes: list[PartitionWrite]) -> None:
        if not writes:
            return
        began = trio.current_time()
        while True:
            try:
                await self._store.ask(Commit(self._bucket.name, writes))
                break
            except DiskFullError as error:
                if not self.full:
                    log.error("disk full", bucket=self._bucket.name, error=str(error))
                self.full = str(error)
                self.refuse_all()
                if self._stopping:
                    raise
                await trio.sleep(RETRY_S)
        if self.full:
            log.info("disk has space again", bucket=self._bucket.name)
            self.full = ""
        self.last_commit_at = trio.current_time()
        self._last_commit_s = self.last_commit_at - began
        self._longest_commit_s = max(self._longest_commit_s, self._last_commit_s)
        self._commits += 1
        for at, write in enumerate(writes, 1):
            self._committed_bytes += sum(chunk.nbytes for chunk in write.chunks)
            self._committed_mutations += sum(chunk.count for chunk in write.chunks)
            partition = self._bucket.partitions[write.partition]
            partition.manager.persistence.commit(write.record.high)
            self._answer(partition)
            if at % STEP_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()
        progress, self._progress = self._progress, trio.Event()
        progress.set()
        self._on_commit()

    def statistics(self) -> dict[str, object]:
        """Figures; times in seconds."""
        partitions = self._bucket.partitions
        return {
            "lag_mutations": sum(
                partition.high_seq - partition.manager.persistence.committed
                for partition in partitions
            ),
            "commits": self._commits,
            "mutations_per_commit": self._committed_mutations // max(self._commits, 1),
            "bytes_per_commit": self._committed_bytes // max(self._commits, 1),
            "last_commit_s": round(self._last_commit_s, 6),
            "longest_commit_s": round(self._longest_commit_s, 6),
            "full": self.full,
        }


encode_answer: Final = msgspec.msgpack.Encoder().encode


def record_of(partition: Partition, high: SeqNo) -> PartitionRecord:
    """What the disk is to know of a partition that it has up to `high`."""
    log_pairs = tuple(partition.failover_log.pairs())
    return PartitionRecord(partition.state, log_pairs, high, partition.last_cas)
