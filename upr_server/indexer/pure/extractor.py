"""From a document to its entries in an index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from upr_protocol.limits import KEY_BYTES_MAX
from upr_server.indexer.pure.definition import DESIGN_PREFIX, IndexDefinition
from upr_server.indexer.pure.expressions import Expressions, is_true
from upr_server.indexer.pure.interpreter import WORK_MAX, CostlyError
from upr_server.indexer.pure.keys import IndexKeyError, encode_parts, encode_plain_columns

STORED_BYTES_MAX: Final = 511
"""The longest key that LMDB takes, as everybody builds it."""

ENCODED_BYTES_MAX: Final = STORED_BYTES_MAX - KEY_BYTES_MAX
"""The longest encoded key; the document's key stands behind it."""

AVERAGE_WORK_MAX: Final = 2000
"""What expressions may cost for a document on average, in steps: some 1 ms. The entries of an array
do not count here, as they are what the index is for."""

EXCESS_WORK_MAX: Final = 10 * WORK_MAX
"""What they may cost beyond that, some 0.5 s in all. Then the index is left out, as it would hold
up all others."""

ENTRY_WORK: Final = 50
"""What an entry of an array counts for, in steps: some 25 µs to encode and write it. So a document
has some 2,000 at most."""

INCLUDED_BYTES_MAX: Final = 4096
"""The most that an entry's included values take, as JSON. Longer ones are left out of the entry: a
document is better read than copied into an index, once for each element of an array."""

_PAYLOAD_BYTES: Final = 64
"""How many bytes of included values count as one step, in each entry."""

NOT_JSON: Final = object()
"""Stands for a value that is not JSON."""


