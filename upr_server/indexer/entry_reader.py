"""Reading the entries of an index with a cursor, and counting what is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs

from upr_server.indexer.pure.keys import end_of_parts, end_of_prefix

END_OF_KEYS: Final = b"\xff" * 64
"""Above every entry: parts begin with less."""

Cursor = Any
"""lmdb does not tell what its cursors are called."""


@attrs.frozen
class KeyRange:
    """A range [low, high) of entries.

    Attributes:
        low: The lowest bytes in the range.
        high: The lowest bytes above it.
    """

    low: bytes = b""
    high: bytes = END_OF_KEYS


@attrs.frozen
class EntrySelection:
    """Which entries a scan is about, and their order.

    Attributes:
        ranges: Where they are; disjoint, the lowest first.
        descending: Whether the highest entry comes first.
        distinct_parts: If not 0, only the first so many parts of the keys count: each different
            beginning stands once, in place of the entries that begin so.
    """

    ranges: tuple[KeyRange, ...] = (KeyRange(),)
    descending: bool = False
    distinct_parts: int = 0


class EntryReader:
    """Reads entries in order.

    Args:
        cursor: Stands in the tree of entries.

    Attributes:
        searches: How often it has searched the tree for a place.
        entries_read: How many entries it has looked at; among them the one behind the end of a
            range, which says that the range has ended.
    """

    __slots__ = ("_cursor", "entries_read", "searches")

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.searches = self.entries_read = 0

    def select(self, selection: EntrySelection) -> Iterator[bytes]:
        """The entries of a selection, or the distinct beginnings of their keys, in its order."""
        ranges = selection.ranges[::-1] if selection.descending else selection.ranges
        parts = selection.distinct_parts
        if not parts:
            read_range = self._descending if selection.descending else self._ascending
            for key_range in ranges:
                yield from read_range(key_range)
            return
        previous = None
        for key_range in ranges:
            for prefix in self._prefixes(key_range, parts, descending=selection.descending):
                # Two ranges may have the ends of what begins the same.
                if prefix != previous:
                    yield prefix
                previous = prefix

    def _ascending(self, key_range: KeyRange) -> Iterator[bytes]:
        cursor = self._cursor
        self.searches += 1
        has_key = cursor.set_range(key_range.low) if key_range.low else cursor.first()
        for key in cursor.iternext(keys=True, values=False) if has_key else ():
            self.entries_read += 1
            if key >= key_range.high:
                return
            yield key

    def _descending(self, key_range: KeyRange) -> Iterator[bytes]:
        cursor = self._cursor
        self.searches += 1
        has_key = cursor.prev() if cursor.set_range(key_range.high) else cursor.last()
        for key in cursor.iterprev(keys=True, values=False) if has_key else ():
            self.entries_read += 1
            if key < key_range.low:
                return
            yield key

    def _prefixes(self, key_range: KeyRange, parts: int, *, descending: bool) -> Iterator[bytes]:
        """The different first `parts` parts in a range. Each costs a search for the next one,
        however many entries begin with it."""
        read_range = self._descending if descending else self._ascending
        while (entry := next(read_range(key_range), None)) is not None:
            prefix = entry[: end_of_parts(entry, parts)]
            yield prefix
            if descending:
                key_range = attrs.evolve(key_range, high=prefix)
            else:
                key_range = attrs.evolve(key_range, low=end_of_prefix(prefix))
