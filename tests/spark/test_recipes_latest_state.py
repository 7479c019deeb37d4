"""A Delta table that holds what a bucket holds, compared with the server key by key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from tests.spark.bucket import (
    Contents,
    change,
    contents,
    contents_of_frame,
    contents_of_rows,
    drop,
    made_anew,
    put,
)
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.recipes import LatestState, keep_latest_state, latest
from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.recipes.latest_state import newest_of_batch
from upr_protocol.spark.schema import READ_COLUMNS

NewBucket = Callable[..., str]


class Kept:
    """A table, its checkpoint, and what was told."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self._spark = spark
        self.url = url
        self.table = str(folder / "table")
        self.checkpoint = folder / "checkpoint"
        self.sentences: list[str] = []

    def run(self, *, begin_anew: bool = False, **options: object) -> None:
        """Has the table catch up, with a query of its own."""
        query = keep_latest_state(
            self._spark,
            self.url,
            self.table,
            str(self.checkpoint),
            available_now=True,
            begin_anew=begin_anew,
            options={name: str(value) for name, value in options.items()},
            on_progress=self.sentences.append,
        )
        with plain_errors():
            query.awaitTermination()

    @property
    def version(self) -> int:
        return DeltaTable(self.table).version()

    @property
    def contents(self) -> Contents:
        return contents_of_rows(DeltaTable(self.table).to_pyarrow_table().to_pylist())

    def forget_last_commit(self) -> None:
        """Has the next query run the last batch again."""
        commits = self.checkpoint / "commits"
        last = max((path for path in commits.iterdir() if path.name.isdigit()), key=_number)
        last.unlink()
        (commits / f".{last.name}.crc").unlink(missing_ok=True)


def _number(path: Path) -> int:
    return int(path.name)


@pytest.fixture
def latest_table(spark: SparkSession, new_bucket: NewBucket, tmp_path: Path) -> Kept:
    return Kept(spark, new_bucket(), tmp_path)


def test_the_table_holds_what_the_bucket_holds(latest_table: Kept) -> None:
    change(latest_table.url, put(range(50)))
    change(latest_table.url, put(range(10), "newer"))
    change(latest_table.url, drop(range(40, 50)))
    latest_table.run()
    assert latest_table.contents == contents(latest_table.url)
    assert len(latest_table.contents) == 40
    assert latest_table.version == 0, "the first batch makes the table in one commit"

    # Overwritten, deleted, deleted and set again, new; and one that was never in the table.
    change(latest_table.url, put(range(5, 15), "newest"))
    change(latest_table.url, drop(range(10, 20)))
    change(latest_table.url, put([10, 60, 61, 62]))
    change(latest_table.url, drop([62]))
    latest_table.run()
    assert latest_table.contents == contents(latest_table.url)
    assert latest_table.version == 1

    # The last batch once more: its commit says that it is done.
    latest_table.forget_last_commit()
    latest_table.run()
    assert latest_table.version == 1
    assert latest_table.sentences[-1] == "batch 1 is in the table already"
    assert latest_table.contents == contents(latest_table.url)

    # A batch that changes nothing in the table is a commit all the same.
    change(latest_table.url, put([70]))
    change(latest_table.url, drop([70]))
    latest_table.run()
    assert latest_table.version == 2
    assert latest_table.contents == contents(latest_table.url)


def test_after_a_rollback_it_equals_the_server_again(latest_table: Kept) -> None:
    change(latest_table.url, put(range(40)))
    latest_table.run()
    made_anew(latest_table.url)
    change(latest_table.url, put(range(30, 60), "another"))
    change(latest_table.url, drop(range(50, 60)))
    latest_table.run()
    assert latest_table.contents == contents(latest_table.url)
    assert latest_table.version == 1, "what vanished and what is new are one commit"
    latest_table.forget_last_commit()
    latest_table.run()
    assert latest_table.version == 1
    # Fewer partitions: most keys are in another now, and some partitions are gone.
    made_anew(latest_table.url, 3)
    change(latest_table.url, put(range(25, 45), "yet another"))
    latest_table.run()
    assert latest_table.contents == contents(latest_table.url)
    assert latest_table.version == 2
    # An empty bucket leaves an empty table.
    made_anew(latest_table.url)
    latest_table.run()
    assert latest_table.contents == {}


def test_a_rollback_may_come_in_several_batches(latest_table: Kept) -> None:
    change(latest_table.url, put(range(40)))
    latest_table.run(maxOffsetsPerTrigger=15)
    assert latest_table.contents == contents(latest_table.url)
    assert latest_table.version == 2
    made_anew(latest_table.url)
    change(latest_table.url, put(range(20, 50), "another"))
    latest_table.run(maxOffsetsPerTrigger=15)
    assert latest_table.contents == contents(latest_table.url)
    assert latest_table.version == 4


def test_without_markers_a_rollback_fails_the_query(latest_table: Kept) -> None:
    change(latest_table.url, put(range(10)))
    latest_table.run()
    made_anew(latest_table.url)
    change(latest_table.url, put(range(5)))
    with pytest.raises(PipelineError, match="onRollback=marker") as caught:
        latest_table.run(onRollback="fail")
    assert caught.value.code == "UPR_ROLLBACK"
    assert len(latest_table.contents) == 10


