"""Damage affects only the changes that are damaged, and nothing else of their bucket."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.log_model import Model, chunk_of, read, record_of, row
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation
from upr_server.engine import FetchRequest, is_damaged
from upr_server.storage import bucket_maintenance
from upr_server.storage.bucket_maintenance import MaintenanceStep
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.errors import CorruptionError
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import (
    PARTITION,
    WATERMARK,
    BucketRecord,
    chunk_key,
    expiry_key,
    index_entry_key,
    partition_key,
)
from upr_server.storage.simulated_disk import SimulatedDisk
from upr_server.storage.stored_bucket import StoredBucket

PARTITIONS: Final = 3
KEYS: Final = [b"key %d" % index for index in range(12)]
CHUNK_ROWS: Final = 3


class DamagedBucket:
    """A bucket on simulated disks, and what it should contain.

    Attributes:
        storage: Its storage since the last start.
        model: What was committed.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._log, self._index = SimulatedDisk(), SimulatedDisk()
        self.model = Model(PARTITIONS)
        log = BucketStorage(self._log, self._index).log
        log.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)
        self.restart()

    def restart(self) -> StoredBucket:
        self.storage = BucketStorage(self._log, self._index)
        return self.storage.open()

    def commit(self, partition: int, *, expiry: int = 0) -> None:
        """One chunk of random changes."""
        start = self.model.highs[partition]
        end = start + CHUNK_ROWS
        rows = []
        for seq in range(start + 1, end + 1):
            operation = self._random.choice((Operation.SET, Operation.SET, Operation.DELETE))
            key_expiry = expiry if operation is Operation.SET else 0
            rows.append(row(operation, self._random.choice(KEYS), seq, seq, key_expiry))
        write = PartitionWrite(partition, record_of(end), [chunk_of(rows, start, end)])
        self.storage.commit([write])
        self.model.take([write])

    def flip_chunk(self, partition: int, end: int) -> None:
        self._log.flip_bit(chunk_key(partition, end), self._random.randrange(8 * 100))

    def flip_record(self, partition: int) -> None:
        self._log.flip_bit(partition_key(PARTITION, partition), self._random.randrange(8 * 8))

    def flip_entry(self, partition: int, key: bytes) -> None:
        self._index.flip_bit(index_entry_key(partition, key), self._random.randrange(8 * 16))

    def flip_watermark(self, partition: int) -> None:
        self._index.flip_bit(partition_key(WATERMARK, partition), self._random.randrange(8 * 8))

    def flip_expiry(self, expiry: int, partition: int, seq: int) -> None:
        self._index.flip_bit(expiry_key(expiry, partition, seq), self._random.randrange(8 * 8))

    def maintain(self) -> list[MaintenanceStep]:
        """Runs maintenance until there is nothing more to do. Returns the steps that found
        damage."""
        damaged = []
        while True:
            step = self.storage.maintenance.step(urgent=True, leases=(), purge_before_cas=0)
            if step.damage:
                damaged.append(step)
            if not step.has_more:
                return damaged

    def newest(self, partition: int, key: bytes) -> Mutation | None:
        """The newest change of a key, deletions included."""
        changes = [change for change in self.model.histories[partition] if change.key == key]
        return changes[-1] if changes else None

    def find(self, partition: int, key: bytes) -> Mutation | None:
        return self.storage.items.find(partition, [FetchRequest(key, 0, needs_value=True)])[0]

    def damaged_partitions(self) -> object:
        return self.storage.statistics()["damaged_partitions"]

    def check(self, partition: int, damaged_through: int = 0) -> None:
        """Checks that each key has its newest change, or is refused because that change may be
        damaged."""
        for key in KEYS:
            newest = self.newest(partition, key)
            if damaged_through and (newest is None or newest.seq <= damaged_through):
                item = self.find(partition, key)
                assert item is not None
                assert is_damaged(item)
            else:
                is_set = newest is not None and newest.op is Operation.SET
                assert self.find(partition, key) == (newest if is_set else None)


