"""A sample of what `python -m tests.simulation.indexer` does, and bugs that it must find."""

from __future__ import annotations

import pytest

from tests.kit.effort import effort
from tests.simulation.indexer.__main__ import Totals
from tests.simulation.indexer.bugs import BUGS
from tests.simulation.indexer.scenario import run_seed
from tests.simulation.story import digest

SAMPLE = range(1000, 1000 + effort(3, 60))
SEEDS_OF_A_BUG = 60


def test_answers_are_right_or_name_what_is_missing() -> None:
    totals = Totals()
    for seed in SAMPLE:
        totals.add(run_seed(seed)[0])
    assert not totals.violations, totals.violations
    assert totals.answers > 5 * len(SAMPLE)
    assert totals.faults.total() > 3 * len(SAMPLE)


def test_a_seed_does_the_same_each_time() -> None:
    outcome, history = run_seed(7)
    again, history_again = run_seed(7)
    assert (again, digest(history_again)) == (outcome, digest(history))


@pytest.mark.parametrize("name", list(BUGS)[:: effort(5, 1)])
def test_a_bug_is_found(name: str) -> None:
    for seed in range(SEEDS_OF_A_BUG):
        with BUGS[name]():
            violation = run_seed(seed)[0].violation
        if violation:
            # It is the bug that is found, and not something else.
            assert not run_seed(seed)[0].violation
            return
    pytest.fail(f"none of {SEEDS_OF_A_BUG} seeds finds {name}")
