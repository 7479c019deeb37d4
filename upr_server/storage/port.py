"""What the server asks of its disk: the port, behind which there is LMDB or a simulated disk.

Every method waits for the disk, and raises a `StorageError`. Requests that change something are
carried out one after the other, in the order in which they were made; reads run beside them and see
everything that was committed before they were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine import Want
from upr_server.storage.chunk_log import PartitionWrite, StoredBucket, Token
from upr_server.storage.key_index import Due
from upr_server.storage.records import BucketRecord, LeaseRecord, PartitionRecord

if TYPE_CHECKING:
    # The store's processes know the port, and have no use for what takes half of their start.
    import trio


class Upkeep(msgspec.Struct, frozen=True):
    """What one step of a bucket's upkeep did.

    Attributes:
        partition: The partition that it was about; -1 when there was nothing to do.
        indexed: Up to which number the index knows it now.
        items: Keys that exist in it, as of there.
        purge_seq: Its purge number.
        compacted: Whether the step belonged to a compaction, and not to indexing.
        more: Whether there is more to do at once.
        broken: Leases that are not whole any more.
    """

    partition: int = -1
    indexed: SeqNo = SeqNo(0)
    items: int = 0
    purge_seq: SeqNo = SeqNo(0)
    compacted: bool = False
    more: bool = False
    broken: Sequence[int] = ()


class Store(Protocol):
    """The disk of one node.

    Attributes:
        failed: Set when the store has failed: nothing more is acknowledged, and the server stops.
        failure: Why; empty before.
    """

    failed: trio.Event
    failure: str

    async def load(self) -> list[StoredBucket]:
        """Every bucket that there is, by name."""

    async def create(self, record: BucketRecord, partitions: Sequence[PartitionRecord]) -> None:
        """Makes a bucket; it is there, whole, when this returns, or not at all."""

    async def delete(self, bucket: str) -> None:
        """Deletes a bucket and all that is in it."""

    async def begin(self, bucket: str, records: Sequence[tuple[int, PartitionRecord]]) -> None:
        """Takes the mark of a clean stop away, and replaces these records: before anything is
        served."""

    async def finish(self, bucket: str) -> None:
        """Puts the mark of a clean stop."""

    async def commit(self, bucket: str, writes: Sequence[PartitionWrite]) -> None:
        """Puts whole snapshots on disk, all or none; see `ChunkLog.commit`."""

    async def put_lease(self, bucket: str, lease: LeaseRecord) -> None:
        """Keeps a lease."""

    async def delete_leases(self, bucket: str, lease_ids: Sequence[int]) -> None:
        """Forgets leases."""

    async def put_map(
        self, bucket: str, document: str, records: Sequence[tuple[int, PartitionRecord]]
    ) -> None:
        """Keeps another partition map, and what it makes of partitions; see `ChunkLog.put_map`."""

    async def cut(
        self, bucket: str, partition: int, record: PartitionRecord, tokens: Sequence[Token]
    ) -> list[int]:
        """Has a partition end at `record.high`, which is a snapshot's end that is not below what is
        indexed, or 0. With 0 all of it goes, in several steps: after a crash between them the
        partition is what it was, and its index is made anew. Gives the leases that this broke."""

    async def newest_end(
        self, bucket: str, partition: int, ceiling: SeqNo, floor: SeqNo
    ) -> SeqNo | None:
        """Where a partition can be cut; see `ChunkLog.newest_end`."""

    async def upkeep(
        self,
        bucket: str,
        *,
        urgent: bool,
        leases: Sequence[tuple[int, int, int]],
        lapsed: Sequence[LeaseRecord] = (),
        purge_before_cas: int,
        keep: int = 0,
    ) -> Upkeep:
        """One bounded step of indexing or compaction, if there is something to do.

        Args:
            bucket: The bucket.
            urgent: Whether to index what there is, however little.
            leases: (partition, start, end) of what is held.
            lapsed: Leases that are whole and hold nothing back; what is dropped of their ranges
                makes them broken, in the same commit.
            purge_before_cas: Tombstones with a lower CAS are old enough to go.
            keep: So many mutations of the bucket are not to be indexed yet: what is not can be cut.
        """

    async def read(
        self, bucket: str, partition: int, after: SeqNo, through: SeqNo, bytes_max: int
    ) -> list[Chunk]:
        """Chunks behind `after`; see `ChunkLog.read`."""

    async def measure(self, bucket: str, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        """The bytes of the chunks in each (partition, start, end]; see `ChunkLog.measure`."""

    async def find(
        self, bucket: str, partition: int, wants: Sequence[Want], indexed: int = 0
    ) -> list[Mutation | None]:
        """Items by key; see `KeyIndex.find`."""

    async def due(self, bucket: str, now: int, after: bytes, limit: int) -> tuple[list[Due], bytes]:
        """Items whose time has come; see `KeyIndex.due`."""

    def statistics(self, bucket: str) -> dict[str, object]:
        """Figures of a bucket's disk, as of the last step of its upkeep."""
