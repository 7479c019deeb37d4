"""Cursors, one rule at a time. See `helpers.transcript` for the notation."""

from __future__ import annotations

import pytest

from tests.engine.helpers import (
    cursor_at,
    free,
    items,
    new_partition,
    persist,
    put,
    read,
    send,
    transcript,
)
from tests.kit.calls import calls_of
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.ids import Operation, SeqNo, SnapshotKind
from upr_server.engine import BackfillNeeded, NotInMemory, SnapshotEndItem, SnapshotStartItem


def test_a_snapshot_has_a_start_its_mutations_and_an_end() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    cursor = cursor_at(partition)
    assert cursor.next() == SnapshotStartItem(SeqNo(0), SeqNo(2), SnapshotKind.MEMORY, False)
    chunk = cursor.next()
    assert isinstance(chunk, Chunk)
    assert [(row.key, row.seq) for row in chunk] == [(b"a", 1), (b"b", 2)]
    assert cursor.next() == SnapshotEndItem(SeqNo(2))
    assert not cursor.has_next
    assert cursor.next() is None


def test_the_open_snapshot_keeps_the_newest_of_each_key() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    put(partition, b"a")
    put(partition, b"c", b"c")
    assert read(partition) == "(0,5] b@2 a@3 c@5 ."


def test_entering_the_open_snapshot_closes_it_for_all_cursors() -> None:
    partition = new_partition()
    put(partition, b"a")
    first, second = cursor_at(partition), cursor_at(partition)
    assert isinstance(first.next(), SnapshotStartItem)
    put(partition, b"a", b"b")
    assert partition.snapshot_end == 1
    assert transcript(items(first)) == "a@1 . (1,3] a@2 b@3 ."
    assert transcript(items(second)) == "(0,1] a@1 . (1,3] a@2 b@3 ."


def test_registering_closes_nothing() -> None:
    partition = new_partition()
    put(partition, b"a", b"b", b"c")
    for start in (0, 1, 3):
        cursor_at(partition, start)
    put(partition, b"a")
    assert partition.snapshot_end == 0
    assert read(partition) == "(0,4] b@2 c@3 a@4 ."


def test_cursors_share_encoded_chunks() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    chunks = [
        [item for item in items(cursor_at(partition)) if isinstance(item, Chunk)] for _ in range(2)
    ]
    assert chunks[0][0] is chunks[1][0]


def test_a_waiting_cursor_is_woken_once_and_the_snapshot_stays_open_until_it_reads() -> None:
    partition = new_partition()
    woken: list[str] = []
    cursors = [
        partition.manager.register(name, SeqNo(0), on_ready=lambda name=name: woken.append(name))  # type: ignore[misc]
        for name in ("first", "second", "never asks")
    ]
    for registration in cursors[:2]:
        assert registration.cursor.next() is None
        assert registration.cursor.next() is None
    put(partition, b"a")
    assert woken == ["first", "second"]
    put(partition, b"a", b"b")
    assert woken == ["first", "second"]
    assert transcript(items(cursors[0].cursor)) == "(0,3] a@2 b@3 ."
    put(partition, b"c")
    assert woken == ["first", "second", "first"]


def test_poll_waits_without_reading() -> None:
    partition = new_partition()
    woken: list[int] = []
    cursor = partition.manager.register("poll", SeqNo(0), on_ready=lambda: woken.append(1)).cursor
    assert not cursor.poll()
    put(partition, b"a")
    assert woken == [1]
    assert cursor.poll()
    assert partition.snapshot_end == 0, "polling closes nothing"


def test_a_batch_without_success_wakes_no_cursor() -> None:
    partition = new_partition()
    woken: list[int] = []
    cursor = partition.manager.register("w", SeqNo(0), on_ready=lambda: woken.append(1)).cursor
    assert cursor.next() is None
    send(partition, Mutation(Operation.DELETE, b"missing"))
    put(partition)
    assert not woken
    assert not cursor.has_next


@pytest.mark.parametrize("batch", [3, 100])
def test_resuming_inside_a_closed_snapshot(batch: int) -> None:
    partition = new_partition()
    put(partition, *(b"%d" % index for index in range(batch)))
    read(partition)
    text = read(partition, 2)
    assert text.startswith(f"(2,{batch}] 2@3")
    assert text.endswith(f"{batch - 1}@{batch} .")
    assert read(partition, batch) == ""


def test_resuming_inside_the_open_snapshot() -> None:
    partition = new_partition()
    put(partition, b"a", b"b", b"c")
    cursor = cursor_at(partition, 2)
    put(partition, b"a")
    assert transcript(items(cursor)) == "(2,4] c@3 a@4 ."


