"""Looking items up, so many at once as memory has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from upr_protocol.client import Item

ITEMS_AT_ONCE: Final = 1000
"""How many items are asked for together at most."""

FIRST_AT_ONCE: Final = 16
"""How many items are asked for at first, when nothing is known of their size."""

GROWTH_MAX: Final = 4
"""How many times as many items are asked for next at most: the next ones may be longer."""

BYTES_AT_ONCE: Final = 8 * 1024 * 1024
"""About how many bytes of values come together, if the next items are as long as those before. An
item has 20 MiB at most, and an Arrow array 2 GiB."""


class ItemSource(Protocol):
    """Gives items."""

    def get_items(self, keys: Sequence[str | bytes]) -> list[Item | None]:
        """The items at `keys`, in their order; None for each that is missing."""


class ItemLookup:
    """Looks items up.

    Args:
        source: The bucket.
    """

    def __init__(self, source: ItemSource) -> None:
        self._source = source
        self._at_once = FIRST_AT_ONCE

    def parts(self, keys: Sequence[str | bytes]) -> Iterator[list[Item | None]]:
        """The items at `keys`, in their order, in parts; None for each that is missing."""
        begin = 0
        while begin < len(keys):
            items = self._source.get_items(keys[begin : begin + self._at_once])
            begin += len(items)
            nbytes = sum(len(item.value) for item in items if item is not None)
            fitting_count = BYTES_AT_ONCE * len(items) // max(nbytes, 1)
            self._at_once = max(1, min(fitting_count, GROWTH_MAX * self._at_once, ITEMS_AT_ONCE))
            yield items
