"""What a partition has answered to publishers, by writer and counter.

`upr_server/engine/publisher_answers.py` says what for. A *token* is a writer's ID and a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import islice, takewhile
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple

from upr_kernel.pure.answer_records import ROW

Token = tuple[bytes, int]
"""A writer's ID, and the counter of one of its batches."""

WRITER_BYTES: Final = 16

_HIGH: Final = attrgetter("high")
_NUMBERS: Final = {1: Struct(">BB"), 2: Struct(">BH"), 4: Struct(">BI"), 8: Struct(">BQ")}
_HEADS: Final = {1: 0xCC, 2: 0xCD, 4: 0xCE, 8: 0xCF}


class _Change:
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

    __slots__ = ("answer", "applied_high", "high", "is_forgotten", "nbytes", "token")

    def __init__(self, token: Token, answer: bytes | None, high: int, nbytes: int = 0) -> None:
        self.token = token
        self.answer = answer
        self.high = high
        self.nbytes = nbytes
        self.is_forgotten = False
        self.applied_high: int | None = None

    @property
    def effect_high(self) -> int:
        """The high number with the batch's effect."""
        return self.high if self.applied_high is None else self.applied_high

    def outlives(self, seq: int) -> bool:
        """Whether the answer is still true after a truncation to `seq`, below `high`: the batch had
        its effect at or below `seq`."""
        applied_high = self.applied_high
        return not self.is_forgotten and applied_high is not None and applied_high <= seq


class _WriterAnswers:
    """One writer's answers by counter, the newest last; its newest counter, the highest attempt
    seen, the number of its first answer, and the highest of those that were pushed out."""

    __slots__ = (
        "attempt",
        "by_counter",
        "first_high",
        "forgotten_high",
        "nbytes",
        "newest_counter",
    )

    def __init__(self, first_high: int) -> None:
        self.attempt = 0
        self.first_high = first_high
        self.forgotten_high = 0
        self.newest_counter = 0
        self.by_counter: dict[int, _Change] = {}
        self.nbytes = 0