@given(random=st.randoms(use_true_random=False), chunks=st.integers(1, 12), data=st.data())
def test_a_damaged_chunk_that_was_not_indexed_hides_nothing_else(
    random: Random, chunks: int, data: st.DataObject
) -> None:
    bucket = DamagedBucket(random)
    for _ in range(chunks):
        for partition in range(PARTITIONS):
            bucket.commit(partition)
    damaged = data.draw(st.integers(0, PARTITIONS - 1))
    numbers = sorted(data.draw(st.sets(st.integers(1, chunks), min_size=1, max_size=3)))
    for place in numbers:
        bucket.flip_chunk(damaged, CHUNK_ROWS * place)
    bucket.restart()
    # Neighbouring damaged chunks are skipped in one step.
    runs = [number for number in numbers if number - 1 not in numbers]
    steps = [(step.partition, step.is_stuck) for step in bucket.maintain()]
    assert steps == [(damaged, False)] * len(runs)
    end = CHUNK_ROWS * numbers[-1]
    for partition in range(PARTITIONS):
        bucket.check(partition, end if partition == damaged else 0)
        high = bucket.model.highs[partition]
        if partition != damaged:
            bucket.model.check_read(bucket.storage.log, partition, 0, high)
    # Streams are read up to the damage, and can start after it.
    start = CHUNK_ROWS * (numbers[0] - 1)
    log, high = bucket.storage.log, bucket.model.highs[damaged]
    if start:
        (chunk, *other_chunks) = log.read_chunks(damaged, 0, high, bytes_max=1 << 20)
        assert (other_chunks[-1] if other_chunks else chunk).end == start
    with pytest.raises(CorruptionError):
        log.read_chunks(damaged, start, high, bytes_max=1 << 20)
    assert read(log, damaged, end, high) == bucket.model.histories[damaged][end:]
    # Writes continue, and the items that they change are readable again. The damage is still known
    # after a restart.
    for _ in range(4):
        bucket.commit(damaged)
    assert not bucket.maintain()
    bucket.check(damaged, end)
    bucket.restart()
    assert not bucket.maintain()
    assert bucket.damaged_partitions() == [damaged]
    bucket.check(damaged, end)


def test_a_damaged_partition_that_is_truncated_to_0_has_no_damage() -> None:
    bucket = DamagedBucket(Random(1))
    bucket.commit(0)
    bucket.flip_chunk(0, CHUNK_ROWS)
    assert [step.partition for step in bucket.maintain()] == [0]
    while bucket.storage.delete_index_entries(0):
        pass
    bucket.storage.truncate(0, record_of(0), ())
    assert bucket.damaged_partitions() == []
    bucket.model = Model(PARTITIONS)
    bucket.commit(0)
    assert not bucket.maintain()
    bucket.check(0)


def test_a_damaged_index_entry_stops_the_index_of_its_partition_alone() -> None:
    bucket = DamagedBucket(Random(2))
    for partition in range(PARTITIONS):
        bucket.commit(partition)
    bucket.maintain()
    key = bucket.model.histories[1][0].key
    bucket.flip_entry(1, key)
    stuck: list[MaintenanceStep] = []
    for _ in range(20):
        for partition in range(PARTITIONS):
            bucket.commit(partition)
        stuck += bucket.maintain()
    assert [(step.partition, step.is_stuck) for step in stuck] == [(1, True)]
    assert bucket.damaged_partitions() == [1]
    for partition in (0, 2):
        bucket.check(partition)


def test_a_partition_with_a_damaged_watermark_is_indexed_again() -> None:
    bucket = DamagedBucket(Random(3))
    for _ in range(4):
        for partition in range(PARTITIONS):
            bucket.commit(partition)
    assert not bucket.maintain()
    bucket.flip_entry(1, bucket.model.histories[1][0].key)
    bucket.flip_watermark(1)
    reindexed = bucket.restart().reindex_reasons
    assert list(reindexed) == [1]
    assert "mismatch" in reindexed[1]
    assert not bucket.maintain()
    assert bucket.damaged_partitions() == []
    for partition in range(PARTITIONS):
        bucket.check(partition)
    assert bucket.restart().reindex_reasons == {}


def test_an_index_that_is_newer_than_the_log_is_created_again() -> None:
    """The files were copied one after the other, or only the log was restored. The index has
    sequence numbers that other changes get now."""
    bucket = DamagedBucket(Random(4))
    for partition in range(PARTITIONS):
        bucket.commit(partition)
    log_then, model_then = deepcopy(bucket._log), deepcopy(bucket.model)
    for _ in range(4):
        bucket.commit(1)
    assert not bucket.maintain()
    bucket._log, bucket.model = log_then, model_then
    reindexed = bucket.restart().reindex_reasons
    assert reindexed == {1: f"it is at {5 * CHUNK_ROWS}, and the log ends at {CHUNK_ROWS}"}
    for _ in range(4):
        for partition in range(PARTITIONS):
            bucket.commit(partition)
        assert not bucket.maintain()
        for partition in range(PARTITIONS):
            bucket.check(partition)
    assert bucket.restart().reindex_reasons == {}


