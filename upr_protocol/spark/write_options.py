"""What a write is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import attrs
from pyspark.sql import types
from pyspark.sql.types import DataType, StructType

from upr_protocol.client import Address
from upr_protocol.ids import Durability, Operation
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.options import Options
from upr_protocol.spark.texts import SIMPLE_TYPES

APPLY: Final = "apply"

OPERATIONS: Final = {
    "upsert": Operation.SET,
    "insert": Operation.ADD,
    "replace": Operation.REPLACE,
    "delete": Operation.DELETE,
}
"""What the option `operation` may say, beside `apply`."""

BATCH_BYTES_DEFAULT: Final = 8 * 1024 * 1024
"""With 64 partitions half of it makes a write 5 % slower, and twice as much 3 % faster."""

BATCH_BYTES_MIN: Final = 64 * 1024
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
"""With half of it a task takes some 64 MiB: the rows, sorted, and twice on their way."""

TIMEOUT_S_DEFAULT: Final = 600

_OF_STREAMS: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that a stream has for Spark itself."""

_DURABILITIES: Final = {level.name.lower().replace("_", "-"): level for level in Durability}
_REPLICATED: Final = (Durability.REPLICATED, Durability.REPLICATED_AND_PERSISTED)
COPIES_MAX: Final = 255


@attrs.frozen
class WriteOptions:
    """The options of a write, checked against the DataFrame's columns.

    Attributes:
        address: The server and the bucket.
        operation: What is done with every row; None when a column says it.
        operation_column: That column.
        key_column: The column of the keys.
        value_columns: The column of the values, or those that a JSON object is made of.
        value_is_object: Whether it is made.
        flags_column: The column of the flags; None for all 0.
        expiry_column: The column of the expiry times; None for never.
        cas_column: The column of the CAS values that are expected; None for any.
        durability: What must hold before a batch counts as written.
        copies: How many replicas must have it, where the level says that some must.
        dead_letter_path: The folder for rows that are refused; None when they fail the task.
        batch_bytes: Rows of so many bytes are gathered, and then sent in one batch a partition.
        timeout_s: How long to go on without any server.
    """

    address: Address
    operation: Operation | None
    operation_column: str | None
    key_column: str
    value_columns: tuple[str, ...]
    value_is_object: bool
    flags_column: str | None
    expiry_column: str | None
    cas_column: str | None
    durability: Durability
    copies: int
    dead_letter_path: str | None
    batch_bytes: int
    timeout_s: int

    @classmethod
    def parse(cls, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> Self:
        """Reads the options.

        Args:
            options: As Spark hands them over.
            schema: The columns of what is written.
            overwrite: Whether what is there should go first, which is not offered.

        Raises:
            OptionError: One is missing, unknown or wrong, or does not fit the columns.
        """
        if overwrite:
            raise OptionError(
                "a bucket cannot be overwritten as a whole: write with mode append, or a stream "
                "with output mode append or update, which stores each row at its key"
            )
        bag = Options(
            {name: text for name, text in options.items() if name.lower() not in _OF_STREAMS}
        )
        columns = _Columns(schema)
        address = bag.address()
        operation = bag.choice("operation", "upsert", (*OPERATIONS, APPLY))
        operation_column = bag.text("operationColumn", None)
        if operation == APPLY:
            operation_column = columns.named(
                "operationColumn", operation_column or "op", (types.StringType,), "text"
            )
        elif operation_column is not None:
            raise OptionError('operationColumn goes with .option("operation", "apply")')
        key_column = columns.named("keyColumn", bag.text("keyColumn", "key"))
        flags = columns.optional("flagsColumn", bag, (types.IntegralType,), "a whole number")
        expiry = columns.optional(
            "expiryColumn",
            bag,
            (types.IntegralType, types.TimestampType, types.TimestampNTZType, types.DateType),
            "a whole number of seconds since 1970, or a time",
        )
        cas = columns.optional("casColumn", bag, (types.IntegralType,), "a whole number")
        value_text = bag.text("valueColumn", "value")
        values: tuple[str, ...] = ()
        if operation == "delete":
            pass
        elif value_text.strip() == "*":
            other = {key_column, operation_column, flags, expiry, cas}
            values = tuple(name for name in schema.fieldNames() if name not in other)
        else:
            values = tuple(
                columns.named("valueColumn", name.strip()) for name in value_text.split(",")
            )
        durability = _DURABILITIES[bag.choice("durability", "persisted", _DURABILITIES)]
        parsed = cls(
            address,
            OPERATIONS.get(operation),
            operation_column,
            key_column,
            values,
            value_text.strip() == "*" or len(values) > 1,
            flags,
            expiry,
            cas,
            durability,
            _copies(bag, durability),
            _dead_letter_path(bag),
            bag.number(
                "batchBytes", BATCH_BYTES_DEFAULT, low=BATCH_BYTES_MIN, high=BATCH_BYTES_MAX
            ),
            bag.number("timeoutSeconds", TIMEOUT_S_DEFAULT, low=1, high=7 * 24 * 3600),
        )
        bag.finish()
        return parsed


def _copies(bag: Options, durability: Durability) -> int:
    copies = bag.number("copies", None, low=1, high=COPIES_MAX)
    if durability in _REPLICATED:
        return copies or 1
    if copies is not None:
        levels = " or ".join(name for name, level in _DURABILITIES.items() if level in _REPLICATED)
        raise OptionError(f"the option copies goes with durability {levels}")
    return 0


def _dead_letter_path(bag: Options) -> str | None:
    on_error = bag.choice("onError", "fail", ("fail", "deadLetter"))
    path = bag.text("deadLetterPath", None)
    if (on_error == "deadLetter") != bool(path):
        raise OptionError("onError deadLetter and deadLetterPath go together: give both or neither")
    if not path:
        return None
    parts = urlsplit(path)
    if parts.scheme not in ("", "file"):
        raise OptionError(
            f"the option deadLetterPath is {path!r}, and not a folder that every executor reaches "
            "by a plain path"
        )
    return unquote(parts.path) if parts.scheme else path


class _Columns:
    """The columns of what is written, found by name as Spark finds them."""

    def __init__(self, schema: StructType) -> None:
        self._types = {field.name: field.dataType for field in schema}

    def optional(
        self, option: str, bag: Options, kinds: tuple[type[DataType], ...], what: str
    ) -> str | None:
        """The column that an option names, if it was given."""
        name = bag.text(option, None)
        return None if name is None else self.named(option, name, kinds, what)

    def named(
        self,
        option: str,
        name: str,
        kinds: tuple[type[DataType], ...] = SIMPLE_TYPES,
        what: str = "of a type that has a text; cast it to string",
    ) -> str:
        """The column's own spelling."""
        column = name if name in self._types else self._alike(name)
        if column is None:
            raise OptionError(
                f"there is no column {name}; name one with {option}: {_listed(self._types)}"
            )
        kind = self._types[column]
        if not isinstance(kind, kinds):
            raise OptionError(
                f"the column {column} ({option}) is {kind.simpleString()}, and not {what}"
            )
        return column

    def _alike(self, name: str) -> str | None:
        same = [column for column in self._types if column.lower() == name.lower()]
        return same[0] if len(same) == 1 else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "there are none"
