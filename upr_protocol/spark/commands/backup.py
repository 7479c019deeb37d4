"""Adds an increment to a backup of a bucket; the first one has all that there is.

`python -m upr_protocol.spark backup upr://127.0.0.1:12000/planes /backup/planes`
"""

from __future__ import annotations

import argparse
import sys

from upr_protocol.spark.recipes import backup, command

# It has Ctrl-C end the script from here on: what follows takes long.
# isort: split
from pyspark.sql import SparkSession


def argument_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = command.parser(
        "Adds an increment to a backup: every change since the last one. If the bucket no "
        "longer has changes that the backup has, it ends with code 1 and UPR_ROLLBACK or "
        "UPR_RANGE_GONE: then begin a new backup in another folder."
    )
    parser.add_argument("url", help="upr://host:port/bucket")
    parser.add_argument("folder", help="the backup's folder; made with the first increment")
    return parser


def work(spark: SparkSession, options: argparse.Namespace) -> int:
    """Adds the increment."""
    result = backup(
        spark, options.url, options.folder, options=dict(options.option), on_progress=command.say
    )
    command.print_result(f"increment {result.number} of {result.bucket}: {result.rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
