"""The data source `upr`."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from upr_protocol.spark.driver_client import new_lease_id
from upr_protocol.spark.errors import sentence_first

if TYPE_CHECKING:
    from upr_protocol.spark.batch_reader import BatchReader
    from upr_protocol.spark.micro_batch_reader import MicroBatchReader
    from upr_protocol.spark.writer import BatchWriter, StreamWriter


class UprDataSource(DataSource):
    """Reads, streams and writes a bucket: `spark.dataSource.register(UprDataSource)`, and then
    `spark.read.format("upr")`, `readStream`, `write`, `writeStream`. docs/spark.md has the options.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        # One for each `load()`, and the same for every action on what was loaded.
        self._lease_id = new_lease_id()

    @classmethod
    def name(cls) -> str:
        """The name that `format` is given."""
        return "upr"

    @sentence_first()
    def schema(self) -> StructType:
        """The columns of a read; a user's `.schema(...)` chooses among them."""
        from upr_protocol.spark.read_options import ReadOptions
        from upr_protocol.spark.schema import default_schema

        return default_schema(ReadOptions.parse(self.options, streaming=None))

    @sentence_first()
    def reader(self, schema: StructType) -> BatchReader:
        """Reads what is there."""
        from upr_protocol.spark.batch_reader import BatchReader
        from upr_protocol.spark.read_options import ReadOptions

        return BatchReader(ReadOptions.parse(self.options), schema, self._lease_id)

    @sentence_first()
    def streamReader(self, schema: StructType) -> MicroBatchReader:  # noqa: N802  Spark's name
        """Streams what changes."""
        from upr_protocol.spark.micro_batch_reader import MicroBatchReader
        from upr_protocol.spark.read_options import ReadOptions

        return MicroBatchReader(ReadOptions.parse(self.options, streaming=True), schema)

    @sentence_first()
    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Writes a DataFrame."""
        from upr_protocol.spark.write_options import WriteOptions
        from upr_protocol.spark.writer import BatchWriter

        return BatchWriter(WriteOptions.parse(self.options, schema, overwrite=overwrite))

    @sentence_first()
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Writes the batches of a stream."""
        from upr_protocol.spark.write_options import WriteOptions
        from upr_protocol.spark.writer import StreamWriter

        return StreamWriter(WriteOptions.parse(self.options, schema, overwrite=overwrite))
