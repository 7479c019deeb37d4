"""From a document to its entry in an index."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from upr_protocol.limits import KEY_BYTES_MAX
from upr_server.indexer.pure.definition import DESIGN_PREFIX, IndexDefinition
from upr_server.indexer.pure.expressions import Expressions, is_true
from upr_server.indexer.pure.interpreter import CostlyError
from upr_server.indexer.pure.keys import IndexKeyError, encode_parts

STORED_BYTES_MAX: Final = 511
"""The longest key that LMDB takes, as everybody builds it."""

ENCODED_BYTES_MAX: Final = STORED_BYTES_MAX - KEY_BYTES_MAX
"""The longest encoded key; the document's key stands behind it."""

COSTLY_SHARE: Final = 100
"""An index may leave out one document in so many because its expressions cost too much for it."""

COSTLY_MAX: Final = 10
"""And so many more. Then the index is left out itself, as it would hold up all others."""

NOT_JSON: Final = object()
"""Stands for a value that is not JSON."""


def decode_value(value: bytes) -> Any:
    """Decodes a value as JSON; `NOT_JSON` if it is not."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOT_JSON


class Extractor:
    """Makes the entries of one index. To be used by one thread at a time.

    Args:
        definition: The index.
        failure: Why it makes no entries; empty if it does.

    Attributes:
        too_long: How many documents were left out because their encoded key exceeds 261 bytes.
        too_costly: How many because the expressions cost too much for them.
        failure: Why it makes no entries any more; empty while it does.
    """

    def __init__(self, definition: IndexDefinition, failure: str = "") -> None:
        texts = definition.key + ((definition.filter,) if definition.filter else ())
        self._parts = len(definition.key)
        self._expressions = Expressions(*texts)
        self.too_long = self.too_costly = 0
        self._debt = 0
        self.failure = failure

    def entry(self, key: bytes, document: Any) -> bytes | None:
        """The encoded key of `document`, or None when it is not in the index.

        The index leaves a document out if it is not JSON, if the first part of its key is null or
        missing, if the filter is not true, if the expressions cost too much, if a part is an object
        or holds one, or if the encoded key is too long.

        Args:
            key: The document's key.
            document: What `decode_value` gave.
        """
        if document is NOT_JSON or key.startswith(DESIGN_PREFIX) or self.failure:
            return None
        try:
            values = self._expressions.values(key, document)
        except CostlyError as error:
            self._note_costly(str(error))
            return None
        self._debt = max(0, self._debt - 1)
        if values[0] is None or not all(map(is_true, values[self._parts :])):
            return None
        try:
            encoded = encode_parts(values[: self._parts])
        except IndexKeyError:
            return None
        if len(encoded) > ENCODED_BYTES_MAX:
            self.too_long += 1
            return None
        return encoded

    def _note_costly(self, reason: str) -> None:
        self.too_costly += 1
        self._debt += COSTLY_SHARE
        if self._debt > COSTLY_MAX * COSTLY_SHARE:
            self.failure = f"{reason}, and for many of them; write a simpler one"
