"""Batches that are worked out in slices, with others' changes between them, against the model."""

from __future__ import annotations

import gc
from itertools import count
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.helpers import NOW, get_item, new_partition, put, request, send
from tests.engine.model import Model, Reader, check_result, contents
from tests.engine.strategies import SOME_KEYS, VALUES, requests
from tests.kit.calls import calls_of
from tests.kit.effort import effort
from tests.kit.reference_cycles import no_collections
from upr_protocol.chunk import LARGE_BYTES, Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.ids import HistoryId, Operation, PartitionState, SeqNo
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX
from upr_server.engine import Bucket, CheckedChunk, Evaluation, MutationBatch, Partition, batch_of
from upr_server.engine.evaluation_steps import BLOCK_ROWS, EXPIRY_COST, PIECE_ROWS
from upr_server.engine.partition import EXPIRE_MAX
from upr_server.engine.snapshots import LARGE_VALUE_BYTES

LARGE: Final = 19 * 1024 * 1024


class SlicedBatches(RuleBasedStateMachine):
    """Several batches are being worked out; each is applied as one step when that is done."""

    def __init__(self) -> None:
        super().__init__()
        histories = count(1)
        self.bucket = Bucket(
            "b", new_history_id=lambda: HistoryId(next(histories)), partition_count=1
        )
        self.partition = self.bucket.partitions[0]
        self.model = Model()
        self.reader = Reader(self.partition, self.model, 0)
        self.time = 100.0
        self.begun: list[tuple[list[Mutation], MutationBatch, Evaluation]] = []
        self.holds_expiry = False

    @rule(rows=st.lists(requests(), min_size=1, max_size=12))
    def begin(self, rows: list[Mutation]) -> None:
        batch = batch_of(Chunk.build(rows))
        evaluation = self.partition.evaluate(batch, now=self.time)
        if evaluation is not None:
            self.begun.append((rows, batch, evaluation))

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), cost=st.integers(1, 60))
    def go_on(self, data: st.DataObject, cost: int) -> None:
        index = data.draw(st.integers(0, len(self.begun) - 1))
        rows, batch, evaluation = self.begun[index]
        high = self.partition.high_seq
        position = evaluation.result.content_version
        if position is not None and position != self.partition.content_version:
            self.holds_expiry = True
        assert not evaluation.step(cost_max=cost)
        if not self.is_active:
            assert self.partition.high_seq == high, "nothing gets a number"
            del self.begun[index]
            self.is_refused(batch)
            self.end_request()
            return
        expired_count = (
            self.model.expire(evaluation.result.now) if evaluation.result.content_version else 0
        )
        assert self.partition.high_seq == high + expired_count, "only what has expired is deleted"
        if evaluation.is_done:
            del self.begun[index]
            self.apply(rows, batch, evaluation)
            self.end_request()

    def end_request(self) -> None:
        """As a queue does when a batch was applied or given up."""
        self.partition.release_expiry()
        self.holds_expiry = False

    def apply(self, rows: list[Mutation], batch: MutationBatch, evaluation: Evaluation) -> None:
        before = self.model.high
        result = self.partition.mutate(batch, now=self.time, evaluation=evaluation)
        failures, counters = self.model.mutate(rows, evaluation.result.now, {})
        assert (result.failures, result.counters) == (failures, counters)
        check_result(result, len(rows), before, self.model.high)

    @property
    def is_active(self) -> bool:
        return self.partition.state is PartitionState.ACTIVE

    def is_refused(self, batch: MutationBatch) -> None:
        result = self.partition.mutate(batch, now=self.time)
        assert result.status is Status.WRONG_STATE

    @rule()
    def hand_over(self) -> None:
        self.partition.change_state(PartitionState.PENDING, self.partition.failover_log)

    @rule()
    def take_back(self) -> None:
        self.partition.change_state(PartitionState.ACTIVE, self.partition.failover_log)

    @rule(key=SOME_KEYS, value=VALUES, expiry=st.sampled_from([0, 0, 105, 120]))
    def another_changes_a_key(self, key: bytes, value: bytes, expiry: int) -> None:
        rows = [Mutation(Operation.SET, key, value, expiry=expiry)]
        if not self.is_active:
            self.is_refused(batch_of(Chunk.build(rows)))
            return
        result = self.partition.mutate(batch_of(Chunk.build(rows)), now=self.time)
        before = self.model.high
        assert self.model.mutate(rows, self.time, {}) == ([], [])
        check_result(result, 1, result.first_seq - 1, self.model.high)
        assert self.model.high > before

    @rule(steps=st.integers(1, 4))
    def read(self, steps: int) -> None:
        """Closes the open snapshot, among others."""
        for _ in range(steps):
            self.reader.step()

    @rule(seconds=st.sampled_from([0.5, 3, 20]))
    def wait(self, seconds: float) -> None:
        self.time += seconds

    @rule()
    def expire(self) -> None:
        may_expire = self.is_active and not self.holds_expiry
        expired_count = self.model.expire(self.time) if may_expire else 0
        assert self.partition.expire(self.time) == expired_count

    @invariant()
    def whole(self) -> None:
        self.bucket.check_invariants()
        assert self.partition.high_seq == self.model.high

    def teardown(self) -> None:
        self.take_back()
        for rows, batch, evaluation in self.begun:
            # As a queue has it: nothing comes between the end of the work and its effect.
            evaluation.step()
            self.model.expire(evaluation.result.now)
            self.apply(rows, batch, evaluation)
        self.reader.drain()
        live = {key: row for key, row in self.model.now.items() if self.model.live(key, 0)}
        items = [get_item(self.partition, key, 0) for key in live]
        assert contents({item.key: item for item in items if item is not None}) == contents(live)


