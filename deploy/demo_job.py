"""The Spark job of the demonstration: writes the flights to a bucket, and later adds up what the
bucket holds.

`demo.py` starts it with the path of the flights and a folder for Spark's own files. It takes
commands on standard input, a line of JSON each, and answers each with one on standard output:

- `{"write": URL}` writes every flight that names an aircraft, and answers how many those are;
- `{"add_up": URL}` answers, for each carrier, of the newest flight of each aircraft: how many there
  are, and their miles and their minutes in the air together.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from upr_protocol.spark import UprDataSource
from upr_protocol.spark.recipes import latest

TASKS = 4
"""Each has some of the aircraft, and all of their flights."""

BATCH_BYTES = 2 * 1024 * 1024
"""Batches that are not large, so that there is something to watch."""


def session(folder: str) -> SparkSession:
    """Spark, in this process and with two cores."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    builder = SparkSession.builder.master("local[2]").appName("flights")
    for name, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": folder,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": folder,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(UprDataSource)
    return spark


def by_departure(flights: DataFrame) -> DataFrame:
    """The flights of each aircraft in one task, in the order of their departure.

    Tasks run at once, and no order holds between them. Carrier and number tell apart what is
    said to depart at the same time, so that a task that is run again has the same order.
    """
    numbers = (F.col(name).cast("int") for name in ("year", "month", "day", "sched_dep_time"))
    return flights.repartition(TASKS, "tailnum").sortWithinPartitions(
        *numbers, "carrier", F.col("flight").cast("int")
    )


def write(spark: SparkSession, path: str, url: str) -> int:
    """Writes each flight as a JSON object, under its aircraft's tail number; gives how many."""
    flights = spark.read.csv(path, header=True, nullValue="NA", mode="FAILFAST").where(
        "tailnum <> ''"
    )
    (
        by_departure(flights)
        .write.format("upr")
        .mode("append")
        .option("url", url)
        .option("keyColumn", "tailnum")
        .option("valueColumn", "*")
        .option("durability", "persisted")
        .option("batchBytes", str(BATCH_BYTES))
        .save()
    )
    return flights.count()


def add_up(spark: SparkSession, url: str) -> dict[str, list[int]]:
    """Adds up what the bucket holds, by carrier: flights, miles, minutes in the air."""
    changes = (
        spark.read.format("upr")
        .option("url", url)
        .schema("key STRING, value STRING, seq LONG, deleted BOOLEAN")
        .load()
    )
    fields = "carrier STRING, distance STRING, air_time STRING"
    flights = latest(changes).select(F.from_json("value", fields).alias("flight"))
    totals = (
        flights.select("flight.*")
        .groupBy("carrier")
        .agg(
            F.count(F.lit(1)),
            F.sum(F.col("distance").cast("long")),
            F.coalesce(F.sum(F.col("air_time").cast("long")), F.lit(0)),
        )
    )
    return {carrier: numbers for carrier, *numbers in totals.collect()}


def main() -> None:
    """Does what it is told, until there is no more input."""
    path, folder = sys.argv[1:]
    # Java and what it runs may say something on standard output: that is not for who reads here.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        spark = session(folder)
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            answer: object
            if "write" in command:
                answer = write(spark, Path(path).as_uri(), command["write"])
            else:
                answer = add_up(spark, command["add_up"])
            print(json.dumps(answer), file=answers, flush=True)
        spark.stop()


if __name__ == "__main__":
    main()
