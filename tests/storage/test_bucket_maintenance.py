"""The maintenance of a bucket's storage: how much disk space it needs, and which step it does
when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from tests.storage.full_disk import FullDisk
from tests.storage.log_model import Model, chunk_of, record_of, row
from upr_protocol.chunk import Chunk
from upr_protocol.ids import Operation
from upr_server.storage import bucket_maintenance, compaction, key_index
from upr_server.storage.bucket_maintenance import STEPS_URGENT, STEPS_WASTEFUL, MaintenanceStep
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.chunk_log import COMMIT_RESERVE_BYTES
from upr_server.storage.errors import CorruptionError, DiskFullError, StorageError
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord
from upr_server.storage.simulated_disk import SimulatedDisk

PARTITIONS: Final = 2
KEYS: Final = 200
VALUE_BYTES: Final = 500
GARBAGE_BYTES: Final = 100_000
COMPACTION_BYTES: Final = 40_000
NEVER: Final = 0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_maintenance, "INDEX_MUTATIONS", 300)
    monkeypatch.setattr(bucket_maintenance, "INDEX_LAG_MUTATIONS", 600)
    monkeypatch.setattr(bucket_maintenance, "COMPACTION_BYTES", COMPACTION_BYTES)
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", GARBAGE_BYTES)
    monkeypatch.setattr(compaction, "CHUNK_BYTES", 16_000)
    monkeypatch.setattr(compaction, "WHOLE_BYTES_MIN", 8_000)


def new_bucket(log: OrderedMap, index: OrderedMap) -> BucketStorage:
    bucket = BucketStorage(log, index)
    bucket.log.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)
    bucket.open()
    return bucket


@pytest.fixture
def bucket(log_and_index: list[OrderedMap]) -> Iterator[BucketStorage]:
    new_storage = new_bucket(*log_and_index)
    yield new_storage
    new_storage.close()


def overwrite(bucket: BucketStorage, model: Model, random: Random, count: int = 20) -> None:
    """Commits changes of keys that mostly exist already."""
    partition = random.randrange(PARTITIONS)
    high = model.highs[partition]
    rows = []
    for seq in range(high + 1, high + 1 + count):
        key = b"key %d" % random.randrange(KEYS)
        operation = random.choice((Operation.SET, Operation.SET, Operation.SET, Operation.DELETE))
        rows.append(row(operation, key, seq, seq, size=VALUE_BYTES))
    chunk = chunk_of(rows, high, high + count)
    write = PartitionWrite(partition, record_of(high + count), [chunk])
    bucket.commit([write])
    model.take([write])


def tidy(
    bucket: BucketStorage,
    *,
    urgent: bool = False,
    before_cas: int = NEVER,
    leases: Sequence[tuple[int, int, int]] = (),
) -> list[MaintenanceStep]:
    """Runs maintenance until there is nothing more to do at once."""
    steps: list[MaintenanceStep] = []
    while not steps or steps[-1].has_more:
        steps.append(
            bucket.maintenance.step(urgent=urgent, leases=leases, purge_before_cas=before_cas)
        )
    return steps


def test_disk_use_is_bounded_under_steady_overwrites(bucket: BucketStorage) -> None:
    random, model = Random(1), Model(PARTITIONS)
    live_bytes_max = PARTITIONS * KEYS * (VALUE_BYTES + 100)
    in_file: list[int] = []
    for turn in range(1_000):
        overwrite(bucket, model, random)
        tidy(bucket, before_cas=max(model.highs) - 500)
        figures = bucket.statistics()
        chunk_bytes = figures["chunk_bytes"]
        assert isinstance(chunk_bytes, int)
        # Unindexed changes count as well, because compaction leaves them out.
        behind = 600 * (VALUE_BYTES + 100)
        assert (
            chunk_bytes
            < (1 + bucket_maintenance.GARBAGE_SHARE) * live_bytes_max + GARBAGE_BYTES + behind
        )
        if turn % 100 == 99:
            in_file.append(bucket.log.ordered_map.statistics()["bytes_in_file"])
    compactions = bucket.statistics()["compactions"]
    assert isinstance(compactions, int)
    assert compactions > 20
    # 10 MB were written. The file has stopped growing; it is never made smaller.
    assert in_file[-1] <= in_file[3] * 1.1
    assert in_file[-1] < 3 * (2 * live_bytes_max + GARBAGE_BYTES)
    for index, high in enumerate(model.highs):
        model.check_read(bucket.log, index, 0, high)


@pytest.mark.parametrize("is_opened_again", [False, True])
def test_disk_use_is_bounded_where_items_are_deleted(
    bucket: BucketStorage, is_opened_again: bool
) -> None:
    """A deletion is small, and what it supersedes is not. As many keys are set as deleted, again
    and again."""
    model, count, value_bytes = Model(PARTITIONS), 20, 4_000
    in_log: list[int] = []
    for cycle in range(8):
        for operation in (Operation.SET, Operation.DELETE):
            for first in range(cycle * 400, (cycle + 1) * 400, count):
                high = model.highs[0]
                rows = [
                    row(operation, b"key %d" % (first + index), seq, seq, size=value_bytes)
                    for index, seq in enumerate(range(high + 1, high + 1 + count))
                ]
                chunk = chunk_of(rows, high, high + count)
                write = PartitionWrite(0, record_of(high + count), [chunk])
                bucket.commit([write])
                model.take([write])
            tidy(bucket, urgent=True, before_cas=model.highs[0] - 500)
            in_log.append(bucket.log.chunk_bytes()[0])
            if is_opened_again:
                # The size of the items is estimated again.
                bucket = BucketStorage(bucket.log.ordered_map, bucket.index.ordered_map)
                bucket.open()
    assert max(in_log) < 1.5 * 400 * (value_bytes + 100) + GARBAGE_BYTES
    model.check_read(bucket.log, 0, 0, model.highs[0])


def test_disk_use_is_bounded_where_few_large_items_change_among_many_small_ones() -> None:
    """A value is mostly about as large as the one that it replaces, whatever the mean size is."""
    bucket, model = new_bucket(SimulatedDisk(), SimulatedDisk()), Model(PARTITIONS)
    value_bytes = 4_000
    in_log: list[int] = []

    def put(keys: Sequence[bytes], size: int) -> None:
        high = model.highs[0]
        end = high + len(keys)
        rows = [
            row(Operation.SET, key, seq, seq, size=size) for seq, key in enumerate(keys, high + 1)
        ]
        write = PartitionWrite(0, record_of(end), [chunk_of(rows, high, end)])
        bucket.commit([write])
        model.take([write])
        tidy(bucket, urgent=True)
        in_log.append(bucket.log.chunk_bytes()[0])

    for first in range(0, 2_000, 200):
        put([b"small %d" % index for index in range(first, first + 200)], 8)
    for turn in range(40):
        put([b"large %d" % (10 * (turn % 2) + index) for index in range(10)], value_bytes)
    assert max(in_log) < 1.5 * (2_000 * 100 + 20 * (value_bytes + 100)) + GARBAGE_BYTES
    model.check_read(bucket.log, 0, 0, model.highs[0])


def test_there_is_nothing_to_do_in_a_bucket_that_is_indexed_and_not_wasteful(
    bucket: BucketStorage,
) -> None:
    assert (
        bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER) == MaintenanceStep()
    )
    random, model = Random(2), Model(PARTITIONS)
    overwrite(bucket, model, random)
    assert (
        bucket.maintenance.step(urgent=False, leases=(), purge_before_cas=NEVER)
        == MaintenanceStep()
    )
    steps = tidy(bucket, urgent=True)
    assert [step.is_compaction for step in steps] == [False]
    assert (
        bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER) == MaintenanceStep()
    )


def test_a_partition_that_is_always_due_keeps_no_other_from_being_compacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    # There are three steps of indexing for each step of compaction, and each supersedes more.
    monkeypatch.setattr(bucket_maintenance, "WASTEFUL_SHARE", 1e9)
    bucket, model = new_bucket(SimulatedDisk(), SimulatedDisk()), Model(PARTITIONS)

    def overwrite_all(partition: int) -> None:
        high = model.highs[partition]
        end = high + 20
        rows = [
            row(Operation.SET, b"key %d" % (seq % 20), seq, seq, size=VALUE_BYTES)
            for seq in range(high + 1, end + 1)
        ]
        write = PartitionWrite(partition, record_of(end), [chunk_of(rows, high, end)])
        bucket.commit([write])
        model.take([write])

    compacted_partitions: set[int | None] = set()
    for turn in range(60):
        overwrite_all(0)
        if turn < 10:
            overwrite_all(1)
        step = bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER)
        if step.is_compaction:
            compacted_partitions.add(step.partition)
    assert compacted_partitions == {0, 1}


def turns(bucket: BucketStorage) -> list[tuple[bool, int]]:
    """How many steps of compaction (true) and of indexing follow each other while both have
    something to do. Starts at the first step of compaction, which is due when indexing finds out
    that it is."""
    random, model = Random(3), Model(PARTITIONS)
    for _ in range(40):
        overwrite(bucket, model, random)
    tidy(bucket, urgent=True)
    for _ in range(100):
        overwrite(bucket, model, random)
    kinds = [step.is_compaction for step in tidy(bucket, urgent=True)]
    # Ends when one of the two has nothing left.
    last = min(
        max(position for position, kind in enumerate(kinds) if kind is is_indexing)
        for is_indexing in (True, False)
    )
    first_kinds = kinds[: last + 1]
    assert len(first_kinds) >= 6
    return [(kind, len(list(steps))) for kind, steps in groupby(first_kinds)][1:]


def test_indexing_and_compaction_take_turns(
    bucket: BucketStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_maintenance, "WASTEFUL_SHARE", 1e9)
    indexing, compacting = STEPS_URGENT
    runs = turns(bucket)
    assert all(length <= (compacting if kind else indexing) for kind, length in runs), runs


def test_compaction_goes_first_while_too_much_is_wasted(bucket: BucketStorage) -> None:
    indexing, compacting = STEPS_WASTEFUL
    # When too much begins to be wasted, the turn that has begun is finished first.
    runs = turns(bucket)[1:]
    assert runs
    assert all(length <= (compacting if kind else indexing) for kind, length in runs), runs


def test_a_step_is_bounded(bucket: BucketStorage) -> None:
    random, model = Random(4), Model(PARTITIONS)
    for _ in range(200):
        overwrite(bucket, model, random)
    marks = [0] * PARTITIONS
    for step in tidy(bucket, urgent=True):
        if not step.is_compaction:
            assert step.partition is not None
            assert 0 < step.indexed_seq - marks[step.partition] <= 300 + 20
            taken_in = step.indexed_seq - marks[step.partition]
            marks[step.partition] = step.indexed_seq
            for other in step.other_partitions:
                taken_in += other.indexed_seq - marks[other.partition]
                marks[other.partition] = other.indexed_seq
            assert taken_in <= 300 + 20 + 20
    assert marks == model.highs


def test_a_step_of_indexing_reads_a_bounded_part_of_all_logs_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, partitions = 20_000, 8
    monkeypatch.setattr(key_index, "READ_BYTES_MAX", limit)
    bucket = BucketStorage(SimulatedDisk(), SimulatedDisk())
    bucket.log.create(BucketRecord("b", partitions, 0), [record_of(0)] * partitions)
    bucket.open()
    for partition in range(partitions):
        for seq in range(1, 9):
            chunk = chunk_of(
                [row(Operation.SET, b"key %d" % seq, seq, seq, size=4_000)], seq - 1, seq
            )
            bucket.commit([PartitionWrite(partition, record_of(seq), [chunk])])
    read_sizes: list[int] = []
    read_chunks = bucket.log.read_chunks

    def counted(*args: Any, **options: Any) -> list[Chunk]:
        chunks = read_chunks(*args, **options)
        read_sizes.append(sum(chunk.nbytes for chunk in chunks))
        return chunks

    monkeypatch.setattr(bucket.log, "read_chunks", counted)
    step = MaintenanceStep(has_more=True)
    while step.has_more:
        read_sizes.clear()
        step = bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER)
        assert sum(read_sizes) <= limit + 5_000
    assert all(bucket.index.watermark(partition).seq == 8 for partition in range(partitions))


def test_partitions_with_little_to_index_share_a_commit(bucket: BucketStorage) -> None:
    random, model = Random(10), Model(PARTITIONS)
    while not all(model.highs):
        overwrite(bucket, model, random)
    step = bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER)
    progress = {
        other.partition: (other.indexed_seq, other.item_count) for other in step.other_partitions
    }
    assert step.partition is not None
    progress[step.partition] = step.indexed_seq, step.item_count
    for partition, (indexed, item_count) in progress.items():
        assert indexed == model.highs[partition]
        assert item_count == len(model.contents(partition, indexed))
        mark = bucket.index.watermark(partition)
        assert (mark.seq, mark.item_count) == (indexed, item_count)
    assert len(progress) > 1
    assert step.has_more == (len(progress) < PARTITIONS)


def test_an_opened_bucket_knows_how_its_disk_is_used(bucket: BucketStorage) -> None:
    random, model = Random(5), Model(PARTITIONS)
    for _ in range(200):
        overwrite(bucket, model, random)
        tidy(bucket, before_cas=max(model.highs) - 500)
    again = BucketStorage(bucket.log.ordered_map, bucket.index.ordered_map)
    again.open()
    assert again._partitions == bucket._partitions
    assert any(usage.purge_seq for usage in bucket._partitions)


def test_maintenance_resumes_after_a_full_disk() -> None:
    log, index = SimulatedDisk(), SimulatedDisk()
    bucket = new_bucket(log, index)
    random, model = Random(6), Model(PARTITIONS)
    for _ in range(200):
        overwrite(bucket, model, random)
    refusal_count = 0

    def refuse() -> None:
        nonlocal refusal_count
        refusal_count += 1
        if refusal_count % 3:
            raise DiskFullError("no room")

    log.fault = index.fault = refuse
    for _ in range(1_000):
        try:
            step = bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=1 << 40)
        except DiskFullError:
            continue
        if not step.has_more:
            break
    log.fault = index.fault = None
    tidy(bucket, urgent=True)
    for partition, high in enumerate(model.highs):
        model.check_read(bucket.log, partition, 0, high)
        mark = bucket.index.watermark(partition)
        assert (mark.seq, mark.item_count) == (high, len(model.contents(partition, high)))
        assert bucket.log.chunk_bytes()[partition] == bucket._partitions[partition].chunk_bytes
    assert refusal_count > 20


def test_compaction_does_not_wait_for_an_index_that_finds_no_room() -> None:
    """Compaction may free the room that the index needs."""
    log, index = SimulatedDisk(), SimulatedDisk()
    bucket = new_bucket(log, index)
    random, model = Random(12), Model(PARTITIONS)
    for _ in range(40):
        overwrite(bucket, model, random)
    tidy(bucket, urgent=True)
    for _ in range(100):
        overwrite(bucket, model, random)
    while not bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER).is_compaction:
        pass

    def refuse() -> None:
        raise DiskFullError("no room")

    index.fault = refuse
    compactions, steps = bucket.maintenance.compactions, list[MaintenanceStep]()

    def maintain() -> None:
        while True:
            steps.append(bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER))

    with pytest.raises(DiskFullError):
        maintain()
    assert bucket.maintenance._due_compaction() is None, "everything was compacted"
    assert bucket.maintenance.compactions > compactions
    assert all(step.is_compaction and step.has_more for step in steps)
    assert any(step.full_reason for step in steps)
    index.fault = None
    tidy(bucket, urgent=True)
    for partition, high in enumerate(model.highs):
        model.check_read(bucket.log, partition, 0, high)


def test_a_full_disk_is_compacted_below_the_usual_garbage_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 1 << 40)
    log, index = SimulatedDisk(), SimulatedDisk()
    bucket = new_bucket(log, index)
    random, model = Random(7), Model(PARTITIONS)
    log.bytes_max = COMMIT_RESERVE_BYTES + 2_000_000
    full = 0
    for _ in range(1_000):
        try:
            overwrite(bucket, model, random)
        except DiskFullError:
            full += 1
            tidy(bucket, urgent=True)
            # There is room again, so compaction stops.
            overwrite(bucket, model, random)
            assert not bucket.maintenance.is_full
    assert 3 < full < 100
    for partition, high in enumerate(model.highs):
        model.check_read(bucket.log, partition, 0, high)


def test_a_disk_with_room_for_small_steps_only_is_compacted() -> None:
    """Other programs may have taken the room that commits leave free. If compaction only tried
    large steps, it would find no room, and nothing else would free any."""
    log, index = FullDisk(), FullDisk()
    bucket = new_bucket(log, index)
    random, model = Random(13), Model(PARTITIONS)
    for _ in range(200):
        overwrite(bucket, model, random)
    chunk_bytes = sum(bucket.log.chunk_bytes().values())
    # Enough to rewrite one chunk, or to index a chunk of 20 mutations with the watermark.
    log.changes_max, index.changes_max = 4, 21
    tidy(bucket, urgent=True)
    assert sum(bucket.log.chunk_bytes().values()) < chunk_bytes / 4
    log.changes_max = index.changes_max = 1 << 62
    for _ in range(20):
        overwrite(bucket, model, random)
    tidy(bucket, urgent=True)
    for partition, high in enumerate(model.highs):
        model.check_read(bucket.log, partition, 0, high)
        mark = bucket.index.watermark(partition)
        assert (mark.seq, mark.item_count) == (high, len(model.contents(partition, high)))
    maintenance = bucket.maintenance
    step_sizes = maintenance._mutations_to_index, maintenance._bytes_to_compact
    assert step_sizes == (300, COMPACTION_BYTES)


@pytest.mark.parametrize("error", [DiskFullError("no room"), CorruptionError("damaged")])
def test_the_purge_number_is_reported_even_if_the_index_fails(
    monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    """Consumers with a position before it must roll back, because the deletions are no longer in
    the log."""
    bucket = new_bucket(SimulatedDisk(), SimulatedDisk())
    random, model = Random(8), Model(PARTITIONS)

    compacted = bucket.index.apply_compaction

    def refuse(partition: int, purged: Sequence[tuple[bytes, int]], garbage_bytes: int) -> None:
        if purged:
            raise error
        compacted(partition, purged, garbage_bytes)

    monkeypatch.setattr(bucket.index, "apply_compaction", refuse)
    purge_seqs = [0] * PARTITIONS
    failed = False
    for _ in range(200):
        overwrite(bucket, model, random)
        more = True
        while more and not failed:
            before_cas = max(model.highs) - 100
            step = bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=before_cas)
            more, failed = step.has_more, step.is_stuck
            if step.partition is not None:
                purge_seqs[step.partition] = step.purge_seq
    assert failed == isinstance(error, CorruptionError)
    assert any(purge_seqs)
    assert purge_seqs == [partition.purge_seq for partition in bucket.log.load().partitions]


def test_a_damaged_index_of_which_some_entries_were_deleted_stops_its_partition_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has overwritten the index while the server runs."""
    monkeypatch.setattr(bucket_maintenance, "INDEX_DELETE_KEYS", 1)
    log, index = LmdbOrderedMap(tmp_path / "log", is_summed=True), index_map(tmp_path)
    bucket = new_bucket(log, index)
    model = Model(PARTITIONS)
    overwrite(bucket, model, Random(1), 200)
    partition = model.highs.index(200)
    tidy(bucket, urgent=True)
    assert bucket.delete_index_entries(partition)
    with (tmp_path / "index" / "data.mdb").open("r+b") as file:
        file.write(b"\xaa" * 8192)
    (step,) = tidy(bucket, urgent=True)
    assert (step.partition, step.is_stuck) == (partition, True)
    assert "index/data.mdb is damaged" in step.damage
    figures = bucket.statistics()
    assert figures["index"] == {"bytes_used": 0, "bytes_in_file": 0}
    assert figures["damaged"] == step.damage
    bucket.close()


