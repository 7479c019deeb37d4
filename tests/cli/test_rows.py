from __future__ import annotations

import datetime as dt
import io
import json
import sys
from decimal import Decimal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.endless import endless_input
from upr_protocol.cli.rows import BadRow, FileError, KeyMaker, Row, read_rows
from upr_protocol.limits import VALUE_BYTES_MAX


def read(data: bytes, form: str, null: tuple[str, ...] = ()) -> list[Row | BadRow]:
    return list(read_rows(io.BytesIO(data), form, null)[1])


def values(data: bytes, form: str, null: tuple[str, ...] = ()) -> list[object]:
    rows = read(data, form, null)
    assert all(isinstance(row, Row) for row in rows)
    return [msgspec.json.decode(row.json) for row in rows if isinstance(row, Row)]


# CSV.


def test_csv_rows_are_objects_of_texts() -> None:
    columns, rows = read_rows(io.BytesIO(b"a,b\n1,x y\n007,\n"), "csv")
    assert columns == ["a", "b"]
    assert list(rows) == [
        Row(2, {"a": "1", "b": "x y"}, b'{"a":"1","b":"x y"}'),
        Row(3, {"a": "007", "b": ""}, b'{"a":"007","b":""}'),
    ]


def test_csv_lines_are_counted_through_quotes_and_blank_lines() -> None:
    rows = read(b'a,b\r\n"two\r\nlines",1\r\n\r\nx,2\r\n', "csv")
    assert [(row.line, row.fields["b"]) for row in rows if isinstance(row, Row)] == [
        (2, "1"),
        (5, "2"),
    ]


def test_csv_a_byte_order_mark_is_not_part_of_the_first_column_name() -> None:
    assert read_rows(io.BytesIO(b"\xef\xbb\xbfa,b\n"), "csv")[0] == ["a", "b"]
    assert read_rows(io.BytesIO(b'\xef\xbb\xbf"a,x",b\n'), "csv")[0] == ["a,x", "b"]


def test_csv_null_texts_become_null() -> None:
    assert values(b"a,b\nNA,1\n-,NAN\n", "csv", ("NA", "-")) == [
        {"a": None, "b": "1"},
        {"a": None, "b": "NAN"},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1", "1 values for 2 columns"),
        (b"1,2,3", "3 values for 2 columns"),
        (b'1,"2" x', "not CSV"),
        (b"1,\xff", "not UTF-8"),
    ],
)
def test_csv_a_bad_row_does_not_affect_the_next(line: bytes, reason: str) -> None:
    bad, good = read(b"a,b\n" + line + b"\n3,4\n", "csv")
    assert isinstance(bad, BadRow)
    assert bad.line == 2
    assert reason in bad.reason
    assert good == Row(3, {"a": "3", "b": "4"}, b'{"a":"3","b":"4"}')


def test_csv_an_unclosed_quote_is_reported_where_it_opened() -> None:
    good, bad = read(b'a\n1\n"2\n3\n', "csv")
    assert isinstance(good, Row)
    assert isinstance(bad, BadRow)
    assert bad.line == 3


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "empty"),
        (b"a,b,a\n1,2,3\n", "two columns are named 'a'"),
        (b'"a\n', "not a CSV header"),
    ],
)
def test_csv_without_a_usable_header_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(FileError, match=sentence):
        read(data, "csv")


def test_csv_fields_may_be_longer_than_pythons_default_limit() -> None:
    assert values(b"a\n" + b"x" * 200_000 + b"\n", "csv") == [{"a": "x" * 200_000}]


# Lines without end.


@pytest.mark.parametrize(("form", "first_line"), [("csv", b"a\n"), ("jsonl", b'{"a":1}\n')])
def test_a_line_that_does_not_end_is_not_read_into_memory(form: str, first_line: bytes) -> None:
    _, rows = read_rows(endless_input(first_line, 5 * VALUE_BYTES_MAX), form)
    bad = next(row for row in rows if isinstance(row, BadRow))
    assert bad.line == 2
    assert bad.reason.endswith("it has more than 80 MiB, the limit of a line")


def test_csv_a_header_that_does_not_end_is_refused() -> None:
    with pytest.raises(FileError, match="not a CSV header: it has more than 80 MiB"):
        read_rows(endless_input(b"a", 5 * VALUE_BYTES_MAX), "csv")


