"""The index of a bucket: what it finds, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from tests.storage.log_model import chunk_of, record_of, row
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation, SeqNo
from upr_server.engine import FetchRequest, is_damaged
from upr_server.storage.chunk_log import ChunkLog, PartitionWrite
from upr_server.storage.compaction import Compaction
from upr_server.storage.errors import CorruptionError
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.records import BucketRecord, chunk_key, expiry_key, index_key
from upr_server.storage.simulated_disk import SimulatedDisk

PARTITIONS: Final = 2


class Both:
    """A log, and its index."""

    def __init__(self, log: OrderedMap, index: OrderedMap) -> None:
        self.log = ChunkLog(log)
        self.index = KeyIndex(index, self.log)
        self.log.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)

    def commit(self, rows: Sequence[Mutation], partition: int = 0) -> None:
        """One chunk a mutation."""
        start = int(self.log.high(partition))
        chunks = []
        for mutation in rows:
            chunks.append(chunk_of([mutation], start, mutation.seq))
            start = mutation.seq
        self.log.commit([PartitionWrite(partition, record_of(start), chunks)])

    def follow(self, partition: int = 0) -> None:
        while self.index.follow(partition, 2).seq < self.log.high(partition):
            pass

    def sweep(self, partition: int = 0) -> None:
        mark = self.index.watermark(partition)
        sweep = Compaction(self.log, self.index, partition, mark.seq)
        while not sweep.step(1, (), 0).is_done:
            pass

    def find(self, *keys: bytes, partition: int = 0, value: bool = True) -> list[Mutation | None]:
        return self.index.find(partition, [FetchRequest(key, 0, value) for key in keys])


def sets(*keys: bytes, first: int = 1, expiry: int = 0) -> list[Mutation]:
    return [row(Operation.SET, key, seq, seq, expiry) for seq, key in enumerate(keys, first)]


@pytest.fixture
def both(log_and_index: list[OrderedMap]) -> Iterator[Both]:
    yield Both(*log_and_index)
    for ordered_map in log_and_index:
        ordered_map.close()


@pytest.fixture
def disks() -> tuple[Both, SimulatedDisk, SimulatedDisk]:
    log, index = SimulatedDisk(), SimulatedDisk()
    return Both(log, index), log, index


def test_it_finds_the_newest_of_each_key_as_of_its_watermark(both: Both) -> None:
    rows = sets(b"a", b"b", b"a")
    both.commit(rows)
    assert both.find(b"a", b"b") == [None, None]
    both.follow()
    assert both.find(b"a", b"never", b"b", b"a") == [rows[2], None, rows[1], rows[2]]
    both.commit([row(Operation.DELETE, b"b", 4, 4), *sets(b"c", first=5)])
    assert both.find(b"b", b"c") == [rows[1], None]
    both.follow()
    assert both.find(b"b") == [None]
    assert both.index.watermark(0).items == 2


def test_partitions_and_keys_with_a_common_prefix_are_kept_apart(both: Both) -> None:
    first, second = sets(b"a", b"ab", b"a\0"), sets(b"a")
    both.commit(first)
    both.commit(second, partition=1)
    both.follow()
    both.follow(1)
    assert both.find(b"a", b"ab", b"a\0", b"a\0\0") == [*first, None]
    assert both.find(b"a", b"ab", partition=1) == [second[0], None]


def test_a_lookup_without_values_returns_sequence_number_and_expiry(both: Both) -> None:
    both.commit(sets(b"a", b"b", expiry=70))
    both.follow()
    (item,) = both.find(b"b", value=False)
    assert item is not None
    assert (item.seq, item.expiry, item.value) == (2, 70, b"")


def test_an_answer_that_is_too_large_has_the_first_items(both: Both) -> None:
    rows = sets(b"a", b"b", b"c", b"d")
    both.commit(rows)
    both.follow()
    wants = [FetchRequest(key, 0, needs_value=True) for key in (b"d", b"none", b"a", b"b")]
    assert both.index.find(0, wants, bytes_max=1) == [rows[3], None]
    assert both.index.find(0, wants[2:], bytes_max=1) == [rows[0]]


def test_an_item_expires_once_and_not_when_it_was_overwritten(both: Both) -> None:
    both.commit(sets(b"a", b"b", b"c", expiry=70))
    both.follow()
    both.commit([row(Operation.SET, b"a", 4, 4, 90), row(Operation.DELETE, b"b", 5, 5)])
    both.follow()
    due, _ = both.index.find_expired(100, b"", 10)
    assert [(item.key, item.expiry) for item in due] == [(b"c", 70), (b"a", 90)]


def test_a_tombstone_does_not_expire_even_with_an_expiry(both: Both) -> None:
    rows = sets(b"a", expiry=70)
    both.commit([*rows, Mutation(Operation.DELETE, b"a", seq=SeqNo(2), expiry=80)])
    both.follow()
    assert both.index.find_expired(100, b"", 10) == ([], b"")
    assert both.find(b"a") == [None]


def test_a_lookup_that_compaction_overtakes_is_repeated(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.commit(sets(b"a", b"b"))
    both.follow()
    find = both.log.find
    newer = sets(b"a", first=3)

    def overwritten_first(
        partition: int, numbers: Sequence[int], bytes_max: int
    ) -> list[Mutation | str]:
        monkeypatch.undo()
        both.commit(newer)
        both.follow()
        both.sweep()
        return find(partition, numbers, bytes_max)

    monkeypatch.setattr(both.log, "find", overwritten_first)
    assert both.find(b"a", b"b") == [newer[0], sets(b"b", first=2)[0]]


# What is damaged.


def test_an_item_with_a_damaged_chunk_is_refused_and_others_are_not(
    disks: tuple[Both, SimulatedDisk, SimulatedDisk],
) -> None:
    both, log, _ = disks
    rows = sets(b"a", b"b")
    both.commit(rows)
    both.follow()
    for bit in range(0, 2_000, 37):
        log.flip(chunk_key(0, 1), bit)
        damaged, other = both.find(b"a", b"b")
        assert damaged is not None
        assert is_damaged(damaged)
        assert other == rows[1]
        log.flip(chunk_key(0, 1), bit)
    assert both.find(b"a") == [rows[0]]


def test_an_entry_that_is_damaged_is_refused(
    disks: tuple[Both, SimulatedDisk, SimulatedDisk],
) -> None:
    both, _, index = disks
    both.commit(sets(b"a", b"b", expiry=70))
    both.follow()
    for bit in range(8 * 16):
        index.flip(index_key(0, b"a"), bit)
        damaged, other = both.find(b"a", b"b")
        assert damaged is not None
        assert is_damaged(damaged)
        assert other is not None
        assert not is_damaged(other)
        index.flip(index_key(0, b"a"), bit)
    index.flip(expiry_key(70, 0, 2), 3)
    items, _ = both.index.find_expired(100, b"", 10)
    assert [item.key for item in items] == [b"a"]


def test_an_index_ahead_of_its_log_is_refused(
    disks: tuple[Both, SimulatedDisk, SimulatedDisk],
) -> None:
    both, _, index = disks
    both.commit(sets(b"a", b"b"))
    both.follow()
    older = ChunkLog(SimulatedDisk())
    older.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)
    with pytest.raises(CorruptionError, match="beyond the log's end at 0"):
        KeyIndex(index, older).follow(0, 10)


@pytest.mark.parametrize("last", [b"\x09", b"\x79"])
def test_a_key_hidden_by_a_flipped_bit_is_not_reported_missing(both: Both, last: bytes) -> None:
    """A bit flips in the key, and the entry stays where it was: before its neighbour or behind."""
    both.commit(sets(b"key 1", b"key 9"))
    both.follow()
    assert both.find(b"key", b"key 5", b"z") == [None] * 3
    entry = index_key(0, b"key 1" if last < b"1" else b"key 9")
    with both.index.ordered_map.write() as transaction:
        value = bytes(transaction.get(entry) or b"")
        transaction.delete(entry)
        transaction.put(entry[:-1] + last, value)
    (damaged,) = both.find(b"key" + entry[-2:])
    assert damaged is not None
    assert is_damaged(damaged)
    assert None not in both.find(b"key 9" if last < b"1" else b"key 1")
