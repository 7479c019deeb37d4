"""Which events count as processed, and when a resume state is saved."""

from __future__ import annotations

import pytest

from upr_protocol.client import ResumeState, SnapshotEnd
from upr_protocol.client.core.delivery_tracker import (
    Delivery,
    DeliveryTracker,
    RollbackRequest,
    SaveLimits,
    SavePriority,
)
from upr_protocol.client.core.resume_state import ROLLBACK_PENDING
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import PartitionId, SeqNo

LIMITS = SaveLimits(complete_interval_s=2.0, interval_s=10.0, nbytes=1000)
P = PartitionId(1)
POSITION = Position(FailoverLog.of_pairs([(7, 0)]), SeqNo(5), SeqNo(5), None)
MOVE = (P, POSITION)
NEVER = float("inf")


@pytest.fixture
def acknowledged() -> list[Delivery]:
    return []


@pytest.fixture
def tracker(acknowledged: list[Delivery]) -> DeliveryTracker:
    return DeliveryTracker(ResumeState("b"), LIMITS, acknowledged.append, 100.0)


def test_a_delivery_in_hand_counts_once_it_is_finished(
    tracker: DeliveryTracker, acknowledged: list[Delivery]
) -> None:
    event = SnapshotEnd(P, SeqNo(5))
    delivery = Delivery(event, MOVE)
    tracker.hand_out(delivery, event)
    assert acknowledged == []
    assert tracker.state.positions == {}
    assert tracker.position_after_current(P) == POSITION
    assert tracker.state_after_current().positions == {P: POSITION}
    tracker.finish_current()
    tracker.finish_current()
    assert acknowledged == [delivery]
    assert tracker.state.positions == {P: POSITION}


def test_a_discarded_delivery_never_counts(
    tracker: DeliveryTracker, acknowledged: list[Delivery]
) -> None:
    event = SnapshotEnd(P, SeqNo(5))
    tracker.hand_out(Delivery(event, MOVE), event)
    tracker.discard_current()
    tracker.finish_current()
    assert acknowledged == []
    assert tracker.state.positions == {}
    assert not tracker.schedule.has_unsaved


def test_a_rollback_is_pending_and_urgent_before_the_application_hears_of_it(
    tracker: DeliveryTracker,
) -> None:
    tracker.finish_delivery(Delivery(None, MOVE))
    tracker.begin_rollback(RollbackRequest(P, SeqNo(3), "failover"))
    assert tracker.state.position(P).log.current == ROLLBACK_PENDING
    assert tracker.schedule.due_at == 100.0


def test_a_delivery_without_a_position_needs_no_save(tracker: DeliveryTracker) -> None:
    assert not tracker.schedule.has_unsaved
    assert tracker.schedule.due_at == NEVER
    tracker.finish_delivery(Delivery(None))
    assert tracker.schedule.due_at == NEVER


def test_the_highest_priority_decides_when_to_save(tracker: DeliveryTracker) -> None:
    schedule = tracker.schedule
    tracker.finish_delivery(Delivery(None, MOVE))
    assert schedule.due_at == 110.0
    tracker.finish_delivery(Delivery(None, MOVE, priority=SavePriority.COMPLETE))
    assert schedule.due_at == 102.0
    tracker.finish_delivery(Delivery(None, MOVE))
    assert schedule.due_at == 102.0
    tracker.finish_delivery(Delivery(None, MOVE, priority=SavePriority.URGENT))
    assert schedule.due_at == 100.0
    schedule.note_saved(105.0, schedule.moves)
    assert schedule.due_at == NEVER
    tracker.finish_delivery(Delivery(None, MOVE))
    assert schedule.due_at == 115.0


def test_enough_bytes_make_a_save_due(tracker: DeliveryTracker) -> None:
    tracker.finish_delivery(Delivery(None, MOVE, nbytes=999))
    assert tracker.schedule.due_at == 110.0
    tracker.finish_delivery(Delivery(None, MOVE, nbytes=1))
    assert tracker.schedule.due_at == 100.0
