"""What recipes that run a query have in common."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from upr_protocol.spark.driver_connection import check_bucket
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.options import SourceOptions, connection_options
from upr_protocol.spark.read_options import ReadOptions

_OWN_OPTIONS: Final = frozenset(
    {"url", "operation", "operationcolumn", "keycolumn", "valuecolumn"}
    | {"flagscolumn", "expirycolumn", "cascolumn"}
)
"""Options of the write that say what the columns of a recipe's rows are, in lower case."""


def check_own_options(options: Mapping[str, str], own_options: Container[str]) -> None:
    """Makes sure that a caller gives no option that a recipe sets by itself.

    Args:
        options: What the caller gives.
        own_options: The names of the options that the recipe sets, in lower case.

    Raises:
        OptionError: One of them is given.
    """
    for name in options:
        if name.lower() in own_options:
            raise OptionError(f"the option {name} is not for you to give: this recipe sets it")


def check_triggers(*, available_now: bool, interval: str | None) -> None:
    """Makes sure that a query has one trigger at most.

    Raises:
        OptionError: Both are given.
    """
    if available_now and interval is not None:
        raise OptionError("available_now and interval exclude each other")


def check_query_arguments(
    options: Mapping[str, str] | None, *, available_now: bool, interval: str | None
) -> None:
    """Makes sure that a query into a target can be started.

    Raises:
        OptionError: Both triggers are given, or `onRollback`.
    """
    check_triggers(available_now=available_now, interval=interval)
    if "onrollback" in map(str.lower, options or {}):
        raise OptionError(
            "the option onRollback is not for this recipe: the target cannot undo changes that the "
            "source lost"
        )


def check_source_options(url: str, options: Mapping[str, str] | None) -> ReadOptions:
    """Makes sure, before a query begins, that the options of its stream are right. Spark would tell
    of a wrong one when the query has begun, with pages of Java.

    Args:
        url: The bucket that is read.
        options: More options of the stream.

    Returns:
        The options.

    Raises:
        OptionError: One is wrong, or is `valueSchema`.
    """
    read_options = ReadOptions.parse({**(options or {}), "url": url}, streaming=True)
    if read_options.value_schema:
        raise OptionError(
            "the option valueSchema is not for this recipe: leave it out. A recipe that computes "
            "values has an argument for their schema"
        )
    return read_options


def check_write_options(options: Mapping[str, str] | None) -> None:
    """Makes sure that a caller does not say what the columns of a recipe's rows are, and does not
    name its writes. It has several, and a second one of the same name is refused if its rows are
    others.

    Raises:
        OptionError: Such an option is given.
    """
    check_own_options(options or {}, _OWN_OPTIONS)
    if "writeid" in map(str.lower, options or {}):
        raise OptionError(
            "the option writeId is not for this recipe, which writes more than once: leave it out. "
            "Rows that this recipe writes again have no second effect without it, too"
        )


def check_bucket_of(url: str, options: Mapping[str, str] | None) -> None:
    """Makes sure, before a query begins, that a server is there and has the bucket: a query that
    ends with an error fills Spark's log with it.

    Args:
        url: The bucket, as `upr://host:port/bucket`.
        options: Options of the read or write, of which those count that say how to connect.

    Raises:
        OptionError: One of them is wrong.
        PipelineError: There is no server, or it refuses.
    """
    connection = SourceOptions({**connection_options(options or {}), "url": url})
    check_bucket(connection.address(), connection.timeout_s())


def start_query(
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
