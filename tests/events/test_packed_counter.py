"""The packed counter: which values its operations give, and why each incarnation of a bucket has
its own."""

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
def incarnation_operations(draw: st.DrawFn) -> Sequence[str]:
    """The operations that a counter may see of one incarnation, from its creation or from later
    on."""
    operations = ["create"] if draw(st.booleans()) else []
    operations += ["update"] * draw(st.integers(0, 5))
    return operations + (["delete"] if draw(st.booleans()) else [])


def test_the_values_equal_the_table() -> None:
    assert unpack(IDLE) == (BucketFate.NONE, 0)
    assert applied(IDLE, "create") == 3
    assert applied(IDLE, "update") == 6
    assert applied(IDLE, "delete") == 1
    assert applied(IDLE, "create", "update", "update") == 11
    assert unpack(11) == (BucketFate.CREATED, 2)
    assert applied(11, "delete") == 1


def test_a_late_update_hides_a_creation_where_both_have_one_value() -> None:
    # A creation takes the maximum of two values, so it does not lower the counter. If two
    # incarnations shared a counter, the creation would read as an update.
    assert unpack(applied(IDLE, "update", "create")) == (BucketFate.NONE, 1)
    # With a counter of its own, the creation is reported.
    assert unpack(applied(IDLE, "create")) == (BucketFate.CREATED, 0)


@given(incarnation_operations())
def test_within_an_incarnation_nothing_is_misread(operations: Sequence[str]) -> None:
    fate, updates = unpack(applied(IDLE, *operations))
    if "delete" in operations:
        assert (fate, updates) == (BucketFate.DELETED, 0)
    else:
        assert fate is (BucketFate.CREATED if "create" in operations else BucketFate.NONE)
        assert updates == operations.count("update")
