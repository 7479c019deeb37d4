"""Readers of a stream over a model of its bucket, and what they plan."""

from __future__ import annotations

from typing import Any, Final

from tests.spark.model_driver_client import ModelDriverClient
from upr_protocol.spark.micro_batch_reader import MicroBatchReader
from upr_protocol.spark.offset import PartitionOffset, StreamOffset
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import PartitionRange, ReadTask
from upr_protocol.spark.schema import default_schema

PARTITIONS: Final = 3
Json = dict[str, Any]
Ranges = list[tuple[int, int, int, int | None]]


def options_of(**options_given: str) -> ReadOptions:
    return ReadOptions.parse({"url": "upr://localhost/b", **options_given}, streaming=True)


def reader_of(
    driver: ModelDriverClient, *, partitions: set[int] | None = None, **options_given: str
) -> MicroBatchReader:
    """A reader of some partitions of a bucket, or of all."""
    options = options_of(**options_given)
    reader = MicroBatchReader(options, default_schema(options), driver)
    if partitions is not None:
        reader._driver = FewerPartitions(driver, partitions)
    return reader


def ranges_of(tasks: list[ReadTask]) -> Ranges:
    """Partition, start and end of what tasks read, and from where it went back."""
    ranges: list[PartitionRange] = sorted(
        (range_ for task in tasks for range_ in task.ranges),
        key=lambda range_: (range_.partition, range_.start),
    )
    return [
        (
            range_.partition,
            range_.start,
            range_.end,
            range_.marker.from_seq if range_.marker else None,
        )
        for range_ in ranges
    ]


def offsets_of(document: dict[str, Any]) -> dict[int, PartitionOffset]:
    """Where an offset stands in each partition."""
    return {int(key): offset for key, offset in StreamOffset.of_json(document).partitions.items()}


class FewerPartitions:
    """A driver of which only some partitions are asked for."""

    def __init__(self, driver: ModelDriverClient, partitions: set[int]) -> None:
        self._driver = driver
        self._partitions = partitions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def seqnos(self) -> Any:
        rows = self._driver.seqnos()
        return {partition: row for partition, row in rows.items() if partition in self._partitions}


def written(partitions: int, rows: int) -> ModelDriverClient:
    """A bucket with so many rows in each partition, all on disk."""
    driver = ModelDriverClient(partitions)
    for partition in range(partitions):
        write_rows(driver, partition, rows)
    return driver


def write_rows(driver: ModelDriverClient, partition: int, rows: int) -> None:
    """Writes so many rows to a partition, and to disk."""
    for key in range(rows):
        driver.write(partition, key)
    driver.flush(partition)
