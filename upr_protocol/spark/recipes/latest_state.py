"""A Delta table that holds what a bucket holds, kept by a stream, without Delta's jars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType
from pyspark.sql.utils import is_remote

from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.recipes.rewound_rows import reached_metadata, rewound_rows
from upr_protocol.spark.recipes.target import (
    check_bucket_of,
    check_source_options,
    check_triggers,
    start_query,
)
from upr_protocol.spark.source import UprDataSource

ProgressCallback = Callable[[str], None]
"""Called with a sentence each time that a recipe has got further."""

LATEST_STATE_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("history_id", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("cas", pa.int64(), nullable=False),
        pa.field("flags", pa.int64(), nullable=False),
        pa.field("expiry", pa.int64(), nullable=False),
    ]
)
"""The columns of the table."""

MERGE_BYTES_DEFAULT: Final = 256 * 1024 * 1024
"""A batch is held whole by the driver, twice for a moment."""

_NO_QUERY_ID: Final = (
    "Spark Connect does not tell which query a batch belongs to: pass app_id (--app-id), another "
    "one for each checkpoint, or run this with spark-submit"
)

_QUERY_ID: Final = "sql.streaming.queryId"


def ignore_progress(sentence: str) -> None:
    """Does nothing: the default callback of a recipe."""
    del sentence


class LatestState:
    """Takes the batches of a stream: `writeStream.foreachBatch(LatestState("/a/table"))`.

    Each batch becomes one commit of the table: the newest row of each key is put in its place,
    deleted keys vanish. Of a partition that went back, every row above the marker's number vanishes
    that the batch does not have anew, and the rows that the table had at that number come back from
    its earlier versions (`onRollback=rewind`; with `marker` that number is 0). When a limit on the
    size of batches cuts what follows the marker, the table lacks rows of that partition until a
    batch has reached the number the marker came from (its `snapshot_end`); the same is true of the
    first batches of a query.

    The commit says which batch of which query it is, so that a batch that is run again changes
    nothing. Batches of one query only: a table that has rows of another is refused.

    Args:
        table: The table's path, or a URL that `deltalake` knows; made with the first batch.
        app_id: What stands for the query in the commits; None for its ID, which is part of its
            checkpoint. With a new checkpoint give another one, because batches are numbered from 0
            again.
        begin_anew: Whether the first batch of a query that the table does not know drops all rows
            that are there. If not, it is refused when there are any.
        storage_options: For a table that is not on a disk, the options that `deltalake` takes.
        on_progress: Called with a sentence on each batch.

    Raises:
        PipelineError: `deltalake` is not installed.
    """

    def __init__(
        self,
        table: str,
        app_id: str | None = None,
        *,
        begin_anew: bool = False,
        storage_options: Mapping[str, str] | None = None,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        self._table = table
        self._app_id = app_id
        self._begin_anew = begin_anew
        self._storage_options = dict(storage_options or {})
        self._on_progress = on_progress
        _deltalake()

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Puts one batch into the table; nothing when it is there already.

        Args:
            batch: Changes that were read from one bucket, with all columns but perhaps the
                snapshots'.
            batch_id: Its number in its query.

        Raises:
            OptionError: A column is missing, or there is the column bucket.
            PipelineError: The table has rows of another query.
        """
        app_id = self._app_id or _query_id(batch)
        table = self._open()
        last_batch_id = None if table is None else table.transaction_version(app_id)
        if last_batch_id is not None and last_batch_id >= batch_id:
            self._on_progress(f"batch {batch_id} is in the table already")
            return
        is_first = table is not None and last_batch_id is None
        if is_first and not self._begin_anew and table.count():
            raise PipelineError(
                "UPR_TABLE",
                f"{self._table} has rows of another query, or the query has a new checkpoint: "
                "take another table, or have this one begun anew (begin_anew)",
            )
        rows, rewound_to, reached_seqs = newest_of_batch(batch)
        properties = _properties(app_id, batch_id, reached_seqs, is_anew=is_first)
        if table is None:
            self._make(rows, properties)
        else:
            self._merge(table, rows, None if is_first else rewound_to, properties)
        rollback_text = f", after {len(rewound_to)} partitions went back" if rewound_to else ""
        self._on_progress(f"batch {batch_id}: {rows.num_rows} keys changed{rollback_text}")

    def _open_version(self, version: int) -> Any:
        return _deltalake().DeltaTable(
            self._table, version=version, storage_options=self._storage_options
        )

    def _open(self) -> Any:
        delta = _deltalake()
        if not delta.DeltaTable.is_deltatable(self._table, self._storage_options):
            return None
        return delta.DeltaTable(self._table, storage_options=self._storage_options)

    def _make(self, rows: pa.Table, properties: Any) -> None:
        live_rows = (
            rows.filter(pc.invert(rows["deleted"]))
            .select(LATEST_STATE_SCHEMA.names)
            .cast(LATEST_STATE_SCHEMA)
        )
        _deltalake().write_deltalake(
            self._table,
            live_rows,
            mode="error",
            storage_options=self._storage_options,
            commit_properties=properties,
        )

    def _merge(
        self, table: Any, rows: pa.Table, rewound_to: Mapping[int, int] | None, properties: Any
    ) -> None:
        """One commit.

        Args:
            table: The table.
            rows: The newest row of each key, live or deleted.
            rewound_to: By partition the number to which it went back: its rows above that are void.
                None when no row of the table is left.
            properties: What the commit says.

        Raises:
            PipelineError: The table does not have the version to which partitions went back.
        """
        if rewound_to:
            earlier_rows = rewound_rows(table, self._open_version, rewound_to)
            earlier_rows = earlier_rows.filter(
                pc.invert(pc.is_in(earlier_rows["key"], value_set=rows["key"]))
            )
            earlier_rows = earlier_rows.append_column(
                "deleted", pa.nulls(len(earlier_rows), pa.bool_()).fill_null(False)
            )
            rows = pa.concat_tables(
                [rows, earlier_rows.select(rows.column_names).cast(rows.schema)]
            )
        version_before = table.version()
        columns = {name: f"s.{name}" for name in LATEST_STATE_SCHEMA.names}
        merge = (
            table.merge(
                rows,
                "t.key = s.key",
                source_alias="s",
                target_alias="t",
                commit_properties=properties,
            )
            .when_matched_delete("s.deleted")
            .when_matched_update(columns)
            .when_not_matched_insert(columns, "NOT s.deleted")
        )
        if rewound_to is None:
            merge = merge.when_not_matched_by_source_delete()
        elif rewound_to:
            is_void = " OR ".join(
                f"t.partition = {partition} AND t.seq > {seq}"
                for partition, seq in rewound_to.items()
            )
            merge = merge.when_not_matched_by_source_delete(is_void)
        merge.execute()
        if self._open().version() == version_before:
            # Nothing was to be changed. That the batch is done is to be known all the same.
            table.create_write_transaction(
                [], "append", table.schema(), commit_properties=properties
            )


