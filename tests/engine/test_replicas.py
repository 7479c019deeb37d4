"""What replication asks of the engine: to stand where the disk stands, answers, reports."""

from __future__ import annotations

from itertools import count
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.answer_rows import unpack_rows
from tests.kit.answer_tokens import tokens_above
from tests.kit.effort import effort
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, PartitionState, SeqNo
from upr_server.engine import (
    BackfillNeeded,
    FetchRequest,
    MutateResult,
    Partition,
    PartitionImage,
    SnapshotEndItem,
    WriterToken,
    batch_of,
)
from upr_server.engine.batch import MutationBatch
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.mutate_result import unpack_result
from upr_server.engine.publisher_answers import BATCHES_MAX, UNBOUNDED, PublisherAnswers
from upr_server.engine.repeated_batches import RepeatedBatches

NOW: Final = 1e9

CHUNK: Final = Chunk.build([Mutation(Operation.SET, b"k", b"")])


def new_replicated_partition(memory: MemoryAccount | None = None) -> Partition:
    ids = count(1)
    partition = Partition(PartitionId(0), lambda: HistoryId(next(ids)), memory=memory)
    partition.repeated_batches.answers.track_unsaved()
    return partition


def write(partition: Partition, *keys: bytes, expiry: int = 0) -> None:
    rows = [Mutation(Operation.SET, key, b"value", expiry=expiry) for key in keys]
    assert partition.mutate(batch_of(Chunk.build(rows)), now=NOW).status is Status.OK


def persist(partition: Partition) -> None:
    """All that there is goes to disk."""
    cursor = partition.manager.persistence
    while (item := cursor.next()) is not None:
        if isinstance(item, SnapshotEndItem):
            cursor.commit(item.end)


def check_memory(partition: Partition, memory: MemoryAccount) -> None:
    partition.check_invariants()
    recount = MemoryAccount()
    partition.recount(recount)
    assert recount == memory


def test_a_replica_keeps_nothing_in_memory_that_the_disk_has() -> None:
    memory = MemoryAccount()
    partition = new_replicated_partition(memory)
    write(partition, b"a", b"b", expiry=int(NOW) + 10)
    persist(partition)
    write(partition, b"a", b"c")
    persist(partition)
    partition.change_state(PartitionState.REPLICA, partition.failover_log)
    partition.restart_at(SeqNo(4))
    check_memory(partition, memory)
    assert memory.arrays == memory.encoded == memory.table == memory.expiries == 0
    assert (
        partition.high_seq,
        partition.snapshot_end,
        partition.manager.snapshots.oldest_start,
    ) == (
        4,
        4,
        4,
    )
    assert partition.manager.persistence.committed_seq == 4
    assert partition.next_expiry() is None
    partition.restart_at(SeqNo(9), Cas(1 << 60))
    check_memory(partition, memory)
    assert partition.high_seq == 9
    assert partition.last_cas == 1 << 60
    assert not partition.eviction.is_index_ready, "its index has to come there first"


def test_a_replica_frees_nothing_that_the_disk_does_not_have() -> None:
    partition = new_replicated_partition()
    write(partition, b"a")
    with pytest.raises(ValueError, match="the disk has 0 of 1"):
        partition.restart_at(SeqNo(1))
    assert partition.high_seq == 1


def test_readers_continue_from_disk() -> None:
    partition = new_replicated_partition()
    write(partition, b"a")
    persist(partition)
    woken: list[str] = []
    reading = partition.manager.register("reading", SeqNo(0)).cursor
    reading.next()
    registration = partition.manager.register(
        "waiting", SeqNo(1), on_ready=lambda: woken.append("it")
    ).cursor
    assert registration.next() is None
    partition.change_state(PartitionState.REPLICA, partition.failover_log)
    partition.restart_at(SeqNo(5))
    assert woken == ["it"]
    assert not reading.held_entries, "a dropped cursor keeps no snapshot alive"
    assert registration.next() == BackfillNeeded(SeqNo(1), SeqNo(5))
    assert reading.next() == BackfillNeeded(SeqNo(0), SeqNo(5))
    for cursor in (registration, reading):
        cursor.close()
    partition.check_invariants()
    again = partition.manager.register("again", SeqNo(5)).cursor
    assert again.next() is None


