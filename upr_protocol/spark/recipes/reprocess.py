"""One bucket made of another: a stream that selects, computes and writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.target import (
    check_bucket_of,
    check_query_arguments,
    check_source_options,
    check_write_options,
    start_query,
    write_target,
)
from upr_protocol.spark.source import UprDataSource

TEXT_SCHEMA: Final = "key STRING, value STRING"
"""How keys and values are read unless a schema says otherwise."""

_METADATA: Final = "seq LONG, deleted BOOLEAN, flags LONG, expiry LONG"


def reprocess(
    spark: SparkSession,
    url: str,
    target_url: str,
    checkpoint: str,
    *,
    key: str = "key",
    value: str = "value",
    where: str = "true",
    schema: str = TEXT_SCHEMA,
    available_now: bool = False,
    interval: str | None = None,
    options: Mapping[str, str] | None = None,
    write_options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Starts a query that has one bucket hold what is computed from the items of another.

    An item that is deleted, or no longer passes `where`, is deleted in the target too. Flags and
    expiry times are kept. A batch that runs again has no second effect.

    Args:
        spark: A session.
        url: The bucket that is read, as `upr://host:port/bucket`.
        target_url: The bucket that is written. It exists, and nothing else writes to it.
        checkpoint: The folder where the query keeps how far it is; its own.
        key: An SQL expression of an item's key in the target. It may use `key` only, as a deletion
            has no value; and different keys must stay different.
        value: An SQL expression of an item's value. A struct is written as a JSON object.
        where: An SQL expression: which items the target has.
        schema: How `key` and `value` are read, as the option `schema` of a read.
        available_now: Whether the query ends when the target has all that there is now.
        interval: How often a batch begins, as `10 seconds`; None for as soon as one is done.
        options: More options of the stream.
        write_options: More options of the write, as `durability`.

    Returns:
        The query, which runs: `awaitTermination()` waits for its end. It fails with `UPR_ROLLBACK`
        when the source lost changes that were written: then begin anew with an empty target.

    Raises:
        OptionError: Both triggers are given, or `onRollback` or `writeId`; or an option is wrong.
        PipelineError: A bucket cannot be reached.
    """
    check_query_arguments(options, available_now=available_now, interval=interval)
    check_write_options(write_options)
    check_source_options(url, options)
    spark.dataSource.register(UprDataSource)
    changes = (
        spark.readStream.format("upr")
        .options(**(options or {}))
        .option("url", url)
        .schema(f"{schema}, {_METADATA}")
        .load()
    )

    def write(batch: DataFrame, _batch_id: int) -> None:
        write_target(_as_operations(batch, key, value, where), target_url, write_options)

    with plain_errors():
        # So a wrong expression is an error before the query begins; and so is an expression of a
        # key that uses more than the key: a deletion has nothing else.
        changes.select("key").select(F.expr(key))
        changes.select(F.expr(value), F.expr(where).cast("boolean"))
        check_bucket_of(url, options)
        check_bucket_of(target_url, write_options)
        writer = changes.writeStream.foreachBatch(write)
        return start_query(writer, checkpoint, available_now=available_now, interval=interval)


def _as_operations(changes: DataFrame, key: str, value: str, where: str) -> DataFrame:
    """What the target is to take in of a batch of changes: an operation for each key."""
    # Several tasks may read one partition, and they write in no order: one row a key.
    newest = changes.groupBy("key").agg(
        F.max_by(F.struct("value", "deleted", "flags", "expiry"), "seq").alias("newest")
    )
    has_row = ~F.col("deleted") & F.coalesce(F.expr(where), F.lit(False))
    return newest.select("key", "newest.*").select(
        F.expr(key).alias("key"),
        F.when(has_row, F.expr(value)).alias("value"),
        "flags",
        "expiry",
        F.when(has_row, "upsert").otherwise("delete").alias("op"),
    )
