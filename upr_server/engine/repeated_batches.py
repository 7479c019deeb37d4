"""Repeated batches: a batch that a publisher sends again has no second effect.

Batches are recognised by their writer token. Deduplication by key is another matter, which
`snapshots/open_snapshot` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Final

import msgspec

from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, SeqNo
from upr_server.engine.batch import MutationBatch
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.mutate_result import MutateResult, pack_result, unpack_result
from upr_server.engine.publisher_answers import (
    ALL_ANSWERS,
    UNBOUNDED,
    PublisherAnswers,
    WriterToken,
)

NO_HISTORY: Final = HistoryId(0)
"""The history of an answer that stands for forgotten ones: the batch is too old."""

_NUMBER: Final = itemgetter(2)


class RepeatedBatches:
    """Decides what becomes of a batch that has a token: it is applied, refused, or answered as it
    was the first time.

    Args:
        memory: What the bucket holds.
        answers: The answers that the disk has, by token, oldest first.
        high: The partition's high number.
        answers_bytes_max: What the remembered answers may take.

    Attributes:
        answers: The answers that are remembered.
    """

    __slots__ = ("answers",)

    def __init__(
        self,
        memory: MemoryAccount,
        answers: Mapping[WriterToken, MutateResult],
        high: SeqNo,
        answers_bytes_max: int = UNBOUNDED,
    ) -> None:
        self.answers = PublisherAnswers(memory, answers_bytes_max)
        for token, result in answers.items():
            # The disk keeps no high number with an answer. The result's last number is at most
            # that, so that a truncation that undoes the batch forgets the answer too.
            given_at = min(result.last_seq, high)
            # A writer's later batches have higher numbers, unless the disk is damaged.
            newest = self.answers.newest_answer(token.writer)
            if newest is None or newest[0].counter < token.counter:
                self.answers.remember(token, pack_result(result), given_at, result.attempt)
        self.answers.assume_forgotten_answers()

    # What becomes of a batch.

    def is_certainly_new(self, token: WriterToken | None, attempt: int) -> bool:
        """Whether a batch without a chain is to be applied: a quick yes for most. False means that
        the other questions must be asked. Changes nothing. O(1)."""
        return token is None or self.answers.is_certainly_new(token, attempt)

    def is_new(self, batch: MutationBatch) -> bool:
        """Whether the batch is to be applied. Changes nothing. O(1)."""
        token, answers = batch.token, self.answers
        if token is None or (not batch.chain and self.is_certainly_new(token, batch.attempt)):
            return True
        return (
            batch.attempt >= answers.newest_attempt(token.writer)
            and not answers.overtakes_refused(token)
            and self._answer(token, batch) is None
        )

    def answer_unless_new(self, batch: MutationBatch, high: SeqNo) -> MutateResult | Status | None:
        """The answer to a batch that is not to be applied; None for one that is. O(1).

        Args:
            batch: The batch.
            high: The partition's high number.

        Returns:
            The first answer, for a batch that was here before; or the status to refuse it with.
        """
        token, answers = batch.token, self.answers
        if token is None or (not batch.chain and self.is_certainly_new(token, batch.attempt)):
            return None
        if batch.attempt < answers.newest_attempt(token.writer):
            return Status.SUPERSEDED
        if answers.refuse_overtaking(token):
            return Status.TEMPORARY_FAILURE
        answer = self._answer(token, batch)
        if answer is Status.REPLAY_DIFFERS:
            # The publisher hears of this later: what it has sent behind the batch must not be done.
            answers.note_refused(token)
        elif isinstance(answer, MutateResult) and batch.attempt > answers.newest_attempt(
            token.writer
        ):
            self._supersede_older(token.writer, batch.attempt, high)
        return answer

    def _answer(self, token: WriterToken, batch: MutationBatch) -> MutateResult | Status | None:
        packed_result, may_be_forgotten = self.answers.answer_to(token)
        if packed_result is not None:
            result = unpack_result(packed_result, is_repeated=True)
            if result.history_id == NO_HISTORY:
                return Status.TOKEN_TOO_OLD
            is_different = batch.chain and result.chain and batch.chain != result.chain
            return Status.REPLAY_DIFFERS if is_different else result
        if may_be_forgotten:
            return Status.TOKEN_TOO_OLD
        return None if self._continues_chain(token, batch) else Status.REPLAY_DIFFERS

    def _continues_chain(self, token: WriterToken, batch: MutationBatch) -> bool:
        """Whether a new batch follows what its publisher sent before, as far as can be told."""
        if not batch.chain:
            return True
        newest = self.answers.newest_answer(token.writer)
        if newest is None or newest[0].counter + 1 != token.counter:
            return True
        previous_chain = unpack_result(newest[1]).chain
        return not previous_chain or batch.chunk.chained_crc(previous_chain) == batch.chain

    def _supersede_older(self, writer: bytes, attempt: int, high: SeqNo) -> None:
        """Refuses older attempts from now on, though this one has sent nothing new yet: the newest
        answer gets the attempt's number, so that it is on disk too."""
        newest = self.answers.newest_answer(writer)
        assert newest is not None
        token, answer = newest
        result = msgspec.structs.replace(unpack_result(answer), attempt=attempt)
        self.answers.replace_newest(token, pack_result(result), high, attempt)

    def note_refused(self, token: WriterToken | None) -> None:
        """A batch was refused for a passing reason. What its publisher has sent behind it will be
        refused too, until it sends this one, or another that was refused, again.

        Args:
            token: The batch's name, if it has one.
        """
        if token is not None:
            self.answers.note_refused(token)

    def remember(self, token: WriterToken, result: MutateResult, high: SeqNo) -> None:
        """Keeps the result of a batch that was applied, for when it is sent again."""
        self.answers.remember(token, pack_result(result), high, result.attempt)

    # For replicas.

    def answers_between(
        self,
        start: int,
        end: int,
        count_max: int = ALL_ANSWERS,
        *,
        with_start: bool = True,
    ) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Answers given at high numbers of [`start`, `end`], and those to batches that had their
        effect in (`start`, `end`] and were answered again later: a replica that has the effect must
        know the batch. O(log answers), beside what is found.

        Args:
            start: See above.
            end: See above.
            count_max: About how many. If there are so many, there may be more above the number of
                the last.
            with_start: Whether those given at `start` are among them.

        Returns:
            Writer, counter, number and answer, by number. One that was given again later has no
            attempt: the replica hears of that with the later answer.
        """
        rows = self.answers.answers_between(start if with_start else start + 1, end, count_max)
        if len(rows) >= count_max:
            end = rows[-1][2]
        moved_rows = self.answers.moved_answers_between(start, end)
        if not moved_rows:
            return rows
        numbers = sorted(row[2] for row in (*rows, *moved_rows))
        if len(numbers) > count_max:
            end = numbers[count_max - 1]
        rows = [row for row in rows if row[2] <= end]
        rows += [_first_answer(row) for row in moved_rows if row[2] <= end]
        rows.sort(key=_NUMBER)
        return rows

    def too_old_answers(self, start: SeqNo, end: SeqNo) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Rows that stand for forgotten answers, to be sent before `answers_between(start, end)`.
        Without them, a replica that takes over at `end` would apply batches again whose effects it
        has: their answers were forgotten before they could be sent. O(writers), and O(1) mostly.

        Args:
            start: Up to where the replica has heard of the answers.
            end: The end of the next snapshot that it gets.

        Returns:
            Writer, counter, `start`, and an answer in no history, as batches up to there are too
            old.
        """
        return self._too_old_rows(start, end, start)

    def earlier_answers(self, seq: SeqNo) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Rows for a replica that begins at `seq`, to be sent before its first snapshot. The
        replica may have rolled back to there: its answers to the batches that it undid had pushed
        out those to earlier ones, which were not undone. One row of each writer is enough, as what
        is older is too old then. O(answers).

        Args:
            seq: Up to where the replica has all effects.

        Returns:
            Writer, counter, `seq` and answer.
        """
        return self._too_old_rows(SeqNo(0), seq, seq) + self.answers.newest_answers_at(seq)

    def _too_old_rows(
        self, start: SeqNo, end: SeqNo, seq: SeqNo
    ) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """The `too_old_tokens` as rows with the number `seq`."""
        return [
            (
                token.writer,
                token.counter,
                seq,
                pack_result(MutateResult(NO_HISTORY, SeqNo(seq + 1), seq, Cas(0), attempt=attempt)),
            )
            for token, attempt in self.answers.too_old_tokens(start, end)
        ]

    def add_received(self, rows: Iterable[tuple[bytes, int, SeqNo, bytes]]) -> None:
        """Keeps what another node gave as `earlier_answers`, `too_old_answers` and
        `answers_between`, for changes that come next or just came."""
        for writer, counter, seq, answer in rows:
            token = WriterToken(writer, counter)
            newest = self.answers.newest_answer(writer)
            if newest is None or newest[0].counter < counter:
                result = unpack_result(answer)
                self.answers.remember(token, answer, seq, result.attempt)
                # It may be a later answer to a batch whose first answer never came here.
                if 0 < result.last_seq < seq:
                    self.answers.note_applied(token, result.last_seq)
            elif newest[0] == token and newest[1] != answer:
                result = unpack_result(answer)
                self.answers.replace_newest(token, answer, seq, result.attempt)
                # The answer before may have been another one: all operations of the batch failed
                # here once, and succeeded at the node that became active.
                self.answers.note_applied(token, min(result.last_seq, seq))


def _first_answer(row: tuple[bytes, int, SeqNo, bytes]) -> tuple[bytes, int, SeqNo, bytes]:
    """The answer to a batch as it was at the number of its effect, but for the attempt."""
    writer, counter, seq, answer = row
    result = msgspec.structs.replace(unpack_result(answer), attempt=0)
    return writer, counter, seq, pack_result(result)
