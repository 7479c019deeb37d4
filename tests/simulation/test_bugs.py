"""The tester tested: each bug that is put in is found, by the first seed that ever found it, and
without it that seed finds nothing. The numbers are those of `python -m tests.simulation.bug_table`.

Two bugs of interrupted takeovers need one seed in thousands. A test of the takeover, which makes
the same interruption on purpose, fails with them every time.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.client import test_takeover
from tests.simulation.bugs import BUGS
from tests.simulation.scenario import run_seed

FOUND_BY: Final = {
    "acknowledges_before_the_commit": 1,
    "goes_on_after_a_failed_fsync": 0,
    "records_the_log_only_at_snapshot_ends": 24,
    "compacts_under_a_backfill": 18,
    "ends_a_snapshot_one_early": 0,
    "collapses_past_a_cursor": 0,
    "evicts_an_unindexed_key": 89,
    "forgets_its_answers": 4,
    "forgets_answers_on_replicas": 49,
    "counts_itself_as_a_replica": 9,
    "asks_only_the_first_node": 43,
    "forgets_the_failover_entry": 1,
    "reuses_a_history_id": 14,
    "is_active_at_once_after_a_restart": 1,
    "takes_writes_while_it_hands_over": 1,
    "goes_on_where_the_histories_parted": 1,
    "leaves_streams_open_when_it_becomes_active": 3,
    "drops_a_cursor_and_says_nothing": 2,
    "acknowledges_what_was_behind_a_failure": 110,
    "takes_any_copy_for_now": 17,
}


@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_bug_is_found(bug: str) -> None:
    seed = FOUND_BY[bug]
    with BUGS[bug]():
        assert run_seed(seed)[0].violation


def test_without_bugs_these_seeds_find_nothing() -> None:
    assert not [seed for seed in set(FOUND_BY.values()) if run_seed(seed)[0].violation]


@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        ("gives_up_what_another_took_in", "so a is active again for partitions 0-3"),
        ("goes_on_where_another_was_active", r"assert \[1, 1, 1, 1\] == \[2, 2, 2, 2\]"),
    ],
)
async def test_a_bug_of_an_interrupted_takeover_is_found(
    bug: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = test_takeover.test_a_resumed_takeover_keeps_a_node_that_became_active_meanwhile
    # Any other failure would say nothing of the bug.
    expected = pytest.RaisesExc(AssertionError, match=sentence)
    with BUGS[bug](), pytest.RaisesGroup(expected, flatten_subgroups=True):
        await scenario(monkeypatch, "b")
