"""How much of each partition, or of each bucket, the next batch of a stream has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import attrs

from upr_protocol.client import HeldLease
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.offset import PartitionOffset

K = TypeVar("K", int, PartitionId, str)


@attrs.frozen
class StreamLimits:
    """How much one batch may have.

    Attributes:
        numbers: Sequence numbers, at most: no batch has more rows than that.
        nbytes: Bytes, about.
    """

    numbers: int | None = None
    nbytes: int | None = None


def batch_ends(
    partitions: Mapping[PartitionId, PartitionOffset],
    limits: StreamLimits,
    sizes: Mapping[PartitionId, float],
) -> dict[PartitionId, SeqNo]:
    """How far each partition is read in the next batch: all that there is, or the same share of
    each partition's backlog.

    Args:
        partitions: Where the stream stands in each, and where the snapshots end.
        limits: How much the batch may have.
        sizes: Bytes a sequence number, by partition.
    """
    backlogs = {
        partition: offset.snapshot_end - offset.seq
        for partition, offset in partitions.items()
        if offset.seq < offset.snapshot_end
    }
    total = sum(backlogs.values())
    if not total:
        return {}
    batch_total = total if limits.numbers is None else min(total, limits.numbers)
    nbytes = sum(sizes.get(partition, 0.0) * backlog for partition, backlog in backlogs.items())
    if limits.nbytes is not None and nbytes > limits.nbytes:
        batch_total = min(batch_total, max(1, int(total * limits.nbytes / nbytes)))
    return {
        partition: SeqNo(partitions[partition].seq + share)
        for partition, share in equal_shares(batch_total, backlogs).items()
    }


def equal_shares(batch_total: int, backlogs: Mapping[K, int]) -> dict[K, int]:
    """Of what a batch may have, the same share of each backlog.

    Args:
        batch_total: How much the batch may have.
        backlogs: How much there is of each; together at least 1.
    """
    total = sum(backlogs.values())
    batch_total = min(batch_total, total)
    parts = {name: batch_total * backlog // total for name, backlog in backlogs.items()}
    unassigned = batch_total - sum(parts.values())

    def order(name: K) -> tuple[bool, int, K]:
        return bool(parts[name] or not backlogs[name]), parts[name] - backlogs[name], name

    # What rounding left goes first to those that would get nothing: while others are written to all
    # the time, they never would. Then to those that have most left.
    for name in sorted(backlogs, key=order)[:unassigned]:
        parts[name] += 1
    return parts


def mean_size(counts: Mapping[PartitionId, int], sizes: Mapping[PartitionId, float]) -> int:
    """Bytes a sequence number, of so many of each partition; 0 if no sizes are known."""
    total = sum(counts.values())
    if not total or not sizes:
        return 0
    nbytes = sum(sizes.get(partition, 0.0) * count for partition, count in counts.items())
    return max(1, round(nbytes / total))


def sizes_of(lease: HeldLease) -> dict[PartitionId, float]:
    """Bytes a sequence number of what a lease holds, by partition."""
    return {
        pinned.partition: pinned.nbytes / (pinned.end - pinned.start)
        for pinned in lease.ranges
        if pinned.end > pinned.start
    }
