"""Batches of many rows or of large values: how they are divided and stored."""

from __future__ import annotations

from random import Random

import pytest

from tests.engine.helpers import (
    ADD,
    APPEND,
    DELETE,
    INCREMENT,
    NOW,
    REPLACE,
    SET,
    TOUCH,
    cursor_at,
    delta,
    get_item,
    items,
    new_partition,
    put,
    read,
    request,
    send,
    value_of,
)
from tests.engine.helpers import chunks as all_chunks
from tests.kit.effort import effort
from upr_protocol.chunk import Chunk, Mutation, chunk_of_plain_sets
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from upr_server.engine import (
    CheckedChunk,
    MutationBatch,
    batch_of,
)
from upr_server.engine.evaluation_steps import BULK_ROWS_MIN


def test_the_longest_keys_and_values() -> None:
    partition = new_partition()
    key = bytes(range(KEY_BYTES_MAX))
    send(partition, Mutation(SET, key, bytes(VALUE_BYTES_MAX)), request(SET, b"small"))
    assert value_of(partition, key) == bytes(VALUE_BYTES_MAX)
    nbytes = partition.snapshots.open.nbytes
    assert nbytes > VALUE_BYTES_MAX
    put(partition, key)
    assert partition.snapshots.open.nbytes < 10_000, "a large value goes when it is superseded"
    partition.check_invariants()


def test_large_values_among_small_ones_do_not_keep_each_other() -> None:
    partition = new_partition()
    keys = [b"%d" % index for index in range(100)]
    values = [bytes(300_000) if index == 50 else b"small" for index in range(100)]
    partition.mutate(batch_of(chunk_of_plain_sets(keys, values)), now=NOW)
    assert value_of(partition, b"50") == bytes(300_000)
    put(partition, b"50")
    assert partition.snapshots.open.nbytes < 20_000
    partition.check_invariants()
    assert read(partition).count("@") == 100


@pytest.mark.parametrize("size", [1, 300_000])
def test_some_rows_of_a_chunk_are_stored_alone(size: int) -> None:
    keys = [b"%d" % index for index in range(6)]
    checked = CheckedChunk(chunk_of_plain_sets(keys, [bytes(size)] * 6))
    partition = new_partition()
    result = partition.mutate(MutationBatch(checked, 2, 4), now=NOW)
    assert (result.first_seq, result.last_seq) == (1, 2)
    assert read(partition) == "(0,2] 2@1 3@2 ."
    assert value_of(partition, b"3") == bytes(size)
    assert value_of(partition, b"4") is None
    partition.check_invariants()


@pytest.mark.parametrize(("count", "size"), [(10_000, 3), (300, 10_000)])
def test_long_batches_are_cut(count: int, size: int) -> None:
    partition = new_partition()
    keys = [b"%d" % index for index in range(count)]
    result = partition.mutate(batch_of(chunk_of_plain_sets(keys, [bytes(size)] * count)), now=NOW)
    chunks = all_chunks(partition)
    assert [(row.key, row.cas) for chunk in chunks for row in chunk] == [
        (key, result.first_cas + index) for index, key in enumerate(keys)
    ]
    assert len(chunks) > 2
    assert max(chunk.count for chunk in chunks) <= 4096
    assert max(chunk.nbytes for chunk in chunks) <= 1024 * 1024 + 100_000
    assert value_of(partition, keys[-1]) == bytes(size)
    partition.check_invariants()


def test_many_evaluated_sets_are_stored_as_a_chunk_like_single_ones() -> None:
    """A batch with conditions of 64 sets or more takes another way into the open snapshot."""
    rows = [
        request(ADD, b"%d" % index, b"v%d" % index, expiry=int(NOW) + 5 if index % 3 else 0)
        for index in range(BULK_ROWS_MIN)
    ]
    as_chunk, one_by_one = new_partition(), new_partition()
    result = send(as_chunk, *rows)
    last_seqs = [send(one_by_one, row).last_seq for row in rows]
    assert (result.first_seq, result.last_seq, last_seqs[-1]) == (1, len(rows), len(rows))
    assert as_chunk.last_cas == one_by_one.last_cas == result.first_cas + len(rows) - 1
    assert as_chunk.snapshots.open.statistics()["arrays"] == 1
    stored_item, expected = (
        [row for chunk in all_chunks(partition) for row in chunk]
        for partition in (as_chunk, one_by_one)
    )
    assert stored_item == expected
    assert as_chunk.expire(NOW + 5) == one_by_one.expire(NOW + 5) > 0
    assert read(as_chunk) == read(one_by_one)
    as_chunk.check_invariants()


