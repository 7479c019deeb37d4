"""The answers of every build, which must say the same of any interleaving."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kernel.answers import LIMITS, WRITERS, SeveralAnswers
from tests.kernel.builds import BUILDS, outcome

WRITER: Final = st.sampled_from(WRITERS)

of_each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


class AnswersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.answers = SeveralAnswers()

    @rule(
        writer=WRITER,
        gap=st.integers(1, 3),
        answer=st.sampled_from([b"", b"short", bytes(30), bytes(90)]),
        rise=st.integers(0, 2),
        attempt=st.sampled_from([0, 0, 1, 5]),
    )
    def remember(self, writer: bytes, gap: int, answer: bytes, rise: int, attempt: int) -> None:
        self.answers.remember(writer, gap, answer, rise, attempt)

    @rule(writer=WRITER, counter=st.integers(0, 10))
    def remember_again(self, writer: bytes, counter: int) -> None:
        self.answers.remember_again(writer, counter)

    @rule(has_refused=st.booleans())
    def refuse(self, has_refused: bool) -> None:
        self.answers.refuse(has_refused=has_refused)
        if has_refused:
            assert self.answers.each("is_new", WRITERS[0], 1 << 60, 9) == ("returned", False)

    @rule(writer=WRITER, rise=st.integers(0, 2), answer=st.sampled_from([b"", bytes(70)]))
    def replace_newest(self, writer: bytes, rise: int, answer: bytes) -> None:
        self.answers.replace_newest(writer, answer, rise)

    @rule(writer=WRITER, back=st.integers(0, 4), applied=st.integers(0, 30))
    def note_applied(self, writer: bytes, back: int, applied: int) -> None:
        self.answers.note_applied(writer, back, applied)

    @rule(back=st.integers(0, 8), count_max=st.integers(0, 6) | st.just(1000))
    def take_unsaved(self, back: int, count_max: int) -> None:
        self.answers.each("take_unsaved", max(0, self.answers.high - back), count_max)

    @rule()
    def assume_forgotten_answers(self) -> None:
        self.answers.each("assume_forgotten_answers")

    @rule()
    def track_unsaved(self) -> None:
        self.answers.each("track_unsaved")

    @rule(back=st.integers(0, 6), piece=st.integers(1, 4) | st.just(1000))
    def truncate(self, back: int, piece: int) -> None:
        self.answers.truncate(back, piece)

    @rule(writer=WRITER, counter=st.integers(0, 30), attempt=st.integers(0, 5))
    def ask(self, writer: bytes, counter: int, attempt: int) -> None:
        self.answers.ask(writer, counter, attempt)

    @invariant()
    def all_say_the_same(self) -> None:
        self.answers.check()


TestAnswers = AnswersMachine.TestCase
TestAnswers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@of_each_build
def test_many_writers_and_answers(build: Any) -> None:
    """More than any table or ring begins with."""
    answers = build.Answers(64, 1 << 20, 100, 1 << 30, 1, 1, 1, 8)
    answers.track_unsaved()
    for step in range(6000):
        writer = (step * 7 % 150).to_bytes(16, "little")
        answers.remember(writer, step, b"%d" % step, step // 3, 0)
        if step % 500 == 499:
            answers.check_invariants()
            assert answers.take_unsaved(step // 3 - 10, 1000)[1] > 100
    assert len(answers) == 100
    while answers.truncate(1000, 100):
        pass
    answers.check_invariants()
    assert len(answers) == 0 or answers.between(1001, 1 << 40, 1) == []


@of_each_build
def test_arguments_are_checked(build: Any) -> None:
    answers = build.Answers(*LIMITS)
    for limits in ((0, *LIMITS[1:]), ((1 << 16) + 1, *LIMITS[1:]), (1, 1, 0, 1, 1, 1, 1, 1)):
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
