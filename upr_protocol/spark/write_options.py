"""The options of a write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import attrs
from pyspark.sql import types
from pyspark.sql.types import DataType, StructType

from upr_protocol.client import Address
from upr_protocol.ids import DURABILITIES, REPLICATED_DURABILITIES, Durability, Operation
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.options import SourceOptions
from upr_protocol.spark.texts import has_text

APPLY: Final = "apply"

OPERATIONS: Final = {
    "upsert": Operation.SET,
    "insert": Operation.ADD,
    "replace": Operation.REPLACE,
    "delete": Operation.DELETE,
}
"""What the option `operation` may say, beside `apply`."""

BATCH_BYTES_DEFAULT: Final = 24 * 1024 * 1024
"""With 64 partitions a batch has 384 KiB then: what a batch costs beside its rows, mostly steps of
Python at the server, is little beside them. A task grows by some 45 MiB; by 27 with 8 MiB."""

BATCH_BYTES_MIN: Final = 64 * 1024
BATCH_BYTES_MAX: Final = 32 * 1024 * 1024
"""A task holds the rows, and has them sorted and on their way."""

KEY_SEPARATOR_DEFAULT: Final = ":"
"""The same as that of `upr load`."""

_OF_STREAMS: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that a stream has for Spark itself."""

COPIES_MAX: Final = 255


def operation_word(operation: Operation, fixed: Operation | None) -> str:
    """What a user calls an operation.

    Args:
        operation: The operation.
        fixed: The operation of all rows, if the option `operation` names it; None if a column does.
    """
    words = {value: word for word, value in OPERATIONS.items()} if fixed is not None else {}
    return words.get(operation, operation.name.lower())


ColumnPath = tuple[str, ...]
"""A column, or a field of a struct: the name of the column, then those of the fields."""


@attrs.frozen
class WriteOptions:
    """The options of a write, checked against the DataFrame's columns.

    Attributes:
        address: The server and the bucket.
        operation: What is done with every row; None if a column says it.
        operation_column: The column that says what is done with a row; None if all are alike.
        key_columns: The column of the keys, or those whose texts are joined.
        key_separator: The text between them.
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
        write_id: Names the write: another one of this name is the same, run again. None for a write
            of its own.
    """

    address: Address
    operation: Operation | None
    operation_column: ColumnPath | None
    key_columns: tuple[ColumnPath, ...]
    key_separator: str
    value_columns: tuple[ColumnPath, ...]
    value_is_object: bool
    flags_column: ColumnPath | None
    expiry_column: ColumnPath | None
    cas_column: ColumnPath | None
    durability: Durability
    copies: int
    dead_letter_path: str | None
    batch_bytes: int
    timeout_s: int
    write_id: str | None

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
                "a bucket cannot be overwritten as a whole: write with mode append, which stores "
                "each row at its key. For a stream with an aggregation, use foreachBatch with "
                "output mode update, and write each batch with mode append"
            )
        source_options = SourceOptions(
            {name: text for name, text in options.items() if name.lower() not in _OF_STREAMS}
        )
        columns = _Columns(schema)
        address = source_options.address()
        operation, operation_column = _operation(source_options, columns)
        keys = columns.several("keyColumn", source_options.text("keyColumn", "key"))
        flags = columns.optional(
            "flagsColumn", source_options, (types.IntegralType,), "a whole number"
        )
        expiry = columns.optional(
            "expiryColumn",
            source_options,
            (types.IntegralType, types.TimestampType, types.TimestampNTZType, types.DateType),
            "a whole number of seconds since 1970, or a time",
        )
        cas = _cas_column(source_options, columns, operation)
        values, value_is_object = _value_columns(
            source_options, columns, operation, {operation_column, flags, expiry, cas}
        )
        durability = DURABILITIES[source_options.choice("durability", "persisted", DURABILITIES)]
        write_options = cls(
            address,
            OPERATIONS.get(operation),
            operation_column,
            keys,
            source_options.text("keySeparator", KEY_SEPARATOR_DEFAULT),
            values,
            value_is_object,
            flags,
            expiry,
            cas,
            durability,
            _copies(source_options, durability),
            _dead_letter_path(source_options),
            source_options.number(
                "batchBytes", BATCH_BYTES_DEFAULT, low=BATCH_BYTES_MIN, high=BATCH_BYTES_MAX
            ),
            source_options.timeout_s(),
            _write_id(source_options),
        )
        source_options.refuse_unknown()
        return write_options


