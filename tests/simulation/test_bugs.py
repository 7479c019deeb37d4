"""The tester tested: each bug that is put in is found, by the first seed that ever found it, and
without it that seed finds nothing. The numbers are those of `python -m tests.simulation.bug_table`.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.scenario import run_seed

FOUND_BY: Final = {
    "acknowledges_before_the_commit": 1,
    "goes_on_after_a_failed_fsync": 0,
    "records_the_log_only_at_snapshot_ends": 24,
    "compacts_under_a_backfill": 18,
    "ends_a_snapshot_one_early": 0,
    "collapses_past_a_cursor": 0,
    "evicts_an_unindexed_key": 68,
    "forgets_its_answers": 4,
    "forgets_answers_on_replicas": 28,
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
    "goes_on_where_another_was_active": 13836,
    "takes_any_copy_for_now": 7,
}


@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_bug_is_found(bug: str) -> None:
    seed = FOUND_BY[bug]
    with BUGS[bug]():
        assert run_seed(seed)[0].violation


def test_without_bugs_these_seeds_find_nothing() -> None:
    assert not [seed for seed in set(FOUND_BY.values()) if run_seed(seed)[0].violation]
