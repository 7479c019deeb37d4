"""Publishers' answers: what each batch was answered, by writer token.

A **writer token** names a batch: the writer's ID and a counter that rises. A publisher that lost an
answer sends the batch again under the same token, and gets the first answer.

**What is kept.** The newest 64 batches of each writer, of which the answers take at most 164 KiB,
and the newest answer in any case. A publisher has fewer batches in flight, and only those can be in
doubt. 164 KiB hold the answers to 16 batches of 1,000 increments each. A partition keeps the 1,024
writers that it heard from last. A batch older than its writer's kept ones is refused with
`TOKEN_TOO_OLD`. A batch of a forgotten writer counts as new.

**Memory.** When memory is short, nothing frees answers. So those of a partition have a share of the
bucket's quota. Beyond it, the writers heard from longest ago are first reduced to their newest
answers. Their older batches are refused, and not applied twice, and a task that runs again knows
that they were applied. Once the reduced writers take half of the share, the oldest of them is
forgotten. The newest answer always stays. Every node decides for itself: a replica may remember
less, or more.

**Order after a refusal.** A publisher sends the next batch before it has the last answer. If a
batch is refused for a passing reason, later batches must not overtake it. They are refused too,
until the publisher sends a refused batch again. So the highest refused counter is enough to know: a
batch above it is refused, any other ends the matter. A publisher that gave up all its refused
batches sees its next batch refused once. At most 64 batches are refused in a row: no more are in
flight. A publisher may also be gone for good. So a refusal is forgotten once nothing that was sent
behind it can still be on its way.

**Attempts.** A task that Spark runs again is the same writer, and begins again with its first
batch. Each run has an attempt number. Batches of an older attempt than the highest known are
refused. The number is on disk with the writer's newest answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, cast

import msgspec

from upr_kernel import Answers
from upr_protocol.ids import SeqNo
from upr_server.engine.memory_account import MemoryAccount

BATCHES_MAX: Final = 64
"""Answers of one writer that a partition remembers."""

ANSWERS_BYTES_MAX: Final = 164 * 1024
"""What the answers of one writer take, unless a single one takes more. So a publisher takes some
10 MiB of a bucket with 64 partitions, at most. All publishers together have another bound."""

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

UNBOUNDED: Final = (1 << 63) - 1
"""More bytes than all answers of a partition can take."""

ALL_ANSWERS: Final = (1 << 63) - 1
"""More answers than a partition can have."""

ORDER_SLACK: Final = 256
"""The order holds at most so many forgotten answers more than remembered ones; then it is made
again."""


class WriterToken(msgspec.Struct, frozen=True, gc=False):
    """One batch's name.

    Attributes:
        writer: The writer's ID: 16 random bytes, its own for as long as it lives.
        counter: Rises from one batch to the next of this writer.
    """

    writer: bytes
    counter: int


class PublisherAnswers:
    """The answers of one partition, by writer token. The kernel keeps them.

    Args:
        memory: What the bucket holds.
        bytes_max: What all remembered answers and their writers may take, unless a single answer
            takes more.

    Attributes:
        kernel_answers: The answers. The kernel adds to them with the runs of bundles.
    """

    __slots__ = ("_memory", "_refusal_period", "_refused_writers", "kernel_answers")

    def __init__(self, memory: MemoryAccount, bytes_max: int = UNBOUNDED) -> None:
        self._memory = memory
        self.kernel_answers = Answers(
            BATCHES_MAX,
            ANSWERS_BYTES_MAX,
            WRITERS_MAX,
            bytes_max,
            WRITER_OVERHEAD_BYTES,
            ANSWER_BYTES,
            UNSAVED_BYTES,
            ORDER_SLACK,
        )
        # Writers with refused batches, in the order of their last refusals: the highest counter
        # refused, how many were, and in which period the last was.
        self._refused_writers: OrderedDict[bytes, tuple[int, int, int]] = OrderedDict()
        self._refusal_period = 0

    def __len__(self) -> int:
        return len(self.kernel_answers)

    def answer_to(self, token: WriterToken) -> tuple[bytes | None, bool]:
        """The answer to the batch with this token, and whether it may have been forgotten.
        O(log answers)."""
        return self.kernel_answers.answer_to(token.writer, token.counter)

    def is_certainly_new(self, token: WriterToken, attempt: int) -> bool:
        """Whether the batch is new for certain: a quick yes for most batches. False means that the
        other questions must be asked. O(1)."""
        return self.kernel_answers.is_new(token.writer, token.counter, attempt)

    def newest_attempt(self, writer: bytes) -> int:
        """The highest attempt of this writer; 0 where it has none. O(1)."""
        return self.kernel_answers.attempt(writer)

    def newest_answer(self, writer: bytes) -> tuple[WriterToken, bytes] | None:
        """The newest batch of a writer, and its answer. O(1)."""
        newest = self.kernel_answers.newest(writer)
        return None if newest is None else (WriterToken(writer, newest[0]), newest[1])

    # Batches that must not overtake a refused one.

    def overtakes_refused(self, token: WriterToken) -> bool:
        """Whether this batch comes after a refused one that its publisher has not sent again.
        O(1)."""
        if token.writer not in self._refused_writers:
            return False
        highest, refused_count, _ = self._refused_writers[token.writer]
        return token.counter > highest and refused_count < BATCHES_MAX

    def refuse_overtaking(self, token: WriterToken) -> bool:
        """Whether to refuse the batch because it would overtake a refused one. It then counts as
        refused too. Otherwise its writer has sent a refused batch again, and the note of refusals
        is dropped. O(1)."""
        if self.overtakes_refused(token):
            self.note_refused(token)
            return True
        if self._refused_writers.pop(token.writer, None) is not None:
            self._count_refused(-REFUSED_WRITER_BYTES)
            self.kernel_answers.has_refused = bool(self._refused_writers)
        return False

    def note_refused(self, token: WriterToken) -> None:
        """Notes that a batch was refused for a passing reason, before it had any effect. O(1)."""
        refused_count = 0
        if token.writer not in self._refused_writers:
            self._count_refused(REFUSED_WRITER_BYTES)
        elif self.overtakes_refused(token):
            _, refused_count, _ = self._refused_writers[token.writer]
        self._refused_writers[token.writer] = (
            token.counter,
            refused_count + 1,
            self._refusal_period,
        )
        self.kernel_answers.has_refused = True
        self._refused_writers.move_to_end(token.writer)
        if len(self._refused_writers) > WRITERS_MAX:
            self._refused_writers.popitem(last=False)
            self._count_refused(-REFUSED_WRITER_BYTES)

    def forget_old_refusals(self) -> bool:
        """Forgets the refusals of those writers of whom nothing was refused since the last call.
        While there are refusals no batch is certainly new, which costs every publisher of the
        partition. O(writers forgotten).

        Returns:
            Whether there were any.
        """
        refused_writers, count_before = self._refused_writers, len(self._refused_writers)
        while refused_writers:
            writer, (_, _, period) = next(iter(refused_writers.items()))
            if period == self._refusal_period:
                break
            del refused_writers[writer]
        self._refusal_period += 1
        self._count_refused(-REFUSED_WRITER_BYTES * (count_before - len(refused_writers)))
        self.kernel_answers.has_refused = bool(refused_writers)
        return len(refused_writers) < count_before

    def _count_refused(self, nbytes: int) -> None:
        self._memory.writers += nbytes

    # Remembering.

    def track_unsaved(self) -> None:
        """There is a disk: from now on, changes are kept for `take_unsaved`."""
        self.kernel_answers.track_unsaved()

    def take_unsaved(self, through: int, count_max: int = ALL_ANSWERS) -> tuple[bytes, int]:
        """What has changed since the last call, while the partition's high number was at most
        `through`: a row of bytes for each answer that was remembered or forgotten, as
        `upr_kernel.answer_records` reads them, and how many there are. Of at most `count_max`
        changes, the oldest first: if there are fewer, these are all."""
        answers = self.kernel_answers
        nbytes_before = answers.nbytes
        changes = answers.take_unsaved(through, count_max)
        self._memory.writers += answers.nbytes - nbytes_before
        return changes

    def remember(self, token: WriterToken, answer: bytes, high: int = 0, attempt: int = 0) -> None:
        """Keeps the answer to a batch that had none. O(1), beside what it forgets.

        Args:
            token: Its token.
            answer: The answer.
            high: The partition's high number with the batch.
            attempt: Which run of the writer's task sent it.
        """
        self._memory.writers += self.kernel_answers.remember(
            token.writer, token.counter, answer, high, attempt
        )

    def replace_newest(self, token: WriterToken, answer: bytes, high: int, attempt: int) -> None:
        """Keeps another answer to the writer's newest batch. O(1), beside what it forgets."""
        answers = self.kernel_answers
        self._memory.writers += answers.replace_newest(token.writer, answer, high, attempt)

    def note_applied(self, token: WriterToken, applied_high: int) -> None:
        """Notes that a remembered batch had its effect at a lower high number than that of its
        answer. O(log answers)."""
        self.kernel_answers.note_applied(token.writer, token.counter, applied_high)

    # For replicas.

    def answers_between(
        self, start: int, end: int, count_max: int = ALL_ANSWERS
    ) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Answers given at high numbers of [`start`, `end`], oldest first: writer, counter, number
        and answer. At most `count_max`, but all that were given at the number of the last.
        O(log answers), beside what is found."""
        answers = self.kernel_answers.between(start, end, count_max)
        return cast("list[tuple[bytes, int, SeqNo, bytes]]", answers)

    def moved_answers_between(self, start: int, end: int) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Later answers, given at high numbers above `end`, to batches that had their effect in
        (`start`, `end`]: writer, counter, the number of the effect, and the answer.
        O(answers above `end`), O(1) if there are no later answers."""
        answers = self.kernel_answers.moved_between(start, end)
        return cast("list[tuple[bytes, int, SeqNo, bytes]]", answers)

    def assume_forgotten_answers(self) -> None:
        """All answers came from the disk, which does not tell what later ones have pushed out.
        O(writers)."""
        self.kernel_answers.assume_forgotten_answers()

    def too_old_tokens(self, start: int, end: int) -> list[tuple[WriterToken, int]]:
        """Names for what was forgotten: a replica that has heard of the answers up to `start`, and
        is to have all effects up to `end`, could take a forgotten batch for a new one. O(writers),
        and O(1) where nothing was forgotten that was answered above `start`.

        Returns:
            For each writer that was answered at or below `end` first, of which nothing is
            remembered up to there, but something above `start` was forgotten: the highest token
            that counts as too old, and the writer's highest attempt.
        """
        rows = self.kernel_answers.too_old_tokens(start, end)
        return [(WriterToken(writer, counter), attempt) for writer, counter, attempt in rows]

    def newest_answers_at(self, seq: int) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Of each writer the newest batch that had its effect at or below `seq`, if its answer is
        remembered: writer, counter, `seq`, and the answer. O(answers)."""
        rows = self.kernel_answers.newest_at(seq)
        return cast("list[tuple[bytes, int, SeqNo, bytes]]", rows)

    def rows_above(self, seq: int, count_max: int = ALL_ANSWERS) -> Iterator[bytes]:
        """What deletes from the disk the answers given at numbers above `seq`, except those to
        batches that had their effect at or below it: rows as `take_unsaved` gives them. Each step
        looks at `count_max` answers. Others may have their turn between two, but no answer may be
        remembered or forgotten meanwhile."""
        place = -1
        while place:
            rows, place = self.kernel_answers.rows_above(seq, max(place, 0), count_max)
            yield rows

    def truncate(self, seq: int, count_max: int = ALL_ANSWERS) -> bool:
        """Forgets the answers given at numbers above `seq`, as if they had never been. A later
        answer to a batch that had its effect at or below `seq` stays, as if given at `seq`: the
        batch must not be applied again. O(count_max).

        Args:
            seq: See above.
            count_max: How many answers to look at.

        Returns:
            Whether there are more. Until they are gone, too, nothing may be remembered.
        """
        answers = self.kernel_answers
        nbytes_before = answers.nbytes
        has_more = answers.truncate(seq, count_max)
        self._memory.writers += answers.nbytes - nbytes_before
        return has_more

    @property
    def nbytes(self) -> int:
        """What it takes, about."""
        return self.kernel_answers.nbytes + REFUSED_WRITER_BYTES * len(self._refused_writers)

    def check_invariants(self) -> None:
        """Bounds, order, bytes. O(answers + pending changes)."""
        self.kernel_answers.check_invariants()
        assert len(self._refused_writers) <= WRITERS_MAX
        assert self.kernel_answers.has_refused == bool(self._refused_writers)
        periods = [period for _, _, period in self._refused_writers.values()]
        assert sorted(periods) == periods, "those refused last come last"
        assert all(self._refusal_period - period <= 1 for period in periods)
