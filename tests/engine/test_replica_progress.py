"""What replicas report, and who waits for it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upr_protocol.ids import SeqNo
from upr_server.engine.replica_progress import STEP_CALLS, ReplicaProgress


@settings(max_examples=200)
@given(
    reports=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 9)), max_size=12
    ),
    waits=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(0, 12)),
        max_size=6,
    ),
)
def test_a_waiting_call_is_answered_once_enough_replicas_have_the_number(
    reports: list[tuple[str, int, int]], waits: list[tuple[int, int, bool, int]]
) -> None:
    # Numbers rise, as a partition gives them.
    begins = sorted(begin for *_, begin in waits)
    seqs = sorted(seq for seq, *_ in waits)
    waits = [
        (seq, copies, persisted, begin)
        for seq, (_, copies, persisted, _), begin in zip(seqs, waits, begins, strict=True)
    ]
    progress = ReplicaProgress()
    answers: dict[int, bool] = {}
    newest: dict[str, tuple[int, int]] = {}
    expected: dict[int, bool] = {}
    for step in range(13):
        for index, (seq, copies, persisted, begin) in enumerate(waits):
            if begin == step:

                def call(is_met: bool, index: int = index) -> None:
                    assert index not in answers
                    answers[index] = is_met

                progress.call_when_reached(
                    SeqNo(seq), copies, persisted=persisted, deadline=99.0, call=call
                )
        for index, (seq, copies, persisted, begin) in enumerate(waits):
            have = sum(report[persisted] >= seq for report in newest.values())
            if begin <= step and have >= copies:
                expected.setdefault(index, True)
        assert answers == expected
        if step < len(reports):
            name, received, behind = reports[step]
            newest[name] = received, max(0, received - behind)
            progress.report(name, SeqNo(received), SeqNo(newest[name][1]))
            for index, (seq, copies, persisted, begin) in enumerate(waits):
                have = sum(report[persisted] >= seq for report in newest.values())
                if begin <= step and have >= copies:
                    expected.setdefault(index, True)
            assert answers == expected
        for copies in (1, 2, 3):
            ranked = sorted((report[0] for report in newest.values()), reverse=True)
            assert progress.seq_reached_by(copies) == (
                ranked[copies - 1] if copies <= len(ranked) else 0
            )
        assert len(progress) == len(newest)
    open_waits = set(range(len(waits))) - set(answers)
    progress.make_calls(98.0)
    assert set(answers) == set(range(len(waits))) - open_waits
    progress.make_calls(99.0)
    assert all(answers[index] is False for index in open_waits)
    assert not progress.waiting_count


def new_waiting_progress(count: int) -> tuple[ReplicaProgress, list[tuple[int, bool]]]:
    """So many calls wait for the number 1; and what they are told."""
    progress, answers = ReplicaProgress(), list[tuple[int, bool]]()

    def call(index: int, is_reached: bool) -> None:
        answers.append((index, is_reached))

    for index in range(count):
        progress.call_when_reached(
            SeqNo(1), 1, persisted=False, deadline=9.0, call=partial(call, index)
        )
    return progress, answers


@pytest.mark.parametrize("end", ["reached", "late", "cleared"])
def test_thousands_of_waiting_calls_are_made_some_at_a_time(end: str) -> None:
    progress, answers = new_waiting_progress(1000)
    count = STEP_CALLS
    if end == "reached":
        count = progress.report("a", SeqNo(1), SeqNo(0))
    elif end == "cleared":
        progress.clear()
    counts = [len(answers)]
    while count:
        count = progress.make_calls(9.0 if end == "late" else 8.0)
        counts.append(len(answers))
    assert max(b - a for a, b in pairwise([0, *counts])) == STEP_CALLS
    assert answers == [(index, end == "reached") for index in range(1000)]
    assert not progress.waiting_count


def test_a_new_history_answers_waiting_calls_with_false() -> None:
    progress, answers = ReplicaProgress(), list[bool]()
    progress.report("a", SeqNo(5), SeqNo(5))
    progress.call_when_reached(SeqNo(9), 1, persisted=False, deadline=9.0, call=answers.append)
    progress.clear()
    assert answers == [False]
    assert progress.seq_reached_by(1) == 0


def test_what_comes_late_by_an_old_connection_does_not_count() -> None:
    """A replica may have connected again, and rolled back, while its packets were on their way."""
    progress = ReplicaProgress()
    old_connection, new_connection = 1, 2
    progress.report("a", SeqNo(6), SeqNo(6), old_connection)
    progress.report("a", SeqNo(5), SeqNo(5), new_connection)
    progress.report("a", SeqNo(7), SeqNo(7), old_connection)
    assert progress.seq_reached_by(1) == 5
    progress.forget_replica("a", old_connection)
    progress.report("a", SeqNo(8), SeqNo(8), new_connection)
    assert progress.seq_reached_by(1) == 8
    # A map has taken the replica out, and another one has put it back.
    progress.keep_replicas(())
    progress.report("a", SeqNo(9), SeqNo(9), new_connection)
    assert progress.seq_reached_by(1) == 9


def test_what_comes_late_does_not_count_though_the_newer_connection_has_ended() -> None:
    progress = ReplicaProgress()
    old_connection, new_connection, newest_connection = 1, 2, 3
    progress.report("a", SeqNo(5), SeqNo(5), new_connection)
    progress.forget_replica("a", new_connection)
    progress.report("a", SeqNo(7), SeqNo(7), old_connection)
    assert progress.seq_reached_by(1) == 0
    assert not len(progress)
    progress.report("a", SeqNo(6), SeqNo(6), newest_connection)
    assert progress.seq_reached_by(1) == 6


def test_closing_an_old_connection_keeps_the_reports_of_a_newer_one() -> None:
    progress = ReplicaProgress()
    old_connection, new_connection = 1, 2
    progress.report("a", SeqNo(5), SeqNo(5), old_connection)
    progress.report("a", SeqNo(6), SeqNo(5), new_connection)
    progress.forget_replica("a", old_connection)
    assert progress.seq_reached_by(1) == 6
    progress.forget_replica("a", new_connection)
    assert progress.seq_reached_by(1) == 0
