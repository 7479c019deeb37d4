"""Keeps a Delta table that holds what a bucket holds.

`python -m upr_protocol.spark latest_state upr://127.0.0.1:12000/planes /data/planes --checkpoint
/data/planes-checkpoint --interval "10 seconds"`
"""

from __future__ import annotations

import argparse
import sys

from upr_protocol.spark.recipes import command, keep_latest_state

# It has Ctrl-C end the script from here on: what follows takes long.
# isort: split
from pyspark.sql import SparkSession


def argument_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = command.parser(
        "Keeps a Delta table equal to a bucket until it is stopped. A restart continues at the "
        "checkpoint."
    )
    parser.add_argument("url", help="upr://host:port/bucket")
    parser.add_argument("table", help="the folder of the table; made when it is missing")
    command.add_query_arguments(parser, "end when the table has all that there is now")
    parser.add_argument(
        "--begin-anew",
        action="store_true",
        help="with a new checkpoint: drop the rows that the table has",
    )
    parser.add_argument(
        "--app-id",
        help="over Spark Connect: what stands for the query in the table's commits; another one "
        "for each checkpoint",
    )
    return parser


def work(spark: SparkSession, options: argparse.Namespace) -> int:
    """Runs the query to its end."""
    query = keep_latest_state(
        spark,
        options.url,
        options.table,
        options.checkpoint,
        app_id=options.app_id,
        begin_anew=options.begin_anew,
        on_progress=command.say,
        **command.query_settings(options),
    )
    return command.run_query(query)


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
