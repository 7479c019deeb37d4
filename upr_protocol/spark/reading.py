"""What a task does: reads its ranges over one connection, and makes rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from upr_protocol.client import (
    BoundedStreams,
    ChunkReceived,
    ResumeState,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    StreamEnded,
)
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.failover import FailoverLog, Position, RollBack, decide_start
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError, as_pipeline_error
from upr_protocol.spark.options import idle_interval_s
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import PartitionRange, ReadTask
from upr_protocol.spark.record_batches import RecordBatchBuilder, RowSnapshot, resized
from upr_protocol.spark.worker_call import worker_call

EXECUTOR: Final = "spark:executor"


def read_task(task: ReadTask, options: ReadOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The rows of a task's ranges; those of each partition in the order of their numbers.

    Args:
        task: The task.
        options: The options of the read; if several buckets are read, of all of them.
        schema: Which columns.

    Raises:
        PipelineError: They cannot be read, or are not there any more.
    """
    options = options.of_bucket(task.bucket) if task.bucket else options
    builder = RecordBatchBuilder(schema, options.key, options.address.bucket)
    with worker_call():
        for range_ in task.ranges:
            if range_.marker is not None:
                yield builder.of_marker(range_.partition, range_.marker)
        ranges = {range_.partition: range_ for range_ in task.ranges if range_.start < range_.end}
        if not ranges:
            return
        if options.deduplicate:
            yield from resized(_newest_rows(ranges, task.lease_id, options, schema))
        else:
            yield from _batches(ranges, task.lease_id, options, builder)


def _newest_rows(
    ranges: dict[PartitionId, PartitionRange],
    lease_id: int,
    options: ReadOptions,
    schema: StructType,
) -> Iterator[pa.RecordBatch]:
    """The newest row of each key. All rows of a partition are in this task, in their order."""
    has_key = "key" in schema.fieldNames()
    with_key = schema if has_key else StructType([*schema.fields, StructField("key", BinaryType())])
    builder = RecordBatchBuilder(with_key, options.key, options.address.bucket)
    batches = list(_batches(ranges, lease_id, options, builder))
    if not batches:
        return
    keys = pa.chunked_array(
        [batch.column(batch.schema.get_field_index("key")) for batch in batches]
    )
    codes = np.concatenate(
        [chunk.indices.to_numpy() for chunk in keys.dictionary_encode().iterchunks()]
    )
    last_rows = np.zeros(codes.max() + 1, np.int64)
    last_rows[codes] = np.arange(len(codes))  # of equal indices the last is kept
    is_newest = np.zeros(len(codes), np.bool_)
    is_newest[last_rows] = True
    first_row = 0
    for batch in batches:
        rows = batch.filter(pa.array(is_newest[first_row : first_row + batch.num_rows]))
        first_row += batch.num_rows
        yield rows if has_key else rows.select(schema.fieldNames())


def _streams(
    ranges: Mapping[PartitionId, PartitionRange], lease_id: int, options: ReadOptions
) -> BoundedStreams:
    """The streams of these ranges, by partition."""
    return BoundedStreams(
        address=options.address,
        partitions=sorted(ranges),
        resume=ResumeState(
            options.address.bucket,
            {
                partition: Position(range_.log, range_.start, range_.start, None)
                for partition, range_ in ranges.items()
            },
        ),
        end={partition: range_.end for partition, range_ in ranges.items()},
        lease_id=lease_id,
        # Others begin with the key, too: the caller leaves those out.
        key_prefix=options.key or options.key_prefix,
        # What a lease pins, no history has undone.
        with_logs=not lease_id,
        identity=EXECUTOR,
        retry_timeout_s=options.timeout_s,
        idle_interval_s=idle_interval_s(options.timeout_s),
    )


def _batches(
    ranges: dict[PartitionId, PartitionRange],
    lease_id: int,
    options: ReadOptions,
    builder: RecordBatchBuilder,
) -> Iterator[pa.RecordBatch]:
    snapshots: dict[PartitionId, RowSnapshot] = {}
    try:
        with closing(_streams(ranges, lease_id, options).events()) as events:
            for event in events:
                if isinstance(event, SnapshotStart):
                    range_ = ranges[event.partition]
                    snapshots[event.partition] = RowSnapshot(
                        event.partition,
                        f"{range_.history_id or event.history_id:016x}",
                        range_.snapshot_start,
                        event.end if range_.has_whole_snapshot else range_.snapshot_end,
                    )
                elif isinstance(event, SnapshotEnd):
                    del snapshots[event.partition]
                elif isinstance(event, ChunkReceived):
                    range_ = ranges[event.partition]
                    # A pinned chunk ends where the range ends. If it is not pinned, its snapshot
                    # may go on.
                    end = event.chunk.end if range_.has_whole_snapshot else range_.end
                    chunk = event.chunk.slice(range_.start, end)
                    if chunk.count:
                        yield from builder.add(chunk, snapshots[event.partition])
                elif isinstance(event, StreamAccepted):
                    _check_history(options.address.bucket, ranges[event.partition], event.log)
                elif isinstance(event, RolledBack):
                    range_ = ranges[event.partition]
                    raise _rolled_back_error(
                        options.address.bucket, range_, event.ceiling, event.reason
                    )
                elif isinstance(event, StreamEnded) and event.reason is not Status.END_REACHED:
                    # No error for a consumer. But rows of the range are missing.
                    raise PipelineError(
                        "UPR_NO_BUCKET",
                        f"{options.address}: the bucket was deleted while it was read",
                    )
            yield from builder.take_rest()
    except ServerError as error:
        if error.status is Status.RANGE_GONE and lease_id:
            raise _lease_gone_error(options, lease_id) from error
        raise as_pipeline_error(error, options.address, options.timeout_s) from error
    except UprError as error:
        raise as_pipeline_error(error, options.address, options.timeout_s) from error


def _lease_gone_error(options: ReadOptions, lease_id: int) -> PipelineError:
    """The error when a lease does not protect what was planned any more."""
    return PipelineError(
        "UPR_RANGE_GONE",
        f"{options.address}: lease {lease_id:016x} does not protect the planned rows any more. It "
        f"was released; or it had lapsed after {options.lease_s} s (leaseSeconds), and compaction "
        "has removed some, or other leases needed its place; or another node has become active for "
        "a partition; or the bucket was created again. Load the DataFrame again, and cache it if "
        "later actions need the same rows; or run the query of the stream again",
    )


def _check_history(bucket: str, range_: PartitionRange, log: FailoverLog) -> None:
    """Makes sure that the history of a stream has what was planned of its partition. Otherwise the
    stream would wait until the partition has as many numbers again, perhaps for ever, and the rows
    would be others.

    Args:
        bucket: The bucket.
        range_: What was planned.
        log: The history.

    Raises:
        PipelineError: A crash or a failover has undone some of it.
    """
    planned_position = Position(range_.log, range_.end, range_.end)
    decision = decide_start(log, range_.end, SeqNo(0), planned_position)
    if isinstance(decision, RollBack):
        raise _rolled_back_error(bucket, range_, decision.ceiling, decision.reason.value)


def _rolled_back_error(
    bucket: str, range_: PartitionRange, ceiling: SeqNo, reason: str
) -> PipelineError:
    """The error when the server left the history of a range before the range was read."""
    return PipelineError(
        "UPR_ROLLBACK",
        f"partition {range_.partition} of {bucket} has to go back from {range_.end} to {ceiling} "
        f"({reason}): there was a failover, or data was lost. What was planned cannot be read any "
        "more. Load the DataFrame again; or run the query of the stream again, which goes on with "
        "onRollback=marker",
    )
