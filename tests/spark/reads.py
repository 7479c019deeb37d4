"""A bucket read as a DataFrame."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession


def load(spark: SparkSession, url: str, schema: str = "", **options: object) -> DataFrame:
    reader = spark.read.format("upr").option("url", url)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return (reader.schema(schema) if schema else reader).load()
