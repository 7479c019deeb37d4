"""Writing with a real Spark to a real server."""

from __future__ import annotations

import datetime as dt
import socket
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession, types

from tests.spark.bucket_values import contents
from tests.spark.interrupted import (
    ROWS,
    Changing,
    Interrupted,
    Killed,
    Waiting,
    mutations,
    write_increments,
)
from tests.spark.server import BlockingServer, blocking_server
from upr_protocol.client import BlockingClient
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.write_options import WriteOptions
from upr_protocol.spark.writer import StreamWriter

NewBucket = Callable[..., str]
SCHEMA = types.StructType(
    [types.StructField(name, types.StringType()) for name in ("key", "value")]
)
MOMENT = dt.datetime(2024, 1, 31, 12, 0, 0, 5, dt.UTC)


def write(frame: DataFrame, url: str, **options: object) -> None:
    writer = frame.write.format("upr").mode("append").option("url", url)
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save()


def items(count: int, first: int = 0) -> dict[bytes, bytes]:
    """What `frame` of as many rows leaves."""
    return {b"key-%d" % n: b"value %d" % n for n in range(first, first + count)}


def frame(spark: SparkSession, count: int, tasks: int = 2, first: int = 0) -> DataFrame:
    return spark.range(first, first + count, 1, tasks).selectExpr(
        "concat('key-', id) AS key", "concat('value ', id) AS value"
    )


# What is written.


