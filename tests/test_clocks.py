"""The clock of a test."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock


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
