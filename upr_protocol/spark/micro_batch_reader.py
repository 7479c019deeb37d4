"""Streaming the changes of one bucket: what Spark calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from upr_protocol.client import HeldLease
from upr_protocol.client.options import new_lease_id
from upr_protocol.errors import ServerError, Status
from upr_protocol.spark.batch_delay import BatchDelay
from upr_protocol.spark.batch_shares import StreamLimits, sizes_of
from upr_protocol.spark.consumer_position import ConsumerPosition
from upr_protocol.spark.driver_client import (
    BucketDriverClient,
    DriverClient,
    acquire_new_lease,
    holds_ranges,
)
from upr_protocol.spark.errors import PipelineError, as_pipeline_error
from upr_protocol.spark.offset import StreamOffset
from upr_protocol.spark.partition_rollback import rollback_error, rollback_needed
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import PartitionRange, ranges_between, tasks_of
from upr_protocol.spark.reading import read_task
from upr_protocol.spark.schema import check_schema
from upr_protocol.spark.stream_backlog import BacklogSize, StreamBacklog
from upr_protocol.spark.stream_plan import StreamPlan
from upr_protocol.spark.worker_call import worker_call


def default_limit(options: ReadOptions) -> ReadLimit:
    """What the options say of the size of a batch."""
    if options.max_rows is not None:
        return ReadMaxRows(options.max_rows)
    if options.max_bytes is not None:
        return ReadMaxBytes(options.max_bytes)
    if options.min_rows is not None:
        return ReadMinRows(options.min_rows)
    return ReadAllAvailable()


def limits_of(limit: ReadLimit, options: ReadOptions) -> StreamLimits:
    """How much a batch may have. Of two limits in the options, Spark hands back one."""
    if isinstance(limit, ReadAllAvailable):
        return StreamLimits()
    return StreamLimits(options.max_rows, options.max_bytes)


def batch_must_wait(
    delay: BatchDelay | None, limit: ReadLimit, backlogs: Callable[[], Iterable[BacklogSize]]
) -> bool:
    """Whether the next batch waits for more changes. With `Trigger.Once`, which asks for everything
    that there is, none waits.

    Args:
        delay: How long batches wait; None for not at all.
        limit: What Spark asks for.
        backlogs: Gives what there is for the batch, in each bucket.
    """
    if delay is None or isinstance(limit, ReadAllAvailable):
        return False
    sizes = list(backlogs())
    may_wait = all(size.may_wait for size in sizes)
    return may_wait and delay.must_wait(sum(size.numbers for size in sizes))


class MicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the changes of a bucket. A batch that Spark reads again has the same rows: what it is
    made of is pinned until the batch behind it begins.

    Args:
        options: What is asked for.
        schema: Which columns.
        driver: The server, where that is not the one that the options name.
        delay: How long batches wait, where that is not as the options say.
    """

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType,
        driver: DriverClient | None = None,
        delay: BatchDelay | None = None,
    ) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._driver = driver
        self._delay = delay or options.batch_delay()
        self._plan: StreamPlan | None = None
        self._initial: StreamOffset | None = None
        self._planned_offset: StreamOffset | None = None
        self._position: ConsumerPosition | None = None

    # Both are made when they are first needed. Executors get a copy of the reader, which has no
    # connection then.

    @property
    def _server(self) -> DriverClient:
        if self._driver is None:
            self._driver = BucketDriverClient(self._options)
        return self._driver

    @property
    def _planner(self) -> StreamPlan:
        if self._plan is None:
            self._plan = StreamPlan(
                self._server,
                self._options.address.bucket,
                durable=self._options.durable,
                marks_rollback=self._options.marks_rollback,
                rewinds=self._options.rewinds,
                new_lease_id=new_lease_id,
                start_time=self._options.start_time,
            )
        return self._plan

    @worker_call()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Where a new query begins."""
        if self._initial is None:
            start, time = self._options.start, self._options.start_time
            self._initial = (
                self._planner.start.initial_offset(start)
                if time is None
                else self._planner.start.initial_offset_at_time(time)
            )
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What the options say of the size of a batch."""
        return default_limit(self._options)

    @worker_call()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the batch ends that begins at `start`; `start` itself while it waits."""
        if batch_must_wait(self._delay, limit, lambda: [self.backlog_after(start)]):
            self.stay_at_offset(start)
            return start
        return self.next_offset(start, limits_of(limit, self._options))

    def backlog_after(self, start: dict[str, Any]) -> BacklogSize:
        """What there is behind `start` for the next batches."""
        with self._refusals():
            return self._planner.backlog_after(self._offset(start))

    def next_offset(self, start: dict[str, Any], limits: StreamLimits) -> dict[str, Any]:
        """Where the batch ends that begins at `start`; `start` itself if there is nothing new."""
        old_offset = self._offset(start)
        with self._refusals():
            end = self._planner.next_offset(old_offset, limits)
        self._note_batch(old_offset, end)
        if end is old_offset:
            return start
        return attrs.evolve(end, keys=self._options.keys_text).to_json()

    def stay_at_offset(self, start: dict[str, Any]) -> None:
        """The next batch waits, or is another bucket's: this one stays at `start`."""
        self._note_batch(self._offset(start), self._offset(start))

    def drop_batch(self, start: dict[str, Any]) -> None:
        """The batch that begins at `start` does not come about, as another bucket cannot be read.
        Nobody reads what was pinned for it."""
        old_offset = self._offset(start)
        if (
            self._planned_offset is not None
            and self._planned_offset.lease_id != old_offset.lease_id
        ):
            self._planner.leases.release(self._planned_offset.lease_id)
        self._planned_offset = old_offset

    def _note_batch(self, before: StreamOffset, end: StreamOffset) -> None:
        """Every batch up to `before` is done, also if no further one follows, and the next one ends
        at `end`."""
        self._planned_offset = end
        if self._options.consumer_name:
            if self._position is None:
                self._position = ConsumerPosition(self._server, self._options.consumer_name)
            self._position.put_offset(before)

    @worker_call()
    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the server is, and the metrics of what it has more, for the query's progress:
        Spark has no other place there for what a Python data source counts."""
        latest, backlog = self.progress()
        return {**latest, "metrics": backlog.metrics()}

    def progress(self) -> tuple[dict[str, Any], StreamBacklog]:
        """How far the server is, and what it has that is in no batch yet."""
        latest, backlog = self._planner.progress(self._planned_offset)
        return latest.to_json(), backlog

    @worker_call()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """The query is to end at what there is now."""
        with self._refusals():
            self._planner.stop_at_current_end()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raises what the server refuses as a `PipelineError`."""
        try:
            yield
        except ServerError as error:
            raise as_pipeline_error(error, self._options.address) from error

    @worker_call()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks that read a batch, for the first time or again."""
        old_offset, new_offset = self._offset(start), self._offset(end)
        lease_id = new_offset.lease_id
        ranges = self._without_rolled_back(ranges_between(old_offset, new_offset), new_offset)
        if lease_id and ranges:
            lease = self._pin_ranges(lease_id, ranges)
            lease_id, size = lease.lease_id, new_offset.number_bytes
            # The offset of an older version says no size.
            sizes = {} if size else sizes_of(lease)
            ranges = [
                attrs.evolve(
                    range_,
                    nbytes=int(sizes.get(range_.partition, size) * (range_.end - range_.start)),
                )
                for range_ in ranges
            ]
        return tasks_of(
            ranges,
            lease_id,
            bytes_max=self._options.task_bytes,
            tasks_min=self._options.min_tasks,
            bucket=self._options.address.bucket,
        )

    def _without_rolled_back(
        self, ranges: list[PartitionRange], end: StreamOffset
    ) -> list[PartitionRange]:
        """What can be read: of a partition whose history has parted from the batch's, nothing."""
        seqnos = self._server.seqnos()
        infos = None
        readable = []
        for range_ in ranges:
            offset = end.partition_offset(range_.partition)
            numbers = seqnos.get(range_.partition)
            if numbers is None and self._server.has_partition(range_.partition, offset.log):
                # It is not asked for any more, but this batch has it.
                readable.append(range_)
                continue
            if numbers is None or numbers.history_id != offset.log.current:
                infos = self._server.partition_infos() if infos is None else infos
                info = infos.get(range_.partition)
                rollback = rollback_needed(offset, info)
                if rollback is not None:
                    if not self._options.marks_rollback:
                        raise rollback_error(
                            self._options.address.bucket, range_.partition, offset, info, rollback
                        )
                    # The next batch begins with a marker that undoes this one.
                    continue
            readable.append(range_)
        return readable

    def _pin_ranges(self, lease_id: int, ranges: list[PartitionRange]) -> HeldLease:
        """The lease of a batch; or a new one on what is left of it, if that is good enough."""
        try:
            lease = self._server.renew_lease(lease_id)
        except ServerError as error:
            return self._pin_again(ranges, error)
        bounds = [
            (range_.partition, range_.start, range_.end)
            for range_ in ranges
            if range_.start < range_.end
        ]
        if holds_ranges(lease, bounds):
            return lease
        # Of several nodes, one has lost its part, or is not active any more.
        sentence = f"lease {lease_id:016x} lacks a part of the batch"
        return self._pin_again(ranges, ServerError(Status.RANGE_GONE, sentence))

    def _pin_again(self, ranges: list[PartitionRange], error: ServerError) -> HeldLease:
        if error.status is not Status.RANGE_GONE:
            raise as_pipeline_error(error, self._options.address) from error
        if self._options.fails_on_data_loss:
            # With onRollback=rewind no batch may lack rows.
            marker = "onRollback=marker and " if self._options.rewinds else ""
            raise PipelineError(
                "UPR_RANGE_GONE",
                f"{self._options.address}: Spark reads a batch whose lease does not hold all of "
                "its changes any more. The query stood still for longer than its lease of "
                f"{self._options.lease_s} s (leaseSeconds), and compaction has removed some; or "
                "another node has become active for a partition. The server still has the newest "
                f"version of every key: set {marker}failOnDataLoss=false to continue without the "
                "older ones, or begin with a new checkpoint",
            ) from error
        bounds = [(range_.partition, range_.start, range_.end) for range_ in ranges]
        # A node that has become active may have the newest of it in memory alone.
        self._server.wait_until_persisted()
        with self._refusals():
            try:
                lease = acquire_new_lease(self._server, bounds)
            except ServerError as refusal:
                if refusal.status is not Status.ROLLBACK_NEEDED:
                    raise
                # Deletions are among what is lost; from the beginning anything can be held.
                lease = acquire_new_lease(
                    self._server, [(partition, 0, end) for partition, _, end in bounds]
                )
        self._planner.leases.release_on_commit(lease.lease_id)
        return lease

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return read_task(partition, self._options, self._schema)  # type: ignore[arg-type]

    @worker_call()
    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ends there is done with."""
        self._planner.leases.note_committed(self._offset(end))

    def stop(self) -> None:
        """The query is over. What it has pinned stays so for as long as its lease: it may be
        started again, and read its last batch again."""
        if self._driver is not None:
            self._planner.leases.release_target()
            self._driver.close()

    def _offset(self, document: Mapping[str, Any]) -> StreamOffset:
        offset = StreamOffset.of_json(document)
        bucket = self._options.address.bucket
        if offset.bucket != bucket:
            raise PipelineError(
                "UPR_OFFSET",
                f"the checkpoint is of the bucket {offset.bucket!r}, and not of {bucket!r}: begin "
                "with a new checkpoint",
            )
        keys = self._options.keys_text
        if offset.keys not in (None, keys):
            raise PipelineError(
                "UPR_OFFSET",
                f"the checkpoint is of a stream with {offset.keys or 'all keys'}, and not with "
                f"{keys or 'all keys'}: earlier rows of other keys would be missing. Set the "
                "option back, or begin with a new checkpoint",
            )
        return offset
