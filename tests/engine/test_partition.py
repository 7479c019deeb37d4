"""Partitions: numbers, CAS and reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.helpers import (
    ADD,
    DELETE,
    INCREMENT,
    NOW,
    SET,
    cursor_at,
    delta,
    get_item,
    new_partition,
    put,
    put_as,
    read,
    request,
    send,
    value_of,
)
from upr_protocol.chunk import Chunk, ChunkPieces, Mutation, chunk_of_plain_sets
from upr_protocol.errors import ChunkError, Status
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX
from upr_server.engine import (
    CheckedChunk,
    MutationBatch,
    Partition,
    batch_of,
)


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
            assert value_of(partition, key) == key
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
        assert (value_of(partition, b"n"), value_of(partition, b"m")) == (b"0", b"0")
        cursor = cursor_at(partition)
        cursor.next()
        cursor.close()
    read(partition)
    assert (value_of(partition, b"n"), value_of(partition, b"m")) == (b"0", b"0")


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


def test_statistics_count_items_writers_and_cursors() -> None:
    partition = new_partition()
    put(partition, b"a", b"b")
    send(partition, request(DELETE, b"a"), request(SET, b"c", expiry=5000))
    put_as(partition, 1)
    figures = partition.statistics()
    assert (figures["items"], figures["keys"], figures["high"]) == (3, 4, 5)
    assert (figures["writers"], figures["expiring"], figures["cursors"]) == (1, 1, 1)
