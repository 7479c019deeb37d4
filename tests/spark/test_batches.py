"""Rows as chunks, against the same done row by row."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from pyspark.sql import types

from tests.spark.schemas import schema_of
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.client.core.publish_options import IN_FLIGHT_DEFAULT
from upr_protocol.errors import Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, Durability, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX
from upr_protocol.spark.batches import (
    CHUNK_BYTES_MAX,
    COUNTERS_MAX,
    ENCODED_ROW_BYTES,
    FALLIBLE_MAX,
    PendingRows,
    published_chunks,
)
from upr_protocol.spark.dead_letter import DeadLetters
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.rows import RejectedRow, encode
from upr_protocol.spark.texts import column_texts, json_objects
from upr_protocol.spark.write_options import BATCH_BYTES_MIN, WriteOptions
from upr_server.engine import MutateResult
from upr_server.engine.mutate_result import pack_result
from upr_server.engine.publisher_answers import ANSWER_BYTES, ANSWERS_BYTES_MAX
from upr_server.engine.snapshots.document_list import PUBLISHED_BYTES_MAX

PARTITIONS = 7
URL = "upr://host:1/b"


def options(schema: str = "key string, value string", **options_given: object) -> WriteOptions:
    all_options = {"url": URL, **{name: str(value) for name, value in options_given.items()}}
    return WriteOptions.parse(all_options, schema_of(schema), overwrite=False)


# Batches.

APPLY = options(
    "op string, key binary, value binary, cas long, flags long, expiry long",
    operation="apply",
    casColumn="cas",
    flagsColumn="flags",
    expiryColumn="expiry",
)
ROWS = st.lists(
    st.builds(
        Mutation,
        st.sampled_from((Operation.SET, Operation.ADD, Operation.REPLACE)),
        st.binary(min_size=1, max_size=6),
        st.binary(max_size=40),
        cas=st.integers(0, 2**63 - 1),
        flags=st.integers(0, 2**32 - 1),
        expiry=st.integers(0, 2**32 - 1),
    ),
    max_size=60,
)


def batch_of(rows: list[Mutation]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "op": pa.array([row.op.name for row in rows], pa.string()),
            "key": pa.array([row.key for row in rows], pa.binary()),
            "value": pa.array([row.value for row in rows], pa.binary()),
            "cas": pa.array([row.cas for row in rows], pa.int64()),
            "flags": pa.array([row.flags for row in rows], pa.int64()),
            "expiry": pa.array([row.expiry for row in rows], pa.int64()),
        }
    )


def made(
    rows: list[Mutation], cuts: list[int], batch_bytes: int
) -> list[tuple[PartitionId, Chunk]]:
    """The batches of rows that Spark hands over in pieces."""
    pending = PendingRows(batch_bytes)

    def parts() -> Iterator[list[pa.RecordBatch]]:
        whole = batch_of(rows)
        bounds = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
        for first, end in pairwise(bounds):
            encoded, bad = encode(whole.slice(first, end - first), APPLY)
            assert not bad
            yield from pending.add(encoded)
        yield from pending.take_rest()

    return [batch for part in parts() for batch in published_chunks(part, PARTITIONS)]


def made_naively(rows: list[Mutation], batch_bytes: int) -> list[tuple[int, list[Mutation]]]:
    gathered: list[list[Mutation]] = [[]]
    nbytes = 0
    for row in rows:
        size = ENCODED_ROW_BYTES + len(row.key) + len(row.value)
        if gathered[-1] and nbytes + size > batch_bytes:
            gathered.append([])
            nbytes = 0
        gathered[-1].append(row)
        nbytes += size
    batches = []
    for batch_rows in gathered:
        homes = defaultdict[int, list[Mutation]](list)
        for row in batch_rows:
            homes[partition_of(row.key, PARTITIONS)].append(row)
        batches += sorted(homes.items())
    return batches


@given(ROWS, st.lists(st.integers(0, 100), max_size=5), st.integers(1, 2000))
def test_batches_equal_their_rows_however_spark_sends_them(
    rows: list[Mutation], cuts: list[int], batch_bytes: int
) -> None:
    batches = made(rows, cuts, batch_bytes)
    naive = made_naively(rows, batch_bytes)
    assert [(partition, list(chunk)) for partition, chunk in batches] == naive
    for _, chunk in batches:
        chunk.check_published()
        assert chunk.nbytes <= max(batch_bytes, 1) + 160 or chunk.count == 1


def test_one_partition_is_not_sorted() -> None:
    rows, _ = encode(pa.record_batch({"key": ["b", "a"], "value": ["1", "2"]}), options())
    ((partition, chunk),) = published_chunks([rows], 1)
    assert (partition, chunk.keys(), chunk.values()) == (0, [b"b", b"a"], [b"1", b"2"])
    assert chunk.is_unconditional


def sizes(
    operations: list[Operation], partitions: int = 1, cas: list[int] | None = None
) -> dict[PartitionId, list[int]]:
    """How many rows the chunks of each partition have."""
    columns = {
        "op": pa.array(operations, pa.uint8()),
        "key": pa.array([b"%d" % index for index in range(len(operations))], pa.large_binary()),
        "value": pa.array([CounterDelta(1, 1).encode()] * len(operations), pa.large_binary()),
    }
    if cas is not None:
        columns["cas"] = pa.array(cas, pa.uint64())
    counts = defaultdict[PartitionId, list[int]](list)
    keys = set[bytes]()
    for partition, chunk in published_chunks([pa.record_batch(columns)], partitions):
        chunk.check_published()
        counts[partition].append(chunk.count)
        keys |= set(chunk.keys())
    assert len(keys) == len(operations)
    return counts


ANSWERED: list[tuple[Operation, int]] = [
    (Operation.INCREMENT, COUNTERS_MAX),
    (Operation.DECREMENT, COUNTERS_MAX),
    (Operation.ADD, FALLIBLE_MAX),
    (Operation.REPLACE, FALLIBLE_MAX),
]


@pytest.mark.parametrize(("operation", "rows_max"), ANSWERED)
def test_chunks_whose_answers_are_long_are_short(operation: Operation, rows_max: int) -> None:
    assert sizes([operation] * (2 * rows_max + 1)) == {0: [rows_max, rows_max, 1]}
    # One such row is enough; what is on another partition is not touched.
    assert sizes([Operation.SET] * rows_max + [operation]) == {0: [rows_max, 1]}
    several = sizes([operation] * 9 * rows_max, PARTITIONS)
    assert len(several) == PARTITIONS
    for counts in several.values():
        assert set(counts[:-1]) == {rows_max}
        assert 0 < counts[-1] <= rows_max


def test_chunks_that_expect_a_cas_are_short() -> None:
    sets = [Operation.SET] * (FALLIBLE_MAX + 1)
    assert sizes(sets, cas=[0] * FALLIBLE_MAX + [7]) == {0: [FALLIBLE_MAX, 1]}
    assert sizes(sets, cas=[0] * (FALLIBLE_MAX + 1)) == {0: [FALLIBLE_MAX + 1]}


def test_chunks_that_cannot_fail_are_as_long_as_a_bundle_may_be() -> None:
    rows = sizes([Operation.SET, Operation.DELETE] * BUNDLE_MUTATIONS_MAX)
    assert rows == {0: [BUNDLE_MUTATIONS_MAX] * 2}


def test_chunks_of_several_rows_are_kept_as_they_came_by_a_server() -> None:
    lengths = [300_000, 400_000, 100_000, CHUNK_BYTES_MAX, 10, 10]
    columns = {
        "op": pa.array([Operation.SET] * len(lengths), pa.uint8()),
        "key": pa.array([b"%d" % index for index in range(len(lengths))], pa.large_binary()),
        "value": pa.array([bytes(length) for length in lengths], pa.large_binary()),
    }
    rows = [pa.record_batch(columns)]
    chunks = [chunk for _, chunk in published_chunks(rows, 1)]
    assert rows == []
    assert [chunk.keys() for chunk in chunks] == [[b"0", b"1"], [b"2"], [b"3"], [b"4", b"5"]]
    assert CHUNK_BYTES_MAX < PUBLISHED_BYTES_MAX


def worst_answer(*, counted: int = 0, failed: int = 0) -> int:
    """What a server needs to remember the answer to a batch, at most."""
    largest = 2**64 - 1
    answer = MutateResult(
        HistoryId(largest),
        SeqNo(largest),
        SeqNo(largest),
        Cas(largest),
        [(index, Status.EXISTS) for index in range(failed)],
        [(index, largest) for index in range(counted)],
        chain=largest,
        attempt=largest,
    )
    return ANSWER_BYTES + len(pack_result(answer))


def test_a_server_remembers_the_answers_of_all_that_is_in_flight() -> None:
    for worst in (worst_answer(counted=COUNTERS_MAX), worst_answer(failed=FALLIBLE_MAX)):
        assert worst * IN_FLIGHT_DEFAULT <= ANSWERS_BYTES_MAX


# Texts.

UTC_TIME = pa.timestamp("us", "UTC")
MOMENT = dt.datetime(2024, 1, 31, 12, 0, 0, 5, dt.UTC)


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (["ä", "", None], pa.string(), ["ä".encode(), b"", None]),
        (["ä"], pa.large_string(), ["ä".encode()]),
        ([b"\0\xff"], pa.binary(), [b"\0\xff"]),
        ([-5, None, 127], pa.int8(), [b"-5", None, b"127"]),
        ([2**63 - 1], pa.int64(), [b"9223372036854775807"]),
        ([1.0, 0.1, 1e20, float("nan"), float("inf")], pa.float64(), None),
        ([1.5, 0.1], pa.float32(), [b"1.5", b"0.1"]),
        ([Decimal("1.50"), None], pa.decimal128(10, 2), [b"1.50", None]),
        ([Decimal(0), None], pa.decimal128(38, 18), [b"0.000000000000000000", None]),
        ([Decimal("1e-12")], pa.decimal128(38, 18), [b"0.000000000001000000"]),
        ([True, False, None], pa.bool_(), [b"true", b"false", None]),
        ([dt.date(2024, 1, 31), dt.date(1, 1, 1)], pa.date32(), [b"2024-01-31", b"0001-01-01"]),
        ([MOMENT, None], UTC_TIME, [b"2024-01-31T12:00:00.000005Z", None]),
        ([MOMENT], pa.timestamp("us", "Asia/Tokyo"), [b"2024-01-31T12:00:00.000005Z"]),
        ([MOMENT.replace(tzinfo=None)], pa.timestamp("us"), [b"2024-01-31T12:00:00.000005"]),
        ([[1, None], None, []], pa.list_(pa.int32()), [b"[1,null]", None, b"[]"]),
        ([{"a": 1, "b": b"\0"}], pa.struct({"a": pa.int8(), "b": pa.binary()}), None),
        ([[("k", MOMENT)]], pa.map_(pa.string(), pa.timestamp("us", "Asia/Tokyo")), None),
        ([[(1, Decimal("1.50"))]], pa.map_(pa.int32(), pa.decimal128(9, 2)), [b'{"1":1.50}']),
        ([[{"a": None}, None]], pa.list_(pa.struct({"a": pa.int8()})), [b'[{"a":null},null]']),
        ([None], pa.null(), [None]),
        ([5e-4, 1e7, -0.0, 9999999.0], pa.float64(), [b"5.0E-4", b"1.0E7", b"-0.0", b"9999999.0"]),
        ([16777216.0, 3.4e38], pa.float32(), [b"1.6777216E7", b"3.4E38"]),
        (
            [[float("nan"), -float("inf"), 5.0]],
            pa.list_(pa.float64()),
            [b'["NaN","-Infinity",5.0]'],
        ),
        (
            [['a"\\\n\x01ä'], None],
            pa.large_list(pa.string()),
            ['["a\\"\\\\\\n\\u0001ä"]'.encode(), None],
        ),
        ([{}, None], pa.struct([]), [b"{}", None]),
        # Where Spark's own texts are others.
        ([1e23, 5e-324], pa.float64(), [b"1.0E23", b"5.0E-324"]),
        ([[Decimal("1e-8")]], pa.list_(pa.decimal128(10, 8)), [b"[0.00000001]"]),
        ([["\x1f"]], pa.list_(pa.string()), [b'["\\u001f"]']),
        ([[(dt.date(2024, 1, 31), 1)]], pa.map_(pa.date32(), pa.int8()), [b'{"2024-01-31":1}']),
        ([dt.date(9999, 12, 31)], pa.date32(), [b"9999-12-31"]),
        # Years of more than 16 bits, of which Arrow's own texts are wrong.
        ([11248737, 11248738, None], pa.date32(), [b"32767-12-31", b"32768-01-01", None]),
        ([-12687428, -12687429], pa.date32(), [b"-32767-01-01", b"-32768-12-31"]),
        ([-719529, 2**31 - 1], pa.date32(), [b"-0001-12-31", b"5881580-07-11"]),
        ([2**63 - 1], pa.timestamp("us"), [b"294247-01-10T04:00:54.775807"]),
        ([-(2**63), None], UTC_TIME, [b"-290308-12-21T19:59:05.224192Z", None]),
        ([2**63 - 1], pa.timestamp("us", "Asia/Tokyo"), [b"294247-01-10T04:00:54.775807Z"]),
    ],
)
def test_the_text_of_each_type(
    values: list[Any], kind: pa.DataType, expected: list[bytes | None] | None
) -> None:
    special: dict[pa.DataType, list[bytes | None]] = {
        pa.float64(): [b"1.0", b"0.1", b"1.0E20", b"NaN", b"Infinity"],
        pa.struct({"a": pa.int8(), "b": pa.binary()}): [b'{"a":1,"b":"AA=="}'],
        pa.map_(pa.string(), pa.timestamp("us", "Asia/Tokyo")): [
            b'{"k":"2024-01-31T12:00:00.000005Z"}'
        ],
    }
    expected = special[kind] if expected is None else expected
    assert column_texts(pa.array(values, kind)).to_pylist() == expected
    sliced = pa.array([None, *values, None], kind).slice(1, len(values))
    assert column_texts(sliced).to_pylist() == expected


JSON_VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=8),
}


def json_columns(depth: int = 2) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    """Types whose values Python's own `json` writes the same, and their values."""
    simple = st.sampled_from(list(JSON_VALUES.items()))
    if not depth:
        return simple
    below = json_columns(depth - 1)
    lists = below.map(lambda pair: (pa.list_(pair[0]), st.lists(pair[1] | st.none(), max_size=3)))
    structs = st.lists(below, min_size=1, max_size=3).map(
        lambda pairs: (
            pa.struct([pa.field(f"f{n}", kind) for n, (kind, _) in enumerate(pairs)]),
            st.fixed_dictionaries(
                {f"f{n}": values | st.none() for n, (_, values) in enumerate(pairs)}
            ),
        )
    )
    return simple | lists | structs


