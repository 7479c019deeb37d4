"""What each operation does to an item."""

from __future__ import annotations

import pytest

from tests.engine.helpers import (
    ADD,
    APPEND,
    DECREMENT,
    DELETE,
    INCREMENT,
    MAXIMUM,
    PREPEND,
    REPLACE,
    SET,
    TOUCH,
    delta,
    failures_of,
    get_item,
    new_partition,
    put,
    read,
    request,
    send,
    value_of,
)
from upr_protocol.chunk import Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Operation
from upr_protocol.limits import VALUE_BYTES_MAX


def test_add_replace_delete() -> None:
    partition = new_partition()
    assert failures_of(partition, request(REPLACE, value=b"0")) == [(0, Status.NOT_FOUND)]
    assert failures_of(partition, request(ADD, value=b"1")) == []
    assert failures_of(partition, request(ADD, value=b"2")) == [(0, Status.EXISTS)]
    assert value_of(partition) == b"1"
    assert failures_of(partition, request(REPLACE, value=b"3")) == []
    assert value_of(partition) == b"3"
    assert failures_of(partition, request(DELETE)) == []
    assert value_of(partition) is None
    assert failures_of(partition, request(DELETE)) == [(0, Status.NOT_FOUND)]
    assert failures_of(partition, request(ADD, value=b"4")) == []
    assert value_of(partition) == b"4"


def test_append_and_prepend_keep_flags_and_expiry() -> None:
    partition = new_partition()
    assert failures_of(partition, request(APPEND), request(PREPEND)) == [
        (0, Status.NOT_FOUND),
        (1, Status.NOT_FOUND),
    ]
    send(partition, Mutation(SET, b"k", b"2", flags=9, expiry=5000))
    send(partition, Mutation(APPEND, b"k", b"3", flags=1, expiry=1), request(PREPEND, value=b"1"))
    item = get_item(partition, b"k")
    assert item is not None
    assert (item.value, item.flags, item.expiry) == (b"123", 9, 5000)


def test_set_replaces_flags_and_expiry() -> None:
    partition = new_partition()
    send(partition, Mutation(SET, b"k", b"2", flags=9, expiry=5000))
    put(partition, b"k")
    item = get_item(partition, b"k")
    assert item is not None
    assert (item.flags, item.expiry) == (0, 0)


def test_touch_changes_the_expiry_only() -> None:
    partition = new_partition()
    assert failures_of(partition, request(TOUCH, expiry=9)) == [(0, Status.NOT_FOUND)]
    send(partition, Mutation(SET, b"k", b"2", flags=9, expiry=5000))
    send(partition, Mutation(TOUCH, b"k", b"ignored", flags=1, expiry=6000))
    item = get_item(partition, b"k")
    assert item is not None
    assert (item.value, item.flags, item.expiry, item.seq) == (b"2", 9, 6000, 2)


def test_a_value_may_not_grow_over_the_limit() -> None:
    partition = new_partition()
    assert failures_of(partition, request(SET, value=bytes(VALUE_BYTES_MAX))) == []
    too_large = [(0, Status.TOO_LARGE), (1, Status.TOO_LARGE)]
    assert (
        failures_of(partition, request(APPEND, value=b"!"), request(PREPEND, value=b"!"))
        == too_large
    )
    assert failures_of(partition, request(APPEND)) == []
    item = get_item(partition, b"k")
    assert item is not None
    assert len(item.value) == VALUE_BYTES_MAX
    assert read(partition) == "(0,2] k@2 ."


def test_an_operation_that_expects_another_cas_is_refused() -> None:
    partition = new_partition()
    cas = put(partition, b"k").first_cas
    for op in (SET, REPLACE, DELETE, APPEND, PREPEND, TOUCH):
        assert failures_of(partition, request(op, cas=cas + 1)) == [(0, Status.CAS_MISMATCH)], op
        assert failures_of(partition, request(op, b"missing", cas=cas)) == [(0, Status.NOT_FOUND)]
    for op in (INCREMENT, DECREMENT):
        assert failures_of(partition, request(op, value=delta(), cas=1)) == [
            (0, Status.CAS_MISMATCH)
        ]
        assert failures_of(partition, request(op, b"missing", delta(), cas=1)) == [
            (0, Status.NOT_FOUND)
        ]
    assert failures_of(partition, request(ADD, cas=cas)) == [(0, Status.EXISTS)]
    assert failures_of(partition, request(ADD, b"missing", cas=cas)) == [(0, Status.NOT_FOUND)]
    assert partition.high_seq == 1
    # The first success changes the CAS that the second expects.
    result = send(partition, request(SET, value=b"1", cas=cas), request(SET, value=b"2", cas=cas))
    assert result.failures == [(1, Status.CAS_MISMATCH)]
    assert value_of(partition) == b"1"
    assert failures_of(partition, request(DELETE, cas=result.first_cas)) == []


@pytest.mark.parametrize(
    ("op", "value_before", "by", "value_after"),
    [
        (INCREMENT, b"5", 3, 8),
        (INCREMENT, b"9", 1, 10),
        (INCREMENT, b"007", 1, 8),
        (INCREMENT, b"%d" % MAXIMUM, 1, 0),
        (INCREMENT, b"%d" % MAXIMUM, MAXIMUM, MAXIMUM - 1),
        (DECREMENT, b"5", 3, 2),
        (DECREMENT, b"3", 5, 0),
        (DECREMENT, b"10", 1, 9),
        (DECREMENT, b"%d" % MAXIMUM, MAXIMUM, 0),
    ],
)
def test_counters_count_from_their_value_and_keep_flags_and_expiry(
    op: Operation, value_before: bytes, by: int, value_after: int
) -> None:
    partition = new_partition()
    send(partition, Mutation(SET, b"k", value_before, flags=4, expiry=5000))
    result = send(partition, Mutation(op, b"k", delta(by, initial=77), flags=1, expiry=1))
    assert result.counters == [(0, value_after)]
    item = get_item(partition, b"k")
    assert item is not None
    assert (item.value, item.flags, item.expiry) == (b"%d" % value_after, 4, 5000)


@pytest.mark.parametrize(
    "text",
    [b"", b"x", b"-1", b"+1", b" 1", b"1 ", b"1.0", b"%d" % (1 << 64), b"0" * 21, "²".encode()],
)
def test_a_value_that_is_not_a_number_cannot_be_incremented(text: bytes) -> None:
    partition = new_partition()
    put(partition, b"k", value=text)
    for op in (INCREMENT, DECREMENT):
        assert failures_of(partition, request(op, value=delta())) == [(0, Status.NOT_A_NUMBER)]
    assert value_of(partition) == text


def test_a_missing_counter_starts_at_its_initial_value_or_not_at_all() -> None:
    partition = new_partition()
    row = Mutation(INCREMENT, b"k", delta(5, initial=30), flags=2, expiry=9000)
    result = send(partition, request(INCREMENT, value=delta(create=False)), row, row)
    assert result.failures == [(0, Status.NOT_FOUND)]
    assert result.counters == [(1, 30), (2, 35)]
    item = get_item(partition, b"k")
    assert item is not None
    assert (item.value, item.flags, item.expiry, item.seq) == (b"35", 2, 9000, 2)
