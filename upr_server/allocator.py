"""The C library's allocator: what is freed is to be given back."""

from __future__ import annotations

import ctypes
from typing import Final

MMAP_THRESHOLD_BYTES: Final = 256 * 1024
"""Blocks of this size have pages of their own, which go back when they are freed. glibc raises its
threshold up to 32 MiB as such blocks are freed; then chunks of all sizes lie side by side in one
heap, and the holes between them stay: a server at its quota took 15 % more than it counted. Chunks
of publishers, mostly smaller than this, come from the heap: their pages would be new each time, a
tenth of what ingest costs. (At a quota of 256 MiB chunks of 145 kB took 259 MiB, not 249.)"""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def return_freed_memory() -> None:
    """Has glibc keep to `MMAP_THRESHOLD_BYTES`. With another C library nothing happens."""
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * MMAP_THRESHOLD_BYTES)
