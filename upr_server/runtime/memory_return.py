"""Memory that is freed goes back to the system: the C library's heap."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

MMAP_THRESHOLD_BYTES: Final = 256 * 1024
"""Blocks of this size have pages of their own, which go back when they are freed. glibc raises its
threshold up to 32 MiB as such blocks are freed; then chunks of all sizes lie side by side in one
heap, and the holes between them stay: a server at its quota took 15 % more than it counted. Chunks
of publishers, mostly smaller than this, come from the heap: their pages would be new each time, a
tenth of what ingest costs. (At a quota of 256 MiB chunks of 145 kB took 259 MiB, not 249.)"""

FALL_BYTES: Final = 64 * 1024 * 1024
"""What must have grown beside what is counted for it to be worth to look for whole pages among the
holes."""

GROWTH_BYTES: Final = 1024 * 1024
"""What memory may grow by from one look to the next and count as standing still."""

PAUSE_MAX: Final = 4096
"""The longest pause between two trims of a heap that is in use though nobody counts it, in seconds.
One that returns nothing takes some 2 µs for each hole. Without any, memory that is freed later
would never go back."""

HOLE_BYTES: Final = (248 * 1024, 120 * 1024, 56 * 1024, 28 * 1024, 12 * 1024)
"""The sizes of the blocks that a trim takes out of the holes, the largest first. Each is below
`MMAP_THRESHOLD_BYTES`, above which blocks do not come from the heap; and each has a whole
page of 4 KiB."""

TRIM_STEP_S: Final = 0.001
"""How long one step of a trim takes."""

TRIM_STEPS_MAX: Final = 1000
"""Steps in which a trim takes holes: some GiB. While it runs others use none of them and make new
ones, so that under a load it might not end."""

COUNTED_ITEMS: Final = 256
"""Items whose memory one step counts: some 0.1 ms, and ten times as much on a busy machine, where
the processor's caches have been used for other things. 2,000 connections at once took 6 ms."""

