"""One bucket's log and index together: opened, written and truncated as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.ids import PartitionState, SeqNo
from upr_server.storage.bucket_maintenance import BucketMaintenance
from upr_server.storage.chunk_log import STORED_OVERHEAD_BYTES, ChunkLog
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.item_lookup import ItemLookup
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.partition_usage import PartitionUsage
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import PartitionRecord, Watermark
from upr_server.storage.stored_bucket import StoredBucket


class BucketStorage:
    """The disk of one bucket, as the process that writes it sees it.

    A process that only reads uses `log`, `index` and `items`, and neither `open` nor what depends
    on it.

    Args:
        log: Where the log is stored.
        index: Where the index is stored.
        copy_chunk: Copies a chunk that was read to where its reader takes it from.

    Attributes:
        log: The log.
        index: The index.
        items: Finds items by key.
        maintenance: Indexes the log, and compacts it.
        copy_chunk: As given.
    """

    def __init__(
        self,
        log: OrderedMap,
        index: OrderedMap,
        copy_chunk: Callable[[Chunk], Chunk] = Chunk.copied,
    ) -> None:
        self.log = ChunkLog(log)
        self.index = KeyIndex(index, self.log)
        self.items = ItemLookup(index, self.log)
        self.copy_chunk = copy_chunk
        self._partitions: list[PartitionUsage] = []
        self.maintenance = BucketMaintenance(self.log, self.index, self._partitions)
        self._commits = 0

    def open(self) -> StoredBucket:
        """Reads what the bucket is, and how its disk is used. O(chunks).

        A partition is indexed from the beginning if the record of how far its index is was damaged,
        or names more than the log has: the log has everything that the index should have. A
        partition with a damaged record is left as it is: log and index of it are neither read nor
        written until `empty_partition`.

        Raises:
            CorruptionError: A record that concerns the whole bucket is damaged or missing.
        """
        stored_bucket = self._without_fronts(self.log.load())
        sizes = self.log.chunk_bytes()
        reindex_reasons: dict[int, str] = {}
        self._partitions[:] = [
            PartitionUsage(
                partition.record.high,
                partition.purge_seq,
                Watermark()
                if partition.damage
                else self._watermark(partition_id, partition.record.high, reindex_reasons),
                sizes.get(partition_id, 0),
                partition.damage,
                is_refused=bool(partition.damage),
            )
            for partition_id, partition in enumerate(stored_bucket.partitions)
        ]
        for partition_id, usage in enumerate(self._partitions):
            if usage.is_refused:
                continue
            if usage.watermark.damaged_through:
                usage.damage = (
                    f"partition {partition_id} has damaged changes at or below "
                    f"{usage.watermark.damaged_through}"
                )
            live_bytes = max(0, usage.chunk_bytes - usage.watermark.garbage_bytes)
            self.index.set_live_bytes(
                partition_id, live_bytes * usage.watermark.seq // max(usage.high, 1)
            )
            # A crash may have interrupted a truncation to 0 after the first entries went.
            while not usage.watermark.seq and self.index.has_entries(partition_id):
                self.maintenance.delete_entries(partition_id)
        return msgspec.structs.replace(
            stored_bucket,
            partitions=[
                msgspec.structs.replace(
                    partition,
                    indexed_seq=usage.watermark.seq,
                    item_count=usage.watermark.item_count,
                )
                for partition, usage in zip(stored_bucket.partitions, self._partitions, strict=True)
            ],
            reindex_reasons=reindex_reasons,
        )

    def _without_fronts(self, stored_bucket: StoredBucket) -> StoredBucket:
        """Deletes the fronts of snapshots whose rest was only in memory. A replica goes on behind
        the front that it has received."""
        partitions = list(stored_bucket.partitions)
        records: list[tuple[int, PartitionRecord]] = []
        for partition_id, partition in enumerate(partitions):
            record = partition.record
            if record.partial is not None and record.state != PartitionState.REPLICA:
                record = msgspec.structs.replace(record, partial=None)
                records.append((partition_id, record))
                partitions[partition_id] = msgspec.structs.replace(partition, record=record)
        if not records:
            return stored_bucket
        self.log.delete_fronts(records)
        return msgspec.structs.replace(stored_bucket, partitions=partitions)

    def _watermark(self, partition: int, high: SeqNo, reindex_reasons: dict[int, str]) -> Watermark:
        """How far a partition's index is. If nobody can tell, or it is beyond the log's end at
        `high`, the index is emptied; why goes into `reindex_reasons`."""
        try:
            mark = self.index.watermark(partition)
            if mark.seq <= high:
                return mark
            # The log is older than the index: it was copied before, or restored alone. What comes
            # next would have numbers that the index has already, for other keys.
            reindex_reasons[partition] = f"it is at {mark.seq}, and the log ends at {high}"
        except CorruptionError as error:
            reindex_reasons[partition] = str(error)
        while self.maintenance.delete_entries(partition):
            pass
        return Watermark()

    def commit(self, writes: Sequence[PartitionWrite]) -> dict[int, str]:
        """Puts whole snapshots on disk; `ChunkLog.commit` says more. A partition of which a damaged
        record is met now is refused from here on, as one that is found damaged by `open`.

        Returns:
            What is damaged of such partitions, by partition. Nothing of them was written.

        Raises:
            CorruptionError: A partition is refused already. Nothing was written.
        """
        self._check_not_refused(write.partition for write in writes)
        try:
            damages = self.log.commit(writes)
        except DiskFullError:
            self.maintenance.is_full = True
            raise
        self.maintenance.is_full = False
        self._commits += 1
        for partition, damage in damages.items():
            self.refuse(partition, damage)
        for write in writes:
            if write.partition in damages:
                continue
            usage = self._partitions[write.partition]
            usage.high = write.record.high
            usage.purge_seq = max(usage.purge_seq, write.purge_seq)
            usage.chunk_bytes += sum(chunk.nbytes + STORED_OVERHEAD_BYTES for chunk in write.chunks)
        return damages

    def refuse(self, partition: int, damage: str) -> None:
        """Neither reads nor writes a partition any more: one of its records is damaged."""
        self.maintenance.abandon_compaction(partition)
        chunk_bytes = self._partitions[partition].chunk_bytes
        self._partitions[partition] = PartitionUsage(
            SeqNo(0), SeqNo(0), Watermark(), chunk_bytes, damage, is_refused=True
        )

    def put_partition_map(
        self, document: str, records: Sequence[tuple[int, PartitionRecord]]
    ) -> dict[int, str]:
        """Stores another partition map and the partitions' records under it. No record may end
        below the index's watermark. Of a partition with a damaged record nothing is written; if the
        damage is met only now, the partition is refused from here on.

        Returns:
            What is damaged of such partitions, by partition.
        """
        refused = {
            partition: usage.damage
            for partition, _ in records
            if (usage := self._partitions[partition]).is_refused
        }
        deleted_bytes, damages = self.log.put_partition_map(
            document,
            [(partition, record) for partition, record in records if partition not in refused],
        )
        # A compaction under way goes by the old ends.
        self.maintenance.abandon_compaction()
        for partition, record in records:
            if partition in deleted_bytes:
                usage = self._partitions[partition]
                usage.high = record.high
                usage.chunk_bytes -= deleted_bytes[partition]
        for partition, damage in damages.items():
            self.refuse(partition, damage)
        return refused | damages

    def truncate(
        self, partition: int, record: PartitionRecord, answers: Sequence[bytes] = ()
    ) -> list[int]:
        """Deletes what a partition has behind `record.high`; `ChunkLog.truncate` says more.

        Raises:
            ValueError: It ends below the index's watermark. Only 0 is possible there, once
                `delete_index_entries` has deleted everything.
            CorruptionError: It has a damaged record.
        """
        self._check_not_refused([partition])
        usage = self._partitions[partition]
        if record.high < usage.watermark.seq:
            raise ValueError(
                f"partition {partition} cannot end at {record.high}: it is indexed up to "
                f"{usage.watermark.seq}"
            )
        broken_leases, deleted_bytes = self.log.truncate(partition, record, answers)
        self.maintenance.abandon_compaction()
        usage.high = record.high
        usage.chunk_bytes -= deleted_bytes
        if not record.high:
            usage.purge_seq = SeqNo(0)
            usage.damage, usage.is_stuck = "", False
        return broken_leases

    def _check_not_refused(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            usage = self._partitions[partition]
            if usage.is_refused:
                raise CorruptionError(f"partition {partition} is not written to: {usage.damage}")

    def empty_partition(self, partition: int, record: PartitionRecord) -> None:
        """Deletes everything that a partition has, also one with damaged records. Afterwards it can
        be used.

        Args:
            partition: The partition.
            record: Its record afterwards: that of an empty partition.
        """
        while self.delete_index_entries(partition):
            pass
        self.log.empty_partition(partition, record)
        self._partitions[partition] = PartitionUsage(SeqNo(0), SeqNo(0), Watermark(), 0)

    def delete_index_entries(self, partition: int) -> bool:
        """Deletes a bounded number of a partition's index entries. Repeated, it deletes all.

        Returns:
            Whether there may be more.

        Raises:
            DiskFullError: There is no room to delete even one.
        """
        self.maintenance.abandon_compaction()
        has_more = self.maintenance.delete_entries(partition)
        usage = self._partitions[partition]
        usage.watermark, usage.leased_bytes = Watermark(), {}
        usage.has_old_entries = has_more
        return has_more

    def statistics(self) -> dict[str, object]:
        """Figures; sizes in bytes, 0 for a file that tells none as it is damaged."""
        file_damage, figures = "", dict[str, dict[str, int]]()
        for part, ordered_map in (("log", self.log.ordered_map), ("index", self.index.ordered_map)):
            try:
                figures[part] = ordered_map.statistics()
            except CorruptionError as error:
                figures[part] = {"bytes_used": 0, "bytes_in_file": 0}
                file_damage = file_damage or str(error)
        damages = (usage.damage for usage in self._partitions if usage.damage)
        return {
            **figures,
            "chunk_bytes": sum(usage.chunk_bytes for usage in self._partitions),
            "commits": self._commits,
            "compactions": self.maintenance.compactions,
            "damaged": file_damage or next(damages, ""),
            "damaged_partitions": [
                partition for partition, usage in enumerate(self._partitions) if usage.damage
            ],
        }

    def close(self) -> None:
        """Closes the files of both."""
        self.log.ordered_map.close()
        self.index.ordered_map.close()
