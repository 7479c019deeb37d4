"""`upr-server mend`: a replica empties its damaged partitions, and nothing else changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tests.storage.record_damage import flip
from tests.storage.small_directory import BUCKET, PARTITIONS, PLENTY, make
from upr_protocol.ids import PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_server.cli import main
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.directory import DataDirectory, lock
from upr_server.storage.errors import DataDirectoryError
from upr_server.storage.offline.mend import empty_damaged_replicas
from upr_server.storage.records import PARTITION, partition_key
from upr_server.storage.stored_bucket import StoredPartition


def opened(data: Path) -> BucketStorage:
    return BucketStorage(*DataDirectory(data).open(BUCKET))


def set_state(data: Path, state: PartitionState) -> None:
    storage = opened(data)
    records = [
        (index, msgspec.structs.replace(partition.record, state=state))
        for index, partition in enumerate(storage.open().partitions)
    ]
    storage.put_partition_map("{}", records)
    storage.close()


def stored(data: Path) -> list[tuple[StoredPartition, list[bytes]]]:
    """Each partition, and its chunks."""
    storage = opened(data)
    partitions = []
    for index, partition in enumerate(storage.open().partitions):
        high = partition.record.high
        chunks = storage.log.read_chunks(index, 0, high, bytes_max=PLENTY) if high else []
        partitions.append((partition, [bytes(chunk) for chunk in chunks]))
    storage.close()
    return partitions


def flip_a_chunk(data: Path, partition: int) -> None:
    """Flips a bit at the end of a partition's first chunk."""
    storage = opened(data)
    high = storage.log.high_seq(partition)
    chunk = bytes(storage.log.read_chunks(partition, 0, high, bytes_max=PLENTY)[0])
    storage.close()
    path = data / "buckets" / BUCKET / "log" / "data.mdb"
    content = bytearray(path.read_bytes())
    # Pages that are free again may hold the chunk, too.
    position = content.find(chunk)
    while position >= 0:
        content[position + len(chunk) - 9] ^= 1
        position = content.find(chunk)
    path.write_bytes(content)


@pytest.mark.parametrize("state", PartitionState)
def test_only_a_replica_empties_a_damaged_partition(tmp_path: Path, state: PartitionState) -> None:
    make(tmp_path)
    set_state(tmp_path, state)
    before = stored(tmp_path)
    assert list(empty_damaged_replicas(tmp_path)) == []
    assert stored(tmp_path) == before
    flip_a_chunk(tmp_path, 1)
    (damaged,) = empty_damaged_replicas(tmp_path)
    is_replica = state is PartitionState.REPLICA
    assert (damaged.bucket, damaged.partition, damaged.is_emptied) == (BUCKET, 1, is_replica)
    if not is_replica:
        assert list(empty_damaged_replicas(tmp_path)) == [damaged]
        return
    assert list(empty_damaged_replicas(tmp_path)) == []
    after = stored(tmp_path)
    for partition in range(PARTITIONS):
        if partition != 1:
            assert after[partition] == before[partition]
    emptied, chunks = after[1]
    assert (emptied.record.high, emptied.indexed_seq, emptied.item_count, chunks) == (0, 0, 0, [])
    assert not emptied.tokens
    assert emptied.record.last_cas == before[1][0].record.last_cas


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path)
    assert lock(tmp_path) is not None
    with pytest.raises(DataDirectoryError, match="is in use by a server"):
        list(empty_damaged_replicas(tmp_path))


def test_a_bucket_that_cannot_be_opened_keeps_no_other_from_being_mended(tmp_path: Path) -> None:
    make(tmp_path)
    set_state(tmp_path, PartitionState.REPLICA)
    for name in ("aaa", "zzz"):
        other_folder = tmp_path / "buckets" / name
        shutil.copytree(tmp_path / "buckets" / BUCKET, other_folder)
        log = other_folder / "log" / "data.mdb"
        log.write_bytes(bytes(log.stat().st_size))
    flip_a_chunk(tmp_path, 1)
    result = CliRunner().invoke(main, ["mend", "--data-dir", str(tmp_path)])
    first, second, third = result.output.splitlines()
    assert first.startswith("bucket aaa: not mended: ")
    assert second.startswith(f"bucket {BUCKET}, partition 1: emptied")
    assert third.startswith("bucket zzz: not mended: ")
    assert result.exit_code == 1
    assert stored(tmp_path)[1][1] == []


ACTIVE = Assignment(active="a", replicas={"b": ""})
REPLICA = Assignment(active="b", replicas={"a": ""})
OF_BOTH = Assignment(active="c", replicas={"a": "", "b": ""})


@pytest.mark.parametrize(
    ("others", "of_the_damaged", "is_emptied"),
    [
        (ACTIVE, REPLICA, True),
        (REPLICA, REPLICA, True),
        (ACTIVE, ACTIVE, False),
        (REPLICA, ACTIVE, False),
        (ACTIVE, Assignment(active="b"), False),
        # This node may be a or b. Both are replicas; or one of them is active.
        (OF_BOTH, OF_BOTH, True),
        (OF_BOTH, REPLICA, False),
    ],
)
@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_partition_whose_record_is_damaged_is_emptied_if_the_map_says_replica(
    tmp_path: Path,
    others: Assignment,
    of_the_damaged: Assignment,
    is_emptied: bool,
    is_suspect: bool,
) -> None:
    make(tmp_path)
    partitions = [others] * PARTITIONS
    partitions[1] = of_the_damaged
    nodes = {name: f"127.0.0.1:{port}" for port, name in enumerate("abc", 9001)}
    document = PartitionMap(
        bucket=BUCKET, revision=7, nodes=nodes, partitions=tuple(partitions)
    ).encode()
    storage = opened(tmp_path)
    state = others.state_of("a")
    if is_suspect and state is PartitionState.ACTIVE:
        state = PartitionState.PENDING
    records = [
        (index, msgspec.structs.replace(partition.record, state=state))
        for index, partition in enumerate(storage.open().partitions)
    ]
    storage.put_partition_map(document, records)
    storage.close()
    before = stored(tmp_path)
    folder = tmp_path / "buckets" / BUCKET
    flip(folder, partition_key(PARTITION, 1), 50)
    (damaged,) = empty_damaged_replicas(tmp_path)
    assert (damaged.partition, damaged.is_emptied) == (1, is_emptied)
    after = stored(tmp_path)
    assert (after[0], after[2]) == (before[0], before[2])
    emptied, chunks = after[1]
    assert chunks == []
    assert (emptied.record.state, emptied.damage == "") == (
        (PartitionState.REPLICA, True) if is_emptied else (PartitionState.DEAD, False)
    )
