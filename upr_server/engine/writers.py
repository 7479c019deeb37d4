"""What publishers were answered: a batch sent again has no second effect.

A publisher names each batch by a token: its writer ID and a counter that rises. When an answer was
lost it sends the batch again under the same token, and gets the first answer. The window in which
that works is bounded, and documented:

- the newest 64 batches of a writer and partition: a publisher keeps fewer in flight, and only those
  can be in doubt;
- of these the newest whose answers take 164 KiB together, and always the newest one. That is enough
  for the 16 batches that a publisher has in flight, of 1,000 increments each; who counts with
  larger batches should have fewer in flight;
- the 1,024 writers that a partition heard from last: a publisher that 1,024 others have overtaken
  since its last batch is not waiting for an answer any more.

A batch older than its writer's window is refused with `TOKEN_TOO_OLD`. Of a writer that was
forgotten nothing is known: its batch counts as new.

A publisher does not wait for an answer before it sends the next batch. When one was refused for
what passes, those that it sent behind it must not be done before it: they are refused too, until
the publisher begins again. It does when all it sent are answered, with the first that was refused,
or a later one if it gave that up: in any case with one that the server has refused before. So all
that is kept is the highest counter refused; a batch above it is refused, and one that is not above
it has the matter forgotten. A batch that was never here before is refused once more than needed if
all that were refused have been given up, and who sends nothing again at all is refused 64 times:
more are not in flight.

A task that is run again is the same writer again: it begins with its first batch. Each run is an
attempt with a number that rises, and one that a later attempt has overtaken is refused: the highest
number is kept for each writer, and on disk with its newest answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from operator import itemgetter
from typing import Final

import msgspec

from upr_protocol.ids import SeqNo
from upr_server.engine.memory import Memory

BATCHES_MAX: Final = 64
"""Answers that are remembered of one writer: see above."""

ANSWERS_BYTES_MAX: Final = 164 * 1024
"""What the answers of one writer take, unless a single one takes more. So a publisher takes some
10 MiB of a bucket with 64 partitions, at most."""

WRITERS_MAX: Final = 1024
"""Writers that one partition remembers: see above."""

WRITER_ID_BYTES: Final = 16

WRITER_BYTES: Final = 400
"""What a writer takes beside its answers, about."""

ANSWER_BYTES: Final = 200
"""What an answer takes beside its own bytes, about."""

PUT_OFF_BYTES: Final = 200
"""What it takes to know that a writer's batch was put off, about."""

NEWS_BYTES: Final = 300
"""What it takes to tell the disk of one answer, beside the answer's own bytes, about."""


ORDER_SLACK: Final = 256
"""So many answers that are forgotten may stand in the order of those that are not, and as many as
these are; then it is made anew."""

_HIGH: Final = itemgetter(0)


class WriterToken(msgspec.Struct, frozen=True):
    """One batch's name.

    Attributes:
        writer: The writer's ID: 16 random bytes, its own for as long as it lives.
        counter: Rises from one batch to the next of this writer.
    """

    writer: bytes
    counter: int


class _News:
    """What changed while the partition's high number was the same: the disk is told all of it with
    that number, or nothing.

    Attributes:
        high: The number.
        changes: Answers remembered, and None for those forgotten. Empty once they were told.
        held: What answers take that are forgotten, and are still among `changes`.
    """

    __slots__ = ("changes", "held", "high")

    def __init__(self, high: int) -> None:
        self.high = high
        self.changes: dict[WriterToken, bytes | None] = {}
        self.held = 0


class _Answers:
    """One writer's answers, by counter, the newest last; each with the news that tell of it. And
    the highest attempt that was heard of."""

    __slots__ = ("attempt", "by_counter", "nbytes")

    def __init__(self) -> None:
        self.attempt = 0
        self.by_counter: dict[int, tuple[bytes, _News | None]] = {}
        self.nbytes = 0


