"""What is freed is given back."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.allocator import FALL_BYTES, Tide

MIB: Final = 1024 * 1024

HOLES: Final = """
import ctypes
from tests.kit.process import status_of
from upr_server.allocator import return_freed_memory, trim
import os

def resident():
    return status_of(os.getpid(), "RssAnon")

return_freed_memory()
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


def test_holes_between_what_lives_are_given_back() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("glibc's allocator is what this is about")
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) > 150 * MIB


@given(st.lists(st.integers(0, 8 * FALL_BYTES), max_size=50))
def test_it_is_time_when_half_of_the_most_since_the_last_time_is_gone(counts: list[int]) -> None:
    times: list[int] = []
    at = 0
    tide = Tide(lambda: times.append(at))
    since = 0
    for at, counted in enumerate(counts):
        most = max(counts[since : at + 1])
        is_time = most - counted >= FALL_BYTES and counted <= most / 2
        before = len(times)
        tide.reached(counted)
        assert len(times) - before == is_time
        if is_time:
            assert times[-1] == at
            since = at
