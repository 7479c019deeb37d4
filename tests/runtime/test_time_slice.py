"""Time slices of threads, as the kernel tells them."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from struct import Struct
from typing import TypeVar

import pytest

from upr_server.runtime import in_background, set_time_slice, time_slice

T = TypeVar("T")

ATTRIBUTES = Struct("=IIQiIQQQ")
GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275, "riscv64": 275}


def in_a_thread(function: Callable[[], T]) -> T:
    """What a function gives in a thread of its own, which ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def slice_and_policy() -> tuple[float, int]:
    """The slice of the calling thread, in seconds, and its policy."""
    data = ctypes.create_string_buffer(ATTRIBUTES.size)
    number = GET_ATTRIBUTES[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, data, ATTRIBUTES.size, 0) == 0
    _, policy, _, _, _, slice_ns, _, _ = ATTRIBUTES.unpack(data.raw)
    return slice_ns / 1e9, policy


@pytest.fixture(scope="module")
def own_slice_s() -> float:
    """The system's own slice."""
    if platform.system() != "Linux" or platform.machine() not in GET_ATTRIBUTES:
        pytest.skip("there are slices on Linux")
    slice_s, _ = in_a_thread(slice_and_policy)
    if not slice_s:
        pytest.skip("the kernel has no slices of threads")
    return slice_s


def test_a_thread_has_the_slice_that_it_asks_for(own_slice_s: float) -> None:
    def ask() -> list[tuple[float, int]]:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        answers = []
        for slice_s, is_batch in ((0.0005, False), (0.01, True), (0, True), (0, False)):
            set_time_slice(slice_s, is_batch=is_batch)
            answers.append(slice_and_policy())
            assert os.getpriority(os.PRIO_PROCESS, 0) == niceness
        return answers

    assert in_a_thread(ask) == [
        (0.0005, os.SCHED_OTHER),
        (0.01, os.SCHED_BATCH),
        (own_slice_s, os.SCHED_BATCH),
        (own_slice_s, os.SCHED_OTHER),
    ]


@pytest.mark.parametrize("slice_before_s", [0, time_slice.SHORT_SLICE_S])
@pytest.mark.parametrize("is_batch", [False, True])
def test_work_in_the_background_has_long_slices_until_it_ends(
    own_slice_s: float, is_batch: bool, slice_before_s: float
) -> None:
    def work() -> list[tuple[float, int]]:
        set_time_slice(slice_before_s, is_batch=is_batch)
        with suppress(ZeroDivisionError), in_background():
            answers.append(slice_and_policy())
            raise ZeroDivisionError
        answers.append(slice_and_policy())
        return answers

    answers: list[tuple[float, int]] = []
    assert in_a_thread(work) == [
        (time_slice.LONG_SLICE_S, os.SCHED_BATCH),
        (slice_before_s or own_slice_s, os.SCHED_BATCH if is_batch else os.SCHED_OTHER),
    ]


def test_nothing_happens_where_there_are_no_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    time_slice._kernel_call.cache_clear()
    try:
        before = os.sched_getscheduler(0)
        with in_background():
            assert os.sched_getscheduler(0) == before
    finally:
        time_slice._kernel_call.cache_clear()