@pytest.mark.parametrize("seed", range(effort(3, 40)))
def test_long_batches_of_any_operations_are_stored_like_single_ones(seed: int) -> None:
    """Deletions, counters, keys that occur twice and large values among them, in batches that are
    stored in arrays; readers close snapshots between some of them."""
    random = Random(seed)
    keys = [b"%d" % index for index in range(random.choice([30, 200, 600]))]
    operations = [ADD, SET, DELETE, REPLACE, APPEND, TOUCH, INCREMENT]
    weights = [random.choice([0, 1, 5]) for _ in operations]
    weights[0] += 1
    as_batches, one_by_one = new_partition(), new_partition()
    array_count = 0
    for _ in range(8):
        rows = []
        for operation in random.choices(operations, weights, k=random.choice([70, 300, 2000])):
            size = random.choice([0, 3, 3, 3, 3, 70_000 if random.random() < 0.02 else 9])
            change = delta() if operation is INCREMENT else bytes(size)
            expiry = random.choice([0, 0, int(NOW) + 5])
            rows.append(request(operation, random.choice(keys), change, expiry=expiry))
        # One after the other in one partition: `send` of a single row is never long.
        single_results = [send(one_by_one, row) for row in rows]
        result = send(as_batches, *rows)
        assert result.counters == [
            (index, single.counters[0][1])
            for index, single in enumerate(single_results)
            if single.counters
        ]
        assert len(result.failures) == sum(bool(single.failures) for single in single_results)
        assert as_batches.high_seq == one_by_one.high_seq
        array_count += as_batches.snapshots.open.statistics()["arrays"]
        as_batches.check_invariants()
        for key in keys:
            stored_item, expected = get_item(as_batches, key), get_item(one_by_one, key)
            assert (stored_item is None) == (expected is None)
            if stored_item is not None and expected is not None:
                assert (stored_item.value, stored_item.seq) == (expected.value, expected.seq)
                assert (stored_item.expiry, stored_item.flags) == (expected.expiry, expected.flags)
        if random.random() < 0.4:
            streamed, expected_rows = (
                [
                    (row.op, row.key, row.value, row.seq)
                    for chunk in all_chunks(partition)
                    for row in chunk
                ]
                for partition in (as_batches, one_by_one)
            )
            assert streamed == expected_rows
    assert array_count > 0
    for partition in (as_batches, one_by_one):
        while partition.has_expired(NOW + 5):
            partition.expire(NOW + 5)
        partition.check_invariants()
    assert as_batches.high_seq == one_by_one.high_seq
    assert as_batches.get(keys, NOW + 5) == one_by_one.get(keys, NOW + 5)


def test_large_values_lie_between_counters_and_small_values() -> None:
    partition = new_partition()
    large = bytes(100_000)
    send(partition, request(ADD, b"a", b"1"))
    send(partition, request(INCREMENT, b"n", delta()))
    send(partition, request(ADD, b"large", large))
    send(partition, request(INCREMENT, b"m", delta()))
    send(partition, request(ADD, b"b", b"2"))
    partition.check_invariants()
    assert value_of(partition, b"large") == large
    chunks = all_chunks(partition)
    assert [(row.seq, row.key) for chunk in chunks for row in chunk] == [
        (1, b"a"), (2, b"n"), (3, b"large"), (4, b"m"), (5, b"b"),
    ]  # fmt: skip
    for start in range(6):
        expected = [row.seq for chunk in chunks for row in chunk if row.seq > start]
        cursor = cursor_at(partition, start)
        chunk_items = [item for item in items(cursor) if isinstance(item, Chunk)]
        assert [row.seq for chunk in chunk_items for row in chunk] == expected
        cursor.close()
    partition.check_invariants()


def test_a_small_value_just_written_is_replaced_by_a_large_one() -> None:
    partition = new_partition()
    send(partition, request(ADD, b"k", b"small"))
    put(partition, b"k", value=bytes(300_000))
    partition.check_invariants()
    assert partition.snapshots.open.statistics()["arrays"] == 1
    assert read(partition) == "(0,2] k@2 ."


def test_a_large_value_frees_arrays_of_superseded_ones() -> None:
    """The flags of all arrays move to them. Those without anything live are freed at once."""
    partition = new_partition()
    keys = [b"%d" % index for index in range(100)]
    for _ in range(3):
        put(partition, *keys, value=bytes(100))
    assert partition.snapshots.open.statistics()["arrays"] == 3
    put(partition, b"large", value=bytes(300_000))
    assert partition.snapshots.open.statistics()["arrays"] == 2
    partition.check_invariants()
    assert read(partition).count("@") == 101


def test_a_batch_in_a_much_larger_buffer_is_copied_out_of_it() -> None:
    partition = new_partition()
    encoded = bytes(
        chunk_of_plain_sets([b"%d" % index for index in range(100)], [bytes(1000)] * 100)
    )
    buffer = bytearray(10 * len(encoded))
    buffer[: len(encoded)] = encoded
    partition.mutate(batch_of(Chunk(memoryview(buffer)[: len(encoded)])), now=NOW)
    buffer.clear()  # raises if it is still referred to
