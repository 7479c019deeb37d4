"""A log with its index, as a bucket has them, and changes to commit there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.storage.log_model import chunk_of, record_of, row
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation
from upr_server.engine import FetchRequest
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.compaction import Compaction
from upr_server.storage.item_lookup import ItemLookup
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord
from upr_server.storage.simulated_disk import SimulatedDisk

PARTITIONS: Final = 2


class LoggedIndex:
    """A log, and its index."""

    def __init__(self, log: OrderedMap, index: OrderedMap) -> None:
        self.log = ChunkLog(log)
        self.index = KeyIndex(index, self.log)
        self.items = ItemLookup(index, self.log)
        self.log.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)

    def commit(self, rows: Sequence[Mutation], partition: int = 0) -> None:
        """Commits each mutation in a chunk of its own."""
        start = int(self.log.high_seq(partition))
        chunks = []
        for mutation in rows:
            chunks.append(chunk_of([mutation], start, mutation.seq))
            start = mutation.seq
        self.log.commit([PartitionWrite(partition, record_of(start), chunks)])

    def follow(self, partition: int = 0) -> None:
        while self.index.follow_log(partition, 2).seq < self.log.high_seq(partition):
            pass

    def sweep(self, partition: int = 0) -> None:
        mark = self.index.watermark(partition)
        sweep = Compaction(self.log, self.index, partition, mark.seq)
        while not sweep.step(1, (), 0).is_done:
            pass

    def find(self, *keys: bytes, partition: int = 0, value: bool = True) -> list[Mutation | None]:
        return self.items.find(partition, [FetchRequest(key, 0, value) for key in keys])


def sets(*keys: bytes, first: int = 1, expiry: int = 0) -> list[Mutation]:
    return [row(Operation.SET, key, seq, seq, expiry) for seq, key in enumerate(keys, first)]


def on_simulated_disks() -> tuple[LoggedIndex, SimulatedDisk, SimulatedDisk]:
    """A log and its index, with the disk of each."""
    log, index = SimulatedDisk(), SimulatedDisk()
    return LoggedIndex(log, index), log, index