def test_a_table_of_another_query_is_refused_or_begun_anew(latest_table: Kept) -> None:
    change(latest_table.url, put(range(10)))
    latest_table.run()
    change(latest_table.url, drop(range(5)))
    latest_table.checkpoint = latest_table.checkpoint.with_name("another")
    with pytest.raises(PipelineError, match="begin_anew") as caught:
        latest_table.run()
    assert caught.value.code == "UPR_TABLE"
    assert len(latest_table.contents) == 10
    latest_table.run(begin_anew=True)
    assert latest_table.contents == contents(latest_table.url)
    assert len(latest_table.contents) == 5


def test_wrong_options_of_a_latest_state_table_are_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (spark, "upr://host/bucket", str(tmp_path / "table"), str(tmp_path / "checkpoint"))
    with pytest.raises(OptionError, match="exclude each other"):
        keep_latest_state(*words, available_now=True, interval="1 second")
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(PipelineError, match=r"pip install 'upr-server\[delta\]'") as caught:
        keep_latest_state(*words, available_now=True)
    assert caught.value.code == "UPR_DEPENDENCY"


def changes_of(spark: SparkSession, url: str) -> DataFrame:
    return spark.read.format("upr").option("url", url).load()


def test_the_sink_does_a_batch_once(spark: SparkSession, latest_table: Kept) -> None:
    change(latest_table.url, put(range(10)))
    sink = LatestState(
        latest_table.table, "an application", on_progress=latest_table.sentences.append
    )
    sink(changes_of(spark, latest_table.url), 0)
    first = latest_table.contents
    assert first == contents(latest_table.url)
    change(latest_table.url, drop(range(10)))
    sink(changes_of(spark, latest_table.url), 0)
    assert latest_table.version == 0
    assert latest_table.contents == first
    sink(changes_of(spark, latest_table.url), 1)
    assert latest_table.version == 1
    assert latest_table.contents == {}
    with pytest.raises(OptionError, match="column op"):
        sink(changes_of(spark, latest_table.url).drop("op"), 2)
    with pytest.raises(OptionError, match="app_id"):
        LatestState(latest_table.table)(changes_of(spark, latest_table.url), 2)


# The newest row of each key.

CHANGES = (
    "batch int, op string, partition int, history_id string, seq long, key string, value string, "
    "deleted boolean"
)


def row(batch: int, partition: int, history: str, seq: int, key: str, value: str | None) -> Any:
    op = "delete" if value is None else "set"
    return (batch, op, partition, history, seq, key, value, value is None)


def marker(batch: int, partition: int, history: str, went_to: int = 0) -> Any:
    return (batch, "rollback", partition, history, went_to, "", None, False)


def newest(spark: SparkSession, rows: list[Any], order: str | None = None) -> dict[str, str]:
    rows_found = latest(spark.createDataFrame(rows, CHANGES), order).collect()
    return {row["key"]: row["value"] for row in rows_found}


def test_the_latest_of_what_was_read_is_what_there_is(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket()
    change(url, put(range(30)))
    change(url, put(range(10), "newer"))
    change(url, drop(range(5)))
    newest = latest(changes_of(spark, url))
    assert newest.columns == changes_of(spark, url).columns
    assert contents_of_frame(newest) == contents(url)
    few = spark.read.format("upr").option("url", url).option("metadata", "false").load()
    # A column of the caller's is kept, whatever its name is.
    few = few.withColumn("a.b `c", F.lit(1))
    assert {(bytes(row["key"]), row["a.b `c"]) for row in latest(few, "a.b `c").collect()} == {
        (key, 1) for key in contents(url)
    }


def test_a_table_does_not_mix_up_buckets(spark: SparkSession) -> None:
    """Two of their items with one key would be one row."""
    columns = StructType([StructField(name, *column) for name, column in READ_COLUMNS.items()])
    with pytest.raises(OptionError, match="a table of its own"):
        newest_of_batch(spark.createDataFrame([], columns))


def test_a_table_has_values_as_they_are(spark: SparkSession) -> None:
    """A struct ended with a traceback of Arrow's."""
    columns = {**READ_COLUMNS, "value": (StructType([StructField("a", LongType())]), True)}
    del columns["bucket"]
    schema = StructType([StructField(name, *column) for name, column in columns.items()])
    with pytest.raises(OptionError, match="the column value is struct<a:bigint>, and the table"):
        newest_of_batch(spark.createDataFrame([], schema))


def test_a_marker_drops_what_was_before_it_in_its_partition(spark: SparkSession) -> None:
    old_rows = [
        row(1, 0, "a", 1, "x", "old"),
        row(1, 0, "a", 9, "y", "old"),
        row(1, 1, "a", 1, "z", "1"),
    ]
    new_rows = [marker(2, 0, "b"), row(2, 0, "b", 1, "x", "new"), row(2, 0, "b", 2, "w", None)]
    after = [row(3, 0, "c", 3, "v", "newer"), row(3, 1, "a", 2, "z", None)]
    assert newest(spark, old_rows + new_rows + after, "batch") == {"x": "new", "v": "newer"}
    again = [marker(4, 0, "d"), row(4, 0, "d", 1, "u", "last")]
    assert newest(spark, old_rows + new_rows + after + again, "batch") == {"u": "last"}
    rewound = [marker(2, 0, "b", 5), row(2, 0, "b", 6, "w", "new")]
    assert newest(spark, old_rows + rewound, "batch") == {"x": "old", "w": "new", "z": "1"}
    assert newest(spark, [*new_rows, row(2, 1, "a", 1, "z", "1")]) == {"x": "new", "z": "1"}
    with pytest.raises(PipelineError, match="in which order the batches came"), plain_errors():
        newest(spark, old_rows + new_rows)
    with pytest.raises(OptionError, match="no column time"):
        newest(spark, old_rows, "time")
