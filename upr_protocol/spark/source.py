"""The data source `upr`."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from upr_protocol.client.options import new_lease_id
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.worker_call import worker_call

if TYPE_CHECKING:
    from upr_protocol.spark.batch_reader import BatchReader
    from upr_protocol.spark.buckets_reader import BucketsReader
    from upr_protocol.spark.index_reader import IndexReader
    from upr_protocol.spark.micro_batch_reader import MicroBatchReader
    from upr_protocol.spark.refused_stream import RefusedStream
    from upr_protocol.spark.writer import BatchWriter, StreamWriter


class UprDataSource(DataSource):
    """Reads, streams and writes a bucket: `spark.dataSource.register(UprDataSource)`, and then
    `spark.read.format("upr")`, `readStream`, `write`, `writeStream`. docs/spark.md has the options.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        # One for each `load()`, and the same for every action on what was loaded.
        self._lease_id = new_lease_id()
        self._acquires_lease = True

    @classmethod
    def name(cls) -> str:
        """The name that `format` is given."""
        return "upr"

    @worker_call()
    def schema(self) -> StructType | str:
        """The columns of a read; a user's `.schema(...)` chooses among them."""
        from upr_protocol.spark.read_options import INFER, ReadOptions
        from upr_protocol.spark.schema import ddl_with_fields, default_schema

        options = ReadOptions.parse(self.options, streaming=None)
        if options.value_schema == INFER:
            from upr_protocol.spark.value_sample import inferred_schema

            return inferred_schema(options)
        return ddl_with_fields(options) if options.value_schema else default_schema(options)

    @worker_call()
    def reader(self, schema: StructType) -> BatchReader | IndexReader:
        """Reads what is there."""
        from upr_protocol.spark.batch_reader import BatchReader
        from upr_protocol.spark.index_reader import IndexReader
        from upr_protocol.spark.read_options import ReadOptions
        from upr_protocol.spark.schema import check_value_schema

        options = ReadOptions.parse(self.options)
        check_value_schema(options, schema)
        if options.index is not None:
            return IndexReader(options, schema)
        return BatchReader(options, schema, self._lease_id, acquires_lease=self._acquires_lease)

    def streamReader(  # noqa: N802  Spark's name
        self, schema: StructType
    ) -> MicroBatchReader | BucketsReader | RefusedStream:
        """Streams what changes."""
        from upr_protocol.spark.refused_stream import RefusedStream

        try:
            return self._stream_reader(schema)
        except PipelineError as error:
            return RefusedStream(error)

    def _stream_reader(self, schema: StructType) -> MicroBatchReader | BucketsReader:
        from upr_protocol.spark.buckets_reader import BucketsReader
        from upr_protocol.spark.micro_batch_reader import MicroBatchReader
        from upr_protocol.spark.read_options import ReadOptions
        from upr_protocol.spark.schema import check_marker_columns, check_value_schema

        options = ReadOptions.parse(self.options, streaming=True)
        check_value_schema(options, schema)
        check_marker_columns(options, schema)
        if options.are_several_buckets:
            return BucketsReader(options, schema)
        return MicroBatchReader(options, schema)

    @worker_call()
    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Writes a DataFrame."""
        from upr_protocol.spark.driver_connection import check_bucket
        from upr_protocol.spark.write_options import WriteOptions
        from upr_protocol.spark.writer import BatchWriter

        options = WriteOptions.parse(self.options, schema, overwrite=overwrite)
        check_bucket(options.address, options.timeout_s)
        return BatchWriter(options)

    @worker_call()
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Writes the batches of a stream."""
        from upr_protocol.spark.driver_connection import check_bucket
        from upr_protocol.spark.write_options import WriteOptions
        from upr_protocol.spark.writer import StreamWriter

        options = WriteOptions.parse(self.options, schema, overwrite=overwrite)
        check_bucket(options.address, options.timeout_s)
        return StreamWriter(options)
