"""Python's garbage collector in a process that holds very much for very long."""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""So many new objects, less those that went, before the young are looked at. By default it is 700,
which is the work of one batch."""

YOUNG_ROUNDS: Final = 20
"""Looks at the young before one at those that stayed, and so on."""


def rare_collections() -> None:
    """Leaves alone what is there by now, and has the rest looked at more rarely.

    Almost nothing here is in a cycle, and what is forgotten is freed by its counts; what a bucket
    leaves behind is collected when it is deleted.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, YOUNG_ROUNDS)