def newest_of_batch(batch: DataFrame) -> tuple[pa.Table, dict[int, int], dict[int, int]]:
    """What one batch of a stream comes to. The batch is read once.

    In a batch, what there is of a partition is all of one branch of its history: a marker stands
    before its first row. So the highest number of a key is its newest.

    Args:
        batch: Changes that were read from a bucket.

    Returns:
        The newest row of each key, with the table's columns and `deleted`; by partition the number
        to which it went back; and by partition the number to which it came.

    Raises:
        OptionError: A column is missing, or values are structs; or there are several buckets, as
            the column bucket says.
    """
    if "bucket" in batch.columns:
        # Items of two buckets with one key would be one row, and a marker would drop rows of both.
        raise OptionError(
            "there is a column bucket, and the table has none: stream each bucket into a table of "
            "its own, without that column"
        )
    columns = [*LATEST_STATE_SCHEMA.names, "deleted", "op"]
    for name in columns:
        if name not in batch.columns:
            raise OptionError(f"the column {name} is missing: stream with metadata and values")
    value_type = batch.schema["value"].dataType
    if isinstance(value_type, StructType):
        raise OptionError(
            f"the column value is {value_type.simpleString()}, and the table has values as they "
            "are: stream without valueSchema, and parse them where the table is read"
        )
    marker_of = F.when(F.col("op") == "rollback", F.col("partition"))
    newest = batch.groupBy("key", marker_of.alias("marker")).agg(
        F.max_by(F.struct(*columns), "seq").alias("newest")
    )
    rows_and_markers = newest.select("newest.*").toArrow()
    is_marker = pc.equal(rows_and_markers["op"], "rollback")
    rewound_to = _highest(rows_and_markers.filter(is_marker))
    rows = rows_and_markers.filter(pc.invert(is_marker)).select(
        [*LATEST_STATE_SCHEMA.names, "deleted"]
    )
    reached_seqs = _highest(rows_and_markers)
    # A deletion has no value, and is never put in.
    nullable = [field.with_nullable(field.name == "value") for field in LATEST_STATE_SCHEMA]
    return (
        rows.cast(pa.schema([*nullable, pa.field("deleted", pa.bool_())])),
        rewound_to,
        reached_seqs,
    )


