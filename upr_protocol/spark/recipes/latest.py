"""The newest row of each key."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from upr_protocol.spark.errors import OptionError

_NEEDED: Final = ("key", "seq", "deleted")
_BUCKET: Final = "bucket"
_OF_MARKERS: Final = ("op", "partition", "history_id")


def latest(changes: DataFrame, order: str | None = None) -> DataFrame:
    """What a bucket holds, of changes that were read from it: the newest row of each key, without
    the deleted ones.

    A stream with `onRollback=marker` or `rewind` has rows that say that a partition went back: what
    was before one of them, and has a higher number, is dropped. Rows of a table have no order, so
    it has to be known which were before:

    - Of a read, or of one batch of a stream, nothing has to be said: a marker stands before all
      rows of its partition.
    - Of several batches that were kept in a table, `order` names a column that rises from one batch
      to the next, as `foreachBatch`'s batch ID does.

    Markers are looked for first, which reads `changes` twice. A plain read has none: leave out the
    column op there.

    Args:
        changes: Rows with columns key, seq and deleted at least; where there may be markers, also
            op, partition and history_id; of several buckets, also bucket. More columns are kept
            as they are.
        order: The column that rises from one batch to the next; None if there is one batch.

    Returns:
        The same columns.

    Raises:
        OptionError: A column is missing. A marker among rows of more than one history fails the
            query when `order` is None: they are more than one batch.
    """
    for name in (*_NEEDED, *([] if order is None else [order])):
        if name not in changes.columns:
            raise OptionError(f"there is no column {name}, and the newest of each key needs it")
    rows = changes
    if set(_OF_MARKERS) <= set(changes.columns):
        rows = _after_markers(changes, order)
    elif "op" in changes.columns:
        rows = changes.where(F.col("op") != "rollback")
    columns = [_column(name) for name in changes.columns]
    newest = rows.groupBy(*_of_bucket(changes), "key").agg(
        F.max_by(F.struct(*columns), F.struct(*_order(order), "seq")).alias("newest")
    )
    return newest.select("newest.*").where(~F.col("deleted"))


def _after_markers(changes: DataFrame, order: str | None) -> DataFrame:
    """The rows that no marker drops, without the markers."""
    is_marker = F.col("op") == "rollback"
    place = F.lit(0) if order is None else _column(order)
    partition_columns = [*_of_bucket(changes), "partition"]
    markers = (
        changes.where(is_marker)
        .groupBy(*(F.col(name).alias(f"_{name}") for name in partition_columns))
        .agg(
            F.collect_list(F.struct(place.alias("place"), "seq")).alias("_markers"),
            F.max("history_id").alias("_history"),
        )
    )
    rows = changes.where(~is_marker).join(
        F.broadcast(markers),
        [F.col(name) == F.col(f"_{name}") for name in partition_columns],
        "left",
    )
    if order is None:
        is_mixed = (F.size("_markers") > 1) | (F.col("_history") != F.col("history_id"))
        sentence = (
            "[UPR_OPTION] there are changes of several batches, with a rollback among them: name "
            "the column that says in which order the batches came"
        )
        rows = rows.where(
            F.when(is_mixed, F.raise_error(sentence).cast("boolean")).otherwise(F.lit(True))
        )
    else:
        is_void = F.exists(
            "_markers",
            lambda marker: (marker["place"] > place) & (marker["seq"] < F.col("seq")),
        )
        rows = rows.where(F.col("_markers").isNull() | ~is_void)
    return rows.drop(*(f"_{name}" for name in partition_columns), "_markers", "_history")


def _of_bucket(changes: DataFrame) -> list[str]:
    return [_BUCKET] if _BUCKET in changes.columns else []


def _order(order: str | None) -> list[Column]:
    return [] if order is None else [_column(order)]


def _column(name: str) -> Column:
    """The column of this name, whatever is in that: Spark takes a dot for a field of a struct."""
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")
