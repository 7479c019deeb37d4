"""Log, index and compaction against a naive model, in any order of operations, with crashes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.effort import effort
from tests.storage.log_model import Model, chunk_of, read, record_of, row
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation
from upr_server.engine import FetchRequest
from upr_server.storage import bucket_maintenance, compaction, live_seqs
from upr_server.storage.bucket_maintenance import MaintenanceStep
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.compaction import Compaction, CompactionStep
from upr_server.storage.errors import StoreFailedError
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord, LeaseRecord
from upr_server.storage.simulated_disk import SimulatedDisk

PROFILE: Final = settings(
    max_examples=effort(35, 150),
    stateful_step_count=50,
    deadline=None,
    phases=set(Phase) - {Phase.explain},
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

PARTITIONS: Final = 3
NEVER_TOO_YOUNG: Final = 1 << 62
KEYS: Final = [b"key %d" % index for index in range(8)]
OPERATIONS: Final = [Operation.SET, Operation.SET, Operation.DELETE, Operation.EXPIRE]

# Of a mutation: its partition, key, operation, expiry time, numbers skipped before it, and whether
# a chunk ends with it.
ROWS: Final = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2]),
        st.sampled_from(KEYS),
        st.sampled_from(OPERATIONS),
        st.sampled_from([0, 0, 10, 20, 30]),
        st.sampled_from([0, 0, 0, 1, 5]),
        st.booleans(),
    ),
    min_size=1,
    max_size=15,
)
SomeRows = list[tuple[int, bytes, Operation, int, int, bool]]
AGES: Final = st.sampled_from([0.0, 0.5, 0.9, 1.0])
"""Which share of all tombstones is old enough to go."""


class CompactionMachine(RuleBasedStateMachine):
    """A bucket's storage that is written, maintained, read and interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(bucket_maintenance, "COMPACTION_BYTES", 500)
        self.patch.setattr(bucket_maintenance, "INDEX_MUTATIONS", 6)
        self.patch.setattr(bucket_maintenance, "INDEX_LAG_MUTATIONS", 12)
        self.patch.setattr(bucket_maintenance, "GARBAGE_BYTES", 900)
        self.patch.setattr(compaction, "CHUNK_BYTES", 600)
        self.patch.setattr(compaction, "WHOLE_BYTES_MIN", 250)
        self.patch.setattr(compaction, "SPAN", 20)
        self.patch.setattr(live_seqs, "STEP_KEYS", 3)
        self.log_disk, self.index_disk = SimulatedDisk(), SimulatedDisk()
        ChunkLog(self.log_disk).create(
            BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS
        )
        self.model = Model(PARTITIONS)
        self.leases: dict[int, LeaseRecord] = {}
        self.lapsed: dict[int, LeaseRecord] = {}
        # For each leased range, what a read returned when the lease was granted.
        self.leased_rows: dict[int, list[Mutation]] = {}
        self.cas = 0
        # The watermark of the lost index: the log may be compacted up to there.
        self.known = [0] * PARTITIONS
        self.open()

    def open(self) -> None:
        self.storage = BucketStorage(self.log_disk, self.index_disk)
        self.storage.open()

    @property
    def log(self) -> ChunkLog:
        return self.storage.log

    @property
    def index(self) -> KeyIndex:
        return self.storage.index

    def teardown(self) -> None:
        self.patch.undo()

    # Writing.

    def writes_of(self, rows: SomeRows) -> list[PartitionWrite]:
        writes = []
        for partition, group in groupby(
            sorted(rows, key=lambda mutation: mutation[0]),
            lambda mutation: mutation[0],
        ):
            seq = start = self.model.highs[partition]
            chunks = []
            mutations: list[Mutation] = []
            for _, key, operation, expiry, skipped, is_last in group:
                self.cas += 1
                seq += 1 + skipped
                expires = expiry if operation is Operation.SET else 0
                mutations.append(row(operation, key, seq, self.cas, expires, 30))
                if is_last:
                    chunks.append(chunk_of(mutations, start, seq))
                    start, mutations = seq, []
            if mutations:
                chunks.append(chunk_of(mutations, start, seq))
            writes.append(PartitionWrite(partition, record_of(seq), chunks))
        return writes

    @rule(rows=ROWS)
    def commit(self, rows: SomeRows) -> None:
        writes = self.writes_of(rows)
        self.storage.commit(writes)
        self.model.take(writes)

    def purge_before(self, age: float) -> int:
        return round((self.cas + 1) * age)

    def upkeep(self, *, urgent: bool, age: float) -> MaintenanceStep:
        before = [stored_bucket.purge_seq for stored_bucket in self.log.load().partitions]
        step = self.storage.maintenance.step(
            urgent=urgent,
            leases=[leased for lease in self.leases.values() for leased in lease.ranges],
            lapsed_leases=list(self.lapsed.values()),
            purge_before_cas=self.purge_before(age),
        )
        for lease_id in step.broken_leases:
            assert self.lapsed.pop(lease_id).ranges[0][0] == step.partition
        if step.partition is not None:
            partition = step.partition
            assert before[partition] <= step.purge_seq <= self.model.highs[partition]
            assert step.purge_seq == self.log.load().partitions[partition].purge_seq
            mark = self.index.watermark(partition)
            assert (step.indexed_seq, step.item_count) == (mark.seq, mark.item_count)
        return step

    @rule(urgent=st.booleans(), age=AGES)
    def tidy(self, urgent: bool, age: float) -> None:
        self.upkeep(urgent=urgent, age=age)

    @rule(age=AGES)
    def tidy_all(self, age: float) -> None:
        for _ in range(10_000):
            if not self.upkeep(urgent=True, age=age).has_more:
                break
        else:
            raise AssertionError("there is always more to do")
        for index, high in enumerate(self.model.highs):
            assert self.index.watermark(index).seq == high

    @rule(partition=st.integers(0, PARTITIONS - 1), age=AGES, steps=st.integers(1, 30))
    def sweep(self, partition: int, age: float, steps: int) -> None:
        """Begins a compaction though not much is wasted."""
        mark = self.index.watermark(partition)
        if self.storage.maintenance._compaction is None and mark.seq:
            self.storage.maintenance._compaction = Compaction(
                self.log, self.index, partition, mark.seq
            )
        for _ in range(steps):
            self.upkeep(urgent=False, age=age)

    # Leases and readers.

    @rule(partition=st.integers(0, PARTITIONS - 1), share=st.floats(0, 1))
    def lease(self, partition: int, share: float) -> None:
        high = self.model.highs[partition]
        purge = self.log.load().partitions[partition].purge_seq
        start = round(share * high)
        if start < high and len(self.leases) < 3:
            start = start if start >= purge else 0
            lease_id = len(self.leased_rows)
            lease = LeaseRecord(lease_id, "", ((partition, start, high),), 1, 1.0)
            self.log.put_lease(lease)
            self.leases[lease_id] = lease
            self.leased_rows[lease_id] = read(self.log, partition, start, high)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_a_lease_lapse(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        self.lapsed[lease_id] = self.leases.pop(lease_id)

    @precondition(lambda self: self.lapsed)
    @rule(data=st.data())
    def renew_a_lapsed_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.lapsed)))
        self.leases[lease_id] = self.lapsed.pop(lease_id)

    @invariant()
    def leased_rows_are_unchanged(self) -> None:
        whole = {lease.lease_id for lease in self.log.load().leases if lease.is_whole}
        assert whole == self.leases.keys() | self.lapsed.keys()
        for lease_id in whole:
            ((partition, start, end),) = (self.leases | self.lapsed)[lease_id].ranges
            self.model.check_read(self.log, partition, start, end)
            assert read(self.log, partition, start, end) == self.leased_rows[lease_id]

    @rule(partition=st.integers(0, PARTITIONS - 1), share=st.floats(0, 1))
    def follow_from_anywhere(self, partition: int, share: float) -> None:
        high = self.model.highs[partition]
        purge = self.log.load().partitions[partition].purge_seq
        self.model.check_read(self.log, partition, purge + round(share * (high - purge)), high)

    @invariant()
    def whole(self) -> None:
        sizes = self.log.chunk_bytes()
        for partition, high in enumerate(self.model.highs):
            self.model.check_read(self.log, partition, 0, high)
            if high:
                newest = self.model.histories[partition][-1]
                assert self.log.find_mutations(partition, [high], 1) == [newest]
                assert read(self.log, partition, high - 1, high) == [newest]
            assert self.storage._partitions[partition].chunk_bytes == sizes.get(partition, 0)
            assert self.log.high_seq(partition) == high

    # Point reads.

    def catch_up(self) -> None:
        """Indexes again what a lost index had. Before that, changes that were superseded up to the
        lost watermark may be missing in the log."""
        for index, known in enumerate(self.known):
            while self.index.watermark(index).seq < known:
                self.upkeep(urgent=True, age=0.0)

    @rule(now=st.sampled_from([9, 10, 25, 30]), limit=st.integers(1, 4))
    def look_up(self, now: int, limit: int) -> None:
        self.catch_up()
        expected_expired = []
        for partition in range(PARTITIONS):
            mark = self.index.watermark(partition)
            contents = self.model.contents(partition, mark.seq)
            assert mark.item_count == len(contents)
            expected = [contents.get(key) for key in KEYS]
            items = self.storage.items.find(
                partition, [FetchRequest(key, 0, needs_value=True) for key in KEYS]
            )
            assert items == expected
            items = self.storage.items.find(
                partition, [FetchRequest(key, 0, needs_value=False) for key in KEYS]
            )
            assert [self.bare(item) for item in items] == [self.bare(item) for item in expected]
            known_entries = [
                FetchRequest(item.key, item.seq, needs_value=True) for item in contents.values()
            ]
            assert self.storage.items.find(partition, known_entries) == list(contents.values())
            expected_expired += [
                (item.expiry, partition, item.seq, key)
                for key, item in contents.items()
                if 0 < item.expiry <= now
            ]
        found_expired = []
        after = b""
        while True:
            expired, after = self.index.find_expired(now, after, limit)
            assert len(expired) <= limit
            found_expired += [(item.expiry, item.partition, item.seq, item.key) for item in expired]
            if not after:
                break
        assert found_expired == sorted(expected_expired)

    def bare(self, item: Mutation | None) -> tuple[bytes, int, int] | None:
        return None if item is None else (item.key, item.seq, item.expiry)

    # Interruptions.

    @rule(
        rows=ROWS,
        steps=st.integers(0, 6),
        breaks_index=st.booleans(),
        commits=st.integers(0, 3),
        is_kept=st.booleans(),
        age=AGES,
    )
    def crash(
        self,
        rows: SomeRows,
        steps: int,
        breaks_index: bool,
        commits: int,
        is_kept: bool,
        age: float,
    ) -> None:
        """One of the disks fails at one of its next commits, or none does."""
        disk = self.index_disk if breaks_index else self.log_disk
        commits_left = commits

        def fault() -> None:
            nonlocal commits_left
            commits_left -= 1
            if commits_left < 0:
                raise StoreFailedError("the disk failed")

        disk.fault, disk.keep_on_fault = fault, is_kept
        writes: Sequence[PartitionWrite] = ()
        try:
            for _ in range(steps):
                self.upkeep(urgent=True, age=age)
            writes = self.writes_of(rows)
            self.storage.commit(writes)
            self.model.take(writes)
            writes = ()
        except StoreFailedError:
            pass
        for disk in (self.log_disk, self.index_disk):
            disk.crash()
            disk.keep_on_fault = False
        self.open()
        whole = {lease.lease_id for lease in self.log.load().leases if lease.is_whole}
        self.lapsed = {key: lease for key, lease in self.lapsed.items() if key in whole}
        if any(self.log.high_seq(write.partition) == write.record.high for write in writes):
            self.model.take(writes)

    @rule()
    def lose_the_index(self) -> None:
        for partition in range(PARTITIONS):
            self.known[partition] = max(self.known[partition], self.index.watermark(partition).seq)
        self.index_disk = SimulatedDisk()
        self.open()