def test_resuming_at_the_end_of_the_open_snapshot_waits_without_closing_it() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    cursor = cursor_at(partition, 2)
    assert cursor.next() is None
    put(partition, b"a")
    assert partition.snapshot_end == 0
    assert transcript(items(cursor)) == "(2,3] a@3 ."
    assert read(partition) == "(0,3] b@2 a@3 ."


def test_a_cursor_that_has_all_of_the_open_snapshot_moves_on_when_another_closes_it() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    cursor = cursor_at(partition, 2)
    assert cursor.next() is None
    assert read(partition) == "(0,2] a@1 b@2 ."
    assert not cursor.has_next
    partition.check_invariants()
    put(partition, b"a")
    assert transcript(items(cursor)) == "(2,3] a@3 ."


def test_end_at_least_makes_one_snapshot_of_several() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    read(partition)
    put(partition, b"a", b"c")
    read(partition)
    put(partition, b"a")
    put(partition, b"d")
    for start, end_at_least, expected in [
        (1, 2, "(1,2] b@2 . (2,4] a@3 c@4 . (4,6] a@5 d@6 ."),
        (1, 3, "(1,4]* b@2 a@3 c@4 . (4,6] a@5 d@6 ."),
        (2, 4, "(2,4] a@3 c@4 . (4,6] a@5 d@6 ."),
        (0, 5, "(0,6]* a@1 b@2 a@3 c@4 a@5 d@6 ."),
    ]:
        cursor = cursor_at(partition, start, end_at_least)
        assert transcript(items(cursor)) == expected
        cursor.close()
        partition.check_invariants()


def test_end_at_least_holds_what_it_announced() -> None:
    partition = new_partition()
    for _ in range(12):
        put(partition, b"a", b"b")
        read(partition)
    while partition.manager.needs_collapse:
        partition.manager.collapse_step(1000)
    for _ in range(12):
        put(partition, b"a", b"b")
        read(partition)
    end = partition.high_seq - 3
    cursor = cursor_at(partition, 1, end)
    start = cursor.next()
    assert isinstance(start, SnapshotStartItem)
    while partition.manager.needs_collapse:
        partition.manager.collapse_step(1000)
    assert transcript(items(cursor)).count(".") >= 1
    assert cursor.seq == partition.high_seq


@pytest.mark.parametrize(("start", "end_at_least"), [(3, 0), (0, 3)])
def test_nothing_above_the_high_number_can_be_asked_for(start: int, end_at_least: int) -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    with pytest.raises(ValueError, match=r"^3 is above the high number 2"):
        cursor_at(partition, start, end_at_least)


def test_a_closed_cursor_hands_on_nothing() -> None:
    partition = new_partition()
    put(partition, b"a")
    cursor = cursor_at(partition)
    cursor.next()
    cursor.close()
    cursor.close()
    assert partition.manager.cursor_count == 1
    with pytest.raises(ValueError, match="closed"):
        cursor.next()
    partition.check_invariants()


def test_a_waiting_cursor_that_is_closed_is_not_woken() -> None:
    partition = new_partition()
    woken: list[int] = []
    cursor = partition.manager.register("w", SeqNo(0), on_ready=lambda: woken.append(1)).cursor
    cursor.next()
    cursor.close()
    put(partition, b"a")
    assert not woken


# The cursor for the disk.


def test_nothing_is_freed_before_the_disk_has_it() -> None:
    partition = new_partition()
    put(partition, b"a")
    read(partition)
    put(partition, b"b")
    read(partition)
    assert partition.snapshots.oldest_start == 0
    assert read(partition) == "(0,1] a@1 . (1,2] b@2 ."


def test_the_disk_advances_by_commit_only_and_what_it_has_may_be_freed() -> None:
    partition = new_partition()
    manager, disk = partition.manager, partition.manager.persistence
    put(partition, b"a")
    assert transcript(items(disk)) == "(0,1] a@1 ."
    put(partition, b"b")
    assert transcript(items(disk)) == "(1,2] b@2 ."
    assert disk.committed_seq == 0
    assert not manager.snapshots.can_free
    assert not manager.free_oldest(), "reading it is not having it on disk"
    disk.commit(SeqNo(1))
    assert (manager.snapshots.oldest_start, disk.committed_seq) == (0, 1)
    assert read(partition) == "(0,1] a@1 . (1,2] b@2 .", "retained while there is room"
    assert manager.snapshots.can_free
    assert free(partition) == 1
    assert (manager.snapshots.oldest_start, disk.committed_seq) == (1, 1)
    disk.commit(SeqNo(2))
    assert free(partition) == 1
    assert (manager.snapshots.oldest_start, disk.committed_seq) == (2, 2)
    assert not manager.snapshots.can_free, "the open one stays"
    assert manager.statistics()["freed"] == 2
    partition.check_invariants()
    with pytest.raises(NotInMemory):
        manager.snapshots.find(1)


