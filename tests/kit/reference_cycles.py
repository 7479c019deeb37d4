"""Python's collector kept from its work, so that a reference cycle shows: nothing frees it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Nothing is collected for as long as the context, and no garbage is there at its start."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
