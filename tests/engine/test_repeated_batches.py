"""Batches that publishers and tasks send again."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.helpers import (
    DELETE,
    INCREMENT,
    NOW,
    delta,
    new_partition,
    put_as,
    request,
    value_of,
)
from tests.kit.answer_rows import unpack_rows
from upr_protocol.chunk import Chunk, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, PartitionId, PartitionState, SeqNo
from upr_server.engine import (
    MutateResult,
    Partition,
    PartitionImage,
    WriterToken,
    batch_of,
)
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.mutate_result import pack_result, unpack_result
from upr_server.engine.publisher_answers import BATCHES_MAX

WRITER = WriterToken(bytes(16), 1)


def test_a_batch_sent_again_has_no_second_effect() -> None:
    partition = new_partition()
    chunk = Chunk.build([request(INCREMENT, value=delta(1, 10)), request(DELETE, b"missing")])
    first = partition.mutate(batch_of(chunk, WRITER), now=NOW)
    again = partition.mutate(batch_of(chunk, WRITER), now=NOW + 1)
    assert again.is_repeated
    assert not first.is_repeated
    assert (again.first_seq, again.first_cas) == (first.first_seq, first.first_cas)
    assert again.counters == first.counters == [(0, 10)]
    assert again.failures == first.failures == [(1, Status.NOT_FOUND)]
    assert value_of(partition) == b"10"
    third = partition.mutate(batch_of(chunk, WriterToken(bytes(16), 2)), now=NOW)
    assert third.counters == [(0, 11)]
    partition.check_invariants()


def test_a_batch_older_than_the_remembered_answers_is_refused() -> None:
    partition = new_partition()
    for counter in range(1, 66):
        put_as(partition, counter)
    assert put_as(partition, 2).is_repeated
    high = partition.high_seq
    assert put_as(partition, 1).status is Status.TOKEN_TOO_OLD
    assert partition.high_seq == high


def test_answers_are_remembered_in_few_bytes() -> None:
    """All that a publisher has in flight is known again, however large its counters are."""
    memory = MemoryAccount()
    partition = Partition(PartitionId(0), lambda: HistoryId(7), memory=memory)
    partition.repeated_batches.answers.track_unsaved()
    rows = [request(INCREMENT, b"%d" % index, value=delta(1, 2**64 - 100)) for index in range(1000)]
    chunk = Chunk.build(rows)
    answers = {}
    for counter in range(1, 65):
        token = WriterToken(bytes(16), counter)
        answers[counter] = partition.mutate(batch_of(chunk, token), now=NOW)
    answer_rows, _ = partition.repeated_batches.answers.take_unsaved(partition.high_seq)
    assert unpack_rows(answer_rows) == {
        (bytes(16), counter): None if counter <= 64 - 16 else pack_result(answers[counter])
        for counter in answers
    }
    assert memory.writers < 170_000
    for counter in range(49, 65):
        again = partition.mutate(batch_of(chunk, WriterToken(bytes(16), counter)), now=NOW)
        assert again == msgspec.structs.replace(answers[counter], is_repeated=True)
    partition.check_invariants()


@given(
    st.dictionaries(st.integers(0, 2**20), st.sampled_from(Status)),
    st.dictionaries(st.integers(0, 2**20), st.integers(0, 2**64 - 1)),
)
def test_a_remembered_answer_is_the_one_given(
    failures: dict[int, Status], counters: dict[int, int]
) -> None:
    result = MutateResult(
        HistoryId(2**64 - 1),
        SeqNo(2**48),
        SeqNo(2**48 + 5),
        Cas(2**63),
        sorted(failures.items()),
        sorted(counters.items()),
        chain=2**32 - 1,
        attempt=2**64 - 1,
    )
    assert unpack_result(pack_result(result)) == result


def test_an_answer_that_an_older_server_stored_unpacked_is_read() -> None:
    result = MutateResult(
        HistoryId(7), SeqNo(1), SeqNo(2), Cas(9), [(0, Status.EXISTS)], [(1, 5)], attempt=3
    )
    older = msgspec.msgpack.encode(result)
    assert unpack_result(older) == result
    assert unpack_result(older, is_repeated=True) == msgspec.structs.replace(
        result, is_repeated=True
    )


def test_a_refused_state_is_not_remembered() -> None:
    partition = new_partition()
    partition.state = PartitionState.PENDING
    assert put_as(partition, 1).status is Status.WRONG_STATE
    partition.state = PartitionState.ACTIVE
    result = put_as(partition, 1)
    assert (result.status, result.is_repeated) == (Status.OK, False)


def test_batches_behind_one_that_was_put_off_are_done_after_it() -> None:
    partition = new_partition()
    put_as(partition, 1)
    partition.repeated_batches.note_refused(None)
    partition.state = PartitionState.PENDING
    assert put_as(partition, 2).status is Status.WRONG_STATE
    partition.state = PartitionState.ACTIVE
    assert put_as(partition, 3).status is Status.TEMPORARY_FAILURE
    assert put_as(partition, 1, writer=1).status is Status.OK
    assert partition.high_seq == 2
    assert [put_as(partition, counter).first_seq for counter in (2, 3, 4)] == [3, 4, 5]
    partition.check_invariants()


def test_a_batch_that_was_done_before_it_was_put_off_is_known() -> None:
    partition = new_partition()
    put_as(partition, 1)
    put_as(partition, 2)
    partition.repeated_batches.note_refused(WriterToken(bytes(16), 1))
    assert put_as(partition, 2).status is Status.TEMPORARY_FAILURE
    assert put_as(partition, 1).is_repeated
    assert put_as(partition, 2).is_repeated
    assert put_as(partition, 3).first_seq == 3


def run_again(partition: Partition, variants: str, attempt: int, counters: range) -> list[str]:
    """Sends the batches of a run, each one variant of its counter's; gives what became of each."""
    answers = []
    chain = 0
    for counter in range(1, counters.stop):
        chunk = chunk_of_plain_sets([b"k%d" % counter], [variants[counter - 1].encode()])
        chain = chunk.chained_crc(chain)
        if counter in counters:
            token = WriterToken(bytes(16), counter)
            result = partition.mutate(batch_of(chunk, token, attempt=attempt, chain=chain), now=NOW)
            assert result.status is Status.OK or result.last_seq == partition.high_seq
            answers.append("again" if result.is_repeated else result.status.name)
    return answers


