"""Document arrays, the window over the newest of them, and what tidying does."""

from __future__ import annotations

import pytest

from tests.engine.helpers import (
    NOW,
    cursor_at,
    items,
    new_bucket,
    put,
    read,
    request,
    send,
    transcript,
)
from tests.engine.helpers import chunks as all_chunks
from upr_kernel import Answers, KeyTable, OpenRows, gather
from upr_protocol.chunk import Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine import batch_of
from upr_server.engine.hash_table import HashTable
from upr_server.engine.snapshots.document_arrays import NumberedArray, PublishedArray
from upr_server.engine.snapshots.skip_flags import SkipFlags


def row(seq: int, key: bytes = b"k", value: bytes = b"v") -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq), Cas(seq + 100), 3, 4)


def numbered(*seqs: int) -> NumberedArray:
    return NumberedArray(Chunk.build(row(seq, b"k%d" % seq) for seq in seqs))


def skip_flags(first: int, count: int) -> SkipFlags:
    answers = Answers(1, 1, 1, 1, 1, 1, 1, 1)
    flags = SkipFlags(OpenRows(KeyTable(), answers, 0, 1024, 1 << 18, 4096))
    if count:
        flags.extend(SeqNo(first), count)
    return flags


def published(first: int, count: int) -> PublishedArray:
    chunk = chunk_of_plain_sets([b"k%d" % (first + n) for n in range(count)], [b"v"] * count)
    return PublishedArray(chunk, SeqNo(first), Cas(first + 100))


def test_a_published_array_numbers_its_mutations_on_end() -> None:
    array = published(5, 3)
    assert (array.first_seq, array.last_seq, array.count) == (5, 7, 3)
    assert [array.index(seq) for seq in (5, 6, 7)] == [0, 1, 2]
    mutation = array.mutation(1)
    assert (mutation.seq, mutation.cas, mutation.key) == (6, 106, b"k6")
    chunk = array.whole_chunk(SeqNo(4), SeqNo(9))
    chunk.check()
    assert [(r.seq, r.cas) for r in chunk] == [(5, 105), (6, 106), (7, 107)]
    for seq in (4, 8):
        with pytest.raises(KeyError):
            array.index(seq)


def test_a_numbered_array_finds_its_mutations() -> None:
    array = numbered(2, 5, 9)
    array.check_invariants()
    assert [array.index(seq) for seq in (2, 5, 9)] == [0, 1, 2]
    assert array.mutation(1) == row(5, b"k5")
    for seq in (1, 3, 10):
        with pytest.raises(KeyError):
            array.index(seq)


