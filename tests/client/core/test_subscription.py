"""Where the streams of a subscription start and end, by what nodes tell of them."""

from __future__ import annotations

import pytest

from upr_protocol.client import ResumeState
from upr_protocol.client.core.delivery_tracker import RollbackRequest
from upr_protocol.client.core.events import RolledBack
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.subscription import (
    End,
    Subscription,
    SubscriptionState,
)
from upr_protocol.client.options import DriverOptions
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import Opened, PartitionLog

P = PartitionId(0)
LOG = FailoverLog.of_pairs([(7, 0)])


def handshake(
    partition_count: int = 2,
    state: PartitionState = PartitionState.ACTIVE,
    log: FailoverLog = LOG,
    high_seq: int = 5,
) -> Handshake:
    """What a node tells that has partition 0 in some state."""
    answer = Handshake(DriverOptions().session(0.0), "b")
    answer.receive(
        PartitionLog(state, SeqNo(high_seq), SeqNo(0), SeqNo(0), log, partition=P, opaque=1)
    )
    answer.receive(Opened(partition_count, 1, opaque=1))
    return answer


def new_state(
    partitions: tuple[int, ...] | None = None, *, from_now: bool = False, end: End = None
) -> SubscriptionState:
    return SubscriptionState(Subscription(partitions, from_now=from_now, end=end), ResumeState("b"))


def test_the_first_node_tells_which_partitions_remain() -> None:
    state = new_state()
    assert not state.is_finished
    assert state.learn_partitions(handshake()) == []
    assert state.remaining_partitions == {0, 1}
    state.remaining_partitions.clear()
    assert state.is_finished


def test_a_partition_that_the_bucket_does_not_have_is_refused() -> None:
    with pytest.raises(ServerError, match="has partitions 0 to 1, not 3"):
        new_state((1, 3)).learn_partitions(handshake())


def test_another_number_of_partitions_is_another_bucket() -> None:
    state = new_state()
    state.learn_partitions(handshake(2))
    with pytest.raises(ServerError, match="with 4 partitions instead of 2") as caught:
        state.learn_partitions(handshake(4))
    assert caught.value.status is Status.HISTORY_CHANGED


def test_partitions_that_the_bucket_does_not_have_any_more_are_named_once() -> None:
    state = new_state()
    received = Position(LOG, SeqNo(5), SeqNo(5), None)
    state.resume_state.positions.update({PartitionId(1): received, PartitionId(3): received})
    (delivery,) = state.learn_partitions(handshake(2))
    assert delivery.event == RolledBack(
        PartitionId(3), SeqNo(0), SeqNo(0), "the bucket does not have this partition any more"
    )
    assert state.resume_state.position(PartitionId(3)).highest_received == 0
    assert state.learn_partitions(handshake(2)) == []


@pytest.mark.parametrize(
    "answer",
    [
        handshake(state=PartitionState.REPLICA),
        handshake(log=FailoverLog()),
    ],
)
def test_only_a_node_in_the_right_state_decides_what_now_is(answer: Handshake) -> None:
    state = new_state(from_now=True, end="now")
    assert not state.decide_bounds(P, answer)
    assert state.decide_bounds(P, handshake(high_seq=9))
    assert state.resume_state.position(P) == Position(LOG, SeqNo(9), SeqNo(9), None)
    assert state.end_of(P) == 9
    assert state.decide_bounds(P, handshake(high_seq=12))
    assert state.end_of(P) == 9, "it is decided once"


@pytest.mark.parametrize(
    ("end", "expected"), [(None, SEQ_MAX), (8, 8), ({0: 6}, 6), ({1: 6}, SEQ_MAX)]
)
def test_an_end_that_is_a_number_needs_no_node(end: End, expected: int) -> None:
    state = new_state(end=end)
    assert state.decide_bounds(P, handshake(state=PartitionState.REPLICA))
    assert state.end_of(P) == expected
    assert state.confirm_end(P, HistoryId(99))


def test_an_end_of_now_counts_only_in_the_history_that_it_was_read_in() -> None:
    state = new_state(end="now")
    state.decide_bounds(P, handshake())
    assert state.confirm_end(P, HistoryId(7))
    assert not state.confirm_end(P, HistoryId(8))
    later = FailoverLog.of_pairs([(8, 3), (7, 0)])
    assert state.decide_bounds(P, handshake(log=later, high_seq=4))
    assert state.end_of(P) == 4
    assert state.confirm_end(P, HistoryId(8))


def test_a_rollback_ends_at_or_below_its_ceiling() -> None:
    state = new_state()
    request = RollbackRequest(P, SeqNo(4), "failover")
    state.pending_rollbacks[P] = request
    with pytest.raises(ValueError, match="rolled back to 5, above its ceiling 4"):
        state.finish_rollback(P, SeqNo(5))
    assert state.finish_rollback(P, SeqNo(4)) == request
    assert not state.pending_rollbacks


def test_the_partitions_asked_for_are_sorted_and_named_once() -> None:
    assert Subscription([3, 1, 3]).partitions == (1, 3)
    assert Subscription().partitions == ()
