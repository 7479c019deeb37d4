"""Reading a consistent cut of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from upr_protocol.client import HeldLease, PartitionInfo, PartitionNumbers
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import SEQ_MAX, HistoryId, PartitionId, SeqNo
from upr_protocol.spark.driver_client import BucketDriverClient, DriverClient, holds_ranges
from upr_protocol.spark.errors import OptionError, PipelineError, as_pipeline_error
from upr_protocol.spark.range_options import check_named
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import PartitionRange, ReadTask, tasks_of
from upr_protocol.spark.reading import read_task
from upr_protocol.spark.schema import check_schema
from upr_protocol.spark.worker_call import worker_call


class BatchReader(DataSourceReader):
    """Reads every change that a bucket has, up to a barrier: all that was acknowledged before the
    first action on the DataFrame is among the rows. Every later action gets the same rows, for as
    long as the lease lives on which they are pinned, and longer if nothing of them was compacted
    away; then it fails.

    Args:
        options: What is asked for.
        schema: Which columns.
        lease_id: The lease; the same for all actions on one DataFrame.
        acquires_lease: Whether the first action acquires it; if not, it exists before.
        driver_of: Asks a bucket.
    """

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType,
        lease_id: int,
        *,
        acquires_lease: bool = True,
        driver_of: Callable[[ReadOptions], DriverClient] = BucketDriverClient,
    ) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._lease_id = lease_id
        self._acquires_lease = acquires_lease
        self._driver_of = driver_of

    @worker_call()
    def partitions(self) -> Sequence[InputPartition]:
        """Pins what is to be read, and packs it into tasks.

        Raises:
            PipelineError: It cannot be read.
        """
        tasks: list[ReadTask] = []
        with ExitStack() as leases:
            for options in options_of_buckets(self._options):
                driver = self._driver_of(options)
                try:
                    if not self._acquires_lease:
                        # First: a node that has lost changes has fewer numbers than the options
                        # say.
                        driver.renew_lease(self._lease_id)
                    tasks += plan(
                        options,
                        driver,
                        self._lease_id,
                        leases,
                        acquires_lease=self._acquires_lease,
                    )
                except ServerError as error:
                    raise _not_readable(error, options) from error
                finally:
                    driver.close()
            leases.pop_all()
        return tasks or [ReadTask((), 0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, ReadTask)
        return read_task(partition, self._options, self._schema)


def options_of_buckets(options: ReadOptions) -> list[ReadOptions]:
    """The options of each bucket that is read.

    Raises:
        OptionError: A start or an end is of a bucket that is not read.
        PipelineError: The server cannot be asked; or it has no bucket that the pattern matches.
    """
    if not options.are_several_buckets:
        return [options]
    names = options.buckets
    if options.bucket_pattern is not None:
        driver = BucketDriverClient(options)
        try:
            names = driver.matching_buckets()
        finally:
            driver.close()
        if not names:
            raise PipelineError(
                "UPR_NO_BUCKET",
                f"{options.address}: bucketPattern matches the whole name of no bucket; it is "
                f"{options.bucket_pattern.pattern!r}",
            )
    options.check_bucket_names(names)
    return [options.of_bucket(name) for name in names]


def plan(
    options: ReadOptions,
    driver: DriverClient,
    lease_id: int,
    leases: ExitStack,
    *,
    acquires_lease: bool = True,
) -> list[ReadTask]:
    """The tasks of a read.

    Args:
        options: What is asked for.
        driver: Asks the bucket.
        lease_id: The lease that pins what is read.
        leases: Is to release the lease if the action cannot be planned, in this bucket or, of
            several, in a later one. Nobody reads then what it pins. It may also have been granted
            on numbers of another history, and a lease keeps its ranges.
        acquires_lease: Whether to acquire it, if it is not there.

    Raises:
        OptionError: A start or an end is not there.
        ServerError: What was pinned is gone, or deletions behind a start are.
        PipelineError: The server cannot be asked; or a partition has begun another history
            meanwhile, in which the numbers of the plan may be other rows'.
    """
    has_time = options.start_time is not None or options.end_time is not None
    history_ids = _history_ids(driver.seqnos()) if has_time else {}
    # First: of a time that has not passed, later changes are part too.
    start = (
        options.start if options.start_time is None else driver.seqnos_at_time(options.start_time)
    )
    end = options.end if options.end_time is None else driver.seqnos_at_time(options.end_time)
    seqnos = driver.wait_until_persisted() if options.durable else driver.seqnos()
    if has_time and _history_ids(seqnos) != history_ids:
        raise _failover_error(options)
    infos = driver.partition_infos()
    bounds = _bounds(options, start, end, seqnos)
    if options.durable:
        # To the end that is on disk when the lease is granted: nothing is overtaken there.
        to_the_end = isinstance(end, str)
        ranges = _pin_ranges(
            driver,
            infos,
            bounds,
            lease_id,
            leases,
            to_the_end=to_the_end,
            acquires_lease=acquires_lease,
        )
    else:
        lease_id = 0
        if any(
            not infos[partition].log.contains(seqnos[partition].history_id, end_seq)
            for partition, _, end_seq in bounds
        ):
            raise _failover_error(options)
        ranges = _unpinned_ranges(infos, bounds, end)
    if options.start_time is not None:
        ranges = list(_since(driver.seqnos_at_time(options.start_time), ranges))
    if has_time and _history_ids(driver.seqnos()) != history_ids:
        raise _failover_error(options)
    return tasks_of(
        [range_ for range_ in ranges if range_.start < range_.end],
        lease_id,
        bytes_max=options.task_bytes,
        tasks_min=options.min_tasks,
        bucket=options.address.bucket,
        whole_partitions=options.deduplicate,
    )


def _bounds(
    options: ReadOptions,
    start: str | Mapping[int, int],
    end: str | Mapping[int, int],
    seqnos: Mapping[PartitionId, PartitionNumbers],
) -> list[tuple[PartitionId, SeqNo, SeqNo]]:
    """Where the read of each partition starts and ends. A word for start or end stands for all
    that there is.

    Raises:
        OptionError: A start or an end is not there.
    """
    for option, bound in (("startingOffsets", start), ("endingOffsets", end)):
        if not isinstance(bound, str):
            check_named(option, bound, options.address.bucket, seqnos)
    has_time = options.start_time is not None or options.end_time is not None
    bounds = []
    for partition, numbers in seqnos.items():
        start_seq = 0 if isinstance(start, str) else start.get(partition, 0)
        newest_seq = numbers.persisted_seq if options.durable else numbers.high_seq
        end_seq = newest_seq if isinstance(end, str) else end.get(partition, newest_seq)
        # Only numbers are wrong in this order. Between a time and a number, there is nothing in a
        # partition where the end comes first.
        if end_seq > newest_seq or start_seq > (newest_seq if has_time else end_seq):
            raise OptionError(
                f"partition {partition} of {options.address.bucket} cannot be read from "
                f"{start_seq} to {end_seq}: it has numbers up to {newest_seq}. Correct "
                "startingOffsets or endingOffsets"
            )
        bounds.append((partition, SeqNo(min(start_seq, end_seq)), SeqNo(end_seq)))
    return bounds


def _history_ids(seqnos: Mapping[PartitionId, PartitionNumbers]) -> dict[PartitionId, HistoryId]:
    """The history that each partition's numbers are of."""
    return {partition: numbers.history_id for partition, numbers in seqnos.items()}


