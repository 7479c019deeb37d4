"""Decides what the next batch of a stream has, from its offset and the server's numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

import attrs

from upr_protocol.client import HeldLease, PartitionInfo, PartitionNumbers
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo
from upr_protocol.spark.batch_shares import StreamLimits, batch_ends, mean_size, sizes_of
from upr_protocol.spark.driver_client import DriverClient, holds_ranges
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.offset import PartitionOffset, StreamOffset, is_mid_snapshot
from upr_protocol.spark.partition_rollback import (
    rewound,
    rollback_error,
    rollback_needed,
    with_batch_end,
)
from upr_protocol.spark.stream_backlog import BacklogAge, BacklogSize, StreamBacklog
from upr_protocol.spark.stream_leases import StreamLeases
from upr_protocol.spark.stream_start import PLAN_TRIES, StreamStart, failing_over_error

_NOTHING: Final = PartitionOffset()

Partitions = dict[PartitionId, PartitionOffset]


class StreamPlan:
    """Plans the batches of one stream.

    What there is is taken in as snapshots from disk: a lease pins, in each partition that has
    something new, all from where the stream stands to the persisted snapshot end. Without a limit a
    batch has all of it; with one, several batches go through it, and only the last of them ends
    where the partitions are consistent. Each offset says so.

    Args:
        driver: The server.
        bucket: The bucket's name.
        durable: Whether only what is on disk is planned. If not, the newest there is, unpinned.
        marks_rollback: Whether a rollback becomes a marker; if not, it raises an error.
        rewinds: Whether a partition that rolls back goes on from the end of an earlier batch, if
            the offset has one that both histories share; otherwise it starts again at 0.
        new_lease_id: Draws a fresh non-zero random number.
        start_time: Of a stream that begins at a time: this time. It may not have passed.
        clock: Gives the time, in seconds.

    Attributes:
        start: Where the stream begins.
        leases: What is pinned for it.
    """

    def __init__(
        self,
        driver: DriverClient,
        bucket: str,
        *,
        durable: bool,
        marks_rollback: bool,
        rewinds: bool,
        new_lease_id: Callable[[], int],
        start_time: datetime | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.start = StreamStart(driver, bucket, durable=durable)
        self.leases = StreamLeases(driver, new_lease_id)
        self._driver = driver
        self._bucket = bucket
        self._durable = durable
        self._marks_rollback = marks_rollback
        self._rewinds = rewinds
        self._start_time = start_time
        self._age = BacklogAge(clock)
        self._target_ends: Mapping[PartitionId, SeqNo] = {}
        self._sizes: Mapping[PartitionId, float] = {}
        """Bytes a sequence number, by partition, of what was pinned last."""

    def stop_at_current_end(self) -> None:
        """No batch will go beyond what there is now, once it is on disk."""
        if self._durable:
            seqnos = self._driver.wait_until_persisted()
            ends = dict.fromkeys(seqnos, SEQ_MAX)
            lease = self.leases.acquire(dict.fromkeys(seqnos, SeqNo(0)), ends)
            self.leases.note_target(lease.lease_id)
            self._target_ends = {pinned.partition: pinned.end for pinned in lease.ranges}
        else:
            seqnos = self._driver.seqnos()
            self._target_ends = {
                partition: numbers.high_seq for partition, numbers in seqnos.items()
            }

    # The next batch.

    def backlog_after(self, start: StreamOffset) -> BacklogSize:
        """What there is behind `start` for the next batches.

        Raises:
            PipelineError: As `next_offset` does.
        """
        seqnos = self._driver.seqnos()
        available = self._available(seqnos)
        self._age.note_ends(available)
        ends = {partition: self._limit(partition, seq) for partition, seq in available.items()}
        numbers = sum(
            ends[partition] - seq for partition, seq in _backlog(start.partitions, ends).items()
        )
        partitions = self._after_rollbacks(start, seqnos)
        is_urgent = self._target_ends or _has_rollback(partitions) or is_mid_snapshot(partitions)
        return BacklogSize(numbers, not is_urgent)

    def next_offset(self, start: StreamOffset, limits: StreamLimits) -> StreamOffset:
        """Where the batch ends that begins at `start`; `start` itself when there is nothing new.

        Raises:
            PipelineError: The server cannot be asked; or the stream has to go back, and is not to
                mark that.
        """
        if not start.is_initial or self._start_time is None:
            return self._end_after(start, limits)
        # If the time has not passed, rows have come since from before it, and more may come while
        # the batch is planned. What is pinned then is not read: the stream stays where it is.
        moved_start = self.start.moved_to_time(start, self._start_time)
        end = self._end_after(moved_start, limits)
        if end is moved_start:
            return start
        if self.start.moved_to_time(start, self._start_time) != moved_start:
            self.leases.release(end.lease_id)
            return start
        return end

    def _end_after(self, start: StreamOffset, limits: StreamLimits) -> StreamOffset:
        for _ in range(PLAN_TRIES):
            end = self._end_unless_parted(start, limits)
            if end is not None:
                return end
        raise failing_over_error()

    def _end_unless_parted(self, start: StreamOffset, limits: StreamLimits) -> StreamOffset | None:
        """Where the batch ends that begins at `start`; None if a partition has begun another
        history, or moved to another node, while that was planned."""
        seqnos = self._driver.seqnos()
        self._age.note_ends(self._available(seqnos))
        partitions = self._after_rollbacks(start, seqnos)
        if not self._durable:
            return self._plan_newest(start, partitions, seqnos, limits)
        if not _has_rollback(partitions) and start.lease_id and is_mid_snapshot(partitions):
            lease = self.leases.renew(start.lease_id)
            if lease is not None and _holds_snapshots(lease, partitions):
                return self._limited_offset(
                    start, partitions, start.lease_id, limits, sizes_of(lease)
                )
        return self._plan_with_new_lease(start, partitions, seqnos, limits)

    def _available(
        self, seqnos: Mapping[PartitionId, PartitionNumbers]
    ) -> dict[PartitionId, SeqNo]:
        """How far each partition can be read now."""
        return {
            partition: numbers.persisted_seq if self._durable else numbers.high_seq
            for partition, numbers in seqnos.items()
        }

    def _after_rollbacks(
        self, start: StreamOffset, seqnos: Mapping[PartitionId, PartitionNumbers]
    ) -> Partitions:
        """Where the stream stands in the partitions that are asked for, having gone back where it
        must."""
        partitions: Partitions = {
            partition: self._after_batch(offset)
            for partition, offset in start.partitions.items()
            if partition in seqnos or not self._driver.has_partition(partition, offset.log)
        }
        changed = [
            partition
            for partition, offset in partitions.items()
            if offset.seq
            and (partition not in seqnos or seqnos[partition].history_id != offset.log.current)
        ]
        if not changed:
            return partitions
        infos = self._driver.partition_infos()
        for partition in changed:
            offset, info = partitions[partition], infos.get(partition)
            rollback = rollback_needed(offset, info)
            if rollback is not None:
                if not self._marks_rollback:
                    raise rollback_error(self._bucket, partition, offset, info, rollback)
                ceiling = rollback.ceiling if self._rewinds else SeqNo(0)
                partitions[partition] = rewound(offset, info, ceiling)
        return partitions

    def _after_batch(self, offset: PartitionOffset) -> PartitionOffset:
        """Where a batch has ended, as the next one begins there."""
        batch_ends = offset.batch_ends if self._rewinds else ()
        return attrs.evolve(offset, rolled_back_from=None, batch_ends=batch_ends)

    def _after_purges(self, partitions: Partitions) -> Partitions:
        """Where the stream goes on if it was away for so long that the server has removed deletions
        behind it."""
        infos = self._driver.partition_infos(refresh=True)
        new_offsets = dict(partitions)
        for partition, offset in partitions.items():
            if partition not in infos or not 0 < offset.seq < infos[partition].purge_seq:
                continue
            if not self._marks_rollback:
                raise PipelineError(
                    "UPR_RANGE_GONE",
                    f"the stream stood still for too long, or starts too far back: the server has "
                    f"removed deletions from {offset.seq} to {infos[partition].purge_seq} in "
                    f"partition {partition} of {self._bucket}: begin at earliest with a new "
                    "checkpoint and an empty sink, or stream with onRollback=marker into a sink "
                    "that can undo",
                )
            new_offsets[partition] = rewound(offset, infos[partition], SeqNo(0))
        return new_offsets

    def _plan_with_new_lease(
        self,
        start: StreamOffset,
        partitions: Partitions,
        seqnos: Mapping[PartitionId, PartitionNumbers],
        limits: StreamLimits,
    ) -> StreamOffset | None:
        ends = {
            partition: self._limit(partition, numbers.persisted_seq)
            for partition, numbers in seqnos.items()
        }
        backlog = _backlog(partitions, ends)
        if not backlog:
            self.leases.release_target()
            # Perhaps a partition went back that has nothing.
            return self._limited_offset(
                start, self._begin_snapshots(partitions, {}, {}), 0, limits, {}
            )
        # To whatever is on disk when the lease is granted: nothing is overtaken. To a target only
        # where a lease has held all since that was the newest.
        is_to_target = self.leases.holds_target(backlog, ends)
        to = ends if is_to_target else dict.fromkeys(ends, SEQ_MAX)
        try:
            lease = self.leases.acquire(backlog, to)
        except ServerError as error:
            if error.status is not Status.ROLLBACK_NEEDED:
                raise
            partitions = self._after_purges(partitions)
            lease = self.leases.acquire(_backlog(partitions, ends), to)
        is_usable = False
        try:
            infos = self._driver.partition_infos()
            is_usable = (
                not _has_parted_since(seqnos, partitions, infos)
                and not _is_of_other_history(lease, infos)
                # Another node may have become active before it granted the new lease.
                and (not is_to_target or self.leases.holds_target(backlog, ends))
            )
        finally:
            if not is_usable:
                self.leases.release(lease.lease_id)
        if not is_usable:
            return None
        self.leases.release_on_commit(lease.lease_id)
        self.leases.release_target()
        pinned = {range_.partition: range_.end for range_ in lease.ranges}
        if self._target_ends:
            self._target_ends = {**self._target_ends, **pinned}
        partitions = self._begin_snapshots(partitions, infos, pinned)
        return self._limited_offset(start, partitions, lease.lease_id, limits, sizes_of(lease))

    def _limit(self, partition: PartitionId, end: SeqNo) -> SeqNo:
        """How far a partition may be read."""
        if not self._target_ends:
            return end
        return min(end, self._target_ends.get(partition, SeqNo(0)))

    def _plan_newest(
        self,
        start: StreamOffset,
        partitions: Partitions,
        seqnos: Mapping[PartitionId, PartitionNumbers],
        limits: StreamLimits,
    ) -> StreamOffset | None:
        ends = {
            partition: self._limit(partition, numbers.high_seq)
            for partition, numbers in seqnos.items()
        }
        infos: Mapping[PartitionId, PartitionInfo] = {}
        if _backlog(partitions, ends):
            partitions = self._after_purges(partitions)
            infos = self._driver.partition_infos()
            if _has_parted_since(seqnos, partitions, infos) or not all(
                infos[partition].log.contains(numbers.history_id, ends[partition])
                for partition, numbers in seqnos.items()
            ):
                return None
        else:
            ends = {}
        partitions = self._begin_snapshots(partitions, infos, ends)
        return self._limited_offset(start, partitions, 0, limits, {})

    def _begin_snapshots(
        self,
        partitions: Partitions,
        infos: Mapping[PartitionId, PartitionInfo],
        ends: Mapping[PartitionId, SeqNo],
    ) -> Partitions:
        """Where the stream stands, with a new snapshot begun up to each of `ends` that is behind
        that; of those before, nothing is to be read any more."""
        offsets = {
            partition: attrs.evolve(offset, snapshot_end=offset.seq)
            for partition, offset in partitions.items()
        }
        for partition, seq in _backlog(partitions, ends).items():
            offset = partitions.get(partition, _NOTHING)
            batch_ends = with_batch_end(offset) if self._rewinds else ()
            # One that was not read to its end goes on in the new one: what it left out so far is
            # only there.
            snapshot_start = offset.snapshot_start if seq < offset.snapshot_end else seq
            offsets[partition] = PartitionOffset(
                infos[partition].log,
                seq,
                snapshot_start,
                ends[partition],
                offset.rolled_back_from,
                batch_ends,
            )
        return offsets

    def _limited_offset(
        self,
        start: StreamOffset,
        partitions: Partitions,
        lease_id: int,
        limits: StreamLimits,
        sizes: Mapping[PartitionId, float],
    ) -> StreamOffset:
        """The offset behind as much as the limits allow of what lies before the snapshots' ends.
        Partitions that are not asked for stay where they are, perhaps inside a snapshot."""
        self._sizes = {**self._sizes, **sizes}
        ends = batch_ends(partitions, limits, sizes)
        new_offsets = {
            partition: attrs.evolve(offset, seq=ends.get(partition, offset.seq))
            for partition, offset in partitions.items()
        }
        if all(
            offset.rolled_back_from is None and offset.seq == start.partition_offset(partition).seq
            for partition, offset in new_offsets.items()
        ):
            return start
        initial = start.partitions if start.is_initial else None
        unmoved = {
            partition: self._after_batch(offset)
            for partition, offset in start.partitions.items()
            if partition not in new_offsets
        }
        number_bytes = mean_size(
            {partition: end - partitions[partition].seq for partition, end in ends.items()}, sizes
        )
        return StreamOffset(
            self._bucket, unmoved | new_offsets, lease_id, initial, number_bytes=number_bytes
        )

    def progress(self, planned_offset: StreamOffset | None) -> tuple[StreamOffset, StreamBacklog]:
        """How far the server is, and what it has that is in no batch yet.

        Args:
            planned_offset: Where the newest batch ends; None if none was planned.
        """
        ends = self._available(self._driver.seqnos())
        self._age.note_ends(ends)
        latest = {partition: PartitionOffset(FailoverLog(), seq) for partition, seq in ends.items()}
        partitions = {} if planned_offset is None else planned_offset.partitions
        numbers = {
            partition: max(0, seq - partitions.get(partition, _NOTHING).seq)
            for partition, seq in ends.items()
        }
        age_s = self._age.age_s({partition: offset.seq for partition, offset in partitions.items()})
        backlog = StreamBacklog(tuple(numbers.values()), self._nbytes(numbers), age_s)
        return StreamOffset(self._bucket, latest), backlog

    def _nbytes(self, numbers: Mapping[PartitionId, int]) -> int | None:
        if not self._durable or not self._sizes:
            return None if any(numbers.values()) else 0
        mean = sum(self._sizes.values()) / len(self._sizes)
        return int(
            sum(count * self._sizes.get(partition, mean) for partition, count in numbers.items())
        )


def _has_rollback(partitions: Mapping[PartitionId, PartitionOffset]) -> bool:
    """Whether the next batch begins with a rollback."""
    return any(offset.rolled_back_from is not None for offset in partitions.values())


def _holds_snapshots(lease: HeldLease, partitions: Mapping[PartitionId, PartitionOffset]) -> bool:
    """Whether a lease holds what there is more of the snapshots that were begun. It does not where
    a partition is asked for again that the lease's batch was without."""
    return holds_ranges(
        lease,
        (
            (partition, offset.seq, offset.snapshot_end)
            for partition, offset in partitions.items()
            if offset.seq < offset.snapshot_end
        ),
    )


