"""Two buckets joined into a third: each item of the left one with the item of the right one that it
names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from upr_protocol.limits import KEY_BYTES_MAX
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.leased_source import LeasedDataSource
from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.join_side import JoinSide
from upr_protocol.spark.recipes.reprocess import TEXT_SCHEMA
from upr_protocol.spark.recipes.target import (
    check_bucket_of,
    check_query_arguments,
    check_source_options,
    check_write_options,
    start_query,
    write_target,
)
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
        left = JoinSide(spark, left_url, left_schema, stream_options)
        right = JoinSide(spark, right_url, right_schema, stream_options)
        # A number names the key that is its text.
        partner_key = F.expr(on).cast(right.key_type)
        # So a wrong expression is an error before the query begins.
        joined = _join_items(left.empty(), right.empty(), partner_key)
        joined.select(F.expr(value))
    changes = left.changes().withColumn("is_left", F.lit(True))
    changes = changes.union(right.changes().withColumn("is_left", F.lit(False)))

    def write(rows: DataFrame) -> None:
        write_target(_as_operations(rows, value, how), target_url, write_options)

    with plain_errors():
        for url in (left_url, right_url):
            check_bucket_of(url, options)
        check_bucket_of(target_url, write_options)
        sink = _JoinSink(left, right, partner_key, write)
        writer = changes.writeStream.foreachBatch(sink.write_batch)
        return start_query(writer, checkpoint, available_now=available_now, interval=interval)


class _JoinSink:
    """Writes the joined items that a batch of changed keys concerns.

    Args:
        left: The bucket whose items the target has.
        right: The bucket whose items are added to them.
        partner_key: Of an item of the left bucket, the key of its partner.
        write: Writes joined items, as `_join_items` gives them.
    """

    def __init__(
        self,
        left: JoinSide,
        right: JoinSide,
        partner_key: Column,
        write: Callable[[DataFrame], None],
    ) -> None:
        self._left = left
        self._right = right
        self._partner_key = partner_key
        self._write = write

    def write_batch(self, batch: DataFrame, _batch_id: int) -> None:
        """Writes what concerns the keys of a batch, which has the columns `is_left` and `key`."""
        changed = batch.select("is_left", "key").distinct()
        with _keep_computed(changed):
            try:
                while not self._write_once(changed):
                    pass
            finally:
                self._left.release_items()

    def _write_once(self, changed: DataFrame) -> bool:
        """Looks the items up and writes them; False when they have to be looked up again."""
        left, right = self._left, self._right
        left.history.begin_lookup()
        right.history.begin_lookup()
        items = left.items(self._keys_to_write(changed))
        with _keep_computed(items):
            partners = items.where("is_there").select(self._partner_key.alias("key")).distinct()
            partners = right.items(partners.where(_CAN_BE_KEY))
            rows = _join_items(items, partners, self._partner_key)
            with _keep_computed(rows):
                rows.count()
                # What was read may be in memory alone: nothing is written that a crash undoes.
                if not (left.history.finish_lookup() and right.history.finish_lookup()):
                    return False
                self._write(rows)
                return True

    def _keys_to_write(self, changed: DataFrame) -> DataFrame:
        """The keys of the left items that have changed, or name a right item that has."""
        keys = changed.where("is_left").select("key")
        if changed.where("NOT is_left").isEmpty():
            return keys
        renewed_keys = changed.where("NOT is_left").select(F.col("key").alias("renewed_key"))
        naming_items = self._left.all_items().withColumn("renewed_key", self._partner_key)
        naming_items = naming_items.join(renewed_keys, "renewed_key", "leftsemi")
        return keys.union(naming_items.select("key")).distinct()


@contextmanager
def _keep_computed(rows: DataFrame) -> Iterator[None]:
    """Has Spark keep `rows`, once they are computed, for as long as the context."""
    rows.persist()
    try:
        yield
    finally:
        rows.unpersist()


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
