"""Publishers' answers: what each batch was answered, by writer token.

A **writer token** names a batch: the writer's ID and a counter that rises. A publisher that lost an
answer sends the batch again under the same token, and gets the first answer.

**What is kept.** The newest 64 batches of each writer, of which the answers take at most 164 KiB,
and the newest answer in any case. A publisher has fewer batches in flight, and only those can be in
doubt. 164 KiB hold the answers to 16 batches of 1,000 increments each. A partition keeps the 1,024
writers that it heard from last. A batch older than its writer's kept ones is refused with
`TOKEN_TOO_OLD`. A batch of a forgotten writer counts as new.

**Order after a refusal.** A publisher sends the next batch before it has the last answer. If a
batch is refused for a passing reason, later batches must not overtake it. They are refused too,
until the publisher sends a refused batch again. So the highest refused counter is enough to know: a
batch above it is refused, any other ends the matter. A publisher that gave up all its refused
batches sees its next batch refused once. At most 64 batches are refused in a row: no more are in
flight.

**Attempts.** A task that Spark runs again is the same writer, and begins again with its first
batch. Each run has an attempt number. Batches of an older attempt than the highest known are
refused. The number is on disk with the writer's newest answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import takewhile
from operator import attrgetter
from typing import Final

import msgspec

from upr_protocol.ids import SeqNo
from upr_server.engine.memory_account import MemoryAccount

BATCHES_MAX: Final = 64
"""Answers of one writer that a partition remembers."""

ANSWERS_BYTES_MAX: Final = 164 * 1024
"""What the answers of one writer take, unless a single one takes more. So a publisher takes some
10 MiB of a bucket with 64 partitions, at most."""

WRITERS_MAX: Final = 1024
"""Writers that one partition remembers."""

WRITER_OVERHEAD_BYTES: Final = 400
"""What a writer takes beside its answers, about."""

ANSWER_BYTES: Final = 200
"""What an answer takes beside its own bytes, about."""

REFUSED_WRITER_BYTES: Final = 200
"""What it takes to know that batches of a writer were refused, about."""

UNSAVED_BYTES: Final = 300
"""What a change that is not on disk yet takes beside the answer's own bytes, about."""

ORDER_SLACK: Final = 256
"""The order holds at most so many forgotten answers more than remembered ones; then it is made
anew."""

_HIGH: Final = attrgetter("high")


class WriterToken(msgspec.Struct, frozen=True, gc=False):
    """One batch's name.

    Attributes:
        writer: The writer's ID: 16 random bytes, its own for as long as it lives.
        counter: Rises from one batch to the next of this writer.
    """

    writer: bytes
    counter: int


class _Change(msgspec.Struct, eq=False, gc=False):
    """One answer that was remembered, or, for the disk, that one was forgotten. Compared and hashed
    by identity, as a token may be remembered again.

    Attributes:
        token: The batch's name.
        answer: The answer; None for a change that forgets one.
        high: The partition's high number then, which never falls but in a truncation.
        nbytes: What an answer takes while it is remembered, about.
        is_forgotten: Whether the answer was forgotten since.
        applied_high: The high number with the batch's effect, where this is a later answer to it;
            None where it is `high`.
    """

    token: WriterToken
    answer: bytes | None
    high: int
    nbytes: int = 0
    is_forgotten: bool = False
    applied_high: int | None = None

    def outlives(self, seq: int) -> bool:
        """Whether the answer is still true after a truncation to `seq`, below `high`: the batch had
        its effect at or below `seq`."""
        applied_high = self.applied_high
        return not self.is_forgotten and applied_high is not None and applied_high <= seq


class _WriterAnswers:
    """One writer's answers by counter, the newest last; its newest counter, and the highest attempt
    seen."""

    __slots__ = ("attempt", "by_counter", "nbytes", "newest_counter")

    def __init__(self) -> None:
        self.attempt = 0
        self.newest_counter = 0
        self.by_counter: dict[int, _Change] = {}
        self.nbytes = 0


