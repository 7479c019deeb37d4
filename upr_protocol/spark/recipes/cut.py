"""A consistent cut of a bucket: where it begins and ends in every partition, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

import attrs
import msgspec
from pyspark.sql import DataFrame, SparkSession

from upr_protocol.client import PartitionInfo
from upr_protocol.client.core.calls import NEW_LEASE_TRIES
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo
from upr_protocol.spark.driver_client import (
    BucketDriverClient,
    DriverClient,
    acquire_new_lease,
    holds_ranges,
)
from upr_protocol.spark.errors import OptionError, PipelineError, as_pipeline_error
from upr_protocol.spark.leased_source import LeasedDataSource, leased_options
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.recipes.lookup_history import has_lost
from upr_protocol.spark.recipes.target import check_own_options

_OWN_OPTIONS: Final = frozenset(
    {
        "url",
        "partitions",
        "startingoffsets",
        "endingoffsets",
        "metadata",
        "includevalue",
        "stability",
    }
)
"""Options that a recipe sets by itself, in lower case."""

_OF_OTHER_READS: Final = frozenset(
    {"buckets", "bucketpattern", "startingtimestamp", "endingtimestamp"}
    | {"index", "indexer", "indexprefix", "indexfrom", "indexto"}
)
"""Options of reads that are no cut of one bucket, in lower case."""


@attrs.frozen
class ConsistentCut:
    """What a bucket had at one moment, behind where it was read before.

    Attributes:
        bucket: The bucket's name.
        logs: Each partition's failover log.
        starts: Where it begins in each partition, exclusive.
        ends: Where it ends in each.
        changes: The rows: every change that there is in between. Reading them asks the server.
        check: To be called once they are read: makes sure that they are what they should be.
    """

    bucket: str
    logs: Mapping[PartitionId, FailoverLog]
    starts: Mapping[PartitionId, SeqNo]
    ends: Mapping[PartitionId, SeqNo]
    changes: DataFrame
    check: Callable[[], None]


Infos = Mapping[PartitionId, PartitionInfo]


@contextmanager
def consistent_cut(
    spark: SparkSession,
    url: str,
    options: Mapping[str, str],
    starts_of: Callable[[Infos], Mapping[PartitionId, SeqNo]] = lambda _: {},
) -> Iterator[ConsistentCut]:
    """Pins a cut for as long as the context: all that was acknowledged before is in it. The ends
    are those of the lease, so that also of a partition without rows it is known where it ends.

    Args:
        spark: A session.
        url: `upr://host:port/bucket`.
        options: More options of a read: `leaseSeconds`, `timeoutSeconds`, and how tasks are made.
        starts_of: Says where to begin, given what is known about each partition; 0 in the others.
            It may raise. It is called again by the cut's `check`.

    Raises:
        PipelineError: The server cannot be asked, or deletions behind a start are forgotten.
    """
    texts = options_with_url(url, options)
    read_options = ReadOptions.parse(texts)
    driver = BucketDriverClient(read_options)
    lease_id = 0
    try:
        pinned = pin_cut(driver, starts_of)
        lease_id = pinned.lease_id
        spark.dataSource.register(LeasedDataSource)
        reader = spark.read.format(LeasedDataSource.name())
        reader = reader.options(**options_of_cut(texts, pinned))
        yield ConsistentCut(
            read_options.address.bucket,
            pinned.logs,
            pinned.starts,
            pinned.ends,
            reader.load(),
            partial(check_cut, driver, pinned, starts_of),
        )
    except ServerError as error:
        if error.status is Status.ROLLBACK_NEEDED:
            raise PipelineError(
                "UPR_RANGE_GONE",
                f"{url}: the server has removed deletions after the start ({error.sentence}): "
                "begin again from the beginning",
            ) from error
        raise as_pipeline_error(error, read_options.address) from error
    finally:
        if lease_id:
            driver.release_lease(lease_id)
        driver.close()


@attrs.frozen
class PinnedCut:
    """A cut that a lease pins.

    Attributes:
        lease_id: The lease.
        logs: Each partition's failover log, which has the history of its end.
        starts: Where it begins in each partition, exclusive.
        ends: Where it ends in each.
    """

    lease_id: int
    logs: Mapping[PartitionId, FailoverLog]
    starts: Mapping[PartitionId, SeqNo]
    ends: Mapping[PartitionId, SeqNo]


def options_of_cut(options: Mapping[str, str], cut: PinnedCut) -> dict[str, str]:
    """The options of a read of a cut, under its lease: one of its own would stay when this is over.
    A lease that is gone must not be acquired again. A node that took over would grant it on what it
    has left of the cut, and `check_cut` would find it held.

    Args:
        options: The options of the read, with the URL.
        cut: The cut.
    """
    return {
        **leased_options(options, cut.lease_id, acquires_lease=False),
        "startingOffsets": _offsets(cut.starts),
        "endingOffsets": _offsets(cut.ends),
    }


def pin_cut(
    driver: DriverClient, starts_of: Callable[[Infos], Mapping[PartitionId, SeqNo]]
) -> PinnedCut:
    """Pins all that was acknowledged before.

    Args:
        driver: Asks the bucket.
        starts_of: See `consistent_cut`.

    Raises:
        ServerError: `ROLLBACK_NEEDED`: deletions behind a start are forgotten.
        PipelineError: The server cannot be asked, or `starts_of` raised it.
    """
    for _ in range(NEW_LEASE_TRIES):
        seqnos = driver.wait_until_persisted()
        requested_starts = starts_of(driver.partition_infos(refresh=True))
        starts = {partition: requested_starts.get(partition, SeqNo(0)) for partition in seqnos}
        lease = acquire_new_lease(
            driver, [(partition, seq, SEQ_MAX) for partition, seq in starts.items()]
        )
        if all(pinned.end >= seqnos[pinned.partition].persisted_seq for pinned in lease.ranges):
            break
        # Another node has become active, and has the newest of it in memory alone.
        driver.release_lease(lease.lease_id)
    else:
        raise PipelineError(
            "UPR_SERVER",
            "other nodes have become active each time that all changes were to be pinned, "
            f"{NEW_LEASE_TRIES} times: find out why, and run this again",
        )
    logs = None
    try:
        # A history that began since the lease was granted began behind its end.
        driver.seqnos()
        logs = {partition: info.log for partition, info in driver.partition_infos().items()}
    finally:
        if logs is None:
            driver.release_lease(lease.lease_id)
    ends = {pinned.partition: pinned.end for pinned in lease.ranges}
    return PinnedCut(lease.lease_id, logs, starts, ends)


def check_cut(
    driver: DriverClient, cut: PinnedCut, starts_of: Callable[[Infos], Mapping[PartitionId, SeqNo]]
) -> None:
    """Makes sure, once the rows of a cut are read, that all of them are of the histories of its
    starts and its ends. After a failover, the new node gives other changes for the same numbers, or
    what comes after a start that it never had. Also that none were compacted: a node that took over
    knows nothing of the lease.

    Raises:
        PipelineError: `UPR_ROLLBACK` or `UPR_RANGE_GONE`: it is not so. Or `starts_of` raised it,
            or the server cannot be asked.
    """
    driver.seqnos()
    infos = driver.partition_infos()
    starts_of(infos)
    for partition, end in cut.ends.items():
        info, position = infos.get(partition), Position(cut.logs[partition], end, end, None)
        if info is None or has_lost(info, position):
            raise PipelineError(
                "UPR_ROLLBACK",
                f"partition {partition} lost changes up to {end} while they were read: there was a "
                "failover, or the bucket was created again. Run this again",
            )
    if not _is_held(driver, cut):
        raise PipelineError(
            "UPR_RANGE_GONE",
            "the lease did not hold all changes while they were read: another node has become "
            "active for a partition, or this took longer than leaseSeconds and compaction has "
            "removed some. Run this again",
        )


def _is_held(driver: DriverClient, cut: PinnedCut) -> bool:
    """Whether the lease has held all of a cut since it was granted. One that has lapsed can be
    renewed as long as nothing of it is gone."""
    try:
        lease = driver.renew_lease(cut.lease_id)
    except ServerError as error:
        if error.status is not Status.RANGE_GONE:
            raise
        return False
    return holds_ranges(
        lease, ((partition, cut.starts[partition], end) for partition, end in cut.ends.items())
    )


def options_with_url(url: str, options: Mapping[str, str]) -> dict[str, str]:
    """The options of a read, with the URL.

    Raises:
        OptionError: One is among them that the recipe sets by itself, or that is for other reads.
    """
    check_own_options(options, _OWN_OPTIONS)
    for name in options:
        if name.lower() in _OF_OTHER_READS:
            raise OptionError(
                f"the option {name} is not for this recipe, which reads what one bucket has now: "
                "leave it out"
            )
    return {**options, "url": url}


def _offsets(numbers: Mapping[PartitionId, SeqNo]) -> str:
    return msgspec.json.encode({str(partition): seq for partition, seq in numbers.items()}).decode()