class Writers:
    """The answers of one partition, by writer token.

    Args:
        memory: What the bucket holds.
    """

    __slots__ = ("_answer_count", "_memory", "_nbytes", "_news", "_order", "_put_off", "_writers")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._nbytes = 0
        # Answers with the high numbers they were given at, which never fall; some are forgotten.
        self._order: list[tuple[int, WriterToken]] = []
        self._answer_count = 0
        # The writer heard from last stands last.
        self._writers: OrderedDict[bytes, _Answers] = OrderedDict()
        # Of writers that are to begin again: the highest counter refused, and how many were.
        self._put_off: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        # What the disk does not know yet, the highest number last; None without a disk.
        self._news: deque[_News] | None = None

    def __len__(self) -> int:
        return len(self._writers)

    def recall(self, token: WriterToken) -> tuple[bytes | None, bool]:
        """The answer to the batch with this token, and whether it is too old to tell. O(1)."""
        answers = self._writers.get(token.writer)
        if answers is None:
            return None, False
        found = answers.by_counter.get(token.counter)
        if found is not None:
            return found[0], False
        return None, token.counter <= next(reversed(answers.by_counter))

    def is_plainly_new(self, token: WriterToken, attempt: int) -> bool:
        """Whether nothing at all speaks against doing the batch with this token: the quick way for
        most. O(1)."""
        if self._put_off:
            return False
        answers = self._writers.get(token.writer)
        return answers is None or (
            attempt >= answers.attempt and token.counter > next(reversed(answers.by_counter))
        )

    def attempt(self, writer: bytes) -> int:
        """The highest attempt that was heard of; 0 for none. O(1)."""
        answers = self._writers.get(writer)
        return 0 if answers is None else answers.attempt

    def newest(self, writer: bytes) -> tuple[WriterToken, bytes] | None:
        """The newest batch of a writer, and its answer. O(1)."""
        answers = self._writers.get(writer)
        if answers is None:
            return None
        counter = next(reversed(answers.by_counter))
        return WriterToken(writer, counter), answers.by_counter[counter][0]

    def put_off(self, token: WriterToken) -> None:
        """Notes that a batch was refused for what passes, before it had any effect. O(1)."""
        highest, refused = self._put_off.pop(token.writer, (0, 0))
        if not refused:
            self._count(PUT_OFF_BYTES)
        elif token.counter <= highest:
            refused = 0
        self._put_off[token.writer] = (token.counter, refused + 1)
        if len(self._put_off) > WRITERS_MAX:
            self._put_off.popitem(last=False)
            self._count(-PUT_OFF_BYTES)

    def must_wait(self, token: WriterToken) -> bool:
        """Whether the batch is behind one that was put off; then it is put off too. O(1)."""
        if token.writer not in self._put_off:
            return False
        highest, refused = self._put_off[token.writer]
        if token.counter > highest and refused < BATCHES_MAX:
            self.put_off(token)
            return True
        del self._put_off[token.writer]
        self._count(-PUT_OFF_BYTES)
        return False

    def keep_news(self) -> None:
        """From now on, notes for `take_news` what changes."""
        self._news = deque()

    def take_news(self, through: int) -> dict[WriterToken, bytes | None]:
        """What has changed until the partition's high number was `through`, since this was last
        asked: answers remembered, and None for those forgotten."""
        taken = dict[WriterToken, bytes | None]()
        while self._news and self._news[0].high <= through:
            news = self._news.popleft()
            taken |= news.changes
            self._count(-news.held - NEWS_BYTES * len(news.changes))
            news.changes = {}
        return taken

    def remember(self, token: WriterToken, answer: bytes, high: int = 0, attempt: int = 0) -> None:
        """Keeps the answer to a batch that `recall` did not know. O(1), beside what it forgets.

        Args:
            token: Its token.
            answer: The answer.
            high: The partition's high number with the batch.
            attempt: Which run of the writer's task sent it.
        """
        answers = self._writers.get(token.writer)
        if answers is None:
            answers = self._writers[token.writer] = _Answers()
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
        """Keeps another answer to the writer's newest batch, as of now. O(1), beside what it
        forgets."""
        self._forget(token, self._writers[token.writer], high)
        self.remember(token, answer, high, attempt)

    def _forget(self, token: WriterToken, answers: _Answers, high: int) -> None:
        answer, told_by = answers.by_counter.pop(token.counter)
        self._answer_count -= 1
        nbytes = ANSWER_BYTES + len(answer)
        answers.nbytes -= nbytes
        if (
            told_by is not None
            and self._news
            and told_by is self._news[-1]
            and told_by.high == high
        ):
            # The disk will know neither that it was there nor that it is gone.
            del told_by.changes[token]
            self._count(-nbytes - NEWS_BYTES)
            return
        self._note(token, None, high)
        if told_by is not None and told_by.changes:
            # The disk has it first, with a lower number, to know the batch should it crash there.
            told_by.held += nbytes
        else:
            self._count(-nbytes)

    # For replicas.

    def between(self, start: int, end: int) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Answers given at high numbers of [`start`, `end`], oldest first: writer, counter, number
        and answer. O(log answers), beside what is found."""
        found: list[tuple[bytes, int, SeqNo, bytes]] = []
        for at in range(bisect_left(self._order, start, key=_HIGH), len(self._order)):
            high, token = self._order[at]
            if high > end:
                break
            answers = self._writers.get(token.writer)
            known = answers and answers.by_counter.get(token.counter)
            if known:
                found.append((token.writer, token.counter, SeqNo(high), known[0]))
        return found

    def above(self, seq: int) -> list[WriterToken]:
        """The tokens of answers given at numbers above `seq`. O(answers)."""
        at = bisect_left(self._order, seq + 1, key=_HIGH)
        return list(dict.fromkeys(token for _, token in self._order[at:]))

    def cut(self, seq: int) -> list[WriterToken]:
        """Forgets the answers given at numbers above `seq`, as if they had never been. O(answers).

        Returns:
            Their tokens.
        """
        gone = self.above(seq)
        del self._order[bisect_left(self._order, seq + 1, key=_HIGH) :]
        for token in gone:
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
        while self._news and self._news[-1].high > seq:
            news = self._news.pop()
            self._count(-news.held - NEWS_BYTES * len(news.changes))
        return gone

    def _tidy_order(self) -> None:
        newest: dict[WriterToken, int] = {}
        for high, token in self._order:
            answers = self._writers.get(token.writer)
            if answers is not None and token.counter in answers.by_counter:
                newest.pop(token, None)
                newest[token] = high
        self._order = [(high, token) for token, high in newest.items()]

    def _note(self, token: WriterToken, answer: bytes | None, high: int) -> _News | None:
        """Notes a change. Gives the news that it is part of, if it is all that they say of it."""
        if self._news is None:
            return None
        news = self._news[-1] if self._news else None
        if news is None or news.high != high:
            news = _News(high)
            self._news.append(news)
        elif token in news.changes:
            news.changes[token] = answer
            return None
        news.changes[token] = answer
        self._count(NEWS_BYTES)
        return news

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._memory.writers += nbytes

    @property
    def nbytes(self) -> int:
        """What it takes, about."""
        return self._nbytes

    def check_invariants(self) -> None:
        """Bounds, order, bytes. O(answers + news)."""
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
        highs = [news.high for news in self._news or ()]
        assert sorted(set(highs)) == highs, "numbers rise"
        total += sum(news.held + NEWS_BYTES * len(news.changes) for news in self._news or ())
        assert total == self._nbytes, (total, self._nbytes)