def test_it_takes_writes_again_when_it_is_active_again() -> None:
    memory = MemoryAccount()
    partition = new_replicated_partition(memory)
    write(partition, b"a")
    persist(partition)
    partition.change_state(PartitionState.REPLICA, partition.failover_log)
    partition.restart_at(SeqNo(7), Cas(2 * 10**18))
    rows = [Mutation(Operation.SET, b"a", b"")]
    assert partition.mutate(batch_of(Chunk.build(rows)), now=NOW).status is Status.WRONG_STATE
    partition.change_state(
        PartitionState.ACTIVE, partition.failover_log.with_branch(HistoryId(99), SeqNo(7))
    )
    assert partition.missing_keys([b"other"], NOW) == [FetchRequest(b"other", SeqNo(0), True)]
    result = partition.mutate(batch_of(Chunk.build(rows)), now=NOW)
    assert (result.first_seq, result.history_id) == (8, 99)
    assert result.first_cas > 2 * 10**18, "the CAS never falls"
    check_memory(partition, memory)


def test_a_cut_to_0_forgets_what_was_indexed_and_purged() -> None:
    partition = new_replicated_partition()
    write(partition, b"a", b"b")
    persist(partition)
    partition.change_state(PartitionState.REPLICA, partition.failover_log)
    partition.restart_at(SeqNo(2))
    partition.note_index_progress(SeqNo(2), 2)
    partition.purge_seq = SeqNo(1)
    assert partition.indexed_item_count == 2
    partition.truncate(SeqNo(2))
    assert (partition.purge_seq, partition.indexed_item_count, partition.eviction.indexed_seq) == (
        1,
        2,
        2,
    )
    partition.truncate(SeqNo(0))
    assert partition.high_seq == 0
    assert (partition.purge_seq, partition.indexed_item_count, partition.eviction.indexed_seq) == (
        0,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("state", "has_new_history", "counts"),
    [
        (PartitionState.ACTIVE, False, True),
        (PartitionState.PENDING, False, True),
        (PartitionState.REPLICA, False, False),
        (PartitionState.DEAD, False, False),
        (PartitionState.ACTIVE, True, False),
        (PartitionState.PENDING, True, False),
    ],
)
def test_reports_of_replicas_count_while_they_follow_one_history(
    state: PartitionState, has_new_history: bool, counts: bool
) -> None:
    partition = new_replicated_partition()
    log = partition.failover_log
    partition.replicas.report("a", SeqNo(5), SeqNo(5))
    partition.change_state(
        state, log.with_branch(HistoryId(9), SeqNo(0)) if has_new_history else log
    )
    assert partition.replicas.seq_reached_by(1) == (5 if counts else 0)
    assert partition.state is state


def test_a_cut_after_a_restart_keeps_the_answers_below_it() -> None:
    """The disk keeps the answers without the high numbers at which they were given."""
    log = FailoverLog().with_branch(HistoryId(1), SeqNo(0))
    tokens = [WriterToken(bytes(16), counter) for counter in (1, 2, 3)]
    answers = {
        token: MutateResult(HistoryId(1), SeqNo(seq), SeqNo(seq), Cas(seq))
        for seq, token in enumerate(tokens, 1)
    }
    image = PartitionImage(PartitionState.REPLICA, log, SeqNo(3), answers=answers)
    partition = Partition(PartitionId(0), lambda: HistoryId(9), image=image)
    remembered = partition.repeated_batches.answers
    assert tokens_above(remembered, 2) == tokens[2:]
    partition.truncate(SeqNo(2))
    assert tokens_above(remembered, 0) == tokens[:2]
    partition.check_invariants()


def test_a_cut_forgets_the_answers_above_it() -> None:
    memory = MemoryAccount()
    partition = new_replicated_partition(memory)
    writer = bytes(16)
    for counter, key in enumerate((b"a", b"b", b"c"), 1):
        chunk = Chunk.build([Mutation(Operation.SET, key, b"")])
        partition.mutate(batch_of(chunk, WriterToken(writer, counter)), now=NOW)
    persist(partition)
    partition.change_state(PartitionState.REPLICA, partition.failover_log)
    partition.restart_at(SeqNo(3))
    answers = partition.repeated_batches.answers
    assert tokens_above(answers, 1) == [WriterToken(writer, 2), WriterToken(writer, 3)]
    partition.truncate(SeqNo(1))
    assert [row[:3] for row in answers.answers_between(0, 9)] == [(writer, 1, 1)]
    check_memory(partition, memory)
    assert tokens_above(answers, 0) == [WriterToken(writer, 1)]
    partition.truncate(SeqNo(0))
    assert answers.answers_between(0, 9) == []
    check_memory(partition, memory)


