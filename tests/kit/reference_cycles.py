"""Turns Python's garbage collector off, so that a reference cycle shows: nothing frees it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections(*, shows_earlier: bool = False) -> Iterator[None]:
    """Nothing is collected for as long as the context, and no garbage is there at its start.

    Args:
        shows_earlier: Whether `gc.get_objects` shows what is there at the start. By default the
            collector leaves that alone from then on: other tests leave so much that a look at it
            takes a second.
    """
    gc.collect()
    if not shows_earlier:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
