"""Reading with Spark: what comes is what a consumer gets, each time the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from pyspark import InheritableThread
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    IntegerType,
    StringType,
    StructField,
    StructType,
)

from tests.kit.effort import effort
from tests.spark.bucket import made_anew
from tests.spark.durable_keys import durable_client, keys_of, overwrite
from tests.spark.reads import load
from tests.spark.server import BlockingServer
from tests.spark.waiting import until
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient, ChunkReceived, SnapshotStart, consume
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation
from upr_protocol.limits import VALUE_BYTES_MAX
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.schema import check_schema

FAR = (1 << 32) - 1
"""The latest expiry time there is, and the largest flags."""
NewBucket = Callable[..., str]


async def consumed(url: str) -> list[tuple[Any, ...]]:
    """Every row of a bucket, by the client for Trio, with all columns."""
    rows: list[tuple[Any, ...]] = []
    histories: dict[int, tuple[str, int, int]] = {}
    names = {Operation.SET: "set", Operation.DELETE: "delete", Operation.EXPIRE: "expire"}
    async with consume(url, end="now") as consumer:
        async for event in consumer:
            if isinstance(event, SnapshotStart):
                history = f"{event.history_id:016x}"
                histories[event.partition] = (history, event.start, event.end)
            elif isinstance(event, ChunkReceived):
                for mutation in event.chunk:
                    is_set = mutation.op is Operation.SET
                    rows.append(
                        (
                            *(names[mutation.op], event.partition, histories[event.partition][0]),
                            *(mutation.seq, *histories[event.partition][1:]),
                            *(mutation.key, mutation.value if is_set else None, not is_set),
                            *(mutation.cas, mutation.flags, mutation.expiry),
                        )
                    )
    return rows


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return [
        tuple(bytes(value) if isinstance(value, bytearray) else value for value in row)
        for row in frame.collect()
    ]


def test_a_read_returns_the_rows_of_a_consumer(spark: SparkSession, new_bucket: NewBucket) -> None:
    """Every kind of row, edges of every column, a value of 20 MiB, partitions without any."""
    url = new_bucket(16)
    draw = random.Random(1)
    with durable_client(url) as client:
        mutations = [
            Mutation(
                Operation.SET,
                b"key %d" % index,
                draw.randbytes(draw.choice((0, 1, 100))),
                flags=draw.choice((0, 1, FAR)),
                expiry=draw.choice((0, FAR)),
            )
            for index in range(400)
        ]
        client.apply(row for row in mutations if partition_of(row.key, 16) > 3)
        client.apply([Mutation(Operation.SET, b"\xff" * 250, bytes(range(256)))])
        client.set("large", draw.randbytes(VALUE_BYTES_MAX))
        client.set("counter", str((1 << 64) - 1))
        deleted_keys = [row.key for row in mutations if partition_of(row.key, 16) > 3][:40]
        client.apply(Mutation(Operation.DELETE, key) for key in deleted_keys[:20])
    # Where snapshots begin and end depends on when they were read.
    expected = [row[:4] + row[6:] for row in trio.run(consumed, url)]
    rows = rows_of(load(spark, url))
    assert sorted(row[:4] + row[6:] for row in rows) == sorted(expected)
    assert sum(row[8] for row in rows) == 20
    special = {partition_of(key, 16) for key in (b"\xff" * 250, b"large", b"counter")}
    assert (empty := set(range(4)) - special)
    assert empty.isdisjoint({row[1] for row in rows})
    by_partition: dict[int, list[int]] = {}
    for row in rows:
        by_partition.setdefault(row[1], []).append(row[3])
    assert all(sorted(numbers) == numbers for numbers in by_partition.values())


def test_a_filter_reads_no_more_than_it_must(spark: SparkSession, new_bucket: NewBucket) -> None:
    """Of one partition or one key the server reads one partition, of a prefix all; it sends the
    rows with the key or the prefix, and no other. Counted at the server."""
    url = new_bucket(8)
    keys = [b"%s %d" % (kind, index) for kind in (b"bus", b"tram") for index in range(200)]
    with durable_client(url) as client:
        client.apply(Mutation(Operation.SET, key, bytes(1000)) for key in keys)

        def figures() -> tuple[int, int, int]:
            figures = client.stats(client.address.bucket)
            left_out = figures["left_out"]
            return figures["backfill"]["bytes"], left_out["bytes"], left_out["rows"]

        def sent_of(frame: DataFrame) -> tuple[set[bytes], int, int, int]:
            """The keys, the bytes that the server read, and the bytes and rows that it sent."""
            before = figures()
            keys_read = {bytes(row.key) for row in frame.select("key").collect()}
            read, left_out, rows = (b - a for a, b in zip(before, figures(), strict=True))
            return keys_read, read, read - left_out, rows

        everything, all_bytes, _, none = sent_of(load(spark, url))
        assert (everything, none) == (set(keys), 0)
        in_3 = [key for key in keys if partition_of(key, 8) == 3]
        row_bytes = all_bytes / len(keys)
        keys_read, nbytes, sent_bytes, none = sent_of(load(spark, url, partitions="3"))
        assert (keys_read, none) == (set(in_3), 0)
        assert nbytes == sent_bytes < 1.1 * row_bytes * len(in_3)
        # No other key begins as this one does.
        key = max(in_3, key=len)
        keys_read, nbytes, sent_bytes, left_out = sent_of(load(spark, url, key=key.decode()))
        assert (keys_read, left_out) == ({key}, len(in_3) - 1)
        assert nbytes < 1.1 * row_bytes * len(in_3)
        assert sent_bytes < 1.1 * row_bytes
        keys_read, nbytes, sent_bytes, left_out = sent_of(load(spark, url, keyPrefix="bus 1"))
        assert keys_read == {key for key in keys if key.startswith(b"bus 1")}
        assert left_out == len(keys) - 111
        assert nbytes == all_bytes
        assert sent_bytes < 1.1 * row_bytes * 111
        keys_read, nbytes, sent_bytes, left_out = sent_of(load(spark, url, keyPrefix="train "))
        assert (keys_read, left_out) == (set(), len(keys))
        assert sent_bytes < row_bytes
        tasks = load(spark, url, "value STRING", keyPrefix="bus 1", deduplicate="true")
        assert tasks.count() == 111


def test_a_read_without_duplicates_has_the_newest_row_of_each_key(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket(4)
    with durable_client(url) as client:
        for round_ in range(3):
            client.apply(
                Mutation(Operation.SET, b"key %d" % index, b"%d" % round_)
                for index in range(round_, 300)
            )
        client.delete("key 200")
    rows = load(spark, url, deduplicate="true", maxPartitionBytes=1000).collect()
    newest = {b"key 0": b"0", b"key 1": b"1", b"key 200": None}
    assert {bytes(row.key): row.value and bytes(row.value) for row in rows} == {
        key: newest.get(key, b"2") for key in (b"key %d" % index for index in range(300))
    }
    assert len(rows) == 300
    frame = load(spark, url, "value STRING, deleted BOOLEAN", deduplicate="true")
    assert frame.columns == ["value", "deleted"]
    values = [row.value for row in frame.collect()]
    assert sorted(map(str, values)) == ["0", "1", *["2"] * 297, "None"]


def test_values_are_parsed_into_a_struct_on_request(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket(1)
    with durable_client(url) as client:
        client.set("a", '{"seats":10,"model":"A320","more":1}')
        client.set("b", "no JSON")
        client.set("c", "{}")
        client.delete("c")
    schema = "key STRING, value STRUCT<seats: INT, model: STRING>, deleted BOOLEAN"
    rows = load(spark, url, schema).where("value.seats > 1 OR value IS NULL").collect()
    assert {(row.key, row.deleted, row.value and row.value.model) for row in rows} >= {
        ("a", False, "A320"),
        ("b", False, None),
        ("c", True, None),
    }
    schema = "unparsed STRING, key STRING, value STRUCT<seats: INT>"
    rows = load(spark, url, schema, keyPrefix="b").collect()
    assert [tuple(row) for row in rows] == [("no JSON", "b", None)]
    rows = load(spark, url, schema).collect()
    assert {row.key: row.unparsed for row in rows} == {"a": None, "b": "no JSON", "c": None}
    with pytest.raises(PySparkException, match=r"UPR_OPTION.*unparsed needs the column value"):
        load(spark, url, "value STRING, unparsed STRING").collect()
    with pytest.raises(PySparkException, match=r"UPR_OPTION.*from_json"):
        load(spark, url, "value STRUCT<price: DECIMAL(9, 2)>").collect()


def test_values_are_parsed_by_a_schema_that_is_given_or_inferred(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket(3)
    with pytest.raises(PySparkException, match=r"UPR_NO_SAMPLE.*newest 1000 values"):
        load(spark, url, valueSchema="infer")
    with durable_client(url) as client:
        client.apply(
            Mutation(Operation.SET, b"plane %d" % index, b'{"seats":%d,"at":{"x":1.5}}' % index)
            for index in range(40)
        )
        client.set("plane 40", '{"model":"A320","old":true}')
        client.set("car", '{"wheels":4}')
        client.set("text", "no JSON")
        client.delete("plane 0")
    frame = load(spark, url, valueSchema="infer", metadata="false")
    assert frame.schema["value"].dataType.simpleString() == (
        "struct<at:struct<x:double>,model:string,old:boolean,seats:bigint,wheels:bigint>"
    )
    assert frame.columns == ["seq", "key", "value", "unparsed", "deleted"]
    assert frame.where("value.seats >= 30 and value.at.x = 1.5").count() == 10
    assert frame.where("value.model = 'A320'").count() == 1
    unparsed = frame.where("unparsed is not null").collect()
    assert [(bytes(row.key), bytes(row.unparsed)) for row in unparsed] == [(b"text", b"no JSON")]
    # Of the rows that are read.
    frame = load(spark, url, valueSchema="infer", keyPrefix="car")
    assert frame.schema["value"].dataType.simpleString() == "struct<wheels:bigint>"
    typed_frame = load(spark, url, valueSchema="seats INT, `a b` STRING")
    assert typed_frame.schema["value"].dataType.simpleString() == "struct<seats:int,a b:string>"
    assert typed_frame.schema["key"].nullable is False
    assert typed_frame.where("value.seats = 7").count() == 1
    for schema in ("key STRING", "key STRING, value STRUCT<seats: INT>"):
        with pytest.raises(PySparkException, match=r"UPR_OPTION.*leave out one of them"):
            load(spark, url, schema, valueSchema="infer").collect()
    with pytest.raises(PySparkException, match=r"UPR_OPTION.*leave out includeValue=false"):
        load(spark, url, valueSchema="infer", includeValue="false")
    with pytest.raises(PySparkException, match=r"PARSE_SYNTAX_ERROR\] Syntax error at or near '<'"):
        load(spark, url, valueSchema="seats INT, ,")
    with pytest.raises(PySparkException, match='Unsupported data type "INTT"'):
        load(spark, url, valueSchema="seats INTT")


def test_an_empty_bucket_has_no_rows(spark: SparkSession, new_bucket: NewBucket) -> None:
    assert load(spark, new_bucket(1)).collect() == []


def test_all_that_was_acknowledged_is_there(spark: SparkSession, new_bucket: NewBucket) -> None:
    """Though it was only in memory: reading is a barrier."""
    url = new_bucket()
    with BlockingClient(url) as client:
        for index in range(10):
            client.set(f"key {index}", str(index))
            assert load(spark, url, "key binary").count() == index + 1


def test_actions_on_one_frame_agree_while_keys_are_overwritten_and_compacted(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket(1024)
    keys = keys_of(5, 1024, 10)
    with durable_client(url) as client:
        for value in ("first", "second"):
            for key in keys:
                client.set(key, value)
        frame = load(spark, url)
        first = sorted(rows_of(frame))
        assert len(first) == 2 * len(keys), "every version"
        overwrite(client, keys, 3)
        assert sorted(rows_of(frame)) == first
        assert frame.count() == len(first)
        assert sorted(rows_of(frame.filter("seq > 3"))) == [row for row in first if row[3] > 3]
        now = rows_of(load(spark, url))
        assert max(row[3] for row in now) == 11 * len(keys)
        assert len(now) < 8 * len(keys), "what came later was compacted"


def test_a_data_frame_whose_rows_are_gone_fails_with_the_reason(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket(1024)
    keys = keys_of(5, 1024, 10)
    with durable_client(url) as client:
        for key in keys:
            client.set(key, "first")
        frame = load(spark, url, leaseSeconds=1)
        assert frame.count() == 10
        until(lambda: leases(client)["lapsed"] == 1, "the lease lapses")
        assert frame.count() == 10, "it is whole still"
        until(lambda: leases(client)["lapsed"] == 1, "the lease lapses again")
        overwrite(client, keys, 2)
        until(lambda: leases(client)["broken"] == 1, "the lease is broken")
        with pytest.raises(PySparkException, match=GONE):
            frame.count()


GONE = r"\[UPR_RANGE_GONE\] .*: lease \w+ does not protect .* Load the DataFrame again"


def test_an_action_has_the_rows_of_the_first_or_fails(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    """Spark plans a read once, and keeps the plan."""
    url = new_bucket(2)
    with durable_client(url) as client:
        client.set("a", "first")
        frame, other_frame = load(spark, url), load(spark, url)
        assert (frame.count(), other_frame.count()) == (1, 1)
        client.set("b", "first")
        assert frame.count() == 1
        for lease in leases(client)["leases"]:
            client.release_lease(int(lease["id"], 16))
        with pytest.raises(PySparkException, match=GONE):
            frame.count()
    made_anew(url, 2)
    with pytest.raises(PySparkException, match=GONE):
        other_frame.count()


def leases(client: BlockingClient) -> dict[str, Any]:
    figures: dict[str, Any] = client.stats(client.address.bucket)["leases"]
    return figures


def test_some_partitions_numbers_and_columns(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket(4)
    with durable_client(url) as client:
        client.apply(Mutation(Operation.SET, b"key %d" % index, b"value") for index in range(200))
        all_rows = rows_of(load(spark, url))
        rows = rows_of(load(spark, url, partitions="1-2, 3"))
        assert sorted(rows) == sorted(row for row in all_rows if row[1] > 0)
        rows = rows_of(
            load(spark, url, startingOffsets='{"0": 10, "2": 1}', endingOffsets='{"0": 20, "1": 3}')
        )
        assert sorted(row[1:2] + row[3:4] for row in rows) == sorted(
            (row[1], row[3])
            for row in all_rows
            if {0: 10, 2: 1}.get(row[1], 0) < row[3] <= {0: 20, 1: 3}.get(row[1], 1 << 60)
        )
        assert load(spark, url, includeValue="false").columns == [
            *("op", "partition", "history_id", "seq", "snapshot_start", "snapshot_end", "key"),
            *("deleted", "cas", "flags", "expiry"),
        ]
        assert load(spark, url, metadata="false").columns == ["seq", "key", "value", "deleted"]
        frame = load(spark, url, "value string, key string, deleted boolean")
        assert Row(value="value", key="key 7", deleted=False) in frame.collect()
        assert load(spark, url, minPartitions=7).rdd.getNumPartitions() >= 7
        assert load(spark, url, maxPartitionBytes=1000).rdd.getNumPartitions() >= 8
        assert sorted(rows_of(load(spark, url, maxPartitionBytes=1000))) == sorted(all_rows)
        assert load(spark, url, stability="any").count() == 200
        client.set(b"\xff", b"\xfe")
        with pytest.raises(PySparkException, match=r"\[UPR_NO_TEXT\].*column key"):
            load(spark, url, "key string").collect()


def test_a_filter_of_one_query_is_no_filter_of_the_next(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    """Spark 4.3 reads a DataFrame with the filters that an earlier query on it has pushed. With a
    reader that takes filters this test fails."""
    url = new_bucket()
    with durable_client(url) as client:
        for index in range(20):
            client.set(f"key-{index}", str(index))
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        frame = load(spark, url)
        partition, expected = frame.groupBy("partition").count().collect()[0]
        fresh = load(spark, url)
        assert fresh.filter(f"partition = {partition}").count() == expected
        assert fresh.count() == 20
    finally:
        spark.conf.unset(setting)


def test_a_read_begins_and_ends_at_times(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket(4)
    with durable_client(url) as client:
        for part in range(6):
            client.apply(
                Mutation(Operation.SET, b"key %d" % index, b"value %d" % part)
                for index in range(40)
            )
    columns = "partition int, seq long, cas long, key binary, value binary"
    all_rows = load(spark, url, columns).collect()
    moments_ns = sorted(row.cas for row in all_rows)
    start_us, end_us = moments_ns[70] // 1000, moments_ns[190] // 1000
    start, end = (
        datetime.fromtimestamp(0, UTC) + timedelta(microseconds=moment)
        for moment in (start_us, end_us)
    )
    times = {"startingTimestamp": start.isoformat(), "endingTimestamp": end.isoformat()}
    assert sorted(load(spark, url, columns, **times).collect()) == sorted(
        row for row in all_rows if 1000 * start_us <= row.cas < 1000 * end_us
    )
    start_ms = start_us // 1000
    assert sorted(load(spark, url, columns, startingTimestamp=start_ms).collect()) == sorted(
        row for row in all_rows if row.cas >= 1_000_000 * start_ms
    )
    assert load(spark, url, endingTimestamp=1).count() == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"maxOffsetPerTrigger": 5}, "there is no option maxoffsetpertrigger; perhaps"),
        ({"stability": "sometimes"}, "the option stability is 'sometimes', and not one of"),
        (
            {"partitions": "3-1"},
            "the option partitions: '3-1' is not a partition, or a rising range",
        ),
        ({"partitions": ""}, "the option partitions: '' is not a partition; write them like 0-3,7"),
        ({"key": ""}, "the option key has 0 bytes in UTF-8; write 1 to 250"),
        ({"key": "ä" * 126}, "the option key has 252 bytes in UTF-8"),
        ({"keyPrefix": "x" * 251}, "the option keyPrefix has 251 bytes in UTF-8"),
        ({"startingOffsets": '{"0": -1}'}, "numbers by partition like"),
        ({"endingOffsets": "{"}, "numbers by partition like"),
        ({"startingOffsets": "17"}, 'earliest, latest, or numbers by partition like {"0": 17'),
        ({"endingOffsets": "[17]"}, 'use latest, or numbers by partition like {"0": 17'),
        ({"startingOffsets": '{"0": 1, "00": 2}'}, "numbers by partition like"),
        ({"startingOffsets": '{"1_0": 1}'}, "numbers by partition like"),
        ({"minPartitions": "1_0"}, "no whole number from 1 to"),
        ({"leaseSeconds": "0"}, "no whole number from 1 to 86400"),
        (
            {"startingTimestamp": "2026-01-31"},
            "2026-01-31 00:00:00 has no time zone",
        ),
        ({"startingTimestamp": "9" * 20}, "which is no time in milliseconds since 1970"),
        ({"startingTimestamp": "9" * 5000}, "which is no time in milliseconds since 1970"),
        ({"startingTimestamp": 10**14}, "which is no time in milliseconds since 1970"),
        ({"startingTimestamp": "5²"}, "the option startingTimestamp"),
        ({"startingTimestamp": "١٢"}, "is not a date and time"),
        ({"inferSample": 10}, "the option inferSample needs valueSchema=infer"),
        ({"inferSample": 10, "valueSchema": "a INT"}, "the option inferSample needs valueSchema"),
        ({"leaseSeconds": 5, "stability": "any"}, "the option leaseSeconds needs stability"),
        ({"startingTimestamp": 5, "startingOffsets": "earliest"}, "exclude each other"),
        ({"startingTimestamp": 5, "endingTimestamp": 5}, "which is not after startingTimestamp"),
        ({"partitions": "0", "key": "a"}, "the option key excludes partitions"),
        ({"url": "http://localhost/x"}, "it does not begin with upr://"),
        ({"url": "upr://localhost"}, "the bucket is missing"),
        ({"path": "upr://localhost/b"}, "the path of load, save or start has no meaning"),
        ({"paths": '["/a", "/b"]'}, "the path of load, save or start has no meaning"),
    ],
)
def test_options_that_are_wrong(options: dict[str, object], sentence: str) -> None:
    all_options = {"url": "upr://localhost/b", **options}
    with pytest.raises(OptionError) as refusal:
        # As when the columns are asked for: whether it is a stream is not known yet.
        ReadOptions.parse({name: str(value) for name, value in all_options.items()}, streaming=None)
    assert sentence in str(refusal.value)


def test_a_wrong_option_is_told_when_the_frame_is_loaded(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match=r"\[UPR_OPTION\] .* perhaps maxPartitionBytes"):
        load(spark, "upr://localhost/b", maxPartitionByte=5)


@pytest.mark.parametrize(
    ("option", "text", "sentence"),
    [
        ("startingOffsets", "latest", "a read would return nothing"),
        ("failOnDataLoss", "false", "a read does not go on without its rows"),
    ],
)
def test_an_option_that_is_only_for_streams_is_refused(
    option: str, text: str, sentence: str
) -> None:
    options = {"url": "upr://localhost/b", option: text}
    ReadOptions.parse(options, streaming=True)
    with pytest.raises(OptionError, match=sentence):
        ReadOptions.parse(options)


@pytest.mark.parametrize(
    ("option", "is_for_streams"),
    [("maxOffsetsPerTrigger", True), ("onRollback", True), ("endingOffsets", False)],
)
def test_an_option_of_the_other_kind_is_named_as_such(option: str, is_for_streams: bool) -> None:
    """It was said that there is no such option, though the documents have it."""
    kind = "a stream" if is_for_streams else "a read"
    with pytest.raises(OptionError, match=f"the option {option} is for {kind}, and this is"):
        ReadOptions.parse({"url": "upr://localhost/b", option: "5"}, streaming=not is_for_streams)


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("key", IntegerType(), "the column key is binary or string, and not int"),
        ("colour", StringType(), "there is no column colour"),
        (
            "value",
            StructType([StructField("price", DecimalType(5, 2))]),
            "leave that field out, or ask for the value as string and use from_json",
        ),
    ],
)
def test_columns_that_there_are_not(name: str, kind: DataType, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        check_schema(StructType([StructField(name, kind)]))


def test_a_schema_without_columns_is_refused() -> None:
    """Arrow counts no rows without columns: `count()` of such a read was 0."""
    with pytest.raises(OptionError, match="the schema names no column"):
        check_schema(StructType([]))


def test_columns_and_fields_of_one_name_are_refused() -> None:
    """Arrow would take both for one, and Spark's JVM end with an error of its own."""
    text = StructField("a", StringType())
    twice = StructType([text, text])
    for schema, sentence in (
        ([StructField("key", StringType())] * 2, "the schema names the column key several times"),
        ([StructField("value", twice)], "the column value has several fields a"),
        (
            [StructField("value", StructType([StructField("b", ArrayType(twice))]))],
            "the column value has several fields a",
        ),
    ):
        with pytest.raises(OptionError, match=sentence):
            check_schema(StructType(schema))
    # Names of another case are others.
    other_case = StructField("A", StringType())
    check_schema(StructType([StructField("value", StructType([text, other_case]))]))


