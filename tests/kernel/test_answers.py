"""The answers of every build, which must say the same of any interleaving."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kernel.builds import BUILDS, Outcome, outcome
from upr_protocol.ids import Cas, HistoryId, SeqNo
from upr_server.engine.mutate_result import MutateResult, pack

LIMITS: Final = (4, 60, 3, 7, 10, 5, 6)
WRITERS: Final = [bytes([number]) * 16 for number in range(5)]
WRITER: Final = st.sampled_from(WRITERS)
NUMBER: Final = st.integers(0, (1 << 64) - 1)

of_each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


class AnswersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.builds = [build.Answers(*LIMITS) for build in BUILDS.values()]
        self.counters = dict.fromkeys(WRITERS, 0)
        self.high = 1

    def each(self, name: str, *args: Any) -> Outcome:
        """The outcome of a call, in which all builds agree."""
        outcomes = [outcome(getattr(answers, name), *args) for answers in self.builds]
        assert all(result == outcomes[0] for result in outcomes), (name, args, outcomes)
        return outcomes[0]

    def next_counter(self, writer: bytes, gap: int) -> int:
        self.counters[writer] += gap
        return self.counters[writer]

    @rule(
        writer=WRITER,
        gap=st.integers(1, 3),
        answer=st.sampled_from([b"", b"short", bytes(30), bytes(90)]),
        rise=st.integers(0, 2),
        attempt=st.sampled_from([0, 0, 1, 5]),
    )
    def remember(self, writer: bytes, gap: int, answer: bytes, rise: int, attempt: int) -> None:
        self.high += rise
        counter = self.next_counter(writer, gap)
        outcome_kind, _ = self.each("remember", writer, counter, answer, self.high, attempt)
        assert outcome_kind == "returned"

    @rule(writer=WRITER, counter=st.integers(0, 10))
    def remember_again(self, writer: bytes, counter: int) -> None:
        newest = self.each("newest", writer)[1]
        if newest is not None and counter <= newest[0]:
            arguments = (writer, counter, b"", self.high, 0)
            assert self.each("remember", *arguments) == ("raised", ValueError)

    @rule(writer=WRITER, rise=st.integers(1, 3), history=NUMBER, first=NUMBER, cas=NUMBER)
    def remember_plain(self, writer: bytes, rise: int, history: int, first: int, cas: int) -> None:
        self.high += rise
        counter = self.next_counter(writer, 1)
        self.each("remember_plain", writer, counter, 3, history, first, self.high, cas)
        # Another answer may have been too large for this one to stay.
        result = MutateResult(
            HistoryId(history), SeqNo(first), SeqNo(self.high), Cas(cas), attempt=3
        )
        assert self.each("newest", writer)[1] == (counter, pack(result))

    @rule(writer=WRITER, rise=st.integers(0, 2), answer=st.sampled_from([b"", bytes(70)]))
    def replace_newest(self, writer: bytes, rise: int, answer: bytes) -> None:
        if self.each("newest", writer)[1] is not None:
            self.high += rise
            self.each("replace_newest", writer, answer, self.high, 2)

    @rule(writer=WRITER, back=st.integers(0, 4), applied=st.integers(0, 30))
    def note_applied(self, writer: bytes, back: int, applied: int) -> None:
        counter = self.counters[writer] - back
        if counter >= 0 and self.each("answer_to", writer, counter)[1][0] is not None:
            self.each("note_applied", writer, counter, applied)

    @rule(back=st.integers(0, 8))
    def take_unsaved(self, back: int) -> None:
        self.each("take_unsaved", max(0, self.high - back))

    @rule()
    def track_unsaved(self) -> None:
        self.each("track_unsaved")

    @rule(back=st.integers(0, 6))
    def truncate(self, back: int) -> None:
        seq = max(0, self.high - back)
        tokens = self.each("tokens_above", seq)
        assert self.each("truncate", seq) == tokens
        self.high = max(seq, 1)

    @rule(writer=WRITER, counter=st.integers(0, 30), attempt=st.integers(0, 5))
    def ask(self, writer: bytes, counter: int, attempt: int) -> None:
        self.each("answer_to", writer, counter)
        self.each("is_new", writer, counter, attempt)
        self.each("attempt", writer)

    @invariant()
    def all_say_the_same(self) -> None:
        for answers in self.builds:
            answers.check_invariants()
        assert len({answers.nbytes for answers in self.builds}) == 1
        assert len({len(answers) for answers in self.builds}) == 1
        self.each("between", 0, 1 << 40)
        self.each("between", self.high - 1, self.high)


TestAnswers = AnswersMachine.TestCase
TestAnswers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@of_each_build
def test_many_writers_and_answers(build: Any) -> None:
    """More than any table or ring begins with."""
    answers = build.Answers(64, 1 << 20, 100, 1, 1, 1, 8)
    answers.track_unsaved()
    for step in range(6000):
        writer = (step * 7 % 150).to_bytes(16, "little")
        answers.remember(writer, step, b"%d" % step, step // 3, 0)
        if step % 500 == 499:
            answers.check_invariants()
            assert len(answers.take_unsaved(step // 3 - 10)) > 100
    assert len(answers) == 100
    answers.truncate(1000)
    answers.check_invariants()
    assert len(answers) == 0 or answers.between(1001, 1 << 40) == []


@of_each_build
def test_arguments_are_checked(build: Any) -> None:
    answers = build.Answers(*LIMITS)
    for limits in ((0, *LIMITS[1:]), ((1 << 16) + 1, *LIMITS[1:]), (1, 1, 0, 1, 1, 1, 1)):
        assert outcome(build.Answers, *limits) == ("raised", ValueError)
    for writer in (b"", bytes(15), bytes(17)):
        assert outcome(answers.answer_to, writer, 1) == ("raised", ValueError)
        assert outcome(answers.remember, writer, 1, b"", 1, 0) == ("raised", ValueError)
        assert outcome(answers.is_new, writer, 1, 0) == ("raised", ValueError)
    with pytest.raises(KeyError):
        answers.replace_newest(WRITERS[0], b"", 1, 0)
    with pytest.raises(KeyError):
        answers.note_applied(WRITERS[0], 1, 0)
    assert (len(answers), answers.nbytes) == (0, 0)
