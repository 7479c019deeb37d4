"""Truncation of a partition at a snapshot's end, which a replica does when it rolls back."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kit.answer_rows import pack_rows
from tests.storage.full_disk import FullDisk
from tests.storage.log_model import chunk_of, row
from upr_protocol.chunk import Mutation
from upr_protocol.ids import HistoryId, Operation, PartitionState, SeqNo
from upr_server.engine import FetchRequest
from upr_server.storage import bucket_maintenance
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.errors import DiskFullError
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import (
    BucketRecord,
    LeaseRecord,
    PartialRecord,
    PartitionRecord,
    chunk_key,
)
from upr_server.storage.simulated_disk import SimulatedDisk
from upr_server.storage.stored_bucket import StoredAnswer

KEYS: Final = [b"key %d" % index for index in range(5)]
HISTORY: Final = HistoryId(7)
PARTITION: Final = 1
PLENTY: Final = 1 << 40


def record(high: int, partial: PartialRecord | None = None) -> PartitionRecord:
    return PartitionRecord(PartitionState.REPLICA, ((7, 0),), SeqNo(high), high, partial)


class Truncations(RuleBasedStateMachine):
    """Snapshots are received in pieces, the index follows or is behind, and partitions are
    truncated."""

    @initialize()
    def begin(self) -> None:
        self.log, self.index = SimulatedDisk(), SimulatedDisk()
        self.storage = BucketStorage(self.log, self.index)
        self.storage.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
        self.storage.open()
        self.rows: list[Mutation] = []
        self.ends: list[int] = []
        self.received = 0
        self.partial: PartialRecord | None = None
        self.cas = 0
        self.gone: set[int] = set()
        """The sequence numbers that a compaction may have dropped."""
        self.chunk_ends: set[int] = set()

    @property
    def high(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def mark(self) -> int:
        return self.storage.index.watermark(PARTITION).seq

    def read(self, through: int) -> list[Mutation]:
        """The mutations in the log up to a sequence number."""
        rows: list[Mutation] = []
        after = SeqNo(0)
        while after < through:
            chunks = self.storage.log.read_chunks(PARTITION, after, through, bytes_max=200)
            rows += [row for chunk in chunks for row in chunk]
            after = chunks[-1].end
        return rows

    @rule(pieces=st.lists(st.integers(1, 4), min_size=1, max_size=3), whole=st.booleans())
    def receive(self, pieces: list[int], whole: bool) -> None:
        """Receives a snapshot in pieces: the whole snapshot, or all but the last mutation."""
        chunks = []
        for count in pieces:
            rows = []
            for index in range(count):
                self.cas += 1
                seq = self.received + 2 * index + 1
                operation = Operation.DELETE if self.cas % 4 == 0 else Operation.SET
                rows.append(row(operation, KEYS[self.cas * 7 % 5], seq, self.cas, self.cas % 3))
            chunks.append(chunk_of(rows, self.received, rows[-1].seq))
            self.received = rows[-1].seq
            self.chunk_ends.add(self.received)
            self.rows += rows
        if whole:
            self.partial = None
            written_record = record(self.received)
            self.ends.append(self.received)
        else:
            end = SeqNo(self.received + 1)
            self.partial = PartialRecord(HISTORY, SeqNo(self.high), end, SeqNo(self.received))
            written_record = record(self.high, self.partial)
        ends = [SeqNo(self.received)] if whole else []
        self.storage.commit([PartitionWrite(PARTITION, written_record, chunks, ends=ends)])

    @rule(keep=st.sampled_from([0, 3, 10]))
    def follow(self, keep: int) -> None:
        """Indexes more of the log, and compacts what is indexed down to the newest mutation of each
        key."""
        before = self.mark
        step = self.storage.maintenance.step(
            urgent=True, leases=(), purge_before_cas=0, keep_unindexed=keep
        )
        assert self.mark in (before, *self.chunk_ends)
        if step.is_compaction and step.purge_seq:
            raise AssertionError("nothing is old enough")
        newest = {mutation.key: mutation.seq for mutation in self.rows if mutation.seq <= self.mark}
        self.gone |= {
            mutation.seq
            for mutation in self.rows
            if mutation.seq <= self.mark and newest[mutation.key] != mutation.seq
        }

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        """Truncates to the newest unindexed snapshot end below a ceiling if there is one; otherwise
        to 0."""
        ceiling, floor = SeqNo(int(share * (self.received + 1))), SeqNo(self.mark)
        end = self.storage.log.find_snapshot_end(PARTITION, ceiling, floor)
        known_ends = [snapshot_end for snapshot_end in self.ends if floor < snapshot_end <= ceiling]
        if known_ends:
            assert end == known_ends[-1]
        else:
            assert end in (None, self.mark), "an indexed snapshot end may be forgotten"
            assert end is None or end in self.ends or end == 0
        new_end = end or 0
        if not new_end:
            while self.storage.delete_index_entries(PARTITION):
                pass
        self.storage.truncate(PARTITION, record(new_end), ())
        self.rows = [row for row in self.rows if row.seq <= new_end]
        self.ends = [snapshot_end for snapshot_end in self.ends if snapshot_end <= new_end]
        self.received, self.partial = new_end, None
        self.chunk_ends = {
            snapshot_end for snapshot_end in self.chunk_ends if snapshot_end <= new_end
        }

    @precondition(lambda self: self.ends)
    @rule(share=st.floats(0, 1))
    def find_the_first_end(self, share: float) -> None:
        """The result is a snapshot end, and no known end above the watermark comes before it."""
        floor = SeqNo(int(share * self.high))
        end = self.storage.log.find_first_snapshot_end(PARTITION, floor)
        assert floor <= end <= self.high
        assert end in self.ends or end == 0
        state = {row.key: row for row in self.rows if row.seq <= end}
        assert {row.key: row for row in self.read(end)} == state
        # Indexed snapshot ends may be forgotten, even the one at the watermark.
        known_ends = [
            known_end for known_end in self.ends if known_end >= floor and known_end > self.mark
        ]
        assert not known_ends or end <= known_ends[0]

    @rule()
    def restart(self) -> None:
        self.storage = BucketStorage(self.log, self.index)
        stored_partition = self.storage.open().partitions[PARTITION]
        assert stored_partition.record == record(self.high, self.partial)
        assert stored_partition.indexed_seq == self.mark

    @invariant()
    def the_log_has_what_was_received(self) -> None:
        if not hasattr(self, "rows"):
            return
        chunks_read = self.read(self.received)
        seqs = {row.seq for row in chunks_read}
        assert chunks_read == [row for row in self.rows if row.seq in seqs]
        assert {row.seq for row in self.rows} - seqs <= self.gone
        in_log = self.storage.log.chunk_bytes().get(PARTITION, 0)
        assert self.storage._partitions[PARTITION].chunk_bytes == in_log

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def the_index_knows_what_is_up_to_its_watermark(self) -> None:
        mark = self.mark
        state: dict[bytes, Mutation] = {}
        for mutation in self.rows:
            if mutation.seq <= mark:
                state[mutation.key] = mutation
        items = self.storage.items.find(PARTITION, [FetchRequest(key, 0, True) for key in KEYS])
        for key, item in zip(KEYS, items, strict=True):
            newest = state.get(key)
            assert item == (newest if newest and newest.op is Operation.SET else None)
        assert self.storage.index.watermark(PARTITION).item_count == sum(
            row.op is Operation.SET for row in state.values()
        )


TestCuts = Truncations.TestCase
TestCuts.settings = settings(max_examples=60, stateful_step_count=25)


def new_bucket() -> BucketStorage:
    bucket = BucketStorage(SimulatedDisk(), SimulatedDisk())
    bucket.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
    bucket.open()
    return bucket


def write(high: int, *ends: int) -> PartitionWrite:
    start, chunks = 0, []
    for end in ends:
        chunks.append(chunk_of([row(Operation.SET, b"k", end, end)], start, end))
        start = end
    return PartitionWrite(PARTITION, record(high), chunks, ends=[SeqNo(end) for end in ends])


def test_a_truncation_breaks_leases_on_what_it_removes() -> None:
    bucket = new_bucket()
    bucket.commit([write(30, 10, 20, 30)])
    for lease_id, end in ((1, 20), (2, 21), (3, 30)):
        bucket.log.put_lease(LeaseRecord(lease_id, "me", ((PARTITION, 0, end),), 60, 1.0))
    bucket.log.put_lease(LeaseRecord(4, "me", ((0, 0, 30),), 60, 1.0))
    assert bucket.truncate(PARTITION, record(20), ()) == [2, 3]
    leases = {lease.lease_id: lease.is_whole for lease in bucket.log.load().leases}
    assert leases == {1: True, 2: False, 3: False, 4: True}
    assert bucket.truncate(PARTITION, record(20), ()) == [], "once"


def test_a_truncation_deletes_answers() -> None:
    bucket = new_bucket()
    tokens = [StoredAnswer(bytes(16), counter, b"answer") for counter in (1, 2)]
    rows = pack_rows((token.writer, token.counter, token.answer) for token in tokens)
    bucket.commit([PartitionWrite(PARTITION, record(0), answers=[rows])])
    bucket.truncate(PARTITION, record(0), [pack_rows([(bytes(16), 2, b"")])])
    assert bucket.log.load().partitions[PARTITION].tokens == tokens[:1]


def test_indexed_mutations_cannot_be_truncated() -> None:
    bucket = new_bucket()
    bucket.commit([write(30, 10, 20, 30)])
    bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0, keep_unindexed=5)
    assert bucket.index.watermark(PARTITION).seq == 20, "where a chunk ends"
    with pytest.raises(ValueError, match="indexed up to 20"):
        bucket.truncate(PARTITION, record(10), ())
    assert bucket.log.find_snapshot_end(PARTITION, SeqNo(29), SeqNo(25)) is None
    assert bucket.log.find_snapshot_end(PARTITION, SeqNo(99), SeqNo(25)) == 30


def test_a_snapshot_end_is_found_below_a_damaged_chunk() -> None:
    log = SimulatedDisk()
    bucket = BucketStorage(log, SimulatedDisk())
    bucket.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
    bucket.open()
    bucket.commit([write(30, 10, 20, 30)])
    log.flip_bit(chunk_key(PARTITION, 20), 0)
    assert bucket.log.find_snapshot_end(PARTITION, SeqNo(25), SeqNo(0)) == 10
    assert bucket.log.find_snapshot_end(PARTITION, SeqNo(25), SeqNo(15)) is None
    bucket.truncate(PARTITION, record(10), ())
    assert bucket.log.find_snapshot_end(PARTITION, SeqNo(99), SeqNo(0)) == 10


def test_no_snapshot_end_is_found_where_compaction_has_been_even_without_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 20 the key had a value that the compaction dropped, because a later one had superseded
    it."""
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    monkeypatch.setattr(bucket_maintenance, "COMPACTION_BYTES", 1)
    log = SimulatedDisk()
    bucket = BucketStorage(log, SimulatedDisk())
    bucket.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
    bucket.open()
    chunks = [
        chunk_of([row(Operation.SET, key, end, end)], end - 10, end)
        for key, end in ((b"k", 10), (b"l", 20), (b"k", 30))
    ]
    ends = [SeqNo(10), SeqNo(20), SeqNo(30)]
    bucket.commit([PartitionWrite(PARTITION, record(30), chunks, ends=ends)])
    assert bucket.log.find_snapshot_end(PARTITION, SeqNo(25), SeqNo(0)) == 20
    while bucket.log.read_chunks(PARTITION, SeqNo(0), SeqNo(30), bytes_max=1)[0].count:
        bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0)
    again = BucketStorage(log, SimulatedDisk())
    again.open()
    assert again.log.find_snapshot_end(PARTITION, SeqNo(25), SeqNo(0)) is None
    assert again.log.find_snapshot_end(PARTITION, SeqNo(99), SeqNo(0)) == 30
    again.truncate(PARTITION, record(0), ())
    again.commit([PartitionWrite(PARTITION, record(30), chunks, ends=ends)])
    assert again.log.find_snapshot_end(PARTITION, SeqNo(25), SeqNo(0)) == 20


