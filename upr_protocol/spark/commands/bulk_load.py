"""Loads files into a bucket.

`python -m upr_protocol.spark bulk_load upr://127.0.0.1:12000/planes planes.csv --format csv
--header --key tailnum --value '*' --dead-letters /data/refused`
"""

from __future__ import annotations

import argparse
import sys

from pyspark.sql import DataFrame, SparkSession

from upr_protocol.spark.recipes import bulk_load, command


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
    result = bulk_load(
        frame_of(spark, options),
        options.url,
        key=options.key,
        value=options.value,
        dead_letters=options.dead_letters,
        options=dict(options.option),
    )
    command.print_result(result)
    return command.FAILED if result.failed else 0


def frame_of(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    """The rows of the files."""
    if options.format == "parquet":
        return spark.read.parquet(*options.paths)
    if options.format == "csv":
        return spark.read.csv(options.paths, header=options.header)
    return spark.read.json(options.paths)


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
