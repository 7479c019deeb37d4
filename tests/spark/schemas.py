"""Schemas without a JVM."""

from __future__ import annotations

from pyspark.sql import types

TYPES = {
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "long": types.LongType(),
    "date": types.DateType(),
    "timestamp": types.TimestampType(),
    "interval": types.DayTimeIntervalType(),
}


def schema_of(text: str) -> types.StructType:
    """The schema of "name type, name type", without asking a JVM."""
    fields = [field.split() for field in text.split(", ")]
    return types.StructType([types.StructField(name, TYPES[kind]) for name, kind in fields])