@given(st.data())
def test_json_of_columns_equals_json_row_by_row(data: st.DataObject) -> None:
    kind, values = data.draw(json_columns())
    rows = data.draw(st.lists(values | st.none(), max_size=6))
    expected = [json.dumps({"c": row}, ensure_ascii=False, separators=(",", ":")) for row in rows]
    first = data.draw(st.integers(0, len(rows)))
    column = pa.array(rows, kind).slice(first)
    parsed = [json.loads(text) for text in json_objects([column], ["c"]).to_pylist()]
    assert parsed == [json.loads(text) for text in expected[first:]]


def test_a_string_that_is_not_utf_8_is_legible_in_json() -> None:
    """Spark takes any bytes for a string (`CAST(X'FF' AS STRING)`). As a key or value of its own it
    stays as it is; `to_json` puts a replacement character for each byte that is wrong."""
    column = pa.array([b'\xffA"', b"\xe2\x82\x82\xf0", None, b"plain"]).view(pa.string())
    assert column_texts(column).to_pylist()[0] == b'\xffA"'
    values = json_objects([column], ["a"]).to_pylist()
    assert values == [
        '{"a":"\ufffdA\\""}'.encode(),
        '{"a":"\u2082\ufffd"}'.encode(),
        b'{"a":null}',
        b'{"a":"plain"}',
    ]