def test_the_first_snapshot_end_is_at_or_above_the_number_and_any_compaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    monkeypatch.setattr(bucket_maintenance, "COMPACTION_BYTES", 1)
    bucket = new_bucket()
    bucket.commit([write(30, 10, 20, 30)])

    def first(floor: int) -> int:
        return bucket.log.find_first_snapshot_end(PARTITION, SeqNo(floor))

    assert [first(floor) for floor in (0, 1, 10, 11, 20, 21, 30)] == [0, 10, 10, 20, 20, 30, 30]
    while bucket.log.read_chunks(PARTITION, SeqNo(0), SeqNo(30), bytes_max=1)[0].count:
        bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0)
    assert first(1) == 30, "compaction has dropped the earlier values of the key"


def test_a_crash_during_a_truncation_to_0_leaves_no_index_entries() -> None:
    log, index = SimulatedDisk(), SimulatedDisk()
    bucket = BucketStorage(log, index)
    bucket.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
    bucket.open()
    bucket.commit([write(30, 10, 20, 30)])
    bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0)
    bucket.index.delete_entries(PARTITION, 0)
    again = BucketStorage(log, index)
    assert again.open().partitions[PARTITION].indexed_seq == 0
    assert not again.index.has_entries(PARTITION)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_full_disk_has_room_for_a_truncation_to_0_in_small_commits(is_interrupted: bool) -> None:
    """Otherwise a replica could not roll back, and after a crash its node could not start."""
    log, index = SimulatedDisk(), FullDisk()
    bucket = BucketStorage(log, index)
    bucket.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
    bucket.open()
    rows = [row(Operation.SET, b"key %d" % seq, seq, seq, 70) for seq in range(1, 41)]
    bucket.commit([PartitionWrite(PARTITION, record(40), [chunk_of(rows, 0, 40)])])
    bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0)
    # Enough for two entries with their expiry times, and the watermark.
    index.changes_max = 5
    assert bucket.delete_index_entries(PARTITION)
    index.changes_max = 0
    with pytest.raises(DiskFullError):
        bucket.delete_index_entries(PARTITION)
    index.changes_max = 5
    if is_interrupted:
        bucket = BucketStorage(log, index)
        assert bucket.open().partitions[PARTITION].indexed_seq == 0
    else:
        while bucket.delete_index_entries(PARTITION):
            pass
        bucket.truncate(PARTITION, record(0), ())
    assert index.keys() == []


