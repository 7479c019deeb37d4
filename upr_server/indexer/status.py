"""What is to be told of an index."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen
class IndexStatus:
    """One index.

    Attributes:
        name: `DESIGN/INDEX`.
        state: `building`, or `ready` when it can be asked.
        key: Its key expressions.
        filter: Its filter; empty for none.
        entries: How many entries it has.
        disk_bytes: What it takes on disk.
        too_long: Documents left out since the start, as their keys are too long.
        behind: How many sequence numbers it is behind the running indexes' stream.
    """

    name: str
    state: Literal["building", "ready"]
    key: tuple[str, ...]
    filter: str
    entries: int
    disk_bytes: int
    too_long: int
    behind: int