def test_an_object_of_several_columns() -> None:
    values = json_objects([pa.array([1, None]), pa.array(["x", "y"])], ["a", "b"])
    assert [json.loads(text) for text in values.to_pylist()] == [
        {"a": 1, "b": "x"},
        {"a": None, "b": "y"},
    ]


def test_keys_of_nested_fields_and_of_several_columns() -> None:
    inner = types.StructType([types.StructField("y,z", types.StringType())])
    schema = types.StructType(
        [
            types.StructField("a.b", types.IntegerType()),
            types.StructField("St", inner),
            types.StructField("value", types.StringType()),
        ]
    )
    nested = pa.array([{"y,z": "k"}, None], pa.struct({"y,z": pa.string()}))
    batch = pa.record_batch(
        [pa.array([1, 2], pa.int32()), nested, pa.array(["v", "w"])], names=["a.b", "St", "value"]
    )

    def keys(**options_given: str) -> tuple[list[bytes], int]:
        write_options = WriteOptions.parse({"url": URL, **options_given}, schema, overwrite=False)
        rows, bad = encode(batch, write_options)
        return rows.column("key").to_pylist(), len(bad)

    assert keys(keyColumn="`a.b`") == keys(keyColumn="a.b") == ([b"1", b"2"], 0)
    assert keys(keyColumn="st.`y,z`") == ([b"k"], 1)
    assert keys(keyColumn="`a.b`, St.`y,z`", keySeparator="/") == ([b"1/k"], 1)
    rows, _ = encode(
        batch,
        WriteOptions.parse(
            {"url": URL, "keyColumn": "a.b", "valueColumn": "St.`y,z`, `a.b`"},
            schema,
            overwrite=False,
        ),
    )
    assert rows.column("value").to_pylist() == [
        b'{"y,z":"k","a.b":1}',
        b'{"y,z":null,"a.b":2}',
    ]
    for text in ("`a.b", "St.", "St..y", "a,,b", "", "St.`y,z`.x"):
        with pytest.raises(OptionError, match="keyColumn"):
            keys(keyColumn=text)


