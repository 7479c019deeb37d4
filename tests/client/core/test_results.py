"""What an answer says of each operation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.fake_partition import FakePartition
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.client.core.results import (
    Failure,
    PartitionBatchResult,
    failed_operations,
    failures_of_refused,
    is_wrong_node,
    results_of,
    split_reply,
    status_of,
)
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import MutateReply, RunResult

_P = PartitionId(3)

OPERATIONS = st.lists(
    st.builds(
        Mutation,
        op=st.sampled_from([Operation.SET, Operation.ADD, Operation.DELETE, Operation.INCREMENT]),
        key=st.sampled_from([b"1", b"2", b"3"]),
        value=st.just(CounterDelta(1).encode()),
    ).map(lambda m: m if m.op is Operation.INCREMENT else Mutation(m.op, m.key, b"7")),
    max_size=12,
)


@given(OPERATIONS)
def test_each_operation_has_the_number_that_the_server_gave_it(rows: list[Mutation]) -> None:
    partition = FakePartition(3, 99)
    chunk = Chunk.build(rows)
    mutate_result = partition.mutate(chunk, bytes(16), 0)
    reply = MutateReply(
        0, (mutate_result.result,), tuple(mutate_result.failures), tuple(mutate_result.counters)
    )
    ((status, result),) = split_reply(reply, [_P], [0, chunk.count])
    assert status is Status.OK
    results = results_of(_P, chunk, result)
    assert len(results) == len(rows)
    assert [result for result in results if isinstance(result, Failure)] == failed_operations(
        _P, chunk, result
    )
    history = iter(partition.history)
    for row, outcome in zip(rows, results, strict=True):
        if isinstance(outcome, Failure):
            assert (outcome.key, outcome.operation) == (row.key, row.op)
            continue
        stored_item = next(history)
        assert (outcome.seq, outcome.cas, outcome.history_id) == (
            stored_item.seq,
            stored_item.cas,
            99,
        )
        assert stored_item.key == row.key
        assert (outcome.count is not None) == (row.op is Operation.INCREMENT)
        if outcome.count is not None:
            assert b"%d" % outcome.count == stored_item.value
    assert next(history, None) is None


def test_a_reply_is_split_into_the_results_of_its_runs() -> None:
    first, second, third = map(PartitionId, (1, 4, 5))
    runs = (
        RunResult(first, 0, HistoryId(9), SeqNo(5), SeqNo(5), Cas(77)),
        RunResult(second, Status.WRONG_STATE),
        RunResult(third, 0, HistoryId(8), SeqNo(1), SeqNo(2), Cas(3)),
    )
    reply = MutateReply(7, runs, ((1, Status.EXISTS), (4, Status.NOT_FOUND)), ((0, 12), (5, 1)))
    assert split_reply(reply, [first, second, third], [0, 2, 4, 7]) == [
        (
            Status.OK,
            PartitionBatchResult(
                HistoryId(9), SeqNo(5), SeqNo(5), Cas(77), ((1, Status.EXISTS),), ((0, 12),)
            ),
        ),
        (Status.WRONG_STATE, PartitionBatchResult(HistoryId(0), SeqNo(0), SeqNo(0), Cas(0))),
        (
            Status.OK,
            PartitionBatchResult(
                HistoryId(8), SeqNo(1), SeqNo(2), Cas(3), ((0, Status.NOT_FOUND),), ((1, 1),)
            ),
        ),
    ]
    assert is_wrong_node(reply)
    assert not is_wrong_node(MutateReply(7, runs[:1]))


def test_a_reply_that_does_not_fit_its_bundle_is_refused() -> None:
    reply = MutateReply(0, (RunResult(_P),), ((2, Status.EXISTS),))
    with pytest.raises(RemoteProtocolError, match="row 2 of 2"):
        split_reply(reply, [_P], [0, 2])
    with pytest.raises(RemoteProtocolError, match="partitions of the bundle"):
        split_reply(reply, [PartitionId(1)], [0, 3])
    with pytest.raises(RemoteProtocolError, match="partitions of the bundle"):
        split_reply(reply, [_P, PartitionId(9)], [0, 3, 4])


def test_a_batch_that_was_refused() -> None:
    chunk = Chunk.build([Mutation(Operation.SET, b"a"), Mutation(Operation.DELETE, b"b")])
    assert failures_of_refused(_P, chunk, Status.UNSUPPORTED) == [
        Failure(_P, b"a", Operation.SET, Status.UNSUPPORTED),
        Failure(_P, b"b", Operation.DELETE, Status.UNSUPPORTED),
    ]


def test_a_status_of_a_newer_server() -> None:
    assert status_of(32) is Status.EXISTS
    assert status_of(60000) is Status.INTERNAL
