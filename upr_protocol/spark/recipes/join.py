"""Two buckets joined into a third: each item of the left one with the item of the right one that it
names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BooleanType, DataType, LongType, StructField, StructType

from upr_protocol.client.options import new_lease_id
from upr_protocol.limits import KEY_BYTES_MAX
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.item_lookup import ItemLookup
from upr_protocol.spark.json_values import ValueParser
from upr_protocol.spark.leased_source import LeasedDataSource, leased_options
from upr_protocol.spark.options import connection_options
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.latest import latest
from upr_protocol.spark.recipes.lookup_history import LookupHistory
from upr_protocol.spark.recipes.reprocess import TEXT_SCHEMA
from upr_protocol.spark.recipes.target import (
    check_bucket_of,
    check_query_arguments,
    check_source_options,
    check_write_options,
    start_query,
    write_target,
)
from upr_protocol.spark.record_batches import column_as
from upr_protocol.spark.schema import check_schema
from upr_protocol.spark.source import UprDataSource

INNER: Final = "inner"
LEFT: Final = "left"

_CAN_BE_KEY: Final = f"octet_length(key) BETWEEN 1 AND {KEY_BYTES_MAX}"
"""Whether a key can be that of an item. A key for which this is false or null is not looked up at a
server."""

BOTH_VALUES: Final = "named_struct('left', left_value, 'right', right_value)"
"""What the target has unless an expression says otherwise."""

_OF_SOME_KEYS: Final = frozenset({"key", "keyprefix", "partitions"})


def join(
    spark: SparkSession,
    left_url: str,
    right_url: str,
    target_url: str,
    checkpoint: str,
    *,
    on: str = "key",
    value: str = BOTH_VALUES,
    how: str = INNER,
    left_schema: str = TEXT_SCHEMA,
    right_schema: str = TEXT_SCHEMA,
    available_now: bool = False,
    interval: str | None = None,
    options: Mapping[str, str] | None = None,
    write_options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Starts a query that has a bucket hold the join of two others: the items of the left bucket,
    under their keys, each with the item of the right bucket whose key `on` computes from it.

    The two streams only tell which keys changed; their items are read when a batch begins. So a
    batch that runs again has no second effect, and the target has what both buckets hold once it
    has caught up. When an item of the right bucket changes, the items of the left bucket are read
    to find those that name it. So the right bucket is the one that changes less.

    Args:
        spark: A session.
        left_url: The bucket whose items the target has, as `upr://host:port/bucket`.
        right_url: The bucket whose items are added to them.
        target_url: The bucket that is written. It exists, and nothing else writes to it.
        checkpoint: The folder where the query keeps how far it is; its own.
        on: An SQL expression over `key` and `value` of an item of the left bucket: the key of the
            item of the right bucket. It is cast to the type of that key.
        value: An SQL expression over `key`, `left_value`, `right_key` and `right_value`. A struct
            is written as a JSON object. `right_key` is what `on` gives, also without a partner.
        how: `inner`: the target has the items that have a partner. `left`: it has all, those
            without one with a `right_value` of null.
        left_schema: How key and value of the left bucket are read, as the `schema` of a read.
        right_schema: How key and value of the right bucket are read. Both keys have the same type.
        available_now: Whether the query ends when the target has all that there is now.
        interval: How often a batch begins, as `10 seconds`; None for as soon as one is done.
        options: More options of the streams.
        write_options: More options of the write, as `durability`.

    Returns:
        The query, which runs. It fails with `UPR_ROLLBACK` when a bucket lost changes that were
        joined: then begin again with an empty target.

    Raises:
        OptionError: `how` is another word, both triggers are given, or an option is not for it.
        PipelineError: An option is wrong.
    """
    if how not in (INNER, LEFT):
        raise OptionError(f"how is {how!r}, and not one of {INNER}, {LEFT}")
    check_query_arguments(options, available_now=available_now, interval=interval)
    check_write_options(write_options)
    _check_stream_options(options or {})
    for url in (left_url, right_url):
        check_source_options(url, options)
    spark.dataSource.register(UprDataSource)
    spark.dataSource.register(LeasedDataSource)
    stream_options = dict(options or {})
    with plain_errors():
        left = _Side(spark, left_url, left_schema, stream_options)
        right = _Side(spark, right_url, right_schema, stream_options)
        # A number names the key that is its text.
        partner_key = F.expr(on).cast(right.key_type)
        # So a wrong expression is an error before the query begins.
        joined = _join_items(left.empty(), right.empty(), partner_key)
        joined.select(F.expr(value))
    changes = left.changes().withColumn("is_left", F.lit(True))
    changes = changes.union(right.changes().withColumn("is_left", F.lit(False)))

    def write(batch: DataFrame, _batch_id: int) -> None:
        changed = batch.select("is_left", "key").distinct().persist()
        try:
            while not write_once(changed):
                pass
        finally:
            changed.unpersist()
            left.release_items()

    def write_once(changed: DataFrame) -> bool:
        """Looks the items up and writes them; False when they have to be looked up again."""
        left.history.begin_lookup()
        right.history.begin_lookup()
        keys = changed.where("is_left").select("key")
        if not changed.where("NOT is_left").isEmpty():
            renewed_keys = changed.where("NOT is_left").select(F.col("key").alias("renewed_key"))
            naming_items = left.all_items().withColumn("renewed_key", partner_key)
            naming_items = naming_items.join(renewed_keys, "renewed_key", "leftsemi")
            keys = keys.union(naming_items.select("key")).distinct()
        items = left.items(keys).persist()
        try:
            partners = items.where("is_there").select(partner_key.alias("key")).distinct()
            partners = right.items(partners.where(_CAN_BE_KEY))
            rows = _join_items(items, partners, partner_key).persist()
            try:
                rows.count()
                # What was read may be in memory alone: nothing is written that a crash undoes.
                if not (left.history.finish_lookup() and right.history.finish_lookup()):
                    return False
                write_target(_as_operations(rows, value, how), target_url, write_options)
                return True
            finally:
                rows.unpersist()
        finally:
            items.unpersist()

    with plain_errors():
        for url in (left_url, right_url):
            check_bucket_of(url, options)
        check_bucket_of(target_url, write_options)
        writer = changes.writeStream.foreachBatch(write)
        return start_query(writer, checkpoint, available_now=available_now, interval=interval)


