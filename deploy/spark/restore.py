"""Restores a backup into a bucket.

`upr bucket create planes`, then
`spark-submit deploy/spark/restore.py /backup/planes upr://127.0.0.1:12000/planes`
"""

from __future__ import annotations

import argparse
import sys

from pyspark.sql import SparkSession

from upr_protocol.spark.recipes import command, restore


def arguments() -> argparse.ArgumentParser:
    """What the command line may say."""
    made = command.parser(
        "Applies the increments of a backup, one after the other, to a bucket that is there and "
        "empty. Numbers and CAS values are the bucket's own."
    )
    made.add_argument("folder", help="the backup's folder")
    made.add_argument("url", help="upr://host:port/bucket")
    made.add_argument(
        "--through", type=int, metavar="NUMBER", help="the last increment to apply; all by default"
    )
    made.add_argument(
        "--may-have-contents",
        action="store_true",
        help="restore into a bucket that holds something, as after a restore that was cut off; "
        "keys that the backup does not know stay",
    )
    return made


def work(spark: SparkSession, given: argparse.Namespace) -> int:
    """Restores."""
    found = restore(
        spark,
        given.folder,
        given.url,
        through=given.through,
        may_have_contents=given.may_have_contents,
        options=dict(given.option),
        tell=command.say,
    )
    print(f"{found.rows} rows of {found.increments} increments in {found.seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(arguments(), work))
