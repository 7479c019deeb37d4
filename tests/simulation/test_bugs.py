"""The tester tested: each bug that is put in is found, by the first seed that ever found it, and
without it that seed finds nothing. The numbers are those of `python -m tests.simulation.bug_table`.
"""

from __future__ import annotations

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.scenario import run_seed

FOUND_BY: dict[str, int] = {}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    seed = FOUND_BY[bug]
    with BUGS[bug]():
        assert run_seed(seed)[0].violation


def test_without_bugs_these_seeds_find_nothing() -> None:
    assert not [seed for seed in set(FOUND_BY.values()) if run_seed(seed)[0].violation]
