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

from tests.client.resumed_takeover import ResumedTakeover
from tests.kit.effort import effort
from tests.kit.server_group import PARTITIONS, running_servers
from tests.simulation.bugs import BUGS
from tests.simulation.bugs.patch import replaced
from tests.simulation.indexer.bugs import BUGS as INDEXER_BUGS
from tests.simulation.scenario import run_seed

IN_A_TAKEOVER: Final = ("discard_interrupted_takeover", "continue_shared_history")
"""Bugs that need an interruption at one point of a takeover: see the last tests of this file."""

NOT_FOUND: Final = (
    "roll_back_into_snapshot",
    "resume_inside_any_snapshot",
    "record_failover_log_late",
)
"""Bugs that no profile finds often enough."""


FOUND: Final = [name for name in BUGS if name not in {*IN_A_TAKEOVER, *NOT_FOUND}]


@pytest.mark.parametrize("name", FOUND[2 :: effort(12, 1)])
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


def test_each_bug_can_be_planted() -> None:
    """What a bug replaces is still there and takes the same arguments. Otherwise a bug is found
    because it cannot be called, or only a run of all bugs shows that it is none any more."""
    for plant in (*(bug.plant for bug in BUGS.values()), *INDEXER_BUGS.values()):
        with plant():
            pass


class Greeter:
    def greet(self, name: str, *, loudly: bool = False) -> str:
        return name.upper() if loudly else name


@pytest.mark.parametrize(
    "part",
    [lambda _self: "", lambda _self, _name: "", lambda _self, loudly: "", property(lambda _: "")],
    ids=["an argument less", "an option less", "an option in place of it", "a property"],
)
def test_a_part_is_replaced_by_one_of_its_kind(part: object) -> None:
    with pytest.raises(TypeError, match="greet"), replaced(Greeter, "greet", part):
        pass
    with replaced(Greeter, "greet", lambda _self, name, **_options: name[::-1]):
        assert Greeter().greet("Ada", loudly=True) == "adA"
    assert Greeter().greet("Ada", loudly=True) == "ADA"


async def test_a_takeover_that_discards_an_interrupted_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with BUGS["discard_interrupted_takeover"].plant():
        async with running_servers("abc") as group:
            scenario = ResumedTakeover(group, monkeypatch, "b")
            # With the bug the target does not catch up, so the command waits in vain.
            await scenario.resume(handover_s=0.5)
            # `b` had accepted a write there.
            assert group.map("b").partitions[scenario.partition].active == "a"


async def test_a_takeover_that_continues_a_shared_history_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with BUGS["continue_shared_history"].plant():
        async with running_servers("abc") as group:
            scenario = ResumedTakeover(group, monkeypatch, "b")
            await scenario.resume()
            await scenario.finish()
            assert scenario.histories_begun() == [0] * PARTITIONS
