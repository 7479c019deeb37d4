"""The answers of every build side by side, all of which must say the same."""

from __future__ import annotations

from typing import Any, Final

from tests.kernel.builds import BUILDS, Outcome, outcome
from tests.kit.answer_rows import unpack_rows

LIMITS: Final = (4, 60, 4, 140, 7, 10, 5, 6)
WRITERS: Final = [bytes([number]) * 16 for number in range(5)]


class SeveralAnswers:
    """Answers of each build. What is done to them keeps the caller's promises: counters rise, and
    so does the high number, but in a truncation.

    Attributes:
        counters: The highest counter that each writer has used.
        high: The partition's high number.
    """

    def __init__(self) -> None:
        self._builds = [build.Answers(*LIMITS) for build in BUILDS.values()]
        self.counters = dict.fromkeys(WRITERS, 0)
        self.high = 1

    def each(self, name: str, *args: Any) -> Outcome:
        """The outcome of a call, in which all builds agree."""
        outcomes = [outcome(getattr(answers, name), *args) for answers in self._builds]
        assert all(result == outcomes[0] for result in outcomes), (name, args, outcomes)
        return outcomes[0]

    def refuse(self, *, has_refused: bool) -> None:
        """Batches were refused, or those that were have come again."""
        for answers in self._builds:
            answers.has_refused = has_refused

    def next_counter(self, writer: bytes, gap: int) -> int:
        """A counter that the writer has not used."""
        self.counters[writer] += gap
        return self.counters[writer]

    def remember(self, writer: bytes, gap: int, answer: bytes, rise: int, attempt: int) -> None:
        """A batch is answered."""
        self.high += rise
        counter = self.next_counter(writer, gap)
        outcome_kind, _ = self.each("remember", writer, counter, answer, self.high, attempt)
        assert outcome_kind == "returned"

    def remember_again(self, writer: bytes, counter: int) -> None:
        """A counter that is not above the writer's newest is refused."""
        newest = self.each("newest", writer)[1]
        if newest is not None and counter <= newest[0]:
            arguments = (writer, counter, b"", self.high, 0)
            assert self.each("remember", *arguments) == ("raised", ValueError)

    def replace_newest(self, writer: bytes, answer: bytes, rise: int) -> None:
        """The writer's newest batch gets another answer."""
        if self.each("newest", writer)[1] is not None:
            self.high += rise
            self.each("replace_newest", writer, answer, self.high, 2)

    def note_applied(self, writer: bytes, back: int, applied: int) -> None:
        """A batch had its effect earlier."""
        counter = self.counters[writer] - back
        if counter >= 0 and self.each("answer_to", writer, counter)[1][0] is not None:
            self.each("note_applied", writer, counter, applied)

    def truncate(self, back: int, piece: int) -> None:
        """The newest numbers are undone, in pieces."""
        seq = max(0, self.high - back)
        undone_tokens: set[tuple[bytes, int]] = set()
        place = -1
        while place:
            rows, place = self.each("rows_above", seq, max(place, 0), piece)[1]
            undone_tokens |= unpack_rows(rows).keys()
        tokens_before = self.remembered_tokens()
        while self.each("truncate", seq, piece)[1]:
            pass
        tokens = self.remembered_tokens()
        assert tokens_before - tokens == tokens_before & undone_tokens
        self.high = max(seq, 1)

    def remembered_tokens(self) -> set[tuple[bytes, int]]:
        """The batches that have an answer."""
        rows = self.each("between", 0, 1 << 40, 1 << 40)[1]
        return {(writer, counter) for writer, counter, _, _ in rows}

    def ask(self, writer: bytes, counter: int, attempt: int) -> None:
        """Every question about a token."""
        self.each("answer_to", writer, counter)
        self.each("is_new", writer, counter, attempt)
        self.each("attempt", writer)

    def step(self, action: int, writer_number: int, amount: int) -> None:
        """One step of a fuzzer: three bytes."""
        writer = WRITERS[writer_number % len(WRITERS)]
        if action < 0x80:
            answer = bytes(amount)
            self.remember(writer, 1 + writer_number // 100, answer, action % 3, action // 16 % 3)
        elif action < 0x90:
            self.replace_newest(writer, bytes(amount // 2), action % 3)
        elif action < 0xA0:
            self.note_applied(writer, action % 16, amount)
        elif action < 0xC0:
            self.each("take_unsaved", max(0, self.high - amount % 16), writer_number)
        elif action < 0xD0:
            self.truncate(amount % 8, 1 + writer_number % 5)
        elif action < 0xD8:
            self.each("assume_forgotten_answers" if amount % 4 == 0 else "track_unsaved")
        elif action < 0xE0:
            self.refuse(has_refused=amount % 2 > 0)
        elif action < 0xE8:
            # A writer's ID of a wrong length.
            self.each("newest", writer[: amount % 17])
        else:
            self.ask(writer, amount, action % 6)
            self.remember_again(writer, amount)
        self.check()

    def check(self) -> None:
        """All builds say the same, and keep their promises."""
        for answers in self._builds:
            answers.check_invariants()
        assert len({answers.nbytes for answers in self._builds}) == 1
        assert len({len(answers) for answers in self._builds}) == 1
        self.each("between", 0, 1 << 40, 1 << 40)
        self.each("between", self.high - 1, self.high, 3)
        for end in (self.high, self.high - 1, self.high // 2):
            self.each("moved_between", 0, end)
            self.each("moved_between", end // 2, end)
        for seq in (self.high, self.high - 1, self.high // 2):
            self.each("newest_at", seq)
        self.each("too_old_tokens", self.high // 2, self.high)
        self.each("too_old_tokens", 0, self.high // 2)
