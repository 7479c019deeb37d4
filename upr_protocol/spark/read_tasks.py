"""What the tasks of a read are to do: ranges of numbers, packed by size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import attrs
from pyspark.sql.datasource import InputPartition

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.spark.offset import PartitionOffset, StreamOffset

CORES: Final = 4
"""A Spark has 2 cores, or a multiple of 4, more often than not."""

TASKS_MAX: Final = 100_000
"""Tasks of a read, about. The driver holds all of them, and Spark needs hours for more."""

TASK_GROWTH_MAX: Final = 1.34
"""How much larger tasks may become, so that there are fewer of them."""


@attrs.frozen
class RollbackMarker:
    """A partition went back: what was read of it above a number is void, and is read anew.

    Attributes:
        history_id: The history in which it goes on.
        to_seq: The number after which it goes on: 0, or the end of an earlier batch at which the
            partition was consistent.
        from_seq: The number that it had reached.
    """

    history_id: HistoryId
    to_seq: SeqNo
    from_seq: SeqNo


@attrs.frozen
class PartitionRange:
    """A range of one partition's numbers, (start, end].

    Attributes:
        partition: The partition.
        log: The failover log under which it was planned.
        start: Where it begins, exclusive.
        end: Where it ends.
        snapshot_start: Where the snapshot begins of which it is a part.
        snapshot_end: Where that ends: only there is the partition consistent.
        nbytes: What it takes on the server's disk, about.
        marker: The marker that comes before its rows; None for no marker.
        history_id: The history that its rows are said to be of, whenever they are read: the server
            begins another one at each crash. 0 for that in which they are read, where nothing pins
            them.
        has_whole_snapshot: Whether the rows go on behind `end`, up to where the snapshot ends that
            the server sends. Where nothing pins the rows, a key that has changed since the end was
            planned has its newest row only, behind that.
    """

    partition: PartitionId
    log: FailoverLog
    start: SeqNo
    end: SeqNo
    snapshot_start: SeqNo
    snapshot_end: SeqNo
    nbytes: int = 0
    marker: RollbackMarker | None = None
    history_id: HistoryId = HistoryId(0)
    has_whole_snapshot: bool = False

    def pieces(self, bytes_max: int) -> Iterator[PartitionRange]:
        """The same in ranges of about so many bytes."""
        numbers = self.end - self.start
        count = max(1, min(numbers, -(-self.nbytes // bytes_max)))
        cuts = [self.start + numbers * index // count for index in range(count + 1)]
        for index in range(count):
            yield attrs.evolve(
                self,
                start=SeqNo(cuts[index]),
                end=SeqNo(cuts[index + 1]),
                nbytes=self.nbytes // count,
                marker=self.marker if index == 0 else None,
            )


class ReadTask(InputPartition):
    """The ranges that one task reads, no two of one partition.

    Args:
        ranges: The ranges.
        lease_id: The lease that pins them; 0 for none.
        bucket: The bucket whose partitions they are of.
    """

    def __init__(self, ranges: tuple[PartitionRange, ...], lease_id: int, bucket: str = "") -> None:
        super().__init__(None)
        self.bucket = bucket
        self.ranges = ranges
        self.lease_id = lease_id


def tasks_of(
    ranges: Iterable[PartitionRange],
    lease_id: int,
    *,
    bytes_max: int,
    tasks_min: int,
    whole_partitions: bool = False,
    bucket: str = "",
) -> list[ReadTask]:
    """Packs ranges into few tasks of about the same size.

    Args:
        ranges: What is to be read, each partition once.
        lease_id: The lease that pins them; 0 for none.
        bytes_max: What a task reads, about, unless there would be more than `TASKS_MAX` tasks.
        tasks_min: How many tasks to make at least, as far as there are numbers for them.
        whole_partitions: Whether one task reads all of a partition.
        bucket: The bucket whose partitions they are of.
    """
    by_partition = sorted(ranges, key=lambda range_: range_.partition)
    total = sum(max(range_.nbytes, 1) for range_ in by_partition)
    count = _task_count(-(-total // bytes_max), tasks_min)
    share = total / count
    tasks: list[ReadTask] = []
    group: dict[PartitionId, PartitionRange] = {}
    nbytes = 0
    for range_ in by_partition:
        for piece in [range_] if whole_partitions else range_.pieces(max(1, int(share))):
            size = max(piece.nbytes, 1)
            # A piece belongs to the task in whose share its middle lies.
            is_beyond = nbytes + size / 2 >= share * (len(tasks) + 1)
            if group and (is_beyond or piece.partition in group):
                tasks.append(ReadTask(tuple(group.values()), lease_id, bucket))
                group = {}
            group[piece.partition] = piece
            nbytes += size
    if group:
        tasks.append(ReadTask(tuple(group.values()), lease_id, bucket))
    return tasks


def _task_count(count: int, count_min: int) -> int:
    """How many tasks to make where so many would do. Nothing tells a data source how many cores
    there are. With a multiple of `CORES`, the last tasks of a read mostly leave none idle."""
    if count > CORES // 2:
        whole_multiple = count // CORES * CORES
        count = (
            whole_multiple if count <= TASK_GROWTH_MAX * whole_multiple else whole_multiple + CORES
        )
    return min(max(count, count_min), TASKS_MAX)


def ranges_between(start: StreamOffset, end: StreamOffset) -> list[PartitionRange]:
    """The ranges to read between two offsets.

    Args:
        start: Where the batch begins. Of the first batch, the end knows it better.
        end: Where it ends.
    """
    starts = start.partitions if end.initial is None else end.initial
    ranges = []
    for partition, end_offset in end.partitions.items():
        start_offset, marker = starts.get(partition, PartitionOffset()), None
        if end_offset.rolled_back_from is not None:
            to_seq = end_offset.snapshot_start
            start_offset = PartitionOffset(seq=to_seq)
            marker = RollbackMarker(end_offset.log.current, to_seq, end_offset.rolled_back_from)
        if marker is None and start_offset.seq >= end_offset.seq:
            continue
        ranges.append(
            PartitionRange(
                partition,
                end_offset.log,
                start_offset.seq,
                end_offset.seq,
                end_offset.snapshot_start,
                end_offset.snapshot_end,
                marker=marker,
                history_id=end_offset.log.current if end.lease_id else HistoryId(0),
            )
        )
    return ranges
