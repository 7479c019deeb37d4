"""A step that is long by chance fails no test, and one that is long each time does."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import trio

from tests.kit.longest_step import LongStepError, runs_again_if_long


@pytest.mark.parametrize(("long_count", "runs"), [(0, 1), (1, 2), (2, 2)])
def test_a_test_with_a_long_step_runs_once_more(long_count: int, runs: int) -> None:
    run_count = 0

    async def main() -> None:
        nonlocal run_count
        await trio.lowlevel.checkpoint()
        run_count += 1
        async with trio.open_nursery():
            if run_count <= long_count:
                raise LongStepError

    expected = pytest.raises(ExceptionGroup) if long_count == 2 else nullcontext()
    with expected:
        runs_again_if_long.kwargs["run"](main)
    assert run_count == runs
