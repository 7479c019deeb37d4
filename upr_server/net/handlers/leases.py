"""Leases: ranges of sequence numbers that compaction leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import trio

from upr_protocol.ids import PartitionId
from upr_protocol.wire import Lease, LeaseAction, LeaseReply
from upr_server.net.request_context import RequestContext
from upr_server.net.user_usage import UserUsage
from upr_server.storage.calls import MeasureRanges
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.records import LeaseRecord

RANGE_BYTES: Final = 160
"""What a range of a request takes in memory."""


def lease(context: RequestContext, request: Lease) -> None:
    """Acquires, renews or releases a lease."""
    answer = partial(_answer, context, request, context.disk, context.log_in.usage)
    # One at a time: each is a commit by the bucket's one writer, and others wait for that too.
    context.reply_in_order(request, answer, RANGE_BYTES * len(request.ranges))


async def _answer(
    context: RequestContext, request: Lease, disk: BucketDisk, usage: UserUsage | None
) -> None:
    async with disk.maintenance.paused():
        if request.action is LeaseAction.RELEASE:
            await disk.leases.release(request.lease_id)
            context.usages.forget_lease(disk.bucket.name, request.lease_id)
            context.send(LeaseReply(request.lease_id, 0, opaque=request.opaque))
            return
        if request.action is LeaseAction.ACQUIRE:
            for partition_number, _, _ in request.ranges:
                # A copy may lag: what is persisted there is not all that was acknowledged.
                if partition_number < len(disk.bucket.partitions):
                    context.active_partition(PartitionId(partition_number))
        with (
            nullcontext()
            if usage is None
            else usage.acquiring_lease(disk.bucket.name, request.lease_id, context.time())
        ):
            granted = await _grant(context, request, disk, usage)
    sizes = await _sizes(disk, granted.ranges)
    ranges = tuple(
        (
            partition_number,
            disk.bucket.partitions[partition_number].failover_log.current,
            start,
            end,
            nbytes,
        )
        for (partition_number, start, end), nbytes in zip(granted.ranges, sizes, strict=True)
    )
    context.send(
        LeaseReply(granted.lease_id, granted.time_to_live_s, ranges, opaque=request.opaque)
    )


async def _grant(
    context: RequestContext, request: Lease, disk: BucketDisk, usage: UserUsage | None
) -> LeaseRecord:
    """Acquires or renews the lease, which counts for the user from then on."""
    lease_id, time_to_live_s = request.lease_id, request.time_to_live_s
    lapses_at = context.time() + time_to_live_s

    def count_lease(lease_id: int) -> None:
        # Once the bucket was deleted, nobody would forget it.
        if usage is not None and context.bucket is not None:
            usage.note_lease(disk.bucket.name, lease_id, lapses_at)

    try:
        if request.action is LeaseAction.ACQUIRE:
            granted = await disk.leases.acquire(
                lease_id, request.owner, request.ranges, time_to_live_s
            )
        else:
            granted = await disk.leases.renew(lease_id, time_to_live_s)
    except trio.Cancelled:
        # The client has left. The disk may have written the lease, and then it counts.
        count_lease(lease_id)
        raise
    count_lease(granted.lease_id)
    return granted


async def _sizes(disk: BucketDisk, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    """About how many bytes each (partition, start, end] has on disk. Other reads come in between.

    Raises:
        ServerError: `NO_BUCKET`: the bucket was deleted meanwhile.
        StorageError: The disk cannot tell.
    """
    sizes: list[int] = []
    rest, nbytes_before = list(ranges), 0
    while rest:
        parts = await disk.ask(MeasureRanges(disk.bucket.name, rest))
        for nbytes, counted_through in parts:
            partition, _, end = rest.pop(0)
            if counted_through < end:
                rest.insert(0, (partition, counted_through, end))
                nbytes_before += nbytes
            else:
                sizes.append(nbytes_before + nbytes)
                nbytes_before = 0
    return sizes