def test_entries_left_by_a_full_disk_are_deleted_before_a_partition_is_indexed_again() -> None:
    """A full disk interrupts a rollback to 0, and the next rollback goes only to 20."""
    index = FullDisk()
    bucket = BucketStorage(SimulatedDisk(), index)
    bucket.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
    bucket.open()
    rows = [row(Operation.SET, b"key %d" % seq, seq, seq, 70) for seq in range(1, 41)]
    chunks = [chunk_of(rows[:20], 0, 20), chunk_of(rows[20:], 20, 40)]
    ends = [SeqNo(20), SeqNo(40)]
    bucket.commit([PartitionWrite(PARTITION, record(40), chunks, ends=ends)])
    bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0)
    index.changes_max = 9
    assert bucket.delete_index_entries(PARTITION)
    index.changes_max = 0
    with pytest.raises(DiskFullError):
        bucket.delete_index_entries(PARTITION)
    index.changes_max = PLENTY
    bucket.truncate(PARTITION, record(20), ())
    other = PartitionWrite(0, record(20), [chunk_of(rows[:20], 0, 20)])
    bucket.commit([other])
    while bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0).has_more:
        pass
    requests = [FetchRequest(row.key, 0, True) for row in rows]
    assert bucket.items.find(PARTITION, requests) == [*rows[:20], *[None] * 20]
    for partition in (0, PARTITION):
        assert bucket.index.watermark(partition).item_count == 20
    assert len(bucket.index.find_expired(70, b"", 100)[0]) == 40