def test_compaction_leaves_out_a_partition_with_damage_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = DamagedBucket(Random(3))
    for _ in range(30):
        for partition in range(PARTITIONS):
            bucket.commit(partition)
    # The partition is indexed before it is damaged, so only compaction finds the damage.
    assert not bucket.maintain()
    bucket.flip_chunk(1, CHUNK_ROWS)
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    steps = bucket.maintain()
    assert [(step.partition, step.is_compaction, step.is_stuck) for step in steps] == [
        (1, True, False)
    ]
    assert bucket.storage.statistics()["compactions"] == PARTITIONS - 1
    for partition in (0, 2):
        bucket.check(partition)
        bucket.model.check_read(bucket.storage.log, partition, 0, bucket.model.highs[partition])


def test_what_may_have_been_changed_by_damaged_changes_does_not_expire() -> None:
    """This node cannot read whether the item was changed. Its deletion would replace that change on
    every replica."""
    bucket = DamagedBucket(Random(4))
    for partition in range(PARTITIONS):
        bucket.commit(partition, expiry=10)
        bucket.maintain()
    bucket.commit(0)
    bucket.flip_chunk(0, 2 * CHUNK_ROWS)
    bucket.maintain()
    items, _ = bucket.storage.index.find_expired(20, b"", 100)
    assert {item.partition for item in items} == {1, 2}


def test_a_call_for_expired_items_is_bounded_though_it_returns_none_of_them() -> None:
    bucket = DamagedBucket(Random(4))
    bucket.commit(0, expiry=10)
    bucket.commit(1, expiry=11)
    bucket.maintain()
    count = len(bucket.storage.index.find_expired(20, b"", 100)[0])
    bucket.commit(0)
    bucket.flip_chunk(0, 2 * CHUNK_ROWS)
    bucket.maintain()
    expected, _ = bucket.storage.index.find_expired(20, b"", 100)
    assert {item.partition for item in expected} == {1}
    items, after = bucket.storage.index.find_expired(20, b"", 2)
    assert (items, bool(after)) == ([], True), "two entries of the damaged partition"
    calls = 1
    while after:
        more, after = bucket.storage.index.find_expired(20, after, 2)
        items += more
        calls += 1
    assert items == expected
    assert calls >= count // 2


def test_a_damaged_expiry_record_keeps_no_other_item_from_expiring() -> None:
    bucket = DamagedBucket(Random(5))
    for partition in range(PARTITIONS):
        bucket.commit(partition, expiry=10)
    bucket.maintain()
    items, _ = bucket.storage.index.find_expired(20, b"", 100)
    first = items[0]
    bucket.flip_expiry(first.expiry, first.partition, first.seq)
    assert bucket.storage.index.find_expired(20, b"", 100) == (items[1:], b"")


def test_a_record_that_is_damaged_while_it_is_in_use_refuses_its_partition_alone() -> None:
    bucket = DamagedBucket(Random(1))
    for partition in range(PARTITIONS):
        bucket.commit(partition)
    bucket.flip_record(1)
    end = 2 * CHUNK_ROWS
    writes = [
        PartitionWrite(partition, record_of(end), [chunk_of([], CHUNK_ROWS, end)])
        for partition in range(PARTITIONS)
    ]
    damages = bucket.storage.commit(writes)
    assert list(damages) == [1]
    assert "mismatch" in damages[1]
    assert bucket.damaged_partitions() == [1]
    # The partition is no longer maintained, and the others are.
    assert bucket.maintain() == []
    with pytest.raises(CorruptionError, match="is not written to"):
        bucket.storage.commit(writes[1:2])
    for partition in (0, 2):
        assert bucket.storage.log.high_seq(partition) == end
        bucket.check(partition)
    stored_bucket = bucket.restart()
    assert [bool(partition.damage) for partition in stored_bucket.partitions] == [0, 1, 0]
    assert bucket.storage.commit([]) == {}