@pytest.mark.parametrize(("form", "header"), [("csv", b"a\n"), ("jsonl", b"\n")])
def test_a_line_that_is_too_long_does_not_affect_the_next(
    form: str, header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr_protocol.cli.rows._LINE_BYTES_MAX", 9)
    good_line = b"1\n" if form == "csv" else b'{"a":"1"}\n'
    rows = read(header + good_line + b"x" * 100 + b"\n" + good_line + b"x" * 100, form)
    assert [row.line for row in rows] == [2, 3, 4, 5]
    assert [isinstance(row, Row) for row in rows] == [True, False, True, False]


# JSON Lines.


def test_json_lines_keep_their_text() -> None:
    data = b'{"a": 1.10000000000000000000001, "b": "\\u00e9"}\n\n  {"a":null}\r\n{"a":2}'
    assert read(data, "jsonl") == [
        Row(1, {"a": 1.1, "b": "é"}, b'{"a": 1.10000000000000000000001, "b": "\\u00e9"}'),
        Row(3, {"a": None}, b'{"a":null}'),
        Row(4, {"a": 2}, b'{"a":2}'),
    ]


def test_json_lines_null_texts_become_null() -> None:
    assert values(b'{"a":"NA","b":["NA"]}', "jsonl", ("NA",)) == [{"a": None, "b": ["NA"]}]


def test_json_lines_without_a_null_text_keep_their_text() -> None:
    data = b'{"a": "x", "b": 1.10000000000000000000001}'
    assert read(data, "jsonl", ("NA",)) == [Row(1, {"a": "x", "b": 1.1}, data)]


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b"3", b'{"a":"\xff"}', b"[" * 100_000, b"\xef\xbb\xbf{}", b"nul"]
)
def test_json_lines_a_bad_row_does_not_affect_the_next(line: bytes) -> None:
    bad, good = read(line + b'\n{"a":1}\n', "jsonl")
    assert isinstance(bad, BadRow)
    assert bad.line == 1
    assert good == Row(2, {"a": 1}, b'{"a":1}')


@given(st.lists(st.binary(max_size=20)))
def test_json_lines_of_any_bytes_are_rows_or_bad_rows(lines: list[bytes]) -> None:
    data = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines)
    for row in read(data, "jsonl"):
        assert isinstance(row, BadRow) or msgspec.json.decode(row.json) == row.fields
    for row in read(b"a,b\n" + data, "csv"):
        assert isinstance(row, BadRow) or json.loads(row.json) == row.fields


# Parquet.


