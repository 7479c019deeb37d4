"""Keys that memory has forgotten: what is read from disk, and what of it counts. One rule at a
time; `test_disk.py` draws them together."""

from __future__ import annotations

import msgspec
import pytest

from tests.engine.helpers import NOW, free, get_item, new_partition, put, request, send
from tests.engine.naive_disk import NaiveDisk
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_server.engine import (
    NOTHING_FETCHED,
    FetchedItems,
    FetchRequest,
    Partition,
    WriterToken,
    batch_of,
)
from upr_server.engine.partition import EXPIRE_MAX
from upr_server.engine.publisher_answers import BATCHES_MAX


def stored(partition: Partition, disk: NaiveDisk, *, evict: bool = False) -> None:
    """The disk has all there is, its index knows it, and memory has none of it."""
    disk.read(partition, 1000)
    disk.commit(partition, 1000)
    disk.advance_index(1000)
    disk.report(partition)
    free(partition)
    while evict and partition.eviction.evict(100):
        partition.check_invariants()


def evict_tombstones(partition: Partition) -> None:
    """Sweeps for tombstones, in steps, until nothing is left to do."""
    while partition.eviction.evict_tombstones(7, partition.high_seq):
        partition.check_invariants()


def test_tombstones_that_the_index_knows_leave_the_table_and_items_stay() -> None:
    partition, disk = new_partition(), NaiveDisk()
    keys = [b"%d" % index for index in range(40)]
    for key in keys:
        put(partition, key)
    send(partition, *(request(Operation.DELETE, key) for key in keys[:20]))
    evict_tombstones(partition)
    assert len(partition.table) == 40, "the disk does not know them yet"
    stored(partition, disk)
    evict_tombstones(partition)
    assert [key for key, _, _ in sorted(partition.table)] == sorted(keys[20:])
    assert partition.item_count == 20
    # All items are in the table still: the disk is not asked about a key that is not.
    rows = [request(Operation.ADD, keys[0]), request(Operation.REPLACE, b"new")]
    assert missing_for(partition, *rows) == []
    assert send(partition, *rows).failures == [(1, Status.NOT_FOUND)]


def test_a_sweep_for_tombstones_waits_until_it_is_worth_its_cost() -> None:
    partition, disk = new_partition(), NaiveDisk()
    keys = [b"%d" % index for index in range(64)]
    for key in keys:
        put(partition, key)
    send(partition, *(request(Operation.DELETE, key) for key in keys[:4]))
    stored(partition, disk)
    evict_tombstones(partition)
    assert partition.table.tombstone_count == 4, "a sixteenth of the keys: too few"
    send(partition, request(Operation.DELETE, keys[4]))
    evict_tombstones(partition)
    assert partition.table.tombstone_count == 5, "the index does not know the newest"
    send(partition, *(request(Operation.DELETE, key) for key in keys[5:10]))
    stored(partition, disk)
    evict_tombstones(partition)
    assert partition.table.tombstone_count == 0
    partition.check_invariants()


def missing_for(
    partition: Partition, *rows: Mutation, now: float = NOW, fetched: FetchedItems = NOTHING_FETCHED
) -> list[FetchRequest]:
    evaluation = partition.evaluate(batch_of(Chunk.build(rows)), now=now)
    return [] if evaluation is None else evaluation.step(fetched)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Operation.ADD, [(1, Status.EXISTS)]),
        (Operation.REPLACE, []),
        (Operation.DELETE, []),
    ],
)
def test_an_item_that_a_batch_stores_expired_hides_no_other(
    op: Operation, expected: list[tuple[int, Status]]
) -> None:
    partition = new_partition()
    put(partition, b"on disk")
    stored(partition, NaiveDisk())
    result = send(
        partition,
        request(Operation.SET, b"gone at once", expiry=1),
        request(op, b"on disk"),
        request(Operation.ADD, b"gone at once"),
    )
    assert result.failures == expected
    partition.check_invariants()


def test_existence_is_read_from_disk_while_expired_items_wait_for_deletion() -> None:
    partition, disk = new_partition(), NaiveDisk()
    keys = [b"%d" % index for index in range(EXPIRE_MAX + 2)]
    send(partition, *(request(Operation.SET, key, expiry=int(NOW) + 5) for key in keys))
    put(partition, b"stays")
    stored(partition, disk)
    rows = [request(Operation.ADD, keys[-1]), request(Operation.ADD, b"stays")]
    fetch_requests = missing_for(partition, *rows, now=NOW + 10)
    assert [(request.key, request.seq) for request in fetch_requests] == [
        (keys[-1], len(keys)),
        (b"stays", len(keys) + 1),
    ]
    result = partition.mutate(
        batch_of(Chunk.build(rows)), now=NOW + 10, fetched_items=disk.find(fetch_requests)
    )
    assert result.failures == [(1, Status.EXISTS)]
    partition.check_invariants()


