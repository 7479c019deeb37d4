"""When a resume state is saved."""

from __future__ import annotations

from upr_protocol.client.core.delivery_tracker import (
    Delivery,
    SaveLimits,
    SavePriority,
    SaveSchedule,
)
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId

LIMITS = SaveLimits(complete_interval_s=2.0, interval_s=10.0, nbytes=1000)
MOVE = (PartitionId(1), Position())
NEVER = float("inf")


def test_a_delivery_without_a_position_needs_no_save() -> None:
    schedule = SaveSchedule(LIMITS, 100.0)
    assert not schedule.has_unsaved
    assert schedule.due_at == NEVER
    schedule.add_processed(Delivery(None))
    assert schedule.due_at == NEVER


def test_the_highest_priority_decides_when_to_save() -> None:
    schedule = SaveSchedule(LIMITS, 100.0)
    schedule.add_processed(Delivery(None, MOVE))
    assert schedule.due_at == 110.0
    schedule.add_processed(Delivery(None, MOVE, priority=SavePriority.COMPLETE))
    assert schedule.due_at == 102.0
    schedule.add_processed(Delivery(None, MOVE))
    assert schedule.due_at == 102.0
    schedule.add_processed(Delivery(None, MOVE, priority=SavePriority.URGENT))
    assert schedule.due_at == 100.0
    schedule.saved(105.0)
    assert schedule.due_at == NEVER
    schedule.add_processed(Delivery(None, MOVE))
    assert schedule.due_at == 115.0


def test_enough_bytes_make_a_save_due() -> None:
    schedule = SaveSchedule(LIMITS, 100.0)
    schedule.add_processed(Delivery(None, MOVE, nbytes=999))
    assert schedule.due_at == 110.0
    schedule.add_processed(Delivery(None, MOVE, nbytes=1))
    assert schedule.due_at == 100.0
