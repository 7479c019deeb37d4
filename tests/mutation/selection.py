"""The tests that a mutant is tried with: those that run its line, the quickest first."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from tests.mutation.covered_lines import Line, TestCost


def tests_of(line: Line, costs: Mapping[str, TestCost]) -> list[str]:
    """The tests that run a line, the quickest first; all tests if it runs only at an import."""
    quickest = sorted(costs, key=lambda test: costs[test].processor_s)
    return [test for test in quickest if line in costs[test].lines] or quickest


def limit_time(*, processor_s: float, elapsed_s: float) -> None:
    """Has a signal end this process after so many seconds, unless another limit takes their place.

    A broken line may loop for ever. The processor's time shows this on a busy machine too; the
    clock is for one that waits for ever.
    """
    signal.setitimer(signal.ITIMER_PROF, processor_s)
    signal.setitimer(signal.ITIMER_REAL, elapsed_s)


class Selection:
    """A pytest plugin that runs these tests in this order, and ends one that takes far too long."""

    def __init__(self, tests: Sequence[str], costs: Mapping[str, TestCost]) -> None:
        self._order: Final = {test: place for place, test in enumerate(tests)}
        self._costs: Final = costs

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out the other tests."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order),
            key=lambda item: self._order[item.nodeid],
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Limits a test as it begins."""
        cost = self._costs[nodeid]
        limit_time(processor_s=1 + 3 * cost.processor_s, elapsed_s=30 + 5 * cost.elapsed_s)