TestLife = CompactionMachine.TestCase
TestLife.settings = PROFILE


def test_tombstones_below_every_leased_range_are_removed() -> None:
    """Otherwise a program that always holds a lease on the newest changes would keep tombstones for
    ever."""
    log, index = SimulatedDisk(), SimulatedDisk()
    ChunkLog(log).create(BucketRecord("b", 1, 0), [record_of(0)])
    storage, model = BucketStorage(log, index), Model(1)
    storage.open()
    # Items are created and deleted, each with a key of its own.
    for turn in range(20):
        start, rows = 20 * turn, list[Mutation]()
        for operation in (Operation.SET, Operation.DELETE):
            for number in range(10):
                seq = start + len(rows) + 1
                rows.append(row(operation, b"%d of %d" % (number, turn), seq, seq))
        end = start + len(rows)
        write = PartitionWrite(0, record_of(end), [chunk_of(rows, start, end)])
        storage.commit([write])
        model.take([write])
    mark = storage.index.follow_log(0, 1 << 20)
    lowest, leases = 210, [(210, 230), (300, 400)]
    leased_rows = [read(storage.log, 0, start, end) for start, end in leases]
    sweep, steps = Compaction(storage.log, storage.index, 0, mark.seq), list[CompactionStep]()
    while not steps or not steps[-1].is_done:
        # One of the leases is released in between: what it protected is not yet removed.
        steps.append(sweep.step(500, leases if len(steps) < 5 else leases[1:], NEVER_TOO_YOUNG))
    purged_seqs = [seq for step in steps for _, seq in step.purged_tombstones]
    assert max(purged_seqs) == steps[-1].purge_seq == 200 <= lowest
    assert len(purged_seqs) == 100, "all deletions up to there"
    assert [read(storage.log, 0, start, end) for start, end in leases[1:]] == leased_rows[1:]
    for begin in (0, *range(200, 401)):
        model.check_read(storage.log, 0, begin, 400)
