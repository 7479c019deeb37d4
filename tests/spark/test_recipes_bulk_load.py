"""Loading a DataFrame, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from tests.spark.bucket import FAR, Stored, contents
from upr_protocol.cli import main
from upr_protocol.spark.commands.bulk_load import argument_parser, frame_of, plain_file_errors
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.recipes import bulk_load

NewBucket = Callable[..., str]


def test_every_row_is_written_or_reported(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    letters = tmp_path / "letters"
    lines: list[str] = []
    rows = [(f"k{index}", f"v{index}", index, FAR) for index in range(50)]
    # Keys that are empty, or missing, or too long.
    rows += [("", "x", 0, 0), (None, "x", 0, 0), ("y" * 251, "x", 0, 0)]  # type: ignore[list-item]
    frame = spark.createDataFrame(rows, "id string, text string, f int, e long")
    columns = {"flagsColumn": "f", "expiryColumn": "e"}
    for options in (columns, *[{**columns, "writeId": "load"}] * 2):
        # Each load counts its own dead letters, also those in the place of another's.
        loaded = bulk_load(
            frame,
            url,
            key="id",
            value="text",
            dead_letters=letters,
            options=options,
            on_progress=lines.append,
        )
        assert (loaded.rows, loaded.failed) == (50, 3)
        assert loaded.rows_per_s == loaded.rows / loaded.seconds > 0
    assert "50 rows written, 3 failed" in lines[0]
    assert contents(url) == {
        b"k%d" % index: Stored(b"v%d" % index, index, FAR) for index in range(50)
    }
    assert spark.read.parquet(str(letters)).count() == 6


def test_a_load_by_spark_and_one_by_the_command_leave_the_same(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    """Both keep the columns of the key in the value, and join several of them alike."""
    path = tmp_path / "flights.csv"
    path.write_text('carrier,flight,seats\nUA,1545,180\nAA,1141,"a ""b"",ä"\n')
    frame = spark.read.csv(str(path), header=True, escape='"')
    for columns in (["flight"], ["carrier", "flight"]):
        by_spark, by_command = new_bucket(), new_bucket()
        bulk_load(frame, by_spark, key=",".join(columns), value="*")
        words = [word for column in columns for word in ("--key", column)]
        result = CliRunner().invoke(main, ["load", by_command, str(path), *words])
        assert result.exit_code == 0, result.output
        assert contents(by_spark) == contents(by_command)
        first = next(iter(sorted(contents(by_spark).items())))
        key = b"1141" if columns == ["flight"] else b"AA:1141"
        value = '{"carrier":"AA","flight":"1141","seats":"a \\"b\\",ä"}'
        assert first == (key, Stored(value.encode(), 0, 0))


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (['key,value\n1,"a ""b"",\\"\n2,\n', "key,value\n3,c\n"], None),
        (["key,value\n1,a,b\n"], "Malformed CSV record: 1,a,b"),
        (["key,value\n1\n"], "Malformed CSV record: 1"),
        (['key,value\n1,"a\nb"\n'], "Malformed CSV record"),
        (['key,value\n1,"a \\"b\\""\n'], "Unescaped quote character"),
        (["key,value\n1,a\n", "value,key\na,1\n"], "CSV header does not conform"),
    ],
)
def test_the_command_reads_csv_as_it_is_or_says_why_not(
    spark: SparkSession, tmp_path: Path, texts: list[str], reason: str | None
) -> None:
    """It left quotes around values, cut rows that were too long, and mixed up columns."""
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.csv").write_text(text)
    words = ["upr://h/b", str(tmp_path), "--format", "csv", "--header"]
    frame, _ = frame_of(spark, argument_parser().parse_args(words))
    if reason is None:
        rows = {(row["key"], row["value"]) for row in frame.collect()}
        assert rows == {("1", 'a "b",\\'), ("2", None), ("3", "c")}
        return
    with pytest.raises(PipelineError, match=reason) as caught, plain_file_errors("csv"):
        frame.collect()
    assert caught.value.code == "UPR_ROWS_REFUSED"
    assert f"{tmp_path}/{len(texts) - 1}.csv" in str(caught.value)


def test_a_file_that_is_not_parquet_is_told_in_a_sentence(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It was a page of Java, which `--format csv` would have spared."""
    path = tmp_path / "planes.csv"
    path.write_text("key,value\n1,a\n")
    options = argument_parser().parse_args(["upr://h/b", str(path)])
    with (
        pytest.raises(PipelineError, match="is not a Parquet file") as caught,
        plain_file_errors(options.format),
    ):
        frame_of(spark, options)
    assert "--format" in str(caught.value)