def _operation(source_options: SourceOptions, columns: _Columns) -> tuple[str, ColumnPath | None]:
    """What is done with every row, or `apply` with the column that says it."""
    operation = source_options.choice("operation", "upsert", (*OPERATIONS, APPLY))
    column_text = source_options.text("operationColumn", None)
    if operation == APPLY:
        name = column_text or "op"
        return operation, columns.named("operationColumn", name, (types.StringType,), "text")
    if column_text is not None:
        raise OptionError('operationColumn goes with .option("operation", "apply")')
    return operation, None


def _cas_column(
    source_options: SourceOptions, columns: _Columns, operation: str
) -> ColumnPath | None:
    """The column of the CAS values that are expected, if it was given."""
    cas = columns.optional("casColumn", source_options, (types.IntegralType,), "a whole number")
    if cas is not None and operation == "insert":
        raise OptionError(
            "the options casColumn and operation=insert exclude each other: a key that does "
            "not exist has no CAS. Write with replace, or leave casColumn out"
        )
    return cas


def _value_columns(
    source_options: SourceOptions,
    columns: _Columns,
    operation: str,
    excluded: set[ColumnPath | None],
) -> tuple[tuple[ColumnPath, ...], bool]:
    """The columns of the values, none for `delete`; and whether they make a JSON object.

    Args:
        source_options: The options.
        columns: The columns of what is written.
        operation: What is done with every row.
        excluded: The columns that `*` leaves out.
    """
    text = source_options.text("valueColumn", "value")
    is_whole_row = text.strip() == "*"
    if operation == "delete":
        return (), is_whole_row
    if is_whole_row:
        return columns.all_but(excluded), True
    values = columns.several("valueColumn", text)
    _check_field_names(values)
    return values, len(values) > 1


def _check_field_names(values: Sequence[ColumnPath]) -> None:
    names = [path[-1] for path in values]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(
                f"the option valueColumn names several columns {name}, and the JSON object would "
                "have that field several times: add a column of another name first (withColumn)"
            )


def _copies(source_options: SourceOptions, durability: Durability) -> int:
    copies = source_options.number("copies", None, low=1, high=COPIES_MAX)
    if durability.is_replicated:
        return copies or 1
    if copies is not None:
        raise OptionError(f"the option copies goes with durability {REPLICATED_DURABILITIES}")
    return 0


def _write_id(source_options: SourceOptions) -> str | None:
    write_id = source_options.text("writeId", None)
    if write_id is not None and not write_id.strip():
        raise OptionError(
            "the option writeId is empty: give each write a name of its own, such as the IDs of "
            "query and batch, or leave the option out"
        )
    return write_id


def _dead_letter_path(source_options: SourceOptions) -> str | None:
    on_error = source_options.choice("onError", "fail", ("fail", "deadLetter"))
    path = source_options.text("deadLetterPath", None)
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
    folder = unquote(parts.path) if parts.scheme else path
    if not folder.startswith("/"):
        raise OptionError(
            f"the option deadLetterPath is {path!r}: each executor would take it from its own "
            "working directory. Write the whole path, from / on"
        )
    return folder


