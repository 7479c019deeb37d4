"""Partitions: what each operation does, numbers, CAS, expiry, tokens, reads."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.helpers import (
    NOW,
    cursor_at,
    get_item,
    items,
    new_partition,
    put,
    read,
    request,
    send,
    transcript,
)
from tests.engine.helpers import chunks as all_chunks
from tests.kit.answer_rows import unpack_rows
from tests.kit.effort import effort
from upr_protocol.chunk import Chunk, ChunkPieces, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.errors import ChunkError, Status
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from upr_server.engine import (
    CheckedChunk,
    MutateResult,
    MutationBatch,
    Partition,
    PartitionImage,
    WriterToken,
    batch_of,
)
from upr_server.engine.evaluation_steps import BULK_ROWS_MIN
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.mutate_result import pack_result, unpack_result
from upr_server.engine.publisher_answers import BATCHES_MAX

MAXIMUM = (1 << 64) - 1
SET, DELETE, ADD, REPLACE = Operation.SET, Operation.DELETE, Operation.ADD, Operation.REPLACE
APPEND, PREPEND, TOUCH = Operation.APPEND, Operation.PREPEND, Operation.TOUCH
INCREMENT, DECREMENT = Operation.INCREMENT, Operation.DECREMENT


def delta(by: int = 1, initial: int = 0, create: bool = True) -> bytes:
    return CounterDelta(by, initial, create).encode()


def value(partition: Partition, key: bytes = b"k", now: float = NOW) -> bytes | None:
    item = get_item(partition, key, now)
    return None if item is None else item.value


def failures(
    partition: Partition, *rows: Mutation, now: float = NOW
) -> Sequence[tuple[int, Status]]:
    return send(partition, *rows, now=now).failures


# Numbers and CAS.


def test_a_new_partition_begins_a_history_at_0() -> None:
    partition = Partition(PartitionId(7), lambda: HistoryId(99))
    assert partition.failover_log.pairs() == [(99, 0)]
    assert partition.state is PartitionState.ACTIVE
    assert (partition.high_seq, partition.snapshot_end) == (0, 0)
    assert repr(partition) == "<Partition 7, active, at 0>"


def test_successes_get_consecutive_numbers_and_failures_get_none() -> None:
    partition = new_partition()
    put(partition, b"there")
    result = send(
        partition,
        request(ADD, b"a"),
        request(ADD, b"there"),
        request(SET, b"b"),
        request(DELETE, b"missing"),
        request(DELETE, b"there"),
    )
    assert (result.first_seq, result.last_seq) == (2, 4)
    assert result.failures == [(1, Status.EXISTS), (3, Status.NOT_FOUND)]
    assert result.history_id == partition.failover_log.current
    assert result.status is Status.OK
    assert not result.is_repeated
    assert read(partition) == "(0,4] a@2 b@3 -there@4 ."


@pytest.mark.parametrize("rows", [[], [request(DELETE)]])
def test_a_batch_without_success_has_an_empty_range(rows: list[Mutation]) -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    result = send(partition, *rows)
    assert (result.first_seq, result.last_seq) == (3, 2)
    assert partition.high_seq == 2


def test_cas_follow_the_clock_and_never_go_back() -> None:
    partition = new_partition()
    first = put(partition, b"a", b"b", now=10)
    assert first.first_cas == 10_000_000_000
    assert partition.last_cas == first.first_cas + 1
    earlier = put(partition, b"c", now=9)
    assert earlier.first_cas == first.first_cas + 2
    later = send(partition, request(ADD, b"d"), request(SET, b"e"), now=11.5)
    assert later.first_cas == 11_500_000_000
    item = get_item(partition, b"e")
    assert item is not None
    assert item.cas == later.first_cas + 1
    partition.check_invariants()


def test_an_invalid_chunk_has_no_effect() -> None:
    partition = new_partition()
    with pytest.raises(ChunkError):
        send(partition, request(SET), request(INCREMENT))
    with pytest.raises(ChunkError):
        send(partition, request(Operation.EXPIRE))
    assert partition.high_seq == 0
    assert get_item(partition, b"k") is None


@given(
    st.lists(
        st.builds(
            Mutation,
            st.sampled_from([SET, ADD, Operation.DELETE]),
            st.sampled_from([b"", b"a", b"b", b"k" * KEY_BYTES_MAX, b"k" * (KEY_BYTES_MAX + 1)]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_key_of_a_wrong_length_fails_alone(rows: list[Mutation]) -> None:
    partition, other_partition = new_partition(), new_partition()
    result = send(partition, *rows)
    good = [index for index, row in enumerate(rows) if 1 <= len(row.key) <= KEY_BYTES_MAX]
    bad = {index: Status.BAD_KEY for index in range(len(rows)) if index not in good}
    failures = dict(result.failures)
    assert {index: failures[index] for index in bad} == bad
    # The others fare as if the bad ones had never been there.
    if good:
        expected = send(other_partition, *[rows[index] for index in good])
        assert {good[row]: status for row, status in expected.failures} == {
            index: status for index, status in failures.items() if index not in bad
        }
    assert partition.high_seq == other_partition.high_seq
    for key in {row.key for row in rows if 1 <= len(row.key) <= KEY_BYTES_MAX}:
        assert get_item(partition, key) == get_item(other_partition, key)
    partition.check_invariants()


def test_a_batch_that_begins_inside_a_chunk_names_its_failures_by_their_place_in_it() -> None:
    rows = [request(SET, b""), request(SET, b"a"), request(SET, b""), request(SET, b"b")]
    batch = MutationBatch(CheckedChunk(Chunk.build(rows)), 1, 4)
    result = new_partition().mutate(batch, now=NOW)
    assert result.failures == [(1, Status.BAD_KEY)]


@pytest.mark.parametrize(
    "state", [state for state in PartitionState if state is not PartitionState.ACTIVE]
)
def test_only_the_active_takes_writes(state: PartitionState) -> None:
    partition = new_partition()
    put(partition, b"a")
    partition.state = state
    result = put(partition, b"b")
    assert result.status is Status.WRONG_STATE
    assert (result.first_seq, result.last_seq, result.first_cas) == (2, 1, 0)
    assert partition.high_seq == 1


# Reading.


def test_an_item_is_read_as_it_was_written() -> None:
    partition = new_partition()
    result = send(
        partition, Mutation(SET, b"\0\xff", b"\x80", flags=5, expiry=2000), request(SET, b"e", b"")
    )
    assert get_item(partition, b"\0\xff") == Mutation(
        SET, b"\0\xff", b"\x80", SeqNo(1), result.first_cas, 5, 2000
    )
    assert get_item(partition, b"e") == Mutation(
        SET, b"e", b"", SeqNo(2), Cas(result.first_cas + 1)
    )
    assert get_item(partition, b"missing") is None


@pytest.mark.parametrize("batch", [1, 63, 64, 5000])
def test_items_are_found_wherever_they_lie(batch: int) -> None:
    partition = new_partition()
    keys = [b"%d" % index for index in range(batch)]
    partition.mutate(batch_of(chunk_of_plain_sets(keys, keys)), now=NOW)
    for closed, encoded in ((False, False), (True, False), (True, True)):
        if closed:
            cursor_at(partition).next()
        if encoded:
            read(partition)
        for key in keys[:: max(1, batch // 50)]:
            assert value(partition, key) == key
    partition.check_invariants()


def test_counters_are_found_wherever_they_lie() -> None:
    partition = new_partition()
    send(
        partition,
        request(INCREMENT, b"n", delta()),
        request(SET, b"a"),
        request(INCREMENT, b"m", delta()),
    )
    for _ in range(3):
        assert (value(partition, b"n"), value(partition, b"m")) == (b"0", b"0")
        cursor = cursor_at(partition)
        cursor.next()
        cursor.close()
    read(partition)
    assert (value(partition, b"n"), value(partition, b"m")) == (b"0", b"0")


def test_get_answers_in_the_order_asked() -> None:
    partition = new_partition()
    put(partition, b"a", b"b", value=b"x")
    send(partition, request(DELETE, b"a"))
    answers = partition.get([b"b", b"a", b"missing", b"b"], NOW)
    rows = [(row.op, row.key, row.value, row.seq) for row in answers]
    row = (SET, b"b", b"x", 2)
    assert rows == [row, (DELETE, b"a", b"", 0), (DELETE, b"missing", b"", 0), row]
    assert partition.get([], NOW) == []


def test_get_says_which_keys_no_item_can_have() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    rows = partition.get([b"a", b"", bytes(KEY_BYTES_MAX + 1), b"b"], NOW)
    assert [(row.op, row.flags) for row in rows] == [
        (SET, 0), (DELETE, Status.BAD_KEY), (DELETE, Status.BAD_KEY), (SET, 0),
    ]  # fmt: skip


def test_get_ends_before_it_is_too_long_but_not_before_its_first() -> None:
    partition = new_partition()
    put(partition, b"a", b"b", b"c", value=bytes(1000))
    assert len(partition.get([b"a", b"b", b"c"], NOW, bytes_max=2200)) == 2
    assert len(partition.get([b"a", b"b", b"c"], NOW, bytes_max=10)) == 1
    for bytes_max in (1100, 2500, 3300):
        pieces = ChunkPieces(partition.get([b"a", b"b", b"c"], NOW, bytes_max), SeqNo(0), SeqNo(3))
        assert sum(map(len, pieces.pieces())) <= bytes_max + 100


# The operations.


def test_add_replace_delete() -> None:
    partition = new_partition()
    assert failures(partition, request(REPLACE, value=b"0")) == [(0, Status.NOT_FOUND)]
    assert failures(partition, request(ADD, value=b"1")) == []
    assert failures(partition, request(ADD, value=b"2")) == [(0, Status.EXISTS)]
    assert value(partition) == b"1"
    assert failures(partition, request(REPLACE, value=b"3")) == []
    assert value(partition) == b"3"
    assert failures(partition, request(DELETE)) == []
    assert value(partition) is None
    assert failures(partition, request(DELETE)) == [(0, Status.NOT_FOUND)]
    assert failures(partition, request(ADD, value=b"4")) == []
    assert value(partition) == b"4"


def test_append_and_prepend_keep_flags_and_expiry() -> None:
    partition = new_partition()
    assert failures(partition, request(APPEND), request(PREPEND)) == [
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
    assert failures(partition, request(TOUCH, expiry=9)) == [(0, Status.NOT_FOUND)]
    send(partition, Mutation(SET, b"k", b"2", flags=9, expiry=5000))
    send(partition, Mutation(TOUCH, b"k", b"ignored", flags=1, expiry=6000))
    item = get_item(partition, b"k")
    assert item is not None
    assert (item.value, item.flags, item.expiry, item.seq) == (b"2", 9, 6000, 2)


def test_a_value_may_not_grow_over_the_limit() -> None:
    partition = new_partition()
    assert failures(partition, request(SET, value=bytes(VALUE_BYTES_MAX))) == []
    too_large = [(0, Status.TOO_LARGE), (1, Status.TOO_LARGE)]
    assert (
        failures(partition, request(APPEND, value=b"!"), request(PREPEND, value=b"!")) == too_large
    )
    assert failures(partition, request(APPEND)) == []
    item = get_item(partition, b"k")
    assert item is not None
    assert len(item.value) == VALUE_BYTES_MAX
    assert read(partition) == "(0,2] k@2 ."


def test_an_operation_that_expects_another_cas_is_refused() -> None:
    partition = new_partition()
    cas = put(partition, b"k").first_cas
    for op in (SET, REPLACE, DELETE, APPEND, PREPEND, TOUCH):
        assert failures(partition, request(op, cas=cas + 1)) == [(0, Status.CAS_MISMATCH)], op
        assert failures(partition, request(op, b"missing", cas=cas)) == [(0, Status.NOT_FOUND)]
    for op in (INCREMENT, DECREMENT):
        assert failures(partition, request(op, value=delta(), cas=1)) == [(0, Status.CAS_MISMATCH)]
        assert failures(partition, request(op, b"missing", delta(), cas=1)) == [
            (0, Status.NOT_FOUND)
        ]
    assert failures(partition, request(ADD, cas=cas)) == [(0, Status.EXISTS)]
    assert failures(partition, request(ADD, b"missing", cas=cas)) == [(0, Status.NOT_FOUND)]
    assert partition.high_seq == 1
    # The first success changes the CAS that the second expects.
    result = send(partition, request(SET, value=b"1", cas=cas), request(SET, value=b"2", cas=cas))
    assert result.failures == [(1, Status.CAS_MISMATCH)]
    assert value(partition) == b"1"
    assert failures(partition, request(DELETE, cas=result.first_cas)) == []


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
        assert failures(partition, request(op, value=delta())) == [(0, Status.NOT_A_NUMBER)]
    assert value(partition) == text


def test_a_missing_counter_starts_at_its_initial_value_or_not_at_all() -> None:
    partition = new_partition()
    row = Mutation(INCREMENT, b"k", delta(5, initial=30), flags=2, expiry=9000)
    result = send(partition, request(INCREMENT, value=delta(create=False)), row, row)
    assert result.failures == [(0, Status.NOT_FOUND)]
    assert result.counters == [(1, 30), (2, 35)]
    item = get_item(partition, b"k")
    assert item is not None
    assert (item.value, item.flags, item.expiry, item.seq) == (b"35", 2, 9000, 2)


# Large things, and the cutting of long batches.


def test_the_longest_keys_and_values() -> None:
    partition = new_partition()
    key = bytes(range(KEY_BYTES_MAX))
    send(partition, Mutation(SET, key, bytes(VALUE_BYTES_MAX)), request(SET, b"small"))
    assert value(partition, key) == bytes(VALUE_BYTES_MAX)
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
    assert value(partition, b"50") == bytes(300_000)
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
    assert value(partition, b"3") == bytes(size)
    assert value(partition, b"4") is None
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
    assert value(partition, keys[-1]) == bytes(size)
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
    assert value(partition, b"large") == large
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


# Expiry.


def test_an_expired_item_reads_as_missing_at_once() -> None:
    partition = new_partition()
    send(partition, request(SET, value=b"v", expiry=1001))
    assert value(partition, now=1000.9) == b"v"
    assert value(partition, now=1001) is None
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
    assert failures(partition, request(op), now=1001) == [(0, Status.NOT_FOUND)]
    assert failures(partition, request(op, cas=cas), now=1001) == [(0, Status.NOT_FOUND)]


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
    assert value(partition, b"a") == b"2"


def test_a_touched_item_lives_on() -> None:
    partition = new_partition()
    send(partition, request(SET, expiry=1001))
    send(partition, request(TOUCH, expiry=2000))
    assert partition.expire(1500) == 0
    assert value(partition, now=1500) == b""
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
    assert value(partition, now=2000) is None
    partition.state = PartitionState.ACTIVE
    assert partition.expire(2000) == 1


def test_expiring_is_done_in_parts() -> None:
    partition = new_partition()
    rows = [request(SET, b"%d" % index, expiry=1001) for index in range(1500)]
    send(partition, *rows)
    assert [partition.expire(1001) for _ in range(7)] == [256] * 5 + [220, 0]


# Writer tokens.

WRITER = WriterToken(bytes(16), 1)


def test_a_batch_sent_again_has_no_second_effect() -> None:
    partition = new_partition()
    chunk = Chunk.build([request(INCREMENT, value=delta(1, 10)), request(DELETE, b"missing")])
    first = partition.mutate(batch_of(chunk, WRITER), now=NOW)
    again = partition.mutate(batch_of(chunk, WRITER), now=NOW + 1)
    assert again.is_repeated
    assert not first.is_repeated
    assert (again.first_seq, again.first_cas) == (first.first_seq, first.first_cas)
    assert again.counters == first.counters == [(0, 10)]
    assert again.failures == first.failures == [(1, Status.NOT_FOUND)]
    assert value(partition) == b"10"
    third = partition.mutate(batch_of(chunk, WriterToken(bytes(16), 2)), now=NOW)
    assert third.counters == [(0, 11)]
    partition.check_invariants()


def test_a_batch_older_than_the_remembered_answers_is_refused() -> None:
    partition = new_partition()
    for counter in range(1, 66):
        put_as(partition, counter)
    assert put_as(partition, 2).is_repeated
    high = partition.high_seq
    assert put_as(partition, 1).status is Status.TOKEN_TOO_OLD
    assert partition.high_seq == high


def put_as(partition: Partition, counter: int, writer: int = 0) -> MutateResult:
    token = WriterToken(writer.to_bytes(16, "little"), counter)
    return partition.mutate(batch_of(chunk_of_plain_sets([b"k"], [b"v"]), token), now=NOW)


def test_answers_are_remembered_in_few_bytes() -> None:
    """All that a publisher has in flight is known again, however large its counters are."""
    memory = MemoryAccount()
    partition = Partition(PartitionId(0), lambda: HistoryId(7), memory=memory)
    partition.repeated_batches.answers.track_unsaved()
    rows = [request(INCREMENT, b"%d" % index, value=delta(1, 2**64 - 100)) for index in range(1000)]
    chunk = Chunk.build(rows)
    answers = {}
    for counter in range(1, 65):
        token = WriterToken(bytes(16), counter)
        answers[counter] = partition.mutate(batch_of(chunk, token), now=NOW)
    answer_rows, _ = partition.repeated_batches.answers.take_unsaved(partition.high_seq)
    assert unpack_rows(answer_rows) == {
        (bytes(16), counter): None if counter <= 64 - 16 else pack_result(answers[counter])
        for counter in answers
    }
    assert memory.writers < 170_000
    for counter in range(49, 65):
        again = partition.mutate(batch_of(chunk, WriterToken(bytes(16), counter)), now=NOW)
        assert again == msgspec.structs.replace(answers[counter], is_repeated=True)
    partition.check_invariants()


@given(
    st.dictionaries(st.integers(0, 2**20), st.sampled_from(Status)),
    st.dictionaries(st.integers(0, 2**20), st.integers(0, 2**64 - 1)),
)
def test_a_remembered_answer_is_the_one_given(
    failures: dict[int, Status], counters: dict[int, int]
) -> None:
    result = MutateResult(
        HistoryId(2**64 - 1),
        SeqNo(2**48),
        SeqNo(2**48 + 5),
        Cas(2**63),
        sorted(failures.items()),
        sorted(counters.items()),
        chain=2**32 - 1,
        attempt=2**64 - 1,
    )
    assert unpack_result(pack_result(result)) == result


def test_an_answer_that_an_older_server_stored_unpacked_is_read() -> None:
    result = MutateResult(
        HistoryId(7), SeqNo(1), SeqNo(2), Cas(9), [(0, Status.EXISTS)], [(1, 5)], attempt=3
    )
    older = msgspec.msgpack.encode(result)
    assert unpack_result(older) == result
    assert unpack_result(older, is_repeated=True) == msgspec.structs.replace(
        result, is_repeated=True
    )


def test_a_refused_state_is_not_remembered() -> None:
    partition = new_partition()
    partition.state = PartitionState.PENDING
    assert put_as(partition, 1).status is Status.WRONG_STATE
    partition.state = PartitionState.ACTIVE
    result = put_as(partition, 1)
    assert (result.status, result.is_repeated) == (Status.OK, False)


def test_batches_behind_one_that_was_put_off_are_done_after_it() -> None:
    partition = new_partition()
    put_as(partition, 1)
    partition.repeated_batches.note_refused(None)
    partition.state = PartitionState.PENDING
    assert put_as(partition, 2).status is Status.WRONG_STATE
    partition.state = PartitionState.ACTIVE
    assert put_as(partition, 3).status is Status.TEMPORARY_FAILURE
    assert put_as(partition, 1, writer=1).status is Status.OK
    assert partition.high_seq == 2
    assert [put_as(partition, counter).first_seq for counter in (2, 3, 4)] == [3, 4, 5]
    partition.check_invariants()


def test_a_batch_that_was_done_before_it_was_put_off_is_known() -> None:
    partition = new_partition()
    put_as(partition, 1)
    put_as(partition, 2)
    partition.repeated_batches.note_refused(WriterToken(bytes(16), 1))
    assert put_as(partition, 2).status is Status.TEMPORARY_FAILURE
    assert put_as(partition, 1).is_repeated
    assert put_as(partition, 2).is_repeated
    assert put_as(partition, 3).first_seq == 3


# Tasks that are run again.


def run_again(partition: Partition, variants: str, attempt: int, counters: range) -> list[str]:
    """Sends the batches of a run, each one variant of its counter's; gives what became of each."""
    answers = []
    chain = 0
    for counter in range(1, counters.stop):
        chunk = chunk_of_plain_sets([b"k%d" % counter], [variants[counter - 1].encode()])
        chain = chunk.chained_crc(chain)
        if counter in counters:
            token = WriterToken(bytes(16), counter)
            result = partition.mutate(batch_of(chunk, token, attempt=attempt, chain=chain), now=NOW)
            assert result.status is Status.OK or result.last_seq == partition.high_seq
            answers.append("again" if result.is_repeated else result.status.name)
    return answers


