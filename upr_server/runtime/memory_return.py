"""Memory that is freed goes back to the system: the C library's heap and Python's collector."""

from __future__ import annotations

import ctypes
import gc
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

RARE_OBJECTS: Final = 50_000
"""How many objects more must be made than freed before the youngest generation is collected. By
default it is 700, which is the work of one batch."""

RARE_ROUNDS: Final = 20
"""Collections of one generation before one of the next older."""

YOUNG_OBJECTS: Final = 10_000
"""How many objects more must be made than freed before Python's collector looks at them: 1 to 2 ms
of the loop."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_heap_small() -> None:
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


def rare_collections() -> None:
    """Excludes the objects that exist now from collection, and collects the others more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(RARE_OBJECTS, RARE_ROUNDS, RARE_ROUNDS)


def collect_only_young() -> None:
    """Has Python's collector look at each object once, when it is young.

    A collection of all objects holds the loop for 0.3 s where 200 clients have 1,000 streams each,
    and for 1 s where 40 buckets have 1,024 partitions. So what lives long must be in no reference
    cycle when its time is over, and reference counts free it at once: connections, buckets, and
    what they hold. Cycles of a moment, as exceptions make them, are found while they are young.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    gc.callbacks.append(_exclude_survivors)


def _exclude_survivors(phase: str, _info: object) -> None:
    if phase == "stop":
        gc.freeze()


class HeapTrimmer:
    """Trims the heap when the memory in use has fallen far enough for that to pay.

    What slow consumers have not read yet lies between objects that live longer. Once they have
    caught up the heap is mostly holes: a server that counted 37 MiB kept 1.4 GiB.

    Args:
        trim: Trims the heap.
    """

    def __init__(self, trim: Callable[[], None] = trim) -> None:
        self._trim = trim
        self._peak_bytes = 0

    def note_use(self, nbytes: int) -> None:
        """So many bytes are in use now, as far as they are counted. Trims the heap when that is
        half of the peak since the last time, or less."""
        self._peak_bytes = max(self._peak_bytes, nbytes)
        if self._peak_bytes - nbytes >= max(FALL_BYTES, self._peak_bytes // 2):
            self._peak_bytes = nbytes
            self._trim()