def test_a_fetch_request_covers_the_most_demanding_operation_on_its_key() -> None:
    partition = new_partition()
    put(partition, b"k", value=b"5")
    stored(partition, NaiveDisk(), evict=True)
    add = request(Operation.ADD)
    increment = request(Operation.INCREMENT, value=CounterDelta(1).encode())
    assert missing_for(partition, add) == [FetchRequest(b"k", 0, False)]
    for rows in ([add, increment], [increment, add], [add, request(Operation.SET, cas=7)]):
        assert missing_for(partition, *rows) == [FetchRequest(b"k", 0, True)]


@pytest.mark.parametrize("evict", [False, True])
def test_existence_is_not_taken_for_a_value(evict: bool) -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"k", value=b"5")
    stored(partition, disk, evict=evict)
    exists = disk.find([FetchRequest(b"k", 0, False)])
    increment = request(Operation.INCREMENT, value=CounterDelta(1).encode())
    fetch_requests = missing_for(partition, increment, fetched=exists)
    assert fetch_requests == [FetchRequest(b"k", 0 if evict else 1, True)]
    assert partition.missing_keys([b"k"], NOW, exists) == fetch_requests
    batch = batch_of(Chunk.build([increment]))
    result = partition.mutate(batch, now=NOW, fetched_items=disk.find(fetch_requests))
    assert result.counters == [(0, 6)]


def test_an_item_that_leaves_memory_between_two_slices_is_read_from_disk() -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"first", b"second", value=b"1")
    rows = [request(Operation.APPEND, key, b"2") for key in (b"first", b"second")]
    batch = batch_of(Chunk.build(rows))
    evaluation = partition.evaluate(batch, now=NOW)
    assert evaluation is not None
    while evaluation.result.content_version is None:
        assert evaluation.step(cost_max=1) == []
    assert not evaluation.is_done, "the first outcome is known, and the second is not"
    stored(partition, disk, evict=True)
    fetch_requests = evaluation.step()
    assert {fetch_request.key for fetch_request in fetch_requests} == {b"first", b"second"}
    assert evaluation.step(disk.find(fetch_requests)) == []
    assert partition.mutate(batch, now=NOW, evaluation=evaluation).last_seq == 4
    for key in (b"first", b"second"):
        item = get_item(partition, key)
        assert item is not None
        assert item.value == b"12"


def test_that_a_key_was_missing_does_not_count_once_it_was_set() -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"other")
    stored(partition, disk, evict=True)
    pin = partition.eviction.pin()
    fetch_requests = partition.missing_keys([b"k"], NOW)
    fetched = disk.find(fetch_requests)
    assert fetched == {b"k": None}
    put(partition, b"k", value=b"7")
    stored(partition, disk, evict=True)
    fetch_requests = partition.missing_keys([b"k"], NOW, fetched)
    assert fetch_requests == [FetchRequest(b"k", 2, True)]
    item = get_item(partition, b"k", fetched=disk.find(fetch_requests))
    assert item is not None
    assert item.value == b"7"
    partition.eviction.unpin(pin)


def test_an_older_version_that_was_found_is_not_used() -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"k", value=b"5")
    stored(partition, disk)
    pin = partition.eviction.pin()
    fetched = disk.find([FetchRequest(b"k", 1, True)])
    put(partition, b"k", value=b"7")
    stored(partition, disk, evict=True)
    fetch_requests = partition.missing_keys([b"k"], NOW, fetched)
    assert fetch_requests == [FetchRequest(b"k", 2, True)], "the pin holds it in the table"
    partition.eviction.unpin(pin)
    stored(partition, disk, evict=True)
    fetch_requests = partition.missing_keys([b"k"], NOW)
    assert fetch_requests == [FetchRequest(b"k", 0, True)]
    item = get_item(partition, b"k", fetched=disk.find(fetch_requests))
    assert item is not None
    assert item.value == b"7"


def test_a_partition_that_begins_again_forgets_keys_up_to_the_number_of_the_last_sweep() -> None:
    """It has undone everything, and the index has come to the same number again."""
    partition = new_partition()
    for _ in range(2):
        put(partition, b"k")
        stored(partition, NaiveDisk(), evict=True)
        assert not len(partition.table)
        partition.truncate(SeqNo(0))