def parquet(table: dict[str, list[object]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink)
    return sink.getvalue()


def test_parquet_values_become_json() -> None:
    day = dt.date(2013, 1, 2)
    data = parquet(
        {
            "n": [1, None],
            "x": [0.5, float("nan")],
            "day": [day, None],
            "price": [Decimal("1.10"), None],
            "raw": [b"\xff", None],
            "list": [[1, 2], []],
        }
    )
    columns, rows = read_rows(io.BytesIO(data), "parquet")
    assert columns == ["n", "x", "day", "price", "raw", "list"]
    first, second = rows
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert first.fields["day"] == day
    assert msgspec.json.decode(first.json) == {
        "n": 1,
        "x": 0.5,
        "day": "2013-01-02",
        "price": "1.10",
        "raw": "/w==",
        "list": [1, 2],
    }
    assert (second.line, msgspec.json.decode(second.json)["x"]) == (2, None)


def test_parquet_a_value_that_python_cannot_hold_does_not_affect_the_next() -> None:
    days = pa.array([0, 2**31 - 1, 1], pa.int32()).cast(pa.date32())
    sink = io.BytesIO()
    pq.write_table(pa.table({"n": [1, 2, 3], "day": days}), sink)
    first, bad, last = read(sink.getvalue(), "parquet")
    assert isinstance(bad, BadRow)
    assert (bad.line, bad.reason.partition(":")[0]) == (2, "Python cannot hold it")
    assert first == Row(1, {"n": 1, "day": dt.date(1970, 1, 1)}, b'{"n":1,"day":"1970-01-01"}')
    assert last == Row(3, {"n": 3, "day": dt.date(1970, 1, 2)}, b'{"n":3,"day":"1970-01-02"}')


def test_parquet_times_in_nanoseconds_become_json() -> None:
    """Where pandas is installed, they are classes of its own; pandas writes all times like this."""
    pytest.importorskip("pandas")
    noon, day = dt.datetime(2013, 1, 2, 12, tzinfo=dt.UTC), dt.timedelta(1)
    columns: dict[str, object] = {
        "utc": pa.array([noon], pa.timestamp("ns", "UTC")),
        "local": pa.array([1_357_128_000_000_000_001], pa.timestamp("ns")),
        "took": pa.array([day], pa.duration("ns")),
        "list": pa.array([[noon]], pa.list_(pa.timestamp("ns", "UTC"))),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    assert values(sink.getvalue(), "parquet") == [
        {
            "utc": "2013-01-02T12:00:00Z",
            "local": "2013-01-02T12:00:00.000000001",
            "took": "P1DT0H0M0S",
            "list": ["2013-01-02T12:00:00Z"],
        }
    ]


def test_parquet_null_texts_become_null() -> None:
    assert values(parquet({"a": ["NA", "b"]}), "parquet", ("NA",)) == [{"a": None}, {"a": "b"}]


def test_a_file_that_is_not_parquet_is_refused() -> None:
    with pytest.raises(FileError, match="not a Parquet file"):
        read(b"a,b\n1,2\n", "parquet")


def test_parquet_with_two_columns_of_one_name_is_refused() -> None:
    """A row would have only the last of them."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), sink)
    with pytest.raises(FileError, match="two columns are named 'a'"):
        read(sink.getvalue(), "parquet")


def test_a_parquet_file_with_a_column_name_that_is_not_utf_8_is_refused() -> None:
    data = parquet({"name": ["a"]}).replace(b"name", b"\xffame")
    with pytest.raises(FileError, match="not a Parquet file"):
        read(data, "parquet")


def test_a_damaged_parquet_file_is_refused() -> None:
    data = bytearray(parquet({"a": [str(n) for n in range(10_000)]}))
    data[100:2000] = bytes(1900)
    with pytest.raises(FileError, match="damaged after row 0"):
        read(bytes(data), "parquet")


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FileError, match=r"upr-server\[arrow\]"):
        read(b"", "parquet")


def test_a_key_has_its_columns_in_the_requested_order() -> None:
    fields = {"b": "x", "a": 7, "c": "no"}
    assert KeyMaker(["a"]).key(fields) == b"7"
    assert KeyMaker(["b", "a"]).key(fields) == b"x:7"
    assert KeyMaker(["b", "a"], "/").key(fields) == b"x/7"
    # A command line may have any bytes.
    assert KeyMaker(["b", "a"], "\udcff").key(fields) == b"x\xff7"


@pytest.mark.parametrize("value", [None, "", b""])
def test_a_row_with_a_missing_or_empty_part_has_no_key(value: object) -> None:
    assert KeyMaker(["a", "b"]).key({"a": "x", "b": value}) is None


def test_a_row_without_the_column_has_no_key() -> None:
    assert KeyMaker(["a"]).key({"b": 1}) is None


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (0, b"0"),
        (-3, b"-3"),
        (1.5, b"1.5"),
        (True, b"true"),
        (False, b"false"),
        ("é", "é".encode()),
        (b"\xff\x00", b"\xff\x00"),
        (dt.date(2013, 1, 2), b"2013-01-02"),
        (dt.datetime(2013, 1, 2, 3, tzinfo=dt.UTC), b"2013-01-02T03:00:00+00:00"),
    ],
)
def test_values_of_many_types_become_keys(value: object, key: bytes) -> None:
    assert KeyMaker(["a"]).key({"a": value}) == key


@pytest.mark.parametrize("value", [[1], {"x": 1}])
def test_lists_and_objects_cannot_be_keys(value: object) -> None:
    with pytest.raises(ValueError, match="a holds a"):
        KeyMaker(["a"]).key({"a": value})


def test_a_key_is_at_most_250_bytes() -> None:
    assert KeyMaker(["a"]).key({"a": "x" * 250}) == b"x" * 250
    with pytest.raises(ValueError, match="has 251 bytes"):
        KeyMaker(["a"]).key({"a": "x" * 251})
