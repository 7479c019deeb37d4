"""Bugs around the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from tests.simulation.bugs.patch import replaced
from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SeqNo
from upr_server.engine import Partition
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.storage import chunk_log, compaction, key_index, records
from upr_server.storage.api import Store
from upr_server.storage.calls import Commit, CreateBucket, DeleteBucket
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import StoreFailedError
from upr_server.storage.online.flusher import Flusher
from upr_server.storage.online.leases import LeaseBook
from upr_server.storage.records import CHUNK_HEAD


@contextmanager
def acknowledges_before_the_commit() -> Iterator[None]:
    """`persisted` is answered at once."""

    def call_when_persisted(
        _self: Flusher, _partition: Partition, _seq: SeqNo, call: Callable[[bool], None]
    ) -> None:
        call(True)

    with replaced(Flusher, "call_when_persisted", call_when_persisted):
        yield


@contextmanager
def goes_on_after_a_failed_fsync() -> Iterator[None]:
    """A commit that failed is taken for done."""
    real: Any = Store.ask

    async def ask(self: Store, call: Any) -> Any:
        try:
            return await real(self, call)
        except StoreFailedError:
            if not isinstance(call, Commit) or getattr(self, "is_dead", False):
                raise
            self.failed = type(self.failed)()
            return None

    with (
        replaced(Store, "ask", ask),
        replaced(Store, "fail", lambda _self, _reason: None),
    ):
        yield


@contextmanager
def acknowledges_what_was_behind_a_failure() -> Iterator[None]:
    """What stood in line behind a commit that failed is acknowledged, if it was done; found by the
    simulation."""
    real: Any = Store.ask

    async def ask(self: Store, call: Any) -> Any:
        if call.is_read or isinstance(call, CreateBucket | DeleteBucket):
            return await real(self, call)
        self.check_not_failed()
        try:
            return await self.execute(call)
        except StoreFailedError as error:
            self.fail(str(error))
            raise

    with replaced(Store, "ask", ask):
        yield


@contextmanager
def skips_the_checksum() -> Iterator[None]:
    """What is read from disk is not looked at."""

    def parse_chunk(_key: bytes, value: Buffer) -> Chunk:
        return Chunk(memoryview(value)[CHUNK_HEAD.size :])

    def parse_chunk_head(_key: bytes, value: Buffer) -> tuple[int, bool]:
        crc, _, mark = CHUNK_HEAD.unpack_from(value)
        return crc, bool(mark)

    def unseal(_key: bytes, sealed: Buffer) -> bytes:
        return bytes(sealed)[4:]

    with ExitStack() as stack:
        for part in (parse_chunk, parse_chunk_head, unseal):
            for module in (records, chunk_log, compaction, key_index):
                if part.__name__ in vars(module):
                    stack.enter_context(replaced(module, part.__name__, part))
        yield


@contextmanager
def records_the_log_only_at_snapshot_ends() -> Iterator[None]:
    """A replica keeps its master's log to itself until a snapshot is complete."""
    end_snapshot: Any = ReceivedSnapshots.end_snapshot
    pending: dict[int, FailoverLog] = {}

    def set_log_later(self: ReceivedSnapshots, log: FailoverLog) -> None:
        pending[id(self)] = log

    def end_snapshot_with_log(self: ReceivedSnapshots, end: SeqNo) -> None:
        end_snapshot(self, end)
        self.log = pending.get(id(self), self.log)

    with (
        replaced(ReceivedSnapshots, "set_log", set_log_later),
        replaced(ReceivedSnapshots, "end_snapshot", end_snapshot_with_log),
    ):
        yield


@contextmanager
def takes_a_ceiling_for_a_state() -> Iterator[None]:
    """A replica goes back to just the number that it is told."""

    def find_snapshot_end(
        _self: ChunkLog, _partition: int, ceiling: SeqNo, floor: SeqNo
    ) -> SeqNo | None:
        return ceiling if ceiling >= floor else None

    with replaced(ChunkLog, "find_snapshot_end", find_snapshot_end):
        yield


@contextmanager
def compacts_under_a_backfill() -> Iterator[None]:
    """What somebody reads is compacted all the same, without its lease."""
    with replaced(LeaseBook, "ranges", lambda _self: []):
        yield


BUGS: Final = (
    acknowledges_before_the_commit,
    goes_on_after_a_failed_fsync,
    acknowledges_what_was_behind_a_failure,
    skips_the_checksum,
    records_the_log_only_at_snapshot_ends,
    takes_a_ceiling_for_a_state,
    compacts_under_a_backfill,
)
