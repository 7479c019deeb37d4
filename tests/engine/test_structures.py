"""The small structures: hash table, counters, publisher answers, memory, quota."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.answer_rows import unpack_rows
from tests.kit.answer_tokens import tokens_above
from upr_protocol.chunk import Mutation, chunk_of_plain_sets
from upr_protocol.ids import Cas, HistoryId, Operation, SeqNo
from upr_server.engine import MemoryAccount, MemoryPolicy, MutateResult, WriterToken, batch_of
from upr_server.engine.hash_table import HashTable
from upr_server.engine.mutate_result import unpack_result
from upr_server.engine.publisher_answers import (
    ANSWER_BYTES,
    ANSWERS_BYTES_MAX,
    BATCHES_MAX,
    REFUSED_WRITER_BYTES,
    UNSAVED_BYTES,
    WRITER_OVERHEAD_BYTES,
    WRITERS_MAX,
    PublisherAnswers,
)
from upr_server.engine.repeated_batches import RepeatedBatches
from upr_server.engine.snapshots.counters import Counters

# The hash table.


def test_the_table_knows_which_keys_exist() -> None:
    memory = MemoryAccount()
    table = HashTable(memory)
    assert table.newest(b"a") == (0, False)
    table.put(b"a", 1)
    table.put(b"b", 2)
    table.put(b"a", 3, is_tombstone=True)
    assert (table.newest(b"a"), table.newest(b"b")) == ((3, True), (2, False))
    assert (len(table), table.item_count) == (2, 1)
    table.put(b"a", 4)
    assert table.statistics() == {"keys": 2, "items": 2, "bytes": memory.table}
    table.check_invariants()


def test_a_run_is_entered_as_one_by_one() -> None:
    table = HashTable(MemoryAccount())
    # Older snapshot; the open one (from 10) behind the window (from 20); in the window.
    for key, seq, is_tombstone in [
        (b"old", 5, False),
        (b"old gone", 6, True),
        (b"settled", 12, False),
        (b"settled gone", 13, True),
        (b"recent", 21, False),
        (b"recent gone", 22, True),
    ]:
        table.put(key, seq, is_tombstone=is_tombstone)
    flags = bytearray(17)
    keys = [
        b"old",
        b"old gone",
        b"settled",
        b"settled gone",
        b"recent",
        b"recent gone",
        b"new",
        b"new",
        b"old",
    ]
    chunk = chunk_of_plain_sets(keys, [b""] * len(keys))
    superseded, fresh = table.put_run(chunk, 0, len(keys), 28, 10, 20, flags)
    assert sorted(superseded) == [12, 13]
    assert fresh == 3, "old, old gone, new"
    assert [20 + index for index, flag in enumerate(flags) if flag] == [21, 22, 28, 34]
    assert table.newest(b"old") == (36, False)
    assert table.newest(b"new") == (35, False)
    assert table.item_count == len(table) == 7
    table.check_invariants()


# Counters.


def counter(seq: int, key: bytes, value: bytes = b"1") -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq), Cas(seq))


def test_counters_stay_in_order() -> None:
    memory = MemoryAccount()
    counters = Counters(memory)
    for seq, key in [(2, b"a"), (5, b"b"), (7, b"c")]:
        counters.append(counter(seq, key))
    assert counters.remove(5)
    assert not counters.remove(5)
    counters.append(counter(9, b"b", b"12345"))
    assert [row.seq for row in counters.in_order()] == [2, 7, 9]
    assert counters.find(9) == counter(9, b"b", b"12345")
    assert counters.find(5) is None
    assert memory.counters == counters.nbytes
    counters.check_invariants()
    for seq in (2, 7, 9):
        counters.remove(seq)
    assert (len(counters), memory.counters) == (0, 0)


# Answers to publishers.


def token(counter: int, writer: int = 0) -> WriterToken:
    return WriterToken(writer.to_bytes(16, "little"), counter)


def name(counter: int) -> tuple[bytes, int]:
    return bytes(16), counter


def test_the_answers_to_the_newest_batches_of_a_writer_are_remembered() -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    assert answers.answer_to(token(5)) == (None, False)
    for index in range(1, BATCHES_MAX + 2):
        answers.remember(token(2 * index), b"%10d" % index)
    assert answers.answer_to(token(2)) == (None, True), "out of the window"
    assert answers.answer_to(token(4)) == (b"%10d" % 2, False)
    assert answers.answer_to(token(5)) == (None, True), "passed over"
    assert answers.answer_to(token(2 * BATCHES_MAX + 2)) == (b"%10d" % (BATCHES_MAX + 1), False)
    assert answers.answer_to(token(2 * BATCHES_MAX + 3)) == (None, False), "new"
    assert answers.answer_to(token(2, writer=1)) == (None, False), "of another writer"
    answers.check_invariants()
    assert memory.writers == answers.nbytes == 400 + 210 * BATCHES_MAX


def test_a_writer_window_in_bytes() -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    for counter in range(1, 11):
        answers.remember(token(counter), bytes(ANSWERS_BYTES_MAX // 4 - ANSWER_BYTES))
    assert [answers.answer_to(token(counter))[1] for counter in (6, 7)] == [True, False]
    answers.remember(token(11), b"small")
    assert [answers.answer_to(token(counter))[1] for counter in (7, 8)] == [True, False]
    assert memory.writers < ANSWERS_BYTES_MAX + WRITER_OVERHEAD_BYTES
    answers.remember(token(12), bytes(2 * ANSWERS_BYTES_MAX))
    assert answers.answer_to(token(11)) == (None, True)
    assert answers.answer_to(token(12))[0] == bytes(2 * ANSWERS_BYTES_MAX), "the newest stays"
    answers.check_invariants()
    answers.remember(token(13), b"small")
    assert answers.answer_to(token(12)) == (None, True)
    answers.check_invariants()
    assert memory.writers == answers.nbytes == WRITER_OVERHEAD_BYTES + ANSWER_BYTES + len(b"small")


def test_the_writers_heard_from_last_are_remembered() -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    for counter in range(WRITERS_MAX):
        answers.remember(token(1, counter), b"first")
    answers.remember(token(2, 0), b"second")
    answers.remember(token(1, WRITERS_MAX), b"first")
    assert answers.answer_to(token(1, 1)) == (None, False), "the one heard from longest ago"
    assert answers.answer_to(token(1, 0)) == (b"first", False)
    assert len(answers) == WRITERS_MAX
    answers.check_invariants()
    assert memory.writers == answers.nbytes


def test_a_truncation_forgets_what_was_remembered_and_what_was_forgotten() -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    answers.remember(token(1, writer=1), b"other", 4)
    for counter in range(1, BATCHES_MAX + 3):
        answers.remember(token(counter), b"%d" % counter, 5 + counter)
    assert answers.answer_to(token(2)) == (None, True)
    assert tokens_above(answers, 6) == [token(counter) for counter in range(2, BATCHES_MAX + 3)]
    answers.truncate(6)
    assert answers.answer_to(token(BATCHES_MAX)) == (None, False), "the writer is unknown again"
    assert answers.answer_to(token(1, writer=1)) == (b"other", False)
    answers.check_invariants()
    assert memory.writers == answers.nbytes == WRITER_OVERHEAD_BYTES + ANSWER_BYTES + len(b"other")


def test_received_answers_are_those_that_the_other_node_gave() -> None:
    def result(first_seq: int, attempt: int = 0) -> MutateResult:
        seqs = SeqNo(first_seq), SeqNo(first_seq + 1)
        return MutateResult(HistoryId(1), *seqs, Cas(first_seq), attempt=attempt)

    def new() -> RepeatedBatches:
        return RepeatedBatches(MemoryAccount(), {}, SeqNo(0))

    active, replica = new(), new()
    for counter in (1, 2, 3):
        active.remember(token(counter), result(2 * counter), SeqNo(2 * counter))
    active.remember(token(1, writer=1), result(10), SeqNo(10))
    rows = active.answers.answers_between(SeqNo(0), SeqNo(10))
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (token(1).writer, 1, 2),
        (token(1).writer, 2, 4),
        (token(1).writer, 3, 6),
        (token(1, writer=1).writer, 1, 10),
    ]
    replica.add_received(rows[:2])
    replica.add_received(rows)  # some come again after a lost connection
    assert replica.answers.answers_between(SeqNo(0), SeqNo(10)) == rows
    assert tokens_above(replica.answers, 4) == [token(3), token(1, writer=1)]
    # A newer attempt of the task was given the same answer: that it came is known there, too.
    newer = new()
    newer.remember(token(3), result(6, attempt=2), SeqNo(12))
    replica.add_received(newer.answers.answers_between(SeqNo(0), SeqNo(12)))
    (last,) = replica.answers.answers_between(SeqNo(11), SeqNo(12))
    assert unpack_result(last[3]).attempt == 2
    replica.answers.check_invariants()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([False, False, False, True]),
            st.sampled_from([None, None, 1, 2, 3]),
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        min_size=2,
        max_size=12,
    )
)
def test_a_batch_is_new_just_if_it_has_no_answer(
    steps: list[tuple[bool, int | None, int, int]],
) -> None:
    batches, chunk = (
        RepeatedBatches(MemoryAccount(), {}, SeqNo(0)),
        chunk_of_plain_sets([b"k"], [b"v"]),
    )
    high, previous_chain, newest = SeqNo(0), 0, 0
    for is_refused, drawn_counter, attempt, chain_number in steps:
        counter = newest + 1 if drawn_counter is None else drawn_counter
        if is_refused:
            batches.note_refused(token(counter))
            continue
        chain = (0, 1, chunk.chained_crc(previous_chain))[chain_number]
        batch = batch_of(chunk, token(counter), attempt=attempt, chain=chain)
        is_new = batches.is_new(batch)
        answer = batches.answer_unless_new(batch, high)
        assert is_new == (answer is None)
        if is_new:
            high, previous_chain, newest = SeqNo(high + 1), chain, counter
            result = MutateResult(HistoryId(1), high, high, Cas(high), attempt=attempt, chain=chain)
            batches.remember(token(counter), result, high)
        batches.answers.check_invariants()


def taken(answers: PublisherAnswers, through: int) -> dict[tuple[bytes, int], bytes | None]:
    """What the disk does not know yet."""
    rows, count = answers.take_unsaved(through)
    changes = unpack_rows(rows)
    assert len(changes) <= count
    return changes


def test_pending_answers_up_to_a_number_are_taken_once() -> None:
    answers = PublisherAnswers(MemoryAccount())
    answers.remember(token(1), b"before there was a disk", 1)
    answers.track_unsaved()
    answers.remember(token(2), b"at 5", 5)
    answers.remember(token(3), b"without effect", 5)
    answers.remember(token(4), b"at 7", 7)
    answers.check_invariants()
    assert taken(answers, 4) == {}
    assert taken(answers, 5) == {name(2): b"at 5", name(3): b"without effect"}
    answers.check_invariants()
    assert taken(answers, 6) == {}
    assert taken(answers, 9) == {name(4): b"at 7"}
    assert taken(answers, 9) == {}
    answers.check_invariants()


def test_a_forgotten_answer_is_a_pending_change_too() -> None:
    answers = PublisherAnswers(MemoryAccount())
    answers.track_unsaved()
    for counter in range(1, BATCHES_MAX + 2):
        answers.remember(token(counter), b"done", counter)
    news = taken(answers, BATCHES_MAX + 1)
    assert [key[1] for key, answer in news.items() if answer is None] == [1]
    assert len(news) == BATCHES_MAX + 1
    for counter in range(1, WRITERS_MAX + 1):
        answers.remember(token(1, counter), b"done", 100)
    answers.check_invariants()
    news = taken(answers, 100)
    forgotten_keys = [key for key, answer in news.items() if answer is None]
    assert forgotten_keys == [name(counter) for counter in range(2, BATCHES_MAX + 2)]
    answers.check_invariants()


def test_pending_answers_without_mutations_do_not_pile_up() -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    answers.track_unsaved()
    answers.remember(token(1), b"had an effect", 5)
    assert taken(answers, 5) == {name(1): b"had an effect"}
    nbytes = []
    for counter in range(2, 1002):
        answers.remember(token(counter), b"all failed", 5)
        nbytes.append(memory.writers)
    answers.check_invariants()
    assert nbytes[100] == nbytes[-1] == answers.nbytes
    assert taken(answers, 5) == {
        name(1): None,
        **{name(counter): b"all failed" for counter in range(1002 - BATCHES_MAX, 1002)},
    }
    answers.check_invariants()


def test_an_answer_forgotten_later_still_reaches_the_disk_with_its_commit() -> None:
    # If the second is lost in a crash, the first must be known.
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    answers.track_unsaved()
    answers.remember(token(1), b"first", 5)
    answers.remember(token(2), bytes(ANSWERS_BYTES_MAX), 6)
    assert answers.answer_to(token(1)) == (None, True)
    answers.check_invariants()
    before = memory.writers
    assert taken(answers, 5) == {name(1): b"first"}
    assert before - memory.writers == UNSAVED_BYTES + ANSWER_BYTES + len(b"first")
    assert taken(answers, 6) == {name(1): None, name(2): bytes(ANSWERS_BYTES_MAX)}
    answers.check_invariants()


def test_a_writer_that_comes_and_goes_between_two_commits() -> None:
    answers = PublisherAnswers(MemoryAccount())
    answers.track_unsaved()
    answers.remember(token(1), b"on disk", 5)
    answers.take_unsaved(5)
    for _ in range(2):
        for counter in range(1, WRITERS_MAX + 1):
            answers.remember(token(1, counter), b"done", 5)
        answers.check_invariants()
        assert answers.answer_to(token(1)) == (None, False)
        answers.remember(token(1), b"anew", 5)
        answers.check_invariants()
    for counter in range(1, WRITERS_MAX + 1):
        answers.remember(token(1, counter), b"done", 5)
    assert taken(answers, 5)[name(1)] is None
    answers.check_invariants()


def test_batches_behind_a_refused_one_wait_for_it() -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    assert not answers.refuse_overtaking(token(1))
    answers.note_refused(token(1))
    assert not answers.refuse_overtaking(token(2, writer=1)), "of another writer"
    assert answers.refuse_overtaking(token(2))
    assert answers.refuse_overtaking(token(3))
    answers.check_invariants()
    assert memory.writers == answers.nbytes == REFUSED_WRITER_BYTES
    # The writer begins again.
    for counter in range(1, 5):
        assert not answers.refuse_overtaking(token(counter))
    answers.check_invariants()
    assert memory.writers == answers.nbytes == 0


def test_a_writer_that_begins_again_can_be_refused_again() -> None:
    answers = PublisherAnswers(MemoryAccount())
    for _ in range(BATCHES_MAX):
        answers.note_refused(token(1))
        assert answers.refuse_overtaking(token(2))
        assert answers.refuse_overtaking(token(3))
    answers.check_invariants()


def test_a_writer_that_abandons_a_refused_batch_may_continue() -> None:
    answers = PublisherAnswers(MemoryAccount())
    answers.note_refused(token(1))
    assert answers.refuse_overtaking(token(2))
    assert not answers.refuse_overtaking(token(2)), "the first was given up"
    answers.note_refused(token(3))
    assert answers.refuse_overtaking(token(4)), "whether the third was given up is not known"
    assert not answers.refuse_overtaking(token(4))


def test_a_writer_that_never_resends_is_refused_64_times_at_most() -> None:
    answers = PublisherAnswers(MemoryAccount())
    answers.note_refused(token(1))
    waits = [answers.refuse_overtaking(token(counter)) for counter in range(2, 200)]
    assert waits == [index <= BATCHES_MAX for index in range(2, 200)]
    answers.check_invariants()


def test_a_batch_refused_again_and_again_is_not_overtaken() -> None:
    """A partition that is not active refuses every batch, new ones too. However many they were, the
    last of them must come before those behind it."""
    answers = PublisherAnswers(MemoryAccount())
    for counter in range(1, BATCHES_MAX + 3):
        answers.note_refused(token(counter))
    last = BATCHES_MAX + 2
    assert answers.refuse_overtaking(token(last + 1))
    assert not answers.refuse_overtaking(token(last))
    answers.check_invariants()


def test_the_number_of_writers_that_must_begin_again_is_bounded() -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    for counter in range(WRITERS_MAX + 1):
        answers.note_refused(token(1, counter))
    answers.check_invariants()
    assert memory.writers == answers.nbytes == REFUSED_WRITER_BYTES * WRITERS_MAX
    assert not answers.refuse_overtaking(token(2, 0))
    assert answers.refuse_overtaking(token(2, WRITERS_MAX))


def test_old_refusals_are_forgotten() -> None:
    """Their writers may never return, and until then no batch of any writer is certainly new."""
    memory = MemoryAccount()
    answers = PublisherAnswers(memory)
    for writer in range(3):
        answers.note_refused(token(1, writer))
    assert not answers.forget_old_refusals(), "none is old"
    assert answers.refuse_overtaking(token(2, writer=1)), "this one is refused again"
    answers.check_invariants()
    assert answers.forget_old_refusals()
    answers.check_invariants()
    refused_writers = [w for w in range(3) if answers.overtakes_refused(token(3, w))]
    assert refused_writers == [1]
    assert not answers.is_certainly_new(token(1, writer=5), 0)
    assert answers.forget_old_refusals()
    assert answers.is_certainly_new(token(1, writer=5), 0)
    answers.check_invariants()
    assert memory.writers == answers.nbytes == 0
    assert not answers.forget_old_refusals()


# Memory and quota.


def test_memory_adds_up() -> None:
    memory, other_account = MemoryAccount(), MemoryAccount()
    memory.arrays = 5
    other_account.arrays, other_account.writers = 1, 2
    memory += other_account
    assert (memory.arrays, memory.writers, memory.total) == (6, 2, 8)
    assert memory != other_account
    assert memory.statistics()["arrays"] == 6


def test_a_quota_is_short_from_its_high_mark_down_to_its_low_mark() -> None:
    quota, memory = MemoryPolicy(1000), MemoryAccount()
    for used_bytes, is_short, is_full in [
        (850, False, False),
        (851, True, False),
        (760, True, False),
        (880, True, False),
        (881, True, True),
        (751, True, False),
        (750, False, False),
        (850, False, False),
    ]:
        memory.arrays = used_bytes
        assert (quota.is_short(memory), quota.is_full(memory)) == (is_short, is_full)
    assert quota.statistics() == {"limit": 1000, "full": 880, "high": 850, "low": 750}


def test_what_was_read_from_disk_counts_against_the_quota() -> None:
    quota, memory = MemoryPolicy(1000), MemoryAccount()
    memory.backfills = 881
    assert quota.is_full(memory)
