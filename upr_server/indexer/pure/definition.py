"""Design documents, which define indexes.

A design document is a JSON object under a key `_design/NAME`::

    {"indexes": {"by_origin": {"key": ["origin", "sched_dep_time"], "filter": "dest == 'LAX'"}}}

`key` is one or more JMESPath expressions over the document. `filter`, another one, leaves documents
out. `each` names an expression of the key whose array makes an entry for each of its elements.
`include` are expressions whose values an entry has beside its key. In all of them, `document_key()`
is the document's key.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

import msgspec

from upr_protocol.errors import UprError
from upr_protocol.limits import KEY_BYTES_MAX
from upr_server.indexer.pure.expressions import ExpressionError, compile_expression

DESIGN_PREFIX: Final = b"_design/"
"""The prefix of design documents' keys. No index contains them."""

INDEXES_MAX: Final = 64
"""Indexes of one design document: each costs every mutation its expressions."""

PARTS_MAX: Final = 16
"""Expressions of one key, and of one index's included values."""

DESIGN_BYTES_MAX: Final = 1024 * 1024
"""The longest design document."""

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NAME_RULE: Final = "use 1 to 100 letters, digits, _ . -, and begin with a letter, a digit or _"


class DefinitionError(UprError, ValueError):
    """A text is not a valid design document.

    Attributes:
        place: The place of the mistake, as `indexes.by_origin.key[1]`; empty for the whole text.
        reason: What is wrong there.
    """

    def __init__(self, place: str, reason: str) -> None:
        self.place = place
        self.reason = reason
        super().__init__(f"{place}: {reason}" if place else reason)


class IndexDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One index of a design document.

    Attributes:
        key: The expressions that its keys are made of, most significant first.
        filter: What must be true of a document for it to be in the index; empty for all of them.
        each: The expression of the key whose arrays make an entry for each element; empty if a
            document has one entry.
        include: The expressions whose values stand beside an entry's key.
    """

    key: tuple[str, ...]
    filter: str = ""
    each: str = ""
    include: tuple[str, ...] = ()


class IndexName(msgspec.Struct, frozen=True, order=True):
    """The name of an index: `DESIGN/INDEX`."""

    design: str
    index: str

    def __str__(self) -> str:
        return f"{self.design}/{self.index}"


class Design(msgspec.Struct, frozen=True):
    """A design document.

    Attributes:
        name: Its name, what stands behind `_design/` in its key.
        indexes: Its indexes, by their names in it.
    """

    name: str
    indexes: dict[str, IndexDefinition]


def design_key(name: str) -> bytes:
    """The key of the design document `name`.

    Raises:
        DefinitionError: The name is not valid.
    """
    key = DESIGN_PREFIX + name.encode()
    if not _NAME.fullmatch(name) or len(key) > KEY_BYTES_MAX:
        raise DefinitionError("", f"invalid design name {name!r}: {_NAME_RULE}")
    return key


def design_name(key: bytes) -> str:
    """The name of the design document at `key`; what is not UTF-8 in it is replaced."""
    return key.removeprefix(DESIGN_PREFIX).decode(errors="replace")


def readable_text(document: bytes) -> bytes:
    """What has to be kept of a design document: of one that is too long, enough to say so."""
    return document[: DESIGN_BYTES_MAX + 1]


def parse_design(name: str, text: bytes) -> Design:
    """Parses a design document. It takes up to some 15 s for the longest: call it off the loop.

    Raises:
        DefinitionError: The text is not valid; with the place of the mistake.
    """
    design_key(name)
    if len(text) > DESIGN_BYTES_MAX:
        raise DefinitionError("", f"a design document has at most {DESIGN_BYTES_MAX:,} bytes")
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DefinitionError("", f"the design document is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise DefinitionError("", "a design document is an object, as {'indexes': {…}}")
    for field in document:
        if field != "indexes":
            raise DefinitionError(field, "unknown field; 'indexes' is the only one")
    indexes = document.get("indexes")
    if not isinstance(indexes, dict) or not indexes:
        raise DefinitionError("indexes", "name at least one index, as {'by_city': {'key': […]}}")
    if len(indexes) > INDEXES_MAX:
        raise DefinitionError("indexes", f"{len(indexes)} indexes; at most {INDEXES_MAX}")
    return Design(
        name,
        {index_name: _parse_index(index_name, fields) for index_name, fields in indexes.items()},
    )


def _parse_index(name: str, fields: Any) -> IndexDefinition:
    place = f"indexes.{name}"
    if not _NAME.fullmatch(name):
        raise DefinitionError(place, f"invalid index name: {_NAME_RULE}")
    try:
        definition = msgspec.convert(fields, IndexDefinition)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        raise DefinitionError(place + where.rstrip("`"), reason) from error
    if not 1 <= len(definition.key) <= PARTS_MAX:
        raise DefinitionError(f"{place}.key", f"write 1 to {PARTS_MAX} expressions")
    for position, text in enumerate(definition.key):
        _check(f"{place}.key[{position}]", text)
    if definition.each and definition.key.count(definition.each) != 1:
        raise DefinitionError(
            f"{place}.each", "write one of the key's expressions, which stands there once"
        )
    if len(definition.include) > PARTS_MAX:
        raise DefinitionError(f"{place}.include", f"write at most {PARTS_MAX} expressions")
    for position, text in enumerate(definition.include):
        _check(f"{place}.include[{position}]", text)
    if definition.filter:
        _check(f"{place}.filter", definition.filter)
    return definition


def _check(place: str, text: str) -> None:
    try:
        compile_expression(text)
    except ExpressionError as error:
        raise DefinitionError(place, str(error)) from error


def fingerprint(name: IndexName, definition: IndexDefinition) -> str:
    """A file name for an index with this very definition: a changed definition is another index."""
    text = msgspec.json.encode([str(name), definition])
    return hashlib.sha256(text).hexdigest()[:16]