class TasksRunAgain(RuleBasedStateMachine):
    """One task, run again and again, now and then with other batches; and a server that crashes.

    The model is the variants of the batches that were done, and the highest attempt heard of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.partition = new_partition()
        self.partition.repeated_batches.answers.track_unsaved()
        self.answers: dict[WriterToken, bytes] = {}
        self.done, self.attempt = "", 0
        self.kept = (self.done, self.attempt, SeqNo(0))

    def said(self, counter: int, variants: str, attempt: int) -> str:
        """What the model says of one batch, and does."""
        if attempt < self.attempt:
            return "SUPERSEDED"
        if counter <= len(self.done) - BATCHES_MAX:
            return "TOKEN_TOO_OLD"
        if counter <= len(self.done):
            if variants[:counter] != self.done[:counter]:
                return "REPLAY_DIFFERS"
            self.attempt = max(attempt, self.attempt)
            return "again"
        if variants[: counter - 1] != self.done:
            return "REPLAY_DIFFERS"
        self.done, self.attempt = variants[:counter], attempt
        return "OK"

    @rule(
        attempt=st.integers(1, 5),
        batches=st.integers(1, 90) | st.integers(1, 5),
        other_at=st.none() | st.integers(1, 90),
    )
    def run(self, attempt: int, batches: int, other_at: int | None) -> None:
        variants = "a" * batches
        if other_at is not None:
            variants = variants[: other_at - 1] + "b" * (batches - other_at + 1)
        expected: list[str] = []
        for counter in range(1, batches + 1):
            expected.append(self.said(counter, variants, attempt))
            if expected[-1] == "REPLAY_DIFFERS":
                # What is on its way already waits for what never comes.
                behind = min(16, batches - counter)
                expected += ["TEMPORARY_FAILURE"] * behind
                break
        assert run_again(self.partition, variants, attempt, range(1, len(expected) + 1)) == expected

    @precondition(lambda self: self.attempt > 1)
    @rule(data=st.data())
    def go_on_though_overtaken(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempt - 1))
        begin = data.draw(st.integers(1, len(self.done) + 2))
        answers = run_again(self.partition, "c" * (begin + 1), attempt, range(begin, begin + 2))
        assert answers == ["SUPERSEDED"] * 2

    @rule()
    def commit(self) -> None:
        through = self.partition.high_seq
        rows, _ = self.partition.repeated_batches.answers.take_unsaved(through)
        for name, answer in unpack_rows(rows).items():
            token = WriterToken(*name)
            if answer is None:
                self.answers.pop(token, None)
            else:
                self.answers[token] = answer
        self.kept = (self.done, self.attempt, through)

    @rule()
    def crash(self) -> None:
        self.done, self.attempt, high = self.kept
        answers = {
            token: unpack_result(answer)
            for token, answer in sorted(self.answers.items(), key=lambda item: item[0].counter)
        }
        image = PartitionImage(
            PartitionState.ACTIVE, self.partition.failover_log, high, answers=answers
        )
        self.partition = Partition(PartitionId(0), lambda: HistoryId(7), image=image)
        self.partition.repeated_batches.answers.track_unsaved()

    @invariant()
    def all_is_well(self) -> None:
        # Every key is written once by each run: what was done twice would have a number more.
        assert self.partition.high_seq == len(self.done)
        self.partition.repeated_batches.answers.check_invariants()


TestTasksRunAgain = TasksRunAgain.TestCase
TestTasksRunAgain.settings = settings(max_examples=60, stateful_step_count=12)


def test_a_fence_and_a_difference_in_words() -> None:
    partition = new_partition()
    assert run_again(partition, "aaa", 1, range(1, 4)) == ["OK"] * 3
    assert run_again(partition, "aaaa", 2, range(1, 3)) == ["again"] * 2
    assert run_again(partition, "aaaa", 1, range(4, 5)) == ["SUPERSEDED"]
    assert run_again(partition, "abaaa", 3, range(1, 6)) == [
        *("again", "REPLAY_DIFFERS"),
        *["TEMPORARY_FAILURE"] * 3,
    ]
    # The next batch is new, and not what it continues.
    assert run_again(partition, "abaa", 4, range(4, 5)) == ["REPLAY_DIFFERS"]
    # Those who give no chain are not asked about it.
    token = WriterToken(bytes(16), 2)
    other_chunk = chunk_of_plain_sets([b"other"], [b""])
    assert partition.mutate(batch_of(other_chunk, token, attempt=4), now=NOW).is_repeated
    assert partition.high_seq == 3


def test_statistics_count_items_writers_and_cursors() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    send(partition, request(DELETE, b"a"), request(SET, b"c", expiry=5000))
    put_as(partition, 1)
    figures = partition.statistics()
    assert (figures["items"], figures["keys"], figures["high"]) == (3, 4, 5)
    assert (figures["writers"], figures["expiring"], figures["cursors"]) == (1, 1, 1)
