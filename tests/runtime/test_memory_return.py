"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.runtime.memory_return import FALL_BYTES, HeapTrimmer

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
trim()
print(before - resident())
"""


def test_trimming_returns_holes_between_live_objects() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("glibc's allocator is what this is about")
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) > 150 * MIB


@given(st.lists(st.integers(0, 8 * FALL_BYTES), max_size=50))
def test_the_heap_is_trimmed_when_half_of_the_peak_is_free(counts: list[int]) -> None:
    times: list[int] = []
    step = 0
    trimmer = HeapTrimmer(lambda: times.append(step))
    since = 0
    for step, counted in enumerate(counts):
        most = max(counts[since : step + 1])
        is_time = most - counted >= FALL_BYTES and counted <= most / 2
        before = len(times)
        trimmer.note_use(counted)
        assert len(times) - before == is_time
        if is_time:
            assert times[-1] == step
            since = step
