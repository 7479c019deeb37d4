"""Writes what a bucket holds to Parquet files.

`spark-submit deploy/spark/snapshot.py upr://127.0.0.1:12000/planes /data/planes-2024-05-01`
"""

from __future__ import annotations

import argparse
import sys

from pyspark.sql import SparkSession

from upr_protocol.spark.recipes import command, snapshot


def arguments() -> argparse.ArgumentParser:
    """What the command line may say."""
    made = command.parser(
        "Writes what a bucket holds at one moment to a folder: data/*.parquet, and manifest.json, "
        "which is written last. A folder without it is no whole snapshot."
    )
    made.add_argument("url", help="upr://host:port/bucket")
    made.add_argument("folder", help="a folder that is empty or not there")
    made.add_argument(
        "--overwrite", action="store_true", help="remove the snapshot that is in the folder first"
    )
    return made


def work(spark: SparkSession, given: argparse.Namespace) -> int:
    """Writes the snapshot."""
    found = snapshot(
        spark,
        given.url,
        given.folder,
        overwrite=given.overwrite,
        options=dict(given.option),
        tell=command.say,
    )
    print(f"{found.rows} rows of {found.bucket} in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(arguments(), work))
