"""The queues of batches, compared with a naive list, and how long a scan may wait."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer import batch_queues
from upr_server.indexer.batch_queues import QUEUE_BATCHES_MAX, BatchQueues
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.mark import Mark

QUEUES: Final = 3
PARTITIONS: Final = 6
ROUND: Final = 100
"""Bytes of a round in these tests."""

LOG: Final = FailoverLog.of_pairs([(1, 0)])


def a_batch(partition: int, nbytes: int, *, ends_snapshot: bool = True) -> IndexBatch:
    """A batch after which its snapshot is complete, or continues."""
    rest = None if ends_snapshot else PartialSnapshot(HistoryId(1), SeqNo(0), SeqNo(9))
    mark = Mark(Position(LOG, SeqNo(0), SeqNo(1), rest))
    return IndexBatch(PartitionId(partition), mark, nbytes=nbytes)


def ends(batch: IndexBatch) -> bool:
    return batch.mark.position.partial is None


class NaiveQueues:
    """The same queues as one list of waiting batches."""

    def __init__(self) -> None:
        self.waiting: list[IndexBatch] = []
        self.rounds: list[list[IndexBatch]] = []
        self.next_queue = 0
        self.last: dict[PartitionId, IndexBatch] = {}
        """By partition, the batch that was taken last."""

    @property
    def unapplied(self) -> list[IndexBatch]:
        return [*(batch for batches in self.rounds for batch in batches), *self.waiting]

    def begin_round(self, required: Collection[PartitionId], *, by_age: bool) -> list[IndexBatch]:
        batches = self._next_round(required, by_age=by_age)
        for batch in batches:
            self.waiting.remove(batch)
            self.last[batch.partition] = batch
        self.rounds.append(batches)
        return batches

    def _next_round(self, required: Collection[PartitionId], *, by_age: bool) -> list[IndexBatch]:
        if not by_age:
            return self._in_turn()
        first = {*required, *(p for p, batch in self.last.items() if not ends(batch))}
        before = _until([b for b in self.waiting if b.partition in first], ROUND // 2)
        rest = [batch for batch in self.waiting if batch not in before]
        rest = _until(rest, ROUND - sum(batch.nbytes for batch in before))
        return before + rest[:1] + self._with_ends(before + rest[:1], rest[1:])

    def _with_ends(self, chosen: Sequence[IndexBatch], rest: list[IndexBatch]) -> list[IndexBatch]:
        """`rest` without batches that begin a snapshot whose end is not in it."""
        left = list(rest)
        for partition in {batch.partition for batch in rest}:
            own = [batch for batch in rest if batch.partition == partition]
            past = [batch for batch in chosen if batch.partition == partition]
            last = past[-1] if past else self.last.get(partition)
            if any(map(ends, own)):
                while not ends(own[-1]):
                    left.remove(own.pop())
            elif last is None or ends(last):
                left = [batch for batch in left if batch.partition != partition]
        return left

    def _in_turn(self) -> list[IndexBatch]:
        chosen: list[IndexBatch] = []
        while len(chosen) < len(self.waiting) and sum(b.nbytes for b in chosen) < ROUND:
            candidates = [
                batch
                for batch in self.waiting
                if batch.partition % QUEUES == self.next_queue and batch not in chosen
            ]
            self.next_queue = (self.next_queue + 1) % QUEUES
            chosen += candidates[:1]
        return chosen

    def end_round(self) -> None:
        del self.rounds[0]


def _until(batches: Sequence[IndexBatch], nbytes_max: int) -> list[IndexBatch]:
    """The first batches until they have so many bytes; at least one."""
    chosen: list[IndexBatch] = []
    for batch in batches:
        if chosen and sum(b.nbytes for b in chosen) >= nbytes_max:
            break
        chosen.append(batch)
    return chosen


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queues, "ROUND_BYTES", ROUND)
    # Two equal batches must stay two: the lists of these tests would confuse them.
    monkeypatch.setattr(IndexBatch, "__eq__", object.__eq__)
    monkeypatch.setattr(IndexBatch, "__hash__", object.__hash__)


_BATCHES: Final = st.tuples(
    st.integers(0, PARTITIONS - 1), st.sampled_from([1, 20, 60, 150]), st.booleans()
)
_ROUNDS: Final = st.tuples(
    st.frozensets(st.integers(0, PARTITIONS - 1).map(PartitionId), max_size=3), st.booleans()
)
_Step = tuple[list[tuple[int, int, bool]], tuple[frozenset[PartitionId], bool], int]


@given(st.lists(st.tuples(st.lists(_BATCHES, max_size=8), _ROUNDS, st.integers(0, 3)), max_size=12))
def test_rounds_are_those_of_a_list(steps: list[_Step]) -> None:
    queues, naive = BatchQueues(QUEUES), NaiveQueues()
    put: list[IndexBatch] = []

    def check() -> None:
        queues.check_invariants()
        assert len(queues) == len(naive.unapplied)
        assert queues.waiting_count == len(naive.waiting)
        assert queues.round_bytes == sum(batch.nbytes for own in naive.rounds for batch in own)
        for rounds in range(len(naive.rounds) + 1):
            later = set(naive.waiting).union(*naive.rounds[rounds:])
            for count in range(len(put) + 1):
                assert queues.has_applied(count, rounds) == later.isdisjoint(put[:count])
        assert queues.partitions() == {batch.partition for batch in naive.unapplied}

    for batches, (required, by_age), rounds_to_end in steps:
        for partition, nbytes, is_end in batches:
            batch = a_batch(partition, nbytes, ends_snapshot=is_end)
            queues.put(batch)
            put.append(batch)
            naive.waiting.append(batch)
            queues.check_invariants()
        oldest, is_any_waiting = naive.waiting[:1], bool(naive.waiting)
        expected = naive.begin_round(required, by_age=by_age)
        assert queues.begin_round(required, by_age=by_age) == expected
        assert bool(expected) == is_any_waiting
        if by_age:
            assert set(oldest) <= set(expected), "the oldest batch is in the next round"
        check()
        for _ in range(min(rounds_to_end, len(naive.rounds))):
            queues.end_round()
            naive.end_round()
            check()
    assert set(queues.clear()) == set(naive.unapplied)
    assert (len(queues), queues.queued_bytes) == (0, 0)


def rounds_until(queues: BatchQueues, last: IndexBatch, required: Collection[PartitionId]) -> int:
    """How many rounds it takes until `last` is applied. During each round a writer adds more than
    a round of other partitions' batches."""
    rng = random.Random(1)
    for number in range(1, 1000):
        is_last = last in queues.begin_round(required, by_age=True)
        queues.end_round()
        if is_last:
            return number
        for _ in range(15):
            queues.put(a_batch(rng.randrange(1, PARTITIONS), 10))
    raise AssertionError("it is never applied")


