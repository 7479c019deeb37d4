"""Numbers within bounds that help need not recite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import click


def number(low: int, high: int) -> Callable[[str], int]:
    """The type of a whole number from `low` to `high`, both included."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is no whole number") from None
        if not low <= value <= high:
            raise click.BadParameter(f"{value} is not from {low} to {high}")
        return value

    return convert


U32: Final = number(0, 2**32 - 1)
U64: Final = number(0, 2**64 - 1)