def _highest(rows: pa.Table) -> dict[int, int]:
    """The highest number of each partition."""
    highest = rows.group_by("partition").aggregate([("seq", "max")])
    return dict(zip(highest["partition"].to_pylist(), highest["seq_max"].to_pylist(), strict=True))


def keep_latest_state(
    spark: SparkSession,
    url: str,
    table: str,
    checkpoint: str,
    *,
    available_now: bool = False,
    interval: str | None = None,
    options: Mapping[str, str] | None = None,
    app_id: str | None = None,
    begin_anew: bool = False,
    storage_options: Mapping[str, str] | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> StreamingQuery:
    """Starts a query that has a Delta table hold what a bucket holds.

    Args:
        spark: A session.
        url: `upr://host:port/bucket`.
        table: The table's path, or a URL that `deltalake` knows.
        checkpoint: The folder where the query keeps how far it is; its own.
        available_now: Whether it ends when the table has all that there is now.
        interval: How often a batch begins, as `10 seconds`; None for as soon as one is done.
        options: More options of a stream, or others in place of the defaults here:
            `onRollback=rewind` (or `marker`, if `stability` or `failOnDataLoss` rule that out) and
            `maxBytesPerTrigger`.
        app_id: What stands for the query in the table's commits; None for its ID. Over Spark
            Connect it must be given.
        begin_anew: Whether the first batch of a query that the table does not know drops all rows
            that are there. Otherwise it is refused when there are any.
        storage_options: For a table that is not on a disk, the options that `deltalake` takes.
        on_progress: Called with a sentence on each batch.

    Returns:
        The query, which runs: `awaitTermination()` waits for its end.

    Raises:
        OptionError: Both triggers are given; or there is no `app_id` over Spark Connect; or an
            option is wrong.
        PipelineError: `deltalake` is not installed, or the bucket cannot be reached.
    """
    check_triggers(available_now=available_now, interval=interval)
    if app_id is None and is_remote():
        raise OptionError(_NO_QUERY_ID)
    sink = LatestState(
        table,
        app_id,
        begin_anew=begin_anew,
        storage_options=storage_options,
        on_progress=on_progress,
    )
    settings = _with_defaults(options or {})
    _check_columns(check_source_options(url, settings))
    spark.dataSource.register(UprDataSource)
    changes = spark.readStream.format("upr").options(**settings).option("url", url).load()
    check_bucket_of(url, settings)
    writer = changes.writeStream.foreachBatch(sink)
    return start_query(writer, checkpoint, available_now=available_now, interval=interval)


def _with_defaults(options: Mapping[str, str]) -> dict[str, str]:
    """The options of the stream, their names in lower case."""
    settings = {name.lower(): value for name, value in options.items()}
    lacks_nothing = (
        settings.get("stability", "durable").lower() == "durable"
        and settings.get("failondataloss", "true").lower() == "true"
    )
    settings.setdefault("onrollback", "rewind" if lacks_nothing else "marker")
    if "maxoffsetspertrigger" not in settings and settings.get("stability", "").lower() != "any":
        settings.setdefault("maxbytespertrigger", str(MERGE_BYTES_DEFAULT))
    return settings


def _check_columns(options: ReadOptions) -> None:
    """Makes sure that a stream has all columns of the table. Raises `OptionError`."""
    for name, has_columns in (
        ("metadata", options.metadata),
        ("includeValue", options.include_value),
    ):
        if not has_columns:
            raise OptionError(
                f"the table needs columns that the stream lacks. Leave out {name}=false"
            )


def _query_id(batch: DataFrame) -> str:
    try:
        query_id = batch.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
    except PySparkException as error:
        raise OptionError(_NO_QUERY_ID) from error
    if not query_id:
        raise OptionError("no streaming query has an ID to take: pass app_id")
    return f"upr:{query_id}"


def _properties(
    app_id: str, batch_id: int, reached_seqs: Mapping[int, int], *, is_anew: bool
) -> Any:
    delta = _deltalake()
    return delta.CommitProperties(
        custom_metadata=reached_metadata(reached_seqs, is_anew=is_anew),
        app_transactions=[delta.Transaction(app_id, batch_id)],
    )


def _deltalake() -> ModuleType:
    try:
        import deltalake
    except ImportError as error:
        raise PipelineError(
            "UPR_DEPENDENCY", "the package deltalake is missing: pip install 'upr-server[delta]'"
        ) from error
    return deltalake
