"""A tree of an index's file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lmdb

Tree = Any
"""lmdb does not tell what its trees are called."""


def items_between(
    transaction: lmdb.Transaction[bytes], tree: Tree, low: bytes, high: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """The items with keys from `low` on and below `high`, in order. Take them all, or close it."""
    with transaction.cursor(tree) as cursor:
        has_key = cursor.set_range(low) if low else cursor.first()
        while has_key and cursor.key() < high:
            yield cursor.item()
            has_key = cursor.next()