def decode_value(value: bytes) -> Any:
    """Decodes a value as JSON; `NOT_JSON` if it is not."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOT_JSON


_decode: Final = msgspec.json.Decoder().decode


def decode_values(values: Sequence[bytes]) -> list[Any]:
    """Decodes values as JSON; `NOT_JSON` where one is not. O(their bytes)."""
    try:
        # `map` would be faster by a hundredth. But other threads, as the event loop's, have their
        # turns between two steps of Python, and not within a call such as that.
        return [_decode(value) for value in values]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [decode_value(value) for value in values]


class Extractor:
    """Makes the entries of one index. To be used by one thread at a time.

    Args:
        definition: The index.
        failure: Why it makes no entries; empty if it does.

    Attributes:
        is_plain: Whether `plain_keys` says what its entries are.
        too_long: How many documents were left out because their encoded key exceeds 261 bytes, or
            have elements that were.
        too_costly: How many because the expressions cost too much for them.
        failure: Why it makes no entries any more; empty while it does.
    """

    def __init__(self, definition: IndexDefinition, failure: str = "") -> None:
        filters = (definition.filter,) if definition.filter else ()
        self._parts = len(definition.key)
        self._filter = self._parts + len(definition.include)
        self._each = definition.key.index(definition.each) if definition.each else None
        self._expressions = Expressions(*definition.key, *definition.include, *filters)
        self.is_plain = (
            self._expressions.are_plain
            and not definition.each
            and not definition.include
            and not definition.filter
        )
        self.too_long = self.too_costly = 0
        self._excess_work = 0
        self.failure = failure

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Forgets what was counted in the context, if that ends with an error: the same documents
        come again. Otherwise an index could be left out that is written again and again."""
        counts = self.too_long, self.too_costly, self._excess_work, self.failure
        try:
            yield
        except BaseException:
            self.too_long, self.too_costly, self._excess_work, self.failure = counts
            raise

    def entries(self, key: bytes, document: Any) -> tuple[Sequence[bytes], bytes]:
        """The encoded keys of `document`, in order, and the included values as a JSON array.

        The index leaves a document out if it is not JSON, if the first part of its key is null or
        missing, if the filter is not true, if the expressions cost too much, if a part is an object
        or holds one, or if the encoded key is too long. Where an array makes the entries, only the
        element is left out whose key cannot be an entry. The values are empty if the index includes
        none, if they are too long, or if one of them has no JSON.

        Args:
            key: The document's key.
            document: What `decode_value` gave.
        """
        if document is NOT_JSON or key.startswith(DESIGN_PREFIX) or self.failure:
            return (), b""
        try:
            values = self._expressions.values(key, document)
            self._note_work(self._expressions.work)
            if not all(map(is_true, values[self._filter :])):
                entries: Sequence[bytes] = ()
                payload = b""
            else:
                payload = _included(values[self._parts : self._filter])
                entries = self._encoded(values[: self._parts], len(payload))
        except CostlyError:
            self.too_costly += 1
            self._note_work(WORK_MAX)
            return (), b""
        return entries, payload

    def plain_keys(self, keys: Sequence[bytes], documents: Sequence[Any]) -> list[bytes]:
        """The encoded key of each of some documents, as `entries` gives it, and empty where that
        gives none. For definitions whose expressions are all plain; such an index has one entry for
        a document at most, and includes nothing.

        It takes a fifth of the time where the values are short. These cost next to no work, so none
        is noted.

        Args:
            keys: The documents' keys.
            documents: What `decode_value` gave.
        """
        columns = [look_up(documents) for look_up in self._expressions.columns]
        encoded_keys = encode_plain_columns(columns, ENCODED_BYTES_MAX)
        # One search for all keys takes a quarter of the time. It may be wrong in one direction.
        may_have_designs = DESIGN_PREFIX in b"".join(keys)
        if may_have_designs or None in encoded_keys or self._excess_work or self.failure:
            return [
                self._plain_key(*row) for row in zip(encoded_keys, keys, documents, strict=True)
            ]
        return encoded_keys  # type: ignore[return-value]  # none is None

    def _plain_key(self, encoded_key: bytes | None, key: bytes, document: Any) -> bytes:
        """The encoded key of a document; it is evaluated if the short way has none, or if the index
        is about to be left out."""
        if (
            encoded_key is None
            or self._excess_work
            or self.failure
            or key.startswith(DESIGN_PREFIX)
        ):
            encoded_keys, _ = self.entries(key, document)
            return encoded_keys[0] if encoded_keys else b""
        return encoded_key

    def _encoded(self, parts: list[Any], payload_bytes: int) -> Sequence[bytes]:
        """The encoded keys that the values of a key's expressions make."""
        if self._each is None:
            encoded = self._encode(parts)
            return () if encoded is None else (encoded,)
        value = parts[self._each]
        elements = value if isinstance(value, list) else [value]
        self._expressions.charge(len(elements) * (ENTRY_WORK + payload_bytes // _PAYLOAD_BYTES))
        # The other parts once for all elements: they may be as long as a document.
        before, after = parts[: self._each], parts[self._each + 1 :]
        if before and before[0] is None:
            return ()
        try:
            start, end = encode_parts(before), encode_parts(after)
        except IndexKeyError:
            return ()
        if len(start) + len(end) > ENCODED_BYTES_MAX:
            self.too_long += 1
            return ()
        keys: set[bytes] = set()
        is_too_long = False
        for element in elements:
            if element is None and not before:
                continue
            try:
                encoded = start + encode_parts((element,)) + end
            except IndexKeyError:
                continue
            if len(encoded) > ENCODED_BYTES_MAX:
                is_too_long = True
            else:
                keys.add(encoded)
        self.too_long += is_too_long
        return sorted(keys)

    def _encode(self, parts: list[Any]) -> bytes | None:
        if parts[0] is None:
            return None
        try:
            encoded = encode_parts(parts)
        except IndexKeyError:
            return None
        if len(encoded) > ENCODED_BYTES_MAX:
            self.too_long += 1
            return None
        return encoded

    def _note_work(self, work: int) -> None:
        """Counts what a document has cost; leaves the index out if they cost too much on average.
        A document that costs more than it may counts as the most."""
        self._excess_work = max(0, self._excess_work + work - AVERAGE_WORK_MAX)
        if self._excess_work > EXCESS_WORK_MAX:
            self.failure = (
                f"the expressions cost more than {WORK_MAX:,} steps for a document, or more than "
                f"{AVERAGE_WORK_MAX:,} for most of them; write simpler ones"
            )


def _included(values: Sequence[Any]) -> bytes:
    """The included values as a JSON array; empty if there are none, if it is too long, or if one of
    them has no JSON."""
    if not values:
        return b""
    try:
        data = msgspec.json.encode(values)
    except (TypeError, ValueError, RecursionError):
        # An expression as a value (`&a`); a document's key that is not UTF-8, or a sum of more
        # digits than Python writes.
        return b""
    return data if len(data) <= INCLUDED_BYTES_MAX else b""
