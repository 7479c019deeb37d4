"""Collapsing: which snapshots, when, in what steps, and what comes of it."""

from __future__ import annotations

import gc
import operator

import pytest

from tests.engine.helpers import chunks as all_chunks
from tests.engine.helpers import (
    cursor_at,
    free,
    items,
    new_bucket,
    new_partition,
    persist,
    put,
    read,
    send,
    transcript,
)
from upr_protocol.chunk import Chunk, Mutation, chunk_of_plain_sets
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_server.engine import Partition, SnapshotStartItem, batch_of
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.collapse import (
    BYTES_PER_MUTATION,
    CHUNK_BYTES,
    CHUNK_MUTATIONS,
    COLLAPSE_SNAPSHOTS_MIN,
    JOINED_SNAPSHOTS_MAX,
    JOINED_SNAPSHOTS_MIN,
    SHORT_RUN_BYTES_MAX,
    Collapse,
)

NOW = 1_000.0


def leave_snapshots(partition: Partition, count: int, *keys: bytes) -> None:
    """Each with `keys`; every one was read to its end by a cursor that is gone."""
    for _ in range(count):
        put(partition, *keys)
        read(partition, partition.snapshot_end)


def closed_snapshots(partition: Partition) -> list[ClosedSnapshot]:
    snapshots = [entry.snapshot for entry in partition.snapshots.entries]
    return [snapshot for snapshot in snapshots if isinstance(snapshot, ClosedSnapshot)]


def collapse(partition: Partition, budget: int = 100) -> int:
    steps = 0
    while partition.manager.needs_collapse:
        partition.manager.collapse_step(budget)
        partition.check_invariants()
        steps += 1
    return steps


def test_small_snapshots_are_collapsed_eight_at_a_time() -> None:
    partition = new_partition()
    leave_snapshots(partition, COLLAPSE_SNAPSHOTS_MIN - 1, b"a")
    assert not partition.manager.needs_collapse
    leave_snapshots(partition, 1, b"a", b"b")
    assert partition.manager.needs_collapse
    collapse(partition)
    assert len(partition.snapshots) == 2
    assert read(partition) == "(0,9] a@8 b@9 ."
    assert partition.manager.statistics()["collapses"] == 1


def test_a_key_that_the_table_forgot_and_that_came_back_is_in_a_snapshot_once() -> None:
    partition = new_partition()
    leave_snapshots(partition, 2, b"a")
    entries = partition.snapshots.entries[:2]
    snapshots = [partition.snapshots.close(entry) for entry in entries]
    # As it is where the table has forgotten the key between the two.
    snapshots[1].renews_keys = False
    merge = Collapse(entries, snapshots, evicted_through=1)
    while not merge.step(100):
        pass
    assert [seq for chunk in merge.chunks() for seq in chunk.seqs] == [2]


def test_seven_small_snapshots_of_one_key_become_one() -> None:
    partition = new_partition()
    leave_snapshots(partition, 7, b"a")
    assert not partition.manager.needs_collapse
    partition.manager.consider_short_runs()
    collapse(partition)
    assert read(partition) == "(0,7] a@7 ."


def test_two_small_snapshots_on_each_side_of_a_cursor_become_one() -> None:
    partition = new_partition()
    leave_snapshots(partition, 2, b"a")
    inside = cursor_at(partition, 2)
    put(partition, b"a")
    inside.next()
    leave_snapshots(partition, 2, b"a")
    front = cursor_at(partition, 5)
    leave_snapshots(partition, 2, b"a")
    partition.manager.consider_short_runs()
    collapse(partition)
    assert read(partition) == "(0,2] a@2 . (2,3] a@3 . (3,5] a@5 . (5,7] a@7 ."
    assert transcript(items(inside)) == "a@3 . (3,5] a@5 . (5,7] a@7 ."
    assert transcript(items(front)) == "(5,7] a@7 ."


