"""A flipped bit in a record of one partition, or of a lease: what is refused, and what is not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import pytest

from tests.kit.effort import effort
from tests.storage.record_damage import flip, flip_in_file, records
from tests.storage.small_directory import BUCKET, PARTITIONS, PLENTY, make, wants
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Cas, Operation, PartitionState, SeqNo
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.directory import DataDirectory
from upr_server.storage.errors import CorruptionError
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.offline.bucket_files import open_bucket, open_map
from upr_server.storage.offline.check import BucketCheck
from upr_server.storage.offline.dump import BucketDump, DumpOptions
from upr_server.storage.offline.findings import Finding, Problem
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import (
    BUCKET as BUCKET_RECORD,
)
from upr_server.storage.records import (
    CHUNK,
    CLEAN_STOP,
    FLOOR,
    LEASE,
    PARTITION,
    PARTITION_MAP,
    PURGE,
    TOKEN,
    PartitionRecord,
    chunk_head,
    partition_key,
    with_checksum,
)
from upr_server.storage.stored_bucket import StoredBucket

DAMAGED: Final = 1
OTHERS: Final = [partition for partition in range(PARTITIONS) if partition != DAMAGED]
BITS: Final = effort(24, 400)
OF_A_PARTITION: Final = {
    "state": PARTITION,
    "answer to a publisher": TOKEN,
    "purge number": PURGE,
    "floor": FLOOR,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original")
    make(path)
    return path


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def folder_of(data: Path) -> Path:
    return data / "buckets" / BUCKET


def started(data: Path) -> tuple[BucketStorage, StoredBucket]:
    """The bucket as a starting server opens it."""
    storage = BucketStorage(*DataDirectory(data, bytes_max=1 << 30).open(BUCKET))
    return storage, storage.open()


def bits_of(value: bytes) -> list[int]:
    """The bits to flip: a sample of each value, or all. There are always some that change the sum
    of all records, and some that only the checksum detects."""
    count = 8 * len(value)
    return sorted(Random(7).sample(range(count), min(count, BITS)))


def damages(original: Path, data: Path, kind: bytes) -> Iterator[tuple[bytes, int]]:
    """Damages the newest record of a kind of the damaged partition, one bit at a time."""
    key, value = list(records(folder_of(original), partition_key(kind, DAMAGED)).items())[-1]
    for bit in bits_of(value):
        shutil.rmtree(data)
        shutil.copytree(original, data)
        flip(folder_of(data), key, bit)
        yield key, bit


def contents(storage: BucketStorage, stored_bucket: StoredBucket, partition: int) -> object:
    """Everything that can be read of a partition."""
    high = stored_bucket.partitions[partition].record.high
    chunks = storage.log.read_chunks(partition, 0, high, bytes_max=PLENTY)
    items = storage.items.find(partition, wants())
    return stored_bucket.partitions[partition], [bytes(chunk) for chunk in chunks], items


def of_damaged_partition(data: Path) -> list[tuple[bytes, bytes]]:
    """Every record in the log of the damaged partition."""
    kinds = (*OF_A_PARTITION.values(), CHUNK)
    of_all = [records(folder_of(data), partition_key(kind, DAMAGED)) for kind in kinds]
    return [record for of_kind in of_all for record in of_kind.items()]


def write_to(stored_bucket: StoredBucket, partition: int) -> PartitionWrite:
    """Writes one more change."""
    record = stored_bucket.partitions[partition].record
    seq = SeqNo(record.high + 1)
    row = Mutation(Operation.SET, b"new", b"value", seq, Cas(record.last_cas + 1))
    chunk = Chunk.build([row], record.high, seq)
    return PartitionWrite(partition, msgspec.structs.replace(record, high=seq), [chunk])


@pytest.mark.parametrize("kind", OF_A_PARTITION)
def test_a_damaged_record_refuses_its_partition_alone(
    original: Path, data: Path, kind: str
) -> None:
    storage, before = started(original)
    expected = {partition: contents(storage, before, partition) for partition in OTHERS}
    storage.close()
    for key, bit in damages(original, data, OF_A_PARTITION[kind]):
        damaged_records = of_damaged_partition(data)
        storage, stored_bucket = started(data)
        where = (key, bit)
        assert "mismatch" in stored_bucket.partitions[DAMAGED].damage, where
        assert stored_bucket.partitions[DAMAGED].record.state == PartitionState.DEAD
        assert {p: contents(storage, stored_bucket, p) for p in OTHERS} == expected, where
        assert (stored_bucket.leases, stored_bucket.is_clean) == (before.leases, before.is_clean)
        assert storage.statistics()["damaged_partitions"] == [DAMAGED]
        # Damaged records are not overwritten, and the other partitions accept writes.
        assert_not_written_to(storage, before)
        storage.commit([write_to(before, 0)])
        while storage.maintenance.step(urgent=True, leases=(), purge_before_cas=1 << 62).has_more:
            pass
        storage.close()
        assert of_damaged_partition(data) == damaged_records, where
        # The next start finds the same damage, though the sum of all records has changed.
        storage, stored_bucket = started(data)
        assert "mismatch" in stored_bucket.partitions[DAMAGED].damage
        assert stored_bucket.partitions[0].record.high == before.partitions[0].record.high + 1
        storage.close()


def assert_not_written_to(storage: BucketStorage, before: StoredBucket) -> None:
    """Checks that no write changes the damaged partition, alone or together with another."""
    record = before.partitions[DAMAGED].record
    for refused_call in (
        lambda: storage.commit([write_to(before, DAMAGED)]),
        lambda: storage.commit([write_to(before, 0), write_to(before, DAMAGED)]),
        lambda: storage.truncate(DAMAGED, record, ()),
    ):
        with pytest.raises(CorruptionError, match="is not written to"):
            refused_call()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_partition_map_leaves_a_damaged_record_as_it_is(data: Path, is_known: bool) -> None:
    """The map and the other partitions' records are stored, whether the damage is already known or
    found now."""
    folder, key, bit = folder_of(data), partition_key(PARTITION, DAMAGED), 60
    value = records(folder)[key]
    flip(folder, key, bit)
    damaged_records = of_damaged_partition(data)
    if not is_known:
        flip(folder, key, bit)
    storage, before = started(data)
    if not is_known:
        flip_in_file(folder / "log" / "data.mdb", key, value, bit)
    changed_records = [
        (
            number,
            msgspec.structs.replace(
                partition.record, state=PartitionState.REPLICA, high=SeqNo(0), partial=None
            )
            if number == DAMAGED
            else msgspec.structs.replace(partition.record, state=PartitionState.PENDING),
        )
        for number, partition in enumerate(before.partitions)
    ]
    damages = storage.put_partition_map("{}", changed_records)
    assert list(damages) == [DAMAGED]
    assert "mismatch" in damages[DAMAGED]
    assert storage.statistics()["damaged_partitions"] == [DAMAGED]
    with pytest.raises(CorruptionError, match="is not written to"):
        storage.commit([write_to(before, DAMAGED)])
    storage.close()
    assert of_damaged_partition(data) == damaged_records
    storage, stored_bucket = started(data)
    assert stored_bucket.partition_map == "{}"
    for partition in OTHERS:
        assert stored_bucket.partitions[partition].record == changed_records[partition][1]
    assert "mismatch" in stored_bucket.partitions[DAMAGED].damage
    storage.close()


@pytest.mark.parametrize("kind", OF_A_PARTITION)
def test_an_emptied_partition_has_no_damage(original: Path, data: Path, kind: str) -> None:
    empty = PartitionRecord(PartitionState.REPLICA, (), SeqNo(0), 0)
    for _ in damages(original, data, OF_A_PARTITION[kind]):
        storage, _ = started(data)
        storage.empty_partition(DAMAGED, empty)
        assert storage.statistics()["damaged_partitions"] == []
        storage.close()
        storage, stored_bucket = started(data)
        partition = stored_bucket.partitions[DAMAGED]
        assert (partition.record, partition.damage, partition.tokens) == (empty, "", [])
        assert all(not lease.is_whole for lease in stored_bucket.leases)
        storage.close()
        assert records(folder_of(data), partition_key(CHUNK, DAMAGED)) == {}
        assert not list(problems(data))


def problems(data: Path) -> Iterator[Problem]:
    log, index = open_bucket(folder_of(data))
    try:
        for finding in BucketCheck(BUCKET, log, index).run():
            if isinstance(finding, Problem):
                yield finding
    finally:
        log.close()
        index.close()


@pytest.mark.parametrize("kind", OF_A_PARTITION)
def test_the_check_names_the_damaged_record_and_nothing_else(
    original: Path, data: Path, kind: str
) -> None:
    for key, bit in damages(original, data, OF_A_PARTITION[kind]):
        (problem,) = problems(data)
        assert "mismatch" in problem.description, (key, bit)


def test_a_dump_has_the_chunks_of_a_partition_whose_record_is_damaged(
    original: Path, data: Path
) -> None:
    lines, findings = dump(original)
    assert lines
    assert not [finding for finding in findings if isinstance(finding, Problem)]
    flip(folder_of(data), partition_key(PARTITION, DAMAGED), 50)
    damaged_lines, findings = dump(data)
    assert damaged_lines == lines
    (problem,) = [finding for finding in findings if isinstance(finding, Problem)]
    assert problem.partition == DAMAGED
    assert "mismatch" in problem.description


def dump(data: Path) -> tuple[bytes, list[Finding]]:
    """What a dump prints, and the damage that it reports."""
    log = open_map(folder_of(data) / "log")
    with tempfile.TemporaryFile() as output:
        findings = list(BucketDump(BUCKET, log, DumpOptions(), output.fileno()).run())
        log.close()
        output.seek(0)
        return output.read(), findings


def test_a_damaged_lease_is_lost_and_nothing_else(original: Path, data: Path) -> None:
    storage, before = started(original)
    storage.close()
    ((key, value),) = records(folder_of(original), LEASE).items()
    for bit in bits_of(value):
        shutil.rmtree(data)
        shutil.copytree(original, data)
        flip(folder_of(data), key, bit)
        storage, stored_bucket = started(data)
        assert list(stored_bucket.damaged_leases) == [before.leases[0].lease_id]
        assert "mismatch" in stored_bucket.damaged_leases[before.leases[0].lease_id]
        assert stored_bucket.leases == ()
        assert stored_bucket.partitions == before.partitions
        storage.log.delete_leases(stored_bucket.damaged_leases)
        storage.close()
        storage, stored_bucket = started(data)
        assert (stored_bucket.leases, stored_bucket.damaged_leases) == ((), {})
        storage.close()


def test_a_damaged_clean_stop_marker_counts_as_missing(original: Path, data: Path) -> None:
    flip(folder_of(data), CLEAN_STOP, 3)
    storage, stored_bucket = started(data)
    assert not stored_bucket.is_clean
    storage.log.start_serving(())
    storage.close()
    storage, stored_bucket = started(data)
    assert not stored_bucket.is_clean
    assert not any(partition.damage for partition in stored_bucket.partitions)
    storage.close()


def test_two_damaged_partitions(original: Path, data: Path) -> None:
    for partition, bit in ((0, 5), (2, 70)):
        flip(folder_of(data), partition_key(PARTITION, partition), bit)
    storage, stored_bucket = started(data)
    assert [bool(partition.damage) for partition in stored_bucket.partitions] == [True, False, True]
    storage.close()


def test_a_damaged_head_of_a_chunk_refuses_no_bucket(original: Path, data: Path) -> None:
    chunks = records(folder_of(original), partition_key(CHUNK, DAMAGED))
    key, _ = min(chunks.items(), key=lambda item: len(item[1]))
    for bit in range(0, 128, 5):
        shutil.rmtree(data)
        shutil.copytree(original, data)
        flip(folder_of(data), key, bit)
        storage, stored_bucket = started(data)
        assert not any(partition.damage for partition in stored_bucket.partitions)
        with pytest.raises(CorruptionError):
            storage.log.read_chunks(DAMAGED, int.from_bytes(key[3:]) - 1, 1 << 62, bytes_max=1)
        storage.close()


def test_damage_of_the_whole_bucket_still_refuses_it(data: Path) -> None:
    flip(folder_of(data), BUCKET_RECORD, 40)
    with pytest.raises(CorruptionError):
        started(data)


def test_damage_of_more_than_one_byte_still_refuses_the_bucket(data: Path) -> None:
    """Two bytes at the front of a record are wrong; the rest could come from an old page."""
    key = partition_key(PARTITION, DAMAGED)
    flip(folder_of(data), key, 3)
    flip(folder_of(data), key, 30)
    with pytest.raises(CorruptionError, match="does not hold what its last commit left"):
        started(data)


def test_an_old_record_beside_a_damaged_one_is_not_taken_for_the_newest(data: Path) -> None:
    folder = folder_of(data)
    other = partition_key(PARTITION, 0)
    current = records(folder)[other]
    storage, stored_bucket = started(data)
    storage.commit([write_to(stored_bucket, 0)])
    storage.close()
    newer = records(folder)[other]
    assert len(newer) == len(current)
    file = folder / "log" / "data.mdb"
    # A stale page would have the record before the last, with a correct checksum.
    file.write_bytes(file.read_bytes().replace(other + newer, other + current))
    flip(folder, partition_key(PARTITION, DAMAGED), 3)
    with pytest.raises(CorruptionError, match="does not hold what its last commit left"):
        started(data)


@pytest.mark.parametrize("kind", [TOKEN, LEASE, PARTITION_MAP, CHUNK])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_record_damaged_at_run_time_and_then_written_or_deleted_refuses_no_bucket(
    tmp_path: Path, kind: bytes, is_replaced: bool
) -> None:
    """The sum over all records was computed from the record as it was written."""
    key, (first_value, second_value) = _two_values(kind)
    for bit in range(0, 128, 9):
        folder = tmp_path / f"{bit}"
        folder.mkdir()
        log = LmdbOrderedMap(folder, is_summed=True)
        with log.write() as transaction:
            transaction.put(key, first_value)
        flip_in_file(folder / "data.mdb", key, first_value, bit)
        with log.read() as reading:
            assert bytes(reading.get(key) or b"") != first_value
        with log.write() as transaction:
            if is_replaced:
                transaction.put(key, second_value)
            else:
                transaction.delete(key)
        log.close()
        log = LmdbOrderedMap(folder, is_summed=True)
        log.verify()
        log.close()


def _two_values(kind: bytes) -> tuple[bytes, list[bytes]]:
    """The key of a record of a kind, and two values that it may have."""
    if kind == CHUNK:
        key = partition_key(CHUNK, DAMAGED) + bytes(8)
        return key, [chunk_head(key, crc) + bytes(40) for crc in (1, 2)]
    key = partition_key(kind, DAMAGED) + bytes(24)
    return key, [with_checksum(key, value) for value in (b"the first value", b"the second")]
