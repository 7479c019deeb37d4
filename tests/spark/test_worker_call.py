"""What Spark's Python workers do around each call of the data source."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tests.spark.bucket import change, put
from upr_protocol.spark import UprDataSource
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.worker_call import worker_call


class CountingReader(DataSourceReader):
    """Reads as another reader does. Behind the rows of a task it has one more, whose value is how
    many objects the collector passes over then."""

    def __init__(self, reader: DataSourceReader) -> None:
        self._reader = reader

    def partitions(self) -> Sequence[InputPartition]:
        return self._reader.partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from self._reader.read(partition)
        yield pa.record_batch({"key": [b"frozen"], "value": [b"%d" % gc.get_freeze_count()]})


class CountingDataSource(UprDataSource):
    """The data source with one row more for each task."""

    @classmethod
    def name(cls) -> str:
        return "counting"

    def reader(self, schema: StructType) -> DataSourceReader:  # type: ignore[override]
        return CountingReader(super().reader(schema))


def test_a_worker_that_has_read_collects_no_imported_objects_any_more(
    spark: SparkSession, new_bucket: Callable[..., str]
) -> None:
    url = new_bucket()
    change(url, put(range(100)))
    spark.dataSource.register(CountingDataSource)
    reader = spark.read.format("counting").schema("key binary, value binary")
    rows = reader.load(url=url).collect()
    counts = [int(row.value) for row in rows if row.key == b"frozen"]
    assert len(rows) == 100 + len(counts)
    assert counts
    assert all(count > 50_000 for count in counts), counts


def test_outside_of_sparks_workers_a_call_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        with worker_call():
            pass
        assert not gc.get_freeze_count()
        with pytest.raises(PipelineError), worker_call():
            raise PipelineError("UPR_SERVER", "it is away")
    finally:
        if frozen:
            gc.freeze()
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
