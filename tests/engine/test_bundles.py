"""A bundle does what its runs do one by one as chunks of their own, and what the model says."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Final

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.model import Model, check_result, contents
from tests.engine.strategies import SIZES, SOME_KEYS, VALUES, requests
from tests.kit.effort import effort
from tests.kit.placed_keys import key_in
from upr_protocol.chunk import Bundle, BundleRun, Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import HistoryId, Operation, PartitionId, PartitionState
from upr_protocol.wire import decode_results
from upr_server.engine import (
    LONG_RUN_ROWS,
    Bucket,
    BundleBatches,
    MutateResult,
    WriterToken,
    apply_set_runs,
    batch_of,
)

PARTITIONS: Final = 4
WRITERS: Final = [b"the first writer", b"the other writer"]
ONE_WRITER: Final = st.sampled_from(WRITERS)
ONE_PARTITION: Final = st.integers(0, PARTITIONS - 1)

PLAIN_ROWS: Final = st.builds(
    lambda keys, value, size: [Mutation(Operation.SET, key, value) for key in keys][:size],
    st.lists(SOME_KEYS, min_size=1, max_size=90),
    VALUES,
    SIZES,
)
ROWS: Final = st.one_of(PLAIN_ROWS, st.lists(requests(), min_size=1, max_size=12))
ROWS_BY_PARTITION: Final = st.dictionaries(ONE_PARTITION, ROWS, min_size=1)


def new_bucket() -> Bucket:
    histories = count(1)
    return Bucket(
        "b", new_history_id=lambda: HistoryId(next(histories)), partition_count=PARTITIONS
    )


@cache
def placed(partition: int, key: bytes) -> bytes:
    return key_in(partition, PARTITIONS, key)


class Bundles(RuleBasedStateMachine):
    """One bucket takes bundles, and of plain ones all runs at once that can be taken so; its twin
    takes each run as a chunk of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = new_bucket()
        self.twin = new_bucket()
        self.models = [Model() for _ in range(PARTITIONS)]
        self.counters = {writer: [0] * PARTITIONS for writer in WRITERS}
        self.sent: list[tuple[bytes, BundleRun, list[Mutation]]] = []
        self.answers: dict[tuple[bytes, int, int], MutateResult] = {}
        self.time = 100.0

    def publish(self, writer: bytes, runs: list[tuple[BundleRun, list[Mutation]]]) -> None:
        runs.sort()
        bundle = Bundle(
            Chunk.build(row for _, rows in runs for row in rows), [run for run, _ in runs]
        )
        batches = BundleBatches(bundle, writer)
        at_once = self.set_runs(bundle, batches)
        for index, (run, rows) in enumerate(runs):
            partition = self.bucket.partitions[run.partition]
            result = at_once[index] or partition.mutate(batches[index], now=self.time)
            token = WriterToken(writer, run.counter)
            alone = batch_of(bundle.run_chunk(index), token)
            twin = self.twin.partitions[run.partition]
            assert result == twin.mutate(alone, now=self.time)
            self.check(token, run, rows, result)
        self.sent += [(writer, run, rows) for run, rows in runs]

    def set_runs(self, bundle: Bundle, batches: BundleBatches) -> list[MutateResult | None]:
        if not batches.columns.is_unconditional:
            return [None] * len(batches)
        partitions = [self.bucket.partitions[run.partition] for run in bundle.runs]
        are_at_once = [
            partition.state is PartitionState.ACTIVE
            and partition.repeated_batches.is_certainly_new(batches.token(run), 0)
            and not partition.may_have_expired(self.time)
            and run.row_count < LONG_RUN_ROWS
            for partition, run in zip(partitions, bundle.runs, strict=True)
        ]
        runs = apply_set_runs(
            self.bucket, batches.columns, bundle.directory, batches.writer, 0, self.time
        )
        assert list(runs.remaining_indexes) == [
            index for index, is_taken in enumerate(are_at_once) if not is_taken
        ]
        return [
            MutateResult(*result[2:]) if result.history_id else None
            for result in decode_results(runs.answer_rows)
        ]

    def check(
        self, token: WriterToken, run: BundleRun, rows: list[Mutation], result: MutateResult
    ) -> None:
        partition, model = self.bucket.partitions[run.partition], self.models[run.partition]
        first_answer = self.answers.get((token.writer, run.partition, token.counter))
        if partition.state is not PartitionState.ACTIVE:
            assert result.status is Status.WRONG_STATE
        elif result.status is not Status.OK:
            # It came behind a refused run that was not sent again.
            assert result.status in (Status.TEMPORARY_FAILURE, Status.TOKEN_TOO_OLD)
        elif result.is_repeated:
            assert first_answer is not None
            assert (result.first_seq, result.last_seq, result.failures, result.counters) == (
                first_answer.first_seq,
                first_answer.last_seq,
                first_answer.failures,
                first_answer.counters,
            )
        else:
            assert first_answer is None, "a run that was applied is applied again"
            before = model.high
            failures, counters = model.mutate(rows, self.time, {})
            assert (result.failures, result.counters) == (failures, counters)
            check_result(result, len(rows), before, model.high)
            self.answers[token.writer, run.partition, token.counter] = result
        assert partition.high_seq == model.high

    @rule(writer=ONE_WRITER, rows_by_partition=ROWS_BY_PARTITION)
    def publish_new_runs(self, writer: bytes, rows_by_partition: dict[int, list[Mutation]]) -> None:
        runs: list[tuple[BundleRun, list[Mutation]]] = []
        for partition, rows in rows_by_partition.items():
            self.counters[writer][partition] += 1
            counter = self.counters[writer][partition]
            placed_rows = [
                msgspec.structs.replace(row, key=placed(partition, row.key)) for row in rows
            ]
            runs.append((BundleRun(PartitionId(partition), len(rows), counter), placed_rows))
        self.publish(writer, runs)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def publish_runs_again_in_another_bundle(self, data: st.DataObject) -> None:
        resent = data.draw(st.lists(st.sampled_from(self.sent), min_size=1, max_size=4))
        writer = resent[0][0]
        by_partition = {
            run.partition: (run, rows) for sender, run, rows in resent if sender == writer
        }
        self.publish(writer, list(by_partition.values()))

    @rule(partition=ONE_PARTITION)
    def take_over_or_hand_over(self, partition: int) -> None:
        for bucket in (self.bucket, self.twin):
            member = bucket.partitions[partition]
            is_active = member.state is PartitionState.ACTIVE
            state = PartitionState.PENDING if is_active else PartitionState.ACTIVE
            member.change_state(state, member.failover_log)

    @rule(seconds=st.sampled_from([1, 10]))
    def wait(self, seconds: int) -> None:
        self.time += seconds

    @invariant()
    def whole(self) -> None:
        self.bucket.check_invariants()

    @invariant()
    def holds_what_the_twin_and_the_model_hold(self) -> None:
        for partition, twin, model in zip(
            self.bucket.partitions, self.twin.partitions, self.models, strict=True
        ):
            keys = sorted({row.key for row in model.log})
            items = partition.get(keys, self.time)
            assert items == twin.get(keys, self.time)
            live = {key: row for key, row in model.now.items() if model.live(key, self.time)}
            assert {row.key: row.value for row in items if row.seq} == {
                key: value for key, (value, *_) in contents(live).items()
            }


def test_runs_taken_in_together_wait_for_no_stale_expiry_times() -> None:
    """Thousands of items may have been stored again before their time came. Such runs are taken in
    one by one, and others have their turn in between."""
    bucket = new_bucket()
    (partition, *_) = bucket.partitions
    keys = [key_in(0, PARTITIONS, b"%d" % index) for index in range(60)]
    for expiry in (110, 1000):
        rows = [Mutation(Operation.SET, key, expiry=expiry) for key in keys]
        partition.mutate(batch_of(Chunk.build(rows)), now=100)
    entry_count = partition.statistics()["expiring"]
    bundle = Bundle(
        Chunk.build([Mutation(Operation.SET, keys[0], b"v")]), [BundleRun(PartitionId(0), 1, 1)]
    )
    columns = BundleBatches(bundle).columns
    runs = apply_set_runs(bucket, columns, bundle.directory, bytes(16), 0, 110)
    assert list(runs.remaining_indexes) == [0]
    assert partition.statistics()["expiring"] == entry_count == 120
    assert not partition.has_expired(110)
    assert partition.statistics()["expiring"] == 60


TestBundles = Bundles.TestCase
TestBundles.settings = settings(
    max_examples=effort(50, 100),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