def _has_lease(driver: DriverClient, lease_id: int) -> bool:
    """Whether an earlier action on the DataFrame has acquired its lease."""
    try:
        driver.renew_lease(lease_id)
    except ServerError as error:
        if error.status is not Status.RANGE_GONE:
            raise
        return False
    return True


def _failover_error(options: ReadOptions) -> PipelineError:
    return PipelineError(
        "UPR_ROLLBACK",
        f"{options.address}: there was a failover while this read was planned, and its numbers may "
        "be of another history than the rows. Load the DataFrame again",
    )


def _pin_ranges(
    driver: DriverClient,
    infos: Mapping[PartitionId, PartitionInfo],
    bounds: list[tuple[PartitionId, SeqNo, SeqNo]],
    lease_id: int,
    leases: ExitStack,
    *,
    to_the_end: bool,
    acquires_lease: bool,
) -> list[PartitionRange]:
    if acquires_lease:
        ranges = [
            (partition, start, SEQ_MAX if to_the_end else end) for partition, start, end in bounds
        ]
        lease = _acquire(driver, lease_id, ranges, leases)
    else:
        lease = driver.renew_lease(lease_id)
        if not holds_ranges(lease, bounds):
            raise ServerError(Status.RANGE_GONE)
    return [
        attrs.evolve(
            _range_of(infos, pinned.partition, pinned.start, pinned.end),
            nbytes=pinned.nbytes,
            history_id=pinned.history_id,
        )
        for pinned in lease.ranges
    ]


