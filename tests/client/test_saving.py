"""When to save."""

from __future__ import annotations

from upr_protocol.client.delivery import Delivery, Weight
from upr_protocol.client.saving import SaveLimits, SavePlan
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId

LIMITS = SaveLimits(complete_interval_s=2.0, interval_s=10.0, nbytes=1000)
MOVE = (PartitionId(1), Position())
NEVER = float("inf")


def test_nothing_to_save() -> None:
    plan = SavePlan(LIMITS, 100.0)
    assert not plan.dirty
    assert plan.due_at == NEVER
    plan.dealt_with(Delivery(None))
    assert plan.due_at == NEVER


def test_the_heaviest_counts() -> None:
    plan = SavePlan(LIMITS, 100.0)
    plan.dealt_with(Delivery(None, MOVE))
    assert plan.due_at == 110.0
    plan.dealt_with(Delivery(None, MOVE, weight=Weight.COMPLETE))
    assert plan.due_at == 102.0
    plan.dealt_with(Delivery(None, MOVE))
    assert plan.due_at == 102.0
    plan.dealt_with(Delivery(None, MOVE, weight=Weight.HEAVY))
    assert plan.due_at == 100.0
    plan.saved(105.0)
    assert plan.due_at == NEVER
    plan.dealt_with(Delivery(None, MOVE))
    assert plan.due_at == 115.0


def test_bytes_count() -> None:
    plan = SavePlan(LIMITS, 100.0)
    plan.dealt_with(Delivery(None, MOVE, nbytes=999))
    assert plan.due_at == 110.0
    plan.dealt_with(Delivery(None, MOVE, nbytes=1))
    assert plan.due_at == 100.0