def test_csv_that_is_not_utf_8_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark puts U+FFFD in place of such bytes."""
    (tmp_path / "0.csv").write_text("key,value\n1,é\n")
    (tmp_path / "1.csv").write_bytes("key,value\n1,é\n".encode("latin-1"))
    words = ["upr://h/b", str(tmp_path), "--format", "csv", "--header"]
    with pytest.raises(PipelineError, match=r"1\.csv has a line that is not UTF-8") as caught:
        frame_of(spark, argument_parser().parse_args(words))
    assert caught.value.code == "UPR_ROWS_REFUSED"


def test_values_have_no_field_for_a_line_that_is_no_json(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The line itself has no key, and is among the dead letters."""
    path = tmp_path / "planes.json"
    path.write_text('{"key": "a", "seats": 1}\nno JSON\n')
    words = ["upr://h/b", str(path), "--format", "json", "--value"]
    with pytest.raises(PipelineError, match=r"planes.json: some lines are no JSON objects"):
        frame_of(spark, argument_parser().parse_args([*words, "*"]))
    frame, value = frame_of(spark, argument_parser().parse_args([*words, "seats"]))
    assert value == "seats"
    assert [row["key"] for row in frame.collect()] == ["a", None]


def test_json_objects_become_values_as_they_are(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    """Whole numbers had a fraction where others have one, and each had the fields of all others."""
    objects = {
        "a": '{"key": "a", "seats": 1, "value": {"x": 1e3}}',
        "b": '{"seats":1.5,"key":"b","\\u0061": "\xfc"}',
        "c": '{"key":"c","long":123456789012345678901234567890}',
    }
    path = tmp_path / "planes.jsonl"
    path.write_text(f"{objects['a']}\r\n\n \t{objects['b']} \n{objects['c']}", newline="")
    by_spark, by_command = new_bucket(), new_bucket()
    words = [by_spark, str(path), "--format", "json", "--value", "*"]
    options = argument_parser().parse_args(words)
    frame, value = frame_of(spark, options)
    bulk_load(frame, by_spark, value=value)
    assert contents(by_spark) == {
        key.encode(): Stored(text.encode(), 0, 0) for key, text in objects.items()
    }
    result = CliRunner().invoke(main, ["load", by_command, str(path), "--key", "key"])
    assert result.exit_code == 0, result.output
    assert contents(by_command) == contents(by_spark)
    # `*` leaves this column out.
    options = argument_parser().parse_args([*words, "--option", "flagsColumn=seats"])
    assert frame_of(spark, options)[1] == "*"


@pytest.mark.parametrize("line", ['{"key": "a"} {"key": "b"}', '[{"key": "a"}]', "1", "\xff"])
def test_a_line_that_is_not_one_object_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path, line: str
) -> None:
    """Spark takes the first of two, and each of an array."""
    (tmp_path / "good.jsonl").write_text('{"key": "a"}\n')
    (tmp_path / "bad.jsonl").write_text(f'{{"key": "b"}}\n{line}\n', "latin-1")
    words = ["upr://h/b", str(tmp_path), "--format", "json", "--value", "*"]
    with pytest.raises(PipelineError, match=r"bad.jsonl: some lines are no JSON objects") as caught:
        frame_of(spark, argument_parser().parse_args(words))
    assert caught.value.code == "UPR_ROWS_REFUSED"


def test_without_a_folder_for_them_a_bad_row_fails_the_load(
    spark: SparkSession, new_bucket: NewBucket
) -> None:
    url = new_bucket()
    frame = spark.sql("SELECT '' AS key, 'x' AS value")
    with pytest.raises(PipelineError, match="BAD_KEY") as caught:
        bulk_load(frame, url)
    assert caught.value.code == "UPR_ROWS_REFUSED"
    with pytest.raises(OptionError, match="no column id"):
        bulk_load(frame, url, key="id")
    loaded = bulk_load(frame.where("false"), url)
    assert (loaded.rows, loaded.failed) == (0, 0)
    assert contents(url) == {}