def test_columns_without_a_text_are_refused() -> None:
    variant = types.VariantType()
    for kind in (variant, types.ArrayType(types.StructType([types.StructField("v", variant)]))):
        schema = types.StructType(
            [types.StructField("key", types.StringType()), types.StructField("v", kind)]
        )
        for column in ("v", "*"):
            with pytest.raises(OptionError, match=r"the column v .*variant.*to_json"):
                WriteOptions.parse({"url": URL, "valueColumn": column}, schema, overwrite=False)


def test_columns_of_one_name_are_refused() -> None:
    """Arrow would give the last column of all, and a JSON object would have a field twice."""
    text = types.StringType()
    once = types.StructType([types.StructField("a", text)])
    twice = types.StructType([*once, *once])
    nested = types.StructType(
        [types.StructField(name, kind) for name, kind in (("x", once), ("y", once), ("z", twice))]
    )
    flat = types.StructType([types.StructField("key", text), *twice])
    for schema, key, value, sentence in (
        (nested, "z.a", "x.a", "several columns z.a (keyColumn)"),
        (nested, "x.a", "x.a, y.a", "valueColumn names several columns a, and the JSON object"),
        (flat, "a", "key", "several columns a (keyColumn)"),
        (flat, "key", "a", "several columns a (valueColumn)"),
        (flat, "key", "*", "several columns a (valueColumn)"),
    ):
        options_given = {"url": URL, "keyColumn": key, "valueColumn": value}
        with pytest.raises(OptionError, match=re.escape(sentence)):
            WriteOptions.parse(options_given, schema, overwrite=False)


