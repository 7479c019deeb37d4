"""The order of JSON values as keys, written down plainly."""

from __future__ import annotations

from itertools import zip_longest


def rank(part: object) -> int:
    """Where a type comes."""
    if part is None or isinstance(part, bool):
        return {None: 0, False: 1, True: 2}[part]
    return 3 if isinstance(part, int | float) else 4 if isinstance(part, str) else 5


def compare(left: object, right: object) -> int:
    """The order of two parts, as slowly and plainly as can be."""
    if rank(left) != rank(right):
        return -1 if rank(left) < rank(right) else 1
    if isinstance(left, list) and isinstance(right, list):
        no_value = object()
        for a, b in zip_longest(left, right, fillvalue=no_value):
            if a is no_value or b is no_value:
                return -1 if a is no_value else 1
            if order := compare(a, b):
                return order
        return 0
    if left == right:
        return 0
    return -1 if left < right else 1  # type: ignore[operator]