@pytest.mark.parametrize("kind", ["published", "numbered"])
def test_skipped_rows_are_not_copied(kind: str) -> None:
    window = skip_flags(1, 12)
    array = published(3, 4) if kind == "published" else numbered(3, 4, 5, 6)
    window.skip(4)
    window.skip(6)
    array.copy_flags(window)
    array.check_invariants()
    assert (array.live_count, array.live_bytes) == (2, array.nbytes // 2)
    assert not array.is_whole_in(0, 20)
    gathered = Chunk(gather(array.rows(2, 6), 2, 6))
    assert [(r.seq, r.cas) for r in gathered] == [(3, 103), (5, 105)]


def test_a_sparse_array_takes_its_flags_by_number() -> None:
    window = skip_flags(1, 12)
    for seq in (3, 8, 9):
        window.skip(seq)
    array = numbered(2, 3, 9, 11)
    array.copy_flags(window)
    assert array.skip == bytearray([0, 1, 1, 0])
    assert Chunk(gather(array.rows(2, 20), 2, 20)).seqs.tolist() == [11]


def test_an_array_can_be_read_in_two_parts() -> None:
    array = numbered(2, 3, 9, 11)
    array.skip = bytearray(4)
    for after, through, expected in ((0, 3, [2, 3]), (3, 10, [9]), (4, 8, []), (9, 11, [11])):
        assert Chunk(gather(array.rows(after, through), 0, 20)).seqs.tolist() == expected


def test_a_numbered_array_keeps_its_chunk_when_the_range_is_the_same() -> None:
    chunk = Chunk.build([row(3), row(4)])
    array = NumberedArray(chunk)
    assert array.whole_chunk(chunk.start, chunk.end) is chunk
    wider = array.whole_chunk(SeqNo(0), SeqNo(9))
    assert (wider.start, wider.end, wider.count) == (0, 9, 2)


# The window.


def test_the_window_begins_again_when_it_was_empty() -> None:
    window = skip_flags(1, 0)
    assert not window
    window.extend(SeqNo(5), 2)
    window.extend(SeqNo(7), 1)
    assert (window.base, len(window)) == (5, 3)
    assert 4 not in window
    assert 5 in window
    window.skip(6)
    assert (window.count_skipped(5, 7), window.count_skipped(7, 7)) == (1, 0)
    window.drop_below(6)
    assert (window.base, window.flags) == (6, bytearray([1, 0]))
    window.clear(6, 6)
    assert window.count_skipped(6, 7) == 0
    window.flags.clear()
    window.extend(SeqNo(20), 1)
    assert window.base == 20


def test_the_skip_flags_stay_in_proportion_to_the_live_rows() -> None:
    window = skip_flags(1, 8193)
    assert window.excess_flags(1000) == 0
    assert window.excess_flags(0) == 8193 - 4096


# In an open snapshot.


def test_the_tail_is_replaced_in_place() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    put(partition, b"a")
    send(partition, request(Operation.SET, b"b", b"1", expiry=5000))
    send(partition, request(Operation.APPEND, b"b", b""))
    size = partition.snapshots.open.nbytes
    for index in range(50):
        send(
            partition,
            request(Operation.DELETE, b"b") if index % 2 else request(Operation.ADD, b"b", b"2"),
        )
        send(partition, request(Operation.APPEND, b"b", b""))
    assert partition.snapshots.open.nbytes <= size
    bucket.check_invariants()
    assert read(partition).count("@") == 2


class TableWithoutMemory(HashTable):
    def put_run(self, *_arguments: object, **_options: object) -> tuple[list[int], int]:
        raise MemoryError


def test_rows_whose_keys_cannot_be_entered_leave_no_flags() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    put(partition, b"a", b"b")
    open_snapshot, chunk = partition.snapshots.open, chunk_of_plain_sets([b"c", b"d"], [b"", b""])
    with pytest.raises(MemoryError):
        open_snapshot.add_rows(
            chunk, 0, 2, SeqNo(3), Cas(1 << 62), TableWithoutMemory(bucket.memory)
        )
    bucket.check_invariants()
    send(partition, request(Operation.ADD, b"e", b"1"))
    bucket.check_invariants()
    assert sorted(open_snapshot.find(seq).key for seq in (1, 2, 3)) == [b"a", b"b", b"e"]


def test_arrays_skipped_whole_are_dropped() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    keys = [b"%d" % index for index in range(1000)]
    for _ in range(30):
        partition.mutate(batch_of(chunk_of_plain_sets(keys, [bytes(200)] * 1000)), now=NOW)
    figures = partition.snapshots.open.statistics()
    assert figures["arrays"] < 6
    assert figures["rewritten"] == 0, "there is nothing to copy"
    assert figures["keys"] == 1000
    bucket.check_invariants()


def test_deleted_documents_are_freed_though_deletions_add_little() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    keys = [b"%d" % index for index in range(2000)]
    for low in range(0, 2000, 100):
        put(partition, *keys[low : low + 100], value=bytes(5000))
    assert partition.snapshots.open.nbytes > 10_000_000
    for low in range(0, 2000, 100):
        send(partition, *(request(Operation.DELETE, key) for key in keys[low : low + 100]))
    assert partition.snapshots.open.nbytes < 1_000_000
    bucket.check_invariants()


def test_what_stays_alone_in_old_arrays_is_brought_together() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    common = [b"common %d" % index for index in range(199)]
    for index in range(300):
        partition.mutate(
            batch_of(chunk_of_plain_sets([b"rare %d" % index, *common], [bytes(100)] * 200)),
            now=NOW,
        )
    figures = partition.snapshots.open.statistics()
    assert figures["keys"] == 499
    assert figures["arrays"] < 40
    assert figures["bytes"] < 4 * 500 * 150 + 128 * 1024
    bucket.check_invariants()
    assert read(partition).count("@") == 499


@pytest.mark.parametrize("op", [Operation.SET, Operation.ADD])
def test_counters_do_not_stretch_the_window(op: Operation) -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    send(partition, request(op, b"document", b"v"))
    rows = [request(Operation.INCREMENT, b"n", CounterDelta(1).encode())] * 500
    for _ in range(60):
        send(partition, *rows)
    assert partition.snapshots.open.statistics()["window"] < 10_000
    bucket.check_invariants()
    assert read(partition) == "(0,30001] document@1 n@30001 ."


def test_documents_behind_the_window_are_superseded_one_by_one() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    put(partition, b"a", b"b")
    rows = [request(Operation.INCREMENT, b"n", CounterDelta(1).encode())] * 500
    for _ in range(60):
        send(partition, *rows)
    arrays = [partition.snapshots.open.statistics()["arrays"]]
    for key in (b"a", b"b"):
        put(partition, key)
        bucket.check_invariants()
        arrays.append(partition.snapshots.open.statistics()["arrays"])
    assert arrays == [1, 2, 1], "the first is dropped with its last document"
    assert read(partition) == "(0,30004] n@30002 a@30003 b@30004 ."


def test_one_batch_supersedes_documents_of_old_arrays_in_any_order() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    increments = [request(Operation.INCREMENT, b"n", CounterDelta(1).encode())] * 500
    for key in (b"a", b"b"):
        put(partition, key, b"other " + key)
        for _ in range(60):
            send(partition, *increments)
    assert partition.snapshots.open.statistics()["arrays"] > 1
    put(partition, b"b", b"a")
    bucket.check_invariants()
    assert read(partition).split()[-4:] == ["n@60004", "b@60005", "a@60006", "."]


def test_rows_become_an_array_when_they_are_enough() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    for index in range(3000):
        put(partition, b"%d" % index)
    arrays = partition.snapshots.open.statistics()["arrays"]
    assert arrays == 3, "1,024, 1,024, and the rows"
    for index in range(10):
        put(partition, b"%d" % index, value=bytes(60_000))
    assert partition.snapshots.open.statistics()["arrays"] > arrays
    bucket.check_invariants()


def test_a_snapshot_filled_by_adds_consists_of_a_few_arrays() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    for low in range(0, 3000, 50):
        send(partition, *(request(Operation.ADD, b"%d" % n) for n in range(low, low + 50)))
    assert partition.snapshots.open.statistics()["arrays"] == 3
    bucket.check_invariants()


def test_a_number_that_no_mutation_has_raises_a_key_error() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    increment = request(Operation.INCREMENT, b"n", CounterDelta(1).encode())
    for rows in (request(Operation.SET, b"a"), increment):
        send(partition, rows)
    put(partition, b"large", value=bytes(300_000))
    for _ in range(2):
        send(partition, increment)

    def check() -> None:
        for seq, key in ((1, b"a"), (3, b"large"), (5, b"n")):
            assert partition.snapshots.find(seq).key == key
        for seq in (2, 4):
            with pytest.raises(KeyError):
                partition.snapshots.find(seq)

    check()
    cursor = cursor_at(partition)
    cursor.next()  # it closes the snapshot, and encodes nothing
    check()
    assert transcript(items(cursor)) == "a@1 large@3 n@5 ."
    check()
    bucket.check_invariants()


def test_small_arrays_share_a_segment() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    for low in range(0, 2000, 100):
        put(partition, *(b"%d" % index for index in range(low, low + 100)))
    assert partition.snapshots.open.statistics()["arrays"] == 20
    chunks = all_chunks(partition)
    assert [chunk.count for chunk in chunks] == [2000]
    bucket.check_invariants()


def test_segments_are_not_much_longer_than_they_should_be() -> None:
    bucket = new_bucket()
    partition = bucket.partitions[0]
    for low in range(0, 4000, 100):
        put(partition, *(b"%d" % index for index in range(low, low + 100)), value=bytes(400))
    chunks = all_chunks(partition)
    assert len(chunks) == 8
    assert max(chunk.nbytes for chunk in chunks) < 300_000
    bucket.check_invariants()
