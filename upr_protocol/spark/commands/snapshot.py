"""Writes what a bucket holds to Parquet files.

`python -m upr_protocol.spark snapshot upr://127.0.0.1:12000/planes /data/planes-2024-05-01`
"""

from __future__ import annotations

import argparse
import sys

from upr_protocol.spark.recipes import command, snapshot

# It has Ctrl-C end the script from here on: what follows takes long.
# isort: split
from pyspark.sql import SparkSession


def argument_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = command.parser(
        "Writes the contents of a bucket at one moment to a folder: data/*.parquet, and "
        "manifest.json last. A folder without manifest.json is incomplete."
    )
    parser.add_argument("url", help="upr://host:port/bucket")
    parser.add_argument("folder", help="a folder that is empty or not there")
    parser.add_argument(
        "--overwrite", action="store_true", help="remove the snapshot that is in the folder first"
    )
    return parser


def work(spark: SparkSession, options: argparse.Namespace) -> int:
    """Writes the snapshot."""
    result = snapshot(
        spark,
        options.url,
        options.folder,
        overwrite=options.overwrite,
        options=dict(options.option),
        on_progress=command.say,
    )
    command.print_result(f"{result.rows} rows of {result.bucket} in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