class Answers:
    """The answers of one partition, by writer token.

    Args:
        batches_max: Answers of one writer that are remembered.
        bytes_max: What they take, unless a single one takes more.
        writers_max: Writers that are remembered, those heard from last.
        total_bytes_max: What all writers and answers take that are remembered, unless a single
            answer takes more. See `_forget_surplus_bytes`.
        writer_bytes: What a writer takes beside its answers, about.
        answer_bytes: What an answer takes beside its own bytes, about.
        unsaved_bytes: What a change that is not on disk yet takes beside the answer's own bytes.
        order_slack: The order holds at most so many forgotten answers more than remembered ones;
            then it is made anew.

    Attributes:
        has_refused: Whether batches were refused that others must not overtake: the caller says so.
        nbytes: What it takes, about.
    """

    __slots__ = (
        "_answer_count",
        "_forgotten_high",
        "_limits",
        "_order",
        "_recent_writers",
        "_reduced_bytes",
        "_total_bytes",
        "_unsaved",
        "_writers",
        "has_refused",
        "nbytes",
    )

    def __init__(
        self,
        batches_max: int,
        bytes_max: int,
        writers_max: int,
        total_bytes_max: int,
        writer_bytes: int,
        answer_bytes: int,
        unsaved_bytes: int,
        order_slack: int,
        /,
    ) -> None:
        if not 0 < batches_max <= 1 << 16 or not writers_max:
            raise ValueError("at least one answer and one writer are remembered")
        self._limits = _Limits(
            batches_max,
            bytes_max,
            writers_max,
            total_bytes_max,
            writer_bytes,
            answer_bytes,
            unsaved_bytes,
            order_slack,
        )
        self.nbytes = 0
        # All answers by high number; some are forgotten.
        self._order: list[_Change] = []
        self.has_refused = False
        self._answer_count = 0
        # The highest of all writers', or more.
        self._forgotten_high = 0
        # By when each was last heard from.
        self._writers: OrderedDict[bytes, _WriterAnswers] = OrderedDict()
        # The writers that are not reduced to their newest answers. All reduced ones come before
        # them in `_writers`.
        self._recent_writers: OrderedDict[bytes, _WriterAnswers] = OrderedDict()
        # What the reduced writers take, and what all take, with their answers.
        self._reduced_bytes = self._total_bytes = 0
        # What the disk does not know yet, by high number; None without a disk. A dict, so that an
        # answer that comes and goes at one high number can be taken out.
        self._unsaved: dict[_Change, None] | None = None

    def __len__(self) -> int:
        """How many writers are remembered."""
        return len(self._writers)

    # Asking.

    def answer_to(self, writer: bytes, counter: int, /) -> tuple[bytes | None, bool]:
        """The answer to a batch, and whether it may have been forgotten. O(log answers)."""
        answers = self._find(writer)
        if answers is None:
            return None, False
        remembered = answers.by_counter.get(counter)
        if remembered is not None:
            return remembered.answer, False
        return None, counter <= answers.newest_counter

    def is_new(self, writer: bytes, counter: int, attempt: int, /) -> bool:
        """Whether a batch is new for certain: it comes behind all of its writer, in no older
        attempt, and no batch was refused. Counters begin at 1. O(1)."""
        answers = self._find(writer)
        if answers is None:
            return not self.has_refused and counter > 0
        return (
            not self.has_refused and counter > answers.newest_counter and attempt >= answers.attempt
        )

    def attempt(self, writer: bytes, /) -> int:
        """The highest attempt of a writer; 0 where it has none. O(1)."""
        answers = self._find(writer)
        return 0 if answers is None else answers.attempt

    def newest(self, writer: bytes, /) -> tuple[int, bytes] | None:
        """The counter of the newest batch of a writer, and its answer. O(1)."""
        answers = self._find(writer)
        if answers is None:
            return None
        newest = answers.by_counter[answers.newest_counter]
        assert newest.answer is not None
        return answers.newest_counter, newest.answer

    def _find(self, writer: bytes) -> _WriterAnswers | None:
        if len(writer) != WRITER_BYTES:
            raise ValueError("a writer's ID has 16 bytes")
        return self._writers.get(writer)

    # Remembering.

    def track_unsaved(self) -> None:
        """There is a disk: from now on, changes are kept for `take_unsaved`."""
        if self._unsaved is None:
            self._unsaved = {}

    def take_unsaved(self, through: int, count_max: int, /) -> tuple[bytes, int]:
        """What has changed since the last call, while the partition's high number was at most
        `through`: answers remembered and forgotten. O(changes).

        Args:
            through: See above.
            count_max: How many changes are taken at most, the oldest first.

        Returns:
            A row for each change (`answer_records.ROW`), and how many there are: if fewer than
            `count_max`, these are all.
        """
        rows: list[bytes] = []
        unsaved = self._unsaved or {}
        due = takewhile(lambda change: change.high <= through, unsaved)
        changes = list(islice(due, min(count_max, len(unsaved))))
        for change in changes:
            answer = change.answer or b""
            rows.append(ROW.pack(*change.token, len(answer)) + answer)
            self.nbytes -= self._limits.unsaved_bytes
            if change.is_forgotten:
                self.nbytes -= change.nbytes
                change.answer = None
            del unsaved[change]
        return b"".join(rows), len(changes)

    def remember(
        self, writer: bytes, counter: int, answer: bytes, high: int, attempt: int, /
    ) -> int:
        """Keeps the answer to a batch that had none. O(1), beside what it forgets.

        Args:
            writer: The writer's ID.
            counter: The batch's counter, above all others of the writer.
            answer: The answer.
            high: The partition's high number with the batch.
            attempt: Which run of the writer's task sent it.

        Returns:
            How many bytes more it takes than before.

        Raises:
            ValueError: The counter is not above the writer's newest.
        """
        nbytes_before = self.nbytes
        answers = self._find(writer)
        if answers is not None and answers.by_counter and counter <= answers.newest_counter:
            raise ValueError("a writer's counters rise")
        if answers is None:
            answers = self._add_writer(writer, high)
        else:
            self._touch(writer, answers)
        answers.attempt = max(answers.attempt, attempt)
        limits, by_counter = self._limits, answers.by_counter
        change = _Change((writer, counter), answer, high, limits.answer_bytes + len(answer))
        by_counter[counter] = change
        answers.newest_counter = counter
        answers.nbytes += change.nbytes
        self._total_bytes += change.nbytes
        self._answer_count += 1
        self._order.append(change)
        self.nbytes += change.nbytes
        if self._unsaved is not None:
            self._unsaved[change] = None
            self.nbytes += limits.unsaved_bytes
        while len(by_counter) > limits.batches_max or (
            answers.nbytes > limits.bytes_max and len(by_counter) > 1
        ):
            self._forget_oldest(answers, high)
        self._forget_surplus_bytes(high)
        self._tidy_order()
        return self.nbytes - nbytes_before

    def remember_plain(
        self,
        writer: bytes,
        counter: int,
        attempt: int,
        history_id: int,
        first_seq: int,
        last_seq: int,
        first_cas: int,
    ) -> int:
        """The same for a batch of which nothing failed and nothing was counted, with the high
        number `last_seq`: for `add_runs`.

        The answer is an array of MessagePack: history, first and last number, first CAS, no
        failures, reasons, counters and values, no chain, and the attempt.
        """
        packed = bytearray((0x9A,))
        for number in (history_id, first_seq, last_seq, first_cas):
            packed += _packed(number)
        packed += b"\x90\xc4\x00\x90\x90\x00" + _packed(attempt)
        return self.remember(writer, counter, bytes(packed), last_seq, attempt)

    def _add_writer(self, writer: bytes, high: int) -> _WriterAnswers:
        self._writers[writer] = self._recent_writers[writer] = answers = _WriterAnswers(high)
        self.nbytes += self._limits.writer_bytes
        self._total_bytes += self._limits.writer_bytes
        if len(self._writers) > self._limits.writers_max:
            self._forget_oldest_writer(high)
        return answers

    def _touch(self, writer: bytes, answers: _WriterAnswers) -> None:
        """A writer was heard from."""
        self._writers.move_to_end(writer)
        if writer not in self._recent_writers:
            self._reduced_bytes -= self._limits.writer_bytes + answers.nbytes
            self._recent_writers[writer] = answers
        self._recent_writers.move_to_end(writer)

    def _forget_oldest_writer(self, high: int) -> None:
        writer, answers = next(iter(self._writers.items()))
        while answers.by_counter:
            self._forget_oldest(answers, high)
        self._remove_writer(writer)

    def _remove_writer(self, writer: bytes) -> None:
        """Removes a writer that has no answers."""
        writer_bytes = self._limits.writer_bytes
        del self._writers[writer]
        if self._recent_writers.pop(writer, None) is None:
            self._reduced_bytes -= writer_bytes
        self.nbytes -= writer_bytes
        self._total_bytes -= writer_bytes

    def _uncount(self, change: _Change, answers: _WriterAnswers) -> None:
        """An answer of a writer is remembered no more."""
        writer, counter = change.token
        del answers.by_counter[counter]
        answers.nbytes -= change.nbytes
        self._total_bytes -= change.nbytes
        if writer not in self._recent_writers:
            self._reduced_bytes -= change.nbytes
        self._answer_count -= 1

    def _forget_surplus_bytes(self, high: int) -> None:
        """Forgets what is over the limit of all writers. First those heard from longest ago are
        reduced to their newest answers: of these the older batches are still known to be old.
        Reduced writers have at most half of the room, so that the others keep what their batches in
        flight need."""
        limits, recent_writers = self._limits, self._recent_writers
        while self._total_bytes > limits.total_bytes_max:
            writer, answers = next(iter(recent_writers.items()))
            answer_count = len(answers.by_counter)
            is_last = len(recent_writers) == answer_count == 1
            if is_last and len(self._writers) == 1:
                return
            if is_last or self._reduced_bytes > limits.total_bytes_max // 2:
                self._forget_oldest_writer(high)
            elif answer_count > 1:
                self._forget_oldest(answers, high)
            else:
                del recent_writers[writer]
                self._reduced_bytes += limits.writer_bytes + answers.nbytes

    def replace_newest(self, writer: bytes, answer: bytes, high: int, attempt: int, /) -> int:
        """Keeps another answer to the writer's newest batch. O(1), beside what it forgets.

        Returns:
            How many bytes more it takes than before.

        Raises:
            KeyError: The writer has no answers.
        """
        nbytes_before = self.nbytes
        answers = self._find(writer)
        if answers is None:
            raise KeyError(writer)
        counter = answers.newest_counter
        replaced = answers.by_counter[counter]
        applied_high = replaced.effect_high
        self._forget(replaced, answers, high)
        # Its other answers have lower counters.
        answers.newest_counter = counter - 1
        self.remember(writer, counter, answer, high, attempt)
        self.note_applied(writer, counter, applied_high)
        return self.nbytes - nbytes_before

    def note_applied(self, writer: bytes, counter: int, applied_high: int, /) -> None:
        """Notes that a remembered batch had its effect at a lower high number than that of its
        answer. O(log answers).

        Raises:
            KeyError: It is not remembered.
        """
        answers = self._find(writer)
        if answers is None:
            raise KeyError(writer)
        answers.by_counter[counter].applied_high = applied_high

    def _forget_oldest(self, answers: _WriterAnswers, high: int) -> None:
        """Later answers push the oldest one out."""
        oldest = next(iter(answers.by_counter.values()))
        self._note_forgotten(answers, oldest.high)
        self._forget(oldest, answers, high)

    def _note_forgotten(self, answers: _WriterAnswers, high: int) -> None:
        answers.forgotten_high = max(answers.forgotten_high, high)
        self._forgotten_high = max(self._forgotten_high, high)

    def _forget(self, change: _Change, answers: _WriterAnswers, high: int) -> None:
        nbytes, unsaved_bytes = change.nbytes, self._limits.unsaved_bytes
        self._uncount(change, answers)
        change.is_forgotten = True
        unsaved = self._unsaved
        if unsaved is None:
            change.answer = None
            self.nbytes -= nbytes
        elif change not in unsaved:
            unsaved[_Change(change.token, None, high)] = None
            change.answer = None
            self.nbytes += unsaved_bytes - nbytes
        elif change.high == high:
            # The answer came and went at one high number: the disk need not know of it.
            del unsaved[change]
            change.answer = None
            self.nbytes -= nbytes + unsaved_bytes
        else:
            # A commit up to the lower number still has to write it: after a crash there, the batch
            # must be known. Until then the answer takes memory.
            unsaved[_Change(change.token, None, high)] = None
            self.nbytes += unsaved_bytes

    def _tidy_order(self) -> None:
        # Forgotten answers stay in the order until they are more than half of it. To take each out
        # at once would be a search, and this way an answer costs O(1) in all.
        if len(self._order) > 2 * self._answer_count + self._limits.order_slack:
            self._order = [change for change in self._order if not change.is_forgotten]

    # For replicas.

    def between(
        self, start: int, end: int, count_max: int, /
    ) -> list[tuple[bytes, int, int, bytes]]:
        """Answers given at high numbers of [`start`, `end`], oldest first: writer, counter, number
        and answer. O(log answers), beside what is found.

        Args:
            start: See above.
            end: See above.
            count_max: How many, 1 or more. All that were given at the number of the last are
                among them.
        """
        rows: list[tuple[bytes, int, int, bytes]] = []
        order = self._order
        for place in range(bisect_left(order, start, key=_HIGH), len(order)):
            change = order[place]
            if change.high > end:
                break
            if change.answer is None or change.is_forgotten:
                continue
            if rows and len(rows) >= count_max and rows[-1][2] != change.high:
                break
            rows.append((*change.token, change.high, change.answer))
        return rows

    def moved_between(self, start: int, end: int, /) -> list[tuple[bytes, int, int, bytes]]:
        """Later answers, given at high numbers above `end`, to batches that had their effect in
        (`start`, `end`]: writer, counter, the number of the effect, and the answer. In the order in
        which they were given. O(answers above `end`); in C O(1) if there are no later answers.

        Args:
            start: See above.
            end: See above.
        """
        order = self._order
        return [
            (*change.token, change.applied_high, change.answer)
            for change in islice(order, bisect_left(order, end + 1, key=_HIGH), None)
            if not change.is_forgotten
            and change.answer is not None
            and change.applied_high is not None
            and start < change.applied_high <= end
        ]

    def assume_forgotten_answers(self) -> None:
        """All answers came from a disk, which does not tell what was pushed out: of each writer
        there may have been older ones. O(writers)."""
        for answers in self._writers.values():
            answers.first_high = 0
            self._note_forgotten(answers, next(iter(answers.by_counter.values())).high)

    def too_old_tokens(self, start: int, end: int, /) -> list[tuple[bytes, int, int]]:
        """The writers of which answers were pushed out that were given above `start`, at least one
        at or below `end`, and of which none is remembered that was given at or below `end`: writer,
        the counter below its oldest remembered one, and its highest attempt. O(writers), and O(1)
        where nothing was pushed out."""
        if self._forgotten_high <= start:
            return []
        rows: list[tuple[bytes, int, int]] = []
        for writer, answers in self._writers.items():
            counter, oldest = next(iter(answers.by_counter.items()))
            if (
                answers.first_high <= end < oldest.high
                and answers.forgotten_high > start
                and counter
            ):
                rows.append((writer, counter - 1, answers.attempt))
        return rows

    def newest_at(self, seq: int, /) -> list[tuple[bytes, int, int, bytes]]:
        """Of each writer the newest batch that had its effect at or below `seq`, if its answer is
        remembered: writer, counter, `seq`, and the answer. Writers heard from last come last.
        O(answers)."""
        rows: list[tuple[bytes, int, int, bytes]] = []
        for answers in self._writers.values():
            for change in reversed(answers.by_counter.values()):
                if change.effect_high <= seq:
                    assert change.answer is not None
                    rows.append((*change.token, seq, change.answer))
                    break
        return rows

    def rows_above(self, seq: int, place: int, count_max: int, /) -> tuple[bytes, int]:
        """What deletes from the disk the answers given at numbers above `seq`, except those to
        batches that had their effect at or below it: in pieces, between which nothing may change.
        O(count_max).

        Args:
            seq: See above.
            place: Where the piece begins; 0 for the first.
            count_max: How many answers to look at.

        Returns:
            A row for each answer, as `take_unsaved` gives for one that was forgotten. A batch may
            occur twice. And where the next piece begins; 0 if this was the last.
        """
        # Of forgotten answers, too: the disk may not know yet that they are forgotten.
        order = self._order
        begin = max(place, bisect_left(order, seq + 1, key=_HIGH))
        end = min(begin + count_max, len(order))
        rows = b"".join(
            ROW.pack(*change.token, 0)
            for change in order[begin:end]
            if not self._is_outlived(change, seq)
        )
        return rows, end if end < len(order) else 0

    def truncate(self, seq: int, count_max: int, /) -> bool:
        """Forgets the answers given at numbers above `seq`, as if they had never been. A later
        answer to a batch that had its effect at or below `seq` stays, as if given at `seq`: the
        batch must not be applied again. O(count_max + changes that are not on disk).

        Args:
            seq: See above.
            count_max: How many answers to look at, the oldest first.

        Returns:
            Whether there are more above `seq`. Until they are gone, too, nothing else may change.
        """
        self._truncate_unsaved(seq)
        self._forgotten_high = min(self._forgotten_high, seq)
        order = self._order
        begin = bisect_left(order, seq + 1, key=_HIGH)
        end = min(begin + count_max, len(order))
        kept: list[_Change] = []
        for change in order[begin:end]:
            if change.is_forgotten:
                continue
            if change.outlives(seq):
                change.high = seq
                kept.append(change)
                continue
            writer, _ = change.token
            answers = self._writers[writer]
            self._uncount(change, answers)
            self.nbytes -= change.nbytes
            if answers.by_counter:
                answers.newest_counter = next(reversed(answers.by_counter))
            else:
                self._remove_writer(writer)
        has_more = end < len(order)
        order[begin:end] = kept
        self._tidy_order()
        return has_more

    def _truncate_unsaved(self, seq: int) -> None:
        """Undoes what the disk does not know of changes above `seq`. What outlives that stays: an
        answer, or that the one before it is forgotten, which then counts as if it was at `seq`."""
        unsaved = self._unsaved or {}
        for change in list(takewhile(lambda change: change.high > seq, reversed(unsaved))):
            if change.is_forgotten or not self._is_outlived(change, seq):
                del unsaved[change]
                self.nbytes -= self._limits.unsaved_bytes
                self.nbytes -= change.nbytes if change.is_forgotten else 0
            elif change.answer is None:
                change.high = seq

    def _is_outlived(self, change: _Change, seq: int) -> bool:
        """Whether the answer that is remembered of the same batch outlives a truncation."""
        writer, counter = change.token
        answers = self._writers.get(writer)
        remembered = None if answers is None else answers.by_counter.get(counter)
        return remembered is not None and remembered.outlives(seq)

    def check_invariants(self) -> None:
        """Bounds, order, bytes. O(answers + pending changes)."""
        limits, total = self._limits, 0
        assert len(self._writers) <= limits.writers_max
        for answers in self._writers.values():
            counters = list(answers.by_counter)
            assert 0 < len(counters) <= limits.batches_max
            assert sorted(counters) == counters, "counters rise"
            assert answers.newest_counter == counters[-1]
            sizes = [change.nbytes for change in answers.by_counter.values()]
            assert sum(sizes) == answers.nbytes
            assert answers.nbytes <= limits.bytes_max or len(sizes) == 1
            total += limits.writer_bytes + answers.nbytes
        self._check_total(total)
        count = sum(len(answers.by_counter) for answers in self._writers.values())
        assert count == self._answer_count
        assert len(self._order) <= 2 * count + limits.order_slack
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
        total += limits.unsaved_bytes * len(unsaved)
        total += sum(change.nbytes for change in unsaved if change.is_forgotten)
        for change in self._order:
            assert change.answer is None or not change.is_forgotten or change in unsaved
        assert total == self.nbytes, (total, self.nbytes)

    def _check_total(self, total: int) -> None:
        """What all writers and answers that are remembered take."""
        limits = self._limits
        reduced_count = len(self._writers) - len(self._recent_writers)
        assert list(self._writers)[reduced_count:] == list(self._recent_writers)
        reduced_writers = list(islice(self._writers.values(), reduced_count))
        assert all(len(answers.by_counter) == 1 for answers in reduced_writers)
        reduced_bytes = sum(limits.writer_bytes + answers.nbytes for answers in reduced_writers)
        assert reduced_bytes == self._reduced_bytes
        assert total == self._total_bytes
        assert total <= limits.total_bytes_max or self._answer_count == 1


class _Limits(NamedTuple):
    batches_max: int
    bytes_max: int
    writers_max: int
    total_bytes_max: int
    writer_bytes: int
    answer_bytes: int
    unsaved_bytes: int
    order_slack: int


def _packed(number: int) -> bytes:
    """An unsigned number in the shortest form of MessagePack."""
    if number < 1 << 7:
        return bytes((number,))
    size = next(size for size in _NUMBERS if number < 1 << 8 * size)
    return _NUMBERS[size].pack(_HEADS[size], number)
