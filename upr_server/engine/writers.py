"""What publishers were answered: a batch sent again has no second effect.

A publisher names each batch by a token: its writer ID and a counter that rises. When an answer was
lost it sends the batch again under the same token, and gets the first answer. The window in which
that works is bounded, and documented:

- the newest 64 batches of a writer and partition: a publisher keeps fewer in flight, and only those
  can be in doubt;
- the 1,024 writers that a partition heard from last: a publisher that 1,024 others have overtaken
  since its last batch is not waiting for an answer any more.

A batch older than its writer's window is refused with `TOKEN_TOO_OLD`. Of a writer that was
forgotten nothing is known: its batch counts as new.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

import msgspec

from upr_server.engine.memory import Memory

BATCHES_MAX: Final = 64
"""Answers that are remembered of one writer: see above."""

WRITERS_MAX: Final = 1024
"""Writers that one partition remembers: see above."""

WRITER_ID_BYTES: Final = 16

WRITER_BYTES: Final = 400
"""What a writer takes beside its answers, about."""

Answer = TypeVar("Answer")


class WriterToken(msgspec.Struct, frozen=True):
    """One batch's name.

    Attributes:
        writer: The writer's ID: 16 random bytes, its own for as long as it lives.
        counter: Rises from one batch to the next of this writer.
    """

    writer: bytes
    counter: int


class Writers(Generic[Answer]):
    """The answers of one partition, by writer token.

    Args:
        memory: What the bucket holds.
    """

    __slots__ = ("_memory", "_nbytes", "_news", "_writers")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._nbytes = 0
        # The writer heard from last stands last; its answers by counter, the newest last.
        self._writers: OrderedDict[bytes, dict[int, tuple[Answer, int]]] = OrderedDict()
        # What the disk does not know yet: the partition's high number then, the token, the answer.
        self._news: deque[tuple[int, WriterToken, Answer | None]] | None = None

    def __len__(self) -> int:
        return len(self._writers)

    def recall(self, token: WriterToken) -> tuple[Answer | None, bool]:
        """The answer to the batch with this token, and whether it is too old to tell. O(1)."""
        answers = self._writers.get(token.writer)
        if answers is None:
            return None, False
        found = answers.get(token.counter)
        if found is not None:
            return found[0], False
        return None, token.counter <= next(reversed(answers))

    def keep_news(self) -> None:
        """From now on, notes for `take_news` what changes."""
        self._news = deque()

    def take_news(self, through: int) -> dict[WriterToken, Answer | None]:
        """What has changed until the partition's high number was `through`, since this was last
        asked: answers remembered, and None for those forgotten."""
        news, taken = self._news, dict[WriterToken, Answer | None]()
        while news and news[0][0] <= through:
            _, token, answer = news.popleft()
            taken[token] = answer
        return taken

    def remember(self, token: WriterToken, answer: Answer, nbytes: int, high: int = 0) -> None:
        """Keeps the answer to a batch that `recall` did not know. O(1).

        Args:
            token: Its token.
            answer: The answer.
            nbytes: What that takes, about.
            high: The partition's high number with the batch.
        """
        self._note(high, token, answer)
        answers = self._writers.get(token.writer)
        if answers is None:
            answers = self._writers[token.writer] = {}
            self._count(WRITER_BYTES)
            if len(self._writers) > WRITERS_MAX:
                writer, forgotten = self._writers.popitem(last=False)
                for counter in forgotten:
                    self._note(high, WriterToken(writer, counter), None)
                self._count(-WRITER_BYTES - sum(size for _, size in forgotten.values()))
        else:
            self._writers.move_to_end(token.writer)
        answers[token.counter] = (answer, nbytes)
        self._count(nbytes)
        if len(answers) > BATCHES_MAX:
            oldest = next(iter(answers))
            self._count(-answers.pop(oldest)[1])
            self._note(high, WriterToken(token.writer, oldest), None)

    def _note(self, high: int, token: WriterToken, answer: Answer | None) -> None:
        if self._news is not None:
            self._news.append((high, token, answer))

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._memory.writers += nbytes

    @property
    def nbytes(self) -> int:
        """What it takes, about."""
        return self._nbytes

    def check_invariants(self) -> None:
        """Bounds, order, bytes. O(answers)."""
        assert len(self._writers) <= WRITERS_MAX
        total = 0
        for answers in self._writers.values():
            assert 0 < len(answers) <= BATCHES_MAX
            assert sorted(answers) == list(answers), "counters rise"
            total += WRITER_BYTES + sum(size for _, size in answers.values())
        assert total == self._nbytes, (total, self._nbytes)
