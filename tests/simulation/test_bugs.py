"""The tester tested: each planted bug is found in a few seeds of the profile that makes its
situation.

A seed gives another history after each change of the code, so a test does not name one. It runs
seeds until one finds the bug, so many that it would miss a bug that the profile still finds once
in a thousand times at most (`python -m tests.simulation.bug_table` measures how often each is
found).
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.client import test_takeover
from tests.simulation.bugs import BUGS
from tests.simulation.scenario import run_seed

IN_A_TAKEOVER: Final = {
    "discard_interrupted_takeover": "so a is active again for partitions 0-3",
    "continue_shared_history": r"assert \[1, 1, 1, 1\] == \[2, 2, 2, 2\]",
}
"""Bugs that need an interruption at one point, which a test of the takeover makes on purpose."""

NOT_FOUND: Final = (
    "roll_back_into_snapshot",
    "resume_inside_any_snapshot",
    "complete_partial_snapshot",
    "record_failover_log_late",
    "compact_leased_range",
    "promote_refilling_replica",
    "reuse_history_ids",
    "end_at_any_copy",
    "acknowledge_after_failed_commit",
)
"""Bugs that no profile finds often enough."""


@pytest.mark.parametrize(
    "name", [name for name in BUGS if name not in {*IN_A_TAKEOVER, *NOT_FOUND}]
)
def test_a_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    for seed in range(bug.seeds):
        with bug.plant():
            violation = run_seed(seed, bug.profile)[0].violation
        if violation:
            # It is the bug that is found, and not something else.
            assert not run_seed(seed, bug.profile)[0].violation
            return
    pytest.fail(f"none of {bug.seeds} seeds of the profile {bug.profile.name} finds {name}")


@pytest.mark.parametrize(("name", "sentence"), IN_A_TAKEOVER.items())
async def test_a_bug_of_an_interrupted_takeover_is_found(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = test_takeover.test_a_resumed_takeover_keeps_a_node_that_became_active_meanwhile
    # Any other failure would say nothing of the bug.
    expected = pytest.RaisesExc(AssertionError, match=sentence)
    with BUGS[name].plant(), pytest.RaisesGroup(expected, flatten_subgroups=True):
        await scenario(monkeypatch, "b")