def index_map(path: Path) -> LmdbOrderedMap:
    return LmdbOrderedMap(path / "index", copies_values=True, is_derived=True)


def test_a_sequence_number_too_high_for_the_index_affects_its_partition_alone(
    bucket: BucketStorage,
) -> None:
    """A replica of an earlier version may have received it from another node."""
    seq = 1 << 63
    for partition, end in ((0, seq), (1, 1)):
        chunk = chunk_of([row(Operation.SET, b"k", end, 1)], 0, end)
        bucket.commit([PartitionWrite(partition, record_of(end), [chunk])])
    step = bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER)
    assert (step.partition, step.is_stuck) == (0, True)
    assert "63 bits" in step.damage
    while bucket.maintenance.step(urgent=True, leases=(), purge_before_cas=NEVER).has_more:
        pass
    assert bucket.index.watermark(1).seq == 1


def test_a_chunk_may_be_larger_than_a_step_of_compaction(
    bucket: BucketStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_maintenance, "COMPACTION_BYTES", 1_000)
    random, model = Random(9), Model(PARTITIONS)
    for _ in range(200):
        overwrite(bucket, model, random)
        tidy(bucket, urgent=True, before_cas=max(model.highs) - 100)
    assert any(usage.purge_seq for usage in bucket._partitions)
    for partition, high in enumerate(model.highs):
        assert bucket.log.chunk_bytes()[partition] == bucket._partitions[partition].chunk_bytes
        model.check_read(bucket.log, partition, 0, high)


