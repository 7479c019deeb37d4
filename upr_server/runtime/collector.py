"""Python's garbage collector in a process that holds many objects for a long time."""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""How many objects more must be made than freed before the youngest generation is collected. By
default it is 700, which is the work of one batch."""

YOUNG_ROUNDS: Final = 20
"""Collections of one generation before one of the next older."""


def rare_collections() -> None:
    """Excludes the objects that exist now from collection, and collects the others more rarely.

    Almost nothing here is in a cycle, and reference counts free it; what remains of a bucket is
    collected when the bucket is deleted.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, YOUNG_ROUNDS)