def _check_stream_options(options: Mapping[str, str]) -> None:
    """Makes sure that the streams tell of every key that changes: the keys of partners are others
    than those of the items that name them."""
    for name in options:
        if name.lower() in _OF_SOME_KEYS:
            raise OptionError(
                f"the option {name} is not for a join: its streams would not tell of partners with "
                "other keys that change, and the target would keep their old values. Leave it out; "
                "to join some of the items, put them into a bucket of their own first (reprocess)"
            )


def _join_items(left: DataFrame, right: DataFrame, partner_key: Column) -> DataFrame:
    """The items of the left bucket with their partners. Those that are gone are among them."""
    of_right = right.select(
        F.col("key").alias("_key"),
        F.col("value").alias("right_value"),
        F.col("is_there").alias("has_partner"),
    )
    of_left = left.withColumn("right_key", partner_key)
    rows = of_left.join(of_right, F.col("right_key") == F.col("_key"), "left")
    return rows.drop("_key").withColumnRenamed("value", "left_value")


def _as_operations(rows: DataFrame, value: str, how: str) -> DataFrame:
    has_row = F.col("is_there")
    if how == INNER:
        has_row &= F.coalesce(F.col("has_partner"), F.lit(False))
    return rows.select(
        F.when(has_row, "upsert").otherwise("delete").alias("op"),
        "key",
        F.when(has_row, F.expr(value)).alias("value"),
        "flags",
        "expiry",
    )


class _Side:
    """One of the two buckets: its stream, and its items.

    Args:
        spark: The session.
        url: The bucket.
        schema: How key and value are read.
        options: More options of its stream.

    Attributes:
        history: Whether it still has what was looked up.
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
        """The items at keys, as they are now; `is_there` says which there are."""
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