class PublisherAnswers:
    """The answers of one partition, by writer token.

    Args:
        memory: What the bucket holds.
    """

    __slots__ = (
        "_answer_count",
        "_memory",
        "_nbytes",
        "_order",
        "_refused",
        "_unsaved",
        "_writers",
    )

    def __init__(self, memory: MemoryAccount) -> None:
        self._memory = memory
        self._nbytes = 0
        # All answers by high number; some are forgotten.
        self._order: list[_Change] = []
        self._answer_count = 0
        # By when each was last heard from.
        self._writers: OrderedDict[bytes, _WriterAnswers] = OrderedDict()
        # Writers with refused batches: the highest counter refused, and how many were.
        self._refused: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        # What the disk does not know yet, by high number; None without a disk. A dict, so that an
        # answer that comes and goes at one high number can be taken out.
        self._unsaved: dict[_Change, None] | None = None

    def __len__(self) -> int:
        return len(self._writers)

    def answer_to(self, token: WriterToken) -> tuple[bytes | None, bool]:
        """The answer to the batch with this token, and whether it may have been forgotten. O(1)."""
        answers = self._writers.get(token.writer)
        if answers is None:
            return None, False
        remembered = answers.by_counter.get(token.counter)
        if remembered is not None:
            return remembered.answer, False
        return None, token.counter <= answers.newest_counter

    def is_certainly_new(self, token: WriterToken, attempt: int) -> bool:
        """Whether the batch is new for certain: a quick yes for most batches. False means that the
        other questions must be asked. O(1)."""
        if self._refused:
            return False
        answers = self._writers.get(token.writer)
        return answers is None or (
            token.counter > answers.newest_counter and attempt >= answers.attempt
        )

    def attempt(self, writer: bytes) -> int:
        """The highest attempt of this writer; 0 where it has none. O(1)."""
        answers = self._writers.get(writer)
        return 0 if answers is None else answers.attempt

    def newest(self, writer: bytes) -> tuple[WriterToken, bytes] | None:
        """The newest batch of a writer, and its answer. O(1)."""
        answers = self._writers.get(writer)
        if answers is None:
            return None
        newest = answers.by_counter[answers.newest_counter]
        assert newest.answer is not None
        return newest.token, newest.answer

    # Batches that must not overtake a refused one.

    def overtakes_refused(self, token: WriterToken) -> bool:
        """Whether this batch comes after a refused one that its publisher has not sent again.
        O(1)."""
        if token.writer not in self._refused:
            return False
        highest, refused_count = self._refused[token.writer]
        return token.counter > highest and refused_count < BATCHES_MAX

    def refuse_overtaking(self, token: WriterToken) -> bool:
        """Whether to refuse the batch because it would overtake a refused one. It then counts as
        refused too. Otherwise its writer has sent a refused batch again, and the note of refusals
        is dropped. O(1)."""
        if self.overtakes_refused(token):
            self.note_refused(token)
            return True
        if self._refused.pop(token.writer, None) is not None:
            self._count(-REFUSED_WRITER_BYTES)
        return False

    def note_refused(self, token: WriterToken) -> None:
        """Notes that a batch was refused for a passing reason, before it had any effect. O(1)."""
        refused_count = 0
        if token.writer not in self._refused:
            self._count(REFUSED_WRITER_BYTES)
        elif self.overtakes_refused(token):
            _, refused_count = self._refused[token.writer]
        self._refused[token.writer] = (token.counter, refused_count + 1)
        self._refused.move_to_end(token.writer)
        if len(self._refused) > WRITERS_MAX:
            self._refused.popitem(last=False)
            self._count(-REFUSED_WRITER_BYTES)

    # Remembering.

    def track_unsaved(self) -> None:
        """There is a disk: from now on, changes are kept for `take_unsaved`."""
        self._unsaved = {}

    def take_unsaved(self, through: int) -> dict[WriterToken, bytes | None]:
        """What has changed since the last call, while the partition's high number was at most
        `through`: answers remembered, and None for those forgotten."""
        answers: dict[WriterToken, bytes | None] = {}
        unsaved = self._unsaved
        if not unsaved:
            return answers
        freed = 0
        changes: list[_Change] = []
        for change in unsaved:
            if change.high > through:
                break
            changes.append(change)
            answers[change.token] = change.answer
            if change.is_forgotten:
                freed += change.nbytes
                change.answer = None
        # A commit mostly takes all there is, and clearing is one step for the interpreter.
        if len(changes) == len(unsaved):
            unsaved.clear()
        else:
            for change in changes:
                del unsaved[change]
        self._count(-freed - UNSAVED_BYTES * len(changes))
        return answers

    def remember(self, token: WriterToken, answer: bytes, high: int = 0, attempt: int = 0) -> None:
        """Keeps the answer to a batch that had none. O(1), beside what it forgets.

        Args:
            token: Its token.
            answer: The answer.
            high: The partition's high number with the batch.
            attempt: Which run of the writer's task sent it.
        """
        # Runs once a batch, for most with one answer: calls would take most of its time.
        nbytes = ANSWER_BYTES + len(answer)
        writer, counter = token.writer, token.counter
        writers, unsaved = self._writers, self._unsaved
        answers = writers.get(writer)
        if answers is None:
            answers = self._add_writer(writer, high)
        elif len(writers) > 1:
            writers.move_to_end(writer)
        answers.attempt = max(answers.attempt, attempt)
        change = _Change(token, answer, high, nbytes)
        by_counter, order = answers.by_counter, self._order
        by_counter[counter] = change
        answers.newest_counter = counter
        answers.nbytes += nbytes
        self._answer_count += 1
        order.append(change)
        # Forgotten answers stay in the order until they are more than half of it. To take each out
        # at once would be a search, and this way an answer costs O(1) in all.
        if len(order) > 2 * self._answer_count + ORDER_SLACK:
            self._order = [change for change in order if not change.is_forgotten]
        if unsaved is not None:
            unsaved[change] = None
            nbytes += UNSAVED_BYTES
        self._nbytes += nbytes
        self._memory.writers += nbytes
        while len(by_counter) > BATCHES_MAX or (
            answers.nbytes > ANSWERS_BYTES_MAX and len(by_counter) > 1
        ):
            self._forget(next(iter(by_counter.values())), answers, high)

    def _add_writer(self, writer: bytes, high: int) -> _WriterAnswers:
        self._writers[writer] = answers = _WriterAnswers()
        self._count(WRITER_OVERHEAD_BYTES)
        if len(self._writers) > WRITERS_MAX:
            _, forgotten = self._writers.popitem(last=False)
            self._count(-WRITER_OVERHEAD_BYTES)
            for change in list(forgotten.by_counter.values()):
                self._forget(change, forgotten, high)
        return answers

    def replace_newest(self, token: WriterToken, answer: bytes, high: int, attempt: int) -> None:
        """Keeps another answer to the writer's newest batch. O(1), beside what it forgets."""
        answers = self._writers[token.writer]
        replaced = answers.by_counter[token.counter]
        applied_high = replaced.high if replaced.applied_high is None else replaced.applied_high
        self._forget(replaced, answers, high)
        self.remember(token, answer, high, attempt)
        self.note_applied(token, applied_high)

    def note_applied(self, token: WriterToken, applied_high: int) -> None:
        """Notes that a remembered batch had its effect at a lower high number than that of its
        answer. O(1)."""
        self._writers[token.writer].by_counter[token.counter].applied_high = applied_high

    def _forget(self, change: _Change, answers: _WriterAnswers, high: int) -> None:
        nbytes = change.nbytes
        del answers.by_counter[change.token.counter]
        answers.nbytes -= nbytes
        self._answer_count -= 1
        change.is_forgotten = True
        unsaved = self._unsaved
        if unsaved is None:
            change.answer = None
            self._count(-nbytes)
        elif change not in unsaved:
            unsaved[_Change(change.token, None, high)] = None
            change.answer = None
            self._count(UNSAVED_BYTES - nbytes)
        elif change.high == high:
            # The answer came and went at one high number: the disk need not know of it.
            del unsaved[change]
            change.answer = None
            self._count(-nbytes - UNSAVED_BYTES)
        else:
            # A commit up to the lower number still has to write it: after a crash there, the batch
            # must be known. Until then the answer takes memory.
            unsaved[_Change(change.token, None, high)] = None
            self._count(UNSAVED_BYTES)

    # For replicas.

    def between(self, start: int, end: int) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Answers given at high numbers of [`start`, `end`], oldest first: writer, counter, number
        and answer. O(log answers), beside what is found."""
        order = self._order
        first = bisect_left(order, start, key=_HIGH)
        behind = bisect_left(order, end + 1, first, key=_HIGH)
        return [
            (change.token.writer, change.token.counter, SeqNo(change.high), change.answer)
            for change in order[first:behind]
            if change.answer is not None and not change.is_forgotten
        ]

    def tokens_above(self, seq: int) -> list[WriterToken]:
        """The tokens of answers given at numbers above `seq`, except those to batches that had
        their effect at or below it. O(answers)."""
        # Of forgotten answers, too: the disk may not know yet that they are forgotten.
        changes = self._order[bisect_left(self._order, seq + 1, key=_HIGH) :]
        outliving = {change.token for change in changes if change.outlives(seq)}
        tokens = dict.fromkeys(change.token for change in changes)
        return [token for token in tokens if token not in outliving]

    def truncate(self, seq: int) -> list[WriterToken]:
        """Forgets the answers given at numbers above `seq`, as if they had never been. A later
        answer to a batch that had its effect at or below `seq` stays, as if given at `seq`: the
        batch must not be applied again. O(answers).

        Returns:
            The tokens of those forgotten.
        """
        tokens = self.tokens_above(seq)
        first = bisect_left(self._order, seq + 1, key=_HIGH)
        outliving: dict[WriterToken, _Change] = {}
        for change in self._order[first:]:
            if change.is_forgotten:
                continue
            if change.outlives(seq):
                outliving[change.token] = change
                continue
            writer, nbytes = change.token.writer, change.nbytes
            answers = self._writers[writer]
            del answers.by_counter[change.token.counter]
            answers.nbytes -= nbytes
            self._answer_count -= 1
            self._count(-nbytes)
            if answers.by_counter:
                answers.newest_counter = next(reversed(answers.by_counter))
            else:
                del self._writers[writer]
                self._count(-WRITER_OVERHEAD_BYTES)
        del self._order[first:]
        unsaved = self._unsaved or {}
        for change in list(takewhile(lambda change: change.high > seq, reversed(unsaved))):
            if change.token in outliving and not change.is_forgotten:
                # The answer, or that the one before it is forgotten: the disk must hear of both.
                change.high = seq
                continue
            del unsaved[change]
            self._count(-UNSAVED_BYTES - (change.nbytes if change.is_forgotten else 0))
        for change in outliving.values():
            change.high = seq
            self._order.append(change)
        return tokens

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._memory.writers += nbytes

    @property
    def nbytes(self) -> int:
        """What it takes, about."""
        return self._nbytes

    def check_invariants(self) -> None:
        """Bounds, order, bytes. O(answers + pending changes)."""
        assert len(self._writers) <= WRITERS_MAX
        assert len(self._refused) <= WRITERS_MAX
        total = REFUSED_WRITER_BYTES * len(self._refused)
        for answers in self._writers.values():
            counters = list(answers.by_counter)
            assert 0 < len(counters) <= BATCHES_MAX
            assert sorted(counters) == counters, "counters rise"
            assert answers.newest_counter == counters[-1]
            sizes = [change.nbytes for change in answers.by_counter.values()]
            assert sum(sizes) == answers.nbytes
            assert answers.nbytes <= ANSWERS_BYTES_MAX or len(sizes) == 1
            total += WRITER_OVERHEAD_BYTES + answers.nbytes
        count = sum(len(answers.by_counter) for answers in self._writers.values())
        assert count == self._answer_count
        assert len(self._order) <= 2 * count + ORDER_SLACK + 1
        order = [change.high for change in self._order]
        assert sorted(order) == order, "numbers rise"
        remembered = {
            change for answers in self._writers.values() for change in answers.by_counter.values()
        }
        assert {change for change in self._order if not change.is_forgotten} == remembered
        assert all(change.answer is not None for change in remembered)
        unsaved = self._unsaved or {}
        highs = [change.high for change in unsaved]
        assert sorted(highs) == highs, "numbers rise"
        total += UNSAVED_BYTES * len(unsaved)
        total += sum(change.nbytes for change in unsaved if change.is_forgotten)
        for change in self._order:
            assert change.answer is None or not change.is_forgotten or change in unsaved
        assert total == self._nbytes, (total, self._nbytes)