# Rows that cannot be written.


def bad_rows(
    write_options: WriteOptions, **columns: list[Any]
) -> tuple[list[bytes], list[RejectedRow]]:
    rows, bad = encode(pa.record_batch(columns), write_options)
    return rows.column("key").to_pylist(), bad


def test_a_stream_that_would_overwrite_is_told_how_to_write_an_aggregation() -> None:
    """Spark allows Python's data sources no output mode update, which the error named."""
    with pytest.raises(OptionError, match="use foreachBatch with output mode update"):
        WriteOptions.parse({"url": URL}, schema_of("key string, value string"), overwrite=True)


def test_rows_with_a_wrong_key_or_value_are_rejected() -> None:
    long = "k" * 251
    good, bad = bad_rows(
        options(), key=["a", None, "", long, "b", "k" * 250], value=["1", "2", "3", "4", None, ""]
    )
    assert good == [b"a", b"k" * 250]
    assert [(row.status, row.reason, row.key, row.value) for row in bad] == [
        (Status.BAD_KEY, "the key is null", None, b"2"),
        (Status.BAD_KEY, "a key has 1 to 250 bytes", b"", b"3"),
        (Status.BAD_KEY, "a key has 1 to 250 bytes", long.encode(), b"4"),
        (Status.BAD_ARGUMENT, "the value is null", b"b", None),
    ]
    large = bytes(20 * 1024 * 1024 + 1)
    good, bad = bad_rows(options(), key=["a", "b"], value=[large[1:], large])
    assert (good, [row.status for row in bad]) == ([b"a"], [Status.TOO_LARGE])


