"""Items that expire: how they read, and when they become deletions."""

from __future__ import annotations

import pytest

from tests.engine.helpers import (
    ADD,
    APPEND,
    DELETE,
    INCREMENT,
    PREPEND,
    REPLACE,
    SET,
    TOUCH,
    delta,
    failures_of,
    items,
    new_partition,
    put,
    read,
    request,
    send,
    transcript,
    value_of,
)
from upr_protocol.errors import Status
from upr_protocol.ids import Operation, PartitionState, SeqNo


def test_an_expired_item_reads_as_missing_at_once() -> None:
    partition = new_partition()
    send(partition, request(SET, value=b"v", expiry=1001))
    assert value_of(partition, now=1000.9) == b"v"
    assert value_of(partition, now=1001) is None
    assert [row.op for row in partition.get([b"k"], 1001)] == [DELETE]
    assert partition.high_seq == 1, "until the deletion has its number, a read just says missing"


def test_expired_items_become_deletions_in_the_order_of_their_times() -> None:
    partition = new_partition()
    woken: list[int] = []
    send(
        partition,
        request(SET, b"late", expiry=1003),
        request(SET, b"soon", expiry=1001),
        request(SET, b"never"),
        request(SET, b"changed", expiry=1001),
        request(SET, b"gone", expiry=1001),
    )
    put(partition, b"changed")
    send(partition, request(DELETE, b"gone"))
    cursor = partition.manager.register("c", SeqNo(7), on_ready=lambda: woken.append(1)).cursor
    cursor.next()
    assert partition.next_expiry() == 1001
    assert partition.expire(1000.5) == 0
    assert partition.expire(1001) == 1
    assert woken == [1]
    assert partition.next_expiry() == 1003
    assert partition.expire(5000) == 1
    assert partition.next_expiry() is None
    assert transcript(items(cursor)) == "(7,9] ~soon@8 ~late@9 ."


def test_a_write_to_an_expired_item_comes_after_its_deletion() -> None:
    partition = new_partition()
    send(partition, request(SET, b"a", b"1", expiry=1001), request(SET, b"b", b"1", expiry=1001))
    read(partition)
    result = send(
        partition, request(ADD, b"a"), request(REPLACE, b"b"), request(SET, b"c"), now=1002
    )
    assert result.failures == [(1, Status.NOT_FOUND)]
    assert (result.first_seq, result.last_seq) == (5, 6), "the two deletions have 3 and 4"
    assert read(partition, 2) == "(2,6] ~b@4 a@5 c@6 ."


def test_a_plain_write_to_an_expired_item_comes_after_its_deletion() -> None:
    partition = new_partition()
    send(partition, request(SET, b"a", b"1", expiry=1001), request(SET, b"b", b"1", expiry=1001))
    read(partition)
    result = put(partition, b"a", now=1002)
    assert (result.first_seq, result.last_seq) == (5, 5), "the two deletions have 3 and 4"
    assert read(partition, 2) == "(2,5] ~b@4 a@5 ."


@pytest.mark.parametrize("op", [REPLACE, DELETE, APPEND, PREPEND, TOUCH])
def test_an_expired_item_is_missing_for_writes(op: Operation) -> None:
    partition = new_partition()
    cas = send(partition, request(SET, expiry=1001)).first_cas
    assert failures_of(partition, request(op), now=1001) == [(0, Status.NOT_FOUND)]
    assert failures_of(partition, request(op, cas=cas), now=1001) == [(0, Status.NOT_FOUND)]


def test_an_item_that_arrives_expired_is_missing_within_its_batch() -> None:
    partition = new_partition()
    result = send(
        partition,
        request(SET, b"a", b"1", expiry=5),
        request(DELETE, b"a"),
        request(ADD, b"a", b"2"),
        request(INCREMENT, b"n", delta(1, initial=3)),
    )
    assert result.failures == [(1, Status.NOT_FOUND)]
    assert value_of(partition, b"a") == b"2"


def test_a_touched_item_lives_on() -> None:
    partition = new_partition()
    send(partition, request(SET, expiry=1001))
    send(partition, request(TOUCH, expiry=2000))
    assert partition.expire(1500) == 0
    assert value_of(partition, now=1500) == b""
    assert partition.next_expiry() == 2000


@pytest.mark.parametrize("batch", [10, 100])
def test_plain_batches_expire_too(batch: int) -> None:
    partition = new_partition()
    rows = [request(SET, b"%d" % n, expiry=1001 if n % 2 else 0) for n in range(batch)]
    send(partition, *rows)
    assert partition.expire(1001) == batch // 2
    assert partition.table.item_count == batch // 2
    partition.check_invariants()


def test_only_the_active_expires() -> None:
    partition = new_partition()
    send(partition, request(SET, expiry=1001))
    partition.state = PartitionState.REPLICA
    assert partition.expire(2000) == 0
    assert value_of(partition, now=2000) is None
    partition.state = PartitionState.ACTIVE
    assert partition.expire(2000) == 1


def test_expiring_is_done_in_parts() -> None:
    partition = new_partition()
    rows = [request(SET, b"%d" % index, expiry=1001) for index in range(1500)]
    send(partition, *rows)
    assert [partition.expire(1001) for _ in range(7)] == [256] * 5 + [220, 0]