FREED_BLOCKS: Final = 4096
"""Blocks that one step of a trim frees, at some 0.2 µs each."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_heap_small() -> None:
    """Has glibc keep to `MMAP_THRESHOLD_BYTES`, and to one heap for all threads: a block that one
    thread has freed is of use to the others. With a heap for each thread an indexer that caught up
    took 117 to 137 MiB where its pool had 48; with one 85. With another C library nothing happens.
    """
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * MMAP_THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def trim() -> Iterator[None]:
    """Has glibc give back the free pages of its heap, wherever they lie, and not only those at the
    heap's end. In steps of `TRIM_STEP_S`, between which others may run; it may be closed at any of
    them. With another C library nothing happens.

    Its own function for that, `malloc_trim`, does all of it in one call: 11 ms for each 100 MB. So
    this takes the holes as blocks of the heap, gives their pages back, and frees them again. A page
    that a block has only a part of stays: of holes of 100 kB a tenth.
    """
    library = ctypes.PyDLL(None)
    if hasattr(library, "malloc_trim"):
        yield from _Heap(library).give_back()


class _Heap:
    """The heap of glibc, of which the main thread's blocks come."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._allocate = library.malloc
        self._allocate.argtypes, self._allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
        self._free = library.free
        self._free.argtypes, self._free.restype = [ctypes.c_void_p], None
        self._advise = library.madvise
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._move_end = library.sbrk
        self._move_end.argtypes, self._move_end.restype = [ctypes.c_ssize_t], ctypes.c_void_p

    def give_back(self) -> Iterator[None]:
        """Gives back the pages of its holes, in steps."""
        blocks: list[int] = []
        try:
            yield from islice(self._take(blocks), TRIM_STEPS_MAX)
            while blocks:
                self._free_some(blocks, FREED_BLOCKS)
                yield
        finally:
            self._free_some(blocks, len(blocks))

    def _free_some(self, blocks: list[int], count: int) -> None:
        for _ in range(min(count, len(blocks))):
            self._free(blocks.pop())

    def _take(self, blocks: list[int]) -> Iterator[None]:
        for nbytes in HOLE_BYTES:
            is_hole = True
            while is_hole:
                is_hole = self._take_some(nbytes, blocks)
                yield

    def _take_some(self, nbytes: int, blocks: list[int]) -> bool:
        """Takes holes for a step, and gives their pages back. Whether there may be more of them."""
        ends_at, end = time.perf_counter() + TRIM_STEP_S, self._move_end(0)
        while time.perf_counter() < ends_at:
            block = self._allocate(nbytes)
            if not block:
                return False
            if self._move_end(0) != end or block > end:
                # There was no hole for it: the heap has grown, or it lies elsewhere.
                self._free(block)
                return False
            blocks.append(block)
            begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
            behind = (block + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            # With large pages a block may have none of its own.
            if behind > begin:
                self._advise(begin, behind - begin, mmap.MADV_DONTNEED)
        return True


def sums_in_steps(items: Iterable[T], count_bytes: Callable[[T], int]) -> Iterator[int]:
    """What items take together, in parts of `COUNTED_ITEMS` each, between which others may run.

    Args:
        items: The items. Those that come meanwhile do not count.
        count_bytes: What one of them takes.
    """
    remaining_items = iter(list(items))
    while counted_items := list(islice(remaining_items, COUNTED_ITEMS)):
        yield sum([count_bytes(item) for item in counted_items])


def resident_bytes() -> int:
    """The memory that this process has now, without what it shares with others; 0 where the system
    does not tell. A call takes 20 µs."""
    try:
        fields = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


class HeapTrimmer:
    """Trims the heap when much more memory is resident than is in use, as far as use is counted.

    What slow consumers have not read yet lies between objects that live longer. Once they have
    caught up the heap is mostly holes: a server that counted 37 MiB kept 1.4 GiB. Others of its
    memory nobody counts: answers that wait for their peers, for instance.

    Args:
        trim: Trims the heap, in steps.
        resident: How many bytes of memory the process has.
    """

    def __init__(
        self,
        trim: Callable[[], Iterator[None]] = trim,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._trim = trim
        self._resident = resident
        self._least_bytes = math.inf
        """The least that was ever resident and not counted."""
        self._in_use_bytes = math.inf
        """The least that was resident and not counted since a trim was in vain."""
        self._last_bytes = math.inf
        self._pause = 1
        """How many looks to wait before the next trim: twice as many after one that was in vain."""
        self._looks = 0

    def note_use(self, nbytes: int) -> Iterator[None]:
        """Notes how many bytes are in use now, as far as they are counted: to be called once a
        second. Trims the heap when what is resident beside them is half more than it was at its
        least, and does not grow: as long as it does, it is in use. So is what a trim did not give
        back: until half more is resident than that, trims are more and more rare. In steps, between
        which others may run."""
        uncounted_bytes = self._resident() - nbytes
        self._least_bytes = min(self._least_bytes, uncounted_bytes)
        self._in_use_bytes = min(self._in_use_bytes, uncounted_bytes)
        is_growing = uncounted_bytes > self._last_bytes + GROWTH_BYTES
        self._last_bytes = uncounted_bytes
        if not _is_much_more(uncounted_bytes, self._least_bytes):
            self._pause, self._looks = 1, 0
            return
        self._looks += 1
        is_new = _is_much_more(uncounted_bytes, self._in_use_bytes)
        if is_growing or (self._looks < self._pause and not is_new):
            return
        yield from self._trim()
        self._last_bytes = self._resident() - nbytes
        is_in_vain = uncounted_bytes - self._last_bytes < FALL_BYTES
        if is_in_vain:
            self._in_use_bytes = self._last_bytes
        self._pause = min(2 * self._pause, PAUSE_MAX) if is_in_vain and not is_new else 1
        self._looks = 0


def _is_much_more(nbytes: float, least_bytes: float) -> bool:
    return nbytes - least_bytes >= max(FALL_BYTES, least_bytes / 2)