def test_a_deletion_needs_no_value() -> None:
    assert bad_rows(options("key string", operation="delete"), key=["a"]) == ([b"a"], [])
    write_options = options("op string, key string, value string", operation="apply")
    rows, bad = encode(
        pa.record_batch({"op": ["Delete", "UPSERT"], "key": ["a", "b"], "value": [None, "v"]}),
        write_options,
    )
    assert (rows.column("value").to_pylist(), bad) == ([b"", b"v"], [])
    assert rows.column("op").to_pylist() == [Operation.DELETE, Operation.SET]


def test_rows_with_an_unknown_operation_are_rejected() -> None:
    write_options = options(
        "what string, key string, value string", operation="apply", operationColumn="What"
    )
    good, bad = bad_rows(
        write_options, what=["set", "drop", None], key=["a", "b", "c"], value=["1", "2", "3"]
    )
    assert good == [b"a"]
    assert [(row.status, row.key) for row in bad] == [
        (Status.BAD_ARGUMENT, b"b"),
        (Status.BAD_ARGUMENT, b"c"),
    ]
    # Spark takes any bytes for a string.
    no_text = pa.array([b"\xff", b"Set"]).view(pa.string())
    good, bad = bad_rows(write_options, what=no_text, key=["a", "b"], value=["1", "2"])
    assert (good, [row.key for row in bad]) == ([b"b"], [b"a"])


def test_counters() -> None:
    write_options = options("op string, key string, value string", operation="apply")
    deltas = ["5", "3", "-1", "x", str(2**64 - 1), str(2**64)]
    names = ["increment", "decrement", *["increment"] * 4]
    batch = pa.record_batch({"op": names, "key": list("abcdef"), "value": deltas})
    rows, bad = encode(batch, write_options)
    assert rows.column("value").to_pylist() == [
        CounterDelta(5, 5).encode(),
        CounterDelta(3, 0).encode(),
        CounterDelta(2**64 - 1, 2**64 - 1).encode(),
    ]
    assert [(row.key, row.status) for row in bad] == [
        (key, Status.NOT_A_NUMBER) for key in (b"c", b"d", b"f")
    ]
    _, (row,) = bad_rows(write_options, op=["increment"], key=[None], value=["7"])
    assert (row.status, row.value) == (Status.BAD_KEY, b"7")