class TasksRunAgain(RuleBasedStateMachine):
    """One task, run again and again, now and then with other batches; and a server that crashes.

    The model is the variants of the batches that were done, and the highest attempt heard of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.partition = new_partition()
        self.partition.repeated_batches.answers.track_unsaved()
        self.answers: dict[WriterToken, bytes] = {}
        self.done, self.attempt = "", 0
        self.kept = (self.done, self.attempt, SeqNo(0))

    def said(self, counter: int, variants: str, attempt: int) -> str:
        """What the model says of one batch, and does."""
        if attempt < self.attempt:
            return "SUPERSEDED"
        if counter <= len(self.done) - BATCHES_MAX:
            return "TOKEN_TOO_OLD"
        if counter <= len(self.done):
            if variants[:counter] != self.done[:counter]:
                return "REPLAY_DIFFERS"
            self.attempt = max(attempt, self.attempt)
            return "again"
        if variants[: counter - 1] != self.done:
            return "REPLAY_DIFFERS"
        self.done, self.attempt = variants[:counter], attempt
        return "OK"

    @rule(
        attempt=st.integers(1, 5),
        batches=st.integers(1, 90) | st.integers(1, 5),
        other_at=st.none() | st.integers(1, 90),
    )
    def run(self, attempt: int, batches: int, other_at: int | None) -> None:
        variants = "a" * batches
        if other_at is not None:
            variants = variants[: other_at - 1] + "b" * (batches - other_at + 1)
        expected: list[str] = []
        for counter in range(1, batches + 1):
            expected.append(self.said(counter, variants, attempt))
            if expected[-1] == "REPLAY_DIFFERS":
                # What is on its way already waits for what never comes.
                behind = min(16, batches - counter)
                expected += ["TEMPORARY_FAILURE"] * behind
                break
        assert run_again(self.partition, variants, attempt, range(1, len(expected) + 1)) == expected

    @precondition(lambda self: self.attempt > 1)
    @rule(data=st.data())
    def go_on_though_overtaken(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempt - 1))
        begin = data.draw(st.integers(1, len(self.done) + 2))
        answers = run_again(self.partition, "c" * (begin + 1), attempt, range(begin, begin + 2))
        assert answers == ["SUPERSEDED"] * 2

    @rule()
    def commit(self) -> None:
        through = self.partition.high_seq
        rows, _ = self.partition.repeated_batches.answers.take_unsaved(through)
        for name, answer in unpack_rows(rows).items():
            token = WriterToken(*name)
            if answer is None:
                self.answers.pop(token, None)
            else:
                self.answers[token] = answer
        self.kept = (self.done, self.attempt, through)

    @rule()
    def crash(self) -> None:
        self.done, self.attempt, high = self.kept
        answers = {
            token: unpack_result(answer)
            for token, answer in sorted(self.answers.items(), key=lambda item: item[0].counter)
        }
        image = PartitionImage(
            PartitionState.ACTIVE, self.partition.failover_log, high, answers=answers
        )
        self.partition = Partition(PartitionId(0), lambda: HistoryId(7), image=image)
        self.partition.repeated_batches.answers.track_unsaved()

    @invariant()
    def all_is_well(self) -> None:
        # Every key is written once by each run: what was done twice would have a number more.
        assert self.partition.high_seq == len(self.done)
        self.partition.repeated_batches.answers.check_invariants()


TestTasksRunAgain = TasksRunAgain.TestCase
TestTasksRunAgain.settings = settings(max_examples=60, stateful_step_count=12)


def test_a_fence_and_a_difference_in_words() -> None:
    partition = new_partition()
    assert run_again(partition, "aaa", 1, range(1, 4)) == ["OK"] * 3
    assert run_again(partition, "aaaa", 2, range(1, 3)) == ["again"] * 2
    assert run_again(partition, "aaaa", 1, range(4, 5)) == ["SUPERSEDED"]
    assert run_again(partition, "abaaa", 3, range(1, 6)) == [
        *("again", "REPLAY_DIFFERS"),
        *["TEMPORARY_FAILURE"] * 3,
    ]
    # The next batch is new, and not what it continues.
    assert run_again(partition, "abaa", 4, range(4, 5)) == ["REPLAY_DIFFERS"]
    # Those who give no chain are not asked about it.
    token = WriterToken(bytes(16), 2)
    other_chunk = chunk_of_plain_sets([b"other"], [b""])
    assert partition.mutate(batch_of(other_chunk, token, attempt=4), now=NOW).is_repeated
    assert partition.high_seq == 3
