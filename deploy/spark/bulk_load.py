"""Loads files into a bucket.

`spark-submit deploy/spark/bulk_load.py upr://127.0.0.1:12000/planes planes.csv --format csv
--header --key tailnum --value '*' --dead-letters /data/refused`
"""

from __future__ import annotations

import argparse
import sys

from pyspark.sql import DataFrame, SparkSession

from upr_protocol.spark.recipes import bulk_load, command


def arguments() -> argparse.ArgumentParser:
    """What the command line may say."""
    made = command.parser(
        "Loads files into a bucket. It ends with code 1 when rows are among the dead letters."
    )
    made.add_argument("url", help="upr://host:port/bucket")
    made.add_argument("paths", nargs="+", help="files or folders")
    made.add_argument(
        "--format",
        choices=("parquet", "csv", "json"),
        default="parquet",
        help="json has an object a line (default: %(default)s)",
    )
    made.add_argument("--header", action="store_true", help="a CSV file's first line has the names")
    made.add_argument("--key", default="key", help="the column of the keys (default: %(default)s)")
    made.add_argument(
        "--value",
        default="value",
        help="the column of the values; several, with commas, or * for all but the key, make a "
        "JSON object (default: %(default)s)",
    )
    made.add_argument(
        "--dead-letters", metavar="FOLDER", help="put rows that are refused there, and go on"
    )
    return made


def work(spark: SparkSession, given: argparse.Namespace) -> int:
    """Loads."""
    found = bulk_load(
        frame_of(spark, given),
        given.url,
        key=given.key,
        value=given.value,
        dead_letters=given.dead_letters,
        options=dict(given.option),
    )
    print(found)
    return command.FAILED if found.failed else 0


def frame_of(spark: SparkSession, given: argparse.Namespace) -> DataFrame:
    """The rows of the files."""
    if given.format == "parquet":
        return spark.read.parquet(*given.paths)
    if given.format == "csv":
        return spark.read.csv(given.paths, header=given.header)
    return spark.read.json(given.paths)


if __name__ == "__main__":
    sys.exit(command.run(arguments(), work))