def test_a_pin_is_broken_when_the_partition_begins_again() -> None:
    partition = new_partition()
    put(partition, b"k")
    stored(partition, NaiveDisk())
    eviction = partition.eviction
    before = eviction.pin()
    assert eviction.is_pinned(before)
    partition.restart_at(SeqNo(1))
    after = eviction.pin()
    assert not eviction.is_pinned(before)
    assert eviction.is_pinned(after)
    assert eviction.pin_count == 2
    # It keeps nothing in the table either: the index may have been truncated.
    partition.truncate(SeqNo(0))
    assert eviction.pinned_seq == 0
    for pin in before, after:
        eviction.unpin(pin)
        assert not eviction.is_pinned(pin)
    assert not eviction.pin_count


def test_an_index_that_lags_behind_expires_nothing() -> None:
    before, disk = new_partition(), NaiveDisk()
    before.repeated_batches.answers.track_unsaved()
    send(before, request(Operation.SET, expiry=int(NOW) + 5))
    disk.read(before, 1000)
    disk.commit(before, 1)
    disk.advance_index(1)
    put(before, b"k", value=b"newer")
    disk.read(before, 1000)
    disk.commit(before, 1)
    after = Partition(PartitionId(0), lambda: HistoryId(9), image=disk.image(before.failover_log))
    assert not after.eviction.is_index_ready
    early = after.eviction.pin()
    (due,) = disk.due(NOW + 10)
    disk.advance_index(1)
    disk.report(after)
    assert after.eviction.is_index_ready
    assert not after.expire_stored(due.key, due.seq, NOW + 10), "it was written to since"
    after.eviction.unpin(early)
    item = get_item(after, b"k", NOW + 10, disk.find([FetchRequest(b"k", 0, True)]))
    assert item is not None
    assert item.value == b"newer"


def test_an_expired_item_that_only_the_disk_knows_becomes_a_deletion_once() -> None:
    partition, disk = new_partition(), NaiveDisk()
    send(partition, request(Operation.SET, expiry=int(NOW) + 5))
    stored(partition, disk, evict=True)
    assert partition.next_expiry() is None
    pin = partition.eviction.pin()
    (due,) = disk.due(NOW + 10)
    assert partition.expire_stored(due.key, due.seq, NOW + 10)
    assert not partition.expire_stored(due.key, due.seq, NOW + 10)
    partition.eviction.unpin(pin)
    stored(partition, disk, evict=True)
    assert [row.op for row in disk.log] == [Operation.SET, Operation.EXPIRE]
    assert not disk.due(NOW + 10)
    partition.check_invariants()


def test_a_reply_ends_before_the_first_item_that_was_not_read() -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"a", b"b", b"c")
    stored(partition, disk, evict=True)
    put(partition, b"d")
    keys = [b"d", b"a", b"b", b"c", b"d", b"a"]
    fetch_requests = partition.missing_keys(keys, NOW)
    assert [request.key for request in fetch_requests] == [b"a", b"b", b"c"]
    fetched = disk.find(fetch_requests[:2])
    assert not partition.missing_keys(keys, NOW, fetched)
    rows = partition.get(keys, NOW, fetched_items=fetched)
    assert [row.key for row in rows] == [b"d", b"a", b"b"]
    assert [request.key for request in partition.missing_keys(keys[3:], NOW, fetched)] == [b"c"]


def test_a_restart_remembers_the_answers_within_the_window() -> None:
    before, disk = new_partition(), NaiveDisk()
    before.repeated_batches.answers.track_unsaved()
    batch = Chunk.build([request(Operation.SET)])
    tokens = [WriterToken(bytes(16), index) for index in range(1, BATCHES_MAX + 7)]
    answers = []
    for token in tokens:
        answers.append(before.mutate(batch_of(batch, token), now=NOW))
        if token.counter % 20 == 0:
            disk.read(before, 1000)
            disk.commit(before, 1)
    disk.read(before, 1000)
    disk.commit(before, 1)
    after = Partition(PartitionId(0), lambda: HistoryId(9), image=disk.image(before.failover_log))
    for partition in (before, after):
        for token, answer in zip(tokens, answers, strict=True):
            again = partition.mutate(batch_of(batch, token), now=NOW)
            if token.counter <= 6:
                assert again.status is Status.TOKEN_TOO_OLD
            else:
                assert again == msgspec.structs.replace(answer, is_repeated=True)
        assert partition.high_seq == len(tokens)
        partition.check_invariants()