def _backlog(
    partitions: Mapping[PartitionId, PartitionOffset], ends: Mapping[PartitionId, SeqNo]
) -> dict[PartitionId, SeqNo]:
    """Partitions of which there is more, and where the stream stands in them."""
    seqs = {partition: partitions.get(partition, _NOTHING).seq for partition in ends}
    return {partition: seq for partition, seq in seqs.items() if seq < ends[partition]}


def _has_parted_since(
    seqnos: Mapping[PartitionId, PartitionNumbers],
    partitions: Mapping[PartitionId, PartitionOffset],
    infos: Mapping[PartitionId, PartitionInfo],
) -> bool:
    """Whether a partition has begun another history since its numbers were asked for, in which the
    stream has to go back. What was planned from where it stood would lack the changes that the new
    history has below that; and with the new log in the offset nothing would show it later.

    Args:
        seqnos: The numbers that the plan began with.
        partitions: Where the stream stands in the histories of those.
        infos: The logs that are to go into the offset.
    """
    return any(
        partition not in infos
        or (
            infos[partition].log.current != numbers.history_id
            and rollback_needed(partitions.get(partition, _NOTHING), infos[partition]) is not None
        )
        for partition, numbers in seqnos.items()
    )


def _is_of_other_history(lease: HeldLease, infos: Mapping[PartitionId, PartitionInfo]) -> bool:
    """Whether a history of the logs lacks what a lease was granted on: the offset would name
    numbers in it that are another history's, or that it has yet to reach."""
    return any(
        not infos[range_.partition].log.contains(range_.history_id, range_.end)
        for range_ in lease.ranges
    )
