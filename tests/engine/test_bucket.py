"""Buckets: names, limits, accounting, and what making them costs."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.engine.helpers import cursor_at, items, new_bucket, persist, put, read, request, send
from upr_protocol.chunk import CounterDelta, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_server.engine import (
    STEP_PARTITIONS,
    BackfillNeeded,
    Bucket,
    BucketError,
    Buckets,
    MemoryAction,
    WriterToken,
    batch_of,
)
from upr_server.engine.bucket import FREED_SNAPSHOTS_MAX
from upr_server.engine.memory_policy import QUOTA_BYTES_MIN


def new_buckets() -> Buckets:
    ids = count(1)
    return Buckets(lambda: HistoryId(next(ids)))


def test_buckets_are_made_listed_and_deleted() -> None:
    buckets = new_buckets()
    second = buckets.create("second")
    first = buckets.create("First-1.x_y", partition_count=3, quota_bytes=QUOTA_BYTES_MIN)
    assert list(buckets) == [first, second]
    assert len(buckets) == 2
    assert "second" in buckets
    assert buckets.get("second") is second
    assert (len(second.partitions), len(first.partitions)) == (64, 3)
    assert first.partition(PartitionId(2)) is first.partitions[2]
    assert first.partition(PartitionId(3)) is None
    assert buckets.delete("second") is second
    assert buckets.get("second") is None
    with pytest.raises(BucketError, match=r"^there is no bucket") as refusal:
        buckets.delete("second")
    assert refusal.value.status is Status.NO_BUCKET
    with pytest.raises(BucketError, match="exists") as present:
        buckets.create("First-1.x_y")
    assert present.value.status is Status.BUCKET_EXISTS
    assert repr(first) == "<Bucket 'First-1.x_y' of 3 partitions>"


def test_every_partition_has_a_history_of_its_own() -> None:
    bucket = new_buckets().create("b")
    assert len({partition.failover_log.current for partition in bucket.partitions}) == 64


@pytest.mark.parametrize("name", ["", ".x", "a/b", "ä", "a b", "a\n", "a\0", "x" * 101])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(BucketError, match="invalid bucket name") as refusal:
        new_buckets().create(name)
    assert refusal.value.status is Status.BAD_ARGUMENT


@pytest.mark.parametrize("name", ["x", "x" * 100, "-", "_.", "0"])
def test_names_that_are_allowed(name: str) -> None:
    assert new_buckets().create(name, 1).name == name


@pytest.mark.parametrize("arguments", [(0,), (1025,), (64, QUOTA_BYTES_MIN - 1)])
def test_arguments_out_of_range_are_refused(arguments: tuple[Any, ...]) -> None:
    buckets = new_buckets()
    with pytest.raises(BucketError) as refusal:
        buckets.create("b", *arguments)
    assert refusal.value.status is Status.BAD_ARGUMENT
    assert len(buckets) == 0


def test_memory_is_counted_by_kind() -> None:
    bucket = new_bucket(3)
    assert bucket.memory.total == 0, "an idle partition holds nothing"
    first, second, _ = bucket.partitions
    put(first, *(b"%d" % index for index in range(100)))
    send(second, request(Operation.INCREMENT, b"n", CounterDelta(1).encode(), expiry=5000))
    first.mutate(batch_of(chunk_of_plain_sets([], []), WriterToken(bytes(16), 1)), now=0)
    memory = bucket.memory.statistics()
    nothing_yet = {"encoded", "backfills"}
    assert {kind for kind in memory if not memory[kind]} == nothing_yet
    bucket.check_invariants()
    list(items(cursor_at(first)))
    list(items(cursor_at(second)))
    memory = bucket.memory.statistics()
    assert (memory["arrays"], memory["counters"]) == (0, 0)
    assert memory["encoded"]
    bucket.check_invariants()
    figures = bucket.statistics()
    assert (figures["items"], figures["cursors"], figures["snapshots"]) == (101, 5, 5)


def small_bucket() -> Bucket:
    ids = count(1)
    return Bucket(
        "b",
        new_history_id=lambda: HistoryId(next(ids)),
        partition_count=1,
        quota_bytes=QUOTA_BYTES_MIN,
    )


def test_over_its_quota_a_bucket_collapses_then_refuses_credit() -> None:
    bucket = small_bucket()
    partition = bucket.partitions[0]
    assert bucket.memory_action() is MemoryAction.NOTHING
    assert bucket.free_memory() is MemoryAction.NOTHING
    cursor = cursor_at(partition)
    for _ in range(9):
        put(partition, *(b"%d" % index for index in range(100)), value=bytes(960))
        list(items(cursor))
    assert bucket.memory_action() is MemoryAction.FREE, (
        "some is being freed; publishers need not wait"
    )
    while bucket.needs_collapse:
        assert bucket.free_memory() is MemoryAction.COLLAPSE
    assert bucket.memory_action() is MemoryAction.NOTHING
    assert bucket.free_memory() is MemoryAction.NOTHING
    put(partition, *(b"more %d" % index for index in range(900)), value=bytes(960))
    assert bucket.memory_action() is MemoryAction.REFUSE_CREDIT
    assert bucket.free_memory() is MemoryAction.REFUSE_CREDIT, "the disk has none of it"
    bucket.check_invariants()


def test_a_bucket_short_of_memory_frees_what_the_disk_has_before_it_refuses_credit() -> None:
    bucket = small_bucket()
    partition = bucket.partitions[0]
    put(partition, *(b"%d" % index for index in range(900)), value=bytes(960))
    assert bucket.free_memory() is MemoryAction.REFUSE_CREDIT
    assert bucket.memory_action() is MemoryAction.REFUSE_CREDIT, "until something has changed"
    persist(partition)
    assert bucket.free_memory() is MemoryAction.FREE
    assert bucket.free_memory() is MemoryAction.NOTHING
    assert bucket.memory_action() is MemoryAction.NOTHING
    assert partition.snapshots.oldest_start == 900


def test_one_step_frees_a_bounded_number_of_snapshots() -> None:
    bucket = new_buckets().create("many", 200, QUOTA_BYTES_MIN)
    for partition in bucket.partitions:
        put(partition, b"key", value=bytes(7000))
        persist(partition)
    freed_counts = []
    while bucket.memory_policy.is_short(bucket.memory):
        before = sum(not partition.snapshots.oldest_start for partition in bucket.partitions)
        assert bucket.free_memory() is MemoryAction.FREE
        freed_counts.append(
            before - sum(not partition.snapshots.oldest_start for partition in bucket.partitions)
        )
    assert max(freed_counts) == FREED_SNAPSHOTS_MAX
    assert len(freed_counts) > 1


def hold_mebibytes(bucket: Bucket, count: int) -> None:
    """Each partition gets one snapshot of so many segments of 1 MiB, which the disk has."""
    for partition in bucket.partitions:
        put(partition, *(b"%d" % index for index in range(count)), value=bytes(1024 * 1024))
        persist(partition)


def collapse_steps(bucket: Bucket) -> int:
    """How many steps it takes until there is nothing more to collapse."""
    step_count = 0
    while bucket.needs_collapse:
        bucket.collapse_step()
        bucket.check_invariants()
        step_count += 1
    return step_count


def test_one_step_gives_back_a_bounded_number_of_bytes() -> None:
    bucket = new_bucket(4)
    hold_mebibytes(bucket, 9)
    bucket.memory_policy.limit_bytes = 1
    assert bucket.free_memory() is MemoryAction.FREE
    assert [partition.snapshots.oldest_start for partition in bucket.partitions] == [0, 9, 9, 0]
    bucket.check_invariants()


def test_a_large_snapshot_is_freed_at_once_and_its_memory_given_back_in_steps() -> None:
    bucket = new_bucket()
    hold_mebibytes(bucket, 40)
    assert bucket.partitions[0].manager.free_oldest()
    assert bucket.memory.encoded == 0, "it does not count any more"
    assert collapse_steps(bucket) == 2, "after 16 MiB that were given back at once"


def test_the_memory_of_a_partition_that_begins_again_is_given_back_in_steps() -> None:
    bucket = new_bucket()
    hold_mebibytes(bucket, 40)
    bucket.partitions[0].restart_at(SeqNo(40))
    assert bucket.memory.encoded == 0
    assert collapse_steps(bucket) == 3


def test_the_memory_of_what_a_collapse_replaces_is_given_back_in_steps() -> None:
    bucket = new_bucket()
    hold_mebibytes(bucket, 20)
    hold_mebibytes(bucket, 20)
    while len(bucket.partitions[0].snapshots) > 2:
        assert bucket.collapse_step()
    assert collapse_steps(bucket) == 2, "after 16 of 40 MiB that were given back at once"


def test_the_memory_of_a_deleted_bucket_is_given_back_in_steps() -> None:
    bucket = new_bucket()
    hold_mebibytes(bucket, 40)
    assert len(list(bucket.release_partitions())) == 4


def test_cursors_are_dropped_only_when_nothing_else_can_be_freed() -> None:
    bucket = small_bucket()
    partition = bucket.partitions[0]
    slow = cursor_at(partition)
    put(partition, *(b"%d" % index for index in range(900)), value=bytes(960))
    persist(partition)
    partition.note_index_progress(SeqNo(900), 900)
    assert bucket.free_memory() is MemoryAction.FREE, "the keys are evicted"
    assert len(partition.table) == 0
    assert bucket.free_memory() is MemoryAction.DROP
    assert partition.snapshots.oldest_start == 900, "freed before the reader can come back to it"
    assert bucket.free_memory() is MemoryAction.NOTHING
    assert slow.next() == BackfillNeeded(SeqNo(0), SeqNo(900))
    bucket.check_invariants()


def test_over_its_quota_a_bucket_collapses_before_it_drops_cursors_or_refuses() -> None:
    bucket = small_bucket()
    partition = bucket.partitions[0]
    slow = cursor_at(partition)
    put(partition, b"old", value=bytes(960))
    persist(partition)
    for _ in range(12):
        put(partition, *(b"%d" % index for index in range(100)), value=bytes(960))
        read(partition, partition.snapshot_end)
    assert bucket.memory_policy.is_full(bucket.memory)
    assert bucket.free_memory() is MemoryAction.COLLAPSE
    while bucket.free_memory() is not MemoryAction.NOTHING:
        pass
    assert slow.next() != BackfillNeeded(SeqNo(0), SeqNo(1))
    bucket.check_invariants()


def test_evicting_items_with_expiry_times_frees_their_index_entries() -> None:
    bucket = small_bucket()
    partition = bucket.partitions[0]
    keys = [b"%d" % index for index in range(5000)]
    send(partition, *(request(Operation.SET, key, expiry=5000) for key in keys))
    persist(partition)
    partition.note_index_progress(SeqNo(5000), 5000)
    assert bucket.memory.expiries
    while (relief := bucket.free_memory()) is not MemoryAction.NOTHING:
        assert relief is MemoryAction.FREE
    while partition.eviction.evict(1000):
        pass
    assert bucket.memory.expiries == 0
    bucket.check_invariants()


def test_the_observer_of_collapsible_buckets_hears_of_each_once() -> None:
    ids = count(1)
    names: list[str] = []
    buckets = Buckets(lambda: HistoryId(next(ids)), lambda bucket: names.append(bucket.name))
    bucket = buckets.create("b", 2)
    for partition in bucket.partitions:
        for _ in range(8):
            put(partition, b"k")
            read(partition, partition.snapshot_end)
    assert names == ["b"]


def test_a_bucket_that_is_made_in_steps_is_found_at_its_end() -> None:
    buckets = new_buckets()
    bucket = buckets.begin("b", 2 * STEP_PARTITIONS, QUOTA_BYTES_MIN, None, incarnation=1)
    steps = bucket.make_partitions()
    next(steps)
    assert not bucket.partitions
    assert "b" not in buckets
    assert list(steps) == [None]
    buckets.add(bucket, is_new=True)
    assert buckets.get("b") is bucket
    assert len(bucket.partitions) == 2 * STEP_PARTITIONS
    bucket.check_invariants()


def test_a_deleted_bucket_has_nothing_to_collapse() -> None:
    bucket = new_bucket(3)
    first, second, _ = bucket.partitions
    for _ in range(8):
        put(first, b"k")
        read(first, first.snapshot_end)
    assert bucket.needs_collapse
    release = bucket.release_partitions()
    next(release)
    assert not bucket.collapse_step()
    # Its partitions are released one after the other: the second still has a reader.
    for _ in range(8):
        put(second, b"k")
        read(second, second.snapshot_end)
    assert not bucket.collapse_step()
    assert len(list(release)) == 2
    bucket.memory_policy.limit_bytes = 1
    assert bucket.free_memory() in (MemoryAction.NOTHING, MemoryAction.REFUSE_CREDIT)