class _Columns:
    """The columns of what is written, found by name as Spark finds them: `a`, `a.b` for a field of
    a struct, and names with a dot or a comma between back-quotes."""

    def __init__(self, schema: StructType) -> None:
        self._schema = schema

    def optional(
        self,
        option: str,
        source_options: SourceOptions,
        kinds: tuple[type[DataType], ...],
        expected: str,
    ) -> ColumnPath | None:
        """The column that an option names, if it was given."""
        text = source_options.text(option, None)
        return None if text is None else self.named(option, text, kinds, expected)

    def named(
        self, option: str, text: str, kinds: tuple[type[DataType], ...], expected: str
    ) -> ColumnPath:
        """The column that a text names, which must be of one of some types."""
        paths = self._paths(option, text)
        if len(paths) != 1:
            raise OptionError(f"the option {option} is {text!r}, which names {len(paths)} columns")
        kind = self._type_of(option, paths[0])
        if not isinstance(kind, kinds):
            raise _wrong_type(option, paths[0], kind, expected)
        return paths[0]

    def several(self, option: str, text: str) -> tuple[ColumnPath, ...]:
        """The columns that a text names, which must have a text."""
        paths = self._paths(option, text)
        for path in paths:
            self._check_text(option, path)
        return paths

    def all_but(self, excluded: set[ColumnPath | None]) -> tuple[ColumnPath, ...]:
        """All columns but some."""
        paths = tuple((name,) for name in self._schema.fieldNames() if (name,) not in excluded)
        for path in paths:
            self._check_text("valueColumn", path)
        if not paths:
            raise OptionError("the option valueColumn is *, and there is no column for a value")
        return paths

    def _check_text(self, option: str, path: ColumnPath) -> None:
        kind = self._type_of(option, path)
        if not has_text(kind):
            raise _wrong_type(
                option, path, kind, "of a type that has a text: cast it to string, or use to_json"
            )

    def _paths(self, option: str, text: str) -> tuple[ColumnPath, ...]:
        if text in self._schema.fieldNames():
            return ((text,),)
        return tuple(self._resolve_path(option, path) for path in parse_columns(option, text))

    def _resolve_path(self, option: str, path: ColumnPath) -> ColumnPath:
        """Spells a path as the columns do."""
        names: list[str] = []
        kind: DataType = self._schema
        for part in path:
            fields = kind.fieldNames() if isinstance(kind, StructType) else []
            alike = [name for name in fields if name.lower() == part.lower()]
            name = part if part in fields else alike[0] if len(alike) == 1 else None
            if name is None:
                where = f" in {column_path_text(tuple(names))}" if names else ""
                raise OptionError(
                    f"there is no column {part}{where}; name one with {option}: "
                    f"{_names_text(fields)}"
                )
            assert isinstance(kind, StructType)
            names.append(name)
            kind = kind[name].dataType
        return tuple(names)

    def _type_of(self, option: str, path: ColumnPath) -> DataType:
        kind: DataType = self._schema
        for name in path:
            assert isinstance(kind, StructType), f"{option} was resolved"
            if kind.fieldNames().count(name) > 1:
                raise OptionError(
                    f"there are several columns {column_path_text(path)} ({option}): rename all "
                    "but one"
                )
            kind = kind[name].dataType
        return kind


def parse_columns(option: str, text: str) -> list[ColumnPath]:
    """The columns that a text names: names with dots between fields and commas between columns.

    Args:
        option: The option, for the error.
        text: A name that has a dot or a comma stands between back-quotes; a back-quote in it is
            doubled.

    Raises:
        OptionError: It does not name columns.
    """
    paths: list[ColumnPath] = []
    names: list[str] = []
    parsed_chars = 0
    for token in _NAME.finditer(text):
        if token.start() != parsed_chars:
            break
        parsed_chars = token.end()
        quoted, plain, separator = token.groups()
        names.append(plain if quoted is None else quoted.replace("``", "`"))
        if separator != ".":
            paths.append(tuple(names))
            names = []
        if not separator:
            break
    if parsed_chars != len(text) or names or not paths:
        raise OptionError(
            f"the option {option} is {text!r}; write it like a, b.c, `name with . or ,`"
        )
    return paths


_NAME: Final = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^`.,\s](?:[^`.,]*[^`.,\s])?))\s*([.,]|$)")
"""A name, and what follows it."""


def column_path_text(path: ColumnPath) -> str:
    """A column as a user would write it."""
    return ".".join(f"`{name}`" if set(name) & set(".,`") else name for name in path)


def _wrong_type(option: str, path: ColumnPath, kind: DataType, expected: str) -> OptionError:
    return OptionError(
        f"the column {column_path_text(path)} ({option}) is {kind.simpleString()}, "
        f"and not {expected}"
    )


def _names_text(names: Iterable[str]) -> str:
    return ", ".join(names) or "there are none"
