"""The C library's allocator: what is freed is to be given back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

MMAP_THRESHOLD_BYTES: Final = 256 * 1024
"""Blocks of this size have pages of their own, which go back when they are freed. glibc raises its
threshold up to 32 MiB as such blocks are freed; then chunks of all sizes lie side by side in one
heap, and the holes between them stay: a server at its quota took 15 % more than it counted. Chunks
of publishers, mostly smaller than this, come from the heap: their pages would be new each time, a
tenth of what ingest costs. (At a quota of 256 MiB chunks of 145 kB took 259 MiB, not 249.)"""

FALL_BYTES: Final = 64 * 1024 * 1024
"""What must have been freed for it to be worth to look for whole pages among the holes."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def return_freed_memory() -> None:
    """Has glibc keep to `MMAP_THRESHOLD_BYTES`. With another C library nothing happens."""
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * MMAP_THRESHOLD_BYTES)


def trim() -> None:
    """Has glibc give back every free page, wherever it lies, and not only those at the heap's end.
    It takes 11 ms for each 100 MB that it gives back, in which nothing else runs. With another C
    library nothing happens."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class Tide:
    """Says when memory has fallen so far that it is time to `trim`.

    What consumers that are behind have not read lies between what lives longer. When they have
    caught up the heap is mostly holes: a server that counted 37 MiB kept 1.4 GiB.

    Args:
        ebbed: Called then.
    """

    def __init__(self, ebbed: Callable[[], None] = trim) -> None:
        self._ebbed = ebbed
        self._most = 0

    def reached(self, counted: int) -> None:
        """So many bytes are in use now, as far as they are counted."""
        self._most = max(self._most, counted)
        if self._most - counted >= max(FALL_BYTES, self._most // 2):
            self._most = counted
            self._ebbed()
