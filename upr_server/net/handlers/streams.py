"""Opening a bucket, asking for its partitions' streams, and what replicas report."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_protocol.wire import Open, Opened, PartitionLog, ReplicaAck, Stream
from upr_server.engine import Bucket, Partition
from upr_server.engine.replica_progress import STEP_CALLS
from upr_server.net.refusals import check_partitions_differ
from upr_server.net.request_context import RequestContext, remaining_steps

STREAM_OBJECTS: Final = 10
"""Objects of a stream that Python's collector looks at."""

SLICE_PARTITIONS: Final = 128
"""Partitions that one step describes: at some 13 µs each, 2 ms."""

FIRST_PARTITIONS: Final = 16
"""Partitions that the first step describes, as hundreds may open a bucket at the same time."""


def open_bucket(context: RequestContext, request: Open) -> Iterator[None] | None:
    """Opens a bucket, and tells its partitions' histories."""
    bucket = context.catalog.bucket(request.bucket)
    check_partitions_differ(request.partitions)
    context.open_bucket(bucket)
    return remaining_steps(_tell_partitions(context, request, bucket))


def _tell_partitions(context: RequestContext, request: Open, bucket: Bucket) -> Iterator[None]:
    numbers = request.partitions or range(len(bucket.partitions))
    # This is the revision of the map that the partitions follow now. A client that is told of a
    # newer map then sees that some may be described as they were under an older one.
    map_revision = context.partition_maps.settled_revision(bucket.name)
    for index, partition_number in enumerate(numbers):
        if index % SLICE_PARTITIONS == FIRST_PARTITIONS:
            yield
        if context.bucket is not bucket:
            context.refuse(request, Status.NO_BUCKET, "the bucket was deleted")
            return
        partition = (
            bucket.partitions[partition_number]
            if partition_number < len(bucket.partitions)
            else None
        )
        if partition is None or partition.state is PartitionState.DEAD:
            # A copy that the map took from this node may be stale: nobody is told its numbers.
            context.send(
                PartitionLog(
                    PartitionState.DEAD,
                    SeqNo(0),
                    SeqNo(0),
                    SeqNo(0),
                    FailoverLog(),
                    partition=PartitionId(partition_number),
                    opaque=request.opaque,
                    status=(
                        Status.DAMAGED
                        if partition is not None and partition.damage
                        else Status.NOT_MY_PARTITION
                    ),
                )
            )
            continue
        context.send(
            PartitionLog(
                partition.told_state,
                partition.high_seq,
                partition.manager.persistence.committed_seq,
                partition.purge_seq,
                partition.failover_log,
                partition=partition.id,
                opaque=request.opaque,
            )
        )
    context.send(Opened(len(bucket.partitions), map_revision, opaque=request.opaque))
    context.credit.open_bucket(bucket, context.access.user_name)


def stream(context: RequestContext, request: Stream) -> None:
    """Opens a stream, or says why there is none. While the partition begins none, as its state or
    its history is about to change, the request waits: the answer depends on the change."""
    partition = context.partition(request.partition)
    if partition.begins_no_stream:
        context.open_later(request, partial(_open_stream_later, context, request))
    else:
        _open_stream(context, request, partition)


async def _open_stream_later(context: RequestContext, request: Stream) -> None:
    # A change may be of many partitions, whose streams this connection asks for: others have their
    # turn between two of them.
    await trio.lowlevel.checkpoint()
    while (partition := context.partition(request.partition)).begins_no_stream:
        await context.streams_may_begin.wait()
    # The right may have been revoked meanwhile.
    context.access.check_message(request)
    _open_stream(context, request, partition)


def _open_stream(context: RequestContext, request: Stream, partition: Partition) -> None:
    _check_replica(context, request)
    if (usage := context.log_in.usage) is not None:
        usage.check_streams()
    context.streamer.open(context.disk, partition, request, context.map_revision)
    context.young_objects.note_made(STREAM_OBJECTS)


def _check_replica(context: RequestContext, request: Stream) -> None:
    """A replica follows this node only while the maps of both say so. This node may have lost its
    disk, and with it the map: the replica would give up everything that it has."""
    bucket = context.bucket
    if not request.with_answers or bucket is None:
        return
    name = context.replica_reports.name
    if not context.partition_maps.is_replica(bucket.name, request.partition, name):
        raise ServerError(
            Status.WRONG_STATE,
            f"this node does not know {name!r} as its replica for partition {request.partition}",
        )


def replica_ack(context: RequestContext, request: ReplicaAck) -> Iterator[None] | None:
    """Notes how far a replica is. Reports that fit no partition or history are dropped."""
    context.report_wait.note_report(request.rows)
    return remaining_steps(_note_reports(context, request))


def _note_reports(context: RequestContext, request: ReplicaAck) -> Iterator[None]:
    reports = context.replica_reports
    name, cost = reports.name, 0
    for partition_id, history_id, received_seq, persisted_seq in request.rows:
        bucket = context.bucket
        if bucket is None:
            return
        if partition_id >= len(bucket.partitions):
            continue
        partition = bucket.partitions[partition_id]
        if (
            history_id == partition.failover_log.current
            and received_seq <= partition.high_seq
            and context.partition_maps.is_replica(bucket.name, partition.id, name)
        ):
            context.disk.progress.notify()
            call_count = reports.report(partition, name, received_seq, persisted_seq)
            # A call that it made has cost as much as a report.
            cost += call_count
            while call_count >= STEP_CALLS:
                # If the connection ends here, upkeep makes the rest of the calls.
                yield
                cost = 0
                call_count = partition.replicas.make_calls()
        cost += 1
        if cost >= SLICE_PARTITIONS:
            cost = 0
            yield