TestSlicedBatches = SlicedBatches.TestCase
TestSlicedBatches.settings = settings(
    max_examples=effort(75, 150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def slices(partition: Partition, batch: MutationBatch, cost: int) -> list[int]:
    """What each slice of a batch costs. The batch is applied."""
    evaluation = partition.evaluate(batch, now=NOW)
    assert evaluation is not None
    costs: list[int] = []
    while not evaluation.is_done:
        before = evaluation.cost
        assert not evaluation.step(cost_max=cost)
        costs.append(evaluation.cost - before)
    partition.mutate(batch, now=NOW, evaluation=evaluation)
    return costs


@pytest.mark.parametrize("keys", [1, BUNDLE_MUTATIONS_MAX])
def test_a_batch_of_many_increments_is_worked_out_in_slices(keys: int) -> None:
    partition = new_partition()
    delta = CounterDelta(1).encode()
    rows = [
        Mutation(Operation.INCREMENT, b"n%d" % (index % keys), delta)
        for index in range(BUNDLE_MUTATIONS_MAX)
    ]
    costs = slices(partition, batch_of(Chunk.build(rows)), 1000)
    assert len(costs) > 30
    # A slice ends where a block of rows does.
    assert max(costs) <= 1000 + PIECE_ROWS
    assert partition.high_seq == BUNDLE_MUTATIONS_MAX
    item = get_item(partition, b"n0", NOW)
    assert item is not None
    assert item.value == b"%d" % (BUNDLE_MUTATIONS_MAX // keys - 1)
    partition.check_invariants()


def test_a_reader_is_woken_by_what_expires_before_a_batch_that_fails() -> None:
    partition = new_partition()
    put(partition, b"stays")
    send(partition, request(Operation.SET, b"expires", expiry=int(NOW) + 5))
    woken: list[int] = []
    cursor = partition.manager.register(
        "test", partition.high_seq, on_ready=lambda: woken.append(partition.high_seq)
    ).cursor
    assert cursor.next() is None
    batch = batch_of(Chunk.build([request(Operation.ADD, b"stays")]))
    evaluation = partition.evaluate(batch, now=NOW + 5)
    assert evaluation is not None
    assert evaluation.step() == []
    assert partition.mutate(batch, now=NOW + 5, evaluation=evaluation).failures
    assert woken == [3]


def test_a_batch_deletes_nothing_once_its_partition_is_handed_over() -> None:
    """The next active has been told the last number."""
    partition = new_partition()
    send(partition, request(Operation.SET, b"expires", expiry=int(NOW) + 5))
    batch = batch_of(Chunk.build([request(Operation.ADD, b"k")]))
    evaluation = partition.evaluate(batch, now=NOW + 5)
    assert evaluation is not None
    partition.change_state(PartitionState.PENDING, partition.failover_log)
    assert evaluation.step() == []
    refused = partition.mutate(batch, now=NOW + 5, evaluation=evaluation)
    assert refused.status is Status.WRONG_STATE
    assert partition.high_seq == 1
    partition.change_state(PartitionState.ACTIVE, partition.failover_log)
    assert partition.expire(NOW + 5) == 1


def test_an_evaluation_that_is_done_needs_no_more_steps() -> None:
    partition = new_partition()
    evaluation = partition.evaluate(batch_of(Chunk.build([request(Operation.ADD)])), now=NOW)
    assert evaluation is not None
    for _ in range(2):
        assert evaluation.step() == []
        assert evaluation.is_done
    cost = evaluation.cost
    assert evaluation.step() == []
    assert evaluation.cost == cost


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 25),
    st.data(),
)
def test_a_batch_is_cut_into_pieces_within_their_limits(
    sizes: list[int], rows_max: int, bytes_max: int, data: st.DataObject
) -> None:
    chunk = chunk_of_plain_sets(
        [b"%d" % index for index in range(len(sizes))], list(map(bytes, sizes))
    )
    low = data.draw(st.integers(0, len(sizes) - 1))
    high = data.draw(st.integers(low + 1, len(sizes)))
    batch = MutationBatch(CheckedChunk(chunk), low, high)
    rows: list[Mutation] = []
    while len(rows) < len(batch):
        piece = batch.piece(len(rows), rows_max, bytes_max)
        values_bytes = sum(len(row.value) for row in piece)
        is_whole = piece.count == chunk.count and chunk.nbytes <= bytes_max
        assert piece.count <= rows_max or is_whole
        assert values_bytes <= bytes_max or piece.count == 1
        sizes_after = sizes[low + len(rows) :][: piece.count + 1]
        is_last = len(rows) + piece.count == len(batch)
        assert is_last or piece.count == rows_max or sum(sizes_after) > bytes_max, (
            "no shorter than needed"
        )
        rows += piece
    expected = list(chunk)[low:high]
    assert rows == expected
    assert list(batch.chunk) == expected


def test_an_evaluation_that_is_given_up_is_freed_without_the_collector() -> None:
    partition = new_partition()
    put(partition, b"k", value=bytes(LARGE))
    batch = batch_of(Chunk.build([request(Operation.APPEND, b"k", b"x")] * 1000))
    with no_collections():
        evaluation = partition.evaluate(batch, now=NOW)
        assert evaluation is not None
        assert not evaluation.step(cost_max=2000)
        assert not evaluation.is_done, "it is in the middle of its work"
        del evaluation
        assert not any(isinstance(existing, Evaluation) for existing in gc.get_objects())


@pytest.mark.parametrize("op", [Operation.APPEND, Operation.PREPEND, Operation.TOUCH])
def test_many_changes_of_a_large_value_copy_it_once(op: Operation) -> None:
    partition = new_partition()
    put(partition, b"k", value=bytes(LARGE))
    rows = [request(op, b"k", b"" if op == Operation.TOUCH else b"x") for _ in range(1800)]
    batch = batch_of(Chunk.build(rows))
    evaluation = partition.evaluate(batch, now=NOW)
    assert evaluation is not None
    while not evaluation.is_done:
        assert not evaluation.step(cost_max=4096)
    assert evaluation.result.copied_bytes <= 2 * LARGE + 1800
    result = partition.mutate(batch, now=NOW, evaluation=evaluation)
    assert result.last_seq == 1801
    item = get_item(partition, b"k", NOW)
    assert item is not None
    assert len(item.value) == LARGE + (0 if op == Operation.TOUCH else 1800)
    partition.check_invariants()


def test_a_touch_of_a_value_that_is_in_memory_refers_to_it() -> None:
    """Unless it is so large that the stored chunk, which is a copy, is better made in slices."""
    partition = new_partition()
    put(partition, b"k", value=bytes(LARGE_BYTES))
    before = get_item(partition, b"k", NOW)
    send(partition, request(Operation.TOUCH, b"k", expiry=int(NOW) + 100))
    open_snapshot = partition.snapshots.open
    assert before is not None
    assert open_snapshot.find(2).value is before.value
    send(partition, request(Operation.TOUCH, b"k", expiry=int(NOW) + 200))
    assert open_snapshot.find(3).expiry == int(NOW) + 200
    first = open_snapshot.find(3).value
    send(partition, request(Operation.TOUCH, b"k", expiry=int(NOW) + 300))
    assert open_snapshot.find(4).value is first
    partition.check_invariants()


@pytest.mark.parametrize("key_count", [1, BLOCK_ROWS, BLOCK_ROWS + 1])
def test_every_key_is_asked_for_that_only_the_disk_may_have(key_count: int) -> None:
    partition = new_partition()
    log = partition.failover_log
    partition.change_state(PartitionState.REPLICA, log)
    partition.restart_at(SeqNo(7))
    partition.change_state(PartitionState.ACTIVE, log.with_branch(HistoryId(99), SeqNo(7)))
    keys = [b"%d" % index for index in range(key_count)]
    rows = [request(Operation.REPLACE, key) for key in keys]
    evaluation = partition.evaluate(batch_of(Chunk.build(rows)), now=NOW)
    assert evaluation is not None
    assert [fetch.key for fetch in evaluation.step()] == keys


@pytest.mark.parametrize("is_mixed", [False, True])
def test_to_store_many_large_values_costs_little(is_mixed: bool) -> None:
    """900 touches of values of 70 kB took 7 to 12 ms in one step."""
    partition, count = new_partition(), 200
    keys = [b"%d" % index for index in range(count)]
    sizes = [100 if is_mixed and index % 2 else LARGE_VALUE_BYTES + 1 for index in range(count)]
    for key, size in zip(keys, sizes, strict=True):
        put(partition, key, value=bytes(size))
    batch = batch_of(
        Chunk.build([Mutation(Operation.TOUCH, key, expiry=2_000_000_000) for key in keys])
    )
    evaluation = partition.evaluate(batch, now=NOW)
    assert evaluation is not None
    assert not evaluation.step()
    call_count = calls_of(lambda: partition.mutate(batch, now=NOW, evaluation=evaluation))
    assert call_count < 30 * count, call_count / count
    partition.check_invariants()
    for key, size in zip(keys, sizes, strict=True):
        item = get_item(partition, key)
        assert item is not None
        assert (len(item.value), item.expiry) == (size, 2_000_000_000)


def test_items_that_expire_all_the_time_do_not_make_a_batch_begin_again_and_again() -> None:
    """Each restart doubled the slices, up to a step of 40 ms."""
    partition, count = new_partition(), 1000
    rows = [Mutation(Operation.SET, b"old %d" % row, expiry=int(NOW) + 1) for row in range(20_000)]
    send(partition, *rows)
    delta = CounterDelta(1, 0).encode()
    batch = batch_of(
        Chunk.build([Mutation(Operation.INCREMENT, b"%d" % row, delta) for row in range(count)])
    )
    now = NOW + 2
    evaluation = partition.evaluate(batch, now=now)
    assert evaluation is not None
    longest, cost = 0, 0
    for _ in range(200):
        assert not evaluation.step(cost_max=200)
        longest, cost = max(longest, evaluation.cost - cost), evaluation.cost
        if evaluation.is_done:
            break
        partition.expire(now)
    assert evaluation.is_done
    # To cut 256 rows costs 512, and is not divided; nor is what is deleted before the batch.
    assert longest < 4 * 200 + EXPIRY_COST * EXPIRE_MAX
    # It began again once, and then nothing expired before it was applied.
    assert not partition.may_expire(now)
    assert partition.mutate(batch, now=now, evaluation=evaluation).status is Status.OK
    partition.release_expiry()
    assert partition.expire(now)
    while partition.has_expired(now):
        partition.expire(now)
    assert partition.item_count == count