def test_a_start_on_a_full_disk_deletes_unfinished_snapshots_in_small_commits() -> None:
    log, index = FullDisk(), SimulatedDisk()
    bucket = BucketStorage(log, index)
    active = PartitionRecord(PartitionState.ACTIVE, ((7, 0),), SeqNo(0), 10)
    bucket.log.create(BucketRecord("b", 2, 0), [active] * 2)
    bucket.open()
    with_front = msgspec.structs.replace(
        active, partial=PartialRecord(HISTORY, SeqNo(0), SeqNo(20), SeqNo(10))
    )
    chunk = chunk_of([row(Operation.SET, b"k", 10, 10)], 0, 10)
    bucket.commit([PartitionWrite(partition, with_front, [chunk]) for partition in range(2)])
    # Enough for a chunk and a record.
    log.changes_max = 2
    again = BucketStorage(log, index)
    assert [partition.record for partition in again.open().partitions] == [active] * 2
    assert again.log.chunk_bytes() == {}


@given(keep=st.integers(0, 50), highs=st.lists(st.integers(0, 30), min_size=2, max_size=2))
def test_the_mutations_that_stay_unindexed_are_shared_among_partitions(
    keep: int, highs: list[int]
) -> None:
    bucket = new_bucket()
    writes: list[Any] = []
    for index, high in enumerate(highs):
        chunks = [
            chunk_of([row(Operation.SET, b"k%d" % seq, seq, seq)], seq - 1, seq)
            for seq in range(1, high + 1)
        ]
        writes.append(PartitionWrite(index, record(high), chunks))
    bucket.commit(writes)
    while bucket.maintenance.step(
        urgent=True, leases=(), purge_before_cas=0, keep_unindexed=keep
    ).has_more:
        pass
    unindexed = sum(high - bucket.index.watermark(index).seq for index, high in enumerate(highs))
    assert unindexed == min(keep, sum(highs))


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Superseded mutations are compacted at once."""
    monkeypatch.setattr("upr_server.storage.bucket_maintenance.GARBAGE_BYTES", 0)
    monkeypatch.setattr("upr_server.storage.bucket_maintenance.GARBAGE_SHARE", 0.01)


def test_a_partition_map_is_stored_with_its_partition_records() -> None:
    bucket = new_bucket()
    bucket.commit([write(30, 10, 20, 30)])
    partial = PartialRecord(HISTORY, SeqNo(30), SeqNo(50), SeqNo(40))
    more = chunk_of([row(Operation.SET, b"k", 40, 40)], 30, 40)
    bucket.commit([PartitionWrite(PARTITION, record(30, partial), [more])])
    assert bucket.log.load().partition_map == ""
    active = PartitionRecord(PartitionState.ACTIVE, ((8, 30), (7, 0)), SeqNo(30), 30)
    bucket.put_partition_map("{}", [(PARTITION, active)])
    stored_bucket = bucket.log.load()
    assert stored_bucket.partition_map == "{}"
    assert stored_bucket.partitions[PARTITION].record == active
    assert bucket.statistics()["chunk_bytes"] == bucket.log.chunk_bytes()[PARTITION]
    after = chunk_of([row(Operation.SET, b"k", 31, 31)], 30, 31)
    written_record = PartitionRecord(PartitionState.ACTIVE, ((8, 30), (7, 0)), SeqNo(31), 31)
    bucket.commit([PartitionWrite(PARTITION, written_record, [after])])
    assert [chunk.end for chunk in bucket.log.read_chunks(PARTITION, 0, 31, bytes_max=PLENTY)] == [
        10,
        20,
        30,
        31,
    ]


@pytest.mark.parametrize("state", PartitionState)
def test_a_start_deletes_a_snapshot_of_which_only_a_part_is_on_disk(
    state: PartitionState,
) -> None:
    log, index = SimulatedDisk(), SimulatedDisk()
    bucket = BucketStorage(log, index)
    bucket.log.create(BucketRecord("b", 2, 0), [record(0)] * 2)
    bucket.open()
    whole = PartitionRecord(state, ((7, 0),), SeqNo(30), 30)
    bucket.commit([msgspec.structs.replace(write(30, 10, 20, 30), record=whole)])
    bytes_before = bucket.statistics()["chunk_bytes"]
    front = PartialRecord(HISTORY, SeqNo(30), SeqNo(60), SeqNo(50))
    with_front = PartitionRecord(state, ((7, 0),), SeqNo(30), 50, front)
    chunks = [chunk_of([row(Operation.SET, b"k", end, end)], end - 10, end) for end in (40, 50)]
    bucket.commit([PartitionWrite(PARTITION, with_front, chunks)])
    bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=0)
    again = BucketStorage(log, index)
    stored_partition = again.open().partitions[PARTITION]
    assert again.log.load().partitions[PARTITION].record == stored_partition.record
    assert stored_partition.indexed_seq == 30
    if state is PartitionState.REPLICA:
        # A replica keeps the part that it has, and continues there.
        assert stored_partition.record == with_front
        return
    assert stored_partition.record == msgspec.structs.replace(with_front, partial=None)
    assert again.statistics()["chunk_bytes"] == bytes_before
    after = chunk_of([row(Operation.SET, b"k", 31, 31)], 30, 31)
    record_after = PartitionRecord(state, ((7, 0),), SeqNo(31), 51)
    again.commit([PartitionWrite(PARTITION, record_after, [after])])
    chunks = again.log.read_chunks(PARTITION, 0, 31, bytes_max=PLENTY)
    assert [chunk.end for chunk in chunks] == [10, 20, 30, 31]