def test_numbers_out_of_range_and_times() -> None:
    write_options = options(
        "key string, value string, f long, e timestamp, c long",
        flagsColumn="f",
        expiryColumn="e",
        casColumn="c",
    )
    late = dt.datetime(2200, 1, 1, tzinfo=dt.UTC)
    batch = pa.record_batch(
        {
            "key": list("abcde"),
            "value": list("12345"),
            "f": [7, 2**32, None, 0, 0],
            "e": pa.array([MOMENT, None, None, late, None], UTC_TIME),
            "c": [9, 0, None, 0, -1],
        }
    )
    rows, bad = encode(batch, write_options)
    ((_, chunk),) = published_chunks([rows], 1)
    seconds = int(MOMENT.timestamp())
    assert list(chunk) == [
        Mutation(Operation.SET, b"a", b"1", cas=Cas(9), flags=7, expiry=seconds),
        Mutation(Operation.SET, b"c", b"3"),
    ]
    assert [row.reason.split()[0] for row in bad] == ["flags", "expiry", "cas"]
    write_options = options("key string, value string, e date", expiryColumn="e")
    rows, bad = encode(
        pa.record_batch({"key": ["a"], "value": ["1"], "e": [dt.date(1970, 1, 2)]}), write_options
    )
    assert (rows.column("expiry").to_pylist(), bad) == ([86400], [])


@pytest.mark.parametrize(
    ("kind", "numbers", "seconds"),
    [
        (pa.timestamp("us"), [-(2**63), -1, 0, 2**32 * 10**6 - 1, 2**63 - 1], [0, 2**32 - 1]),
        (UTC_TIME, [-(2**63), -1, 0, 2**32 * 10**6 - 1, 2**63 - 1], [0, 2**32 - 1]),
        (pa.date32(), [-(2**31), -1, 0, 49710, 2**31 - 1], [0, 49710 * 86400]),
    ],
)
def test_an_expiry_time_out_of_range_rejects_its_row_alone(
    kind: pa.DataType, numbers: list[int], seconds: list[int]
) -> None:
    width = pa.int32() if kind == pa.date32() else pa.int64()
    times = pa.array(numbers, width).cast(kind)
    write_options = options("key string, value string, e date", expiryColumn="e")
    batch = pa.record_batch({"key": list("abcde"), "value": list("12345"), "e": times})
    rows, bad = encode(batch, write_options)
    assert rows.column("expiry").to_pylist() == seconds
    assert [(row.key, row.reason.split()[0]) for row in bad] == [
        (key, "expiry") for key in (b"a", b"b", b"e")
    ]


def test_an_expiry_time_in_an_hour_that_comes_twice() -> None:
    """Two of them look the same on a clock in Berlin, in the night in which summer ends."""
    write_options = options("key string, value string, e timestamp", expiryColumn="e")
    first = int(dt.datetime(2026, 10, 25, 0, 30, tzinfo=dt.UTC).timestamp())
    seconds = [first, first + 3600]
    times = pa.array([second * 1_000_000 + 5 for second in seconds], pa.int64())
    columns = {"key": ["a", "b"], "value": ["1", "2"]}
    batch = pa.record_batch({**columns, "e": times.cast(pa.timestamp("us", "Europe/Berlin"))})
    rows, bad = encode(batch, write_options)
    assert (rows.column("expiry").to_pylist(), bad) == (seconds, [])


# Options.


def test_options_as_they_are_by_default() -> None:
    defaults = options()
    assert (defaults.operation, defaults.key_columns) == (Operation.SET, (("key",),))
    assert defaults.value_columns == (("value",),)
    assert (defaults.durability, defaults.value_is_object) == (Durability.PERSISTED, False)
    assert options("KEY string, Value int").key_columns == (("KEY",),)
    several = options("key string, op string, a int, b int", operation="apply", valueColumn="*")
    assert (several.value_columns, several.value_is_object) == ((("key",), ("a",), ("b",)), True)
    swapped = options("key string, a int, b int", valueColumn="b, a")
    assert swapped.value_columns == (("b",), ("a",))


