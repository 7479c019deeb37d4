"""A stream whose options are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.worker_call import worker_call


class RefusedStream(DataSourceStreamReader):
    """Raises an error as soon as Spark asks it anything.

    If a data source raises instead of making its reader, Spark's process for streams ends with
    another error: it stops the reader that it does not have.

    Args:
        error: The error.
    """

    def __init__(self, error: PipelineError) -> None:
        self._error = error

    @worker_call()
    def _refuse(self) -> NoReturn:
        raise self._error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Where a new query begins: nowhere."""
        self._refuse()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002, N802
        """Where the next batch ends: nowhere."""
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002
        """The tasks of a batch that was planned before: none."""
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """The rows of a task: none."""
        self._refuse()