def test_a_cut_keeps_the_later_answer_to_a_batch_below_it() -> None:
    """A task runs again, and sends what it had sent before the cut: its answer is newer than the
    cut, but its effect is not undone. Forgotten, the batch would be applied twice."""
    token, high = WriterToken(bytes(16), 1), SeqNo(40)
    result = MutateResult(HistoryId(1), SeqNo(20), SeqNo(20), Cas(20))
    active, replica, late = (RepeatedBatches(MemoryAccount(), {}, SeqNo(0)) for _ in range(3))
    active.remember(token, result, SeqNo(20))
    replica.add_received(active.answers.answers_between(SeqNo(0), SeqNo(20)))
    again = batch_of(Chunk.build([Mutation(Operation.SET, b"k", b"")]), token, attempt=2)
    assert active.answer_unless_new(again, high) is not None
    for copy in (replica, late):
        copy.add_received(active.answers.answers_between(SeqNo(0), high))
    for batches in (active, replica, late):
        assert tokens_above(batches.answers, 30) == []
        batches.answers.truncate(30)
        assert not batches.is_new(again)
        batches.answers.check_invariants()
        assert tokens_above(batches.answers, 19) == [token]
        batches.answers.truncate(19)
        assert batches.is_new(again)
        batches.answers.check_invariants()


@pytest.mark.parametrize("has_heard_of_it", [False, True])
def test_a_replica_hears_of_a_batch_with_its_effect_though_its_answer_has_moved(
    has_heard_of_it: bool,
) -> None:
    """A task runs again while a replica has yet to hear of its batch. Heard of with the later
    answer only, the batch would be applied twice if the replica took over in between."""
    token = WriterToken(bytes(16), 1)
    result = MutateResult(HistoryId(1), SeqNo(20), SeqNo(20), Cas(20), attempt=1)
    active, replica, late = (RepeatedBatches(MemoryAccount(), {}, SeqNo(0)) for _ in range(3))
    active.remember(token, result, SeqNo(20))
    if has_heard_of_it:
        replica.add_received(active.answers_between(0, 20))
    again = batch_of(Chunk.build([Mutation(Operation.SET, b"k", b"")]), token, attempt=2)
    assert active.answer_unless_new(again, SeqNo(40)) is not None
    heard = 20 if has_heard_of_it else 0
    for start, end in ((heard, 30), (30, 40)):
        replica.add_received(active.answers_between(start, end))
        assert not replica.is_new(again)
        replica.answers.check_invariants()
    assert replica.answers.newest_attempt(token.writer) == 2
    assert replica.answers_between(0, 40) == active.answers_between(0, 40)
    # It may take over, and have replicas of its own.
    late.add_received(replica.answers_between(0, 30))
    assert not late.is_new(again)
    # Undone, it is new.
    for batches in (active, replica):
        batches.answers.truncate(SeqNo(10))
        assert batches.answers_between(0, 40) == []
        assert batches.is_new(again)