@pytest.mark.parametrize("through", [0, 1, 3, 4, 5])
def test_only_the_end_of_a_snapshot_that_was_read_can_be_committed(through: int) -> None:
    partition = new_partition()
    disk = partition.manager.persistence
    put(partition, b"a", b"b")
    assert transcript(items(disk)) == "(0,2] a@1 b@2 ."
    put(partition, b"c", b"d")
    disk.next()
    disk.next()
    assert disk.seq == 4, "all of it was read, but not its end"
    with pytest.raises(ValueError, match="is not the end of a snapshot that was read"):
        disk.commit(SeqNo(through))
    disk.commit(SeqNo(2))
    disk.next()
    disk.commit(SeqNo(4))


def test_a_reader_holds_what_the_disk_has_already() -> None:
    partition = new_partition()
    disk = partition.manager.persistence
    put(partition, b"a")
    slow = cursor_at(partition)
    list(items(disk))
    disk.commit(SeqNo(1))
    assert free(partition) == 0
    assert transcript(items(slow)) == "(0,1] a@1 ."
    assert free(partition) == 1
    assert partition.snapshots.oldest_start == 1


def test_freed_snapshots_must_come_from_disk_first() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    disk = partition.manager.persistence
    list(items(disk))
    disk.commit(SeqNo(2))
    put(partition, b"c")
    assert read(partition, 1) == "(1,2] b@2 . (2,3] c@3 ."
    free(partition)
    registration = partition.manager.register("late", SeqNo(1))
    assert registration.backfill == BackfillNeeded(SeqNo(1), SeqNo(2))
    assert transcript(items(registration.cursor)) == "(2,3] c@3 ."


def test_what_comes_from_disk_reaches_to_its_end_even_if_memory_begins_before() -> None:
    partition = new_partition()
    manager, disk = partition.manager, partition.manager.persistence
    for key in (b"a", b"b", b"c"):
        put(partition, key)
        list(items(disk))
        disk.commit(disk.seq)
    put(partition, b"d")
    assert manager.free_oldest()
    assert manager.snapshots.oldest_start == 1
    registration = manager.register("late", SeqNo(0))
    assert registration.backfill == BackfillNeeded(SeqNo(0), SeqNo(3))
    assert transcript(items(registration.cursor)) == "(3,4] d@4 ."
    assert read(partition, 1) == "(1,2] b@2 . (2,3] c@3 . (3,4] d@4 ."
    partition.check_invariants()


def test_no_cursor_is_looked_at_while_the_disk_needs_the_oldest_snapshot() -> None:
    partition = new_partition()
    manager = partition.manager
    put(partition, b"a")
    cursors = [cursor_at(partition) for _ in range(100)]
    assert calls_of(manager.droppable_cursors) < 10
    persist(partition)
    assert manager.droppable_cursors() == cursors
    assert calls_of(manager.droppable_cursors) < 3 * len(cursors)


def test_the_cursors_furthest_back_are_dropped_first_and_the_disks_never() -> None:
    partition = new_partition()
    manager, disk = partition.manager, partition.manager.persistence
    cursors = [cursor_at(partition)]
    for key in (b"a", b"b", b"c"):
        put(partition, key)
        list(items(disk))
        cursors += [cursor_at(partition, partition.high_seq) for _ in range(2)]
    assert manager.droppable_cursors() == []
    disk.commit(SeqNo(2))
    assert manager.droppable_cursors() == cursors[:1]
    assert manager.drop_furthest_back()
    assert manager.droppable_cursors() == cursors[1:3]
    assert manager.drop_furthest_back()
    assert manager.dropped_count == 3
    assert not manager.drop_furthest_back()
    assert manager.droppable_cursors() == [], "the others stand where the disk does, or further on"
    disk.commit(SeqNo(3))
    assert manager.droppable_cursors() == cursors[3:5]
    partition.check_invariants()


def test_a_slow_cursor_is_dropped_and_needs_a_backfill() -> None:
    partition = new_partition()
    manager, disk = partition.manager, partition.manager.persistence
    put(partition, b"a", b"b")
    slow, other_cursor = cursor_at(partition, 1), cursor_at(partition, 0)
    slow.next()
    list(items(disk))
    assert not manager.drop_furthest_back(), "the disk still needs what they stand in"
    disk.commit(SeqNo(2))
    assert manager.droppable_cursors() == [slow, other_cursor]
    assert manager.drop_furthest_back()
    assert not manager.drop_furthest_back()
    assert free(partition) == 1
    assert manager.snapshots.oldest_start == 2
    assert slow.has_next
    assert slow.next() == BackfillNeeded(SeqNo(1), SeqNo(2))
    assert slow.next() == BackfillNeeded(SeqNo(1), SeqNo(2))
    assert other_cursor.next() == BackfillNeeded(SeqNo(0), SeqNo(2))
    assert manager.statistics()["dropped"] == 2
    slow.close()
    with pytest.raises(ValueError, match="closed"):
        slow.next()
    partition.check_invariants()