def test_operations(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket()
    write(frame(spark, 100), url, operation="insert")
    assert contents(url) == items(100)
    write(spark.sql("SELECT 'key-7' AS key, 'new' AS value"), url)
    write(
        spark.sql("SELECT 'key-8' AS id, 8 AS n"),
        url,
        keyColumn="ID",
        valueColumn="n",
        operation="replace",
    )
    # That a key is not there is as it should be.
    write(frame(spark, 100, first=90).select("key"), url, operation="delete")
    assert contents(url) == {**items(90), b"key-7": b"new", b"key-8": b"8"}
    assert mutations(url) == 100 + 2 + 10


def test_operations_by_column(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket()
    rows = [
        ("set", "a", "1"),
        ("add", "b", "2"),
        ("replace", "a", "3"),
        ("delete", "b", None),
        ("delete", "missing", None),
        ("increment", "n", "5"),
        ("increment", "n", "6"),
        ("DECREMENT", "n", "1"),
    ]
    write(
        spark.createDataFrame(rows, "op string, key string, value string").coalesce(1),
        url,
        operation="apply",
    )
    assert contents(url) == {b"a": b"3", b"n": b"10"}


def test_types_of_keys_and_values(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket()
    expected = {
        "'text'": b"text",
        "X'00FF'": b"\0\xff",
        "CAST(-5 AS TINYINT)": b"-5",
        "123456789012": b"123456789012",
        "CAST(1.50 AS DECIMAL(10, 2))": b"1.50",
        "CAST(0.1 AS DOUBLE)": b"0.1",
        "CAST(1.5 AS FLOAT)": b"1.5",
        "5": b"5",
        "5.0D": b"5.0",
        "double('NaN')": b"NaN",
        "true": b"true",
        "DATE'2024-01-31'": b"2024-01-31",
        "TIMESTAMP'2024-01-31 12:00:00.000005Z'": b"2024-01-31T12:00:00.000005Z",
        "TIMESTAMP_NTZ'2024-01-31 12:00:00'": b"2024-01-31T12:00:00.000000",
        "array(1, 2)": b"[1,2]",
        "named_struct('a', 1, 'b', 'x')": b'{"a":1,"b":"x"}',
        "map('k', 1)": b'{"k":1}',
    }
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        for source in expected:
            write(spark.sql(f"SELECT {source} AS key, {source} AS value").coalesce(1), url)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert contents(url) == {text: text for text in expected.values()}
    write(spark.sql("SELECT 'o' AS key, 1 AS n, map('k', 1) AS m"), url, valueColumn="n, M")
    assert contents(url)[b"o"] == b'{"n":1,"m":{"k":1}}'


def test_flags_expiry_and_cas(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket()
    late = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
    rows = [("a", Decimal("1.5"), 7, late), ("b", None, None, None)]
    schema = "key string, n decimal(9, 1), f int, e timestamp"
    write(
        spark.createDataFrame(rows, schema), url, valueColumn="*", flagsColumn="f", expiryColumn="e"
    )
    with BlockingClient(url) as client:
        first, second = client.get_many(["a", "b"])
    assert first is not None
    assert second is not None
    assert (first.value, first.flags, first.expiry) == (
        b'{"key":"a","n":1.5}',
        7,
        int(late.timestamp()),
    )
    assert (second.value, second.flags, second.expiry) == (b'{"key":"b","n":null}', 0, 0)
    changed = [("a", "x", first.cas + 1), ("b", "y", second.cas)]
    with pytest.raises(PySparkException, match=r"UPR_ROWS_REFUSED.*upsert of b'a': CAS_MISMATCH"):
        write(
            spark.createDataFrame(changed, "key string, value string, c long").coalesce(1),
            url,
            casColumn="c",
        )
    with BlockingClient(url) as client:
        item = client.get("b")
        assert item is not None
        assert item.value == b"y"


# What is refused.


def test_rows_that_are_refused_fail_the_write(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket()
    write(frame(spark, 10), url)
    with pytest.raises(PySparkException) as caught:
        write(frame(spark, 20).coalesce(1), url, operation="insert")
    text = str(caught.value)
    assert "[UPR_ROWS_REFUSED]" in text
    assert "insert of b'key-" in text
    assert ": EXISTS (the key exists; write with upsert or replace" in text
    # The sentence comes before anything that fills a screen.
    assert text.index("[UPR_ROWS_REFUSED]") < 400
    assert "Traceback (most recent call last)" not in text
    with pytest.raises(
        PySparkException, match=r"UPR_ROWS_REFUSED.*1 rows .*upsert of null: BAD_KEY"
    ):
        write(spark.sql("SELECT CAST(NULL AS STRING) AS key, 'v' AS value"), url)


def test_dead_letters(spark: SparkSession, new_bucket: NewBucket, tmp_path: Path) -> None:
    url = new_bucket()
    write(frame(spark, 10), url)
    more = spark.sql(
        "SELECT * FROM VALUES (CAST(NULL AS STRING), 'v'), ('', NULL) AS t(key, value)"
    )
    folder = tmp_path / "letters"
    write(
        frame(spark, 20).union(more),
        url,
        operation="insert",
        onError="deadLetter",
        deadLetterPath=folder.as_uri(),
    )
    assert contents(url) == items(20)
    letters = spark.read.parquet(str(folder)).collect()
    assert sorted(
        (row.status, row.operation, row.key, row.value) for row in letters if row.key
    ) == [
        ("EXISTS", "insert", bytearray(key), bytearray(value))
        for key, value in sorted(items(10).items())
    ]
    assert [row.reason for row in letters if row.key is None] == ["the key is null"]
    assert len(letters) == 12
    assert all(path.name.startswith("part-") for path in folder.iterdir())


def test_options_are_refused_before_anything_is_written(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket()
    one_row = frame(spark, 1)
    with pytest.raises(PySparkException, match="there is no option opration; perhaps operation"):
        write(one_row, url, opration="insert")
    with pytest.raises(PySparkException, match=r"UPR_OPTION.*write with mode append"):
        one_row.write.format("upr").mode("overwrite").option("url", url).save()
    with pytest.raises(PySparkException, match=r"the option url is missing"):
        one_row.write.format("upr").mode("append").save()


def test_a_bucket_or_a_server_that_is_not_there(
    spark: SparkSession, server: BlockingServer
) -> None:
    """The driver finds out, before any task begins."""
    with pytest.raises(AnalysisException, match=r"UPR_NO_BUCKET.*create the bucket first"):
        write(frame(spark, 1), server.url("none"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"upr://127.0.0.1:{nobody.getsockname()[1]}/b"
        with pytest.raises(AnalysisException, match=r"UPR_UNREACHABLE.*waited 1 s.*Start it"):
            write(frame(spark, 1), url, timeoutSeconds=1)


# A server that is short of memory, and one that dies.


def test_a_bucket_that_is_over_its_quota_is_waited_for(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket(8, 1024 * 1024)
    wide = spark.range(20_000).selectExpr("concat('key-', id) AS key", "repeat('v', 1000) AS value")
    write(wide, url)
    assert mutations(url) == 20_000


def test_a_server_that_dies_in_the_middle_of_a_write(spark: SparkSession) -> None:
    with blocking_server() as mortal, socket.create_server(("127.0.0.1", 0)) as listener:
        url = mortal.create_bucket("b")
        before: list[int] = []

        def murder() -> None:
            line, _ = listener.accept()
            with line:
                before.append(mutations(url))
                mortal.kill()
                line.sendall(b"go")
            mortal.start()

        killer = Thread(target=murder)
        killer.start()
        try:
            write_increments(spark, url, Waiting, 1, go_port=listener.getsockname()[1])
        finally:
            killer.join(60)
        assert 0 < before[0] < ROWS
        assert mutations(url) == ROWS
        assert contents(url) == {b"key-%d" % n: b"1" for n in range(ROWS)}


# Tasks that are run again.


def test_tasks_that_run_again_have_no_second_effect(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    """Each has two attempts."""
    for source in (Interrupted, Killed):
        url = new_bucket()
        write_increments(spark, url, source, 2)
        assert mutations(url) == ROWS
        assert contents(url) == {b"key-%d" % n: b"1" for n in range(ROWS)}
    url = new_bucket()
    with pytest.raises(PySparkException, match="UPR_REPLAY_DIFFERS"):
        write_increments(spark, url, Changing, 2)
    assert 0 < mutations(url) < ROWS


# Streams that are begun again.


class Stream:
    """A query that reads Parquet files from a folder, as many as there are, and writes them."""

    def __init__(self, spark: SparkSession, folder: Path, url: str) -> None:
        self._spark = spark
        self._source = folder / "source"
        self._checkpoint = folder / "checkpoint"
        self._source.mkdir()
        self._url = url

    def put(self, name: str, keys: list[str]) -> None:
        """A file of increments."""
        columns = {"op": ["increment"] * len(keys), "key": keys, "value": ["1"] * len(keys)}
        parquet.write_table(pa.table(columns), self._source / f"{name}.parquet")

    def run(self) -> None:
        """Writes what is new."""
        source = self._spark.readStream.schema("op string, key string, value string")
        writer = source.parquet(str(self._source)).writeStream.format("upr")
        writer = writer.option("url", self._url).option("operation", "apply")
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    @property
    def committed(self) -> list[str]:
        """The batches that Spark knows to be written."""
        names = [path.name for path in (self._checkpoint / "commits").iterdir()]
        return sorted(name for name in names if not name.startswith("."))

    def forget_commit(self, batch: int) -> None:
        """As if the driver had died before it noted that a batch was written."""
        (self._checkpoint / "commits" / str(batch)).unlink()
        (self._checkpoint / "commits" / f".{batch}.crc").unlink()


def test_a_stream_batch_that_runs_again_has_no_second_effect(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    stream = Stream(spark, tmp_path, url)
    stream.put("first", ["a", "b"])
    stream.run()
    stream.put("second", ["a", "c"])
    stream.run()
    expected = {b"a": b"2", b"b": b"1", b"c": b"1"}
    assert contents(url) == expected
    stream.forget_commit(1)
    stream.run()
    assert stream.committed == ["0", "1"]
    assert (contents(url), mutations(url)) == (expected, 4)
    stream.put("third", ["a"])
    stream.run()
    assert (contents(url), mutations(url)) == ({**expected, b"a": b"3"}, 5)


def test_a_stream_batch_that_runs_again_with_other_rows_is_refused(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    stream = Stream(spark, tmp_path, url)
    stream.put("first", [str(index) for index in range(200)])
    stream.run()
    stream.put("first", [str(index) for index in range(100, 300)])
    stream.forget_commit(0)
    with pytest.raises(PySparkException, match="UPR_REPLAY_DIFFERS"):
        stream.run()
    assert mutations(url) == 200


def test_a_stream_with_the_trigger_continuous_commits_nothing(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    """Spark calls no writer then, and fails no query for an error of the commit."""
    url = new_bucket()
    rows = spark.readStream.format("rate").option("rowsPerSecond", 10).load()
    stream = rows.selectExpr("string(value) AS key", "string(value) AS value").writeStream
    query = (
        stream.format("upr")
        .option("url", url)
        .option("checkpointLocation", str(tmp_path))
        .trigger(continuous="100 milliseconds")
        .start()
    )
    try:
        # Spark commits the end of an interval before the next ones.
        while not (tmp_path / "offsets" / "5").exists():
            assert not query.awaitTermination(1)
        assert list((tmp_path / "commits").glob("*")) == []
    finally:
        query.stop()
    assert mutations(url) == 0


def test_the_commit_of_a_stream_with_the_trigger_continuous_is_refused(
    new_bucket: NewBucket,
) -> None:
    options = WriteOptions.parse({"url": new_bucket()}, SCHEMA, overwrite=False)
    with pytest.raises(
        PipelineError, match=r"UPR_CONTINUOUS.*start the query with another trigger"
    ):
        StreamWriter(options).commit([None, None], 0)
