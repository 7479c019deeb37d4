"""Several buckets as models, and readers of those that a pattern matches."""

from __future__ import annotations

from typing import Any

from pyspark.sql.types import StructType

from tests.spark.model_driver_client import ModelDriverClient
from tests.spark.stream_reader import options_of, write_rows
from upr_protocol.spark.buckets_reader import BucketsReader
from upr_protocol.spark.micro_batch_reader import MicroBatchReader
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import ReadTask
from upr_protocol.spark.schema import default_schema

Range = tuple[str, int, int, int]


class Buckets:
    """A server's buckets, as models, and readers of those that a pattern matches."""

    def __init__(self, **rows: int) -> None:
        self.drivers: dict[str, ModelDriverClient] = {}
        for name, count in rows.items():
            self.create(name, count)

    def create(self, name: str, rows: int) -> None:
        self.drivers[name] = ModelDriverClient(1)
        write_rows(self.drivers[name], 0, rows)

    def delete(self, name: str) -> None:
        """Nothing may be asked of it any more, but to end a lease."""
        driver = self.drivers.pop(name)
        driver.is_deleted = True

    def reader(self, **options_given: str) -> BucketsReader:
        options = options_of(url="upr://localhost", **options_given)
        pattern = options.bucket_pattern

        def matching() -> tuple[str, ...]:
            assert pattern is not None
            return tuple(name for name in sorted(self.drivers) if pattern.fullmatch(name))

        def reader_of(options: ReadOptions, schema: StructType) -> MicroBatchReader:
            return MicroBatchReader(options, schema, self.drivers[options.address.bucket])

        return BucketsReader(options, default_schema(options), reader_of, matching)


def ranges_of(reader: BucketsReader, start: Any, end: Any) -> list[Range]:
    """Bucket, partition, start and end of what the tasks of a batch read."""
    ranges = []
    for task in reader.partitions(start, end):
        assert isinstance(task, ReadTask)
        ranges += [
            (task.bucket, range_.partition, range_.start, range_.end) for range_ in task.ranges
        ]
    return sorted(ranges)