@pytest.mark.parametrize(
    ("schema", "options_given", "sentence"),
    [
        ("key string, value string", {"opration": "insert"}, "perhaps operation was meant"),
        ("key string, value string", {"operation": "merge"}, "not one of upsert, insert"),
        ("id string, value string", {}, "there is no column key; name one with keyColumn: id"),
        ("key string", {}, "there is no column value"),
        ("key string, value interval", {}, "cast it to string"),
        ("key string, value string", {"operationColumn": "key"}, '"operation", "apply"'),
        ("key string, value string, op int", {"operation": "apply"}, "op .* is int, and not text"),
        ("key string, value string", {"flagsColumn": "value"}, "and not a whole number"),
        ("key string, value string", {"expiryColumn": "value"}, "seconds since 1970"),
        ("key string, value string", {"onError": "deadLetter"}, "give both or neither"),
        ("key string, value string", {"deadLetterPath": "/x"}, "give both or neither"),
        (
            "key string, value string",
            {"onError": "deadletter", "deadLetterPath": "s3://x"},
            "not a folder that every executor reaches",
        ),
        *(
            (
                "key string, value string",
                {"onError": "deadletter", "deadLetterPath": path},
                "from its own working directory",
            )
            for path in ("letters", "./letters", "~/letters", "file:letters")
        ),
        ("key string, value string", {"batchBytes": BATCH_BYTES_MIN - 1}, "whole number from"),
        ("key string, value string", {"durability": "disk"}, "not one of memory, persisted"),
        ("key string, value string", {"copies": 2}, "goes with durability replicated or repl"),
        (
            "key string, value string, c long",
            {"operation": "insert", "casColumn": "c"},
            "casColumn and operation=insert exclude each other",
        ),
    ],
)
def test_options_that_are_wrong(schema: str, options_given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        options(schema, **options_given)


def test_a_bucket_is_not_overwritten() -> None:
    with pytest.raises(OptionError, match="write with mode append"):
        WriteOptions.parse({"url": URL}, types.StructType(), overwrite=True)


# Dead letters.


def letter(key: bytes | None, value: bytes | None = None) -> RejectedRow:
    return RejectedRow(Status.BAD_KEY, "because", "set", key, value)


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "letters"
    for attempt in (1, 2):
        letters = DeadLetters(str(folder), "7", attempt)
        rows = [letter(b"%d" % index, b"v") for index in range(25_000)]
        letters.add([*rows, letter(None)])
        names = [path.name for path in folder.iterdir()]
        assert [name for name in names if not name.startswith("_")] == ["part-7.parquet"][
            : attempt - 1
        ]
        letters.finish_file()
        letters.discard_file()
        assert [path.name for path in folder.iterdir()] == ["part-7.parquet"]
    written_rows = parquet.read_table(folder).to_pylist()
    assert len(written_rows) == 25_001
    assert written_rows[-1] == {
        "reason": "because",
        "status": "BAD_KEY",
        "operation": "set",
        "key": None,
        "value": None,
    }


def test_a_task_that_fails_leaves_no_file(tmp_path: Path) -> None:
    letters = DeadLetters(str(tmp_path), "7", 1)
    letters.add([letter(b"k", bytes(1024 * 1024))] * 5)
    assert [path.name for path in tmp_path.iterdir()] == [f"_part-7-{1:016x}.unfinished"]
    letters.discard_file()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    letters = DeadLetters(str(tmp_path / "file" / "letters"), "7", 1)
    letters.add([letter(b"k")])
    with pytest.raises(PipelineError, match=r"file/letters \(deadLetterPath\)") as failed:
        letters.finish_file()
    assert failed.value.code == "UPR_FOLDER"
    letters.discard_file()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_file_is_made_without_rows(tmp_path: Path) -> None:
    letters = DeadLetters(str(tmp_path / "none"), "7", 1)
    letters.finish_file()
    letters.discard_file()
    assert not (tmp_path / "none").exists()
