"""What publishers were answered: a batch sent again has no second effect.

A publisher names each batch by a token: its writer ID and a counter that rises. When an answer was
lost it sends the batch again under the same token, and gets the first answer. The window in which
that works is bounded:

- the newest 64 batches of a writer and partition: a publisher keeps fewer in flight, and only those
  can be in doubt;
- of these the newest whose answers take 164 KiB together, and always the newest one. That is enough
  for the 16 batches that a publisher has in flight, of 1,000 increments each; a publisher of larger
  batches of increments should have fewer in flight;
- the 1,024 writers that a partition heard from last: a publisher that 1,024 others have overtaken
  since its last batch is not waiting for an answer any more.

A batch older than its writer's window is refused with `TOKEN_TOO_OLD`. A batch of a forgotten
writer counts as new.

A publisher does not wait for an answer before it sends the next batch. When a batch is refused for
a passing reason, the batches that the publisher sent behind it must not overtake it: they are
refused too, until the publisher begins again. It does so once all its batches are answered, with
the first that was refused, or with a later one if it gave that up: in any case with a batch that
the server has refused before. So it is enough to keep the highest counter refused. A batch above it
is refused; any other ends the matter. If the publisher abandons every refused batch, its next new
batch is refused once unnecessarily. A publisher that never resends is refused at most 64 times (its
in-flight limit).

A task that Spark runs again is the same writer again: it begins with its first batch. Each run is
an attempt with a number that rises, and a run that a later attempt has overtaken is refused: the
highest number is kept for each writer, and on disk with its newest answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from operator import itemgetter
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

WRITER_ID_BYTES: Final = 16

WRITER_BYTES: Final = 400
"""What a writer takes beside its answers, about."""

ANSWER_BYTES: Final = 200
"""What an answer takes beside its own bytes, about."""

PUT_OFF_BYTES: Final = 200
"""What it takes to know that a writer has to begin again, about."""

PENDING_BYTES: Final = 300
"""What a pending change for the disk takes beside the answer's own bytes, about."""

ORDER_SLACK: Final = 256
"""The order holds at most so many forgotten answers more than remembered ones; then it is made
anew."""

_HIGH: Final = itemgetter(0)


class WriterToken(msgspec.Struct, frozen=True):
    """One batch's name.

    Attributes:
        writer: The writer's ID: 16 random bytes, its own for as long as it lives.
        counter: Rises from one batch to the next of this writer.
    """

    writer: bytes
    counter: int


class _PendingAnswers:
    """Changes for the disk, made while the partition's high number was the same: a commit takes all
    of them or none.

    Attributes:
        high: The number.
        changes: Answers remembered, and None for those forgotten. Empty once a commit took them.
        forgotten_bytes: What those of `changes` take that are forgotten by now.
    """

    __slots__ = ("changes", "forgotten_bytes", "high")

    def __init__(self, high: int) -> None:
        self.high = high
        self.changes: dict[WriterToken, bytes | None] = {}
        self.forgotten_bytes = 0


