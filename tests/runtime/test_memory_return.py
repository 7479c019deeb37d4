"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.runtime.memory_return import (
    COUNTED_ITEMS,
    FALL_BYTES,
    PAUSE_MAX,
    HeapTrimmer,
    resident_bytes,
    sums_in_steps,
)

MIB: Final = 1024 * 1024

HOLES: Final = """
import ctypes
from tests.kit.process import status_of
from upr_server.runtime.memory_return import keep_heap_small, trim
import os

def resident():
    return status_of(os.getpid(), "RssAnon")

keep_heap_small()
library = ctypes.CDLL(None)
large, small = [], []
for number in range(2000):
    large.append(bytes([number % 256]) * 100_000)
    small.append(bytes([number % 256]) * 2_000)
large.clear()
before = resident()
"""

TRIM: Final = """
steps = 0
for _ in trim():
    steps += 1
print(before - resident(), steps)
"""

CLOSE: Final = """
class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

library.mallinfo2.restype = Figures

def bytes_in_use():
    return library.mallinfo2().h

used = bytes_in_use()
for steps in range(20):
    trimming = trim()
    for _ in range(steps):
        next(trimming, None)
    trimming.close()
print(bytes_in_use() - used)
"""

IN_THREADS: Final = """
import os
import threading
from tests.kit.process import status_of
from upr_server.runtime.memory_return import keep_heap_small

def resident():
    return status_of(os.getpid(), "RssAnon")

def work_in_turn():
    # All threads are there before the first of them works: each could have a heap of its own.
    threads_here.wait()
    with turn:
        large = []
        for number in range(500):
            large.append(bytes([number % 256]) * 100_000)
            small.append(bytes([number % 256]) * 2_000)
        large.clear()
    threads_here.wait()

keep_heap_small()
small = []
turn = threading.Lock()
threads_here = threading.Barrier(4)
before = resident()
threads = [threading.Thread(target=work_in_turn) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""


def with_holes(script: str) -> list[int]:
    """The numbers that a script prints, in a process whose heap has 200 MB of holes."""
    return numbers_of(HOLES + script)


def numbers_of(script: str) -> list[int]:
    """The numbers that a script prints, in a process of its own."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("glibc's allocator is what this is about")
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [int(number) for number in result.stdout.split()]


def test_trimming_returns_holes_between_live_objects_in_steps() -> None:
    returned_bytes, steps = with_holes(TRIM)
    assert returned_bytes > 150 * MIB
    assert steps > 10


def test_a_trim_that_is_closed_at_any_step_takes_nothing() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("this glibc does not tell how much memory is in use")
    (taken_bytes,) = with_holes(CLOSE)
    assert taken_bytes < MIB


def test_memory_that_one_thread_has_freed_is_of_use_to_the_others() -> None:
    (grown_bytes,) = numbers_of(IN_THREADS)
    # 50 MB at a time, in four threads; with a heap for each it was 194 MiB.
    assert grown_bytes < 100 * MIB


class Memory:
    """The memory of a process, of which some is in use.

    Attributes:
        in_use: Bytes in use.
        resident: Bytes that the process has.
        trims: How often the heap was trimmed.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.resident = 0
        self.trims = 0
        self.trimmer = HeapTrimmer(self._trim, lambda: self.resident)

    def use(self, nbytes: int, counted: int = 0) -> None:
        """So many bytes are in use; what was resident stays so."""
        self.in_use = nbytes
        self.resident = max(self.resident, nbytes)
        for _ in self.trimmer.note_use(counted):
            pass

    def _trim(self) -> Iterator[None]:
        self.trims += 1
        yield
        self.resident = self.in_use


def test_memory_that_nobody_counts_is_given_back_once_it_does_not_grow() -> None:
    memory = Memory()
    memory.use(50 * MIB)
    for number in range(1, 10):
        memory.use(50 * MIB + number * FALL_BYTES)
    assert memory.resident == 50 * MIB + 9 * FALL_BYTES
    memory.use(50 * MIB)
    assert memory.resident == 50 * MIB
    assert memory.trims == 1


def test_memory_that_is_counted_and_freed_is_given_back() -> None:
    memory = Memory()
    memory.use(50 * MIB)
    memory.use(50 * MIB + 4 * FALL_BYTES, counted=4 * FALL_BYTES)
    assert not memory.trims
    for _ in range(2):
        memory.use(50 * MIB)
    assert memory.resident == 50 * MIB


def test_memory_that_is_in_use_is_looked_through_more_and_more_rarely() -> None:
    memory = Memory()
    memory.use(50 * MIB)
    for seconds, trims in ((60, 7), (3600, 13), (3 * PAUSE_MAX, 16)):
        for _ in range(seconds):
            memory.use(50 * MIB + 3 * FALL_BYTES)
        assert memory.trims <= trims
    for _ in range(PAUSE_MAX):
        memory.use(50 * MIB)
    assert memory.resident == 50 * MIB


def test_what_is_freed_beside_memory_that_is_in_use_is_given_back_at_once() -> None:
    memory = Memory()
    memory.use(50 * MIB)
    for _ in range(PAUSE_MAX):
        memory.use(50 * MIB + 3 * FALL_BYTES)
    memory.use(50 * MIB + 9 * FALL_BYTES, counted=6 * FALL_BYTES)
    trims_before = memory.trims
    for _ in range(2):
        memory.use(50 * MIB + 3 * FALL_BYTES)
    assert memory.resident == 50 * MIB + 3 * FALL_BYTES
    assert memory.trims == trims_before + 1


@given(st.lists(st.tuples(st.integers(0, 8 * FALL_BYTES), st.floats(0, 1)), max_size=50))
def test_what_was_in_use_for_however_long_is_given_back(uses: list[tuple[int, float]]) -> None:
    memory = Memory()
    memory.use(MIB)
    for nbytes, counted_part in uses:
        memory.use(MIB + nbytes, counted=int(nbytes * counted_part))
    # In about as many seconds as it was in use.
    for _ in range(2 * len(uses) + 2):
        memory.use(MIB)
    assert memory.resident < MIB + FALL_BYTES


@pytest.mark.parametrize("count", [0, 1, COUNTED_ITEMS, 2 * COUNTED_ITEMS + 1])
def test_what_items_take_is_counted_in_steps(count: int) -> None:
    calls: list[int] = []

    def count_bytes(item: int) -> int:
        calls.append(item)
        return 3 * item

    items = list(range(count))
    total = 0
    for nbytes in sums_in_steps(items, count_bytes):
        assert 0 < len(calls) <= COUNTED_ITEMS
        calls.clear()
        items.append(0)
        total += nbytes
    assert total == 3 * sum(range(count))


def test_what_is_resident_is_told() -> None:
    assert resident_bytes() > MIB or not sys.platform.startswith("linux")
