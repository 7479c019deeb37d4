"""Keeps a Delta table that holds what a bucket holds.

`spark-submit deploy/spark/latest_state.py upr://127.0.0.1:12000/planes /data/planes --checkpoint
/data/planes-checkpoint --interval "10 seconds"`
"""

from __future__ import annotations

import argparse
import sys

from pyspark.sql import SparkSession

from upr_protocol.spark.recipes import command, keep_latest_state


def arguments() -> argparse.ArgumentParser:
    """What the command line may say."""
    made = command.parser(
        "Keeps a Delta table that holds what a bucket holds, until it is stopped. It may be "
        "started again, and goes on where it was."
    )
    made.add_argument("url", help="upr://host:port/bucket")
    made.add_argument("table", help="the folder of the table; made when it is missing")
    made.add_argument("--checkpoint", required=True, help="where the query keeps how far it is")
    trigger = made.add_mutually_exclusive_group()
    trigger.add_argument("--interval", help='how often a batch begins, as "10 seconds"')
    trigger.add_argument(
        "--once", action="store_true", help="end when the table has all that there is now"
    )
    made.add_argument(
        "--begin-anew",
        action="store_true",
        help="with a new checkpoint: drop the rows that the table has",
    )
    return made


def work(spark: SparkSession, given: argparse.Namespace) -> int:
    """Runs the query to its end."""
    query = keep_latest_state(
        spark,
        given.url,
        given.table,
        given.checkpoint,
        available_now=given.once,
        interval=given.interval,
        options=dict(given.option),
        begin_anew=given.begin_anew,
        tell=command.say,
    )
    command.say(f"the query runs: {query.id}")
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return 0


if __name__ == "__main__":
    sys.exit(command.run(arguments(), work))
