"""Removing damaged partitions from a replica, so that it copies them from the active node again.

A replica whose partition is empty follows the active node from the beginning. So it is enough to
empty the partition, as a rollback to 0 does, and to note that it lacks what it had. An active node
must not do that: the others would follow it, and lose what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionState, SeqNo
from upr_protocol.partition_map import PartitionMap, PartitionMapError
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.directory import DataDirectory, lock_for_writing
from upr_server.storage.errors import CorruptionError
from upr_server.storage.records import PartitionRecord
from upr_server.storage.stored_bucket import StoredBucket, StoredPartition

_READ_BYTES: Final = 8 * 1024 * 1024


class DamagedPartition(msgspec.Struct, frozen=True):
    """A partition in whose log something is damaged, or a bucket that cannot be opened.

    Attributes:
        bucket: The bucket.
        partition: The partition; None for the bucket as a whole.
        is_emptied: Whether it was emptied. Only a replica is.
        damage: What is damaged.
        is_refused: Whether it is a record without which the server refuses the whole partition.
    """

    bucket: str
    partition: int | None
    is_emptied: bool
    damage: str
    is_refused: bool = False

    def __str__(self) -> str:
        if self.partition is None:
            return (
                f"bucket {self.bucket}: not mended: {self.damage}; `upr-server check` says what "
                "else is damaged. If other nodes have the bucket, delete it here with `upr bucket "
                "delete`, and run `upr replicas remove` and `upr replicas add` for this node: it "
                "then copies the bucket from them"
            )
        place = f"bucket {self.bucket}, partition {self.partition}"
        if self.is_emptied:
            return f"{place}: emptied; the node copies it from the active node when it runs"
        return (
            f"{place}: not emptied, because this node is not its replica: {self.damage}; let a "
            f"replica take it over with `upr {self.command}`, stop this node, and repeat the "
            "command"
        )

    @property
    def command(self) -> str:
        """The command that makes a replica active for the partition."""
        return "failover" if self.is_refused else "takeover"


def empty_damaged_replicas(path: Path) -> Iterator[DamagedPartition]:
    """Empties the partitions whose log is damaged and of which the node is a replica. It goes on
    from one to the next as the iterator is read.

    Yields:
        Each partition whose log is damaged, once it was emptied or left as it is; and each bucket
        that cannot be opened, which is left as it is.

    Raises:
        DataDirectoryError: It is not a data directory, a server uses it, or it cannot be written.
        DiskFullError: There is no room for a commit.
    """
    with lock_for_writing(path):
        directory = DataDirectory(path)
        for name in directory.names():
            try:
                storage = BucketStorage(*directory.open(name))
                try:
                    yield from _mend(storage, name)
                finally:
                    storage.close()
            except CorruptionError as error:
                yield DamagedPartition(name, None, is_emptied=False, damage=str(error))


def _mend(storage: BucketStorage, name: str) -> Iterator[DamagedPartition]:
    stored_bucket = storage.open()
    for partition_id, partition in enumerate(stored_bucket.partitions):
        if partition.damage:
            is_replica = _is_replica_by_map(stored_bucket, partition_id)
            if is_replica:
                empty = PartitionRecord(PartitionState.REPLICA, (), SeqNo(0), 0, is_incomplete=True)
                storage.empty_partition(partition_id, empty)
            yield DamagedPartition(
                name, partition_id, is_replica, partition.damage, is_refused=True
            )
            continue
        damage = _damage_in(storage.log, partition_id, partition)
        if damage:
            is_replica = partition.record.state == PartitionState.REPLICA
            if is_replica:
                storage.empty_partition(partition_id, _empty_record(partition.record))
            yield DamagedPartition(name, partition_id, is_replica, damage)


def _is_replica_by_map(stored_bucket: StoredBucket, partition_id: int) -> bool:
    """Whether this node is a replica of a partition whose record is damaged: so says the map for
    each node that this one can be, given its other partitions. If nobody can tell, it is none."""
    if not stored_bucket.partition_map:
        return False
    try:
        partition_map = PartitionMap.decode(stored_bucket.partition_map)
    except PartitionMapError as error:
        raise CorruptionError(f"the partition map cannot be read: {error}") from error
    assignments = partition_map.partitions
    names = [
        name
        for name in partition_map.nodes
        if all(
            partition.damage or _may_be_in_state(partition.record.state, assignment.state_of(name))
            for partition, assignment in zip(stored_bucket.partitions, assignments, strict=True)
        )
    ]
    return bool(names) and all(
        assignments[partition_id].state_of(name) is PartitionState.REPLICA for name in names
    )


def _may_be_in_state(state: int, state_in_map: PartitionState) -> bool:
    # A suspect copy is pending although the map has it active.
    return state == state_in_map or (
        state == PartitionState.PENDING and state_in_map is PartitionState.ACTIVE
    )


def _damage_in(log: ChunkLog, partition_id: int, partition: StoredPartition) -> str:
    read_seq, through = SeqNo(0), partition.record.received_seq
    try:
        while read_seq < through:
            read_seq = log.read_chunks(partition_id, read_seq, through, bytes_max=_READ_BYTES)[
                -1
            ].end
    except CorruptionError as error:
        return str(error)
    return ""


def _empty_record(record: PartitionRecord) -> PartitionRecord:
    failover_log = FailoverLog.of_pairs(record.failover_log).up_to(SeqNo(0))
    return msgspec.structs.replace(
        record,
        failover_log=tuple(failover_log.pairs()),
        high=SeqNo(0),
        partial=None,
        is_incomplete=True,
    )