def test_wrong_reads_fail_with_their_code(
    spark: SparkSession, server: BlockingServer, new_bucket: NewBucket
) -> None:
    url = new_bucket(2)
    bucket = url.rpartition("/")[2]
    for wrong, error in (
        (load(spark, url, startingOffsets='{"0": 5}'), rf"UPR_OPTION\] partition 0 of {bucket} "),
        (load(spark, url, partitions="5"), rf"UPR_OPTION\] .* 5, and {bucket} has 0 to 1"),
        (load(spark, server.url("missing")), r"UPR_NO_BUCKET\]"),
        (load(spark, "upr://127.0.0.1:1/b", timeoutSeconds=1), r"UPR_UNREACHABLE\]"),
    ):
        with pytest.raises(PySparkException, match=rf"\[{error}"):
            wrong.collect()


@pytest.mark.timeout(300)
def test_a_read_that_stops_early_leaves_nothing_behind(
    spark: SparkSession, server: BlockingServer, new_bucket: NewBucket
) -> None:
    """Several times: limited, taken from, and cancelled."""
    url = new_bucket(4)
    with durable_client(url) as client, BlockingClient(server.url()) as observer:
        client.apply(
            Mutation(Operation.SET, b"key %d" % index, bytes(2000)) for index in range(2000)
        )

        def connections() -> int:
            return len(observer.stats()["connections"])

        before = connections()
        frame = load(spark, url, leaseSeconds=2, minPartitions=2)
        for _ in range(effort(3, 45)):
            assert len(frame.limit(3).collect()) == 3
        for _ in range(effort(3, 45)):
            assert len(frame.select("key").take(1)) == 1
        for index in range(effort(2, 10)):
            cancel_one(spark, load(spark, url, leaseSeconds=2), f"group {index}")
        # Some may be of an earlier test, and end meanwhile.
        until(lambda: connections() <= before, "every connection is closed")
        until(lambda: leases(client)["held"] == 0, "no lease is held")
        assert client.stats(client.address.bucket)["leases"]["backfills"] == 0


def cancel_one(spark: SparkSession, frame: DataFrame, group: str) -> None:
    """Begins to read, and is cancelled in the middle of it."""
    context = spark.sparkContext
    context.setJobGroup(group, "", interruptOnCancel=True)
    failures: list[BaseException] = []

    def slowly(rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            time.sleep(0.01)  # noqa: TID251  a reader that takes its time
            yield row

    def run() -> None:
        try:
            frame.select("key").rdd.mapPartitions(slowly).count()
        except Exception as error:  # noqa: BLE001  it is looked at below
            failures.append(error)

    thread = InheritableThread(target=run, session=spark)
    thread.start()
    tracker = context.statusTracker()
    until(lambda: bool(tracker.getJobIdsForGroup(group)), "the job has begun")
    context.cancelJobGroup(group)
    thread.join()
    context.setLocalProperty("spark.jobGroup.id", "")
    (failure,) = failures
    assert "cancel" in str(failure)