def test_a_required_change_waits_for_its_own_partition_only() -> None:
    """Other partitions' batches do not delay it, however many wait before it or are added."""
    queues = BatchQueues(QUEUES)
    for _ in range(100):
        for partition in range(1, PARTITIONS):
            queues.put(a_batch(partition, 10))
    own = [a_batch(0, 10) for _ in range(20)]
    for batch in own:
        queues.put(batch)
    assert rounds_until(queues, own[-1], [PartitionId(0)]) == sum(b.nbytes for b in own) * 2 / ROUND


def test_a_scan_that_waits_for_all_batches_does_not_wait_for_later_ones() -> None:
    queues = BatchQueues(QUEUES)
    nbytes = 0
    last = a_batch(1, 10)
    for partition in [1, 2, 2, 2, 4, 5] * 20:
        last = a_batch(partition, 10)
        queues.put(last)
        nbytes += last.nbytes
    assert rounds_until(queues, last, ()) == nbytes / ROUND


def test_a_scan_that_requires_a_partition_does_not_hold_up_others_for_ever() -> None:
    """If the required partition always has more changes, they get half of each round."""
    queues = BatchQueues(QUEUES)
    others = [a_batch(1, 10) for _ in range(50)]
    for batch in others:
        queues.put(batch)
    applied: list[IndexBatch] = []
    for _ in range(10):
        for _ in range(20):
            queues.put(a_batch(0, 10))
        applied += queues.begin_round([PartitionId(0)], by_age=True)
        queues.end_round()
    assert [batch for batch in applied if batch.partition == 1] == others
    assert len(applied) == 100


def settled_rounds(queues: BatchQueues, *, by_age: bool) -> int:
    """How many of 188 rounds end with every partition at the end of a snapshot. Snapshots larger
    than a round are added one after the other, each in parts."""
    parts, settled, unfinished = 8, 0, set[PartitionId]()
    for number in range(400):
        queues.put(a_batch(number // parts % PARTITIONS, 50, ends_snapshot=number % parts == 7))
        if number % 2 and number > 3 * parts:
            for batch in queues.begin_round(by_age=by_age):
                (unfinished.discard if ends(batch) else unfinished.add)(batch.partition)
            queues.end_round()
            settled += not unfinished
    return settled


def test_scans_find_partitions_at_the_ends_of_large_snapshots() -> None:
    """If the queues take turns, their snapshots overlap, and often some partition is inside a
    snapshot."""
    by_age = settled_rounds(BatchQueues(QUEUES), by_age=True)
    assert by_age > 2 * settled_rounds(BatchQueues(QUEUES), by_age=False)
    # Four rounds apply a snapshot.
    assert by_age >= 40


def test_a_queue_of_large_batches_does_not_take_all_turns() -> None:
    queues = BatchQueues(QUEUES)
    for _ in range(5):
        for partition in range(QUEUES):
            queues.put(a_batch(partition, 2 * ROUND))
    rounds = []
    for _ in range(2 * QUEUES):
        rounds += [batch.partition for batch in queues.begin_round()]
        queues.end_round()
    assert rounds == [0, 1, 2, 0, 1, 2]


def test_a_queue_is_bounded() -> None:
    queues = BatchQueues(QUEUES)
    for _ in range(QUEUE_BATCHES_MAX):
        assert not queues.is_full
        queues.put(a_batch(1, 1))
    assert queues.is_full
    # A batch counts until it is applied.
    queues.begin_round()
    assert queues.is_full
    queues.end_round()
    assert not queues.is_full
