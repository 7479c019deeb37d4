"""The clock of a test."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import MockClock

from tests.kit.steady_clock import STEP_S, SteadyClock


@pytest.fixture
async def clock(autojump_clock: MockClock) -> MockClock:
    return autojump_clock


async def test_a_clock_that_only_a_fixture_asks_for_is_the_clock_of_the_test(
    clock: MockClock,
) -> None:
    assert trio.lowlevel.current_clock() is clock


@pytest.mark.usefixtures("autojump_clock")
async def test_a_clock_that_only_a_mark_asks_for_is_the_clock_of_the_test() -> None:
    assert isinstance(trio.lowlevel.current_clock(), MockClock)


async def test_a_test_that_asks_for_no_clock_has_a_steady_clock() -> None:
    assert isinstance(trio.lowlevel.current_clock(), SteadyClock)


def test_a_pause_of_the_process_is_no_time_of_a_steady_clock() -> None:
    real_time = 1000.0
    clock = SteadyClock(lambda: real_time)
    clock.start_clock()
    began_at = clock.current_time()
    real_time += 0.05
    assert clock.current_time() == pytest.approx(began_at + 0.05)
    assert clock.deadline_to_sleep_time(began_at + 0.06) == pytest.approx(0.01)
    real_time += 60.0
    assert clock.current_time() == pytest.approx(began_at + 0.05 + STEP_S)
    assert clock.deadline_to_sleep_time(began_at + 60.0) == STEP_S
    assert clock.deadline_to_sleep_time(math.inf) == STEP_S
