"""Partitions as users write them: `7`, `0-3`, or several of these with commas."""

from __future__ import annotations

import re
from typing import Final

from upr_protocol.ids import PARTITIONS_END

_RANGE: Final = re.compile(r"([0-9]{1,9})(?: *- *([0-9]{1,9}))?")


def parse_partition_numbers(text: str) -> tuple[int, ...]:
    """The partitions in a text like `0-3,7`, in order, each once.

    Raises:
        ValueError: The text names none, or is something else; the sentence says which part of it.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip(" "))
        if match is None:
            raise ValueError(f"{part!r} is not a partition; write them like 0-3,7")
        lowest, highest = int(match[1]), int(match[2] or match[1])
        if not lowest <= highest < PARTITIONS_END:
            raise ValueError(
                f"{part!r} is not a partition, or a rising range, within 0 to {PARTITIONS_END - 1}"
            )
        numbers.update(range(lowest, highest + 1))
    return tuple(sorted(numbers))
