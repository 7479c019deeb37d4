"""Fills a bucket with what is computed from another.

`python -m upr_protocol.spark reprocess upr://127.0.0.1:12000/planes upr://127.0.0.1:12000/large
--schema 'key STRING, value STRUCT<seats: INT, model: STRING>' --where 'value.seats > 300'
--checkpoint /data/large-checkpoint`
"""

from __future__ import annotations

import argparse
import sys

from upr_protocol.spark.recipes import command, reprocess
from upr_protocol.spark.recipes.reprocess import TEXT_SCHEMA

# It has Ctrl-C end the script from here on: what follows takes long.
# isort: split
from pyspark.sql import SparkSession


def argument_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = command.parser(
        "Has a bucket hold what is computed from the items of another, until it is stopped. A "
        "restart continues at the checkpoint."
    )
    parser.add_argument("url", help="the bucket that is read: upr://host:port/bucket")
    parser.add_argument("target", help="the bucket that is written; nothing else writes to it")
    parser.add_argument(
        "--key",
        default="key",
        help="an SQL expression of the key in the target; it uses key alone (default: %(default)s)",
    )
    parser.add_argument(
        "--value",
        default="value",
        help="an SQL expression of the value; a struct becomes a JSON object (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--where", default="true", help="an SQL expression: which items the target has"
    )
    parser.add_argument(
        "--schema",
        default=TEXT_SCHEMA,
        help="how keys and values are read (default: %(default)s)",
    )
    command.add_query_arguments(parser, "end when the target has all that there is now")
    command.add_write_option(parser)
    return parser


def work(spark: SparkSession, options: argparse.Namespace) -> int:
    """Runs the query to its end."""
    return command.run_query(
        reprocess(
            spark,
            options.url,
            options.target,
            options.checkpoint,
            key=options.key,
            value=options.value,
            where=options.where,
            schema=options.schema,
            write_options=dict(options.write_option),
            **command.query_settings(options),
        )
    )


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
