"""The index of a bucket: what it finds, and how it reports damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.calls import calls_of
from tests.storage.log_model import chunk_of, record_of, row
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine import FetchRequest, is_damaged
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.compaction import Compaction
from upr_server.storage.errors import CorruptionError
from upr_server.storage.key_index import FIND_BYTES_MAX, FIND_KEYS, KeyIndex
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord, chunk_key, expiry_key, index_entry_key
from upr_server.storage.simulated_disk import SimulatedDisk

PARTITIONS: Final = 2


class LoggedIndex:
    """A log, and its index."""

    def __init__(self, log: OrderedMap, index: OrderedMap) -> None:
        self.log = ChunkLog(log)
        self.index = KeyIndex(index, self.log)
        self.log.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)

    def commit(self, rows: Sequence[Mutation], partition: int = 0) -> None:
        """Commits each mutation in a chunk of its own."""
        start = int(self.log.high_seq(partition))
        chunks = []
        for mutation in rows:
            chunks.append(chunk_of([mutation], start, mutation.seq))
            start = mutation.seq
        self.log.commit([PartitionWrite(partition, record_of(start), chunks)])

    def follow(self, partition: int = 0) -> None:
        while self.index.follow_log(partition, 2).seq < self.log.high_seq(partition):
            pass

    def sweep(self, partition: int = 0) -> None:
        mark = self.index.watermark(partition)
        sweep = Compaction(self.log, self.index, partition, mark.seq)
        while not sweep.step(1, (), 0).is_done:
            pass

    def find(self, *keys: bytes, partition: int = 0, value: bool = True) -> list[Mutation | None]:
        return self.index.find_items(partition, [FetchRequest(key, 0, value) for key in keys])


def sets(*keys: bytes, first: int = 1, expiry: int = 0) -> list[Mutation]:
    return [row(Operation.SET, key, seq, seq, expiry) for seq, key in enumerate(keys, first)]


@pytest.fixture
def logged_index(log_and_index: list[OrderedMap]) -> Iterator[LoggedIndex]:
    yield LoggedIndex(*log_and_index)
    for ordered_map in log_and_index:
        ordered_map.close()


@pytest.fixture
def disks() -> tuple[LoggedIndex, SimulatedDisk, SimulatedDisk]:
    log, index = SimulatedDisk(), SimulatedDisk()
    return LoggedIndex(log, index), log, index


def test_it_finds_the_newest_of_each_key_as_of_its_watermark(logged_index: LoggedIndex) -> None:
    rows = sets(b"a", b"b", b"a")
    logged_index.commit(rows)
    assert logged_index.find(b"a", b"b") == [None, None]
    logged_index.follow()
    assert logged_index.find(b"a", b"never", b"b", b"a") == [rows[2], None, rows[1], rows[2]]
    logged_index.commit([row(Operation.DELETE, b"b", 4, 4), *sets(b"c", first=5)])
    assert logged_index.find(b"b", b"c") == [rows[1], None]
    logged_index.follow()
    assert logged_index.find(b"b") == [None]
    assert logged_index.index.watermark(0).item_count == 2


def test_partitions_and_keys_with_a_common_prefix_are_kept_apart(logged_index: LoggedIndex) -> None:
    first, second = sets(b"a", b"ab", b"a\0"), sets(b"a")
    logged_index.commit(first)
    logged_index.commit(second, partition=1)
    logged_index.follow()
    logged_index.follow(1)
    assert logged_index.find(b"a", b"ab", b"a\0", b"a\0\0") == [*first, None]
    assert logged_index.find(b"a", b"ab", partition=1) == [second[0], None]


def test_a_lookup_without_values_returns_sequence_number_and_expiry(
    logged_index: LoggedIndex,
) -> None:
    logged_index.commit(sets(b"a", b"b", expiry=70))
    logged_index.follow()
    (item,) = logged_index.find(b"b", value=False)
    assert item is not None
    assert (item.seq, item.expiry, item.value) == (2, 70, b"")


def test_an_answer_that_is_too_large_has_the_first_items(logged_index: LoggedIndex) -> None:
    rows = sets(b"a", b"b", b"c", b"d")
    logged_index.commit(rows)
    logged_index.follow()
    wants = [FetchRequest(key, 0, needs_value=True) for key in (b"d", b"none", b"a", b"b")]
    assert logged_index.index.find_items(0, wants, bytes_max=1) == [rows[3], None]
    assert logged_index.index.find_items(0, wants[2:], bytes_max=1) == [rows[0]]


def test_an_answer_fits_into_one_step_of_the_server(
    logged_index: LoggedIndex,
) -> None:
    value = bytes(256 * 1024)
    keys = [b"%02d" % index for index in range(1, 40)]
    logged_index.commit(
        [Mutation(Operation.SET, key, value, SeqNo(int(key)), Cas(int(key))) for key in keys]
    )
    logged_index.follow()
    items = logged_index.find(*keys)
    assert [item.key for item in items if item is not None] == keys[:8]
    assert FIND_BYTES_MAX // len(value) == 8


def test_items_that_do_not_fit_into_the_answer_are_not_looked_up(
    disks: tuple[LoggedIndex, SimulatedDisk, SimulatedDisk],
) -> None:
    logged_index, _, _ = disks
    keys = [b"%04d" % index for index in range(4 * FIND_KEYS)]
    logged_index.commit(sets(*keys))
    logged_index.follow()
    wants = [FetchRequest(key, 0, needs_value=True) for key in keys]

    def find(count: int) -> int:
        return calls_of(lambda: logged_index.index.find_items(0, wants[:count], bytes_max=1))

    assert find(len(keys)) < 1.1 * find(FIND_KEYS)
    items = logged_index.index.find_items(0, wants)
    assert [item.key for item in items if item is not None] == keys


def test_an_item_expires_once_and_not_when_it_was_overwritten(logged_index: LoggedIndex) -> None:
    logged_index.commit(sets(b"a", b"b", b"c", expiry=70))
    logged_index.follow()
    logged_index.commit([row(Operation.SET, b"a", 4, 4, 90), row(Operation.DELETE, b"b", 5, 5)])
    logged_index.follow()
    due, _ = logged_index.index.find_expired(100, b"", 10)
    assert [(item.key, item.expiry) for item in due] == [(b"c", 70), (b"a", 90)]


def test_a_clock_later_than_the_highest_expiry_time_finds_expired_items(
    logged_index: LoggedIndex,
) -> None:
    """Such a time does not fit into 32 bits."""
    logged_index.commit(sets(b"a", expiry=70))
    logged_index.follow()
    due, _ = logged_index.index.find_expired(1 << 33, b"", 10)
    assert [item.key for item in due] == [b"a"]


def test_a_tombstone_does_not_expire_even_with_an_expiry(logged_index: LoggedIndex) -> None:
    rows = sets(b"a", expiry=70)
    logged_index.commit([*rows, Mutation(Operation.DELETE, b"a", seq=SeqNo(2), expiry=80)])
    logged_index.follow()
    assert logged_index.index.find_expired(100, b"", 10) == ([], b"")
    assert logged_index.find(b"a") == [None]


def test_a_lookup_that_compaction_overtakes_is_repeated(
    logged_index: LoggedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged_index.commit(sets(b"a", b"b"))
    logged_index.follow()
    find = logged_index.log.find_mutations
    newer = sets(b"a", first=3)

    def overwritten_first(
        partition: int, numbers: Sequence[int], bytes_max: int
    ) -> list[Mutation | str]:
        monkeypatch.undo()
        logged_index.commit(newer)
        logged_index.follow()
        logged_index.sweep()
        return find(partition, numbers, bytes_max)

    monkeypatch.setattr(logged_index.log, "find_mutations", overwritten_first)
    assert logged_index.find(b"a", b"b") == [newer[0], sets(b"b", first=2)[0]]


# What is damaged.


def test_an_item_with_a_damaged_chunk_is_refused_and_others_are_not(
    disks: tuple[LoggedIndex, SimulatedDisk, SimulatedDisk],
) -> None:
    logged_index, log, _ = disks
    rows = sets(b"a", b"b")
    logged_index.commit(rows)
    logged_index.follow()
    for bit in range(0, 2_000, 37):
        log.flip_bit(chunk_key(0, 1), bit)
        damaged, intact = logged_index.find(b"a", b"b")
        assert damaged is not None
        assert is_damaged(damaged)
        assert intact == rows[1]
        log.flip_bit(chunk_key(0, 1), bit)
    assert logged_index.find(b"a") == [rows[0]]


def test_an_entry_that_is_damaged_is_refused(
    disks: tuple[LoggedIndex, SimulatedDisk, SimulatedDisk],
) -> None:
    logged_index, _, index = disks
    logged_index.commit(sets(b"a", b"b", expiry=70))
    logged_index.follow()
    for bit in range(8 * 16):
        index.flip_bit(index_entry_key(0, b"a"), bit)
        damaged, intact = logged_index.find(b"a", b"b")
        assert damaged is not None
        assert is_damaged(damaged)
        assert intact is not None
        assert not is_damaged(intact)
        index.flip_bit(index_entry_key(0, b"a"), bit)
    index.flip_bit(expiry_key(70, 0, 2), 3)
    items, _ = logged_index.index.find_expired(100, b"", 10)
    assert [item.key for item in items] == [b"a"]


def test_the_newest_numbers_are_those_of_single_entries_or_damaged(
    disks: tuple[LoggedIndex, SimulatedDisk, SimulatedDisk],
) -> None:
    logged_index, _, index = disks
    logged_index.commit([*sets(b"a", b"b", b"a"), row(Operation.DELETE, b"b", 4, 4)])
    logged_index.follow()
    newest_seqs = partial(logged_index.index.newest_seqs, 0, b"")
    assert newest_seqs(3) == ([3, 4], b"")
    assert newest_seqs(1) == ([3], index_entry_key(0, b"a"))
    assert logged_index.index.newest_seqs(0, index_entry_key(0, b"a"), 3) == ([4], b"")
    assert logged_index.index.newest_seqs(1, b"", 3) == ([], b"")
    for bit in range(8 * 16):
        index.flip_bit(index_entry_key(0, b"a"), bit)
        with pytest.raises(CorruptionError):
            newest_seqs(3)
        index.flip_bit(index_entry_key(0, b"a"), bit)
    with index.write() as transaction:
        transaction.put(index_entry_key(0, b"a"), b"short")
    with pytest.raises(CorruptionError, match="5 bytes"):
        newest_seqs(3)


def test_a_damaged_entry_that_was_deleted_expires_nothing(
    disks: tuple[LoggedIndex, SimulatedDisk, SimulatedDisk],
) -> None:
    """Only its expiry record is left. The key was set again, under the same sequence number,
    without an expiry: deleting it would lose the item."""
    logged_index, _, index = disks
    logged_index.commit(sets(b"a", b"b", expiry=70))
    logged_index.follow()
    index.flip_bit(index_entry_key(0, b"a"), 3)
    while logged_index.index.delete_entries(0, 1):
        pass
    logged_index.log.truncate(0, record_of(0))
    logged_index.commit([*sets(b"a"), *sets(b"b", first=2, expiry=70)])
    logged_index.follow()
    items, _ = logged_index.index.find_expired(100, b"", 10)
    assert [item.key for item in items] == [b"b"]


def test_an_index_ahead_of_its_log_is_refused(
    disks: tuple[LoggedIndex, SimulatedDisk, SimulatedDisk],
) -> None:
    logged_index, _, index = disks
    logged_index.commit(sets(b"a", b"b"))
    logged_index.follow()
    older = ChunkLog(SimulatedDisk())
    older.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)
    with pytest.raises(CorruptionError, match="beyond the log's end at 0"):
        KeyIndex(index, older).follow_log(0, 10)


@pytest.mark.parametrize("last", [b"\x09", b"\x79"])
def test_a_key_hidden_by_a_flipped_bit_is_not_reported_missing(
    logged_index: LoggedIndex, last: bytes
) -> None:
    """A bit flips in the key, and the entry stays at its place, now out of order."""
    logged_index.commit(sets(b"key 1", b"key 9"))
    logged_index.follow()
    assert logged_index.find(b"key", b"key 5", b"z") == [None] * 3
    entry = index_entry_key(0, b"key 1" if last < b"1" else b"key 9")
    with logged_index.index.ordered_map.write() as transaction:
        value = bytes(transaction.get(entry) or b"")
        transaction.delete(entry)
        transaction.put(entry[:-1] + last, value)
    (damaged,) = logged_index.find(b"key" + entry[-2:])
    assert damaged is not None
    assert is_damaged(damaged)
    assert None not in logged_index.find(b"key 9" if last < b"1" else b"key 1")


CHANGES: Final = st.lists(
    st.tuples(
        st.sampled_from([Operation.SET, Operation.DELETE]),
        st.sampled_from([b"a", b"b", b"c", b"d"]),
        st.sampled_from([0, 10, 20]),
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(CHANGES, max_size=6))
def test_the_index_knows_items_and_expiries_whether_their_keys_are_new_or_known(
    batches: list[list[tuple[Operation, bytes, int]]],
) -> None:
    logged = LoggedIndex(SimulatedDisk(), SimulatedDisk())
    newest: dict[bytes, Mutation] = {}
    seq = 0
    for changes in batches:
        rows = []
        for operation, key, expiry in changes:
            seq += 1
            rows.append(row(operation, key, seq, seq, expiry if operation is Operation.SET else 0))
            newest[key] = rows[-1]
        logged.commit(rows)
        mark = logged.index.follow_log(0, len(rows))
        items = {key: change for key, change in newest.items() if change.op is Operation.SET}
        assert (mark.seq, mark.item_count) == (seq, len(items))
        assert logged.find(*newest) == [items.get(key) for key in newest]
        expired, _ = logged.index.find_expired(20, b"", 100)
        assert {(item.key, item.seq, item.expiry) for item in expired} == {
            (key, change.seq, change.expiry) for key, change in items.items() if change.expiry
        }
