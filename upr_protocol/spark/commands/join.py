"""Fills a bucket with the join of two others.

`python -m upr_protocol.spark join upr://127.0.0.1:12000/flights upr://127.0.0.1:12000/planes
upr://127.0.0.1:12000/flights-with-planes --on value.tailnum
--left-schema 'key STRING, value STRUCT<tailnum: STRING, dest: STRING>'
--checkpoint /data/join-checkpoint`
"""

from __future__ import annotations

import argparse
import sys

from upr_protocol.spark.recipes import command, join
from upr_protocol.spark.recipes.join import BOTH_VALUES, INNER, LEFT
from upr_protocol.spark.recipes.reprocess import TEXT_SCHEMA

# It has Ctrl-C end the script from here on: what follows takes long.
# isort: split
from pyspark.sql import SparkSession


def argument_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = command.parser(
        "Has a bucket hold the items of another, each with the item of a third that it names, "
        "until it is stopped. A restart continues at the checkpoint."
    )
    parser.add_argument(
        "left", help="the bucket whose items the target has: upr://host:port/bucket"
    )
    parser.add_argument("right", help="the bucket whose items are added; the one that changes less")
    parser.add_argument("target", help="the bucket that is written; nothing else writes to it")
    parser.add_argument(
        "--on",
        default="key",
        help="an SQL expression over key and value of the left bucket: the key in the right one "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--value",
        default=BOTH_VALUES,
        help="an SQL expression of the value, over key, left_value, right_key and right_value; a "
        "struct becomes a JSON object (default: %(default)s)",
    )
    parser.add_argument(
        "--how",
        choices=(INNER, LEFT),
        default=INNER,
        help="inner: items that have a partner; left: all (default: %(default)s)",
    )
    parser.add_argument("--left-schema", default=TEXT_SCHEMA, help="default: %(default)s")
    parser.add_argument("--right-schema", default=TEXT_SCHEMA, help="default: %(default)s")
    command.add_query_arguments(parser, "end when the target has all that there is now")
    command.add_write_option(parser)
    return parser


def work(spark: SparkSession, options: argparse.Namespace) -> int:
    """Runs the query to its end."""
    return command.run_query(
        join(
            spark,
            options.left,
            options.right,
            options.target,
            options.checkpoint,
            on=options.on,
            value=options.value,
            how=options.how,
            left_schema=options.left_schema,
            right_schema=options.right_schema,
            write_options=dict(options.write_option),
            **command.query_settings(options),
        )
    )


if __name__ == "__main__":
    sys.exit(command.run(argument_parser(), work))
