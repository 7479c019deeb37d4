"""The packed counter: what the operations come to, and why the incarnation is in the key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.bucket_event import BucketFate
from upr_server.events.counter import (
    CREATED,
    DELETED,
    IDLE,
    UPDATED,
    is_idle,
    merged,
    pack,
    unpack,
)

Operation = str
"""`create`, `update` or `delete`."""


def applied(value: int, *operations: Operation) -> int:
    """What a store makes of it."""
    for operation in operations:
        if operation == "create":
            value = max(value, CREATED)
        elif operation == "update":
            value += UPDATED
        else:
            value = min(value, DELETED) if value else DELETED
    return value


@st.composite
def lives(draw: st.DrawFn) -> list[Operation]:
    """What one incarnation can meet, from its creation or some time after it on."""
    life = ["create"] if draw(st.booleans()) else []
    life += ["update"] * draw(st.integers(0, 5))
    return life + (["delete"] if draw(st.booleans()) else [])


def test_the_numbers_are_those_of_the_seed() -> None:
    assert unpack(IDLE) == (BucketFate.NONE, 0)
    assert applied(IDLE, "create") == 3
    assert applied(IDLE, "update") == 6
    assert applied(IDLE, "delete") == 1
    assert applied(IDLE, "create", "update", "update") == 11
    assert unpack(11) == (BucketFate.CREATED, 2)
    assert applied(11, "delete") == 1


def test_a_key_that_is_not_there_is_idle_too() -> None:
    assert is_idle(0)
    assert is_idle(IDLE)
    assert unpack(0) == unpack(IDLE)
    assert not any(is_idle(value) for value in (1, 3, 4, 5, 6, 7))
    assert unpack(applied(0, "update", "update")) == (BucketFate.NONE, 2)


def test_a_late_update_hides_a_creation_where_both_have_one_value() -> None:
    # The seed says that a creation resets a higher value to 3. A maximum does not: with one value
    # for a bucket's name, what was created would read as updated.
    assert applied(IDLE, "delete") == DELETED
    polled = IDLE
    assert unpack(applied(polled, "update", "create")) == (BucketFate.NONE, 1)
    # With an incarnation in the key the creation has a value of its own.
    late, created = applied(polled, "update"), applied(0, "create")
    assert unpack(late) == (BucketFate.NONE, 1)
    assert unpack(created) == (BucketFate.CREATED, 0)


@given(lives(), st.sampled_from([0, IDLE]))
def test_within_an_incarnation_nothing_is_misread(life: list[Operation], start: int) -> None:
    fate, updates = unpack(applied(start, *life))
    if "delete" in life:
        assert (fate, updates) == (BucketFate.DELETED, 0)
    else:
        assert fate is (BucketFate.CREATED if "create" in life else BucketFate.NONE)
        assert updates == life.count("update")


@given(lives(), st.integers(0, 7))
def test_what_is_put_back_reads_as_if_it_had_not_been_taken(
    life: list[Operation], cut: int
) -> None:
    taken, since = applied(IDLE, *life[:cut]), applied(IDLE, *life[cut:])
    whole = unpack(applied(IDLE, *life))
    fate, updates = unpack(merged(taken, since))
    assert fate is whole[0]
    assert updates == whole[1] or fate is BucketFate.DELETED


@given(st.sampled_from(BucketFate), st.integers(0, 1 << 60))
def test_packing(fate: BucketFate, updates: int) -> None:
    assert unpack(pack(fate, updates)) == (fate, updates)