def fill(bucket: BucketStorage, model: Model, random: Random) -> None:
    """Commits until the disk is full."""
    while True:
        overwrite(bucket, model, random)


@pytest.mark.parametrize(
    ("is_full", "is_opened_again"), [(False, False), (False, True), (True, False)]
)
def test_what_leases_have_protected_is_compacted_once_they_are_released(
    monkeypatch: pytest.MonkeyPatch, is_full: bool, is_opened_again: bool
) -> None:
    """While the disk is full, no commit supersedes anything, so there is no other reason to
    compact."""
    log, index = SimulatedDisk(), SimulatedDisk()
    bucket = new_bucket(log, index)
    random, model = Random(11), Model(PARTITIONS)
    if is_full:
        monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 1 << 40)
    log.bytes_max = COMMIT_RESERVE_BYTES + 2_000_000
    with pytest.raises(DiskFullError):
        fill(bucket, model, random)
    if not is_full:
        log.bytes_max = 1 << 62
        overwrite(bucket, model, random)
    leases = [(partition, 0, high) for partition, high in enumerate(model.highs)]
    held_leases: list[list[tuple[int, int, int]]] = [leases, leases[1:], []]
    sizes: list[list[int]] = []
    for held in held_leases:
        tidy(bucket, urgent=True, leases=held)
        step = bucket.maintenance.step(urgent=True, leases=held, purge_before_cas=NEVER)
        assert step == MaintenanceStep(), "it is not compacted over and over"
        sizes.append([bucket.log.chunk_bytes()[partition] for partition in range(PARTITIONS)])
        if is_opened_again:
            bucket = BucketStorage(log, index)
            bucket.open()
    compacted = 2 * KEYS * (VALUE_BYTES + 100)
    assert [[size < compacted for size in held_sizes] for held_sizes in sizes] == [
        [False, False],
        [True, False],
        [True, True],
    ]
    overwrite(bucket, model, random)
    for partition, high in enumerate(model.highs):
        model.check_read(bucket.log, partition, 0, high)
