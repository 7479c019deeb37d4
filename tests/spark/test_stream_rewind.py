"""Where a stream goes back to after its bucket lost changes, and the markers that say so."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructField, StructType

from tests.spark.model_driver_client import ModelDriverClient
from tests.spark.stream_reader import (
    offsets_of,
    options_of,
    ranges_of,
    reader_of,
    write_rows,
    written,
)
from upr_protocol.ids import SeqNo
from upr_protocol.spark import UprDataSource
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.micro_batch_reader import MicroBatchReader
from upr_protocol.spark.offset import PartitionOffset
from upr_protocol.spark.partition_rollback import BATCH_ENDS_MAX, with_batch_end
from upr_protocol.spark.schema import READ_COLUMNS


def _next_ranges(reader: MicroBatchReader, start: Any) -> list[Any]:
    """What the batch after `start` reads."""
    end = reader.latestOffset(start, ReadAllAvailable())
    return ranges_of(list(reader.partitions(start, end)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost_after", "went_to"), [(29, 20), (20, 20), (19, 10), (10, 10), (9, 0)]
)
def test_a_stream_rewinds_to_the_newest_end_of_a_batch_that_was_not_lost(
    lost_after: int, went_to: int
) -> None:
    driver = ModelDriverClient(1)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.initialOffset()
    for _ in range(3):
        write_rows(driver, 0, 10)
        start = reader.latestOffset(start, ReadAllAvailable())
        reader.commit(start)
    driver.fail_over(0, lost_after)
    driver.write(0, 0)
    driver.flush(0)
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = list(reader.partitions(start, end))
    assert ranges_of(tasks) == [(0, went_to, lost_after + 1, 30)]  # type: ignore[arg-type]
    # A query that does not rewind any more goes back to 0.
    reader = reader_of(driver, onRollback="marker")
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = list(reader.partitions(start, end))
    assert ranges_of(tasks) == [(0, 0, lost_after + 1, 30)]  # type: ignore[arg-type]


def test_a_rewind_does_not_go_to_an_end_that_was_reached_with_other_options() -> None:
    """A batch may have lacked rows then."""
    driver = written(1, 10)
    reader = reader_of(driver, onRollback="marker", failOnDataLoss="false")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    write_rows(driver, 0, 10)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 15)
    assert _next_ranges(reader, start) == [(0, 0, 15, 20)]


def test_a_rewind_does_not_go_to_the_end_of_a_snapshot_that_other_options_went_on_with() -> None:
    driver = written(1, 10)
    reader = reader_of(driver, onRollback="rewind", maxOffsetsPerTrigger="5")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(5))
    reader = reader_of(driver, onRollback="marker", failOnDataLoss="false")
    start = reader.latestOffset(start, ReadAllAvailable())
    assert offsets_of(start)[0].seq == 10
    write_rows(driver, 0, 10)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 15)
    assert _next_ranges(reader, start) == [(0, 0, 15, 20)]


def test_a_rewind_does_not_go_into_a_snapshot_that_was_left() -> None:
    driver = written(2, 10)
    reader = reader_of(driver, onRollback="rewind", maxOffsetsPerTrigger="10")
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))
    assert offsets_of(start)[0].seq == 5
    few = reader_of(driver, partitions={1}, onRollback="rewind")
    start = few.latestOffset(start, ReadAllAvailable())
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 8)
    assert _next_ranges(reader, start)[0] == (0, 0, 8, 10)


@pytest.mark.parametrize("options", [{"stability": "any"}, {"failOnDataLoss": "false"}])
def test_a_rewind_needs_batches_that_lack_nothing(options: dict[str, str]) -> None:
    with pytest.raises(PipelineError, match="rewind, which needs stability=durable"):
        options_of(onRollback="rewind", **options)


@pytest.mark.parametrize(
    ("columns", "options", "missing"),
    [
        ("key value seq deleted", {"onRollback": "marker"}, "op, partition"),
        ("op partition key value", {"onRollback": "rewind"}, "seq"),
        ("op partition key", {"onRollback": "marker", "buckets": "a,b"}, "bucket"),
        ("op partition key value", {"onRollback": "marker"}, ""),
        ("key value seq deleted", {}, ""),
    ],
)
def test_markers_need_the_columns_that_tell_them(
    columns: str, options: dict[str, str], missing: str
) -> None:
    """A marker would look like an item with an empty key, and the lost rows would stay."""
    url = "upr://localhost" if "buckets" in options else "upr://localhost/b"
    source = UprDataSource({"url": url, **options})
    schema = StructType([StructField(name, *READ_COLUMNS[name]) for name in columns.split()])
    sentence = f"what a marker is about: {missing} is missing"
    reader = source.streamReader(schema)
    if not missing:
        assert isinstance(reader, MicroBatchReader)
        return
    # Spark would not show what is raised before there is a reader.
    with pytest.raises(PipelineError, match=sentence):
        reader.initialOffset()
    with pytest.raises(PipelineError, match=sentence):
        reader.partitions({}, {})
    with pytest.raises(PipelineError, match=sentence):
        reader.latestOffset({}, ReadAllAvailable())


def test_a_rewind_goes_to_0_where_deletions_behind_the_number_were_removed() -> None:
    driver = written(1, 10)
    reader = reader_of(driver, onRollback="rewind")
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    write_rows(driver, 0, 10)
    start = reader.latestOffset(start, ReadAllAvailable())
    driver.fail_over(0, 15)
    driver.partitions[0].purge = 12
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = list(reader.partitions(start, end))
    assert ranges_of(tasks) == [(0, 0, 15, 20)]  # type: ignore[arg-type]


def test_ends_of_batches_are_few_and_far_apart_where_they_are_old() -> None:
    offset = PartitionOffset()
    for seq in range(100, 100_001, 100):
        offset = PartitionOffset(
            seq=SeqNo(seq),
            snapshot_end=SeqNo(seq),
            batch_ends=with_batch_end(
                attrs.evolve(offset, seq=SeqNo(seq), snapshot_end=SeqNo(seq))
            ),
        )
    assert len(offset.batch_ends) == BATCH_ENDS_MAX
    assert offset.batch_ends[:2] == (100_000, 99_900)
    assert offset.batch_ends[-1] == 0
    distances = [100_000 - seq for seq in offset.batch_ends[1:]]
    assert all(further >= 2 * near for near, further in pairwise(distances)), distances
    inside = PartitionOffset(seq=SeqNo(5), snapshot_end=SeqNo(9), batch_ends=(SeqNo(3),))
    assert with_batch_end(inside) == (3,)
