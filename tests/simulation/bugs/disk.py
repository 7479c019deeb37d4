"""Bugs in storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

from tests.simulation.bugs.patch import replaced
from tests.simulation.bugs.planted_bug import planted
from tests.simulation.profiles import (
    CRASHES,
    DIVERGED,
    FAILING_DISKS,
    FAILING_DISKS_WITH_LEASES,
    LEASED_BACKFILLS,
    ROTTEN_DISKS,
)
from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SeqNo
from upr_server.engine import Partition
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.storage import chunk_log, compaction, key_index, records
from upr_server.storage.api import Store
from upr_server.storage.calls import Commit, CreateBucketFiles, DeleteBucketFiles
from upr_server.storage.chunk_reader import ChunkReader
from upr_server.storage.errors import StoreFailedError
from upr_server.storage.online.flusher import Flusher
from upr_server.storage.online.leases import LeaseBook
from upr_server.storage.records import CHUNK_HEAD


@planted(CRASHES)
def acknowledge_before_commit() -> Iterator[None]:
    """The server acknowledges `persisted` writes before they are on disk."""

    def call_when_persisted(
        _self: Flusher, _partition: Partition, _seq: SeqNo, call: Callable[[bool], None]
    ) -> None:
        call(True)

    with replaced(Flusher, "call_when_persisted", call_when_persisted):
        yield


@planted(FAILING_DISKS)
def ignore_failed_fsync() -> Iterator[None]:
    """The server ignores a failed commit and continues."""
    real: Any = Store.ask

    async def ask(self: Store, call: Any) -> Any:
        try:
            return await real(self, call)
        except StoreFailedError:
            if not isinstance(call, Commit) or getattr(self, "is_dead", False):
                raise
            self.failed = type(self.failed)()
            return {}

    with (
        replaced(Store, "ask", ask),
        replaced(Store, "fail", lambda _self, _reason: None),
    ):
        yield


@planted(FAILING_DISKS_WITH_LEASES, seeds=16)
def acknowledge_after_failed_commit() -> Iterator[None]:
    """Requests that are queued behind a failed commit are carried out and acknowledged. The
    simulation found this fault."""
    real: Any = Store.ask

    async def ask(self: Store, call: Any) -> Any:
        if call.is_read or isinstance(call, CreateBucketFiles | DeleteBucketFiles):
            return await real(self, call)
        self.check_not_failed()
        try:
            return await self.execute(call)
        except StoreFailedError as error:
            self.fail(str(error))
            raise

    with replaced(Store, "ask", ask):
        yield


@planted(ROTTEN_DISKS)
def skip_checksums() -> Iterator[None]:
    """The server does not verify checksums of what it reads from disk."""

    def parse_chunk(_key: bytes, value: Buffer) -> Chunk:
        return Chunk(memoryview(value)[CHUNK_HEAD.size :])

    def parse_chunk_head(_key: bytes, value: Buffer) -> tuple[int, bool]:
        crc, _, mark = CHUNK_HEAD.unpack_from(value)
        return crc, bool(mark)

    def without_checksum(_key: bytes, stored_value: Buffer) -> bytes:
        return bytes(stored_value)[4:]

    with ExitStack() as stack:
        for part in (parse_chunk, parse_chunk_head, without_checksum):
            for module in (records, chunk_log, compaction, key_index):
                if part.__name__ in vars(module):
                    stack.enter_context(replaced(module, part.__name__, part))
        yield


@planted(DIVERGED)
def record_failover_log_late() -> Iterator[None]:
    """A replica stores its source's failover log only when a snapshot is complete."""
    end_snapshot: Any = ReceivedSnapshots.end_snapshot
    pending_logs: dict[int, FailoverLog] = {}

    def set_log_later(self: ReceivedSnapshots, log: FailoverLog) -> None:
        pending_logs[id(self)] = log

    def end_snapshot_with_log(self: ReceivedSnapshots, end: SeqNo) -> None:
        end_snapshot(self, end)
        self.log = pending_logs.get(id(self), self.log)

    with (
        replaced(ReceivedSnapshots, "set_log", set_log_later),
        replaced(ReceivedSnapshots, "end_snapshot", end_snapshot_with_log),
    ):
        yield


@planted(DIVERGED)
def roll_back_into_snapshot() -> Iterator[None]:
    """A replica rolls back to the end of a chunk, though that lies inside a snapshot."""

    def find_snapshot_end(
        self: ChunkReader, partition: int, ceiling: SeqNo, floor: SeqNo
    ) -> SeqNo | None:
        through = min(ceiling, self.high_seq(partition))
        if through <= floor:
            return through if through == floor else None
        chunks = self.read_chunks(partition, floor, through, bytes_max=1 << 62)
        ends = [chunk.end for chunk in chunks if chunk.end <= through]
        return ends[-1] if ends else None

    with replaced(ChunkReader, "find_snapshot_end", find_snapshot_end):
        yield


@planted(LEASED_BACKFILLS, seeds=20)
def compact_leased_range() -> Iterator[None]:
    """Compaction ignores the leases of backfills."""
    with replaced(LeaseBook, "held_ranges", lambda _self: []):
        yield


BUGS: Final = (
    acknowledge_before_commit,
    ignore_failed_fsync,
    acknowledge_after_failed_commit,
    skip_checksums,
    record_failover_log_late,
    roll_back_into_snapshot,
    compact_leased_range,
)