def test_small_snapshots_are_put_together_before_they_are_written() -> None:
    partition = new_partition()
    leave_snapshots(partition, JOINED_SNAPSHOTS_MIN, b"a")
    assert partition.manager.join_unwritten() == JOINED_SNAPSHOTS_MIN
    partition.check_invariants()
    assert transcript(items(partition.manager.persistence)) == "(0,3] a@3 ."
    assert read(partition) == "(0,3] a@3 ."


def test_few_large_or_separate_snapshots_are_written_one_by_one() -> None:
    few, large, separate = (new_partition() for _ in range(3))
    leave_snapshots(few, JOINED_SNAPSHOTS_MIN - 1, b"a")
    for _ in range(JOINED_SNAPSHOTS_MIN):
        put(large, b"a", value=bytes(SHORT_RUN_BYTES_MAX // 2))
        read(large, large.snapshot_end)
    leave_snapshots(separate, 2, b"a")
    reader = cursor_at(separate, 2)
    leave_snapshots(separate, 2, b"a")
    for partition in (few, large, separate):
        assert not partition.manager.join_unwritten()
        partition.check_invariants()
        count = len(partition.snapshots) - 1
        assert transcript(items(partition.manager.persistence)).count(".") == count >= 2
    assert transcript(items(reader)) == "(2,3] a@3 . (3,4] a@4 ."


def test_a_disk_that_is_inside_a_snapshot_reads_it_as_it_is() -> None:
    partition = new_partition()
    leave_snapshots(partition, 4, b"a")
    persistence = partition.manager.persistence
    persistence.next()
    partition.manager.join_unwritten()
    assert transcript(items(persistence)) == "a@1 . (1,2] a@2 . (2,3] a@3 . (3,4] a@4 ."


def test_what_is_being_collapsed_is_left_alone() -> None:
    partition = new_partition()
    leave_snapshots(partition, COLLAPSE_SNAPSHOTS_MIN, b"a", b"b")
    partition.manager.collapse_step(1)
    partition.manager.join_unwritten()
    assert len(partition.snapshots) == COLLAPSE_SNAPSHOTS_MIN + 1
    collapse(partition)
    assert transcript(items(partition.manager.persistence)) == "(0,16] a@15 b@16 ."


def test_a_bounded_number_of_snapshots_is_put_together_at_a_time() -> None:
    partition = new_partition()
    leave_snapshots(partition, JOINED_SNAPSHOTS_MAX + 1, b"a")
    partition.manager.join_unwritten()
    assert len(partition.snapshots) == 3


def test_a_small_snapshot_is_not_reason_enough_to_copy_a_large_one() -> None:
    partition = new_partition()
    put(partition, *(b"%d" % index for index in range(100)))
    read(partition)
    leave_snapshots(partition, 1, b"a")
    partition.manager.consider_short_runs()
    assert not partition.manager.needs_collapse


def test_two_snapshots_that_are_not_small_wait_for_more() -> None:
    for value_bytes, is_wanted in ((31 * 1024, True), (33 * 1024, False)):
        partition = new_partition()
        for _ in range(2):
            put(partition, b"a", value=bytes(value_bytes))
            read(partition, partition.snapshot_end)
        partition.manager.consider_short_runs()
        assert partition.manager.needs_collapse == is_wanted


def test_short_runs_are_looked_for_only_after_a_cursor_has_moved() -> None:
    calls: list[int] = []
    partition = Partition(
        PartitionId(0), lambda: HistoryId(1), on_collapsible=lambda: calls.append(1)
    )
    leave_snapshots(partition, 2, b"a")
    partition.manager.consider_short_runs()
    assert calls == [1]
    collapse(partition)
    # The collapsed snapshot may fit together with an older one.
    assert partition.manager._has_released
    partition.manager.consider_short_runs()
    assert not partition.manager._has_released
    assert calls == [1]


def test_the_newer_item_wins_and_deletions_stay() -> None:
    partition = new_partition()
    put(partition, b"a", b"b", b"c")
    read(partition)
    send(partition, Mutation(Operation.DELETE, b"a"))
    leave_snapshots(partition, 7, b"c")
    collapse(partition)
    assert read(partition) == "(0,11] b@2 -a@4 c@11 ."


def test_the_owner_hears_when_there_is_something_to_collapse() -> None:
    calls: list[int] = []
    partition = Partition(
        PartitionId(0), lambda: HistoryId(1), on_collapsible=lambda: calls.append(1)
    )
    leave_snapshots(partition, 8, b"a")
    assert calls == [1]
    leave_snapshots(partition, 30, b"a")
    assert calls == [1], "and not again before it was done"
    collapse(partition)
    leave_snapshots(partition, 8, b"a")
    assert calls == [1, 1]


def test_a_bucket_collapses_its_partitions_in_turn() -> None:
    calls: list[int] = []
    bucket = new_bucket(3)
    bucket._on_collapsible = lambda: calls.append(1)
    assert not bucket.collapse_step()
    for partition_id in (2, 0):
        leave_snapshots(bucket.partitions[partition_id], 8, b"a")
    assert calls == [1]
    assert bucket.needs_collapse
    steps = 0
    while bucket.needs_collapse:
        steps += 1
        assert bucket.collapse_step(3) == bucket.needs_collapse
        bucket.check_invariants()
    assert steps > 4
    assert [len(partition.snapshots) for partition in bucket.partitions] == [2, 1, 2]


def test_a_snapshot_with_a_cursor_inside_is_not_collapsed() -> None:
    partition = new_partition()
    leave_snapshots(partition, 4, b"a")
    inside = cursor_at(partition, 3)
    inside.next()
    leave_snapshots(partition, 7, b"a")
    assert not partition.manager.needs_collapse, "3 on one side, 7 on the other"
    leave_snapshots(partition, 1, b"a")
    collapse(partition)
    assert transcript(items(inside)) == "a@4 . (4,12] a@12 ."
    assert read(partition) == "(0,1] a@1 . (1,2] a@2 . (2,3] a@3 . (3,4] a@4 . (4,12] a@12 ."


def test_a_cursor_at_the_front_of_the_first_stays_there() -> None:
    partition = new_partition()
    leave_snapshots(partition, 4, b"a")
    front = cursor_at(partition, 4)
    leave_snapshots(partition, 8, b"a", b"b")
    collapse(partition)
    assert len(partition.snapshots) == 6
    assert transcript(items(front)) == "(4,20] a@19 b@20 ."


def test_a_cursor_that_leaves_makes_its_slot_collapsible() -> None:
    partition = new_partition()
    leave_snapshots(partition, 4, b"a")
    for leave in ("end", "close"):
        cursor = cursor_at(partition, partition.high_seq)
        leave_snapshots(partition, 4, b"a")
        cursor.next()
        assert not partition.manager.needs_collapse
        if leave == "close":
            cursor.close()
        else:
            transcript(items(cursor))
        assert partition.manager.needs_collapse
        collapse(partition)
        leave_snapshots(partition, 4, b"a")


@pytest.mark.parametrize(
    ("start", "meanwhile", "afterwards"),
    [
        pytest.param(0, 1, "(0,3] a@1 b@2 c@3 . (3,30] a@28 b@29 c@30 .", id="the first"),
        pytest.param(3, 1, "(0,3] a@1 b@2 c@3 . (3,30] a@28 b@29 c@30 .", id="the second"),
        pytest.param(13, 0, "(0,30] a@28 b@29 c@30 .", id="one in the middle"),
        pytest.param(27, 1, "(0,27] a@25 b@26 c@27 . (27,30] a@28 b@29 c@30 .", id="the last"),
    ],
)
def test_a_collapse_is_given_up_when_a_cursor_enters(
    start: int, meanwhile: int, afterwards: str
) -> None:
    partition = new_partition()
    leave_snapshots(partition, 10, b"a", b"b", b"c")
    cursor = cursor_at(partition)
    assert partition.manager.collapse_step(4)
    if start:
        cursor.close()
        cursor = cursor_at(partition, start)
    else:
        cursor.next()
    collapse(partition, 4)
    assert partition.manager.statistics()["collapses"] == meanwhile
    cursor.close()
    collapse(partition, 4)
    assert read(partition) == afterwards


def test_a_collapse_that_is_given_up_is_freed_at_once() -> None:
    """It refers to its snapshots, and the garbage collector may come late."""
    partition = new_partition()
    gc.collect()
    gc.disable()
    try:
        leave_snapshots(partition, 10, b"a", b"b", b"c")
        partition.manager.collapse_step(4)
        assert any(isinstance(thing, Collapse) for thing in gc.get_objects())
        cursor_at(partition).next()
        partition.manager.collapse_step(4)
        assert not any(isinstance(thing, Collapse) for thing in gc.get_objects())
    finally:
        gc.enable()


def test_a_cursor_may_come_and_go_while_a_collapse_is_under_way() -> None:
    partition = new_partition()
    leave_snapshots(partition, 10, b"a", b"b", b"c")
    partition.manager.collapse_step(4)
    assert read(partition).count(".") == 10
    collapse(partition, 4)
    assert read(partition) == "(0,30] a@28 b@29 c@30 ."


def test_a_collapse_is_given_up_when_its_snapshots_are_freed() -> None:
    partition = new_partition()
    disk = partition.manager.persistence
    leave_snapshots(partition, 10, b"a", b"b", b"c")
    partition.manager.collapse_step(4)
    transcript(items(disk))
    disk.commit(SeqNo(9))
    assert free(partition) == 3
    assert partition.snapshots.oldest_start == 9
    collapse(partition, 4)
    assert partition.manager.statistics()["collapses"] == 0
    disk.commit(SeqNo(30))
    assert free(partition) == 7
    collapse(partition, 4)
    assert len(partition.snapshots) == 1


def test_what_the_disk_has_is_still_collapsed_while_it_is_retained() -> None:
    partition = new_partition()
    disk = partition.manager.persistence
    leave_snapshots(partition, 8, b"a", b"b")
    transcript(items(disk))
    disk.commit(SeqNo(16))
    collapse(partition)
    assert len(partition.snapshots) == 2
    assert read(partition) == "(0,16] a@15 b@16 ."
    assert free(partition) == 1


def test_steps_are_bounded() -> None:
    partition = new_partition()
    keys = [b"%d" % index for index in range(500)]
    leave_snapshots(partition, 8, *keys)
    assert collapse(partition, budget=400) >= 8


def test_steps_are_bounded_by_their_bytes_too() -> None:
    """Snapshots of one long value each: a step does not encode and copy hundreds of them."""
    partition = new_partition()
    value_bytes, snapshot_count, budget = 60_000, 40, 500
    for index in range(snapshot_count):
        put(partition, b"%d" % index, value=bytes(value_bytes))
        read(partition, partition.snapshot_end)
    steps = collapse(partition, budget)
    assert steps >= snapshot_count * value_bytes // (budget * BYTES_PER_MUTATION)


def big(partition: Partition, low: int, high: int, size: int = 1000) -> None:
    keys = [b"key %6d" % index for index in range(low, high)]
    for first in range(0, len(keys), 500):
        piece = keys[first : first + 500]
        partition.mutate(batch_of(chunk_of_plain_sets(piece, [bytes(size)] * len(piece))), now=NOW)
    read(partition, partition.snapshot_end)


def test_large_snapshots_are_collapsed_by_their_size() -> None:
    partition = new_partition()
    big(partition, 0, 3000)
    big(partition, 0, 1000)
    assert not partition.manager.needs_collapse, "a third of it is not worth rewriting it"
    big(partition, 500, 1500)
    assert partition.manager.needs_collapse
    collapse(partition, 2000)
    assert len(partition.snapshots) == 2
    assert partition.table.item_count == 3000
    assert read(partition).count("@") == 3000


def test_long_chunks_without_superseded_mutations_are_shared_not_copied() -> None:
    partition = new_partition()
    big(partition, 0, 2000)
    before = all_chunks(partition)
    big(partition, 1900, 3100)
    collapse(partition, 2000)
    after = all_chunks(partition)
    assert after[0] is before[0]
    assert after[1] is before[1]
    assert sum(chunk.count for chunk in after) == 3100


def test_no_key_is_looked_at_where_all_were_new() -> None:
    partition = new_partition()
    big(partition, 0, 500)
    big(partition, 500, 1000)
    before = all_chunks(partition)
    assert len(before) == 2
    assert not any(snapshot.renews_keys for snapshot in closed_snapshots(partition))
    assert collapse(partition, 10) == 1, "a chunk that stays as it is costs one"
    assert len(partition.snapshots) == 2
    assert all(map(operator.is_, all_chunks(partition), before))
    big(partition, 999, 1500)
    assert [snapshot.renews_keys for snapshot in closed_snapshots(partition)] == [False, True]
    assert collapse(partition, 10) > 4, "every key is looked at"
    assert sum(chunk.count for chunk in all_chunks(partition)) == 1500


def test_a_key_that_was_forgotten_is_not_new() -> None:
    partition = new_partition()
    put(partition, *(b"%d" % index for index in range(10)))
    send(partition, *(Mutation(Operation.DELETE, b"%d" % index) for index in range(10)))
    persist(partition)
    put(partition, b"a")
    assert partition.table.evict(20, 100) == 10
    put(partition, *(b"%d" % index for index in range(10)))
    leave_snapshots(partition, COLLAPSE_SNAPSHOTS_MIN - 1, b"b")
    assert closed_snapshots(partition)[1].renews_keys
    persist(partition)
    assert collapse(partition)
    assert sum(chunk.count for chunk in all_chunks(partition)) == 12


def test_chunks_that_result_are_neither_short_nor_long() -> None:
    partition = new_partition()
    for low in range(0, 4000, 500):
        big(partition, low, low + 500, 100)
    collapse(partition, 2000)
    chunks = all_chunks(partition)
    assert sum(chunk.count for chunk in chunks) == 4000
    assert all(chunk.nbytes <= CHUNK_BYTES * 1.1 for chunk in chunks)
    assert len(chunks) <= 2 * sum(chunk.nbytes for chunk in chunks) / CHUNK_BYTES + 1


@pytest.mark.parametrize("overlap", [0, 1500])
def test_chunks_that_result_hold_a_bounded_number_of_mutations(overlap: int) -> None:
    partition = new_partition()
    for index in range(8):
        low = index * (2000 - overlap)
        big(partition, low, low + 2000, 3)
    collapse(partition, 2000)
    counts = [chunk.count for chunk in all_chunks(partition)]
    assert sum(counts) == 8 * 2000 - 7 * overlap
    assert max(counts) <= CHUNK_MUTATIONS
    assert len(counts) <= 2 * sum(counts) / CHUNK_MUTATIONS + 1


def test_a_chunk_superseded_as_a_whole_leaves_no_gap() -> None:
    partition = new_partition()
    big(partition, 0, 1000)
    big(partition, 0, 1000)
    big(partition, 0, 1000)
    collapse(partition, 2000)
    cursor = cursor_at(partition)
    start = cursor.next()
    assert isinstance(start, SnapshotStartItem)
    assert (start.start, start.end) == (0, 3000)
    chunks = [item for item in items(cursor) if isinstance(item, Chunk)]
    assert chunks[0].start == 0
    assert min(chunk.count for chunk in chunks) > 0
    assert sum(chunk.count for chunk in chunks) == 1000