def _unpinned_ranges(
    infos: Mapping[PartitionId, PartitionInfo],
    bounds: Iterable[tuple[PartitionId, SeqNo, SeqNo]],
    end: str | Mapping[int, int],
) -> list[PartitionRange]:
    """The ranges of a read without a lease. Where no number ends it, it may have more: the rest of
    a snapshot that the server sends."""
    return [
        attrs.evolve(
            _range_of(infos, partition, start_seq, end_seq),
            has_whole_snapshot=isinstance(end, str) or partition not in end,
        )
        for partition, start_seq, end_seq in bounds
    ]


def _acquire(
    driver: DriverClient,
    lease_id: int,
    ranges: Sequence[tuple[int, int, int]],
    leases: ExitStack,
) -> HeldLease:
    # A lease that is there is that of an earlier action, which reads perhaps.
    is_new = not _has_lease(driver, lease_id)
    try:
        return driver.acquire_lease(lease_id, ranges)
    except ServerError as error:
        # It is there, and not whole any more. Without it the next action would have other rows.
        is_new &= error.status is not Status.RANGE_GONE
        raise
    finally:
        if is_new:
            leases.callback(driver.release_lease, lease_id)


def _since(start: Mapping[int, int], ranges: Iterable[PartitionRange]) -> Iterator[PartitionRange]:
    """The ranges without what is older than the time of `start`: if the time has not passed, others
    may have written before the ends were settled. Each action leaves out the same, because the
    times of the rows up to the ends do not change."""
    for range_ in ranges:
        seq = min(max(range_.start, start.get(range_.partition, 0)), range_.end)
        yield attrs.evolve(range_, start=SeqNo(seq), snapshot_start=SeqNo(seq))


def _range_of(
    infos: Mapping[PartitionId, PartitionInfo], partition: PartitionId, start: SeqNo, end: SeqNo
) -> PartitionRange:
    return PartitionRange(partition, infos[partition].log, start, end, start, end)


def _not_readable(error: ServerError, options: ReadOptions) -> PipelineError:
    if error.status is Status.RANGE_GONE:
        return PipelineError(
            "UPR_RANGE_GONE",
            f"{options.address}: the lease of this DataFrame does not hold its changes any more. "
            f"It had lapsed after {options.lease_s} s (leaseSeconds), and compaction has removed "
            "some, or other leases needed its place; or another node has become active for a "
            "partition. Load it again, or cache it",
        )
    if error.status is Status.ROLLBACK_NEEDED:
        return PipelineError(
            "UPR_RANGE_GONE",
            f"{options.address}: the server has removed deletions after the start of the read "
            f"({error.sentence}): read from the beginning",
        )
    return as_pipeline_error(error, options.address)
