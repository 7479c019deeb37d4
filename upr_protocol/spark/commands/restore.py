"""Restores a backup into a bucket.

`upr bucket create planes`, then
`python -m upr_protocol.spark restore /backup/planes upr://127.0.0.1:12000/planes`
"""

from __future__ import annotations

import argparse
import sys

from upr_protocol.spark.recipes import command, restore

# It has Ctrl-C end the script from here on: what follows takes long.
# isort: split
from pyspark.sql import SparkSession


def argument_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = command.parser(
        "Applies the increments of a backup, one after the other, to a bucket that is there and "
        "empty. Numbers and CAS values are the bucket's own."
    )
    parser.add_argument("folder", help="the backup's folder")
    parser.add_argument("url", help="upr://host:port/bucket")
    parser.add_argument(
        "--through", type=int, metavar="NUMBER", help="the last increment to apply; all by default"
    )
    parser.add_argument(
        "--may-have-contents",
        action="store_true",
        help="restore into a bucket that holds something, as after a restore that was cut off; "
        "keys that the backup does not know stay",
    )
    return parser


def work(spark: SparkSession, options: argparse.Namespace) -> int:
    """Restores."""
    result = restore(
        spark,
        options.folder,
        options.url,
        through=options.through,
        may_have_contents=options.may_have_contents,
        options=dict(options.option),
        on_progress=command.say,
    )
    command.print_result(
        f"{result.rows} rows of {result.increments} increments in {result.seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
