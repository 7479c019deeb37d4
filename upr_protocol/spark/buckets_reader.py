"""Streaming what changes in several buckets: one stream for each, and one offset for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from upr_protocol.spark.batch_shares import StreamLimits, equal_shares
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.micro_batch_reader import (
    MicroBatchReader,
    batch_must_wait,
    default_limit,
    limits_of,
)
from upr_protocol.spark.offset import BUCKETS, StreamOffset
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.reading import read_task
from upr_protocol.spark.schema import check_schema
from upr_protocol.spark.stream_backlog import BacklogSize, StreamBacklog
from upr_protocol.spark.worker_call import worker_call

Json = dict[str, Any]


class BucketsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the changes of several buckets. Those that a pattern matches are looked for at each
    batch; a new one is read from its beginning.

    Args:
        options: What is asked for.
        schema: Which columns.
        reader_of: Makes the reader of one bucket.
        matching_buckets: Gives the names that the pattern matches.
    """

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType,
        reader_of: Callable[[ReadOptions, StructType], MicroBatchReader] = MicroBatchReader,
        matching_buckets: Callable[[], tuple[str, ...]] | None = None,
    ) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._reader_of = reader_of
        self._matching_buckets = matching_buckets
        self._delay = options.batch_delay()
        self._driver: BucketDriverClient | None = None
        self._readers: dict[str, MicroBatchReader] = {}
        self._names: tuple[str, ...] | None = None
        """The buckets of a query that ends at what there was; None while they are looked for."""
        self._committed_offsets: dict[str, Json] = {}

    def _reader(self, bucket: str) -> MicroBatchReader:
        reader = self._readers.get(bucket)
        if reader is None:
            reader = self._reader_of(self._options.of_bucket(bucket), self._schema)
            self._readers[bucket] = reader
        return reader

    def _bucket_names(self) -> tuple[str, ...]:
        """The buckets that are read: those that are named, or that match and exist."""
        if self._options.buckets:
            return self._options.buckets
        if self._matching_buckets is None:
            self._driver = BucketDriverClient(self._options)
            self._matching_buckets = self._driver.matching_buckets
        return self._matching_buckets()

    @worker_call()
    def initialOffset(self) -> Json:  # noqa: N802  Spark's name
        """Where a new query begins."""
        names = self._bucket_names()
        self._options.check_bucket_names(names)
        return _document({name: self._reader(name).initialOffset() for name in names})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What the options say of the size of a batch."""
        return default_limit(self._options)

    @worker_call()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """The query is to end at what there is now."""
        self._names = self._bucket_names()
        for name in self._names:
            self._reader(name).prepareForTriggerAvailableNow()

    @worker_call()
    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802
        """Where the batch ends that begins at `start`."""
        names = self._bucket_names()
        if self._names is not None:
            names = tuple(name for name in self._names if name in names)
        old_offsets = self._without_removed_buckets(_offsets(start), names)
        start_offsets = {name: old_offsets.get(name) or _first_offset(name) for name in names}
        if batch_must_wait(self._delay, limit, lambda: self._backlog_sizes(start_offsets).values()):
            for name, start_offset in start_offsets.items():
                self._reader(name).stay_at_offset(start_offset)
            return start
        is_planned = False
        try:
            end_offsets = self._end_offsets(start_offsets, limits_of(limit, self._options))
            is_planned = True
        finally:
            if not is_planned:
                for name, start_offset in start_offsets.items():
                    self._reader(name).drop_batch(start_offset)
        new_offsets = {
            **old_offsets,
            **{
                name: end_offset
                for name, end_offset in end_offsets.items()
                if end_offset != start_offsets[name]
            },
        }
        return start if new_offsets == _offsets(start) else _document(new_offsets)

    def _without_removed_buckets(
        self, offsets: Mapping[str, Json], names: tuple[str, ...]
    ) -> Mapping[str, Json]:
        """The offsets without those of buckets that were deleted, or are not asked for any more.
        Nobody asks for these buckets again."""
        pattern = self._options.bucket_pattern
        if pattern is not None and self._options.fails_on_data_loss:
            deleted_names = [
                name for name in offsets if name not in names and pattern.fullmatch(name)
            ]
            if deleted_names:
                raise PipelineError(
                    "UPR_NO_BUCKET",
                    f"{self._options.address}: the stream has read {', '.join(deleted_names)}, "
                    "which does not exist any more: set failOnDataLoss=false to continue "
                    "without it",
                )
        for name in self._readers.keys() - set(names):
            self._readers.pop(name).stop()
        return {name: offset for name, offset in offsets.items() if name in names}

    def _backlog_sizes(self, start_offsets: Mapping[str, Json]) -> Mapping[str, BacklogSize]:
        """What there is for the next batches in each bucket."""
        return {
            name: self._reader(name).backlog_after(start_offset)
            for name, start_offset in start_offsets.items()
        }

    def _end_offsets(
        self, start_offsets: Mapping[str, Json], limits: StreamLimits
    ) -> Mapping[str, Json]:
        """Where the next batch ends in each bucket that is part of it. The limit is divided by
        backlog."""
        if limits == StreamLimits():
            return {
                name: self._reader(name).next_offset(start_offset, limits)
                for name, start_offset in start_offsets.items()
            }
        backlogs = {name: size.numbers for name, size in self._backlog_sizes(start_offsets).items()}
        end_offsets: dict[str, Json] = {}
        for name in (name for name, backlog in backlogs.items() if not backlog):
            # It is asked, too: it may have to go back. Then it has more than the backlog says, and
            # the batch is its own.
            end_offsets[name] = self._reader(name).next_offset(start_offsets[name], limits)
            if end_offsets[name] != start_offsets[name]:
                break
        else:
            for name, bucket_limits in _limits_by_bucket(limits, backlogs).items():
                end_offsets[name] = self._reader(name).next_offset(
                    start_offsets[name], bucket_limits
                )
        for name in start_offsets.keys() - end_offsets.keys():
            self._reader(name).stay_at_offset(start_offsets[name])
        return end_offsets

    @worker_call()
    def reportLatestOffset(self) -> Json | None:  # noqa: N802
        """How far the servers are, and the metrics of what they have more."""
        progress = {name: reader.progress() for name, reader in self._readers.items()}
        backlog = StreamBacklog.merged(bucket_backlog for _, bucket_backlog in progress.values())
        document = _document({name: latest for name, (latest, _) in progress.items()})
        return {**document, "metrics": backlog.metrics()}

    @worker_call()
    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """The tasks that read a batch, for the first time or again."""
        old_offsets, new_offsets = _offsets(start), _offsets(end)
        skips_deleted = self._options.bucket_pattern and not self._options.fails_on_data_loss
        bucket_names = self._bucket_names() if skips_deleted else tuple(new_offsets)
        tasks: list[InputPartition] = []
        for name, offset in new_offsets.items():
            start_offset = old_offsets.get(name) or _first_offset(name)
            if offset != start_offset and name in bucket_names:
                tasks += self._reader(name).partitions(start_offset, offset)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return read_task(partition, self._options, self._schema)  # type: ignore[arg-type]

    @worker_call()
    def commit(self, end: Json) -> None:
        """The batch that ends there is done with."""
        for name, offset in _offsets(end).items():
            reader = self._readers.get(name)
            # Without a reader the bucket is gone, or not asked for: nothing of it is pinned, or it
            # ends by itself.
            if reader is not None and offset != self._committed_offsets.get(name):
                reader.commit(offset)
                self._committed_offsets[name] = offset

    def stop(self) -> None:
        """The query is over."""
        for reader in self._readers.values():
            reader.stop()
        if self._driver is not None:
            self._driver.close()


def _limits_by_bucket(limits: StreamLimits, backlogs: Mapping[str, int]) -> dict[str, StreamLimits]:
    """The limit of each bucket. Those whose share is nothing have none."""
    total = sum(backlogs.values())
    if not total:
        return {}
    bucket_limits = {}
    for name, share in equal_shares(limits.numbers or total, backlogs).items():
        if share:
            nbytes = limits.nbytes
            if nbytes is not None:
                nbytes = max(1, nbytes * backlogs[name] // total)
            bucket_limits[name] = StreamLimits(share, nbytes)
    return bucket_limits


def _first_offset(bucket: str) -> Json:
    """The beginning of a bucket that the stream has not met before."""
    return StreamOffset(bucket, {}, is_initial=True).to_json()


def _document(offsets: Mapping[str, Json]) -> Json:
    """The offsets of several buckets as one: equal ones are equal texts."""
    return {BUCKETS: {name: offsets[name] for name in sorted(offsets)}}


def _offsets(document: object) -> dict[str, Json]:
    """The offset of each bucket."""
    offsets = document.get(BUCKETS) if isinstance(document, dict) else None
    if isinstance(offsets, dict):
        return offsets
    StreamOffset.of_json(document)  # which refuses that of another data source
    raise PipelineError(
        "UPR_OFFSET",
        "the checkpoint is of a stream of one bucket, and not of several: name that bucket in the "
        "option url, or begin with a new checkpoint",
    )