class _WriterAnswers:
    """One writer's answers by counter, the newest last, each with the pending changes it is among;
    and the highest attempt seen."""

    __slots__ = ("attempt", "by_counter", "nbytes")

    def __init__(self) -> None:
        self.attempt = 0
        self.by_counter: dict[int, tuple[bytes, _PendingAnswers | None]] = {}
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
        "_pending",
        "_put_off",
        "_writers",
    )

    def __init__(self, memory: MemoryAccount) -> None:
        self._memory = memory
        self._nbytes = 0
        # Answers with the partition's high number then, which never falls; some are forgotten.
        self._order: list[tuple[int, WriterToken]] = []
        self._answer_count = 0
        # By when each was last heard from.
        self._writers: OrderedDict[bytes, _WriterAnswers] = OrderedDict()
        # Writers that have to begin again: the highest counter refused, and how many were.
        self._put_off: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        # What the disk does not know yet, by high number; None without a disk.
        self._pending: deque[_PendingAnswers] | None = None

    def __len__(self) -> int:
        return len(self._writers)

    def answer_to(self, token: WriterToken) -> tuple[bytes | None, bool]:
        """The answer to the batch with this token, and whether it may have been forgotten. O(1)."""
        answers = self._writers.get(token.writer)
        if answers is None:
            return None, False
        answer, _ = answers.by_counter.get(token.counter, (None, None))
        if answer is not None:
            return answer, False
        return None, token.counter <= next(reversed(answers.by_counter))

    def is_plainly_new(self, token: WriterToken, attempt: int) -> bool:
        """Whether the batch is new, and no writer is to begin again: the quick answer for most
        batches. O(1)."""
        if self._put_off:
            return False
        answers = self._writers.get(token.writer)
        return answers is None or (
            attempt >= answers.attempt and token.counter > next(reversed(answers.by_counter))
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
        counter = next(reversed(answers.by_counter))
        return WriterToken(writer, counter), answers.by_counter[counter][0]

    # Batches that must not overtake a refused one.

    def is_behind_refused(self, token: WriterToken) -> bool:
        """Whether the publisher sent this batch behind one that was refused, and has not begun
        again since. O(1)."""
        if token.writer not in self._put_off:
            return False
        highest, refused_count = self._put_off[token.writer]
        return token.counter > highest and refused_count < BATCHES_MAX

    def must_wait(self, token: WriterToken) -> bool:
        """Whether to refuse the batch because it is behind a refused one. It then counts as refused
        too; otherwise its writer has begun again, which ends the matter. O(1)."""
        if self.is_behind_refused(token):
            self.put_off(token)
            return True
        if self._put_off.pop(token.writer, None) is not None:
            self._count(-PUT_OFF_BYTES)
        return False

    def put_off(self, token: WriterToken) -> None:
        """Notes that a batch was refused for a passing reason, before it had any effect. O(1)."""
        refused_count = 0
        if token.writer not in self._put_off:
            self._count(PUT_OFF_BYTES)
        elif self.is_behind_refused(token):
            _, refused_count = self._put_off[token.writer]
        self._put_off[token.writer] = (token.counter, refused_count + 1)
        self._put_off.move_to_end(token.writer)
        if len(self._put_off) > WRITERS_MAX:
            self._put_off.popitem(last=False)
            self._count(-PUT_OFF_BYTES)

    # Remembering.

    def keep_pending(self) -> None:
        """There is a disk: from now on, changes are noted for `take_pending`."""
        self._pending = deque()

    def take_pending(self, through: int) -> dict[WriterToken, bytes | None]:
        """What has changed since the last call, while the partition's high number was at most
        `through`: answers remembered, and None for those forgotten."""
        changes = dict[WriterToken, bytes | None]()
        while self._pending and self._pending[0].high <= through:
            pending = self._pending.popleft()
            changes |= pending.changes
            self._count(-pending.forgotten_bytes - PENDING_BYTES * len(pending.changes))
            pending.changes = {}
        return changes

    def remember(self, token: WriterToken, answer: bytes, high: int = 0, attempt: int = 0) -> None:
        """Keeps the answer to a batch that had none. O(1), beside what it forgets.

        Args:
            token: Its token.
            answer: The answer.
            high: The partition's high number with the batch.
            attempt: Which run of the writer's task sent it.
        """
        answers = self._writers.get(token.writer)
        if answers is None:
            answers = self._writers[token.writer] = _WriterAnswers()
            self._count(WRITER_BYTES)
            if len(self._writers) > WRITERS_MAX:
                writer, forgotten = self._writers.popitem(last=False)
                self._count(-WRITER_BYTES)
                for counter in list(forgotten.by_counter):
                    self._forget(WriterToken(writer, counter), forgotten, high)
        else:
            self._writers.move_to_end(token.writer)
        answers.attempt = max(answers.attempt, attempt)
        by_counter = answers.by_counter
        by_counter[token.counter] = (answer, self._note(token, answer, high))
        self._answer_count += 1
        self._order.append((high, token))
        if len(self._order) > 2 * self._answer_count + ORDER_SLACK:
            self._tidy_order()
        nbytes = ANSWER_BYTES + len(answer)
        answers.nbytes += nbytes
        self._count(nbytes)
        while len(by_counter) > BATCHES_MAX or (
            answers.nbytes > ANSWERS_BYTES_MAX and len(by_counter) > 1
        ):
            oldest = next(iter(by_counter))
            self._forget(WriterToken(token.writer, oldest), answers, high)

    def replace_newest(self, token: WriterToken, answer: bytes, high: int, attempt: int) -> None:
        """Keeps another answer to the writer's newest batch. O(1), beside what it forgets."""
        self._forget(token, self._writers[token.writer], high)
        self.remember(token, answer, high, attempt)

    def _forget(self, token: WriterToken, answers: _WriterAnswers, high: int) -> None:
        answer, pending = answers.by_counter.pop(token.counter)
        self._answer_count -= 1
        nbytes = ANSWER_BYTES + len(answer)
        answers.nbytes -= nbytes
        if (
            pending is not None
            and self._pending
            and pending is self._pending[-1]
            and pending.high == high
        ):
            # The answer came and went at one high number: the disk need not know of it.
            del pending.changes[token]
            self._count(-nbytes - PENDING_BYTES)
            return
        self._note(token, None, high)
        if pending is not None and pending.changes:
            # A commit up to the lower number still has to write it: after a crash there, the batch
            # must be known. Until then the answer takes memory.
            pending.forgotten_bytes += nbytes
        else:
            self._count(-nbytes)

    # For replicas.

    def between(self, start: int, end: int) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Answers given at high numbers of [`start`, `end`], oldest first: writer, counter, number
        and answer. O(log answers), beside what is found."""
        rows: list[tuple[bytes, int, SeqNo, bytes]] = []
        for index in range(bisect_left(self._order, start, key=_HIGH), len(self._order)):
            high, token = self._order[index]
            if high > end:
                break
            answer, _ = self.answer_to(token)
            if answer is not None:
                rows.append((token.writer, token.counter, SeqNo(high), answer))
        return rows

    def above(self, seq: int) -> list[WriterToken]:
        """The tokens of answers given at numbers above `seq`. O(answers)."""
        first = bisect_left(self._order, seq + 1, key=_HIGH)
        return list(dict.fromkeys(token for _, token in self._order[first:]))

    def cut(self, seq: int) -> list[WriterToken]:
        """Forgets the answers given at numbers above `seq`, as if they had never been. O(answers).

        Returns:
            Their tokens.
        """
        tokens = self.above(seq)
        del self._order[bisect_left(self._order, seq + 1, key=_HIGH) :]
        for token in tokens:
            answers = self._writers.get(token.writer)
            if answers is None or token.counter not in answers.by_counter:
                continue
            answer, _ = answers.by_counter.pop(token.counter)
            self._answer_count -= 1
            answers.nbytes -= ANSWER_BYTES + len(answer)
            self._count(-ANSWER_BYTES - len(answer))
            if not answers.by_counter:
                del self._writers[token.writer]
                self._count(-WRITER_BYTES)
        while self._pending and self._pending[-1].high > seq:
            pending = self._pending.pop()
            self._count(-pending.forgotten_bytes - PENDING_BYTES * len(pending.changes))
        return tokens

    def _tidy_order(self) -> None:
        newest: dict[WriterToken, int] = {}
        for high, token in self._order:
            answers = self._writers.get(token.writer)
            if answers is not None and token.counter in answers.by_counter:
                newest.pop(token, None)
                newest[token] = high
        self._order = [(high, token) for token, high in newest.items()]

    def _note(self, token: WriterToken, answer: bytes | None, high: int) -> _PendingAnswers | None:
        """Notes a change for the disk.

        Returns:
            The pending changes it is among; None when they hold an older change of this token too,
            so that it cannot be taken back alone.
        """
        if self._pending is None:
            return None
        pending = self._pending[-1] if self._pending else None
        if pending is None or pending.high != high:
            pending = _PendingAnswers(high)
            self._pending.append(pending)
        elif token in pending.changes:
            pending.changes[token] = answer
            return None
        pending.changes[token] = answer
        self._count(PENDING_BYTES)
        return pending

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
        assert len(self._put_off) <= WRITERS_MAX
        total = PUT_OFF_BYTES * len(self._put_off)
        for answers in self._writers.values():
            counters = list(answers.by_counter)
            assert 0 < len(counters) <= BATCHES_MAX
            assert sorted(counters) == counters, "counters rise"
            sizes = [ANSWER_BYTES + len(answer) for answer, _ in answers.by_counter.values()]
            assert sum(sizes) == answers.nbytes
            assert answers.nbytes <= ANSWERS_BYTES_MAX or len(sizes) == 1
            total += WRITER_BYTES + answers.nbytes
        count = sum(len(answers.by_counter) for answers in self._writers.values())
        assert count == self._answer_count
        assert len(self._order) <= 2 * count + ORDER_SLACK + 1
        order = [high for high, _ in self._order]
        assert sorted(order) == order, "numbers rise"
        highs = [pending.high for pending in self._pending or ()]
        assert sorted(set(highs)) == highs, "numbers rise"
        for pending in self._pending or ():
            total += pending.forgotten_bytes + PENDING_BYTES * len(pending.changes)
        assert total == self._nbytes, (total, self._nbytes)
