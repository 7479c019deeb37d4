"""Loads files into a bucket.

`python -m upr_protocol.spark bulk_load upr://127.0.0.1:12000/planes planes.csv --format csv
--header --key tailnum --value '*' --dead-letters /data/refused`
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.recipes import bulk_load, command

# It has Ctrl-C end the script from here on: what follows takes long.
# isort: split
import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

_CSV: Final = {
    "escape": '"',
    "unescapedQuoteHandling": "RAISE_ERROR",
    "mode": "FAILFAST",
    "enforceSchema": "false",
}
"""As RFC 4180 has it. Otherwise Spark leaves the quotes around a value that has quotes in it, drops
values that a row has too many, and takes the columns of a second file by their place."""

_COLUMNS_LEFT_OUT: Final = frozenset(
    {"operationcolumn", "flagscolumn", "expirycolumn", "cascolumn"}
)
"""Options that name columns which `*` leaves out of the values, in lower case."""

_BLANKS: Final = " \t\r"
"""What may stand around an object on its line."""

_UNREADABLE_FILE: Final = re.compile(r"error while reading file (.+?)\.\s")
_CAUSE: Final = re.compile(r"^Caused by: \S+: (.+?)(?: SQLSTATE.*)?$", re.MULTILINE)
_CAUSE_CHARS_MAX: Final = 200

_FILE_ADVICE: Final = {
    "csv": "In CSV each row has as many values as there are columns, a quote in a value is "
    "doubled, a value has no line end, and all files have the same first line",
    "json": "If the files are not JSON, name their format with --format",
    "parquet": "If the files are not Parquet, name their format with --format",
}
"""What to look for where a file cannot be read, by the format that it was taken for."""


def argument_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = command.parser(
        "Loads files into a bucket. It ends with code 1 when rows are among the dead letters."
    )
    parser.add_argument("url", help="upr://host:port/bucket")
    parser.add_argument("paths", nargs="+", help="files or folders")
    parser.add_argument(
        "--format",
        choices=("parquet", "csv", "json"),
        default="parquet",
        help="json has an object a line (default: %(default)s)",
    )
    parser.add_argument(
        "--header", action="store_true", help="a CSV file's first line has the names"
    )
    parser.add_argument(
        "--key", default="key", help="the column of the keys (default: %(default)s)"
    )
    parser.add_argument(
        "--value",
        default="value",
        help="the column of the values; several, with commas, or * for the whole row, make a "
        "JSON object (default: %(default)s)",
    )
    parser.add_argument(
        "--dead-letters", metavar="FOLDER", help="write refused rows there, and continue"
    )
    return parser


def work(spark: SparkSession, options: argparse.Namespace) -> int:
    """Loads."""
    with plain_file_errors(options.format):
        frame, value = frame_of(spark, options)
        result = bulk_load(
            frame,
            options.url,
            key=options.key,
            value=value,
            dead_letters=options.dead_letters,
            options=dict(options.option),
        )
    command.print_result(result)
    return command.FAILED if result.failed else 0


@contextmanager
def plain_file_errors(file_format: str) -> Iterator[None]:
    """Says which file cannot be read, and why: Spark's error is a page of Java.

    Args:
        file_format: What the files are taken for, a choice of `--format`.

    Raises:
        PipelineError: A file cannot be read.
    """
    try:
        yield
    except Exception as error:
        # Some come as Spark's, some as those of the bridge to the JVM.
        match = _UNREADABLE_FILE.search(str(error))
        if match is None:
            raise
        causes = _CAUSE.findall(str(error))
        cause = f": {causes[-1][:_CAUSE_CHARS_MAX]}" if causes else ""
        raise PipelineError(
            "UPR_ROWS_REFUSED",
            f"{match[1]} cannot be read{cause}. {_FILE_ADVICE[file_format]}. Rows already written "
            "stay",
        ) from error


def frame_of(spark: SparkSession, options: argparse.Namespace) -> tuple[DataFrame, str]:
    """The rows of the files, and the column of the values.

    Raises:
        PipelineError: CSV is not UTF-8. Or JSON has lines that are no objects, and values are whole
            rows.
    """
    if options.format == "parquet":
        return spark.read.parquet(*options.paths), options.value
    if options.format == "csv":
        _check_utf8(spark, options.paths)
        frame = spark.read.options(**_CSV).csv(options.paths, header=options.header)
        return frame, options.value
    frame = spark.read.json(options.paths)
    if options.value.strip() != "*":
        return frame, options.value
    lines = _object_lines(spark, options.paths)
    # Spark adds this column if a line is no object to it. It would be a field of all values.
    if spark.conf.get("spark.sql.columnNameOfCorruptRecord") in frame.columns:
        raise _no_objects_error(", ".join(options.paths))
    write_options = {name.lower(): text.lower() for name, text in options.option}
    if (
        write_options.get("operation") == "apply"
        or _COLUMNS_LEFT_OUT & write_options.keys()
        # The names of folders, as `year=2024`, are columns, too.
        or len(spark.read.text(options.paths).columns) > 1
    ):
        return frame, options.value
    # The values are the objects as they are. From Spark's columns, each would have the fields of
    # all others, as nulls; whole numbers a fraction, where others have one; and long ones be null.
    value_column = "value"
    while value_column in map(str.lower, frame.columns):
        value_column += "_"
    fields = F.from_json("line", frame.schema)
    rows = lines.select(fields.alias("fields"), F.col("line").alias(value_column))
    return rows.select("fields.*", value_column), value_column


def _object_lines(spark: SparkSession, paths: list[str]) -> DataFrame:
    """The lines that are not empty, as the column `line`.

    Raises:
        PipelineError: One is no JSON object.
    """
    line = F.btrim("value", F.lit(_BLANKS))
    lines = spark.read.text(paths).select(line.alias("line"), F.input_file_name().alias("file"))
    lines = lines.where("line != ''")
    # Arrow would need pandas for this.
    is_object = F.udf(_is_object, "boolean", useArrow=False)
    bad_line = lines.where(~is_object(F.col("line").cast("binary"))).select("file").first()
    if bad_line is not None:
        raise _no_objects_error(bad_line["file"])
    return lines.select("line")


def _is_object(line: bytearray) -> bool:
    """Whether a line is one JSON object in UTF-8. Spark would take two as the first of them."""
    try:
        line.decode()
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return False
    return True


def _no_objects_error(where: str) -> PipelineError:
    return PipelineError(
        "UPR_ROWS_REFUSED",
        f"{where}: some lines are no JSON objects: correct or remove them. Nothing was written",
    )


def _check_utf8(spark: SparkSession, paths: list[str]) -> None:
    """Makes sure that files are UTF-8: Spark would put U+FFFD in place of what is not.

    Raises:
        PipelineError: One is not.
    """
    lines = spark.read.text(paths).where(~F.is_valid_utf8("value"))
    bad_file = lines.select(F.input_file_name()).first()
    if bad_file is not None:
        raise PipelineError(
            "UPR_ROWS_REFUSED",
            f"{bad_file[0]} has a line that is not UTF-8: convert the file, as with iconv, or read "
            "it with spark.read.csv and its option encoding. Nothing was written",
        )


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
