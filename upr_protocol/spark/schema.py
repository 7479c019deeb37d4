"""The columns of what is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.json_values import is_parsed
from upr_protocol.spark.read_options import ReadOptions

READ_COLUMNS: Final[dict[str, tuple[DataType, bool]]] = {
    "op": (StringType(), False),
    "bucket": (StringType(), False),
    "partition": (IntegerType(), False),
    "history_id": (StringType(), False),
    "seq": (LongType(), False),
    "snapshot_start": (LongType(), False),
    "snapshot_end": (LongType(), False),
    "key": (BinaryType(), False),
    "value": (BinaryType(), True),
    "deleted": (BooleanType(), False),
    "cas": (LongType(), False),
    "flags": (LongType(), False),
    "expiry": (LongType(), False),
}
"""Each column's type, and whether it may be null. What they mean stands in docs/spark.md.

Identity comes first: a row is identified by bucket, partition, history and sequence number. A
number alone is used again after a failover.
"""

INDEX_COLUMNS: Final[dict[str, tuple[DataType, bool]]] = {
    "index_key": (StringType(), False),
    "included": (StringType(), True),
    **{
        name: READ_COLUMNS[name]
        for name in ("key", "value", "partition", "history_id", "seq", "cas", "flags", "expiry")
    },
}
"""The columns of a read through an index: name, type, and whether it may be null."""

UNPARSED: Final = "unparsed"
"""A column that only comes on request, beside a value that is parsed: the value where it does not
fit."""

_FEW_OF_INDEX: Final = ("index_key", "key", "value")
_FEW: Final = ("key", "value", "seq", "deleted")
_TEXTS: Final = ("key", "value", UNPARSED)
"""Columns that may be asked for as texts; the value also as a struct, parsed from JSON."""


def default_schema(options: ReadOptions) -> StructType:
    """The columns of a read whose user named none."""
    if options.index is not None:
        of_index = [
            name
            for name in INDEX_COLUMNS
            if (options.metadata or name in _FEW_OF_INDEX)
            and (options.include_value or name != "value")
        ]
        return StructType([StructField(name, *INDEX_COLUMNS[name]) for name in of_index])
    names = [
        name
        for name in READ_COLUMNS
        if (
            options.are_several_buckets
            if name == "bucket"
            else (options.metadata or name in _FEW) and (options.include_value or name != "value")
        )
    ]
    return StructType([StructField(name, *READ_COLUMNS[name]) for name in names])


def schema_with_fields(options: ReadOptions, struct: StructType) -> StructType:
    """The columns of a read whose user named none, with values parsed into `struct`, and
    `UNPARSED`."""
    fields = []
    for field in default_schema(options):
        is_value = field.name == "value"
        fields.append(StructField("value", struct) if is_value else field)
        if is_value:
            fields.append(StructField(UNPARSED, BinaryType()))
    return StructType(fields)


def ddl_with_fields(options: ReadOptions) -> str:
    """The columns of a read as SQL, with the struct of `options.value_schema`: only Spark's JVM
    parses that. What is wrong is named at its place, as this is a type: Spark tries a list of
    columns as one, too, and tells of its second failure."""
    columns = []
    for field in default_schema(options):
        if field.name == "value":
            columns += [f"value STRUCT<{options.value_schema}>", f"{UNPARSED} BINARY"]
        else:
            null = "" if field.nullable else " NOT NULL"
            columns.append(f"{field.name} {field.dataType.simpleString()}{null}")
    return f"STRUCT<{', '.join(columns)}>"


def check_value_schema(options: ReadOptions, schema: StructType) -> None:
    """Makes sure that `valueSchema` is not given together with a schema that does not follow it.

    Args:
        options: The options.
        schema: The columns asked for.

    Raises:
        OptionError: It is.
    """
    if not options.value_schema:
        return
    # A schema that follows it has both.
    kinds = {field.name: field.dataType for field in schema}
    if isinstance(kinds.get("value"), StructType) and UNPARSED in kinds:
        return
    raise OptionError(
        "the option valueSchema says which columns there are, and .schema(...) says others: leave "
        "out one of them"
    )


def check_marker_columns(options: ReadOptions, schema: StructType) -> None:
    """Makes sure that a sink can tell the markers of a stream from other rows, and knows what each
    is about.

    Args:
        options: The options.
        schema: The columns asked for.

    Raises:
        OptionError: It cannot.
    """
    if not options.marks_rollback:
        return
    needed = {
        "op": True,
        "bucket": options.are_several_buckets,
        "partition": True,
        "seq": options.rewinds,
    }
    missing = [name for name in needed if needed[name] and name not in schema.fieldNames()]
    if missing:
        raise OptionError(
            f"the option onRollback is {'rewind' if options.rewinds else 'marker'}, which needs "
            f"the columns that say what a marker is about: {', '.join(missing)} is missing. Leave "
            "out metadata=false, or name them in .schema(...)"
        )


def check_schema(
    schema: StructType, columns: Mapping[str, tuple[DataType, bool]] = READ_COLUMNS
) -> None:
    """Makes sure that every column asked for is one that can be had.

    Args:
        schema: The columns asked for.
        columns: The columns that can be read.

    Raises:
        OptionError: One cannot.
    """
    if not schema.fields:
        # Arrow counts no rows without columns: a read would have none.
        raise OptionError(f"the schema names no column. There are {', '.join(columns)}")
    names = schema.fieldNames()
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"the schema names the column {name} several times")
    kinds = {field.name: field.dataType for field in schema}
    if UNPARSED in kinds:
        if not isinstance(kinds.get("value"), StructType):
            raise OptionError(
                f"the column {UNPARSED} needs the column value as a struct: value STRUCT<...>"
            )
        columns = {**columns, UNPARSED: (BinaryType(), True)}
    for field in schema.fields:
        if field.name not in columns:
            raise OptionError(f"there is no column {field.name}. There are {', '.join(columns)}")
        kind, _ = columns[field.name]
        allowed_types = [kind, StringType()] if field.name in _TEXTS else [kind]
        if field.name == "value" and isinstance(field.dataType, StructType):
            if not is_parsed(field.dataType):
                raise OptionError(
                    f"the column value is {field.dataType.simpleString()}, which has a type that "
                    "values are not parsed into: leave that field out, or ask for the value as "
                    "string and use from_json"
                )
            _check_field_names(field.dataType)
        elif field.dataType not in allowed_types:
            kind_names = " or ".join(kind.simpleString() for kind in allowed_types)
            raise OptionError(
                f"the column {field.name} is {kind_names}, and not {field.dataType.simpleString()}"
            )


def _check_field_names(kind: DataType) -> None:
    """Makes sure that no struct of the values has two fields of one name: Arrow would send Spark
    one of them. Raises `OptionError`."""
    if isinstance(kind, ArrayType):
        _check_field_names(kind.elementType)
    elif isinstance(kind, StructType):
        names = kind.fieldNames()
        for field in kind:
            if names.count(field.name) > 1:
                raise OptionError(
                    f"the column value has several fields {field.name}: an object has a field once"
                )
            _check_field_names(field.dataType)
