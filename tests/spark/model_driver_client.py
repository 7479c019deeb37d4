"""A bucket for planners: what a driver may ask of a server, answered by a plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import count

import attrs

from upr_protocol.client import HeldLease, LeasedRange, PartitionInfo, PartitionNumbers
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SEQ_MAX, HistoryId, PartitionId, PartitionState, SeqNo

BYTES_A_ROW = 10


@attrs.define
class ModelPartition:
    """One partition.

    Attributes:
        log: Its failover log.
        rows: Key by number, of those that were not compacted away.
        written: The same of all that were ever written in this history.
        high: Its highest number.
        persisted: How much of it is on disk.
        purge: Deletions up to there may be forgotten.
    """

    log: FailoverLog
    rows: dict[int, int] = attrs.field(factory=dict)
    written: dict[int, int] = attrs.field(factory=dict)
    high: int = 0
    persisted: int = 0
    purge: int = 0

    def newest(self) -> dict[int, int]:
        """By key its newest number."""
        return {key: seq for seq, key in sorted(self.rows.items())}


@attrs.define
class ModelLease:
    """A lease: its ranges, whether it is held, and whether it is whole."""

    ranges: list[tuple[int, int, int]]
    is_held: bool = True
    whole: bool = True


class ModelDriverClient:
    """A driver client without a server behind it.

    Args:
        partitions: How many partitions the bucket has.
        first_history: The ID of its first history. A bucket that is created again has others.
    """

    def __init__(self, partitions: int, first_history: int = 1) -> None:
        self._histories = count(first_history)
        self.partitions = [self._new() for _ in range(partitions)]
        self.leases: dict[int, ModelLease] = {}
        self.positions: dict[int, tuple[str, dict[int, int]]] = {}
        """By lease, whose position it is, and the position by partition."""
        self.times: dict[tuple[int, int], datetime] = {}
        """When a number of a partition was given, where that matters."""
        self.before_next_lease: Callable[[], None] | None = None
        """Called once, when a lease is asked for: what happens to the bucket before it is granted.
        """
        self.is_deleted = False
        self.row_bytes = BYTES_A_ROW

    def _new(self) -> ModelPartition:
        return ModelPartition(FailoverLog().with_branch(HistoryId(next(self._histories)), SeqNo(0)))

    # What happens to the bucket.

    def write(self, partition_id: int, key: int) -> None:
        partition = self.partitions[partition_id]
        partition.high += 1
        partition.rows[partition.high] = partition.written[partition.high] = key

    def flush(self, partition: int) -> None:
        self.partitions[partition].persisted = self.partitions[partition].high

    def fail_over(self, partition_id: int, to: int) -> None:
        """The partition goes on from `to`. If that is below what there was, it goes on elsewhere:
        on a server that never had more, has compacted nothing for the sake of it, and knows nothing
        of leases."""
        partition = self.partitions[partition_id]
        to = min(to, partition.high)
        partition.log = partition.log.with_branch(HistoryId(next(self._histories)), SeqNo(to))
        if to == partition.high:
            return
        partition.written = {seq: key for seq, key in partition.written.items() if seq <= to}
        partition.rows = dict(partition.written)
        partition.high = to
        partition.persisted = min(partition.persisted, to)
        partition.purge = min(partition.purge, to)
        for lease in self.leases.values():
            if any(leased == partition_id for leased, _, _ in lease.ranges):
                lease.whole = False

    def take_over(self, partition_id: int) -> None:
        """Another node becomes active for the partition. It has all of it, but knows nothing of
        leases, and has compacted as it liked."""
        for lease_id, lease in list(self.leases.items()):
            lease.ranges = [leased for leased in lease.ranges if leased[0] != partition_id]
            if not lease.ranges:
                del self.leases[lease_id]
        self.compact(partition_id)

    def add_partition(self) -> None:
        self.partitions.append(self._new())

    def let_leases_lapse(self) -> None:
        for lease in self.leases.values():
            lease.is_held = False

    def compact(self, partition_id: int) -> None:
        partition = self.partitions[partition_id]
        newest = partition.newest()
        for seq, key in list(partition.rows.items()):
            if (
                newest[key] != seq
                and seq <= partition.persisted
                and not self._is_held(partition_id, seq)
            ):
                del partition.rows[seq]
                for lease in self.leases.values():
                    if _holds(lease, partition_id, seq):
                        lease.whole = False

    def _is_held(self, partition: int, seq: int) -> bool:
        return any(
            lease.is_held and _holds(lease, partition, seq) for lease in self.leases.values()
        )

    def read(self, partition: int, start: int, end: int, lease_id: int) -> list[tuple[int, int]]:
        """Numbers and keys of (start, end], as a task gets them."""
        lease = self.leases[lease_id]
        assert lease.whole, "a task would be told that the range is gone"
        assert any(
            leased == partition and low <= start and end <= high
            for leased, low, high in lease.ranges
        ), "the lease does not hold this"
        rows = self.partitions[partition].rows
        return [(seq, rows[seq]) for seq in sorted(rows) if start < seq <= end]

    # What a driver client does.

    def seqnos(self) -> Mapping[PartitionId, PartitionNumbers]:
        if self.is_deleted:
            raise ServerError(Status.NO_BUCKET)
        return {
            PartitionId(partition_id): PartitionNumbers(
                PartitionId(partition_id),
                partition.log.current,
                SeqNo(partition.high),
                SeqNo(partition.persisted),
                SeqNo(0),
            )
            for partition_id, partition in enumerate(self.partitions)
        }

    def partition_infos(self, *, refresh: bool = False) -> Mapping[PartitionId, PartitionInfo]:
        return {
            PartitionId(partition_id): PartitionInfo(
                PartitionId(partition_id),
                is_held=True,
                state=PartitionState.ACTIVE,
                high_seq=SeqNo(partition.high),
                persisted_seq=SeqNo(partition.persisted),
                purge_seq=SeqNo(partition.purge),
                log=partition.log,
            )
            for partition_id, partition in enumerate(self.partitions)
        }

    def has_partition(self, partition: PartitionId, log: FailoverLog) -> bool:
        if partition >= len(self.partitions):
            return False
        history_ids = {entry.history_id for entry in log}
        return not history_ids or any(
            entry.history_id in history_ids for entry in self.partitions[partition].log
        )

    def wait_until_persisted(self) -> Mapping[PartitionId, PartitionNumbers]:
        for index in range(len(self.partitions)):
            self.flush(index)
        return self.seqnos()

    def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
        self.wait_until_persisted()
        return {
            index: max(
                (
                    seq
                    for seq in range(1, partition.high + 1)
                    if self.times.get((index, seq), time) < time
                ),
                default=0,
            )
            for index, partition in enumerate(self.partitions)
        }

    def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
        if self.before_next_lease is not None:
            happen, self.before_next_lease = self.before_next_lease, None
            happen()
        if lease_id in self.leases:
            return self.renew_lease(lease_id)
        settled = []
        for partition, start, end in ranges:
            persisted = self.partitions[partition].persisted
            assert end == SEQ_MAX or end <= persisted
            if 0 < start < self.partitions[partition].purge:
                raise ServerError(Status.ROLLBACK_NEEDED)
            settled.append((partition, start, min(end, persisted)))
        self.leases[lease_id] = ModelLease(settled)
        return self._told(lease_id)

    def renew_lease(self, lease_id: int) -> HeldLease:
        lease = self.leases.get(lease_id)
        if lease is None or not lease.whole:
            raise ServerError(Status.RANGE_GONE)
        lease.is_held = True
        return self._told(lease_id)

    def _told(self, lease_id: int) -> HeldLease:
        return HeldLease(
            lease_id,
            60,
            tuple(
                LeasedRange(
                    PartitionId(partition),
                    self.partitions[partition].log.current,
                    SeqNo(start),
                    SeqNo(end),
                    self.row_bytes * (end - start),
                )
                for partition, start, end in self.leases[lease_id].ranges
            ),
        )

    def release_lease(self, lease_id: int) -> None:
        self.leases.pop(lease_id, None)
        self.positions.pop(lease_id, None)

    def put_position(self, lease_id: int, owner: str, seqs: Mapping[int, int]) -> None:
        self.positions[lease_id] = owner, dict(seqs)

    def close(self) -> None:
        pass


def _holds(lease: ModelLease, partition: int, seq: int) -> bool:
    return any(leased == partition and start < seq <= end for leased, start, end in lease.ranges)
