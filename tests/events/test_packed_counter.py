"""The packed counter: what the operations come to, and why a counter belongs to an incarnation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.bucket_event import BucketFate
from upr_server.events.packed_counter import (
    IDLE,
    UPDATE,
    unpack,
    with_creation,
    with_deletion,
)

OPERATIONS: Final[dict[str, Callable[[int], int]]] = {
    "create": with_creation,
    "update": lambda value: value + UPDATE,
    "delete": with_deletion,
}


def applied(value: int, *operations: str) -> int:
    for operation in operations:
        value = OPERATIONS[operation](value)
    return value


@st.composite
def lives(draw: st.DrawFn) -> Sequence[str]:
    """What one incarnation can meet, from its creation or some time after it on."""
    life = ["create"] if draw(st.booleans()) else []
    life += ["update"] * draw(st.integers(0, 5))
    return life + (["delete"] if draw(st.booleans()) else [])


def test_the_values_equal_the_table() -> None:
    assert unpack(IDLE) == (BucketFate.NONE, 0)
    assert applied(IDLE, "create") == 3
    assert applied(IDLE, "update") == 6
    assert applied(IDLE, "delete") == 1
    assert applied(IDLE, "create", "update", "update") == 11
    assert unpack(11) == (BucketFate.CREATED, 2)
    assert applied(11, "delete") == 1


def test_a_late_update_hides_a_creation_where_both_have_one_value() -> None:
    # A maximum does not lower a value: with one value for a bucket's name, the creation would read
    # as an update.
    assert unpack(applied(IDLE, "update", "create")) == (BucketFate.NONE, 1)
    # With a value of its own the creation is told.
    assert unpack(applied(IDLE, "create")) == (BucketFate.CREATED, 0)


@given(lives())
def test_within_an_incarnation_nothing_is_misread(life: Sequence[str]) -> None:
    fate, updates = unpack(applied(IDLE, *life))
    if "delete" in life:
        assert (fate, updates) == (BucketFate.DELETED, 0)
    else:
        assert fate is (BucketFate.CREATED if "create" in life else BucketFate.NONE)
        assert updates == life.count("update")