def test_answers_are_the_same_in_pieces() -> None:
    """Several were given at one number, and some again later."""
    active = RepeatedBatches(MemoryAccount(), {}, SeqNo(0))
    tokens = [WriterToken(number.to_bytes(16), 1) for number in range(30)]
    for number, token in enumerate(tokens):
        seq = SeqNo(1 + number // 3)
        active.remember(token, MutateResult(HistoryId(1), seq, seq, Cas(1)), seq)
    chunk = Chunk.build([Mutation(Operation.SET, b"k", b"")])
    for number, token in enumerate(tokens[::4]):
        again = batch_of(chunk, token, attempt=2)
        assert active.answer_unless_new(again, SeqNo(20 + number)) is not None
    for end in (12, 50):
        whole = active.answers_between(0, end)
        assert len(whole) == 30
        for count_max in range(1, 40):
            replica = RepeatedBatches(MemoryAccount(), {}, SeqNo(0))
            piece = active.answers_between(0, end, count_max)
            while piece:
                replica.add_received(piece)
                piece = active.answers_between(piece[-1][2], end, count_max, with_start=False)
            assert replica.answers_between(0, end) == whole


def test_a_replica_does_not_apply_a_batch_whose_answer_was_forgotten_before_it_was_sent() -> None:
    """A slow replica gets a snapshot when a writer has already sent 64 batches behind it."""
    writer, chunk = bytes(16), Chunk.build([Mutation(Operation.SET, b"k", b"")])
    active, replica, late = (RepeatedBatches(MemoryAccount(), {}, SeqNo(0)) for _ in range(3))
    for number in range(1, BATCHES_MAX + 4):
        result = MutateResult(HistoryId(1), SeqNo(number), SeqNo(number), Cas(1), attempt=1)
        active.remember(WriterToken(writer, number), result, SeqNo(number))
    again = [
        batch_of(chunk, WriterToken(writer, number), attempt=2) for number in range(BATCHES_MAX + 4)
    ]
    end = SeqNo(2)
    assert active.answers_between(0, end) == []
    replica.add_received(active.too_old_answers(SeqNo(0), end))
    # It takes over, and may have replicas of its own.
    late.add_received(replica.answers_between(0, end))
    for batches in (replica, late):
        batches.answers.check_invariants()
        for batch in again[1:4]:
            assert batches.answer_unless_new(batch, end) is Status.TOKEN_TOO_OLD
        # The effects of these are lost, so they are new.
        assert all(map(batches.is_new, again[4:]))
        # Of an older attempt than the source has seen.
        old = batch_of(chunk, again[-1].token, attempt=0)
        assert batches.answer_unless_new(old, end) is Status.SUPERSEDED
    # Nothing is to be said where the snapshot has no effect of the writer, nor where the replica
    # has heard of what was forgotten, or will now.
    assert active.too_old_answers(SeqNo(0), SeqNo(0)) == []
    assert active.too_old_answers(SeqNo(3), SeqNo(3)) == []
    assert active.too_old_answers(SeqNo(0), SeqNo(4)) == []


def test_what_was_forgotten_before_a_restart_is_too_old_on_replicas() -> None:
    token = WriterToken(bytes(16), 7)
    result = MutateResult(HistoryId(1), SeqNo(7), SeqNo(7), Cas(1))
    active = RepeatedBatches(MemoryAccount(), {token: result}, SeqNo(9))
    replica = RepeatedBatches(MemoryAccount(), {}, SeqNo(0))
    replica.add_received(active.too_old_answers(SeqNo(0), SeqNo(6)))
    chunk = Chunk.build([Mutation(Operation.SET, b"k", b"")])
    older, newer = (batch_of(chunk, WriterToken(token.writer, number)) for number in (6, 7))
    assert replica.answer_unless_new(older, SeqNo(6)) is Status.TOKEN_TOO_OLD
    assert replica.is_new(newer)
    # The replica has its disk's answers after a restart of its own.
    rows = replica.answers_between(0, 6)
    disk = {WriterToken(row[0], row[1]): unpack_result(row[3]) for row in rows}
    restarted = RepeatedBatches(MemoryAccount(), disk, SeqNo(6))
    assert restarted.answer_unless_new(older, SeqNo(6)) is Status.TOKEN_TOO_OLD
    assert restarted.is_new(newer)


@pytest.mark.parametrize("further_count", [0, 1, BATCHES_MAX, BATCHES_MAX + 20])
def test_a_replica_that_rolled_back_hears_of_the_answers_that_it_lost(further_count: int) -> None:
    """It was active, and undid more batches of a writer than it remembers, with which it forgot the
    batches before them. The node that was active meanwhile knows these."""
    writer, start = bytes(16), SeqNo(BATCHES_MAX + 10)
    former, active = (RepeatedBatches(MemoryAccount(), {}, SeqNo(0)) for _ in range(2))

    def apply(batches: RepeatedBatches, number: int, history: int) -> None:
        seq = SeqNo(number)
        result = MutateResult(HistoryId(history), seq, seq, Cas(history), attempt=1)
        batches.remember(WriterToken(writer, number), result, seq)

    for number in range(1, start + 1):
        apply(former, number, 1)
        apply(active, number, 1)
    for number in range(start + 1, start + BATCHES_MAX + 20):
        apply(former, number, 1)
    former.answers.truncate(start)
    end = SeqNo(start + further_count)
    for number in range(start + 1, end + 1):
        apply(active, number, 2)
    again = [
        batch_of(CHUNK, WriterToken(writer, number), attempt=2) for number in range(1, end + 9)
    ]
    assert all(map(former.is_new, again)), "it recognises none"
    former.add_received(active.earlier_answers(start))
    # The next snapshot has all that the active node has done since.
    former.add_received(active.too_old_answers(start, end) + active.answers_between(start, end))
    former.answers.check_invariants()
    late = RepeatedBatches(MemoryAccount(), {}, SeqNo(0))
    late.add_received(former.answers_between(0, end))
    for batches in (former, late):
        assert not any(map(batches.is_new, again[:end]))
        assert all(map(batches.is_new, again[end:])), "these were undone"
        assert batches.answer_unless_new(again[0], end) is Status.TOKEN_TOO_OLD
    # To say it again changes nothing.
    rows = former.answers_between(0, end)
    former.add_received(active.earlier_answers(end))
    assert former.answers_between(0, end) == rows


def test_a_replica_hears_of_writers_of_whom_all_early_answers_were_forgotten() -> None:
    """It rolled back to where it heard of none of what the active node still remembers."""
    writer = bytes(16)
    active, replica = (RepeatedBatches(MemoryAccount(), {}, SeqNo(0)) for _ in range(2))
    for number in range(1, BATCHES_MAX + 11):
        result = MutateResult(HistoryId(1), SeqNo(number), SeqNo(number), Cas(1))
        active.remember(WriterToken(writer, number), result, SeqNo(number))
    replica.add_received(active.earlier_answers(SeqNo(10)))
    again = [batch_of(CHUNK, WriterToken(writer, number)) for number in range(1, 21)]
    assert [replica.is_new(batch) for batch in again] == [False] * 10 + [True] * 10
    # Where nothing of the writer has an effect yet, nothing is too old.
    late = RepeatedBatches(MemoryAccount(), {}, SeqNo(0))
    late.add_received(active.earlier_answers(SeqNo(0)))
    assert all(map(late.is_new, again))


def test_an_earlier_answer_that_has_moved_is_known_by_its_effect() -> None:
    token, start = WriterToken(bytes(16), 1), SeqNo(20)
    active, replica = (RepeatedBatches(MemoryAccount(), {}, SeqNo(0)) for _ in range(2))
    active.remember(token, MutateResult(HistoryId(1), SeqNo(9), SeqNo(9), Cas(9)), SeqNo(9))
    again = batch_of(CHUNK, token, attempt=2)
    assert active.answer_unless_new(again, SeqNo(40)) is not None
    assert active.earlier_answers(SeqNo(8)) == []
    replica.add_received(active.earlier_answers(start))
    assert not replica.is_new(again)
    replica.add_received(active.answers_between(start, SeqNo(40)))
    assert replica.answers.newest_attempt(token.writer) == 2
    # Rolled back below what it was told, it knows the effect still; below the effect not.
    for seq, is_new in ((15, False), (8, True)):
        replica.answers.truncate(seq)
        replica.answers.check_invariants()
        assert replica.is_new(again) is is_new


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from([0, 60, 1000])) | st.none(),
        max_size=60,
    ),
    st.sampled_from([UNBOUNDED, 6_000]),
)
def test_a_replica_that_takes_over_applies_no_batch_twice(
    steps: list[tuple[int, int, int] | None], bytes_max: int
) -> None:
    """Writers send batches with small and large answers, of which many are forgotten; a replica
    gets snapshots late. At each of its ends it could take over."""
    source = RepeatedBatches(MemoryAccount(), {}, SeqNo(0), bytes_max)
    replica = RepeatedBatches(MemoryAccount(), {}, SeqNo(0), bytes_max)
    chunk = Chunk.build([Mutation(Operation.SET, b"k", b"")])
    tokens: list[WriterToken] = []
    forgotten_writers: set[bytes] = set()
    heard = SeqNo(0)
    for step in steps:
        if step is not None:
            writer_number, repeats, counter_count = step
            writer = bytes([writer_number]) * 16
            for _ in range(repeats * (1 if counter_count else 30)):
                seq = SeqNo(len(tokens) + 1)
                token = WriterToken(writer, seq)
                counters = [(index, 1 << 60) for index in range(counter_count)]
                result = MutateResult(HistoryId(1), seq, seq, Cas(1), counters=counters)
                source.remember(token, result, seq)
                tokens.append(token)
                forgotten_writers |= {
                    token.writer
                    for token in tokens
                    if source.answers.newest_answer(token.writer) is None
                }
            continue
        # The replica is half of what there is behind.
        end = SeqNo(heard + (len(tokens) - heard + 1) // 2)
        rows = source.too_old_answers(heard, end) + source.answers_between(heard, end)
        replica.add_received(rows)
        replica.answers.check_invariants()
        heard = end
        for token in tokens:
            batch = batch_of(chunk, token)
            is_first_lost = token.counter > end and next(
                other.counter > end for other in tokens if other.writer == token.writer
            )
            if is_first_lost or (
                token.counter > end and source.answers.answer_to(token)[0] is not None
            ):
                assert replica.is_new(batch), "its effect is lost"
            elif token.counter > end or token.writer in forgotten_writers:
                # Forgotten with the writer, it would be new at the source, too.
                pass
            elif replica.answers.newest_answer(token.writer) is not None:
                assert not replica.is_new(batch)
            else:
                assert bytes_max != UNBOUNDED, "only a small memory forgets a writer for others"


@pytest.mark.parametrize("task_count", [1, 300, 1024])
def test_a_replica_hears_of_all_tasks_of_a_stage_that_runs_again(task_count: int) -> None:
    """Each task is a writer whose answer moves. A replica that is behind has the effects, and may
    take over before it hears of the later answers."""
    active, replica = (RepeatedBatches(MemoryAccount(), {}, SeqNo(0)) for _ in range(2))
    chunk = Chunk.build([Mutation(Operation.SET, b"k", b"")])
    tokens = [WriterToken(number.to_bytes(16), 1) for number in range(1, task_count + 1)]
    for number, token in enumerate(tokens, 1):
        result = MutateResult(HistoryId(1), SeqNo(number), SeqNo(number), Cas(1))
        active.remember(token, result, SeqNo(number))
    reruns = [batch_of(chunk, token, attempt=2) for token in tokens]
    for batch in reversed(reruns):
        assert active.answer_unless_new(batch, SeqNo(5000)) is not None
    piece = active.answers_between(0, 4999, 100)
    while piece:
        assert len(piece) <= 100
        replica.add_received(piece)
        piece = active.answers_between(piece[-1][2], 4999, 100, with_start=False)
    assert not any(replica.is_new(batch) for batch in reruns)
    rows = active.answers_between(0, 4999)
    assert [seq for _, _, seq, _ in rows] == list(range(1, task_count + 1))
    assert replica.answers_between(0, 4999) == rows


def test_a_cut_forgets_a_batch_that_had_failed_here_and_was_then_applied_elsewhere() -> None:
    """The node that had refused all of its operations follows the one that applied it, and is cut
    to where both stood: the batch has no effect any more, and must be applied when it comes."""
    token = WriterToken(bytes(16), 1)
    batch = batch_of(CHUNK, token)
    failed = MutateResult(HistoryId(1), SeqNo(11), SeqNo(10), Cas(0), [(0, Status.NOT_FOUND)])
    applied = MutateResult(HistoryId(2), SeqNo(11), SeqNo(11), Cas(1))
    old_active, active = (RepeatedBatches(MemoryAccount(), {}, SeqNo(10)) for _ in range(2))
    old_active.remember(token, failed, SeqNo(10))
    active.remember(token, applied, SeqNo(11))
    old_active.add_received(active.answers_between(10, 11))
    assert not old_active.is_new(batch)
    assert tokens_above(old_active.answers, 10) == [token]
    old_active.answers.truncate(10)
    assert old_active.is_new(batch)
    old_active.answers.check_invariants()


class Replicated(RuleBasedStateMachine):
    """One partition's answers are given to another, which is cut like the first. All are within the
    window: what later answers have pushed out does not come back when these are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.memories = MemoryAccount(), MemoryAccount()
        self.source, self.replica = map(PublisherAnswers, self.memories)
        self.source.track_unsaved()
        self.replica.track_unsaved()
        self.high = 0
        self.copied = 0
        self.counters: dict[bytes, int] = {}
        self.answers_given: list[tuple[int, WriterToken, bytes]] = []
        """Every answer that counts, in order."""
        self.applied: dict[WriterToken, int] = {}
        """The high number with each batch's effect."""
        self.disk: dict[WriterToken, bytes] = {}
        """What the source's disk has."""

    @rule(
        writer_number=st.integers(0, 2),
        skipped=st.integers(0, 2),
        moves=st.integers(0, 2),
        size=st.sampled_from([10, 1_000]),
    )
    def remember(self, writer_number: int, skipped: int, moves: int, size: int) -> None:
        writer = bytes([writer_number]) * 16
        self.counters[writer] = counter = self.counters.get(writer, 0) + 1 + skipped
        self.high += moves
        token, answer = WriterToken(writer, counter), bytes([len(self.answers_given) % 256]) * size
        self.source.remember(token, answer, self.high)
        self.answers_given.append((self.high, token, answer))
        self.applied[token] = self.high

    @rule(writer=st.integers(0, 2), moves=st.integers(0, 2))
    def replace(self, writer: int, moves: int) -> None:
        """A task that runs again sends its newest batch again: the answer has a newer attempt."""
        newest = self.source.newest_answer(bytes([writer]) * 16)
        if newest is not None:
            self.high += moves
            token, answer = newest[0], newest[1] + b"again"
            self.source.replace_newest(token, answer, self.high, 0)
            self.answers_given = [row for row in self.answers_given if row[1] != token]
            self.answers_given.append((self.high, token, answer))

    @rule(share=st.floats(0, 1), count_max=st.integers(1, 5))
    def save(self, share: float, count_max: int) -> None:
        through = int(share * self.high)
        is_last = False
        while not is_last:
            rows, count = self.source.take_unsaved(through, count_max)
            assert count <= count_max
            is_last = count < count_max
            for name, answer in unpack_rows(rows).items():
                token = WriterToken(*name)
                if answer is None:
                    self.disk.pop(token, None)
                else:
                    self.disk[token] = answer
        for writer, counter, _, answer in self.source.answers_between(0, through):
            assert self.disk[WriterToken(writer, counter)] == answer

    @rule()
    def copy(self) -> None:
        """A snapshot that ends at the high number is streamed."""
        for writer, counter, seq, answer in self.source.answers_between(self.copied, self.high):
            newest = self.replica.newest_answer(writer)
            token = WriterToken(writer, counter)
            if newest is None or newest[0].counter < counter:
                self.replica.remember(token, answer, seq)
                self.replica.note_applied(token, self.applied[token])
            elif newest[0] == token and newest[1] != answer:
                self.replica.replace_newest(token, answer, seq, 0)
        self.copied = self.high
        self.replica.take_unsaved(self.high)
        assert self.replica.answers_between(0, self.high) == self.source.answers_between(
            0, self.high
        )

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        """Both go back."""
        self.copy()
        to = int(share * self.high)
        lost_tokens = {token for _, token, _ in self.answers_given if self.applied[token] > to}
        tokens = tokens_above(self.source, to)
        while self.source.truncate(to, 1 + to % 3):
            pass
        for token in tokens:
            self.disk.pop(token, None)
        assert {token for token in self.applied if self.recalled(token)} & lost_tokens == set()
        assert [token for token in tokens if self.recalled(token)] == []
        self.replica.truncate(to)
        self.answers_given = [
            (min(high, to), token, answer)
            for high, token, answer in self.answers_given
            if token not in lost_tokens
        ]
        self.high = self.copied = to

    def recalled(self, token: WriterToken) -> bool:
        return self.source.answer_to(token)[0] is not None

    @invariant()
    def the_newest_are_there(self) -> None:
        for writer in self.counters:
            mine = [
                (high, token, answer)
                for high, token, answer in self.answers_given
                if token.writer == writer
            ]
            if mine:
                high, token, answer = mine[-1]
                assert self.source.answer_to(token)[0] == answer
                assert (writer, token.counter, high, answer) in self.source.answers_between(
                    0, self.high
                )
        rows = self.source.answers_between(0, self.high)
        assert [row[2] for row in rows] == sorted(row[2] for row in rows)
        assert len(rows) <= BATCHES_MAX * len(self.counters)

    @invariant()
    def they_are_whole(self) -> None:
        for answers, memory in zip((self.source, self.replica), self.memories, strict=True):
            answers.check_invariants()
            assert memory.writers == answers.nbytes


TestReplicated = Replicated.TestCase
TestReplicated.settings = settings(max_examples=effort(30, 60), stateful_step_count=40)


class Followed(RuleBasedStateMachine):
    """Tasks run again while nodes that follow are behind: whenever one takes over, it knows the
    batches of which it has the effects, and no others.

    All batches are within the windows of their writers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = RepeatedBatches(MemoryAccount(), {}, SeqNo(0))
        self.high = 0
        self.ends = {0}
        """Where snapshots end."""
        self.results: dict[WriterToken, MutateResult] = {}
        """What was applied, by batch."""
        self.failed: set[WriterToken] = set()
        """Batches of which every operation failed, once at least. Any node may know of that."""
        self.attempts = [1, 1]
        self.sent = [0, 0]
        """Batches that each task has sent in its attempt."""
        self.followers = [(RepeatedBatches(MemoryAccount(), {}, SeqNo(0)), 0)] * 2
        self.start_follower(0)

    def batch(self, token: WriterToken) -> MutationBatch:
        return batch_of(CHUNK, token, attempt=self.attempts[token.writer[0]])

    @rule(
        task=st.integers(0, 1),
        count=st.integers(1, 3),
        rows=st.sampled_from([0, 1, 1, 2]),
        closes=st.booleans(),
    )
    def send(self, task: int, count: int, rows: int, *, closes: bool) -> None:
        """Batches of one task. Those of no rows are of operations that all fail."""
        for _ in range(count):
            self.sent[task] += 1
            token = WriterToken(bytes([task]) * 16, self.sent[task])
            batch, result = self.batch(token), self.results.get(token)
            answer = self.active.answer_unless_new(batch, SeqNo(self.high))
            if isinstance(answer, MutateResult):
                has_failed = answer.first_seq > answer.last_seq and token in self.failed
                assert has_failed or (result is not None and answer.last_seq == result.last_seq)
                continue
            assert answer is None, answer
            assert result is None
            self.high += rows
            first_seq, last_seq = SeqNo(self.high - rows + 1), SeqNo(self.high)
            result = MutateResult(HistoryId(1), first_seq, last_seq, Cas(1), attempt=batch.attempt)
            self.active.remember(token, result, last_seq)
            if rows:
                self.results[token] = result
            else:
                self.failed.add(token)
            if closes:
                self.ends.add(self.high)

    @rule(task=st.integers(0, 1), count=st.integers(1, 3), closes=st.booleans())
    def run_again(self, task: int, count: int, *, closes: bool) -> None:
        self.attempts[task] += 1
        self.sent[task] = 0
        self.send(task, count, rows=1, closes=closes)

    @rule(index=st.integers(0, 1))
    def start_follower(self, index: int) -> None:
        """It begins with nothing, or again after an operator has removed its data."""
        self.followers[index] = RepeatedBatches(MemoryAccount(), {}, SeqNo(0)), 0

    @rule(
        index=st.integers(0, 1), skipped=st.sampled_from([0, 0, 1, 2]), count_max=st.integers(1, 5)
    )
    def follow(self, index: int, skipped: int, count_max: int) -> None:
        """A snapshot is streamed; several collapsed ones, or one from disk, as one."""
        batches, start = self.followers[index]
        ends = sorted(end for end in self.ends if end > start)[: skipped + 1]
        if not ends:
            return
        end = ends[-1]
        piece = self.active.answers_between(start, end, count_max)
        while piece:
            batches.add_received(piece)
            piece = self.active.answers_between(piece[-1][2], end, count_max, with_start=False)
        self.followers[index] = batches, end

    @rule(index=st.integers(0, 1))
    def restart_follower(self, index: int) -> None:
        batches, end = self.followers[index]
        self.followers[index] = self.restarted(batches, end), end

    @rule()
    def restart(self) -> None:
        self.active = self.restarted(self.active, self.high)
        self.ends.add(self.high)

    @staticmethod
    def restarted(batches: RepeatedBatches, high: int) -> RepeatedBatches:
        rows = batches.answers.answers_between(0, 1 << 40)
        answers = {
            WriterToken(writer, counter): unpack_result(answer)
            for writer, counter, _, answer in rows
        }
        by_age = sorted(answers.items(), key=lambda item: (item[1].last_seq, item[0].counter))
        return RepeatedBatches(MemoryAccount(), dict(by_age), SeqNo(high))

    @precondition(lambda self: self.high > 8 or not self.high)
    @rule(index=st.integers(0, 1))
    def fail_over(self, index: int) -> None:
        """A follower takes over. The node that was active follows, and so does the other: both are
        cut to what the new one has."""
        old_active, (self.active, end) = self.active, self.followers[index]
        other, other_end = self.followers[1 - index]
        for batches in (old_active, other):
            batches.answers.truncate(end)
        self.followers = [(old_active, min(self.high, end)), (other, min(other_end, end))]
        self.high = end
        self.ends = {known for known in self.ends if known <= end}
        self.results = {
            token: result for token, result in self.results.items() if result.last_seq <= end
        }
        for task in range(2):
            self.attempts[task] += 1
            self.sent[task] = 0

    @invariant()
    def followers_know_what_they_have(self) -> None:
        for batches, end in [*self.followers, (self.active, self.high)]:
            batches.answers.check_invariants()
            for token, result in self.results.items():
                is_new = batches.is_new(self.batch(token))
                assert is_new == (result.last_seq > end) or token in self.failed
                assert not is_new or result.last_seq > end, (token, result, end)
            for _, _, _, answer in batches.answers.answers_between(0, 1 << 40):
                assert unpack_result(answer).last_seq <= end, "an effect that was undone"


TestFollowed = Followed.TestCase
TestFollowed.settings = settings(max_examples=effort(50, 100), stateful_step_count=40)
