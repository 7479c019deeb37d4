"""What recipes that write a bucket have in common."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from upr_protocol.spark.errors import OptionError


def check_query_arguments(
    options: Mapping[str, str] | None, *, available_now: bool, interval: str | None
) -> None:
    """Makes sure that a query into a target can be started.

    Raises:
        OptionError: Both triggers are given, or `onRollback`.
    """
    if available_now and interval is not None:
        raise OptionError("available_now and interval exclude each other")
    if "onrollback" in map(str.lower, options or {}):
        raise OptionError(
            "the option onRollback is not for this recipe: the target cannot undo changes that the "
            "source lost"
        )


def started(
    writer: DataStreamWriter, checkpoint: str, *, available_now: bool, interval: str | None
) -> StreamingQuery:
    """Starts a query: once for what there is, at an interval, or as soon as a batch is done."""
    writer = writer.option("checkpointLocation", checkpoint)
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif interval is not None:
        writer = writer.trigger(processingTime=interval)
    return writer.start()


def write_target(rows: DataFrame, url: str, options: Mapping[str, str] | None) -> None:
    """Writes rows with the columns `op` (upsert or delete), `key`, `value`, `flags` and `expiry`.
    To write them again has no second effect."""
    writer = rows.write.format("upr").mode("append").options(**(options or {}))
    writer = writer.option("url", url).option("operation", "apply")
    writer.option("flagsColumn", "flags").option("expiryColumn", "expiry").save()