def test_the_disks_cursor_is_never_dropped() -> None:
    partition = new_partition()
    manager, disk = partition.manager, partition.manager.persistence
    put(partition, b"a")
    consumer = manager.register("consumer", SeqNo(0)).cursor
    list(items(consumer))
    assert not manager.drop_furthest_back(), "only the disk's cursor is behind"
    list(items(disk))
    put(partition, b"b")
    list(items(consumer))
    assert not manager.drop_furthest_back(), "it has read, and nothing is committed"
    assert {consumer, disk} == set(manager.snapshots.cursors)


# Counters.


def increment(key: bytes) -> Mutation:
    return Mutation(Operation.INCREMENT, key, CounterDelta(1).encode())


def test_documents_and_counters_come_in_one_order() -> None:
    partition = new_partition()
    send(partition, increment(b"n"), Mutation(Operation.SET, b"a"), increment(b"m"))
    put(partition, b"b")
    send(partition, increment(b"n"), Mutation(Operation.SET, b"c"))
    assert read(partition) == "(0,6] a@2 m@3 b@4 n@5 c@6 ."


def test_a_counter_set_is_a_document_and_an_incremented_document_a_counter() -> None:
    partition = new_partition()
    send(partition, increment(b"n"), increment(b"m"))
    put(partition, b"n", value=b"7")
    figures = partition.snapshots.open.statistics()
    assert (figures["counters"], figures["arrays"]) == (1, 1)
    send(partition, increment(b"n"))
    figures = partition.snapshots.open.statistics()
    assert (figures["counters"], figures["keys"]) == (2, 2)
    assert read(partition) == "(0,4] m@2 n@4 ."


def test_an_increment_takes_no_more_memory_than_the_one_before() -> None:
    partition = new_partition()
    send(partition, increment(b"n"))
    bytes_of_one = partition.snapshots.open.nbytes
    for _ in range(300):
        send(partition, increment(b"n"))
    assert partition.snapshots.open.nbytes <= bytes_of_one + 2
    assert read(partition) == "(0,301] n@301 ."


def test_many_counters_are_divided_among_chunks() -> None:
    partition = new_partition()
    put(partition, b"before")
    for low in range(0, 5000, 500):
        send(partition, *(increment(b"%d" % index) for index in range(low, low + 500)))
        put(partition, b"doc %d" % low)
    cursor = cursor_at(partition)
    counts = [item.count for item in items(cursor) if isinstance(item, Chunk)]
    assert sum(counts) == 5011
    assert len(counts) > 4
    assert max(counts) < 1100
    partition.check_invariants()


def test_a_snapshot_of_one_chunk_can_be_read_at_once() -> None:
    partition = new_partition()
    cursor = cursor_at(partition)
    assert cursor.next_whole_snapshot() is None, "there is nothing"
    put(partition, b"a", b"b")
    chunk = cursor.next_whole_snapshot()
    assert chunk is not None
    assert (chunk.start, chunk.end, chunk.keys()) == (0, 2, [b"a", b"b"])
    assert cursor.next_whole_snapshot() is None
    assert not cursor.is_reading
    assert not cursor.poll()
    put(partition, b"c")
    assert transcript(items(cursor)) == "(2,3] c@3 ."
    partition.manager.check_invariants()


def test_what_is_no_whole_snapshot_is_not_read_at_once() -> None:
    partition = new_partition()
    first = cursor_at(partition)
    put(partition, b"a", b"b")
    assert first.next_whole_snapshot() is not None
    put(partition, b"c")
    inside = cursor_at(partition, 1)
    resumed = partition.manager.register("r", SeqNo(0), end_at_least=SeqNo(3)).cursor
    assert inside.next_whole_snapshot() is None
    assert resumed.next_whole_snapshot() is None
    begun = cursor_at(partition, 2)
    begun.next()
    assert begun.next_whole_snapshot() is None
    assert transcript(items(inside)) == "(1,2] b@2 . (2,3] c@3 ."
    assert transcript(items(resumed)) == "(0,3]* a@1 b@2 c@3 ."
    assert transcript(items(begun)) == "c@3 ."


def test_what_the_disk_has_read_at_once_stays_until_it_is_committed() -> None:
    partition = new_partition()
    put(partition, b"a")
    disk = partition.manager.persistence
    assert disk.next_whole_snapshot() is not None
    assert not partition.manager.free_oldest()
    disk.commit(SeqNo(1))
    assert partition.manager.free_oldest()
    partition.manager.check_invariants()
