"""A Python data source that does nothing: the bound of what any Python data source can reach.

It yields batches that were made before, and its sink throws away what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructField, StructType

from upr_protocol.spark.schema import READ_COLUMNS

BATCH_ROWS: Final = 10_000
"""Rows of a batch: 1,000 are slower, and 100,000 not faster."""

TASKS: Final = 4

_BYTES: Final = {"key": 16, "value": 112}
_VALUES: Final[dict[str, object]] = {
    "op": "set",
    "partition": 1,
    "history_id": "0123456789abcdef",
    "deleted": False,
}


class EmptyDataSource(DataSource):
    """The data source `empty`, with the columns of `upr`. Its options are `rows` and `columns`, 2
    for key and value or 12 for all."""

    @classmethod
    def name(cls) -> str:
        """The name that `format` is given."""
        return "empty"

    def schema(self) -> StructType:
        """Two columns or all."""
        names = READ_COLUMNS if self.options["columns"] == "12" else _BYTES
        return StructType([StructField(name, *READ_COLUMNS[name]) for name in names])

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of ready-made batches."""
        return EmptyReader(schema, int(self.options["rows"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """The same as a stream of one batch."""
        return EmptyStreamReader(schema, int(self.options["rows"]))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """A writer that drops everything."""
        del schema, overwrite
        return EmptyWriter()


class EmptyReader(DataSourceReader):
    """Yields the same batch again and again.

    Args:
        schema: The columns.
        rows: How many rows there are.
    """

    def __init__(self, schema: StructType, rows: int) -> None:
        self._schema = schema
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        """One for each task."""
        return [InputPartition(index) for index in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        batch = _made(to_arrow_schema(self._schema, timezone="UTC"))
        first, end = (
            self._rows * index // TASKS for index in (partition.value, partition.value + 1)
        )
        for start in range(first, end, BATCH_ROWS):
            yield batch.slice(0, min(BATCH_ROWS, end - start))


class EmptyStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream that has all its rows in its first batch.

    Args:
        schema: The columns.
        rows: How many rows there are.
    """

    def __init__(self, schema: StructType, rows: int) -> None:
        self._reader = EmptyReader(schema, rows)
        self._rows = rows

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Before all rows."""
        return {"rows": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Behind all rows."""
        del start, limit
        return {"rows": self._rows}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """There will never be more."""

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One for each task."""
        return self._reader.partitions() if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._reader.read(partition)


class EmptyWriter(DataSourceArrowWriter):
    """Takes all rows, and drops them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """The rows of one task."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


def _made(schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        if field.name in _BYTES:
            nbytes = _BYTES[field.name]
            offsets = np.arange(0, nbytes * BATCH_ROWS + 1, nbytes, dtype=np.int32)
            data = np.random.default_rng(1).bytes(nbytes * BATCH_ROWS)
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            columns.append(pa.Array.from_buffers(pa.binary(), BATCH_ROWS, buffers))
        elif field.name in _VALUES:
            columns.append(pa.repeat(pa.scalar(_VALUES[field.name], field.type), BATCH_ROWS))
        else:
            columns.append(pa.array(np.arange(BATCH_ROWS), pa.int64()).cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
