"""One of the two buckets of a join: the stream of its changes, and its items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BooleanType, DataType, LongType, StructField, StructType

from upr_protocol.client.options import new_lease_id
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.item_lookup import ItemLookup
from upr_protocol.spark.json_values import ValueParser
from upr_protocol.spark.leased_source import LeasedDataSource, leased_options
from upr_protocol.spark.options import connection_options
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.recipes.latest import latest
from upr_protocol.spark.recipes.lookup_history import LookupHistory
from upr_protocol.spark.record_batches import column_as
from upr_protocol.spark.schema import check_schema


class JoinSide:
    """One of the two buckets.

    Args:
        spark: The session.
        url: The bucket.
        schema: How key and value are read.
        options: More options of its stream.

    Attributes:
        history: Whether it still has what was looked up.

    Raises:
        OptionError: An option is wrong, or the schema has other columns than key and value.
    """

    def __init__(
        self, spark: SparkSession, url: str, schema: str, options: Mapping[str, str]
    ) -> None:
        self._spark = spark
        self._schema = schema
        self._options = {**options, "url": url}
        self._connection = connection_options(self._options)
        self._lease_ids: list[int] = []
        """Leases of the reads of all items that are not released."""
        self._read_options = ReadOptions.parse(self._options, streaming=True)
        names = StructType.fromDDL(schema)
        assert isinstance(names, StructType)
        check_schema(names)
        if set(names.fieldNames()) != {"key", "value"}:
            raise OptionError(f"the schema is {schema!r}, and has to have key and value")
        self._items = StructType(
            [
                StructField("key", names["key"].dataType),
                StructField("value", names["value"].dataType),
                StructField("is_there", BooleanType()),
                StructField("flags", LongType()),
                StructField("expiry", LongType()),
            ]
        )
        read_options = self._read_options
        self.history = LookupHistory(read_options.address, lambda: BucketDriverClient(read_options))

    @property
    def key_type(self) -> DataType:
        """How keys are read."""
        return self._items["key"].dataType

    def empty(self) -> DataFrame:
        """No items, with their columns."""
        return self._spark.createDataFrame([], self._items)

    def changes(self) -> DataFrame:
        """A stream of the keys that change."""
        reader = self._spark.readStream.format("upr").options(**self._options)
        return reader.schema(f"key {self.key_type.simpleString()}").load()

    def all_items(self) -> DataFrame:
        """All items that the bucket holds. They are on the server until `release_items`."""
        lease_id = new_lease_id()
        self._lease_ids.append(lease_id)
        options = leased_options(self._connection, lease_id, acquires_lease=True)
        reader = self._spark.read.format(LeasedDataSource.name()).options(**options)
        reader = reader.option("deduplicate", "true")
        return latest(reader.schema(f"{self._schema}, seq LONG, deleted BOOLEAN").load())

    def release_items(self) -> None:
        """What `all_items` gave is not read any more. Otherwise each batch would leave a lease,
        which holds up compaction, and the server allows a limited number."""
        driver = BucketDriverClient(self._read_options)
        try:
            while self._lease_ids:
                driver.release_lease(self._lease_ids.pop())
        finally:
            driver.close()

    def items(self, keys: DataFrame) -> DataFrame:
        """The items at the column `key` of `keys`, as they are now, with the columns `key`,
        `value`, `is_there` (whether there is an item), `flags` and `expiry`."""
        fields = StructType([field for field in self._items if field.name != "key"])
        lookup = _lookup(self._read_options, self._items)
        item_of = arrow_udf(lookup, fields)  # type: ignore[call-overload]
        # Otherwise Spark may look up again for each column.
        item_of = item_of.asNondeterministic()
        return keys.select("key", item_of("key").alias("item")).select("key", "item.*")


def _lookup(
    options: ReadOptions, schema: StructType
) -> Callable[[Iterator[pa.Array]], Iterator[pa.Array]]:
    """What a task does: reads the items at its keys, as structs of the columns of `schema` without
    the key."""

    def lookup(columns: Iterator[pa.Array]) -> Iterator[pa.Array]:
        kinds = to_arrow_schema(schema, timezone="UTC")
        value_type = kinds.field("value").type
        parser = ValueParser(schema["value"].dataType) if pa.types.is_struct(value_type) else None
        client = BucketDriverClient(options)
        item_lookup = ItemLookup(client)
        try:
            # Spark counts the rows of all arrays, and not of each.
            for items in chain.from_iterable(
                item_lookup.parts(keys.to_pylist()) for keys in columns
            ):
                values = pa.array([item and item.value for item in items], pa.binary())
                if parser is None:
                    values = column_as("value", values, value_type)
                else:
                    values = parser.parse(values, value_type)
                fields = {
                    "value": values,
                    "is_there": pa.array([item is not None for item in items], pa.bool_()),
                    "flags": pa.array([item.flags if item else 0 for item in items], pa.int64()),
                    "expiry": pa.array([item.expiry if item else 0 for item in items], pa.int64()),
                }
                yield pa.StructArray.from_arrays(list(fields.values()), list(fields))
        finally:
            client.close()

    return lookup
